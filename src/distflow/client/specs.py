"""Read and check the specs of files and of earlier workflows: values, rank layout, and needed credentials and outputs."""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from distflow.client.client import Client
from distflow.client.credentials import credential_problems
from distflow.client.notifications.targets import own_targets, target_problems
from distflow.client.previous_outputs import previous_output_problems
from distflow.documents.notify import NotifyTarget
from distflow.documents.problems import Mark, Problem, ProblemsFound, Severity, in_document_order
from distflow.documents.schema import load_schema
from distflow.documents.text import did_you_mean, few
from distflow.errors import InputError, SecretsMissing
from distflow.layout.checks.group_checks import check_layout
from distflow.layout.drawing import draw_world
from distflow.layout.placement import Free, Placement, Unplaced, place_near
from distflow.layout.ranks import WorldLayout
from distflow.plan.compile import compile_plan, demands
from distflow.plan.containers import container_notices, sharing_notices, venv_notices
from distflow.plan.model import Plan
from distflow.pools.hostfile import Host, choose_pool
from distflow.pools.load import configuration_schema_text
from distflow.pools.model import Configuration, NodeSettings, Pool
from distflow.shell import Secret
from distflow.spec.files import bundle_files
from distflow.spec.model import WorkflowSpec
from distflow.spec.parse import load_spec, load_spec_text, schema_text
from distflow.spec.tasks import unused_reschedules
from distflow.state.record import WorkflowRecord

__all__ = [
    "CheckedSpec",
    "Overrides",
    "PreviousWorkflow",
    "allocation_notices",
    "check_spec",
    "check_stored_spec",
    "configuration_schema_text",
    "find_notify_targets",
    "find_previous",
    "output_schema_text",
    "propose_placement",
    "schema_text",
    "unknown_platforms",
    "validate",
]


class Overrides(Struct, frozen=True, kw_only=True):
    """Values that the user gives in addition to a spec."""

    sets: tuple[tuple[str, str], ...] = ()
    """Names and values of template variables. The values are parsed as YAML."""
    set_strings: tuple[tuple[str, str], ...] = ()
    """Names and values of template variables. The values are strings."""
    secrets: Mapping[str, Secret]
    """Secret environment variables for every task."""


class CheckedSpec(Struct, frozen=True, kw_only=True):
    """A spec without errors."""

    spec: WorkflowSpec
    worlds: Mapping[str, WorldLayout]
    """The rank layout of each group that has ranks, by the name of the group."""
    warnings: tuple[Problem, ...]
    template: str
    """The document before template variables are filled in."""
    folder: Path
    """The base directory of relative ``localpath`` entries."""

    @property
    def pictures(self) -> dict[str, str]:
        """A drawing of the rank layout of each group that has ranks."""
        return {name: draw_world(world) for name, world in self.worlds.items()}


def check_spec(
    client: Client,
    file: str,
    overrides: Overrides,
    *,
    text: str | None = None,
    is_tolerant: bool = False,
    notify: Sequence[NotifyTarget] = (),
) -> CheckedSpec:
    """Read and check a spec, its rank layout and its credentials.

    Args:
        client: The client whose credentials and workflows the spec may use.
        file: The path of the spec, or its name in messages if ``text`` is given.
        overrides: Values for the template and the tasks.
        text: The spec itself. Its files are relative to the working directory.
        is_tolerant: Whether missing credentials are only warnings if this machine has no credentials at all.
        notify: Notification targets of the configuration and the profile, to check together with those of the spec.

    Returns:
        The spec with its warnings.

    Raises:
        InputError: if the file is a Python script.
        ProblemsFound: if the file cannot be read or the spec has errors. The error contains all findings.

    """
    if text is None and file.endswith(".py") and os.path.isfile(file):
        raise InputError(f"{file} is a Python script, not a spec", hint=f"distflow run {shlex.quote(file)}")
    checks = _SpecChecks(client, is_tolerant=is_tolerant, notify=notify)
    spec, warnings = load_spec(
        file,
        sets=overrides.sets,
        set_strings=overrides.set_strings,
        environment_names=tuple(overrides.secrets),
        stdin_text=text,
        check=checks.check,
    )
    template = text if text is not None else Path(file).read_text(encoding="utf-8")
    folder = Path.cwd() if text is not None else Path(file).absolute().parent
    return CheckedSpec(spec=spec, worlds=checks.worlds, warnings=warnings, template=template, folder=folder)


