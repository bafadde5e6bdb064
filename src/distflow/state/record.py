"""Frozen records of workflows, groups and tasks: what the supervisor decides on and the command line shows.

Times are seconds since the epoch (UTC). Records are replaced, never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from distflow.lifecycle.exits import exit_code_of
from distflow.lifecycle.states import Reason, State, WorkflowState, status_of, workflow_status_of
from distflow.plan.binding import Binding
from distflow.state.ends import Cause, End

if TYPE_CHECKING:
    from distflow.state.event_details import EventDetails

__all__ = [
    "CancelRequest",
    "Carried",
    "Cause",
    "Checkpoint",
    "DataKind",
    "DataRef",
    "End",
    "Event",
    "GroupRecord",
    "HiddenFailure",
    "Kept",
    "OutOfReach",
    "Priority",
    "Refusal",
    "Saved",
    "Stray",
    "TaskRecord",
    "Transfer",
    "WorkflowRecord",
]


class Priority(str, Enum):
    """Which of the gangs that wait for a pool goes first; one that runs gives way to none."""

    HIGH = "HIGH"
    NORMAL = "NORMAL"
    LOW = "LOW"

    @property
    def turn(self) -> int:
        """What the queue sorts by: the smaller goes first."""
        return _TURNS[self]


_TURNS = {priority: turn for turn, priority in enumerate(Priority)}


class Stray(str, Enum):
    """What is known of an attempt that was given up and may still run on a node that cannot be reached."""

    OUT_OF_REACH = "out_of_reach"
    STOPPING = "stopping"
    """The node is back and was told to stop it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Files on their way to a node."""

    sent: int
    """Bytes that are there."""
    total: int
    bytes_per_s: float
    at: float
    """When that was so."""
    output: str = ""
    """Of a task's output: what is done with it (``packs``, ``sends``, ``writes``); empty for files that it receives."""
    url: str = ""
    """Between this machine and a URL: that, as it may be shown."""
    image: str = ""
    """The container image that is being pulled; nobody knows how many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What became of a task's output that other groups take."""

    at: float
    digest: str = ""
    """SHA-256 of the archive in the blob store."""
    size: int = 0
    error: str = ""
    """Why it will never be here; then there is no archive."""


class DataKind(str, Enum):
    """What is done with data at a URL."""

    FETCH = "fetch"
    """An input is fetched, or looked up for its nodes to fetch."""
    WRITE = "write"
    """An output is written."""
    STORE = "store"
    """A checkpoint is written."""


