"""The protocol of a backend: commands go in and return at once, observations come out when something was seen.

An observation is a fact with the time at which it was seen; an answer to a command is an observation too. What
follows from it is decided elsewhere (``supervisor.decide``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from distflow.lifecycle.clocks import Clock
from distflow.plan.credentials import GivenSecrets
from distflow.plan.model import Binding, BoundLaunch
from distflow.pools.model import Node
from distflow.protocol.attempts import attempt_name

if TYPE_CHECKING:
    from distflow.storage.base import Progress
    from distflow.storage.credentials import Identity
    from distflow.storage.task_data import Delivered, Delivery

__all__ = [
    "Absent",
    "AttemptKey",
    "AttemptObservation",
    "Backend",
    "CheckpointRef",
    "CollectFailed",
    "CollectUnanswered",
    "Collected",
    "Collecting",
    "Ended",
    "LeaseObservation",
    "LeaseRefused",
    "LeaseRequest",
    "Leased",
    "LogComplete",
    "LogSink",
    "NodeDown",
    "NodeObservation",
    "NodeUp",
    "NotBrought",
    "Observation",
    "OutputLost",
    "OutputWaits",
    "PrepareFailed",
    "Prepared",
    "Released",
    "Sink",
    "Staging",
    "Started",
    "StopAccepted",
    "Unanswered",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptKey:
    """One attempt of a task, and where it is."""

    workflow: str
    """uuid"""
    group: str
    task: str
    attempt: int
    node: str

    @property
    def name(self) -> str:
        """How its node calls it."""
        return attempt_name(self.workflow, self.group, self.task, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """What a gang asks of its nodes: all of it, or nothing."""

    workflow: str
    group: str
    attempt: int
    nodes: Mapping[str, str]
    """Task → node."""
    gpus: Mapping[str, int]
    """Task → number of GPUs."""
    cpus: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Task → number of CPUs."""
    memory: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Task → bytes."""
    master: str
    """The task whose node hosts the rendezvous."""
    port: int | str | None = None
    """``any``: a free one; a number: that one; ``None``: the group needs none."""
    workflow_id: str = ""
    """How people call the workflow, for messages about its leases."""
    start_timeout_s: float = 120.0
    """How long the nodes hold the lease for a start that does not come."""

    def key(self, task: str) -> AttemptKey:
        """Return the attempt of one task, where it is to be."""
        return AttemptKey(workflow=self.workflow, group=self.group, task=task, attempt=self.attempt, node=self.nodes[task])


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """One of the directories that are a task's checkpoints."""

    number: int
    """Which entry of the task's ``checkpoint``, counted from 0."""
    is_last: bool = False
    """It is taken once the task has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Observed:
    at: float
    """The submitter's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUp(_Observed):
    """A node answers; what it says of its attempts follows as observations of their own."""

    pool: str
    node: str
    gpus: int | None = None
    """As found there; ``None`` when not known."""
    cpus: int | None = None
    memory: int | None = None
    platform: str | None = None
    machine: str = ""
    """Equal for nodes whose leases are the same files: pool entries of one machine; empty when not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDown(_Observed):
    """A node cannot be reached at present; what runs there may still run."""

    pool: str
    node: str
    error: str
    since: float | None = None
    """When it was heard last; ``None``: it has not answered since it was said to be down, or never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased(_Observed):
    """A gang has its nodes, GPUs and port."""

    workflow: str
    group: str
    attempt: int
    binding: Binding


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRefused(_Observed):
    """A gang did not get everything, so it has nothing."""

    workflow: str
    group: str
    attempt: int
    nodes: Mapping[str, str]
    """What each node said that refused, or did not answer."""
    is_final: bool = False
    """Trying again would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfAttempt(_Observed):
    key: AttemptKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging(_OfAttempt):
    """Its files are on their way to the node."""

    sent: int
    """Bytes that are there."""
    total: int
    """Bytes of all that the node lacked."""
    bytes_per_s: float
    image: str = ""
    """The container image that is being pulled; then nobody knows how many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(_OfAttempt):
    """Everything that the start needs is on the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareFailed(_OfAttempt):
    """The node refused, for good."""

    message: str
    is_image: bool = False
    """It was the container image that could not be had."""
    is_data: bool = False
    """It was an input that could not be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotBrought(_OfAttempt):
    """Its node cannot fetch an input by itself; nothing else is wrong with the attempt."""

    number: int
    """Which input: ``Bring.number``."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(_OfAttempt):
    """The command runs."""

    pid: int | None
    started_at: float
    """The node's clock."""
    clock: Clock | None = None
    """How far that is from ours; ``None`` where nobody measured it."""
    directory: str = ""
    """The attempt's directory on the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAccepted(_OfAttempt):
    """The ladder has begun."""

    grace_s: float | None = None
    """What it was given between TERM and KILL; ``None`` where the node tells of it without having been asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(_OfAttempt):
    """Nothing of the attempt is left on the node."""

    end: Mapping[str, object]
    """The record of the node (``docs/agent-protocol.md``, ``End``); its times are those of the node's clock."""
    clock: Clock | None = None
    """How far that is from ours; ``None`` where nobody measured it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(_OfAttempt):
    """The lease was given back before anything had started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent(_OfAttempt):
    """The node knows nothing of the attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collecting(_OfAttempt):
    """Its output is on its way here, or a checkpoint."""

    checkpoint: CheckpointRef | None = None
    """``None``: it is the output."""
    is_packed: bool
    """False: it is being packed on its node."""
    done: int
    """Bytes that are packed, or here."""
    total: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected(_OfAttempt):
    """Its output is here, or a checkpoint: a tar in the blob store."""

    checkpoint: CheckpointRef | None = None
    digest: str
    """SHA-256, hexadecimal; empty for a checkpoint of which there is nothing yet."""
    size: int
    """Bytes of the archive."""
    left_out: tuple[str, ...] = ()
    """Names of what no archive can hold (sockets, pipes, devices)."""
    is_everywhere: bool = False
    """It was not brought here: every node of the pool sees it already, on a file system that they share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectFailed(_OfAttempt):
    """Its output will not come, for good; or not this checkpoint."""

    checkpoint: CheckpointRef | None = None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogComplete(_OfAttempt):
    """All of the attempt's output has been handed to the log sink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLost(_OfAttempt):
    """Output of the running attempt is being lost, because its node's disk is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputWaits(_OfAttempt):
    """Output of the attempt, and perhaps of others on its node, stays there: there is no room for it here now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered(_OfAttempt):
    """A command to prepare, start, stop or release got no answer, because the connection broke.

    It may or may not have been carried out.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectUnanswered(_OfAttempt):
    """The connection broke before an output or a checkpoint had come."""

    checkpoint: CheckpointRef | None = None


