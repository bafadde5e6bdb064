"""Pools and nodes, on which workflows run, and their settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from msgspec import Struct, field

from distflow.documents.requirements import Requirements
from distflow.structs import replace

if TYPE_CHECKING:
    from distflow.documents.notify import NotifyTarget

__all__ = [
    "DEFAULT_MAX_LOG",
    "NO_SETTINGS",
    "Configuration",
    "ContainerRuntime",
    "KubernetesPlatform",
    "KubernetesSettings",
    "Node",
    "NodeSettings",
    "Pool",
    "RayPlatform",
    "RaySettings",
    "SlurmPlatform",
    "SlurmSettings",
    "is_program",
    "ssh_node",
]

DEFAULT_MAX_LOG = 512 << 20
"""Bytes."""
ContainerRuntime = Literal["none", "auto", "docker", "podman", "apptainer", "engine"]
"""The program that runs images on a node. ``engine``: the engine of the pool starts the node's processes in the image."""

_RESERVED_MEMORY = 0.1
"""The share of the configured memory that may be missing from a node's report."""


class Node(Struct, frozen=True, kw_only=True):
    """A machine of a pool."""

    name: str
    """Its name in specs and messages."""
    host: str
    """The name or address for connections; for SSH, also an alias of ``~/.ssh/config``."""
    port: int | None = None
    """The SSH port; ``None``: the port in the OpenSSH configuration."""
    user: str | None = None
    """The SSH user; ``None``: the user in the OpenSSH configuration."""
    identity_file: str | None = None
    """A private key of this machine that SSH tries before other key files."""
    address: str | None = None
    """The address on the training network; ``None``: distflow chooses one, usually that of the SSH connection."""
    root: str
    """The directory of distflow on the node. The node expands ``~`` in it."""
    python: str
    """The Python interpreter on the node. Its directory comes before the directories of the node's own PATH for tasks."""
    gpus: int | None = None
    """``None``: as many as the node has."""
    cpus: int | None = None
    """``None``: as many as the node reports."""
    memory: int | None = None
    """Bytes; ``None``: as much as the node reports."""
    platform: str | None = None
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Variables for every task on the node. Variables of the spec override them."""
    container: ContainerRuntime = "none"
    """The runtime for the image of a task. With ``none``, tasks run directly on the node, and their image is ignored."""
    enforce_limits: bool = True
    """Whether to stop a task that uses more memory than it requested, and to limit the CPUs of a task in a container."""
    setup: str | None = None
    """A shell prelude that runs before each command (modules, conda, ulimits)."""
    lease_dir: str = "/tmp/distflow-leases"  # noqa: S108  shared by all users on purpose, its contents are not secret
    """The directory of the lock files, for all users of the machine."""
    share_gpus: bool = False
    """Whether to lease a GPU that a process without a lease uses."""
    check_capacity: bool = True
    """Whether to lease no more than the node reports; ``False`` for resources that distflow cannot count."""

    def usable_gpus(self, reported: int | None) -> int | None:
        """Return the number of GPUs that may be leased, if the node reports ``reported`` GPUs (``None``: not known)."""
        return self._usable(self.gpus, reported)

    def usable_cpus(self, reported: int | None) -> int | None:
        """Return the number of CPUs that may be leased, if the node reports ``reported`` CPUs (``None``: not known)."""
        return self._usable(self.cpus, reported)

    def usable_memory(self, reported: int | None) -> int | None:
        """Return the bytes of memory that may be leased, if the node reports ``reported`` bytes (``None``: not known).

        A machine with 64 GiB reports a little less, because its kernel and firmware reserve memory. That memory is not missing.
        """
        if self.memory is not None and reported is not None and self.memory * (1 - _RESERVED_MEMORY) <= reported:
            return self.memory
        return self._usable(self.memory, reported)

    def _usable(self, configured: int | None, reported: int | None) -> int | None:
        if configured is None or reported is None or not self.check_capacity:
            return reported if configured is None else configured
        return min(configured, reported)


class NodeSettings(Struct, frozen=True, kw_only=True):
    """Settings for all nodes from the options of a command or the Python API.

    They override the configuration and the hostfile.
    """

    python: str | None = None
    setup: str | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Variables for every task. They also override variables of the spec."""
    venv: Requirements | None = None
    """The packages of a Python environment, which also replaces the environment of the spec."""


NO_SETTINGS = NodeSettings()


class SlurmPlatform(Struct, frozen=True, kw_only=True):
    """Slurm's settings for a ``platform`` of specs; ``None``: the setting of the pool."""

    partition: str | None = None
    constraint: str | None = None
    gres: str | None = None
    """The type of GPU, such as ``gpu:h100``. The number comes from the task."""


