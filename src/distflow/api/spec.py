"""Specs as Python values: built in a program, written as YAML, read from YAML.

A field has the meaning of a YAML key (``docs/spec.md``) and its name in snake case: ``exit_actions`` is ``exitActions``. Only
``Spec.variables`` has another name in YAML: ``default-values``. Fields without a value are left out of the YAML. Numbers may
also be strings with a template, such as ``"{{gpus}}"``. Values are checked when the spec is submitted, as on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import msgspec
from msgspec import Struct, field

from distflow.documents.yaml_parser import parse_yaml
from distflow.documents.yaml_writer import unsupported, yaml_text
from distflow.errors import InputError
from distflow.structs import convert

__all__ = [
    "Checkpoint",
    "Dataset",
    "DatasetUpdate",
    "Elastic",
    "File",
    "Group",
    "Input",
    "Kpi",
    "LauncherOptions",
    "Notify",
    "Output",
    "Ranks",
    "Resources",
    "Retry",
    "Shared",
    "Spec",
    "Task",
    "Timeouts",
    "Topology",
    "yaml_text",
]

Text = str | int | float | bool
"""A text. A number or a Boolean is converted to its YAML text."""
Count = int | str
"""A whole number, or a template."""
Flag = bool | str
"""A Boolean, or a template."""
Amount = int | float | str
"""Bytes, or a text such as ``512Mi``."""
Duration = int | float | str
"""Seconds, or a text such as ``90s``."""


class _Part(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The base class of all mappings in a spec."""


class Timeouts(_Part, frozen=True):
    """Time limits of a group, or of each group of a spec."""

    exec_timeout: Duration | None = None
    queue_timeout: Duration | None = None
    hang_timeout: Duration | None = None


class Retry(_Part, frozen=True):
    """The number of retries of a group, the delays before them, and the number of failures on a node before it is avoided."""

    limit: Count | None = None
    backoff: Duration | None = None
    max_backoff: Duration | None = None
    avoid_after: Count | None = None


class Topology(_Part, frozen=True):
    """A request for tasks to be near each other."""

    key: Text
    group: Text | None = None
    requirement_type: Text | None = field(default=None, name="requirementType")


class Resources(_Part, frozen=True):
    """The resources that a task requests from its node."""

    cpu: Count | None = None
    gpu: Count | None = None
    memory: Amount | None = None
    storage: Amount | None = None
    platform: Text | None = None
    nodes_excluded: list[Text] | str = field(default_factory=list, name="nodesExcluded")
    topology: list[Topology] = field(default_factory=list)


class Ranks(_Part, frozen=True):
    """The global ranks of a task: ``size`` ranks, of which ``offset`` is the first. The group has ``world_size`` ranks."""

    offset: Count | None = None
    size: Count | None = None
    world_size: Count | None = None


class LauncherOptions(_Part, frozen=True):
    """A launcher with options. Without options, its name is enough: ``launcher="torchrun"``."""

    kind: str
    max_restarts: Count | None = None
    numa: Flag | None = None


class File(_Part, frozen=True):
    """A file or directory that is created before a task starts, with either ``contents`` or ``localpath``."""

    path: Text
    contents: Text | None = None
    localpath: Text | None = None
    exclude: list[Text] | str = field(default_factory=list)
    base64: Flag | None = None


class Dataset(_Part, frozen=True):
    """A dataset that an input reads, or to which an output adds a new version."""

    name: Text
    path: Text | None = None
    regex: Text | None = None


class DatasetUpdate(_Part, frozen=True):
    """A dataset that gets a new version with additional files."""

    name: Text
    paths: list[Text] | str = field(default_factory=list)


class Input(_Part, frozen=True):
    """Data that is fetched before a task starts: from a ``task``, a ``url`` or a ``dataset``."""

    task: Text | None = None
    url: Text | None = None
    dataset: Dataset | None = None
    regex: Text | None = None


class Output(_Part, frozen=True):
    """The URL or the dataset to which the output files of a task are written."""

    url: Text | None = None
    dataset: Dataset | None = None
    update_dataset: DatasetUpdate | None = None
    regex: Text | None = None


class Checkpoint(_Part, frozen=True):
    """A directory that is uploaded while its task runs, and when the task has ended."""

    path: Text
    url: Text
    frequency: Duration
    regex: Text | None = None


class Shared(_Part, frozen=True):
    """A directory for the checkpoints of all tasks of a group."""

    path: Text
    frequency: Duration | None = None


class Elastic(_Part, frozen=True):
    """The minimum number of tasks with ranks that a group needs to run, and the time to wait for more."""

    min: Count
    wait: Duration | None = None


class Kpi(_Part, frozen=True):
    """A key of OSMO that distflow does not use."""

    index: Text
    path: Text


class Notify(_Part, frozen=True):
    """A target of notifications and the events to send to it. ``url`` or ``credential`` identifies the target."""

    on: list[Text] = field(default_factory=list)
    url: Text | None = None
    credential: Text | None = None
    format: Text | None = None
    after: Duration | None = None
    name: Text | None = None


