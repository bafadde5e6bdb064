"""The plan: a frozen, symbolic description of one workflow's processes, and the binding that completes it.

Values that are known only when an attempt begins are placeholders of the form ``@@NAME@@``:

=====================  ====================================================
``@@WORKFLOW_ID@@``    id of the workflow, such as ``pytorch-dist-3``
``@@ADDRESS:<task>@@`` address of that task's node on the training network
``@@MASTER_ADDR@@``    the same for the task that holds rank 0 (without ranks: for the lead)
``@@MASTER_PORT@@``    the rendezvous port on the master's node
``@@IFNAME@@``         the interface that owns the task's own address
``@@GPU_IDS@@``        the task's GPUs, such as ``0,1,2``
``@@NODE@@``           name of the task's node
``@@NODE:<task>@@``    the same for another task of the group
``@@LEASED_AT@@``      time of the attempt's leases, such as ``2026-05-24T10:36:01`` (UTC)
``@@RETRY_ID@@``       number of the attempt, counted from 0
``@@ATTEMPT_DIR@@``    the attempt's directory on its node (filled in there)
=====================  ====================================================

``TASK_NAME``, ``NODE_RANK`` and ``RANK_OFFSET`` are placeholders only during an export (``plan.slurm_tasks``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, field

from distflow.documents.requirements import Requirements
from distflow.layout.ranks import TaskRanks, WorldLayout
from distflow.lifecycle.exits import Codes, ExitActions
from distflow.plan.binding import Binding, TaskBinding
from distflow.spec.model import DataSpec, EarlierInput, InputSpec, ResourceSpec, Retry, Timeouts
from distflow.structs import replace

__all__ = [
    "ATTEMPT_DIR",
    "PLACEHOLDER",
    "TORCHRUN",
    "Binding",
    "BoundLaunch",
    "Container",
    "Download",
    "GroupPlan",
    "Launch",
    "Plan",
    "PlannedCheckpoint",
    "PlannedCredential",
    "PlannedFile",
    "PlannedGangLink",
    "TaskBinding",
    "address_of",
    "runs_torchrun",
]

PLACEHOLDER = re.compile(
    r"@@(ADDRESS|ATTEMPT_DIR|GPU_IDS|IFNAME|LEASED_AT|MASTER_ADDR|MASTER_PORT|NODE|NODE_RANK|RANK_OFFSET|RETRY_ID|TASK_NAME"
    r"|WORKFLOW_ID)(?::([A-Za-z0-9_-]+))?@@"
)
"""Matches a placeholder, but not other texts of users in this form, such as ``@@VERSION@@``."""

ATTEMPT_DIR = "@@ATTEMPT_DIR@@"


TORCHRUN = ("-m", "torch.distributed.run")
"""The arguments with which Python runs torchrun."""


def runs_torchrun(argv: Sequence[str]) -> bool:
    """Return whether a command runs torchrun in the form that ``launcher: torchrun`` creates."""
    return tuple(argv[1:3]) == TORCHRUN


def address_of(task: str) -> str:
    """Return the placeholder for the address of a task's node."""
    return f"@@ADDRESS:{task}@@"


class PlannedFile(Struct, frozen=True, kw_only=True):
    """A file or directory that is created in the attempt's directory before the command starts."""

    path: str
    """Relative to the attempt's directory, such as ``files/tmp/entry.sh``."""
    shown: str
    """The path in the spec, such as ``/tmp/entry.sh``; for a file that is not in the spec, a description."""
    text: str | None = None
    """The content, if the plan contains it. ``bind`` fills in its placeholders."""
    blob: str | None = None
    """Otherwise the SHA-256 of its content in the blob store."""
    size: int = 0
    """The size of the content or of the archive in bytes."""
    mode: int = 0o600
    is_tar: bool = False
    """Whether the blob is a tar of a directory."""
    only: str = ""
    """A regular expression for the paths in the archive to unpack, matched from their start; empty: all."""
    within: str = ""
    """The only directory of the archive to unpack; empty: the whole archive."""
    reusable: bool = False
    """Whether its files may move to a later attempt with the same archive, if the task has ended and did not change them."""


class PlannedCredential(Struct, frozen=True, kw_only=True):
    """A credential of one task, which gets it as variables or as a directory."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """The key of the payload for each variable."""
    path: str = ""
    """The directory relative to the attempt's, such as ``files/run/secrets/deploy``; empty for none."""
    shown: str = ""
    """The directory in the spec."""


