"""Frozen records of workflows, groups and tasks: the input of the supervisor's decisions and of the command line's output.

Times are seconds since the epoch (UTC). Records are replaced, never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import force_setattr

from distflow.lifecycle.exits import exit_code_of
from distflow.lifecycle.states import Reason, State, WorkflowState, status_of, workflow_status_of
from distflow.plan.binding import Binding
from distflow.state.ends import Cause, End
from distflow.structs import replace

if TYPE_CHECKING:
    from distflow.plan.model import GroupPlan
    from distflow.state.event_details import EventDetails

__all__ = [
    "CancelRequest",
    "Cause",
    "CheckpointRecord",
    "DataKind",
    "DataRef",
    "End",
    "EventRecord",
    "GroupRecord",
    "HiddenFailure",
    "Kept",
    "OrphanState",
    "Outage",
    "Priority",
    "Refusal",
    "Saved",
    "TaskRecord",
    "TransferProgress",
    "TransferRecord",
    "UnreachableNodes",
    "VenvBuild",
    "WorkflowRecord",
    "fresh_tasks",
]


class Priority(str, Enum):
    """The order of the gangs that wait for nodes of a pool. distflow does not preempt a running gang."""

    HIGH = "HIGH"
    NORMAL = "NORMAL"
    LOW = "LOW"

    @property
    def turn(self) -> int:
        """The sort key of the queue: smaller values go first."""
        return _TURNS[self]


_TURNS = {priority: turn for turn, priority in enumerate(Priority)}


class OrphanState(str, Enum):
    """The state of an attempt that was given up, because its node was unreachable, and may still run there."""

    UNREACHABLE = "out_of_reach"
    STOPPING = "stopping"
    """The node is back and was asked to stop it."""


class TransferProgress(Struct, frozen=True, kw_only=True):
    """The progress of a transfer for a task: of its files, an input, its image, or its output."""

    sent: int
    """Bytes that have arrived, or that the node has packed (``output`` is ``packs``)."""
    total: int
    bytes_per_s: float
    at: float
    """When this progress was reported."""
    output: str = ""
    """For a task's output: the current step (``packs``, ``sends``, ``writes``). Empty for files that the task receives."""
    url: str = ""
    """For a transfer to or from a URL: the dataset, or the URL without secrets. Empty while a node fetches an input."""
    image: str = ""
    """The container image that is being pulled; its size is not known."""


class Saved(Struct, frozen=True, kw_only=True):
    """The outcome of collecting a task's output, which other groups need, or which this machine writes to URLs."""

    at: float
    digest: str = ""
    """SHA-256 of the archive, which is in the blob store or in storage that all nodes can read."""
    size: int = 0
    error: str = ""
    """Why it cannot be collected; there is then no archive."""


class DataKind(str, Enum):
    """The kinds of transfers between distflow and a URL."""

    FETCH = "fetch"
    """This machine fetches an input, or only looks it up so that the nodes can fetch it."""
    WRITE = "write"
    """An output is written."""
    STORE = "store"
    """A checkpoint is written."""


class DataRef(Struct, frozen=True):
    """Identifies data at a URL within its group."""

    kind: DataKind = DataKind.FETCH
    number: int = 0
    """Counted from 0 over the group's different inputs, or over the task's outputs or checkpoints."""

    def __str__(self) -> str:
        """Return a short text such as ``fetch/0``, for names of temporary directories and threads."""
        return f"{self.kind.value}/{self.number}"


class TransferRecord(Struct, frozen=True, kw_only=True):
    """The outcome of a transfer of data at a URL, successful or not."""

    data: DataRef = DataRef()
    is_relayed: bool = False
    """Whether this only notes that nodes cannot transfer the data, for the reason in ``error``, so this machine relays it."""
    op: str = ""
    """``data`` and ``is_relayed`` in the form of older versions, such as ``relay/fetch/0``; empty otherwise."""
    task: str
    at: float
    since: float | None = None
    """When the transfer began, or began again after it broke off; ``None`` if that was not recorded."""
    url: str
    """The dataset, or the URL without secrets."""
    regex: str = ""
    digest: str = ""
    """For an input: the SHA-256 of its archive in the blob store."""
    size: int = 0
    """For an input: the size of that archive in bytes."""
    files: int = 0
    content: int = 0
    """The size of the files in bytes."""
    error: str = ""
    """Why it failed."""
    is_direct: bool = False
    """For an input: whether it was only looked up, so that every node fetches it itself."""
    dataset: str = ""
    """For an input from a dataset: its name with the version that was the latest at that time."""

    @property
    def is_written(self) -> bool:
        """Whether it is the outcome of writing an output, with or without an error."""
        return self.data.kind is DataKind.WRITE and not self.is_relayed

    def __post_init__(self) -> None:
        """Convert a record of an older version of distflow."""
        if not self.op:
            return
        *relay, kind, number = self.op.split("/")
        force_setattr(self, "data", DataRef(DataKind(kind), int(number)))
        force_setattr(self, "is_relayed", bool(relay))
        force_setattr(self, "op", "")


