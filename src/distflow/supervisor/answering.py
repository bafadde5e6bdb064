"""Find the commands that an observation answers. Pure."""

from __future__ import annotations

from distflow.backends.base import (
    Absent,
    AttemptKey,
    AttemptObservation,
    Collected,
    CollectFailed,
    Collecting,
    CollectUnanswered,
    Ended,
    Leased,
    LeaseObservation,
    LeaseRefused,
    LogComplete,
    NotBrought,
    OutputLost,
    OutputWaits,
    Prepared,
    PrepareFailed,
    Released,
    Staging,
    Started,
    StopAccepted,
    Unanswered,
)
from distflow.supervisor.carrying import TransferEnded, TransferMoved
from distflow.supervisor.commands import CollectOutput, CommandId, Lease, PackCheckpoint, TransferData, answerable

__all__ = ["answered"]


def answered(seen: LeaseObservation | AttemptObservation | TransferMoved | TransferEnded) -> tuple[CommandId, ...]:
    """Return the commands that this observation answers.

    A report of an attempt's status answers all commands of the attempt, except those that collect or transfer data.
    """
    match seen:
        case Leased() | LeaseRefused():
            gang = AttemptKey(workflow=seen.workflow, group=seen.group, task="", attempt=seen.attempt, node="")
            return (CommandId.of(Lease, gang),)
        case TransferEnded():
            return (CommandId.of(TransferData, seen.key, seen.data),)
        case Collected() | CollectFailed() | CollectUnanswered():
            if seen.checkpoint is None:
                return (CommandId.of(CollectOutput, seen.key),)
            return (CommandId.of(PackCheckpoint, seen.key, seen.checkpoint.number),)
        case LogComplete() | OutputLost() | OutputWaits() | Staging() | Collecting() | TransferMoved():
            return ()
        case (
            Prepared() | PrepareFailed() | NotBrought() | Started() | StopAccepted() | Ended() | Released() | Absent()
            | Unanswered()
        ):  # fmt: skip
            return answerable(seen.key)
