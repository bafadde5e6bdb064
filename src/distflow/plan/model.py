"""The plan: a frozen, symbolic description of one workflow's processes, and the binding that completes it.

Where only the nodes know a value, a string of the plan holds a placeholder of the form ``@@NAME@@``:

=====================  ====================================================
``@@WORKFLOW_ID@@``    what people call the run, such as ``pytorch-dist-3``
``@@ADDRESS:<task>@@`` address of that task's node on the training network
``@@MASTER_ADDR@@``    the same for the task that holds rank 0
``@@MASTER_PORT@@``    the rendezvous port, free on the master's node
``@@IFNAME@@``         the interface that owns the task's own address
``@@GPU_IDS@@``        the task's GPUs, such as ``0,1,2``
``@@NODE@@``           name of the task's node
``@@NODE:<task>@@``    the same for another task of the group
``@@LEASED_AT@@``      when the attempt's nodes were leased, such as ``2026-05-24T10:36:01`` (UTC)
``@@RETRY_ID@@``       number of the attempt, counted from 0
``@@ATTEMPT_DIR@@``    the attempt's directory on its node (filled in there)
=====================  ====================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from distflow.layout.ranks import TaskRanks, World
from distflow.lifecycle.exits import Codes, ExitActions
from distflow.plan.binding import Binding, TaskBinding
from distflow.spec.model import DataSpec, EarlierInput, InputSpec, ResourceSpec, Retry, Timeouts

__all__ = [
    "ATTEMPT_DIR",
    "PLACEHOLDER",
    "Binding",
    "BoundLaunch",
    "Bring",
    "Container",
    "GangLink",
    "GroupPlan",
    "Launch",
    "Plan",
    "PlannedCheckpoint",
    "PlannedCredential",
    "PlannedFile",
    "TaskBinding",
    "address_of",
]

PLACEHOLDER = re.compile(r"@@([A-Z_]+)(?::([A-Za-z0-9_-]+))?@@")
"""A value that only the nodes know."""

ATTEMPT_DIR = "@@ATTEMPT_DIR@@"


def address_of(task: str) -> str:
    """Return the placeholder for the address of a task's node."""
    return f"@@ADDRESS:{task}@@"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file or directory placed in the attempt's directory before the command starts."""

    path: str
    """Relative to the attempt's directory, such as ``files/tmp/entry.sh``."""
    shown: str
    """As the spec names it, such as ``/tmp/entry.sh``."""
    text: str | None = None
    """Its content, when small text (placeholders in it are filled in)."""
    blob: str | None = None
    """SHA-256 of its content in the blob store, otherwise."""
    size: int = 0
    """Bytes of the content or of the archive."""
    mode: int = 0o600
    is_tar: bool = False
    """The blob is a tar of a directory."""
    only: str = ""
    """Which files of the archive: those whose path this regular expression matches from its start; empty: all."""
    within: str = ""
    """The one directory of the archive that is unpacked; everything else in it is left out. Empty: all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCredential:
    """A credential of one task: as variables, or as a directory."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variable → key of the payload."""
    path: str = ""
    """The directory relative to the attempt's, such as ``files/run/secrets/deploy``; empty for none."""
    shown: str = ""
    """The directory as the spec names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCheckpoint:
    """A directory of a task that is taken while it runs, and given to its next attempt."""

    place: str
    """Relative to the attempt's directory, such as ``files/tmp/models``."""
    shown: str
    """As the spec names it, such as ``/tmp/models``."""
    url: str
    """The directory is written there under its own name; it may contain ``{{workflow_id}}``. Empty: it is written nowhere,
    and every task of the group is given it."""
    every_s: float
    regex: str = ""

    @property
    def is_shared(self) -> bool:
        """Whether every task of the group is given it."""
        return not self.url


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One task of the plan."""

    task: str
    lead: bool
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """Complete except for the values of ``--set-env``. It overrides the node's own ``environment``."""
    secret_names: tuple[str, ...] = ()
    """Variables given by ``--set-env``: their values are stored apart."""
    credentials: tuple[PlannedCredential, ...] = ()
    """What it gets of this user's credentials, without the values."""
    files: tuple[PlannedFile, ...] = ()
    inputs: tuple[InputSpec, ...] = ()
    """What it takes from tasks of the groups upstream."""
    url_inputs: tuple[DataSpec, ...] = ()
    """What it takes from stores; fetched before its group is queued."""
    ranks: TaskRanks | None = None
    """``None`` for a task that shares no world."""
    resource: ResourceSpec = ResourceSpec()
    rewritten: tuple[tuple[str, str], ...] = ()
    """Injected absolute paths, and where they stand on the node: ``("/train.py", "files/train.py")``."""
    outputs: tuple[str, ...] = ()
    url_outputs: tuple[DataSpec, ...] = ()
    """Where its output is written when it has completed, before its group is COMPLETED."""
    exit_actions: ExitActions = ExitActions()
    earlier_inputs: tuple[EarlierInput, ...] = ()
    """What it takes from tasks of earlier workflows; once those were fetched, they are ``files``, too."""
    checkpoints: tuple[PlannedCheckpoint, ...] = ()
    image: str | None = None
    mounts: tuple[str, ...] = ()
    privileged: bool = False
    member: int | None = None
    """Which member of its gang it is in ``distributed.json``; ``None``: it is given none (``plan.distributed``)."""
    python_path: tuple[str, ...] = ()
    """Directories at the end of its PYTHONPATH, after all other entries."""
    path: tuple[str, ...] = ()
    """Directories at the beginning of its PATH."""
    folders: tuple[str, ...] = ()
    """Directories of the attempt's that are made before it starts."""
    max_log: int | None = None
    """Bytes of its output that are kept; ``None``: as many as the pool says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """The container that a task runs in."""

    runtime: str
    """``docker``, ``podman``, ``apptainer``, or ``auto``: the first of them that the node has."""
    image: str
    mounts: tuple[str, ...] = ()
    privileged: bool = False
    cpus: int | None = None
    """That it may use; ``None``: all."""
    memory: int | None = None
    """Bytes that it may use; ``None``: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One group of the plan: a gang."""

    name: str
    launches: tuple[Launch, ...]
    world: World | None = None
    barrier: bool = True
    ignore_nonlead_status: bool = True
    timeouts: Timeouts = Timeouts()
    retry: Retry = Retry()
    upstream: tuple[str, ...] = ()
    """Groups that must have completed before it is queued."""
    stop_on_missing_ranks: bool | None = None
    """Whether it is stopped when ranks failed unnoticed and others wait for them; ``None``: unless they may have met."""
    ends_with_lead: bool = False
    """Whether its other tasks serve the lead, which are stopped when it has completed, though their failures count."""
    smaller: tuple[GroupPlan, ...] = ()
    """What it may run as instead when there is no room for all of its tasks, the largest first."""
    smaller_after_s: float = 0.0
    """How long it waits for that room."""

    @property
    def lead(self) -> Launch:
        """The task whose end decides the group's."""
        return next(launch for launch in self.launches if launch.lead)

    @property
    def starts_as_one(self) -> bool:
        """Whether all tasks start or none; the ranks of a world would wait for each other anyway."""
        return self.barrier or self.world is not None

    @property
    def master(self) -> str:
        """Name of the task whose node hosts the rendezvous: the master of the world, else the lead."""
        return self.world.master if self.world else self.lead.task

    def counts(self, task: str) -> bool:
        """Return whether the failure of a task is one of the group."""
        return not self.ignore_nonlead_status or self.launch(task).lead

    @property
    def sizes(self) -> tuple[GroupPlan, ...]:
        """Everything that it may run as, the whole of it first."""
        return (self, *self.smaller)

    def sized(self, tasks: int) -> GroupPlan:
        """Return the plan of an attempt with that many tasks."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GangLink:
    """How a task learns of a failure in its gang, and reports its own, without a supervisor."""

    task: str
    others: tuple[str, ...]
    """Whom it talks to: for the hub all other tasks, for the others the hub."""
    address: str | None = None
    """Of the hub, on the training network; ``None`` for the hub itself."""
    port: int | None = None
    counts: bool
    """Whether its failure is one of the group."""
    success: Codes
    """Exit codes other than 0 that count as a success."""
    failure: Codes
    """Exit codes that count as a failure, should 0 be among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bring:
    """An input that a task's node fetches from its URL by itself."""

    number: int
    """Which of the group's inputs from URLs, counted from 0."""
    path: str
    """The directory of the attempt's that it comes into."""
    url: str
    """With everything filled in."""
    regex: str = ""
    dataset: str = ""
    """With its version; empty: the URL itself is meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundLaunch:
    """One task, complete but for the attempt's directory, which its node fills in."""

    task: str
    node: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    files: tuple[PlannedFile, ...] = ()
    brings: tuple[Bring, ...] = ()
    setup: str | None = None
    container: Container | None = None
    """``None``: it runs on the node's own python."""
    folders: tuple[str, ...] = ()
    """Directories of the attempt's that are made before it starts."""
    mounts: tuple[str, ...] = ()
    """Directories of the node that must be there; those of a container are in ``container``."""
    memory: int | None = None
    """Bytes that its processes may use; ``None``: all that there are."""
    python_path: tuple[str, ...] = ()
    """Directories at the end of its PYTHONPATH."""
    path: tuple[str, ...] = ()
    """Directories at the beginning of its PATH."""
    gang: GangLink | None = None
    """``None`` for a task that is alone."""
    ranks: tuple[int, int] | None = None
    """The first of its ranks and how many it has, where there are several: each gets an output of its own."""
    max_log: int | None = None
    """Bytes of its output that are kept; ``None``: as many as the pool says."""