class PlannedCheckpoint(Struct, frozen=True, kw_only=True):
    """A directory of a task, which is copied while the task runs and after its end, and given to the task's next attempt."""

    place: str
    """Relative to the attempt's directory, such as ``files/tmp/models``."""
    shown: str
    """The path in the spec, such as ``/tmp/models``."""
    url: str
    """The URL to upload the directory to, under its own name. It may contain ``{{workflow_id}}``. Empty for ``shared``."""
    every_s: float
    """Seconds from the start of the task, or from the end of a copy and its upload, to the beginning of the next copy."""
    regex: str = ""

    @property
    def is_shared(self) -> bool:
        """Whether all tasks of the group get the files of the directory."""
        return not self.url


class Launch(Struct, frozen=True, kw_only=True):
    """One task of the plan."""

    task: str
    lead: bool
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """Its variables except those of ``secret_names`` and ``credentials``. They override the node's ``environment``."""
    secret_names: tuple[str, ...] = ()
    """The variables of ``--set-env``. Their values are stored separately."""
    credentials: tuple[PlannedCredential, ...] = ()
    """The credentials that it uses, without their values."""
    files: tuple[PlannedFile, ...] = ()
    inputs: tuple[InputSpec, ...] = ()
    """Its inputs from tasks of upstream groups."""
    url_inputs: tuple[DataSpec, ...] = ()
    """Its inputs from URLs and datasets."""
    ranks: TaskRanks | None = None
    """``None`` for a task without ranks."""
    resource: ResourceSpec = ResourceSpec()
    rewritten: tuple[tuple[str, str], ...] = ()
    """Injected absolute paths, and their paths below the attempt's directory: ``("/train.py", "files/train.py")``."""
    outputs: tuple[str, ...] = ()
    """The destinations of its output as text, for people."""
    url_outputs: tuple[DataSpec, ...] = ()
    """The destinations of its output, which is uploaded after the task has completed and before its group is COMPLETED."""
    exit_actions: ExitActions = ExitActions()
    earlier_inputs: tuple[EarlierInput, ...] = ()
    """Its inputs from tasks of earlier workflows. ``compile.with_previous_outputs`` adds their archives to ``files``."""
    checkpoints: tuple[PlannedCheckpoint, ...] = ()
    image: str | None = None
    mounts: tuple[str, ...] = ()
    privileged: bool = False
    member: int | None = None
    """Its number in ``distributed.json``; ``None`` if it does not get that file (``plan.compatibility``)."""
    python_path: tuple[str, ...] = ()
    """Directories at the end of its PYTHONPATH, after all other entries."""
    path: tuple[str, ...] = ()
    """Directories at the beginning of its PATH."""
    folders: tuple[str, ...] = ()
    """Directories to create before it starts, relative to the attempt's directory."""
    max_log: int | None = None
    """The maximum size of its log in bytes; ``None``: the pool's limit."""
    output_link: str | None = None
    """The path of a link to the output directory, relative to the attempt's directory."""


class Container(Struct, frozen=True, kw_only=True):
    """The container that a task runs in."""

    runtime: str
    """``docker``, ``podman``, ``apptainer``, or ``auto``: the first of them that the node has."""
    image: str
    mounts: tuple[str, ...] = ()
    privileged: bool = False
    cpus: int | None = None
    """The number of CPUs that it may use; ``None``: all."""
    memory: int | None = None
    """The memory that it may use, in bytes; ``None``: all."""


