"""The typed workflow spec: checked, with defaults, and with the positions of its parts in the file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from distflow.documents.document import Path, Text
from distflow.documents.problems import Mark
from distflow.documents.requirements import Requirements
from distflow.lifecycle.exits import ExitActions

if TYPE_CHECKING:
    from distflow.documents.notify import NotifyTarget

__all__ = [
    "CheckpointSpec",
    "CredentialUse",
    "DataSpec",
    "EarlierInput",
    "Elastic",
    "FileSpec",
    "GroupSpec",
    "InputSpec",
    "LauncherOptions",
    "Ranks",
    "ResourceSpec",
    "Retry",
    "StrategyBlock",
    "TaskSpec",
    "Text",
    "Timeouts",
    "TopologyRequest",
    "WorkflowSpec",
]


class Timeouts(Struct, frozen=True, kw_only=True):
    """Limits on a group's time, in seconds; ``None`` means no limit."""

    exec_s: float | None = None
    """The time from RUNNING to the end (``exec_timeout``)."""
    queue_s: float | None = None
    """The time from SCHEDULING to INITIALIZING (``queue_timeout``)."""
    hang_s: float | None = None
    """The silence after which a running group is reported as possibly hung (``hang_timeout``). Nothing is stopped."""


class Retry(Struct, frozen=True, kw_only=True):
    """How often and how soon a group is retried after RESCHEDULE in ``exitActions``."""

    limit: int = 10
    """Attempts after the first."""
    backoff_s: float = 5.0
    """Seconds before the second attempt. Each later wait is twice as long, up to ``max_backoff_s``."""
    max_backoff_s: float = 300.0
    avoid_after: int = 3
    """After this number of failures on one node, the group avoids that node; 0: never.

    The group uses the node again if the other reachable nodes could not hold it even when idle. If Slurm, Kubernetes or Ray
    allocates the nodes, the group never uses the node again.
    """

    def wait_s(self, attempt: int) -> float:
        """Return the seconds to wait before an attempt after the first one. Attempts are counted from 0."""
        return min(self.max_backoff_s, self.backoff_s * 2.0 ** min(attempt - 1, 60))


class TopologyRequest(Struct, frozen=True, kw_only=True):
    """An entry of ``topology``: tasks of a gang with the same key and group run near each other, such as in one rack."""

    key: str
    """The label of nodes that must have the same value for these tasks, if the request is ``required``."""
    group: str = "default"
    required: bool = True
    """``False``: a preference, which is dropped if there is no room."""


class ResourceSpec(Struct, frozen=True, kw_only=True):
    """The resources that a task requests of its node."""

    cpu: int | None = None
    gpu: int | None = None
    """Number of GPUs. ``None``: not stated, so rank sizes are not checked against it; 0: no GPU is visible."""
    memory: int | None = None
    """Bytes."""
    storage: int | None = None
    """Bytes."""
    platform: str | None = None
    nodes_excluded: tuple[str, ...] = ()
    topology: tuple[TopologyRequest, ...] = ()
    mark: Mark = Mark("")


class Ranks(Struct, frozen=True, kw_only=True):
    """The ``ranks`` field of a task."""

    offset: int | None = None
    """First global rank; ``None``: the rank after the last rank of the tasks before it."""
    size: int | None = None
    """Number of ranks; ``None``: one for each requested GPU, else 1."""
    world_size: int | None = None
    """Number of ranks of the group; ``None``: the sum of the sizes."""
    mark: Mark = Mark("")
    """The position of the ``ranks`` key, or of the launcher or framework that adds ranks."""
    marks: Mapping[str, Mark] = field(default_factory=lambda: MappingProxyType({}))
    """The position of each given key."""


class LauncherOptions(Struct, frozen=True, kw_only=True):
    """The launcher that starts the ranks of a task."""

    kind: str = "command"
    """``torchrun``, ``spawn`` (distflow's launcher), or ``command``: the command starts its ranks itself."""
    max_restarts: int = 0
    """How often it restarts all ranks before the task fails."""
    numa: bool = False
    """Whether it binds each rank to the CPUs of its GPU's NUMA node."""
    mark: Mark = Mark("")

    @property
    def starts_ranks(self) -> bool:
        """Whether the launcher runs the task's command once for each rank."""
        return self.kind != "command"


class StrategyBlock(Struct, frozen=True, kw_only=True):
    """The ``strategy`` of a group as written; ``layout.strategy.model`` interprets it."""

    value: Mapping[str, Any]
    path: Path
    """The path of the block in the document."""
    marks: Mapping[Path, Mark]
    """The position of the block and of each of its keys."""

    def mark_at(self, path: Path) -> Mark:
        """Return the position of a path, or of the nearest part that contains it."""
        while path not in self.marks and len(path) > len(self.path):
            path = path[:-1]
        return self.marks.get(path, Mark(""))


class FileSpec(Struct, frozen=True, kw_only=True):
    """A file or directory that is created before a task starts."""

    path: Text
    """The path for the task; absolute paths are placed below the attempt's directory."""
    contents: Text | None = None
    """Its text, if given inline and not as ``base64``."""
    data: bytes | None = None
    """Its decoded bytes, if given as ``base64``."""
    local_path: str | None = None
    """The absolute path of the file or directory on this machine."""
    is_directory: bool = False
    exclude: tuple[str, ...] = ()
    """Patterns, as in a ``.gitignore``, for files of a directory that are not sent."""

    @property
    def bundle(self) -> str:
        """The key of its content among the bundles of a spec."""
        return "\0".join((self.local_path or hashlib.sha256(self.data or b"").hexdigest(), *self.exclude))


