"""The protocol of a backend: commands return at once, except ``deliver`` and ``close``.

Observations report the results of commands, except the result of ``deliver``. An observation is a fact with the time at which
it was seen. ``supervisor.decide`` determines the next commands from the observations.

An engine is a system that allocates nodes: Slurm, Kubernetes or Ray.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct, field

from distflow.documents.requirements import Requirements
from distflow.lifecycle.clocks import Clock
from distflow.lifecycle.states import Reason
from distflow.plan.credentials import TaskSecrets
from distflow.plan.model import Binding, BoundLaunch
from distflow.pools.model import Node
from distflow.protocol.names import attempt_name

if TYPE_CHECKING:
    from distflow.storage.base import Progress
    from distflow.storage.credentials import Identity
    from distflow.storage.task_data import Delivered, Delivery

__all__ = [
    "NO_EXIT_CODES",
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
    "InputNotFetched",
    "LeaseObservation",
    "LeaseRefused",
    "LeaseRequest",
    "LeaseWaits",
    "Leased",
    "LogComplete",
    "LogSink",
    "NodeDown",
    "NodeObservation",
    "NodeUp",
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
    "VenvBuilt",
    "VenvFailed",
    "VenvObservation",
    "VenvProgress",
]


class AttemptKey(Struct, frozen=True, kw_only=True):
    """One attempt of a task, and its node."""

    workflow: str
    """The workflow's uuid."""
    group: str
    task: str
    attempt: int
    node: str

    @property
    def name(self) -> str:
        """The attempt's name on its node."""
        return attempt_name(self.workflow, self.group, self.task, self.attempt)


class LeaseRequest(Struct, frozen=True, kw_only=True):
    """A gang's request to its nodes: everything is leased, or nothing."""

    workflow: str
    group: str
    attempt: int
    nodes: Mapping[str, str]
    """Task → node; empty names if an engine chooses the nodes."""
    gpus: Mapping[str, int]
    """Task → number of GPUs."""
    cpus: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Task → number of CPUs."""
    memory: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Task → bytes."""
    master: str
    """The task whose node hosts the rendezvous."""
    port: int | str | None = None
    """``any`` for a free port, a number for that port, or ``None`` if the group needs no port."""
    workflow_id: str = ""
    """The workflow's id for people, for messages about its leases."""
    start_timeout_s: float = 120.0
    """Seconds after which a node without a connection releases the lease if no ``start`` has arrived."""
    venvs: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Task → digest of its Python environment, which its node must have. Other tasks need none."""
    platforms: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Task → platform, for tasks that name one. An engine that chooses the nodes needs it."""
    excluded: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Task → names of nodes that an engine must not choose."""
    time_limit_s: float | None = None
    """The longest time that the gang may need its nodes; ``None`` if it is not known."""
    margin_s: float = 0.0
    """The part of ``time_limit_s`` for preparation and outputs. An engine may reduce both by the same amount."""
    images: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Task → container image, for tasks that name one. An engine whose nodes are containers needs it."""
    mounts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Task → directories of the host in that container, each ``src`` or ``src:dst``."""
    priority: str = "NORMAL"
    """The priority of its workflow."""

    def key(self, task: str) -> AttemptKey:
        """Return the attempt of one task on its node."""
        return AttemptKey(workflow=self.workflow, group=self.group, task=task, attempt=self.attempt, node=self.nodes[task])


class CheckpointRef(Struct, frozen=True):
    """One of a task's checkpoint directories."""

    number: int
    """Index of the entry in the task's ``checkpoint``, from 0."""
    is_last: bool = False
    """Whether it is collected after the task has ended."""


class _Observed(Struct, frozen=True, kw_only=True):
    at: float
    """Time by the submitter's clock (``backends.steady``), in seconds since the epoch."""


class NodeUp(_Observed, frozen=True, kw_only=True):
    """A node is connected. The status of its attempts follows as separate observations."""

    pool: str
    node: str
    gpus: int | None = None
    """Number of GPUs found on the node; ``None`` if unknown."""
    cpus: int | None = None
    memory: int | None = None
    """In bytes."""
    platform: str | None = None
    lease_directory_id: str = ""
    """Nodes with the same id are one machine, and share their lease files. Empty if unknown."""


