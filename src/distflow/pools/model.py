"""Pools and nodes: where workflows can run, and the settings that hold there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

__all__ = ["DEFAULT_MAX_LOG", "Configuration", "ContainerRuntime", "Node", "Pool", "ssh_node"]

DEFAULT_MAX_LOG = 512 << 20
"""Bytes."""
ContainerRuntime = Literal["none", "auto", "docker", "podman", "apptainer"]

_RESERVED_MEMORY = 0.1
"""The share of the configured memory that may be missing from a node's report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of a pool."""

    name: str
    """Its name in specs and messages."""
    host: str
    """Where its transport connects; for SSH an alias of ``~/.ssh/config``, a name or an address."""
    port: int | None = None
    """Of SSH; ``None``: what the OpenSSH configuration says."""
    user: str | None = None
    """Of SSH, likewise."""
    identity_file: str | None = None
    """A private key of this machine that SSH tries first."""
    address: str | None = None
    """On the training network; ``None``: the address that the transport reached."""
    root: str
    """Directory of distflow on the node; ``~`` is the node's."""
    python: str
    """The node's interpreter; its directory leads the tasks' PATH."""
    gpus: int | None = None
    """``None``: as many as are found there."""
    cpus: int | None = None
    """``None``: not known, so not counted."""
    memory: int | None = None
    """Bytes; ``None``: not known, so not counted."""
    platform: str | None = None
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Set for every task there, below what the spec sets."""
    container: ContainerRuntime = "none"
    """What runs the image of a task; ``none``: tasks run on the node's own python, whatever their image."""
    enforce_limits: bool = True
    """Whether a task that uses more memory than it asked for is ended, and one in a container gets the CPUs it asked for."""
    setup: str | None = None
    """A shell prelude that runs before each command (modules, conda, ulimits)."""
    lease_dir: str = "/tmp/distflow-leases"  # noqa: S108  shared by all users on purpose, its contents are not secret
    """Where leases are locked; one directory for all users of the machine."""
    share_gpus: bool = False
    """Whether a GPU is leased also while a program that distflow did not start computes on it."""
    check_capacity: bool = True
    """Whether the node must report what ``gpus``, ``cpus`` and ``memory`` say; ``False`` for what distflow cannot count."""

    def usable_gpus(self, reported: int | None) -> int | None:
        """Return how many GPUs may be leased there, of ``reported`` ones (``None``: not known)."""
        return self._usable(self.gpus, reported)

    def usable_cpus(self, reported: int | None) -> int | None:
        """Return how many CPUs may be leased there, of ``reported`` ones (``None``: not known)."""
        return self._usable(self.cpus, reported)

    def usable_memory(self, reported: int | None) -> int | None:
        """Return how much memory may be leased there, of ``reported`` bytes (``None``: not known).

        A machine with 64 GiB reports a little less: what its kernel and firmware keep for themselves is not missing.
        """
        if self.memory is not None and reported is not None and self.memory * (1 - _RESERVED_MEMORY) <= reported:
            return self.memory
        return self._usable(self.memory, reported)

    def _usable(self, configured: int | None, reported: int | None) -> int | None:
        if configured is None or reported is None or not self.check_capacity:
            return reported if configured is None else configured
        return min(configured, reported)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Nodes, and the backend that runs things on them."""

    name: str
    backend: str
    nodes: tuple[Node, ...]
    host_key_policy: Literal["strict", "accept-new"] | None = None
    """``strict`` or ``accept-new`` (never a changed key); ``None``: what the OpenSSH configuration says, else ``strict``."""
    ssh_config: str | None = None
    """Read instead of ``~/.ssh/config`` and the system's."""
    connect_timeout_s: float = 10.0
    ping_s: float = 5.0
    node_lost_after_s: float = 120.0
    start_barrier_s: float = 120.0
    """How long a gang may take from its lease to its start."""
    self_stop_after_s: float | None = None
    """After how long without any contact a node stops what runs there by itself; ``None``: never."""
    stop_grace_s: float = 30.0
    """Between TERM and KILL when a person cancels or a timeout ends it."""
    peer_failed_grace_s: float = 5.0
    """Between TERM and KILL for the rest of a gang whose member failed."""
    max_log: int = DEFAULT_MAX_LOG
    """Bytes of each attempt's output that are kept: its beginning and its end."""
    retention_s: float = 14 * 86400.0
    """How long ``node clean`` leaves ended workflows on the nodes."""

    @property
    def shares_nodes(self) -> bool:
        """True when tasks of one world may stand on one node: this machine is all there is."""
        return self.backend == "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What the configuration file says, or the built-in default: one pool, this machine."""

    pools: Mapping[str, Pool]
    default_pool: str
    file: str | None = None
    """Where it was read; ``None`` for the built-in one."""
    datasets: str | None = None
    """URL below which datasets lie; ``None``: in the state directory."""
    bases: Mapping[str, Node] = field(default_factory=lambda: MappingProxyType({}))
    """For each pool over SSH, the settings of a node without settings of its own, such as a host of a hostfile."""


def ssh_node() -> Node:
    """Return what is assumed of a machine behind SSH: the rest it says itself when it is reached."""
    return Node(name="", host="", root="~/.distflow", python="python3")
