"""The rank layout of a group: the global ranks of each task.

A *world* consists of the tasks of a group that share ranks 0 … world_size−1. Each task holds ``size`` consecutive ranks from
``offset``; the task with rank 0 is the master. The terms are torch's (``RANK``, ``WORLD_SIZE``) and those of OSMO's PyTorch
tutorial (``--offset``, ``--size``).
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["TaskRanks", "WorldLayout", "rank_label"]


class TaskRanks(Struct, frozen=True, kw_only=True):
    """The ranks of one task."""

    task: str
    offset: int
    """First global rank."""
    size: int
    """The number of ranks; each is one process."""
    node_rank: int
    """The task's position in its world, ordered by offset."""

    @property
    def ranks(self) -> range:
        """The global ranks."""
        return range(self.offset, self.offset + self.size)

    @property
    def text(self) -> str:
        """Return ``8-15``, or ``8`` for a single rank."""
        return str(self.offset) if self.size == 1 else f"{self.offset}-{self.offset + self.size - 1}"


def rank_label(text: str) -> str:
    """Return ``rank 3`` for ``3``, ``ranks 0-7`` for ``0-7``, and ``""`` for ``""``."""
    return f"rank{'s' if '-' in text else ''} {text}" if text else ""


class WorldLayout(Struct, frozen=True, kw_only=True):
    """A correct layout: every rank of 0 … world_size−1 is held exactly once."""

    world_size: int
    tasks: tuple[TaskRanks, ...]
    """In the order of their ranks."""
    style: str
    """The source of the ranks: ``ranks`` (the field), ``torchrun``, or ``flags`` (other flags, or variables)."""
    port: int | None = None
    """The rendezvous port in the spec; ``None`` if distflow chooses a free one."""
    smaller: tuple[WorldLayout, ...] = ()
    """The smaller worlds that an elastic group may run as, the largest first. Each has only the first tasks of this world."""

    @property
    def master(self) -> str:
        """The name of the task that holds rank 0."""
        return self.tasks[0].task

    def of(self, task: str) -> TaskRanks:
        """Return the ranks of the task with this name."""
        return next(item for item in self.tasks if item.task == task)