class SlurmSettings(Struct, frozen=True, kw_only=True):
    """Settings for submitting the jobs of a pool to Slurm. ``None``: the cluster's default."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclusive: bool = False
    time_s: float | None = None
    """The time limit of groups that have no ``exec_timeout``."""
    gres: str = "gpu"
    """The generic resource of GPUs, such as ``gpu`` or ``gpu:h100``."""
    gpu_option: Literal["gres", "gpus-per-node", "gpus-per-task"] = "gres"
    """The option of ``sbatch`` that requests GPUs."""
    het_jobs: bool = True
    """Whether tasks with different resources become a heterogeneous job; ``False``: each node gets the largest resources."""
    extra: tuple[str, ...] = ()
    """Further arguments of ``sbatch``."""
    container: Literal["pyxis"] | None = None
    """How Slurm starts images, unless the nodes have a ``container`` runtime; ``None``: Slurm does not start images.

    Exported scripts follow this setting even if the nodes have a ``container`` runtime."""
    idle_release_s: float = 600.0
    """The time without tasks and supervisor after which the job ends by itself."""
    platforms: Mapping[str, SlurmPlatform] = field(default_factory=lambda: MappingProxyType({}))

    def gpu_request(self, count: int, platform: SlurmPlatform) -> tuple[str, str]:
        """Return the option of ``sbatch`` that requests this number of GPUs on each node, and its value.

        ``--gres`` takes ``gpu:h100:8``, and the options ``--gpus-per-…`` take ``h100:8``.
        """
        gres = platform.gres or self.gres
        if self.gpu_option == "gres":
            return "gres", f"{gres}:{count}"
        kind = gres.partition(":")[2]
        return self.gpu_option, f"{kind}:{count}" if kind else str(count)


class RayPlatform(Struct, frozen=True, kw_only=True):
    """Ray's settings for a ``platform`` of specs."""

    resources: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Amounts of further resources for each task, such as ``accelerator_type:H100``."""


class RaySettings(Struct, frozen=True, kw_only=True):
    """Settings for requesting the nodes of a Ray cluster."""

    address: str = "auto"
    """The cluster's address as in ``ray.init``; ``auto``: the cluster that runs on the login node."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "STRICT_SPREAD"
    """How the tasks of a group are placed."""
    python: str = "python3"
    """The cluster's Python on the login node."""
    idle_release_s: float = 600.0
    """The time without tasks and supervisor after which a placement group is removed."""
    platforms: Mapping[str, RayPlatform] = field(default_factory=lambda: MappingProxyType({}))


class KubernetesPlatform(Struct, frozen=True, kw_only=True):
    """Settings of Kubernetes for a ``platform`` of specs."""

    node_selector: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    tolerations: tuple[Mapping[str, str], ...] = ()
    gpu_resource: str | None = None
    """The extended resource of GPUs; ``None``: the pool's resource."""


