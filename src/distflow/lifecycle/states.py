"""Tables of states, reasons, allowed transitions and the statuses that people see. Also dependencies between groups.

The few states are the phases of a run, and the many reasons explain its end. A *status* combines both into one word, such as
``FAILED_UPSTREAM``. All statuses except ``STOPPING`` are also statuses of NVIDIA OSMO. A test checks that each table has an
entry for every member of its enum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType

__all__ = [
    "OSMO_STATUSES",
    "REASON_TEXT",
    "TRANSITIONS",
    "WORKFLOW_TRANSITIONS",
    "Reason",
    "State",
    "WorkflowState",
    "broken_upstream",
    "is_legal",
    "joined_names",
    "roll_up_workflow",
    "status_of",
    "still_awaited",
    "waiting_text",
    "workflow_status_of",
]


class State(str, Enum):
    """The phase of a task or a group."""

    WAITING = "WAITING"
    """Waits for the groups that it depends on, and until distflow has checked or fetched its inputs from URLs."""
    SCHEDULING = "SCHEDULING"
    """Waits for nodes in its pool's queue, for the end of a retry's backoff, or for its Python environment to be built."""
    INITIALIZING = "INITIALIZING"
    """Has nodes. Files and inputs are copied or downloaded there, and the start is prepared."""
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    """Is being stopped: TERM, a grace period, then KILL."""
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELED = "CANCELED"
    RESCHEDULED = "RESCHEDULED"
    """Only for tasks: the attempt ended, and a retry of its group replaced the state in which it ended."""

    @property
    def is_final(self) -> bool:
        """Whether it has ended."""
        return self in (State.COMPLETED, State.FAILED, State.CANCELED, State.RESCHEDULED)


class WorkflowState(str, Enum):
    """The phase of a workflow."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELED = "CANCELED"

    @property
    def is_final(self) -> bool:
        """Whether it has ended."""
        return self in (WorkflowState.COMPLETED, WorkflowState.FAILED, WorkflowState.CANCELED)


class Reason(str, Enum):
    """Why a task, a group or a workflow ended."""

    EXIT_CODE = "EXIT_CODE"
    SIGNAL = "SIGNAL"
    OOM_KILLED = "OOM_KILLED"
    PEER_FAILED = "PEER_FAILED"
    EXEC_TIMEOUT = "EXEC_TIMEOUT"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    START_ERROR = "START_ERROR"
    START_TIMEOUT = "START_TIMEOUT"
    NODE_LOST = "NODE_LOST"
    UPSTREAM = "UPSTREAM"
    CANCELED = "CANCELED"
    SUBMISSION = "SUBMISSION"
    IMAGE_PULL = "IMAGE_PULL"
    EVICTED = "EVICTED"
    PREEMPTED = "PREEMPTED"
    DATA = "DATA"
    INTERNAL = "INTERNAL"


REASON_TEXT: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.EXIT_CODE: "the command ended with an exit code that counts as a failure",
        Reason.SIGNAL: "the command was ended by a signal",
        Reason.OOM_KILLED: "the kernel ended it because memory ran out",
        Reason.PEER_FAILED: "another task of its group failed first, so it was stopped",
        Reason.EXEC_TIMEOUT: "it ran longer than exec_timeout, or its job reached a time limit",
        Reason.QUEUE_TIMEOUT: "it waited for nodes longer than queue_timeout",
        Reason.START_ERROR: "it could not be started",
        Reason.START_TIMEOUT: "the gang was not ready in time",
        Reason.NODE_LOST: "its node was lost or could not be reached for longer than node_lost_after",
        Reason.UPSTREAM: "a group that it depends on did not complete",
        Reason.CANCELED: "a person or another program canceled it",
        Reason.SUBMISSION: "it was refused at submission",
        Reason.IMAGE_PULL: "its container image could not be pulled",
        Reason.EVICTED: "it used more than it requested, or its node ran short of resources",
        Reason.PREEMPTED: "its nodes were taken away, for example for a job of higher priority",
        Reason.DATA: "a transfer of its data failed",
        Reason.INTERNAL: "distflow itself, or one of its processes on the node, failed",
    }
)
"""The meaning of each reason, as a clause without a capital letter or a full stop."""

OSMO_STATUSES = frozenset({
    "SUBMITTING", "WAITING", "PENDING", "PROCESSING", "SCHEDULING", "INITIALIZING", "RUNNING", "RESCHEDULED", "COMPLETED",
    "FAILED", "FAILED_CANCELED", "FAILED_SERVER_ERROR", "FAILED_EXEC_TIMEOUT", "FAILED_QUEUE_TIMEOUT", "FAILED_SUBMISSION",
    "FAILED_PREEMPTED", "FAILED_EVICTED", "FAILED_UPSTREAM", "FAILED_BACKEND_ERROR", "FAILED_IMAGE_PULL",
    "FAILED_START_ERROR", "FAILED_START_TIMEOUT",
})  # fmt: skip
"""All statuses of OSMO. distflow never uses some of them, but accepts them in filters, so that scripts for OSMO work."""