class NodeDown(_Observed, frozen=True, kw_only=True):
    """A node is unreachable at present. Its tasks may still run."""

    pool: str
    node: str
    error: str
    since: float | None = None
    """Time of the last message. ``None`` if the node was not up since the last ``NodeDown``, or if its allocation has ended."""
    needs_action: bool = False
    """Whether a person must repair the login, the host key, or the Python or ``root`` of the node before a retry can help."""
    is_engine_away: bool = False
    """Whether the engine that allocated the node is unreachable too. Then it is unknown whether the node has failed."""


class Leased(_Observed, frozen=True, kw_only=True):
    """A gang has leased its nodes, GPUs and port."""

    workflow: str
    group: str
    attempt: int
    binding: Binding


class LeaseRefused(_Observed, frozen=True, kw_only=True):
    """A gang's lease request failed, so the gang holds nothing."""

    workflow: str
    group: str
    attempt: int
    nodes: Mapping[str, str]
    """Node → reason, for each node that refused or did not answer, except those in ``without_venv``. The empty name stands for
    the engine."""
    is_final: bool = False
    """Whether trying again would not help."""
    reason: Reason = Reason.START_ERROR
    """The reason of the group's end, if it is final."""
    without_venv: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Task → node, for each node that must first build the Python environment."""


class LeaseWaits(_Observed, frozen=True, kw_only=True):
    """A gang waits for nodes of an engine, or for connections to them. The lease request is still open."""

    workflow: str
    group: str
    attempt: int
    message: str


class _OfAttempt(_Observed, frozen=True, kw_only=True):
    key: AttemptKey


class VenvProgress(_OfAttempt, frozen=True, kw_only=True):
    """The Python environment of the task is being built on its node. The attempt does not exist yet."""

    message: str
    """The last output line of the tool that builds it, or why the build waits."""
    seconds: float


class VenvBuilt(_OfAttempt, frozen=True, kw_only=True):
    """The task's node has the Python environment."""

    tool: str
    """``uv`` or ``pip``; empty if the node had the environment already."""
    seconds: float


class VenvFailed(_OfAttempt, frozen=True, kw_only=True):
    """The Python environment could not be built on the task's node."""

    message: str
    is_final: bool
    """False if the node was unreachable, so that another try or another node may succeed."""


class Staging(_OfAttempt, frozen=True, kw_only=True):
    """The task's files are being copied to the node, the node fetches an input, or it pulls the container image."""

    sent: int
    """Bytes that are on the node."""
    total: int
    """Bytes of all missing files, or of the input; 0 while an image is pulled."""
    bytes_per_s: float
    image: str = ""
    """The container image that is being pulled, whose size is unknown; otherwise empty."""


class Prepared(_OfAttempt, frozen=True, kw_only=True):
    """The node has everything for the start."""


class PrepareFailed(_OfAttempt, frozen=True, kw_only=True):
    """The attempt cannot be prepared or started, and the backend no longer tries."""

    message: str
    is_image: bool = False
    """Whether the container image was the cause."""
    is_data: bool = False
    """Whether an input was the cause."""


class InputNotFetched(_OfAttempt, frozen=True, kw_only=True):
    """The node cannot fetch an input itself. The attempt can continue if this machine fetches the input and sends it."""

    number: int
    """Number of the input: ``Download.number``."""
    why: str


class Started(_OfAttempt, frozen=True, kw_only=True):
    """The command has started."""

    pid: int | None
    started_at: float
    """Time of the node's clock."""
    clock: Clock | None = None
    """Offset of the node's clock from this machine's; ``None`` if it was not measured."""
    directory: str = ""
    """The attempt's directory on the node."""


class StopAccepted(_OfAttempt, frozen=True, kw_only=True):
    """The stop has begun: the command, if it runs, has got TERM."""

    grace_s: float | None = None
    """Time between TERM and KILL; ``None`` if the report is not the answer to a ``stop``."""


class Ended(_OfAttempt, frozen=True, kw_only=True):
    """The attempt has ended. Its processes were ended before, as far as the node or the engine could do that."""

    end: Mapping[str, object]
    """The node's record (``docs/agent-protocol.md``, ``End``), or the backend's record if the node's allocation has ended.
    Its times are those of the node's clock."""
    clock: Clock | None = None
    """Offset of the node's clock from this machine's; ``None`` if it was not measured."""
    has_files: bool | None = None
    """Whether there are files in its ``{{output}}``; ``None`` if that is not known."""


