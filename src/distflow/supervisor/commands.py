"""The commands that a decision gives: a closed union of values, matched exhaustively where they are carried out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from distflow.backends.base import AttemptKey, CheckpointRef, LeaseRequest
from distflow.state.record import DataRef

__all__ = [
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
    "answerable",
]


class CommandId(NamedTuple):
    """Identifies a command while it waits for its answer; equal for commands that must not be under way at once."""

    kind: type[object]
    """The command's class."""
    workflow: str
    """uuid"""
    group: str
    task: str
    """Empty for a lease, which is about the whole group."""
    attempt: int
    part: int | DataRef | None = None
    """Which checkpoint of the task, or which data."""

    @classmethod
    def of(cls, kind: type[object], key: AttemptKey, part: int | DataRef | None = None) -> CommandId:
        """Return the identity of a command about an attempt."""
        return cls(kind, key.workflow, key.group, key.task, key.attempt, part)


@dataclass(frozen=True, slots=True)
class _AboutAttempt:
    pool: str
    key: AttemptKey

    @property
    def identity(self) -> CommandId:
        """What tells whether this command is under way already."""
        return CommandId.of(type(self), self.key)


@dataclass(frozen=True, slots=True)
class Lease:
    """Get the nodes, GPUs and port of a whole group."""

    pool: str
    request: LeaseRequest

    @property
    def key(self) -> AttemptKey:
        """The group's attempt; task and node are empty."""
        one = self.request
        return AttemptKey(workflow=one.workflow, group=one.group, task="", attempt=one.attempt, node="")

    @property
    def identity(self) -> CommandId:
        """What tells whether this command is under way already."""
        return CommandId.of(Lease, self.key)


@dataclass(frozen=True, slots=True)
class Prepare(_AboutAttempt):
    """Bring a task's files and launch record to its node."""


@dataclass(frozen=True, slots=True)
class Start(_AboutAttempt):
    """Start a prepared task."""


@dataclass(frozen=True, slots=True)
class Stop(_AboutAttempt):
    """Stop a task."""

    grace_s: float = 0.0
    """Seconds between TERM and KILL."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Release(_AboutAttempt):
    """Give back the lease of a task that has not started."""


@dataclass(frozen=True, slots=True)
class CollectOutput(_AboutAttempt):
    """Bring the output of a task that has ended to the blob store."""

    for_nodes: bool = False
    """Only nodes will want it."""


@dataclass(frozen=True, slots=True)
class PackCheckpoint(_AboutAttempt):
    """Bring a checkpoint of a task to the blob store."""

    checkpoint: CheckpointRef

    @property
    def identity(self) -> CommandId:
        """The last checkpoint of a directory waits for the one that is under way, so both have one identity."""
        return CommandId.of(PackCheckpoint, self.key, self.checkpoint.number)


@dataclass(frozen=True, slots=True)
class TransferData(_AboutAttempt):
    """Move data between a URL and this machine, or have a node do it; no backend carries it out. The key has no node."""

    data: DataRef

    @property
    def identity(self) -> CommandId:
        """What tells whether this command is under way already."""
        return CommandId.of(TransferData, self.key, self.data)


Command = Lease | Prepare | Start | Stop | Release | CollectOutput | PackCheckpoint | TransferData
"""Everything that a decision may ask for."""


def answerable(key: AttemptKey) -> tuple[CommandId, ...]:
    """Return the identities of the commands that any report of an attempt's status answers."""
    return tuple(CommandId.of(kind, key) for kind in (Prepare, Start, Stop, Release))