_FAILED_STATUS: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.EXIT_CODE: "FAILED",
        Reason.SIGNAL: "FAILED",
        Reason.OOM_KILLED: "FAILED_EVICTED",
        Reason.PEER_FAILED: "FAILED",
        Reason.EXEC_TIMEOUT: "FAILED_EXEC_TIMEOUT",
        Reason.QUEUE_TIMEOUT: "FAILED_QUEUE_TIMEOUT",
        Reason.START_ERROR: "FAILED_START_ERROR",
        Reason.START_TIMEOUT: "FAILED_START_TIMEOUT",
        Reason.NODE_LOST: "FAILED_BACKEND_ERROR",
        Reason.UPSTREAM: "FAILED_UPSTREAM",
        Reason.CANCELED: "FAILED_CANCELED",
        Reason.SUBMISSION: "FAILED_SUBMISSION",
        Reason.IMAGE_PULL: "FAILED_IMAGE_PULL",
        Reason.EVICTED: "FAILED_EVICTED",
        Reason.PREEMPTED: "FAILED_PREEMPTED",
        Reason.DATA: "FAILED",
        Reason.INTERNAL: "FAILED_SERVER_ERROR",
    }
)

TRANSITIONS: Mapping[State, tuple[State, ...]] = MappingProxyType(
    {
        State.WAITING: (State.SCHEDULING, State.FAILED, State.CANCELED),
        State.SCHEDULING: (State.INITIALIZING, State.FAILED, State.CANCELED),
        # Back to SCHEDULING: the lease was lost before the start, or the group is retried.
        State.INITIALIZING: (State.SCHEDULING, State.RUNNING, State.STOPPING, State.FAILED, State.CANCELED),
        State.RUNNING: (State.SCHEDULING, State.STOPPING, State.COMPLETED, State.FAILED, State.CANCELED),
        State.STOPPING: (State.SCHEDULING, State.COMPLETED, State.FAILED, State.CANCELED),
        # A retry of the group begins when all of its tasks have ended.
        State.COMPLETED: (State.RESCHEDULED,),
        State.FAILED: (State.RESCHEDULED,),
        State.CANCELED: (State.RESCHEDULED,),
        State.RESCHEDULED: (),
    }
)
"""The states that may follow each state. Only tasks become ``RESCHEDULED``."""

WORKFLOW_TRANSITIONS: Mapping[WorkflowState, tuple[WorkflowState, ...]] = MappingProxyType(
    {
        WorkflowState.PENDING: (
            WorkflowState.RUNNING,
            WorkflowState.COMPLETED,
            WorkflowState.FAILED,
            WorkflowState.CANCELED,
        ),
        WorkflowState.RUNNING: (WorkflowState.COMPLETED, WorkflowState.FAILED, WorkflowState.CANCELED),
        WorkflowState.COMPLETED: (),
        WorkflowState.FAILED: (),
        WorkflowState.CANCELED: (),
    }
)
"""The states that may follow each state of a workflow."""


def is_legal(before: State, after: State) -> bool:
    """Return whether a task or group may change from ``before`` to ``after``. Equal states are always allowed."""
    return before is after or after in TRANSITIONS[before]


def status_of(state: State, reason: Reason | None) -> str:
    """Return the word that commands show for the state and the reason of a task or group."""
    if state is State.FAILED:
        return "FAILED" if reason is None else _FAILED_STATUS[reason]
    if state is State.CANCELED:
        return "FAILED_CANCELED"
    return str(state.value)


def workflow_status_of(state: WorkflowState, reason: Reason | None) -> str:
    """Return the word that commands show for the state and the reason of a workflow."""
    if state is WorkflowState.FAILED:
        return "FAILED" if reason is None else _FAILED_STATUS[reason]
    if state is WorkflowState.CANCELED:
        return "FAILED_CANCELED"
    return str(state.value)


_SHOWN_FIRST = (Reason.INTERNAL, Reason.EXEC_TIMEOUT, Reason.QUEUE_TIMEOUT)
"""The reasons that a workflow shows first if its groups failed for different reasons."""


def roll_up_workflow(groups: Sequence[tuple[State, Reason | None]]) -> tuple[WorkflowState, Reason | None]:
    """Return the state and reason of a workflow from those of its groups.

    A workflow with unfinished groups is pending or running. Otherwise it is canceled if a group was canceled, and completed if
    no group failed. The reason of a failed workflow is the first in ``_SHOWN_FIRST`` that a group has, as in OSMO; else the
    only reason other than ``UPSTREAM``; else ``None``.
    """
    states = [state for state, _ in groups]
    if not all(state.is_final for state in states):
        started = any(state in (State.RUNNING, State.STOPPING) or state.is_final for state in states)
        return (WorkflowState.RUNNING if started else WorkflowState.PENDING), None
    if State.CANCELED in states:
        return WorkflowState.CANCELED, Reason.CANCELED
    reasons = [reason for state, reason in groups if state is State.FAILED]
    if not reasons:
        return WorkflowState.COMPLETED, None
    for reason in _SHOWN_FIRST:
        if reason in reasons:
            return WorkflowState.FAILED, reason
    own = {reason for reason in reasons if reason is not Reason.UPSTREAM}
    return WorkflowState.FAILED, own.pop() if len(own) == 1 else None


def still_awaited(upstream: Sequence[str], states: Mapping[str, State]) -> tuple[str, ...]:
    """Return the dependencies of a group that have not completed."""
    return tuple(name for name in upstream if states[name] is not State.COMPLETED)


def broken_upstream(upstream: Sequence[str], states: Mapping[str, State]) -> str | None:
    """Return the first dependency that failed or was canceled, or ``None``. With such a dependency, the group can never run."""
    return next((name for name in upstream if states[name] in (State.FAILED, State.CANCELED)), None)


def waiting_text(names: Sequence[str]) -> str:
    """Return text such as ``waits for crop, label and prepare``."""
    return f"waits for {joined_names(names)}"


def joined_names(names: Sequence[str]) -> str:
    """Return names as text such as ``crop, label and prepare``."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)