def find_notify_targets(client: Client, spec: str | None = None) -> tuple[NotifyTarget, ...]:
    """Return the entries of ``notify`` that apply to this user's workflows.

    Args:
        client: The client whose configuration and profile are read.
        spec: The path of a spec whose entries are included.

    Raises:
        ProblemsFound: if the configuration, the profile or the spec is wrong.
        StateError: if the profile cannot be read.

    """
    own = own_targets(client, client.configuration())
    if spec is None:
        return own
    return (*own, *check_spec(client, spec, Overrides(secrets={}), is_tolerant=True).spec.notify)


def check_stored_spec(client: Client, name: str, text: str, template: str, folder: Path, overrides: Overrides) -> CheckedSpec:
    """Check the stored spec of a workflow again, because files, credentials or other workflows may have changed.

    Args:
        client: The client whose credentials and workflows the spec may use.
        name: The id of the workflow.
        text: The rendered spec.
        template: The spec as submitted.
        folder: The base directory of relative ``localpath`` entries.
        overrides: The secrets of the workflow.

    Raises:
        ProblemsFound: if the spec has errors. The error contains all findings.

    """
    names, checks = tuple(overrides.secrets), _SpecChecks(client)
    spec, warnings = load_spec_text(text, name, folder, environment_names=names, is_rendered=True, check=checks.check)
    return CheckedSpec(spec=spec, worlds=checks.worlds, warnings=warnings, template=template, folder=folder)


def validate(
    client: Client,
    file: str,
    overrides: Overrides,
    configuration: Configuration,
    *,
    pool: str | None = None,
    hosts: Sequence[Host] | None = None,
    text: str | None = None,
) -> tuple[CheckedSpec, list[Problem]]:
    """Check a spec without storing anything.

    A spec that does not fit the pool causes only a warning, because it may be meant for other machines.

    Args:
        client: The client whose credentials and workflows the spec may use. If this machine has no credentials, missing ones
            are only warnings.
        file: The path of the spec, or its name in messages if ``text`` is given.
        overrides: Values for the template and the tasks.
        configuration: The pools.
        pool: The name of the pool to check against. Default: the pool of the spec, or else the default pool.
        hosts: Machines to use instead of the nodes of the pool.
        text: The spec itself. Its files are relative to the working directory.

    Returns:
        The spec and all its warnings.

    Raises:
        InputError: if the file is a Python script, or if the pool cannot use ``hosts``.
        NotFound: if the pool does not exist.
        ProblemsFound: if the file cannot be read or the spec has errors. The error contains all findings.

    """
    notify = own_targets(client, configuration)
    checked = check_spec(client, file, overrides, text=text, is_tolerant=True, notify=notify)
    chosen = choose_pool(configuration, given=pool, wanted=checked.spec.pool, hosts=hosts)
    with tempfile.TemporaryDirectory() as blobs:
        bundles, problems = bundle_files(checked.spec, Path(blobs))
    if problems:
        raise ProblemsFound([*problems, *checked.warnings])
    plan = compile_plan(checked.spec, checked.worlds, pool=chosen.name, bundles=bundles)
    placement, misfits = propose_placement(plan, chosen, checked.spec, Severity.WARNING)
    notices = container_notices(checked.spec, chosen.node_settings) + venv_notices(checked.spec, chosen.node_settings)
    notices += allocation_notices(checked.spec, chosen)
    notices += sharing_notices(checked.spec, bundles, placement, chosen.nodes)
    return checked, [*in_document_order([*checked.warnings, *notices]), *misfits]