class Outage(Struct, frozen=True, kw_only=True):
    """A node that does not answer at present; its tasks may still run."""

    since: float
    error: str
    """The last known reason, and what to do about it."""


class Refusal(Struct, frozen=True, kw_only=True):
    """A node's refusals to lease resources to a group. A request without an answer counts as a refusal."""

    node: str
    """Empty for a cluster engine."""
    message: str
    """The reason of the last refusal."""
    until: float
    """The node is not asked again before this time."""
    times: int
    """The number of its refusals since the group last had a lease."""


class UnreachableNodes(Struct, frozen=True, kw_only=True):
    """The unreachable nodes of a pool, if a group does not fit on the remaining nodes even when those are idle."""

    errors: Mapping[str, str]
    """Why each node cannot be reached, by its name."""
    needs_action: bool
    """Whether a person must repair one of these nodes before the group can start, because a retry does not help."""


class HiddenFailure(Struct, frozen=True, kw_only=True):
    """Ranks that failed although their task's command ended with code 0."""

    detail: str
    """One line: the exception, or torchrun's report of the rank's end."""
    may_have_joined: bool = field(name="have_met")
    """Whether the failed ranks may have passed the rendezvous. If so, other ranks do not necessarily wait for them."""


class TaskRecord(Struct, frozen=True, kw_only=True):
    """One attempt of one task."""

    name: str
    lead: bool = False
    attempt: int = 0
    """Counted from 0, like OSMO's ``retry_id``."""
    state: State = State.WAITING
    reason: Reason | None = None
    message: str = ""
    """A short text about the reason of its end; may be empty."""
    ranks: str = ""
    """Its global ranks, such as ``8-15``; empty without a world."""
    node: str | None = None
    gpu_ids: tuple[int, ...] = ()
    outage: Outage | None = field(default=None, name="out_of_reach")
    """Set while its node is unreachable, if that began before the task ended."""
    prepared: bool = False
    """Whether its node has everything that the start needs."""
    transfer: TransferProgress | None = None
    """The progress of its files or its output, while they are transferred."""
    pid: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    end: End | None = None
    is_output_checked: bool = False
    """Whether its command ended with code 0 and its output was searched for a failure of its ranks."""
    hidden_failure: HiddenFailure | None = None
    """The failure that was found in its output."""
    log_complete: bool = False
    """Whether all of its output is mirrored here, or the rest is known to be lost or no longer awaited."""
    orphan: OrphanState | None = field(default=None, name="stray")
    """Set for an orphan attempt: it was given up because its node was unreachable for too long, and it may still run."""
    grace_s: float | None = None
    """The seconds between TERM and KILL of its stop; ``None`` before its node has reported them."""
    outputs: tuple[str, ...] = ()
    """The destinations of its output in the spec, as text."""
    saved: Saved | None = None
    """Its output, after it was collected for other groups or for its URLs, or after that failed."""
    output_dir: str | None = None
    """The directory of its ``{{output}}`` on the node."""
    has_files: bool | None = None
    """Whether that directory had files at the end; ``None`` before, and if the node did not report it."""

    @property
    def exit_code(self) -> int | None:
        """Its code in OSMO's ranges. If its reason has no code there, as for a stopped task, it is the command's own code.

        ``None`` before it has ended, and if neither code exists.
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
        """The word that commands show for this state and reason."""
        return status_of(self.state, self.reason)


class CheckpointRecord(Struct, frozen=True, kw_only=True):
    """The last checkpoint of one directory of a task."""

    task: str
    number: int
    """The index of the task's ``checkpoint`` entry, counted from 0."""
    attempt: int = 0
    """The attempt of the last try to take it, even if that failed. The archive may be of an earlier attempt."""
    at: float = 0.0
    """When it was last taken or written, even if that failed."""
    digest: str = ""
    """SHA-256 of the last complete archive in the blob store; empty if there was none yet."""
    size: int = 0
    is_new: bool = False
    """Whether it must still be written to its URL."""
    is_last: bool = False
    """Whether it was taken after the task had ended."""
    error: str = ""


class Kept(Struct, frozen=True, kw_only=True):
    """The earlier workflow in which a group completed. The workflow that restarts it does not run the group again."""

    uuid: str
    id: str