class GroupPlan(Struct, frozen=True, kw_only=True):
    """One group of the plan: a gang."""

    name: str
    launches: tuple[Launch, ...]
    world: WorldLayout | None = None
    barrier: bool = True
    ignore_nonlead_status: bool = True
    timeouts: Timeouts = Timeouts()
    retry: Retry = Retry()
    upstream: tuple[str, ...] = ()
    """Groups that must have completed before it is queued."""
    stop_on_missing_ranks: bool | None = None
    """Whether to stop the group if a task ended with code 0 although its ranks failed, and other tasks wait for these ranks.
    ``None``: yes, unless the ranks may have met at the rendezvous before they failed (``docs/diagnosis.md``)."""
    ends_with_lead: bool = False
    """Whether its other tasks only serve the lead, and are stopped when the lead has completed."""
    smaller: tuple[GroupPlan, ...] = ()
    """Plans with fewer tasks, the largest first. The group may run as one of them while there is no room for all tasks."""
    smaller_after_s: float = 0.0
    """Seconds during which only the whole group may start. Afterwards, a smaller plan may start, too."""
    venv: Requirements | None = None
    """The packages of the Python environment of its tasks; ``None``: they use the Python of their nodes."""

    @property
    def lead(self) -> Launch:
        """The group's lead."""
        return next(launch for launch in self.launches if launch.lead)

    @property
    def starts_as_one(self) -> bool:
        """Whether no task starts before all tasks are prepared. The ranks of a world would wait for each other anyway."""
        return self.barrier or self.world is not None

    @property
    def master(self) -> str:
        """The name of the task whose node has the rendezvous: the master of the world, else the lead."""
        return self.world.master if self.world else self.lead.task

    def counts(self, task: str) -> bool:
        """Return whether the failure of this task makes the group fail."""
        return not self.ignore_nonlead_status or self.launch(task).lead

    @property
    def sizes(self) -> tuple[GroupPlan, ...]:
        """All plans that it may run as, the whole one first."""
        return (self, *self.smaller)

    def sized(self, tasks: int) -> GroupPlan:
        """Return the plan for an attempt with this number of tasks."""
        return next((one for one in self.smaller if len(one.launches) == tasks), self)

    def with_launches(self, change: Callable[[Launch], Launch]) -> GroupPlan:
        """Return the group with each of its launches changed, in every size."""
        return replace(
            self,
            launches=tuple(change(launch) for launch in self.launches),
            smaller=tuple(one.with_launches(change) for one in self.smaller),
        )

    def launch(self, task: str) -> Launch:
        """Return the entry of one task."""
        return next(launch for launch in self.launches if launch.task == task)


class Plan(Struct, frozen=True, kw_only=True):
    """A whole workflow, ready to be placed."""

    name: str
    pool: str
    groups: tuple[GroupPlan, ...]

    @property
    def blobs(self) -> frozenset[str]:
        """The digests of all blobs that it sends."""
        return frozenset(file.blob for group in self.groups for launch in group.launches for file in launch.files if file.blob)

    def group(self, name: str) -> GroupPlan:
        """Return one group."""
        return next(group for group in self.groups if group.name == name)


class PlannedGangLink(Struct, frozen=True, kw_only=True):
    """A task's part in the connections by which the tasks of a gang report failures to each other without a supervisor.

    One of the tasks is the hub.
    """

    task: str
    others: tuple[str, ...]
    """The tasks that this task is connected to: all other tasks if it is the hub, otherwise only the hub."""
    address: str | None = None
    """The address of the hub on the training network; ``None`` for the hub itself."""
    port: int | None = None
    """The port of the hub; ``None`` for the hub itself."""
    counts: bool
    """Whether the task's failure makes the group fail."""
    success: Codes
    """Exit codes other than 0 that count as a success."""
    failure: Codes
    """Exit codes that count as a failure, which may include 0."""


class Download(Struct, frozen=True, kw_only=True):
    """An input that a task's node downloads from a URL."""

    number: int
    """Its number among the group's different inputs from URLs and datasets, counted from 0."""
    path: str
    """Its directory, relative to the attempt's directory."""
    url: str
    """The URL, with all placeholders filled in."""
    regex: str = ""
    dataset: str = ""
    """The dataset with its version; empty if there is only a URL."""


class BoundLaunch(Struct, frozen=True, kw_only=True):
    """One task, complete except for the attempt's directory, which its node fills in."""

    task: str
    node: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    files: tuple[PlannedFile, ...] = ()
    downloads: tuple[Download, ...] = ()
    setup: str | None = None
    venv: str | None = None
    """The digest of the requirements of its Python environment (``Requirements.digest``)."""
    container: Container | None = None
    """``None`` if it runs on the node itself."""
    folders: tuple[str, ...] = ()
    """Directories to create before it starts, relative to the attempt's directory."""
    mounts: tuple[str, ...] = ()
    """Directories of the node that must exist. The mounts of a container are in ``container``."""
    memory: int | None = None
    """The memory that its processes may use, in bytes; ``None``: all."""
    python_path: tuple[str, ...] = ()
    """Directories at the end of its PYTHONPATH."""
    path: tuple[str, ...] = ()
    """Directories at the beginning of its PATH."""
    gang: PlannedGangLink | None = None
    """``None`` for the only task of a group."""
    ranks: tuple[int, int] | None = None
    """The first rank and the number of ranks of a task with several ranks, each of which has a separate log."""
    max_log: int | None = None
    """The maximum size of its log in bytes; ``None``: the pool's limit."""
    output_link: str | None = None
    """The path of a link to the output directory, relative to the attempt's directory."""
