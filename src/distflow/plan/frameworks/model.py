"""What an adapter is given and what it returns: both are values of the plan, symbolic where only the nodes know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from distflow.layout.claims.launchers import PythonCommand, python_command
from distflow.layout.ranks import TaskRanks, World
from distflow.plan.model import PlannedFile, address_of
from distflow.spec.model import Launcher, ResourceSpec

__all__ = ["ADDRESS", "PORT", "Framework", "Place", "Started", "config_file"]

ADDRESS, PORT = "@@MASTER_ADDR@@", "@@MASTER_PORT@@"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One task of a world, and the command that the spec gives it."""

    group: str
    world: World
    ranks: TaskRanks
    argv: tuple[str, ...]
    resource: ResourceSpec = ResourceSpec()
    launcher: Launcher = Launcher()
    given: Mapping[str, str] = field(default_factory=dict)
    """The variables that the spec gives the task."""

    @property
    def is_master(self) -> bool:
        """Whether it holds rank 0."""
        return self.ranks.node_rank == 0

    @property
    def nodes(self) -> str:
        """How many tasks the world has."""
        return str(len(self.world.tasks))

    @property
    def node_rank(self) -> str:
        """Its number among them."""
        return str(self.ranks.node_rank)

    @property
    def address(self) -> str:
        """Of its own node."""
        return address_of(self.ranks.task)

    @property
    def python(self) -> PythonCommand:
        """The command in parts; ``layout.claims.launchers`` has refused those that are not Python's."""
        found = python_command(self.argv)
        if isinstance(found, PythonCommand):
            return found
        raise AssertionError(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What the task runs in the end."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of every task of a world. Variables of the spec override them."""
    files: tuple[PlannedFile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One row of the table."""

    start: Callable[[Place], Started]
    ends_with_lead: bool = False
    """Whether only the lead's command ends by itself: the other tasks serve it, and are stopped when it has completed."""


def config_file(name: str, text: str) -> PlannedFile:
    """Return a file next to ``distributed.json``, as ``@@ATTEMPT_DIR@@/config/<name>``."""
    return PlannedFile(path=f"config/{name}", shown=name, text=text, size=len(text.encode()))
