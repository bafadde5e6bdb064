"""The commands that a decision can contain (a closed union), and the observations that answer them. Without I/O."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from distflow.backends.base import (
    Absent,
    AttemptKey,
    AttemptObservation,
    CheckpointRef,
    Collected,
    CollectFailed,
    Collecting,
    CollectUnanswered,
    Ended,
    InputNotFetched,
    Leased,
    LeaseObservation,
    LeaseRefused,
    LeaseRequest,
    LeaseWaits,
    LogComplete,
    OutputLost,
    OutputWaits,
    Prepared,
    PrepareFailed,
    Released,
    Staging,
    Started,
    StopAccepted,
    Unanswered,
    VenvBuilt,
    VenvFailed,
    VenvObservation,
    VenvProgress,
)
from distflow.state.record import DataRef, TransferRecord

__all__ = [
    "BuildVenv",
    "CollectOutput",
    "Command",
    "CommandId",
    "Lease",
    "PackCheckpoint",
    "Prepare",
    "Release",
    "Start",
    "Stop",
    "TransferData",
    "TransferEnded",
    "TransferMoved",
    "answered",
]


class CommandId(NamedTuple):
    """Identifies a command while it waits for its answer. Commands that must not run at the same time have equal ids."""

    kind: type[object]
    """The command's class."""
    workflow: str
    """The workflow's uuid."""
    group: str
    task: str
    """Empty for a lease, which concerns the whole group."""
    attempt: int
    part: int | DataRef | None = None
    """The index of the checkpoint directory, or the data to transfer."""

    @classmethod
    def of(cls, kind: type[object], key: AttemptKey, part: int | DataRef | None = None) -> CommandId:
        """Return the id of a command for an attempt."""
        return cls(kind, key.workflow, key.group, key.task, key.attempt, part)


class _AboutAttempt(Struct, frozen=True):
    pool: str
    key: AttemptKey

    @property
    def id(self) -> CommandId:
        """The id by which ``answered`` matches an answer with the command."""
        return CommandId.of(type(self), self.key)


class Lease(Struct, frozen=True):
    """Lease the nodes, GPUs, CPUs, memory and port of a whole group."""

    pool: str
    request: LeaseRequest

    @property
    def key(self) -> AttemptKey:
        """The group's attempt; task and node are empty."""
        one = self.request
        return AttemptKey(workflow=one.workflow, group=one.group, task="", attempt=one.attempt, node="")

    @property
    def id(self) -> CommandId:
        """The id by which ``answered`` matches an answer with the command."""
        return CommandId.of(Lease, self.key)


class BuildVenv(_AboutAttempt, frozen=True):
    """Build the Python environment of a task on the node that it will probably get. The task has no lease yet."""


class Prepare(_AboutAttempt, frozen=True):
    """Bring a task's launch record, files, inputs and container image to its node."""


class Start(_AboutAttempt, frozen=True):
    """Start a prepared task."""


class Stop(_AboutAttempt, frozen=True):
    """Stop a task."""

    grace_s: float = 0.0
    """Seconds between TERM and KILL."""
    why: str = ""


class Release(_AboutAttempt, frozen=True):
    """Give back the lease of a task that has not started."""


class CollectOutput(_AboutAttempt, frozen=True):
    """Bring the output of an ended task to the blob store, or find it in storage that all nodes can read."""

    for_nodes: bool = False
    """Whether only nodes need the output, so that it may stay in shared storage."""


class PackCheckpoint(_AboutAttempt, frozen=True):
    """Bring a checkpoint of a task to the blob store."""

    checkpoint: CheckpointRef

    @property
    def id(self) -> CommandId:
        """The id of the command. Checkpoints of one directory share it.

        The final checkpoint thus waits until the previous one is packed.
        """
        return CommandId.of(PackCheckpoint, self.key, self.checkpoint.number)


class TransferData(_AboutAttempt, frozen=True):
    """Transfer data between a URL and this machine or a node.

    A ``TransferRunner`` executes this command, not a backend. Its key has no node.
    """

    data: DataRef

    @property
    def id(self) -> CommandId:
        """The id by which ``answered`` matches an answer with the command."""
        return CommandId.of(TransferData, self.key, self.data)


Command = Lease | BuildVenv | Prepare | Start | Stop | Release | CollectOutput | PackCheckpoint | TransferData
"""Every command that a decision can contain."""


class _OfTransfer(Struct, frozen=True, kw_only=True):
    at: float
    """By this machine's clock."""
    key: AttemptKey
    """The task's attempt; the node is empty."""
    data: DataRef
    url: str
    """The dataset, or the URL without secrets, for messages."""


class TransferMoved(_OfTransfer, frozen=True, kw_only=True):
    """The progress of a data transfer, in bytes."""

    done: int
    total: int
    bytes_per_s: float = 0.0


class TransferEnded(_OfTransfer, frozen=True, kw_only=True):
    """The end of a data transfer, successful or not."""

    outcome: TransferRecord


def answered(
    observation: LeaseObservation | VenvObservation | AttemptObservation | TransferMoved | TransferEnded,
) -> tuple[CommandId, ...]:
    """Return the ids of the commands that this observation answers.

    A report of an attempt's status answers the attempt's ``Prepare``, ``Start``, ``Stop`` and ``Release``.
    """
    match observation:
        case Leased() | LeaseRefused():
            gang = AttemptKey(
                workflow=observation.workflow, group=observation.group, task="", attempt=observation.attempt, node=""
            )
            return (CommandId.of(Lease, gang),)
        case VenvBuilt() | VenvFailed():
            return (CommandId.of(BuildVenv, observation.key),)
        case TransferEnded():
            return (CommandId.of(TransferData, observation.key, observation.data),)
        case Collected() | CollectFailed() | CollectUnanswered():
            if observation.checkpoint is None:
                return (CommandId.of(CollectOutput, observation.key),)
            return (CommandId.of(PackCheckpoint, observation.key, observation.checkpoint.number),)
        case (
            LeaseWaits()
            | LogComplete()
            | OutputLost()
            | OutputWaits()
            | Staging()
            | Collecting()
            | TransferMoved()
            | VenvProgress()
        ):
            return ()
        case (
            Prepared() | PrepareFailed() | InputNotFetched() | Started() | StopAccepted() | Ended() | Released() | Absent()
            | Unanswered()
        ):  # fmt: skip
            return tuple(CommandId.of(kind, observation.key) for kind in (Prepare, Start, Stop, Release))