class KubernetesSettings(Struct, frozen=True, kw_only=True):
    """Settings for creating the pods of a pool."""

    context: str | None = None
    """The context of the kubeconfig; ``None``: the current context, or the service account of the pod that runs distflow."""
    kubeconfig: str | None = None
    """The path of the kubeconfig; ``None``: the file that ``kubectl`` uses."""
    namespace: str | None = None
    """``None``: the namespace of the context."""
    queue: str | None = None
    """The queue of Kueue or Volcano that admits the pods of a group together; ``None``: no queue."""
    scheduler: str | None = None
    """The scheduler of the pods, such as ``volcano``; ``None``: the cluster's default."""
    service_account: str | None = None
    image: str | None = None
    """The image of tasks without ``image``."""
    pod_template: str = "{}"
    """A pod as JSON, which is merged with the pod that distflow creates for each task."""
    priority_classes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Priority of a workflow (``HIGH``, ``NORMAL``, ``LOW``) → priority class."""
    gpu_resource: str = "nvidia.com/gpu"
    host_network: bool = False
    idle_release_s: float = 600.0
    """The time without tasks and supervisor after which a pod ends by itself."""
    platforms: Mapping[str, KubernetesPlatform] = field(default_factory=lambda: MappingProxyType({}))


class Pool(Struct, frozen=True, kw_only=True):
    """Nodes, and the backend that runs tasks on them."""

    name: str
    backend: str
    nodes: tuple[Node, ...]
    host_key_policy: Literal["strict", "accept-new"] | None = None
    """``accept-new``: accept unknown keys, never changed ones. ``None``: as in the OpenSSH configuration, else ``strict``."""
    ssh_config: str | None = None
    """The SSH configuration to read instead of ``~/.ssh/config`` and the system's file."""
    connect_timeout_s: float = 10.0
    ping_s: float = 5.0
    node_lost_after_s: float = 120.0
    start_barrier_s: float = 120.0
    """The maximum time of a gang from its lease, or from the last progress of a transfer, to its start."""
    self_stop_after_s: float | None = None
    """The time without contact after which a node stops its tasks; ``None``: never."""
    stop_grace_s: float = 30.0
    """The time between TERM and KILL, for example after a cancel or a timeout."""
    peer_failed_grace_s: float = 5.0
    """The time between TERM and KILL for the remaining tasks of a gang after one of them failed."""
    max_log: int = DEFAULT_MAX_LOG
    """The maximum size of each attempt's log in bytes, half for the beginning and half for the end."""
    retention_s: float = 14 * 86400.0
    """How long ``node clean`` keeps the files of ended workflows on the nodes, and Python environments that no task uses."""
    venv: Requirements | None = None
    """The packages of a Python environment for tasks whose spec has no ``venv``."""
    venv_timeout_s: float = 1800.0
    """The maximum time to build the Python environment of a spec or of the pool on a node."""
    given: NodeSettings = NO_SETTINGS
    """The settings that the command gave. ``nodes`` have them already. A resubmission applies them to the current pool."""
    slurm: SlurmSettings | None = None
    """If set, Slurm allocates the nodes, and ``nodes`` is empty."""
    ray: RaySettings | None = None
    """If set, Ray allocates the nodes, and ``nodes`` is empty."""
    kubernetes: KubernetesSettings | None = None
    """If set, Kubernetes allocates the nodes, which are pods, and ``nodes`` is empty."""
    login: Node | None = None
    """The machine with the commands of the engine, over SSH; ``None``: this machine."""
    template: Node | None = None
    """The settings of allocated nodes, whose names are not known yet."""

    @property
    def is_allocated(self) -> bool:
        """Whether an engine chooses the nodes, so that ``nodes`` is empty."""
        return self.template is not None

    @property
    def platforms(self) -> Collection[str]:
        """The platforms that have settings of the engine."""
        settings = self.slurm or self.kubernetes or self.ray
        return settings.platforms if settings is not None else ()

    @property
    def node_settings(self) -> tuple[Node, ...]:
        """The nodes; if an engine chooses them, the settings that all of them have."""
        return self.nodes if self.template is None else (self.template,)

    def node(self, name: str) -> Node:
        """Return the node with this name. Allocated nodes are named ``<host>@<allocation>``.

        Raises ``KeyError`` for an unknown name, unless an engine chooses the nodes.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        if self.template is None:
            raise KeyError(name)
        return replace(self.template, name=name, host=name.rpartition("@")[0])

    def with_settings(self, given: NodeSettings) -> Pool:
        """Return the pool with these settings for all its nodes, in addition to earlier given settings."""
        if given == NO_SETTINGS:
            return self

        def changed(node: Node) -> Node:
            return replace(
                node,
                python=given.python or node.python,
                setup=node.setup if given.setup is None else given.setup,
                environment=MappingProxyType({**node.environment, **given.environment}),
            )

        joined = NodeSettings(
            python=given.python or self.given.python,
            setup=self.given.setup if given.setup is None else given.setup,
            environment=MappingProxyType({**self.given.environment, **given.environment}),
            venv=given.venv or self.given.venv,
        )
        template = None if self.template is None else changed(self.template)
        return replace(self, nodes=tuple(map(changed, self.nodes)), template=template, given=joined)

    @property
    def shares_nodes(self) -> bool:
        """Whether tasks of one world may share a node, because this machine is the only one."""
        return self.backend == "local"


class Configuration(Struct, frozen=True, kw_only=True):
    """The configuration of the file, or the built-in configuration, whose only pool is this machine."""

    pools: Mapping[str, Pool]
    default_pool: str
    file: str | None = None
    """The path of the file; ``None`` for the built-in configuration."""
    datasets: str | None = None
    """The URL of the directory of all datasets; ``None``: in the state directory."""
    notify: tuple[NotifyTarget, ...] = ()
    """The notifications of every workflow."""
    bases: Mapping[str, Node] = field(default_factory=lambda: MappingProxyType({}))
    """For each pool over SSH, the settings of nodes that have no entry in it, such as hosts of a hostfile."""


def is_program(text: str) -> bool:
    """Return whether a text can be the path or the name of a program on a node."""
    return text.isprintable() and bool(text.strip()) and not text.startswith("-")


def ssh_node() -> Node:
    """Return the default settings of a machine behind SSH. A connected node reports its GPUs, CPUs and memory."""
    return Node(name="", host="", root="~/.distflow", python="python3")