class Released(_OfAttempt, frozen=True, kw_only=True):
    """The lease was released before anything had started."""


class Absent(_OfAttempt, frozen=True, kw_only=True):
    """The node has no such attempt."""


class Collecting(_OfAttempt, frozen=True, kw_only=True):
    """The output or a checkpoint is being packed or copied here."""

    checkpoint: CheckpointRef | None = None
    """``None`` for the output."""
    is_packed: bool
    """False while it is being packed on its node."""
    done: int
    """Bytes that are packed or copied."""
    total: int
    bytes_per_s: float


class Collected(_OfAttempt, frozen=True, kw_only=True):
    """The output or a checkpoint was packed as a tar archive. It is in this machine's blob store, unless ``is_everywhere``."""

    checkpoint: CheckpointRef | None = None
    digest: str
    """SHA-256, hexadecimal; empty for a checkpoint without files."""
    size: int
    """Bytes of the archive."""
    left_out: tuple[str, ...] = ()
    """Names of files that were left out: sockets, pipes and devices. In a checkpoint also: files that kept changing, and links
    to something outside of the parent directory that is not a file. After three names, the number of the others."""
    is_everywhere: bool = False
    """Whether the archive was not copied to this machine, because every node of the pool has it: on a shared file system, or
    because the pool has only one node."""


class CollectFailed(_OfAttempt, frozen=True, kw_only=True):
    """The output or this checkpoint cannot be collected, and the backend no longer tries."""

    checkpoint: CheckpointRef | None = None
    message: str


class LogComplete(_OfAttempt, frozen=True, kw_only=True):
    """The log sink gets no more output of the attempt: the output is complete, or the allocation of its node has ended."""


class OutputLost(_OfAttempt, frozen=True, kw_only=True):
    """Output of the running attempt is being lost, because its node cannot store it, usually on a full disk."""


class OutputWaits(_OfAttempt, frozen=True, kw_only=True):
    """Output of the attempt, and perhaps of others, stays on its node, because this machine cannot store it now."""


class Unanswered(_OfAttempt, frozen=True, kw_only=True):
    """A command to prepare, start, stop or release has no result yet.

    The connection broke, or the agent answered a stop or a release with an error. The node may or may not have executed it.
    """


class CollectUnanswered(_OfAttempt, frozen=True, kw_only=True):
    """The connection broke before an output or a checkpoint was complete."""

    checkpoint: CheckpointRef | None = None


NodeObservation = NodeUp | NodeDown
LeaseObservation = Leased | LeaseRefused | LeaseWaits
VenvObservation = VenvProgress | VenvBuilt | VenvFailed
AttemptObservation = (
    Staging | Prepared | PrepareFailed | InputNotFetched | Started | StopAccepted | Ended | Released | Absent
    | Collecting | Collected | CollectFailed | CollectUnanswered | LogComplete | OutputLost | OutputWaits | Unanswered
)  # fmt: skip
Observation = NodeObservation | LeaseObservation | VenvObservation | AttemptObservation
"""Everything that a backend may report."""

Sink = Callable[[Observation], None]
"""Receives observations. It may be called from any thread."""


class LogSink(Protocol):
    """Receives the output of attempts. It may be called from several threads, but from one at a time for each file."""

    def resume_position(self, key: AttemptKey, kind: str) -> tuple[str, int]:
        """Return the position at which mirroring continues: the newest mirrored file of a kind, and its length in bytes.

        The kinds are ``log`` (the output), ``idx`` (its index) and ``samples`` (the resource samples).
        """
        ...

    def write(self, key: AttemptKey, file: str, offset: int, data: bytes) -> None:
        """Store ``data`` at ``offset`` of a file. The same data may arrive again.

        Raises ``OSError`` if this machine cannot store the data. Raises ``ValueError`` if ``file`` is not a file of the
        attempt, or if the file is shorter than ``offset``.
        """
        ...

    def has_room(self) -> bool:
        """Return whether there is room for output now."""
        ...

    def record_heartbeat(self, key: AttemptKey, at: float) -> None:
        """Record an attempt's heartbeat at ``at``, in seconds since the epoch by this machine's clock. Never raises."""
        ...


NO_EXIT_CODES: Mapping[Any, int] = MappingProxyType({})
"""An empty mapping, as a default for parameters."""


