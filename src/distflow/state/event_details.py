"""The kinds of events: one class for each, with a code for programs and typed fields.

``state.event_text`` writes their sentences. ``state.record.EventRecord`` adds the time, workflow, group and task of an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, get_args

from msgspec import Struct, field

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
    "NodeBecameReachable",
    "NodeBecameUnreachable",
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


class _State(Struct, frozen=True, kw_only=True):
    kind: ClassVar[str] = "state"


class Message(Struct, frozen=True, kw_only=True):
    """A sentence without typed fields: an event that another version of distflow stored, or a note for people only."""

    code: ClassVar[None] = None
    kind: str = "state"
    text: str


class WorkflowSubmitted(Struct, frozen=True, kw_only=True):
    """A user submitted the workflow, or created it by restarting another workflow."""

    code: ClassVar[str] = "submitted"
    kind: ClassVar[str] = "submitted"
    user: str
    pool: str
    parent: str | None = None
    """The id of the workflow that it restarts."""
    kept: tuple[str, ...] = ()
    """Groups that had completed in that workflow and do not run again."""


class WorkflowAdopted(Struct, frozen=True, kw_only=True):
    """The workflow's record was rebuilt from the records on its nodes."""

    code: ClassVar[str] = "adopted"
    kind: ClassVar[str] = "submitted"
    nodes: tuple[str, ...]
    user: str
    host: str
    """The host where it was submitted."""
    id: str
    """Its id on that host."""


class CancelRequested(Struct, frozen=True, kw_only=True):
    """A user requested the cancellation of the workflow."""

    code: ClassVar[str] = "cancel_requested"
    kind: ClassVar[str] = "cancel"
    user: str
    message: str = ""
    is_forced: bool = False


class WorkflowStatus(_State, frozen=True, kw_only=True):
    """The status of the workflow changed."""

    code: ClassVar[str] = "workflow_status"
    id: str
    status: str


class WorkflowRefused(_State, frozen=True, kw_only=True):
    """This installation of distflow cannot run the workflow."""

    code: ClassVar[str] = "workflow_refused"
    message: str


class NodeBecameUnreachable(Struct, frozen=True, kw_only=True):
    """The node of an unfinished task does not answer."""

    code: ClassVar[str] = "node_unreachable"
    kind: ClassVar[str] = "node"
    node: str
    error: str


class NodeBecameReachable(Struct, frozen=True, kw_only=True):
    """A node that did not answer answers again."""

    code: ClassVar[str] = "node_reachable"
    kind: ClassVar[str] = "node"
    node: str


class GroupStatus(_State, frozen=True, kw_only=True):
    """The status of the group changed."""

    code: ClassVar[str] = "group_status"
    status: str
    message: str = ""


class GroupWaiting(_State, frozen=True, kw_only=True):
    """The reason why the group waits is new or has changed."""

    code: ClassVar[str] = "group_waiting"
    message: str


class GroupCannotStart(_State, frozen=True, kw_only=True):
    """The group ends before it has started."""

    code: ClassVar[str] = "group_cannot_start"
    message: str


class GroupRescheduled(_State, frozen=True, kw_only=True):
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


class CheckpointsDiffer(_State, frozen=True, kw_only=True):
    """The tasks of the group's next attempt begin with different files."""

    code: ClassVar[str] = "checkpoints_differ"
    sizes: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)
    """Checkpoint directory → task → bytes; ``None`` for a task without a checkpoint of that directory."""
    message: str = ""
    """In a record of an older distflow: the sentence."""


class LeaseGranted(_State, frozen=True, kw_only=True):
    """The group has its nodes."""

    code: ClassVar[str] = "lease_granted"
    nodes: Mapping[str, str]
    """Task → node."""
    port: int | None = None
    left_out: tuple[str, ...] = ()
    """Tasks that this attempt runs without."""


class VenvReady(_State, frozen=True, kw_only=True):
    """A node has built the Python environment of the group."""

    code: ClassVar[str] = "venv_ready"
    node: str
    file: str
    """The requirements file."""
    tool: str
    """``uv`` or ``pip``."""
    seconds: float


class HangSuspected(_State, frozen=True, kw_only=True):
    """No task of a group has printed anything or sent a heartbeat for longer than ``hang_timeout``."""

    code: ClassVar[str] = "hang"
    limit_s: float | None = None
    """The group's ``hang_timeout``; ``None`` in a record of an older distflow."""
    workflow_id: str = ""


class HangOver(_State, frozen=True, kw_only=True):
    """A task of a group that seemed to hang has made progress again."""

    code: ClassVar[str] = "hang_over"


class TaskStatus(_State, frozen=True, kw_only=True):
    """The status of the task changed."""

    code: ClassVar[str] = "task_status"
    status: str
    message: str = ""


class TaskReady(_State, frozen=True, kw_only=True):
    """The task's node has everything that its start needs."""

    code: ClassVar[str] = "task_ready"
    node: str | None


class TaskCannotStart(_State, frozen=True, kw_only=True):
    """The task could not be prepared on its node."""

    code: ClassVar[str] = "task_cannot_start"
    message: str


