"""The kinds of events: one class for each, with a code for programs and typed fields.

``state.event_text`` writes their sentences. ``state.record.Event`` adds the time, workflow, group and task of an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, get_args

from distflow.state.codec import DecodeError, decode, encode

__all__ = [
    "AttemptForgotten",
    "CancelRequested",
    "CheckpointFailed",
    "CheckpointFilesLeftOut",
    "CheckpointWritten",
    "CheckpointsDiffer",
    "DataFailed",
    "DataRelayed",
    "EventDetails",
    "GroupCannotStart",
    "GroupRescheduled",
    "GroupStatus",
    "GroupWaiting",
    "HangOver",
    "HangSuspected",
    "InputEmpty",
    "InputFetched",
    "LeaseGranted",
    "LeaseLost",
    "Message",
    "NodeReachable",
    "NodeUnreachable",
    "NotificationFailed",
    "NotificationSent",
    "OrphanGone",
    "OrphanNotSeen",
    "OrphanStopping",
    "OutputCollected",
    "OutputEmpty",
    "OutputHeldBack",
    "OutputLosing",
    "OutputWritten",
    "TaskCannotStart",
    "TaskReady",
    "TaskStarted",
    "TaskStatus",
    "VenvReady",
    "WorkflowAdopted",
    "WorkflowRefused",
    "WorkflowStatus",
    "WorkflowSubmitted",
    "read_details",
    "write_fields",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    kind: ClassVar[str] = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A sentence without typed fields: an event that another version of distflow stored, or a note for people only."""

    code: ClassVar[None] = None
    kind: str = "state"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSubmitted:
    """A user submitted the workflow, or created it by restarting another workflow."""

    code: ClassVar[str] = "submitted"
    kind: ClassVar[str] = "submitted"
    user: str
    pool: str
    parent: str | None = None
    """The id of the workflow that it restarts."""
    kept: tuple[str, ...] = ()
    """Groups that had completed in that workflow and do not run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowAdopted:
    """The workflow's record was rebuilt from the records on its nodes."""

    code: ClassVar[str] = "adopted"
    kind: ClassVar[str] = "submitted"
    nodes: tuple[str, ...]
    user: str
    host: str
    """The host where it was submitted."""
    id: str
    """Its id on that host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """A user canceled the workflow."""

    code: ClassVar[str] = "cancel_requested"
    kind: ClassVar[str] = "cancel"
    user: str
    message: str = ""
    is_forced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowStatus(_State):
    """The status of the workflow changed."""

    code: ClassVar[str] = "workflow_status"
    id: str
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowRefused(_State):
    """This installation of distflow cannot run the workflow."""

    code: ClassVar[str] = "workflow_refused"
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnreachable:
    """The node of an unfinished task does not answer."""

    code: ClassVar[str] = "node_unreachable"
    kind: ClassVar[str] = "node"
    node: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReachable:
    """A node that did not answer answers again."""

    code: ClassVar[str] = "node_reachable"
    kind: ClassVar[str] = "node"
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus(_State):
    """The status of the group changed."""

    code: ClassVar[str] = "group_status"
    status: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWaiting(_State):
    """The reason why the group waits is new or has changed."""

    code: ClassVar[str] = "group_waiting"
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCannotStart(_State):
    """The group ends before it has started."""

    code: ClassVar[str] = "group_cannot_start"
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRescheduled(_State):
    """An attempt of the group failed, and another one follows."""

    code: ClassVar[str] = "group_rescheduled"
    failed_task: str
    message: str
    """Why that task failed."""
    attempt: int = 0
    """The number of the next attempt, counted from 1; 0 in a record of an older distflow."""
    attempts: int = 0
    """The maximum number of attempts."""
    wait_s: float = 0.0
    """Seconds until that attempt begins."""
    next: str = ""
    """In a record of an older distflow: a sentence about the next attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsDiffer(_State):
    """The tasks of the group's next attempt begin with different files."""

    code: ClassVar[str] = "checkpoints_differ"
    sizes: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)
    """Checkpoint directory → task → bytes; ``None`` for a task without a checkpoint of that directory."""
    message: str = ""
    """In a record of an older distflow: the sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGranted(_State):
    """The group has its nodes."""

    code: ClassVar[str] = "lease_granted"
    nodes: Mapping[str, str]
    """Task → node."""
    port: int | None = None
    left_out: tuple[str, ...] = ()
    """Tasks that this attempt runs without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VenvReady(_State):
    """A node has built the Python environment of the group."""

    code: ClassVar[str] = "venv_ready"
    node: str
    file: str
    """The requirements file."""
    tool: str
    """``uv`` or ``pip``."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HangSuspected(_State):
    """No task of a group has printed anything or sent a heartbeat for longer than ``hang_timeout``."""

    code: ClassVar[str] = "hang"
    limit_s: float | None = None
    """The group's ``hang_timeout``; ``None`` in a record of an older distflow."""
    workflow_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangOver(_State):
    """A task of a group that seemed to hang has made progress again."""

    code: ClassVar[str] = "hang_over"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus(_State):
    """The status of the task changed."""

    code: ClassVar[str] = "task_status"
    status: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReady(_State):
    """The task's node has everything that its start needs."""

    code: ClassVar[str] = "task_ready"
    node: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCannotStart(_State):
    """The task could not be prepared on its node."""

    code: ClassVar[str] = "task_cannot_start"
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStarted(_State):
    """The task's command runs."""

    code: ClassVar[str] = "task_started"
    node: str | None
    pid: int | None
    ranks: str = ""
    """Its global ranks, such as ``8-15``; empty without a world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost(_State):
    """The task lost its lease on the node before it was started."""

    code: ClassVar[str] = "lease_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptForgotten(_State):
    """The node has no record of an attempt that should run there."""

    code: ClassVar[str] = "attempt_forgotten"
    node: str | None = None
    message: str = ""
    """In a record of an older distflow: the sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanStopping(_State):
    """The node of an attempt that was given up is back, and stops the attempt."""

    code: ClassVar[str] = "orphan_stopping"
    node: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanGone(_State):
    """All processes of an attempt that was given up are gone."""

    code: ClassVar[str] = "orphan_gone"
    node: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanNotSeen(_State):
    """The node of an attempt that was given up did not answer again within the retention time."""

    code: ClassVar[str] = "orphan_not_seen"
    node: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputCollected(_State):
    """The task's output is in the blob store, or in storage that all nodes can read."""

    code: ClassVar[str] = "output_collected"
    size: int
    """Bytes."""
    is_everywhere: bool = False
    left_out: tuple[str, ...] = ()
    """Names of sockets, pipes and devices, which archives cannot contain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHeldBack(_State):
    """The task's output stays on its node, because this machine's disk is almost full."""

    code: ClassVar[str] = "output_held_back"
    node: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLosing(_State):
    """Output of the task is being lost, because its node's disk is full."""

    code: ClassVar[str] = "output_losing"
    node: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFetched(_State):
    """An input from a URL was copied to the blob store, or only looked up because nodes fetch it themselves."""

    code: ClassVar[str] = "input_fetched"
    url: str
    files: int
    size: int
    """Bytes of the files."""
    is_direct: bool = False
    """Whether the nodes fetch it themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputEmpty(_State):
    """An input from a URL has no files."""

    code: ClassVar[str] = "input_empty"
    url: str
    regex: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputWritten(_State):
    """An output was written to its URL."""

    code: ClassVar[str] = "output_written"
    url: str
    files: int
    size: int
    """Bytes of the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputEmpty(_State):
    """An output has no files to write."""

    code: ClassVar[str] = "output_empty"
    url: str
    regex: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRelayed(_State):
    """The task's node cannot transfer an input or an output by itself, so it passes through this machine."""

    code: ClassVar[str] = "data_relayed"
    is_input: bool
    url: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFailed(_State):
    """An input could not be fetched, or an output could not be written."""

    code: ClassVar[str] = "data_failed"
    is_input: bool
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(_State):
    """A checkpoint was not taken, or not written to its URL."""

    code: ClassVar[str] = "checkpoint_failed"
    is_taken: bool
    """Whether the checkpoint was copied to this machine, and only writing it to its URL failed."""
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFilesLeftOut(_State):
    """A checkpoint lacks files: those that kept changing, links that lead out of its directory, sockets, pipes or devices."""

    code: ClassVar[str] = "checkpoint_files_left_out"
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotificationSent:
    """A notification about the workflow was sent."""

    code: ClassVar[str] = "notification_sent"
    kind: ClassVar[str] = "notification"
    on: str
    """The event that it reports, such as ``failed``."""
    target: str
    """The name of the entry of ``notify``, without any secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotificationFailed:
    """A notification about the workflow was not sent, and is not tried again."""

    code: ClassVar[str] = "notification_failed"
    kind: ClassVar[str] = "notification"
    on: str
    target: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten(_State):
    """A checkpoint was written to its URL."""

    code: ClassVar[str] = "checkpoint_written"
    url: str
    files: int
    size: int
    """Bytes of the files."""


EventDetails = (
    Message | WorkflowSubmitted | WorkflowAdopted | CancelRequested | WorkflowStatus | WorkflowRefused
    | NodeUnreachable | NodeReachable
    | GroupStatus | GroupWaiting | GroupCannotStart | GroupRescheduled | CheckpointsDiffer | VenvReady | LeaseGranted
    | HangSuspected | HangOver
    | TaskStatus | TaskReady | TaskCannotStart | TaskStarted | LeaseLost | AttemptForgotten
    | OrphanStopping | OrphanGone | OrphanNotSeen
    | OutputCollected | OutputHeldBack | OutputLosing
    | InputFetched | InputEmpty | OutputWritten | OutputEmpty | DataRelayed | DataFailed
    | CheckpointFailed | CheckpointFilesLeftOut | CheckpointWritten
    | NotificationSent | NotificationFailed
)  # fmt: skip

_BY_CODE: Mapping[str, type[EventDetails]] = MappingProxyType(
    {kind.code: kind for kind in get_args(EventDetails) if kind.code is not None}
)


def write_fields(details: EventDetails) -> str:
    """Return the fields as JSON."""
    return encode(details).decode()


def read_details(*, code: str | None, fields: str | None, kind: str, text: str) -> EventDetails:
    """Return the details of a stored event. An event of another version of distflow may become a ``Message``."""
    found = _BY_CODE.get(code or "")
    if found is None:
        return _from_sentence(kind, text) if code is None else Message(kind=kind, text=text or code)
    try:
        return decode((fields or "{}").encode(), found)
    except DecodeError:
        return Message(kind=kind, text=text or code or "")


def _from_sentence(kind: str, text: str) -> EventDetails:
    """Return the details of an event that was stored only as a sentence."""
    if kind != "node":
        return Message(kind=kind, text=text)
    node, _, rest = text.partition(": ")
    status, _, error = rest.partition(": ")
    return NodeUnreachable(node=node, error=error) if status == "unreachable" else NodeReachable(node=node)
