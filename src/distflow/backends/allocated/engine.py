"""The protocol of a cluster engine: allocations, their states, and transports to their nodes.

An allocation is the unit that an engine grants, such as a job of Slurm. It serves one attempt of one group. The engine queues
and places allocations. On each node, it starts one resident program (``runtime/services/resident.py``), which runs commands on
the node as long as the allocation exists.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar, Protocol

from msgspec import Struct, field

from distflow.backends.base import NO_EXIT_CODES
from distflow.backends.machines.checks.findings import Finding
from distflow.errors import DistflowError
from distflow.lifecycle.states import Reason
from distflow.transports.base import Transport

__all__ = [
    "Allocation",
    "AllocationRequest",
    "AllocationState",
    "Engine",
    "Granted",
    "NodeRequest",
    "Over",
    "QueryLimit",
    "Queued",
    "Relay",
    "RequestDelayed",
    "RequestRefused",
    "host_of",
    "node_name",
]

_MARK = "distflow"


class RequestRefused(DistflowError):
    """The engine will never grant the request, or the pool's settings or missing software prevent it."""


class RequestDelayed(DistflowError):
    """The engine does not accept the request now, for example because a quota is used up. The message quotes the engine."""


class Allocation(Struct, frozen=True, kw_only=True):
    """One attempt of a group, for which nodes are allocated."""

    workflow: str
    """The workflow's uuid."""
    group: str
    attempt: int

    @property
    def marker(self) -> str:
        """The text by which distflow finds its allocations in the engine's list: ``distflow:<uuid>/<group>/<attempt>``."""
        return f"{_MARK}:{self.workflow}/{self.group}/{self.attempt}"

    @classmethod
    def of_marker(cls, text: str) -> Allocation | None:
        """Return the allocation of a marker; ``None`` for any other text."""
        mark, _, rest = text.partition(":")
        parts = rest.split("/")
        if mark != _MARK or len(parts) != 3 or not all(parts) or not parts[2].isdecimal():
            return None
        return cls(workflow=parts[0], group=parts[1], attempt=int(parts[2]))


class NodeRequest(Struct, frozen=True, kw_only=True):
    """The resources that one task needs on its node."""

    task: str
    gpus: int = 0
    cpus: int = 0
    """0: the engine's minimum."""
    memory: int = 0
    """Bytes; 0: the engine's default."""
    platform: str | None = None
    """A key of the pool's ``platforms``."""
    excluded: tuple[str, ...] = ()
    """Hosts that must not be used."""
    image: str | None = None
    """The container image of the task, for engines whose nodes are containers."""
    mounts: tuple[str, ...] = ()
    """Directories of the host in that container, each ``src`` or ``src:dst``."""


class AllocationRequest(Struct, frozen=True, kw_only=True):
    """A request for the nodes of a whole group."""

    allocation: Allocation
    label: str
    """``<workflow id>/<group>``, for people."""
    nodes: tuple[NodeRequest, ...]
    time_limit_s: float | None = None
    """The longest time that the group may need its nodes, including ``margin_s``; ``None``: the limit of the pool."""
    margin_s: float = 0.0
    """The part of ``time_limit_s`` for preparation and outputs.

    An engine may reduce ``time_limit_s`` and ``margin_s`` by the same amount, so that the time for the tasks stays the same.
    """
    priority: str = "NORMAL"
    """The priority of its workflow: ``HIGH``, ``NORMAL`` or ``LOW``."""


class Queued(Struct, frozen=True):
    """The allocation waits for its nodes or their programs, or it is ending for a reason that is not known yet."""

    why: str
    """The reason in plain words, with the engine's term; empty if the engine gave none."""
    starts_at: float | None = None
    """The expected start, in seconds since the epoch."""


class Granted(Struct, frozen=True, kw_only=True):
    """The allocation has its nodes.

    Ray and Kubernetes report this state when the resident programs have started. Slurm reports it when the job has its hosts,
    and the programs may still be starting.
    """

    hosts: Mapping[str, str]
    """Task → host."""