class TaskStarted(_State, frozen=True, kw_only=True):
    """The task's command runs."""

    code: ClassVar[str] = "task_started"
    node: str | None
    pid: int | None
    ranks: str = ""
    """Its global ranks, such as ``8-15``; empty without a world."""


class LeaseLost(_State, frozen=True, kw_only=True):
    """The task lost its lease on the node before it was started."""

    code: ClassVar[str] = "lease_lost"


class AttemptForgotten(_State, frozen=True, kw_only=True):
    """The node has no record of an attempt that should run there."""

    code: ClassVar[str] = "attempt_forgotten"
    node: str | None = None
    message: str = ""
    """In a record of an older distflow: the sentence."""


class OrphanStopping(_State, frozen=True, kw_only=True):
    """The node of an attempt that was given up is back, and stops the attempt."""

    code: ClassVar[str] = "orphan_stopping"
    node: str | None


class OrphanGone(_State, frozen=True, kw_only=True):
    """All processes of an attempt that was given up are gone."""

    code: ClassVar[str] = "orphan_gone"
    node: str | None


class OrphanNotSeen(_State, frozen=True, kw_only=True):
    """The node of an attempt that was given up did not answer again within the retention time."""

    code: ClassVar[str] = "orphan_not_seen"
    node: str | None


class OutputCollected(_State, frozen=True, kw_only=True):
    """The task's output is in the blob store, or in storage that all nodes can read."""

    code: ClassVar[str] = "output_collected"
    size: int
    """Bytes."""
    is_everywhere: bool = False
    left_out: tuple[str, ...] = ()
    """Names of sockets, pipes and devices, which archives cannot contain."""


class OutputHeldBack(_State, frozen=True, kw_only=True):
    """The task's printed output stays on its node, because this machine cannot store it: usually, its disk is almost full."""

    code: ClassVar[str] = "output_held_back"
    node: str | None


class OutputLosing(_State, frozen=True, kw_only=True):
    """Printed output of the task is being lost, because its node cannot store it: usually, its disk is full."""

    code: ClassVar[str] = "output_losing"
    node: str | None


class InputFetched(_State, frozen=True, kw_only=True):
    """An input from a URL was copied to the blob store, or only looked up because nodes fetch it themselves."""

    code: ClassVar[str] = "input_fetched"
    url: str
    files: int
    size: int
    """Bytes of the files."""
    is_direct: bool = False
    """Whether the nodes fetch it themselves."""


class InputEmpty(_State, frozen=True, kw_only=True):
    """An input from a URL has no files."""

    code: ClassVar[str] = "input_empty"
    url: str
    regex: str = ""


class OutputWritten(_State, frozen=True, kw_only=True):
    """An output was written to its URL."""

    code: ClassVar[str] = "output_written"
    url: str
    files: int
    size: int
    """Bytes of the files."""


class OutputEmpty(_State, frozen=True, kw_only=True):
    """An output has no files to write."""

    code: ClassVar[str] = "output_empty"
    url: str
    regex: str = ""


class DataRelayed(_State, frozen=True, kw_only=True):
    """The task's node cannot transfer an input or an output by itself, so it passes through this machine."""

    code: ClassVar[str] = "data_relayed"
    is_input: bool
    url: str
    why: str


class DataFailed(_State, frozen=True, kw_only=True):
    """An input could not be fetched, or an output could not be written."""

    code: ClassVar[str] = "data_failed"
    is_input: bool
    error: str


class CheckpointFailed(_State, frozen=True, kw_only=True):
    """A checkpoint was not taken, or not written to its URL."""

    code: ClassVar[str] = "checkpoint_failed"
    is_taken: bool
    """Whether the checkpoint was copied to this machine, and only writing it to its URL failed."""
    error: str


class CheckpointFilesLeftOut(_State, frozen=True, kw_only=True):
    """A checkpoint lacks files: those that kept changing, links that lead out of its directory, sockets, pipes or devices."""

    code: ClassVar[str] = "checkpoint_files_left_out"
    files: tuple[str, ...]


class NotificationSent(Struct, frozen=True, kw_only=True):
    """A notification about the workflow was sent."""

    code: ClassVar[str] = "notification_sent"
    kind: ClassVar[str] = "notification"
    on: str
    """The event that it reports, such as ``failed``."""
    target: str
    """The name of the entry of ``notify``, without any secret."""


class NotificationFailed(Struct, frozen=True, kw_only=True):
    """A notification about the workflow was not sent, and is not tried again."""

    code: ClassVar[str] = "notification_failed"
    kind: ClassVar[str] = "notification"
    on: str
    target: str
    error: str


class CheckpointWritten(_State, frozen=True, kw_only=True):
    """A checkpoint was written to its URL."""

    code: ClassVar[str] = "checkpoint_written"
    url: str
    files: int
    size: int
    """Bytes of the files."""


EventDetails = (
    Message | WorkflowSubmitted | WorkflowAdopted | CancelRequested | WorkflowStatus | WorkflowRefused
    | NodeBecameUnreachable | NodeBecameReachable
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
    return NodeBecameUnreachable(node=node, error=error) if status == "unreachable" else NodeBecameReachable(node=node)
