"""Input and output of a decision: plain values between the loop and the pure functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from msgspec import Struct, field

from distflow.backends.base import AttemptKey, NodeUp
from distflow.documents.notify import NotifyTarget
from distflow.documents.quantities import bytes_text
from distflow.layout.placement import Free
from distflow.plan.model import Plan
from distflow.pools.model import Node, Pool
from distflow.state.notification import Notification
from distflow.state.record import EventRecord, GroupRecord, TaskRecord, WorkflowRecord
from distflow.supervisor.commands import Command, CommandId

__all__ = [
    "Decision",
    "HeldResources",
    "LastDecision",
    "NodeView",
    "PoolUsage",
    "Snapshot",
    "StoredWorkflow",
    "WorkflowView",
    "attempt_key",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """The last known state of a node."""

    node: Node
    up: bool = False
    since: float = 0.0
    """When it became reachable or unreachable; for a node that was never reached, the time of the first try."""
    error: str = ""
    needs_action: bool = False
    """Whether it is unreachable until a person repairs something (``NodeDown.needs_action``)."""
    is_engine_away: bool = False
    """Whether its engine cannot be asked either (``NodeDown.is_engine_away``)."""
    engine_back_at: float = 0.0
    """When its engine could be asked again; 0 if it always could."""
    gpus: int | None = None
    """Capacity, from the configuration or as the node reported it; ``None`` if it is not known."""
    reported: NodeUp | None = None
    """The node's report about itself; ``None`` if it has not been reached."""
    lease_directory_id: str = ""
    """Equal for nodes that are one machine (``NodeUp.lease_directory_id``); empty if it is not known."""
    cpus: int | None = None
    memory: int | None = None
    whole: Free = dataclasses.field(init=False, repr=False, compare=False)
    """The idle node as placement sees it. It is computed once, because most nodes of a large pool are idle."""

    def __post_init__(self) -> None:
        """Compute ``whole``."""
        node = self.node
        whole = Free(
            node=node.name, gpus=self.gpus, cpus=self.cpus, memory=self.memory, platform=node.platform, labels=node.labels,
            all_gpus=self.gpus, all_cpus=self.cpus, all_memory=self.memory, note=self._note(),
        )  # fmt: skip
        object.__setattr__(self, "whole", whole)

    def lost_at(self, lost_after_s: float, now: float) -> float:
        """Return when an unreachable node is given up. This time moves on with ``now`` while its engine cannot be asked."""
        return (now if self.is_engine_away else max(self.since, self.engine_back_at)) + lost_after_s

    def _note(self) -> str:
        """Return why the node has less than its configuration says."""
        node, reported = self.node, self.reported
        if reported is None:
            return ""
        amounts = (
            (self.gpus, node.gpus, f"{node.gpus} GPU{'s' * (node.gpus != 1)}, the node reports {reported.gpus}"),
            (self.cpus, node.cpus, f"{node.cpus} CPU{'s' * (node.cpus != 1)}, the node reports {reported.cpus}"),
            (
                self.memory,
                node.memory,
                f"{bytes_text(node.memory or 0)} of memory, the node reports {bytes_text(reported.memory or 0)}",
            ),
        )
        less = [text for usable, configured, text in amounts if usable is not None and usable < (configured or 0)]
        return f"the configuration says {'; '.join(less)}" if less else ""


class StoredWorkflow(Struct, frozen=True, kw_only=True):
    """A workflow's record, its plan, and the targets of its notifications."""

    record: WorkflowRecord
    plan: Plan
    notify: tuple[NotifyTarget, ...] = ()


class HeldResources(Struct, frozen=True, kw_only=True):
    """Resources of a node that a task or an orphan attempt holds, or the port of a group's master."""

    node: str
    gpus: int = 0
    cpus: int = 0
    memory: int = 0
    port: int | None = None
    is_orphan: bool = False
    """Whether the holder is an attempt that was given up and may still run."""


class PoolUsage(Struct, frozen=True, kw_only=True):
    """The groups of a workflow that wait for nodes, and the resources that its groups and orphan attempts hold."""

    workflow: StoredWorkflow
    waiting: tuple[GroupRecord, ...]
    holds: tuple[HeldResources, ...]


class WorkflowView(Struct, frozen=True, kw_only=True):
    """A workflow after a decision."""

    usage: PoolUsage
    wake_at: float
    """When the next step is due without an observation. Infinity: never. Minus infinity: at the next decision.

    The latter holds if the workflow has changed, or if it has events, or commands that are due or in flight.
    """


class LastDecision(Struct, frozen=True, kw_only=True):
    """The part of a decision's result that the next decision needs to skip everything unchanged.

    Records, views, pools and the mappings of them are replaced, never changed: the same object means that nothing happened.
    """

    at: float = math.inf
    """The time of the decision; infinite if there was none. If it is in the future, everything is decided again."""
    pools: Mapping[str, Pool] | None = None
    nodes: Mapping[tuple[str, str], NodeView] | None = None
    views: Mapping[str, WorkflowView] = field(default_factory=dict)
    """By workflow (uuid)."""


class Snapshot(Struct, frozen=True, kw_only=True):
    """Everything that a decision may depend on, except the time."""

    workflows: tuple[StoredWorkflow, ...]
    """Workflows with unfinished work, oldest submission first."""
    pools: Mapping[str, Pool]
    nodes: Mapping[tuple[str, str], NodeView]
    """By pool and node."""
    in_flight: frozenset[CommandId] = frozenset()
    """Identities of the commands that have not been answered."""
    lines: Mapping[tuple[str, str, str], tuple[str, ...]] = field(default_factory=dict)
    """The last lines of the output of tasks in unfinished groups, by workflow (uuid), group and task."""
    alive_at: Mapping[tuple[str, str, str], float] = field(default_factory=dict)
    """When tasks of running groups last wrote output or sent a heartbeat, by workflow (uuid), group and task.

    It has only groups with ``hang_timeout`` or with ranks that failed unnoticed. Like a change of ``lines``, a change of it
    alone does not cause a new decision. Another change does, or the time ``wake_at``.
    """
    last_decision: LastDecision = field(default_factory=LastDecision)
    """The previous decision. Without it, the decision takes longer, and may repeat notifications, which the store ignores."""


class Decision(Struct, kw_only=True):
    """The result of a decision: changed records with their events, notifications and commands, and when to decide again."""

    records: dict[str, WorkflowRecord] = field(default_factory=dict)
    """Changed workflows by uuid."""
    events: list[EventRecord] = field(default_factory=list)
    notifications: list[Notification] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    wake_at: float | None = None
    """When the next decision is due without a new observation; ``None`` for never."""
    last_decision: LastDecision = field(default_factory=LastDecision)
    """The part of this decision that the next one needs."""

    def wake(self, at: float) -> None:
        """Decide again at ``at`` at the latest."""
        self.wake_at = at if self.wake_at is None else min(self.wake_at, at)


def attempt_key(record: WorkflowRecord, group: GroupRecord, task: TaskRecord) -> AttemptKey | None:
    """Return the key of an attempt, or ``None`` if it has no node yet."""
    if task.node is None:
        return None
    return AttemptKey(workflow=record.uuid, group=group.name, task=task.name, attempt=task.attempt, node=task.node)