class VenvBuild(Struct, frozen=True, kw_only=True):
    """A Python environment that a group waits for."""

    task: str
    """A task that will probably run on the node."""
    node: str


class GroupRecord(Struct, frozen=True, kw_only=True):
    """One group of a workflow: the latest attempt of its tasks, and earlier attempts."""

    name: str
    tasks: tuple[TaskRecord, ...]
    state: State = State.WAITING
    reason: Reason | None = None
    message: str = ""
    """Why it waits, may hang, is stopped or ended."""
    cause: Cause | None = None
    attempt: int = 0
    earlier: tuple[TaskRecord, ...] = ()
    """The earlier attempts, oldest first; all are RESCHEDULED."""
    earlier_causes: tuple[Cause, ...] = ()
    """The cause of the end of each earlier attempt."""
    checkpoints: tuple[CheckpointRecord, ...] = ()
    kept: Kept | None = None
    """Set if it did not run in this workflow, because it had completed in the workflow that this one restarts."""
    upstream: tuple[str, ...] = ()
    """Groups that must have completed before it is queued."""
    binding: Binding | None = None
    scheduling_at: float | None = None
    initializing_at: float | None = None
    running_at: float | None = None
    stopping_at: float | None = None
    ended_at: float | None = None
    silent_since: float | None = None
    """When it last showed progress (output, a heartbeat or its start), if that is longer ago than ``hang_timeout``."""
    stop_reason: Reason | None = None
    """Why it is or was stopped; ``None`` if it was not stopped, or was stopped because the lead completed.

    It is ``PEER_FAILED`` also if a task failed when no other task was left to stop.
    """
    withdrawing: bool = False
    """Whether it lost a lease before its start: it is INITIALIZING until its other leases are released, then queued again."""
    not_before: float = 0.0
    """It does not try to lease nodes before this time."""
    transfer_results: tuple[TransferRecord, ...] = field(default=(), name="carried")
    """Its finished transfers of data at URLs, including failed ones."""
    backoff_until: float = field(default=0.0, name="resting_until")
    """The end of a rescheduled group's backoff: it does not enter its pool's queue before this time."""
    refusals: tuple[Refusal, ...] = ()
    """The nodes that refused a lease or did not answer."""
    waits_for: str = ""
    """What it last waited for in the queue."""
    unreachable: UnreachableNodes | None = None
    """The nodes without which it could not start when it last waited in the queue."""
    venv_builds: tuple[VenvBuild, ...] = ()
    """The nodes that are building its Python environment. It is not in the queue meanwhile."""
    building_at: float | None = None
    """When those builds began."""
    announced: tuple[str, ...] = ()
    """The last reasons for waiting in the queue that events have reported."""
    announced_for: tuple[int, float | None] = (0, None)
    """The attempt and ``scheduling_at`` that ``announced`` belongs to."""
    left_out: tuple[str, ...] = ()
    """Tasks that this attempt runs without, because there was no room for them; ``tasks`` does not contain them."""

    @property
    def status(self) -> str:
        """The word that commands show for this state and reason."""
        return status_of(self.state, self.reason)

    @property
    def missing_nodes(self) -> UnreachableNodes | None:
        """The unreachable nodes that it cannot start without, while it waits in the queue."""
        return self.unreachable if self.state is State.SCHEDULING else None

    def current_transfer(self, task: TaskRecord) -> TransferProgress | None:
        """Return the current transfer of a task: its data before it runs, or its output after its end; ``None`` without one."""
        if self.state.is_final or task.transfer is None:
            return None
        is_now = task.state.is_final if task.transfer.output else task.state in (State.WAITING, State.INITIALIZING)
        return task.transfer if is_now else None

    def task(self, name: str) -> TaskRecord:
        """Return the latest attempt of a task."""
        return next(task for task in self.tasks if task.name == name)

    def with_task(self, task: TaskRecord) -> GroupRecord:
        """Return the group with one attempt of a task replaced."""

        def put(tasks: tuple[TaskRecord, ...]) -> tuple[TaskRecord, ...]:
            key = (task.name, task.attempt)
            return tuple(task if (other.name, other.attempt) == key else other for other in tasks)

        return replace(self, tasks=put(self.tasks), earlier=put(self.earlier))

    def checkpoint(self, task: str, number: int) -> CheckpointRecord | None:
        """Return the last checkpoint of a task's directory; ``None`` if none was taken."""
        return next((one for one in self.checkpoints if (one.task, one.number) == (task, number)), None)

    def with_checkpoint(self, taken: CheckpointRecord) -> GroupRecord:
        """Return the group with the last checkpoint of a directory replaced."""
        others = (one for one in self.checkpoints if (one.task, one.number) != (taken.task, taken.number))
        return replace(self, checkpoints=(*others, taken))

    @property
    def attempts(self) -> tuple[TaskRecord, ...]:
        """All attempts, task by task, the latest first; then those of tasks that the current attempt runs without."""
        found: dict[str, list[TaskRecord]] = {task.name: [task] for task in self.tasks}
        for old in reversed(self.earlier):
            found.setdefault(old.name, []).append(old)
        return tuple(one for attempts in found.values() for one in attempts)

    def find(self, name: str, attempt: int) -> TaskRecord | None:
        """Return one attempt of a task; ``None`` if there is none with that number."""
        return next((task for task in self.attempts if (task.name, task.attempt) == (name, attempt)), None)