@dataclass(frozen=True, slots=True)
class DataRef:
    """Identifies data at a URL within its group."""

    kind: DataKind = DataKind.FETCH
    number: int = 0
    """Counted from 0: over the group's different inputs, or over the task's outputs or checkpoints."""

    def __str__(self) -> str:
        """Return a short text such as ``fetch/0``, which also stands in names of directories and marks of transfers."""
        return f"{self.kind.value}/{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The outcome of a transfer of data at a URL: an input that was fetched, or an output that was written."""

    data: DataRef = DataRef()
    is_relayed: bool = False
    """Only notes, with the reason in ``error``, that no node can do it, so that the data passes through this machine."""
    op: str = ""
    """How older distflows wrote ``data`` and ``is_relayed``, such as ``relay/fetch/0``; empty otherwise."""
    task: str
    at: float
    since: float | None = None
    """When the transfer began, or began anew after it broke off; ``None`` where nobody noted it."""
    url: str
    """As it may be shown."""
    regex: str = ""
    digest: str = ""
    """Of an input: SHA-256 of its archive in the blob store."""
    size: int = 0
    """Of an input: bytes of that archive."""
    files: int = 0
    content: int = 0
    """Bytes of the files."""
    error: str = ""
    """Why it was not done."""
    is_direct: bool = False
    """Of an input: it was only looked up; every node fetches it for itself."""
    dataset: str = ""
    """Of such an input: with the version that was the latest then."""

    @property
    def is_written(self) -> bool:
        """Whether it is an output that was written, or could not be."""
        return self.data.kind is DataKind.WRITE and not self.is_relayed

    def __post_init__(self) -> None:
        """Read what an older distflow wrote."""
        if not self.op:
            return
        *relay, kind, number = self.op.split("/")
        object.__setattr__(self, "data", DataRef(DataKind(kind), int(number)))
        object.__setattr__(self, "is_relayed", bool(relay))
        object.__setattr__(self, "op", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfReach:
    """A node that does not answer at present; what runs there may still run."""

    since: float
    error: str
    """Why, as it was seen last, and what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A node was asked for a lease and said no."""

    node: str
    message: str
    until: float
    """It is not asked again before."""
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenFailure:
    """Ranks that failed although their task's command ended with code 0."""

    detail: str
    """One line: the exception, or how torchrun reports the rank's end."""
    have_met: bool
    """They may have met the other ranks before, which then need not be waiting for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """One attempt of one task."""

    name: str
    lead: bool = False
    attempt: int = 0
    """Counted from 0, as OSMO's ``retry_id``."""
    state: State = State.WAITING
    reason: Reason | None = None
    message: str = ""
    """One sentence about why it ended so; may be empty."""
    ranks: str = ""
    """Its global ranks, such as ``8-15``; empty without a world."""
    node: str | None = None
    gpu_ids: tuple[int, ...] = ()
    out_of_reach: OutOfReach | None = None
    """Its node, while nobody gets through to it; not kept up once the task has ended."""
    prepared: bool = False
    """Its node has everything that the start needs."""
    transfer: Transfer | None = None
    """How far its files are, while they are on their way to the node."""
    pid: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    end: End | None = None
    is_output_checked: bool = False
    """Its command ended with code 0, and its output was searched for a failure of its ranks."""
    hidden_failure: HiddenFailure | None = None
    """What was found there."""
    log_complete: bool = False
    """All of its output is mirrored here, or it is known that the rest never will be."""
    stray: Stray | None = None
    """Set when it was given up while it may still run: its node was unreachable for too long."""
    grace_s: float | None = None
    """What its stop gave it between TERM and KILL; ``None`` before its node has said so."""
    outputs: tuple[str, ...] = ()
    saved: Saved | None = None
    """Its output, once it was fetched for the groups that take it."""
    output_dir: str | None = None
    """Where its ``{{output}}`` lies on the node."""

    @property
    def exit_code(self) -> int | None:
        """Its code in OSMO's ranges: the command's own where the reason has none, as of a task that was stopped.

        ``None`` while it has not ended, and when its command has not run.
        """
        if self.end is not None and self.end.is_success:
            return 0
        code, number = (self.end.exit_code, self.end.signal) if self.end else (None, None)
        found = exit_code_of(self.reason, code, number, has_run=self.started_at is not None)
        if found is not None:
            return found
        return code if number is None else 128 + number

    @property
    def status(self) -> str:
        """OSMO's word for state and reason."""
        return status_of(self.state, self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The last checkpoint of one directory of a task."""

    task: str
    number: int
    """Which entry of the task's ``checkpoint`` it is, counted from 0."""
    attempt: int = 0
    """Of which attempt."""
    at: float = 0.0
    """When it was taken last, or written, or when that failed."""
    digest: str = ""
    """SHA-256 of the last whole archive in the blob store; empty when there was nothing yet."""
    size: int = 0
    is_new: bool = False
    """It is still to be written to its URL."""
    is_last: bool = False
    """It was taken after the task had ended."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The workflow in which a group ran that a later one did not run again."""

    uuid: str
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One group of a workflow: the latest attempt of its tasks, and those before."""

    name: str
    tasks: tuple[TaskRecord, ...]
    state: State = State.WAITING
    reason: Reason | None = None
    message: str = ""
    """What it waits for, or why it ended so."""
    cause: Cause | None = None
    attempt: int = 0
    earlier: tuple[TaskRecord, ...] = ()
    """The attempts before this one, oldest first: all are RESCHEDULED."""
    earlier_causes: tuple[Cause, ...] = ()
    """Why each of them ended."""
    checkpoints: tuple[Checkpoint, ...] = ()
    kept: Kept | None = None
    """Set when it did not run here: it had completed in an earlier workflow, which this one restarts."""
    upstream: tuple[str, ...] = ()
    """Groups that must have completed before it is queued."""
    binding: Binding | None = None
    scheduling_at: float | None = None
    initializing_at: float | None = None
    running_at: float | None = None
    stopping_at: float | None = None
    ended_at: float | None = None
    silent_since: float | None = None
    """When its tasks printed last, once that is longer ago than ``hang_timeout``; ``None`` while they make progress."""
    stop_reason: Reason | None = None
    """Why it is being stopped, while it is."""
    withdrawing: bool = False
    """INITIALIZING, but on its way back to the queue: its leases are being given back."""
    not_before: float = 0.0
    """No new try for nodes before this time."""
    carried: tuple[Carried, ...] = ()
    """Its data at URLs that was fetched or written, or never will be."""
    resting_until: float = 0.0
    """It was rescheduled: until then it does not stand in its pool's queue."""
    refusals: tuple[Refusal, ...] = ()
    """Of the nodes that were asked for a lease and said no."""
    waits_for: str = ""
    """What it waited for last while it stood in the queue."""
    announced: tuple[str, ...] = ()
    """What it waited for while it stood in the queue, as far as events tell it."""
    announced_for: tuple[int, float | None] = (0, None)
    """The attempt and ``scheduling_at`` that ``announced`` is about."""
    left_out: tuple[str, ...] = ()
    """Tasks that this attempt runs without, as there was no room for them; they do not stand in ``tasks``."""

    @property
    def status(self) -> str:
        """OSMO's word for state and reason."""
        return status_of(self.state, self.reason)

    def moving(self, task: TaskRecord) -> Transfer | None:
        """Return what is on its way for a task of it at present: data before it runs, or its output after it has ended."""
        if self.state.is_final or task.transfer is None:
            return None
        is_now = task.state.is_final if task.transfer.output else task.state in (State.WAITING, State.INITIALIZING)
        return task.transfer if is_now else None

    def task(self, name: str) -> TaskRecord:
        """Return one task."""
        return next(task for task in self.tasks if task.name == name)

    def with_task(self, task: TaskRecord) -> GroupRecord:
        """Return the group with one attempt of a task replaced."""

        def put(tasks: tuple[TaskRecord, ...]) -> tuple[TaskRecord, ...]:
            key = (task.name, task.attempt)
            return tuple(task if (other.name, other.attempt) == key else other for other in tasks)

        return replace(self, tasks=put(self.tasks), earlier=put(self.earlier))

    def checkpoint(self, task: str, number: int) -> Checkpoint | None:
        """Return the last checkpoint of a task's directory; ``None`` when none was ever taken."""
        return next((one for one in self.checkpoints if (one.task, one.number) == (task, number)), None)

    def with_checkpoint(self, taken: Checkpoint) -> GroupRecord:
        """Return the group with the last checkpoint of a directory replaced."""
        others = (one for one in self.checkpoints if (one.task, one.number) != (taken.task, taken.number))
        return replace(self, checkpoints=(*others, taken))

    @property
    def attempts(self) -> tuple[TaskRecord, ...]:
        """Every attempt of every task: task by task, the latest first; then those of tasks that this one runs without."""
        found: dict[str, list[TaskRecord]] = {task.name: [task] for task in self.tasks}
        for old in reversed(self.earlier):
            found.setdefault(old.name, []).append(old)
        return tuple(one for attempts in found.values() for one in attempts)

    def find(self, name: str, attempt: int) -> TaskRecord | None:
        """Return one attempt of a task; ``None`` when there is none of that number."""
        return next((task for task in self.attempts if (task.name, task.attempt) == (name, attempt)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """A person asked for the end of a workflow."""

    at: float
    by: str
    message: str = ""
    force: bool = False
    """Skip the grace between TERM and KILL."""

    def after(self, first: CancelRequest) -> CancelRequest:
        """Return what holds when this is asked after the first: it takes no force back, and no wait begins anew."""
        return replace(self, at=first.at, force=first.force or self.force)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowRecord:
    """One submission of a spec."""

    uuid: str
    """Names its directories on the nodes."""
    id: str
    """What people call it: ``<name>-<n>``."""
    name: str
    number: int
    user: str
    pool: str
    pool_key: str
    """Tells pools of one name but with other settings apart; all workflows with one key share one set of nodes."""
    submitted_at: float
    state: WorkflowState = WorkflowState.PENDING
    reason: Reason | None = None
    started_at: float | None = None
    ended_at: float | None = None
    cancel: CancelRequest | None = None
    groups: tuple[GroupRecord, ...] = ()
    """Empty where only the workflow itself was asked for."""
    warnings: tuple[str, ...] = ()
    priority: Priority = Priority.NORMAL
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Given at submission, and never changed."""
    parent: str | None = None
    """Id of the workflow that this one restarts."""
    tags: tuple[str, ...] = ()
    """Put on and taken off at any time; sorted."""

    @property
    def status(self) -> str:
        """OSMO's word for state and reason."""
        return workflow_status_of(self.state, self.reason)

    def group(self, name: str) -> GroupRecord:
        """Return one group."""
        return next(group for group in self.groups if group.name == name)

    def with_group(self, group: GroupRecord) -> WorkflowRecord:
        """Return the workflow with one of its groups replaced."""
        return replace(self, groups=tuple(group if other.name == group.name else other for other in self.groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened, as the store remembers it."""

    at: float
    workflow: str
    """The workflow's uuid."""
    details: EventDetails
    """What happened."""
    group: str | None = None
    task: str | None = None
    attempt: int | None = None
    sequence: int = 0
    """Position in the store; 0 before it is saved."""

    @property
    def kind(self) -> str:
        """A word to filter by: ``submitted``, ``state``, ``node``, ``cancel``."""
        return self.details.kind

    @property
    def code(self) -> str | None:
        """What it means to a program; ``None`` for a message to people alone."""
        return self.details.code

    @property
    def text(self) -> str:
        """The sentence for people. No program may depend on it."""
        from distflow.state.event_text import event_text  # noqa: PLC0415  most commands show no events

        return event_text(self.details, group=self.group, task=self.task)