class InputSpec(Struct, frozen=True, kw_only=True):
    """An input from a task of an earlier group."""

    position: int
    """Its position in ``inputs``, counted from 0."""
    task: str
    regex: str = ""
    """A pattern for the relative paths of the files (``re.match``); empty: all files."""


class DataSpec(Struct, frozen=True, kw_only=True):
    """An input or output at a URL or in a dataset."""

    position: int
    """Its position in ``inputs`` or ``outputs``, counted from 0."""
    url: str
    """The URL as written; it may contain ``{{workflow_id}}``.

    It is empty for a dataset. The plan then sets it to the URL of the directory of all datasets.
    """
    dataset: str = ""
    """``name``, or ``name:version`` for an input or an update; empty if there is only a URL."""
    path: str = ""
    """For an output to ``dataset``: the part of the output, as a relative path; empty: all."""
    is_update: bool = False
    """For an output: whether the new version also contains the files of an earlier one (the named, else the latest version)."""
    paths: tuple[str, ...] = ()
    """For an update: the parts of the output, as relative paths; empty: all."""
    regex: str = ""
    """A pattern for the relative paths of the files (``re.match``); empty: all files."""


class EarlierInput(Struct, frozen=True, kw_only=True):
    """An input from a task of an earlier workflow."""

    position: int
    """Its position in ``inputs``, counted from 0."""
    workflow: str
    """The id or uuid of the workflow."""
    task: str
    regex: str = ""
    mark: Mark = Mark("")


class CheckpointSpec(Struct, frozen=True, kw_only=True):
    """A directory of a task. The next attempt of the task gets its files."""

    path: Text
    url: str
    """The URL to upload it to; it may contain ``{{workflow_id}}``. Empty if the group shares the directory."""
    every_s: float
    """Seconds from the start of the task, or from the end of a copy and its upload (if it has a URL), to the next copy."""
    regex: str = ""

    @property
    def is_shared(self) -> bool:
        """Whether all tasks of the group get its files."""
        return not self.url


class CredentialUse(Struct, frozen=True, kw_only=True):
    """A credential that a task uses, as variables or as a directory."""

    name: str
    variables: Mapping[str, Text] = field(default_factory=lambda: MappingProxyType({}))
    """The key of the credential's payload for each variable."""
    directory: Text | None = None
    """The directory with a file for each key of the payload."""
    mark: Mark = Mark("")


class TaskSpec(Struct, frozen=True, kw_only=True):
    """One task. Each replica is a separate ``TaskSpec``."""

    name: str
    lead: bool
    command: tuple[Text, ...]
    args: tuple[Text, ...] = ()
    image: Text | None = None
    """The container image. The pool and its setting ``container`` decide whether it is used (``docs/containers.md``)."""
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
    launcher: LauncherOptions = LauncherOptions()
    replica: int | None = None
    """The number of the replica, counted from 0; ``None`` for a task without ``replicas``."""
    written_name: str = ""
    """Its name in the spec, without the number of the replica."""
    outputs: tuple[str, ...] = ()
    """The destinations of ``{{output}}``, as text."""
    url_outputs: tuple[DataSpec, ...] = ()
    output_dir: str | None = None
    """A relative path at which the task also finds ``{{output}}``."""
    mark: Mark = Mark("")


class Elastic(Struct, frozen=True, kw_only=True):
    """How few tasks a world may run with, and how long it first waits for room for all of them."""

    least: int
    """The smallest number of tasks. The tasks with the lowest ranks run."""
    wait_s: float = 60.0
    """Seconds to wait for room for all tasks. After that, fewer may start."""
    mark: Mark = Mark("")


class GroupSpec(Struct, frozen=True, kw_only=True):
    """Tasks that start and stop together."""

    name: str
    tasks: tuple[TaskSpec, ...]
    barrier: bool = True
    ignore_nonlead_status: bool | None = None
    """``None``: not stated, which means true, except for a group whose tasks share one world."""
    stop_on_missing_ranks: bool | None = None
    """``None``: not stated, which means true, unless the ranks may have joined before they failed (``docs/diagnosis.md``)."""
    timeouts: Timeouts = Timeouts()
    retry: Retry = Retry()
    upstream: tuple[str, ...] = ()
    """Groups that it waits for, because its tasks use their outputs."""
    framework: Text | None = None
    """The training framework of its tasks, such as ``deepspeed``."""
    strategy: StrategyBlock | None = None
    elastic: Elastic | None = None
    debug: bool = False
    """Whether torch compares each collective between the ranks and records the last collectives."""
    mark: Mark = Mark("")

    @property
    def lead(self) -> TaskSpec:
        """The group's lead."""
        return next(task for task in self.tasks if task.lead)


class WorkflowSpec(Struct, frozen=True, kw_only=True):
    """A whole spec, rendered and checked."""

    name: str
    groups: tuple[GroupSpec, ...]
    resources: Mapping[str, ResourceSpec]
    pool: str | None = None
    file: str = ""
    """The spec's file, as the user named it."""
    rendered: str = ""
    """The document after its template was rendered; without the values of ``--set-env``."""
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    max_log: int | None = None
    """The maximum size of each attempt's log in bytes; ``None``: the pool's limit."""
    venv: Requirements | None = None
    """The packages of the tasks' Python environment."""
    notify: tuple[NotifyTarget, ...] = ()
    """The notifications of the workflow."""
    environment_names: tuple[str, ...] = ()
    """Names of the variables that ``--set-env`` sets for every task. Their values are secrets, which a spec never contains."""
    mark: Mark = Mark("")