class Over(Struct, frozen=True, kw_only=True):
    """The allocation has ended, and so have its processes, as far as the engine knows."""

    reason: Reason | None
    """The cause, such as ``PREEMPTED`` or ``NODE_LOST``.

    ``None`` if it is unknown, for example if distflow's programs ended by themselves.
    """
    message: str
    """The engine's explanation in plain words."""
    hosts: Collection[str] = field(default_factory=tuple)
    """The hosts that caused the end, if the engine names any."""
    is_failure: bool = False
    """Whether distflow's programs on the nodes failed, so that another allocation would fail too."""
    tasks_may_have_ended: bool = False
    """Whether tasks may have ended on their own before the event in ``reason``.

    The backend then reads the recorded ends of attempts on the login node, if there is one, before it reports ``reason``.
    """


AllocationState = Queued | Granted | Over


class Relay(Transport, Protocol):
    """A transport that starts its commands through the resident program of an allocated node."""

    def end_allocation(self, exit_code: int) -> None:
        """End the allocation as if its programs had ended with this exit code. Raises ``NodeUnreachable``."""
        ...


class QueryLimit(Struct, frozen=True, kw_only=True):
    """The maximum rate of queries for the states of allocations."""

    at_once: float
    """Number of queries that may follow each other quickly."""
    every_s: float
    """Seconds after which one more query is allowed."""


class Engine(Protocol):
    """A cluster engine.

    Methods may block, and raise ``NodeUnreachable`` if the engine does not answer or its answer is malformed. Each method may
    raise ``RequestRefused`` if this machine lacks the software or the credentials file to use the engine.
    """

    query_limit: ClassVar[QueryLimit]

    def request(self, wanted: AllocationRequest) -> str:
        """Request an allocation and return its id. May be repeated: an existing allocation with the same marker is returned.

        Raises ``RequestRefused``, and ``RequestDelayed`` if a later request may succeed.
        """
        ...

    def notice(self, allocation_id: str) -> str:
        """Return a warning about how an allocation was requested; empty if there is none."""
        ...

    def states(self, ids: Mapping[str, Sequence[str]]) -> Mapping[str, AllocationState]:
        """Return the state of each allocation. One query covers all of them, and further queries explain the ends of some.

        The call may also release ended allocations, and additional allocations with the same marker.

        ``ids``: id → tasks in the order of the request. Without tasks, the keys of ``Granted.hosts`` are ``"0"``, ``"1"`` and
        so on. An allocation that the engine no longer knows is ``Over``.
        """
        ...

    def allocations(self) -> Mapping[str, Allocation]:
        """Return all allocations that carry a marker, by id.

        Slurm returns this user's jobs that have not ended. Kubernetes returns those in the namespace and Ray those in the
        cluster, even ended ones until they are released.
        """
        ...

    def release(self, ids: Sequence[str], exit_codes: Mapping[str, int] = NO_EXIT_CODES) -> None:
        """End allocations, waiting or granted. It is not an error if an allocation has ended already.

        ``exit_codes``: id → exit code of a gang that ended by itself. Slurm's accounting shows it if the job's resident program
        answers, and shows other allocations as canceled. Other engines ignore the exit codes.
        """
        ...

    def transport(self, allocation_id: str, host: str) -> Transport:
        """Return a transport that runs commands in the allocation on one of its hosts, without connecting."""
        ...

    def check(self, on_progress: Callable[[str], None] = lambda _: None) -> Sequence[Finding]:
        """Return findings about the engine and the pool's settings. ``on_progress`` is called with the name of each step."""
        ...

    def login_transport(self) -> Transport | None:
        """Return a transport to a machine that may have files of nodes whose allocation has ended. Its ``close`` does nothing.

        ``None``: there is no such machine, and the files are deleted with the allocation.
        """
        ...

    def close(self) -> None:
        """Close all connections. Allocations stay."""
        ...


def node_name(host: str, allocation_id: str) -> str:
    """Return the name of an allocated node: ``<host>@<id>``. One host may belong to several allocations."""
    return f"{host}@{allocation_id}"


def host_of(name: str) -> tuple[str, str]:
    """Return host and allocation id of an allocated node's name. Raises ``ValueError`` for a name of another form."""
    host, mark, allocation_id = name.rpartition("@")
    if not mark or not host or not allocation_id:
        raise ValueError(f"{name!r} is not the name of an allocated node")
    return host, allocation_id
