"""What the supervisor knows at one instant, and what it decides: plain values between the loop and the pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from distflow.backends.base import AttemptKey, NodeUp
from distflow.documents.quantities import bytes_text
from distflow.layout.placement.node_placement import Free
from distflow.plan.model import Plan
from distflow.pools.model import Node, Pool
from distflow.state.record import Event, GroupRecord, TaskRecord, WorkflowRecord
from distflow.supervisor.commands import Command, CommandId

__all__ = [
    "Decision",
    "Hold",
    "LastDecision",
    "NodeView",
    "Share",
    "Workflow",
    "WorkflowView",
    "World",
    "key_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node as it was seen last."""

    node: Node
    up: bool = False
    since: float = 0.0
    """When it became reachable or unreachable; for one never reached: since it is tried."""
    error: str = ""
    gpus: int | None = None
    """Capacity, from the configuration or as found there; ``None``: not known."""
    reported: NodeUp | None = None
    """What the node said of itself; ``None``: it has not been reached."""
    machine: str = ""
    """Equal for nodes that are one machine (``NodeUp.machine``); empty when not known."""
    cpus: int | None = None
    memory: int | None = None
    whole: Free = field(init=False, repr=False, compare=False)
    """What placement sees of it when nothing runs there; most of a large pool is looked at so, again and again."""

    def __post_init__(self) -> None:
        """Work out what placement sees."""
        node = self.node
        whole = Free(
            node=node.name, gpus=self.gpus, cpus=self.cpus, memory=self.memory, platform=node.platform, labels=node.labels,
            all_gpus=self.gpus, all_cpus=self.cpus, all_memory=self.memory, note=self._note(),
        )  # fmt: skip
        object.__setattr__(self, "whole", whole)

    def _note(self) -> str:
        """Say why it has less than its configuration says."""
        node, seen = self.node, self.reported
        if seen is None:
            return ""
        amounts = (
            (self.gpus, node.gpus, f"{node.gpus} GPU{'s' * (node.gpus != 1)}, the node reports {seen.gpus}"),
            (self.cpus, node.cpus, f"{node.cpus} CPU{'s' * (node.cpus != 1)}, the node reports {seen.cpus}"),
            (
                self.memory,
                node.memory,
                f"{bytes_text(node.memory or 0)} of memory, the node reports {bytes_text(seen.memory or 0)}",
            ),
        )
        less = [text for usable, configured, text in amounts if usable is not None and usable < (configured or 0)]
        return f"the configuration says {'; '.join(less)}" if less else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workflow:
    """A workflow's record and its plan."""

    record: WorkflowRecord
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """What a task, the master's port or a stray holds of a node."""

    node: str
    gpus: int = 0
    cpus: int = 0
    memory: int = 0
    port: int | None = None
    is_stray: bool = False
    """By an attempt that was given up, and that nobody has seen stopped yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What the queue looks at of a workflow."""

    workflow: Workflow
    waiting: tuple[GroupRecord, ...]
    """Its groups that wait for nodes."""
    holds: tuple[Hold, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowView:
    """A workflow as a decision left it."""

    share: Share
    wake_at: float
    """Until then nothing follows of itself; minus infinity: something followed just now or is under way, so more may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastDecision:
    """What one decision leaves to the next, which then need not look at what stayed as it was.

    Records, views, pools and the mappings of them are replaced, never changed: the same object says that nothing happened.
    """

    at: float = math.inf
    """When it was decided; what is older than that (our clock was set back) is looked at anew."""
    pools: Mapping[str, Pool] | None = None
    nodes: Mapping[tuple[str, str], NodeView] | None = None
    views: Mapping[str, WorkflowView] = field(default_factory=dict)
    """By workflow (uuid)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything that a decision may depend on, but the time."""

    workflows: tuple[Workflow, ...]
    """Those with unfinished work, oldest submission first."""
    pools: Mapping[str, Pool]
    nodes: Mapping[tuple[str, str], NodeView]
    """By pool and node."""
    in_flight: frozenset[CommandId] = frozenset()
    """Identities of the commands that have not been answered."""
    lines: Mapping[tuple[str, str, str], tuple[str, ...]] = field(default_factory=dict)
    """The last lines that failed tasks printed, by workflow (uuid), group and task."""
    alive_at: Mapping[tuple[str, str, str], float] = field(default_factory=dict)
    """When running tasks gave their last sign of life, output or heartbeat, where that matters; likewise.

    Like ``lines``, it is looked at when something else says that it is time: a new sign alone changes nothing at once."""
    rest: LastDecision = field(default_factory=LastDecision)
    """What the decision before left; without it the same is decided, at more cost."""


@dataclass(slots=True, kw_only=True)
class Decision:
    """What follows: changed records with the events that tell of it, commands, and when to look again."""

    records: dict[str, WorkflowRecord] = field(default_factory=dict)
    """Changed workflows by uuid."""
    events: list[Event] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    wake_at: float | None = None
    """When time alone changes something; ``None``: never."""
    rest: LastDecision = field(default_factory=LastDecision)

    def wake(self, at: float) -> None:
        """Look again at ``at`` at the latest."""
        self.wake_at = at if self.wake_at is None else min(self.wake_at, at)


def key_of(record: WorkflowRecord, group: GroupRecord, task: TaskRecord) -> AttemptKey | None:
    """Return where an attempt is, or ``None`` when it has no node yet."""
    if task.node is None:
        return None
    return AttemptKey(workflow=record.uuid, group=group.name, task=task.name, attempt=task.attempt, node=task.node)