def propose_placement(
    plan: Plan, pool: Pool, spec: WorkflowSpec, severity: Severity = Severity.ERROR
) -> tuple[dict[str, str], tuple[Problem, ...]]:
    """Place the tasks of each group of a plan on the nodes of a pool, as if all nodes were idle.

    Args:
        plan: The plan.
        pool: The pool.
        spec: The spec of the plan, for the lines of problems.
        severity: The severity of the problems.

    Returns:
        The name of the node for each task, and a problem for each group that does not fit. If an engine chooses the nodes of
        the pool, there are no names, and the problems are about platforms and topologies that the pool does not support.

    """
    if pool.is_allocated:
        return {}, _platform_problems(pool, spec, severity) + _required_topology(pool, spec, severity)
    free = tuple(Free.whole(node) for node in pool.nodes)
    placement: dict[str, str] = {}
    problems: list[Problem] = []
    for group in plan.groups:
        unplaced: tuple[Unplaced, ...] = ()
        for size in group.sizes:
            placed = place_near(demands(size), free, shared=pool.shares_nodes)
            if isinstance(placed, Placement):
                placement.update(placed.nodes)
                break
            unplaced = placed
        else:
            mark = next(one.mark for one in spec.groups if one.name == group.name)
            problems.append(
                Problem(
                    where=mark,
                    severity=severity,
                    message=f"group `{group.name}` can never run in pool `{pool.name}`",
                    hint=_why_unplaced(unplaced),
                )
            )
    return placement, tuple(problems)


def unknown_platforms(pool: Pool, spec: WorkflowSpec) -> Mapping[str, Mark]:
    """Return the platforms of a spec that the pool of a cluster engine does not define, each with the mark of a task."""
    return {
        platform: task.mark
        for group in spec.groups
        for task in group.tasks
        if (platform := spec.resources[task.resource].platform) is not None and platform not in pool.platforms
    }


def _platform_problems(pool: Pool, spec: WorkflowSpec, severity: Severity) -> tuple[Problem, ...]:
    known = pool.platforms
    return tuple(
        Problem(
            where=mark,
            severity=severity,
            message=f"pool `{pool.name}` has no platform `{name}`",
            hint=did_you_mean(name, known, what="platforms") if known else "add it to `platforms` of the pool",
        )
        for name, mark in unknown_platforms(pool, spec).items()
    )


def _required_topology(pool: Pool, spec: WorkflowSpec, severity: Severity) -> tuple[Problem, ...]:
    """Return a problem for each resource of a spec that requires a topology, for a pool whose engine chooses the nodes."""
    return tuple(
        Problem(
            where=resource.mark,
            severity=severity,
            message=f"pool `{pool.name}` cannot place tasks by `topology`: {pool.backend} chooses its nodes",
            hint="remove `topology`, or write `requirementType: preferred` to run anyway",
        )
        for resource in spec.resources.values()
        if any(one.required for one in resource.topology)
    )


def allocation_notices(spec: WorkflowSpec, pool: Pool) -> tuple[Problem, ...]:
    """Return warnings for preferred ``topology`` and for ``elastic``, which have no effect if an engine chooses the nodes."""
    if not pool.is_allocated:
        return ()
    found = [
        (resource.mark, f"`topology` is ignored: {pool.backend} chooses the nodes of pool `{pool.name}`", "")
        for resource in spec.resources.values()
        if resource.topology and not any(one.required for one in resource.topology)
    ]
    found += [
        (
            group.elastic.mark,
            f"`elastic` is ignored: the group waits until {pool.backend} has nodes for all of its tasks",
            "remove tasks to request fewer nodes",
        )
        for group in spec.groups
        if group.elastic is not None
    ]
    return tuple(Problem(where=mark, severity=Severity.WARNING, message=message, hint=hint) for mark, message, hint in found)


def _why_unplaced(unplaced: Sequence[Unplaced]) -> str:
    """Return the reasons why tasks do not fit, each with its tasks, and a remedy."""
    tasks: dict[str, list[str]] = {}
    for one in unplaced:
        for reason in one.reasons:
            tasks.setdefault(reason, []).append(one.task)
    lines = [f"{few(names)}: {reason}" for reason, names in tasks.items()]
    remedy = "request less in `resources`, or use a pool with other nodes: `distflow pool list` shows all"
    return "\n".join([few(lines, "\n", most=3), remedy])


def output_schema_text(command: str) -> str:
    """Return the JSON Schema of a command's JSON output.

    Args:
        command: ``query``, ``list``, ``submit``, ``events``, ``outputs``, ``why``, ``pool-check`` or ``notification``.

    """
    schema = load_schema("distflow.client", "output.schema.json")
    head = {
        **schema,
        "$ref": f"#/$defs/{command}",
        "$id": f"https://distflow.dev/schema/{command}-{schema['version']}.schema.json",
    }
    return json.dumps({key: head[key] for key in ("$schema", "$id", "version", "description", "$ref", "$defs")}, indent=2)