class Backend(Protocol):
    """Runs plans on one pool.

    Contract, checked by ``tests/contract/test_backend.py``:

    1. Only ``deliver`` and ``close`` block. All observations, answers included, go to the backend's sink.
    2. Every ``lease`` is answered by ``Leased`` or ``LeaseRefused``, and every ``build_venv`` by ``VenvBuilt`` or
       ``VenvFailed``, unless ``keep`` or ``cancel_venv`` cancels it. ``prepare``, ``start``, ``stop``, ``release`` and
       ``collect`` are answered by an observation of their attempt, which is ``Unanswered`` or ``CollectUnanswered`` if the
       connection broke. All commands may be repeated: a repeated command reports the current state.
    3. A lease is all or nothing.
    4. Before ``Ended`` is reported, the node or the engine ends all processes of the attempt that it can end. ``Ended`` may be
       repeated after a reconnection.
    5. The log sink gets the output of every watched attempt in order, as far as its node keeps it. Then ``LogComplete`` is
       reported, also when the allocation of the node has ended.
    6. ``collect`` may be repeated while it is running; it is then answered once.
    7. Times from a node are reported with ``clock``: the offset of the node's clock from this machine's, with its uncertainty.
    8. ``close`` may be called twice, never raises, and stops no task.
    """

    def connect(self, nodes: Sequence[Node]) -> None:
        """Connect to these nodes, stay connected, and report ``NodeUp`` or ``NodeDown``."""
        ...

    def watch(self, keys: Sequence[AttemptKey]) -> None:
        """Observe these existing attempts, and mirror their output."""
        ...

    def lease(self, request: LeaseRequest) -> None:
        """Try to lease everything for a gang."""
        ...

    def keep(
        self,
        gangs: Collection[AttemptKey],
        ended: Collection[str] | None = None,
        exit_codes: Mapping[AttemptKey, int] = NO_EXIT_CODES,
    ) -> None:
        """Release this backend's allocations of all gangs that are not in ``gangs``, if an engine chooses the nodes.

        Args:
            gangs: The attempts of groups that wait for nodes or still need theirs. Their keys have no task and no node.
            ended: The uuids of ended workflows. Allocations that an earlier process requested for these workflows, or for other
                gangs of the workflows in ``gangs``, are released, too. ``None``: do not search for such allocations.
            exit_codes: The exit codes of gangs that ended by themselves, for the engine's accounting. Keys as in ``gangs``.

        """
        ...

    def build_venv(self, key: AttemptKey, venv: Requirements) -> None:
        """Build the Python environment on the node of an attempt that has no lease yet. A build holds no resources."""
        ...

    def cancel_venv(self, key: AttemptKey) -> None:
        """Stop a ``build_venv`` that is no longer needed. There is no answer."""
        ...

    def prepare(self, key: AttemptKey, launch: BoundLaunch, secrets: TaskSecrets, stop_grace_s: float, memo: str = "") -> None:
        """Bring inputs, files, image and launch record to the node, which stores ``memo`` unchanged for later queries."""
        ...

    def start(self, key: AttemptKey) -> None:
        """Start a prepared attempt."""
        ...

    def stop(self, key: AttemptKey, *, grace_s: float, why: str) -> None:
        """Stop an attempt: TERM, the grace period, KILL."""
        ...

    def release(self, key: AttemptKey) -> None:
        """Release the lease of an attempt that has not started."""
        ...

    def collect(
        self, key: AttemptKey, checkpoint: CheckpointRef | None = None, place: str | None = None, *, for_nodes: bool = False
    ) -> None:
        """Copy the output of an ended attempt to this machine's blob store.

        With ``checkpoint``, copy that checkpoint from the directory ``place`` of the attempt, which may still run.
        ``for_nodes``: only nodes will need it, so it is not copied if every node of the pool has it.
        """
        ...

    def deliver(
        self, key: AttemptKey, delivery: Delivery, identity: Identity, halt: threading.Event, progress: Progress
    ) -> Delivered:
        """Let the node upload the output of an ended attempt to the store in ``delivery``. Blocks until everything is there.

        May be repeated. Waits for an unreachable node, until ``halt`` is set. Raises ``RelayRequired`` if this machine must
        relay it, ``StorageError`` if that would not help either, and ``TransferCanceled``.
        """
        ...

    def is_releasing(self) -> bool:
        """Return whether allocations that are no longer wanted are still being released."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...