class Task(_Part, frozen=True):
    """A command on one node, or with ``replicas``, on several nodes."""

    name: str
    command: list[Text] | str
    args: list[Text] | str = field(default_factory=list)
    image: Text | None = None
    lead: Flag | None = None
    environment: dict[str, Text] = field(default_factory=dict)
    files: list[File] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    output_dir: Text | None = None
    credentials: dict[str, Text | dict[str, Text]] = field(default_factory=dict)
    resource: Text | None = None
    ranks: Ranks | None = None
    launcher: str | LauncherOptions | None = None
    replicas: Count | None = None
    exit_actions: dict[str, Text] = field(default_factory=dict, name="exitActions")
    checkpoint: list[Checkpoint] = field(default_factory=list)
    volume_mounts: list[Text] | str = field(default_factory=list, name="volumeMounts")
    privileged: Flag | None = None
    host_network: Flag | None = field(default=None, name="hostNetwork")
    download_type: str | None = field(default=None, name="downloadType")
    cache_size: Text | None = field(default=None, name="cacheSize")
    kpis: list[Kpi] = field(default_factory=list)


class Group(_Part, frozen=True):
    """Tasks that start and stop together."""

    name: str
    tasks: list[Task]
    barrier: Flag | None = None
    ignore_nonlead_status: Flag | None = field(default=None, name="ignoreNonleadStatus")
    timeout: Timeouts | None = None
    retry: Retry | None = None
    shared: str | Shared | None = None
    elastic: Elastic | None = None
    launcher: str | LauncherOptions | None = None
    framework: str | None = None
    stop_on_missing_ranks: Flag | None = None
    debug: Flag | None = None
    strategy: dict[str, Any] | None = None


class Spec(_Part, frozen=True):
    """A workflow: its name, and either ``groups``, or ``tasks``, each of which becomes a separate group.

    ::

        training = Group(
            name="training",
            launcher="torchrun",
            tasks=[Task(name="node", command="python3 train.py", replicas=2, ranks=Ranks(size=8))],
        )
        workflow = distflow.submit(Spec(name="train", groups=[training]))

    ``resources`` are named; tasks use the entry ``default`` unless they name another one. ``variables`` are the template
    variables of the spec, with their values (``default-values`` in YAML).
    """

    name: str
    groups: list[Group] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    resources: dict[str, Resources] = field(default_factory=dict)
    pool: Text | None = None
    venv: Text | None = None
    labels: dict[str, Text] = field(default_factory=dict)
    timeout: Timeouts | None = None
    retry: Retry | None = None
    max_log: Amount | None = None
    notify: list[Notify] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as the mapping that its YAML contains. Raises ``InputError`` if YAML cannot represent a value."""
        workflow: dict[str, Any] = msgspec.to_builtins(self, enc_hook=_encode)
        variables = workflow.pop("variables", None)
        return {"workflow": workflow} | ({"default-values": variables} if variables else {})

    def to_yaml(self) -> str:
        """Return the spec as YAML for ``distflow submit``, which ``from_yaml`` can read. Raises the error of ``to_dict``."""
        return yaml_text(self.to_dict())

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], *, file: str = "the spec") -> Spec:
        """Return the spec from a mapping in the format of ``to_dict``.

        Args:
            document: The mapping, with ``workflow`` and optionally ``default-values``.
            file: The name of the document in error messages.

        Raises:
            InputError: if ``workflow`` is missing, if a key is unknown, or if a value has the wrong type.

        """
        rest = {key: value for key, value in document.items() if key not in ("workflow", "default-values", "version")}
        workflow = document.get("workflow")
        if rest or not isinstance(workflow, Mapping):
            message = f"{file} has an unknown key `{next(iter(rest))}`" if rest else f"{file} has no mapping `workflow`"
            raise InputError(message, hint="write {'workflow': {'name': …, 'groups': […]}}")
        try:
            variables = _plain(document.get("default-values") or {}, keeps_null=True)
            return convert({**_plain(workflow), "variables": variables}, cls)
        except msgspec.ValidationError as error:
            raise InputError(
                f"{file}: {error}", hint="`$` is the mapping `workflow`, `$.variables` is `default-values`; see docs/spec.md"
            ) from None

    @classmethod
    def from_yaml(cls, text: str, *, file: str = "the spec") -> Spec:
        """Return the spec from a YAML document, without rendering its templates.

        Args:
            text: The document. Templates must be inside of quoted texts: ``gpu: "{{gpus}}"``.
            file: The name of the document in error messages.

        Raises:
            InputError: if ``workflow`` is missing, if a key is unknown, or if a value has the wrong type.
            ProblemsFound: if the text is not YAML, with the lines of all findings.

        """
        document = parse_yaml(text, file).value
        if not isinstance(document, dict):
            raise InputError(f"{file} is not a mapping", hint="a spec begins with `workflow:`")
        return cls.from_dict(document, file=file)


def _encode(value: object) -> str:
    """Return a path as text. Raises ``InputError`` for other objects, which YAML cannot represent."""
    if isinstance(value, PurePath):
        return str(value)
    raise unsupported(value)


def _plain(value: Any, *, keeps_null: bool = False) -> Any:
    """Convert the parser's number type to ``float``. Remove keys whose value is null, unless ``keeps_null``."""
    if isinstance(value, Mapping):
        items = value.items()
        return {key: _plain(item, keeps_null=keeps_null) for key, item in items if keeps_null or item is not None}
    if isinstance(value, list):
        return [_plain(item, keeps_null=keeps_null) for item in value]
    return float(value) if isinstance(value, float) else value
