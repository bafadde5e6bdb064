"""The typed workflow spec: what a person wrote, checked and with defaults filled in, and where each part stands in the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from distflow.documents.document import Path, Text
from distflow.documents.problems import Mark
from distflow.lifecycle.exits import ExitActions

__all__ = [
    "CheckpointSpec",
    "CredentialUse",
    "DataSpec",
    "EarlierInput",
    "Elastic",
    "FileSpec",
    "GroupSpec",
    "InputSpec",
    "Launcher",
    "Near",
    "Ranks",
    "ResourceSpec",
    "Retry",
    "StrategyBlock",
    "TaskSpec",
    "Text",
    "Timeouts",
    "WorkflowSpec",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Bounds on a group's time, in seconds; ``None`` means none."""

    exec_s: float | None = None
    """From RUNNING to the end (``exec_timeout``)."""
    queue_s: float | None = None
    """From SCHEDULING to INITIALIZING (``queue_timeout``)."""
    hang_s: float | None = None
    """How long a running group may print nothing before that is said (``hang_timeout``); nothing is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often and how soon a group is tried again when ``exitActions`` say RESCHEDULE."""

    limit: int = 10
    """Attempts after the first."""
    backoff_s: float = 5.0
    """Seconds before the second attempt; before each later one twice as long as before."""
    max_backoff_s: float = 300.0
    avoid_after: int = 3
    """Failures on one node after which others are waited for rather than taking it again; 0: never."""

    def wait_s(self, attempt: int) -> float:
        """Return how long to wait before an attempt, counted from 0."""
        return min(self.max_backoff_s, self.backoff_s * 2.0 ** min(attempt - 1, 60))


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """An entry of ``topology``: tasks of a gang with equal key and group share a unit, such as a rack."""

    key: str
    """A label of nodes."""
    group: str = "default"
    required: bool = True
    """``False``: preferred, and given up where there is no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSpec:
    """What a task asks of its node."""

    cpu: int | None = None
    gpu: int | None = None
    """Number of GPUs; ``None`` says nothing (rank sizes are then not checked against it), 0 means that none is visible."""
    memory: int | None = None
    """Bytes."""
    storage: int | None = None
    """Bytes."""
    platform: str | None = None
    nodes_excluded: tuple[str, ...] = ()
    topology: tuple[Near, ...] = ()
    mark: Mark = Mark("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ``ranks`` field of a task."""

    offset: int | None = None
    """First global rank; ``None``: computed from the tasks before it."""
    size: int | None = None
    """Number of ranks; ``None``: one for each GPU that the task asks for, else 1."""
    world_size: int | None = None
    """Number of ranks of the group; ``None``: the sum of the sizes."""
    mark: Mark = Mark("")
    """Of the ``ranks`` key."""
    marks: Mapping[str, Mark] = field(default_factory=lambda: MappingProxyType({}))
    """Of each key that was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """What starts the ranks of a task."""

    kind: str = "command"
    """``torchrun``, ``spawn`` (distflow's own), or ``command``: the command itself."""
    max_restarts: int = 0
    """How often it starts all ranks of the task anew before the task fails."""
    numa: bool = False
    """Whether it binds each rank to the CPUs of its GPU's NUMA node."""
    mark: Mark = Mark("")

    @property
    def starts_ranks(self) -> bool:
        """Whether the task's command becomes that of each rank."""
        return self.kind != "command"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyBlock:
    """How the ranks of a group train together, as written; ``layout.strategy.model`` knows what it means."""

    value: Mapping[str, Any]
    path: Path
    """Of the block in the document."""
    marks: Mapping[Path, Mark]
    """Of each of its keys, and of the block."""

    def mark_at(self, path: Path) -> Mark:
        """Return where a path stands, or the nearest part above it."""
        while path not in self.marks and len(path) > len(self.path):
            path = path[:-1]
        return self.marks.get(path, Mark(""))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSpec:
    """A file (or directory) that is placed before a task starts."""

    path: Text
    """Where it appears; absolute paths are placed below the attempt's own directory."""
    contents: Text | None = None
    """Its text, when given inline (decoded, when it was given as ``base64``: then ``data`` holds the bytes)."""
    data: bytes | None = None
    """Its bytes, when given as ``base64``."""
    local_path: str | None = None
    """Absolute path on this machine of the file or directory to send."""
    is_directory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """What a task takes from another one, of an earlier group."""

    position: int
    """Which entry of ``inputs`` it is, counted from 0."""
    task: str
    regex: str = ""
    """Which files of it, by their relative path and ``re.match``; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Data at a URL or of a dataset, which a task takes before it starts or writes when it has completed."""

    position: int
    """Which entry of ``inputs`` or ``outputs`` it is, counted from 0."""
    url: str
    """As written; ``{{workflow_id}}`` may stand in it. Of a dataset: below which datasets lie, as the plan has it."""
    dataset: str = ""
    """``name``, or ``name:version`` of an input or an update; empty: the URL itself is meant."""
    path: str = ""
    """Of an output that makes a dataset: what of the output, relative to it; empty: all."""
    is_update: bool = False
    """Of an output: it is put over what a version of the dataset holds, the named one or the latest."""
    paths: tuple[str, ...] = ()
    """Of an update: what of the output, relative to it; none: all."""
    regex: str = ""
    """Which files of it, by their relative path and ``re.match``; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierInput:
    """What a task takes from one of an earlier workflow."""

    position: int
    """Which entry of ``inputs`` it is, counted from 0."""
    workflow: str
    """Its id or uuid."""
    task: str
    regex: str = ""
    mark: Mark = Mark("")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """A directory of a task that its next attempt finds in its place."""

    path: Text
    url: str
    """Where it is written while its task runs; ``{{workflow_id}}`` may stand in it. Empty: the group shares the directory."""
    every_s: float
    """Seconds between the end of one writing and the begin of the next."""
    regex: str = ""

    @property
    def is_shared(self) -> bool:
        """Whether every task of the group gets its files."""
        return not self.url


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialUse:
    """A credential that a task names: as variables, or as a directory."""

    name: str
    variables: Mapping[str, Text] = field(default_factory=lambda: MappingProxyType({}))
    """Variable → key of the credential's payload."""
    directory: Text | None = None
    """Where each key of the payload appears as a file."""
    mark: Mark = Mark("")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One task as written; ``replicas`` are expanded already, so that each is a ``TaskSpec`` of its own."""

    name: str
    lead: bool
    command: tuple[Text, ...]
    args: tuple[Text, ...] = ()
    image: Text | None = None
    """The container image that it runs in, where its node has a container runtime."""
    mounts: tuple[Text, ...] = ()
    """``volumeMounts``: directories of the node in the container, ``src`` or ``src:dst``."""
    privileged: bool = False
    environment: Mapping[str, Text] = field(default_factory=lambda: MappingProxyType({}))
    files: tuple[FileSpec, ...] = ()
    inputs: tuple[InputSpec, ...] = ()
    url_inputs: tuple[DataSpec, ...] = ()
    earlier_inputs: tuple[EarlierInput, ...] = ()
    checkpoints: tuple[CheckpointSpec, ...] = ()
    credentials: tuple[CredentialUse, ...] = ()
    resource: str = "default"
    exit_actions: ExitActions = ExitActions()
    ranks: Ranks | None = None
    launcher: Launcher = Launcher()
    replica: int | None = None
    """Which of the replicas it is, counted from 0; ``None`` when it was written without ``replicas``."""
    written_name: str = ""
    """Its name in the spec: without the number of the replica."""
    outputs: tuple[str, ...] = ()
    """In words, what the spec wants done with ``{{output}}``."""
    url_outputs: tuple[DataSpec, ...] = ()
    mark: Mark = Mark("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """With how few of its tasks a world may run."""

    least: int
    """Tasks, counted from rank 0."""
    wait_s: float = 60.0
    """How long it waits for room for all of them."""
    mark: Mark = Mark("")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Tasks that start and stop together."""

    name: str
    tasks: tuple[TaskSpec, ...]
    barrier: bool = True
    ignore_nonlead_status: bool | None = None
    """``None``: not said; then true, except for a group that shares one world."""
    stop_on_missing_ranks: bool | None = None
    """``None``: not said; then true, except where the ranks may have met."""
    timeouts: Timeouts = Timeouts()
    retry: Retry = Retry()
    upstream: tuple[str, ...] = ()
    """Groups that it waits for, because its tasks take inputs from theirs."""
    framework: Text | None = None
    """What its tasks train with, such as ``deepspeed``."""
    strategy: StrategyBlock | None = None
    elastic: Elastic | None = None
    debug: bool = False
    """Whether torch checks collectives against each other and records them."""
    mark: Mark = Mark("")

    @property
    def lead(self) -> TaskSpec:
        """The task whose end decides the group's."""
        return next(task for task in self.tasks if task.lead)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSpec:
    """A whole spec, rendered and checked."""

    name: str
    groups: tuple[GroupSpec, ...]
    resources: Mapping[str, ResourceSpec]
    pool: str | None = None
    file: str = ""
    """The spec's file, as the person named it."""
    rendered: str = ""
    """The document after its template was rendered; without the values of ``--set-env``."""
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    max_log: int | None = None
    """Bytes of each attempt's output that are kept; ``None``: as many as the pool says."""
    environment_names: tuple[str, ...] = ()
    """Names of the variables that ``--set-env`` sets for every task; their values are secrets and never stand in a spec."""
    mark: Mark = Mark("")