class CancelRequest(Struct, frozen=True, kw_only=True):
    """A user's request to cancel a workflow."""

    at: float
    by: str
    message: str = ""
    force: bool = False
    """Skip the grace period between TERM and KILL."""

    def after(self, first: CancelRequest) -> CancelRequest:
        """Return this request combined with an earlier one: it keeps the earlier time, and force is never taken back."""
        return replace(self, at=first.at, force=first.force or self.force)


class WorkflowRecord(Struct, frozen=True, kw_only=True):
    """One submission of a spec."""

    uuid: str
    """The name of its directories on the nodes."""
    id: str
    """The name for users: ``<name>-<n>``."""
    name: str
    number: int
    user: str
    pool: str
    pool_key: str
    """Distinguishes pools that have the same name but other settings. All workflows with one key share one set of nodes."""
    submitted_at: float
    state: WorkflowState = WorkflowState.PENDING
    reason: Reason | None = None
    started_at: float | None = None
    ended_at: float | None = None
    cancel: CancelRequest | None = None
    groups: tuple[GroupRecord, ...] = ()
    """Empty if only the workflow itself was loaded."""
    warnings: tuple[str, ...] = ()
    priority: Priority = Priority.NORMAL
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Set at submission, and never changed."""
    parent: str | None = None
    """The id of the workflow that this one restarts."""
    tags: tuple[str, ...] = ()
    """Can be added and removed at any time; sorted."""

    @property
    def status(self) -> str:
        """The word that commands show for this state and reason."""
        return workflow_status_of(self.state, self.reason)

    @property
    def first_cause(self) -> Cause | None:
        """The earliest cause of the failures of its groups."""
        return min((group.cause for group in self.groups if group.cause), key=lambda cause: cause.at, default=None)

    @property
    def end_text(self) -> str:
        """Why it ended, in one line: the first cause, or else the first message of a group. May be empty."""
        cause = self.first_cause
        return cause.text if cause else next((group.message for group in self.groups if group.message), "")

    def group(self, name: str) -> GroupRecord:
        """Return one group."""
        return next(group for group in self.groups if group.name == name)

    def with_group(self, group: GroupRecord) -> WorkflowRecord:
        """Return the workflow with one of its groups replaced."""
        return replace(self, groups=tuple(group if other.name == group.name else other for other in self.groups))


class EventRecord(Struct, frozen=True, kw_only=True):
    """An event of a workflow, as the store records it."""

    at: float
    workflow: str
    """The workflow's uuid."""
    details: EventDetails
    """The kind of event, with its fields."""
    group: str | None = None
    task: str | None = None
    attempt: int | None = None
    sequence: int = 0
    """Position in the store; 0 before it is saved."""

    @property
    def kind(self) -> str:
        """A category for filters: ``submitted``, ``state``, ``node``, ``cancel``, ``notification``."""
        return self.details.kind

    @property
    def code(self) -> str | None:
        """The code for programs; ``None`` for a message that is only for people, and for some events of other versions."""
        return self.details.code

    @property
    def text(self) -> str:
        """The sentence for people. Programs must not depend on it."""
        from distflow.state.event_text import event_text  # noqa: PLC0415  most commands show no events

        return event_text(self.details, group=self.group, task=self.task)

    @property
    def description(self) -> str:
        """The sentence without the name of the group or task, as far as an event of an older version allows this."""
        from distflow.state.event_text import event_text  # noqa: PLC0415  see above

        text = event_text(self.details, group=None, task=None)
        return text if self.code is not None else text.removeprefix(f"{self.task}: ")


def fresh_tasks(plan: GroupPlan, attempt: int = 0, state: State = State.WAITING) -> tuple[TaskRecord, ...]:
    """Return the records of all tasks of a group at the start of an attempt."""
    return tuple(
        TaskRecord(
            name=launch.task, lead=launch.lead, attempt=attempt, state=state, ranks=launch.ranks.text if launch.ranks else "",
            outputs=launch.outputs,
        )
        for launch in plan.launches
    )  # fmt: skip