NodeObservation = NodeUp | NodeDown
LeaseObservation = Leased | LeaseRefused
AttemptObservation = (
    Staging | Prepared | PrepareFailed | NotBrought | Started | StopAccepted | Ended | Released | Absent
    | Collecting | Collected | CollectFailed | CollectUnanswered | LogComplete | OutputLost | OutputWaits | Unanswered
)  # fmt: skip
Observation = NodeObservation | LeaseObservation | AttemptObservation
"""Everything that a backend may report."""

Sink = Callable[[Observation], None]
"""Takes observations; may be called from any thread."""


class LogSink(Protocol):
    """Takes the output of attempts; may be called from several threads, for one attempt's file never from two at once."""

    def reached(self, key: AttemptKey, kind: str) -> tuple[str, int]:
        """Return the newest file of the output (``log``) or its index (``idx``) that is here, and how many bytes of it."""
        ...

    def write(self, key: AttemptKey, file: str, offset: int, data: bytes) -> None:
        """Take what stands at ``offset`` of a file; what is here already may come again.

        Raises ``OSError`` where there is no room, ``ValueError`` when that is not a file of the output.
        """
        ...

    def has_room(self) -> bool:
        """Return whether output can be written now."""
        ...

    def beat(self, key: AttemptKey, at: float) -> None:
        """Take note that an attempt gave a sign of life at ``at``, in seconds since the epoch by our clock. Never raises."""
        ...


class Backend(Protocol):
    """Runs plans on one pool.

    Contract, held by ``tests/contract/test_backend.py``:

    1. No method but ``deliver`` blocks; answers and everything else that is seen go to the sink that the backend was built
       with.
    2. Every ``lease`` is answered by ``Leased`` or ``LeaseRefused``; every other command by an observation of its
    attempt, or by
       ``Unanswered`` or ``CollectUnanswered`` when the connection broke. All commands may be repeated: they answer what
       already is.
    3. A lease is all or nothing.
    4. ``Ended`` is said only when no process of the attempt is left, and is said again after a reconnection.
    5. For every watched attempt the log sink gets all of its output in order, then comes ``LogComplete``.
    6. ``collect`` may be asked again while it is under way; it is then answered once.
    7. What a node says of its times goes with ``clock``: how far its clock is from ours, and how sure that is.
    8. ``close`` may be called twice, never raises, and stops nothing that runs.
    """

    def connect(self, nodes: Sequence[Node]) -> None:
        """Hold connections to these nodes from now on, and say ``NodeUp`` or ``NodeDown``."""
        ...

    def watch(self, keys: Sequence[AttemptKey]) -> None:
        """Observe these attempts of an earlier time, and mirror their output."""
        ...

    def lease(self, request: LeaseRequest) -> None:
        """Try to get everything that a gang asks for."""
        ...

    def prepare(self, key: AttemptKey, launch: BoundLaunch, secrets: GivenSecrets, stop_grace_s: float, memo: str = "") -> None:
        """Bring files and launch record to the node; ``memo`` is kept with them as it is, for whoever asks the node later."""
        ...

    def start(self, key: AttemptKey) -> None:
        """Start a prepared attempt."""
        ...

    def stop(self, key: AttemptKey, *, grace_s: float, why: str) -> None:
        """Stop an attempt by the ladder."""
        ...

    def release(self, key: AttemptKey) -> None:
        """Give back the lease of an attempt that has not started."""
        ...

    def collect(
        self, key: AttemptKey, checkpoint: CheckpointRef | None = None, place: str | None = None, *, for_nodes: bool = False
    ) -> None:
        """Bring the output of an ended attempt to this machine's blob store.

        With ``checkpoint``, that checkpoint, which is the directory ``place`` of the attempt; the attempt may still run.
        ``for_nodes``: only nodes will want it, so that it may stay where all of them see it.
        """
        ...

    def deliver(
        self, key: AttemptKey, delivery: Delivery, identity: Identity, halt: threading.Event, told: Progress
    ) -> Delivered:
        """Have its node bring the output of an ended attempt to its store; called in a thread, returns when all is there.

        May be repeated. A node that is away is waited for, until ``halt``. Raises ``NotDirect`` when it must be relayed,
        ``StorageError`` when that would not help either, and ``Halted``.
        """
        ...

    def close(self) -> None:
        """Let go of all connections."""
        ...