class _SpecChecks:
    """Checks of a spec that the package ``spec`` cannot do, such as rank layout, credentials and outputs of other workflows."""

    def __init__(self, client: Client, *, is_tolerant: bool = False, notify: Sequence[NotifyTarget] = ()) -> None:
        """Create the checks for a client. The arguments are those of ``check_spec``."""
        self._client = client
        self._notify = notify
        self._is_tolerant = is_tolerant
        self.worlds: dict[str, WorldLayout] = {}

    def check(self, spec: WorkflowSpec) -> Sequence[Problem]:
        """Store the worlds of a spec, and return all problems."""
        found, problems = check_layout(spec)
        self.worlds.update(found)
        problems += (
            *unused_reschedules(spec, found),
            *credential_problems(self._client, spec, is_tolerant=self._is_tolerant),
            *target_problems(self._client, (*self._notify, *spec.notify), is_tolerant=self._is_tolerant, is_quick=True),
        )
        return [*problems, *previous_output_problems(self._client, spec)]


_ID = re.compile(r"[A-Za-z].*-[0-9]+|[0-9a-f]{32}")


class PreviousWorkflow(Struct, frozen=True, kw_only=True):
    """A workflow that was submitted before."""

    record: WorkflowRecord
    checked: CheckedSpec
    pool: Pool
    """The pool as configured when the workflow was submitted."""

    def choose_pool(self, configuration: Configuration, given: str | None, hosts: Sequence[Host] | None) -> Pool:
        """Return the pool for the new workflow.

        Args:
            configuration: The current pools.
            given: The name of a pool.
            hosts: Machines to use instead of the nodes of the pool.

        Returns:
            The given pool, or else the pool of the previous workflow as configured now. If the configuration no longer has it:
            the pool as configured then, or with ``hosts``, the default pool. Without ``given`` and ``hosts``, the pool keeps
            all settings of the previous submission. Otherwise it keeps only the environment variables and the ``venv``.

        Raises:
            InputError: if the given pool cannot use ``hosts``.
            NotFound: if the given pool does not exist.

        """
        if given is None and hosts is None:
            return configuration.pools.get(self.record.pool, self.pool).with_settings(self.pool.given)
        wanted = self.record.pool if self.record.pool in configuration.pools else None
        chosen = choose_pool(configuration, given=given, wanted=wanted, hosts=hosts)
        return chosen.with_settings(NodeSettings(environment=self.pool.given.environment, venv=self.pool.given.venv))


def find_previous(client: Client, name: str, overrides: Overrides, *, may_be_file: bool = True) -> PreviousWorkflow | None:
    """Return the workflow with this id or uuid, after checking its spec again.

    Args:
        client: The client whose store has the workflow.
        name: An id, a uuid, or the path of a spec file.
        overrides: The secrets of the workflow, which must be given again.
        may_be_file: Whether a file of this name takes precedence.

    Returns:
        The workflow, or ``None`` if a file of this name exists or the name does not look like an id.

    Raises:
        SecretsMissing: if a secret is not given.
        InputError: if the overrides set template variables, which a stored spec no longer has.
        NotFound: if the workflow does not exist.
        ProblemsFound: if the spec is no longer valid.

    """
    if (may_be_file and os.path.isfile(name)) or not _ID.fullmatch(name):
        return None
    store = client.store
    record = store.find(name)
    text, template = (store.document(record.uuid, kind) for kind in ("spec", "template"))
    folder, pool, plan = store.folder(record.uuid), store.pool(record.uuid), store.plan(record.uuid)
    if overrides.sets or overrides.set_strings:
        hint = f"print its template with `distflow workflow spec {record.id} --template`, and submit that"
        raise InputError(
            f"template variables cannot be set, because the stored spec of {record.id} already has their values", hint=hint
        )
    secrets = {name: None for group in plan.groups for launch in group.launches for name in launch.secret_names}
    if missing := [name for name in secrets if name not in overrides.secrets]:
        raise SecretsMissing(record.id, missing)
    checked = check_stored_spec(client, record.id, text, template, Path(folder) if folder else Path.cwd(), overrides)
    return PreviousWorkflow(record=record, checked=checked, pool=pool)
