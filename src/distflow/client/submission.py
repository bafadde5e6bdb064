"""Plan specs for a pool, submit planned workflows, and restart ended ones."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct, field

from distflow.backends.registry import require_supported, unknown_hosts
from distflow.client.client import Client, now, user_name
from distflow.client.credentials import gather_secrets
from distflow.client.notifications.targets import own_targets, target_problems
from distflow.client.pools import PoolCheck, check_pool_nodes
from distflow.client.previous_outputs import (
    OnFetch,
    add_previous_outputs,
    fetch_outputs,
    output_source,
)
from distflow.client.specs import (
    CheckedSpec,
    Overrides,
    PreviousWorkflow,
    allocation_notices,
    check_spec,
    find_previous,
    propose_placement,
)
from distflow.documents.document import Text
from distflow.documents.notify import NotifyTarget
from distflow.documents.problems import Mark, Problem, ProblemsFound, in_document_order, raise_errors
from distflow.documents.urls import parse_url
from distflow.errors import InputError
from distflow.layout.checks.group_checks import check_layout
from distflow.layout.placement import Free, Placement, place
from distflow.lifecycle.states import State, WorkflowState
from distflow.plan.compile import compile_plan, demands
from distflow.plan.containers import container_notices, sharing_notices, venv_notices
from distflow.plan.model import Plan, runs_torchrun
from distflow.plan.render import script
from distflow.pools.hostfile import Host, choose_pool
from distflow.pools.model import NO_SETTINGS, Configuration, Node, NodeSettings, Pool
from distflow.spec.files import OnPack, bundle_files
from distflow.spec.names import MOST_LABELS
from distflow.state.codec import encode
from distflow.state.event_details import WorkflowSubmitted
from distflow.state.record import EventRecord, GroupRecord, Kept, Priority, Saved, TaskRecord, WorkflowRecord, fresh_tasks
from distflow.state.secrets import remove_secrets, write_secrets
from distflow.storage.credentials import NO_DRIVER, package_of
from distflow.structs import replace

__all__ = [
    "PlannedRestart",
    "PlannedWorkflow",
    "SubmitRequest",
    "check_planned",
    "check_python",
    "join_labels",
    "plan",
    "plan_checked",
    "plan_restart",
    "pool_key",
    "restart",
    "store_workflow",
    "submit",
    "with_environment",
    "write_scripts",
]


class SubmitRequest(Struct, frozen=True, kw_only=True):
    """A spec to submit and the options of its submission."""

    spec: str
    """The path of a YAML file, or the id of a workflow to submit again. If ``text`` is given: the spec's name in messages."""
    text: str | None = None
    """The spec itself. Its files are relative to the working directory."""
    overrides: Overrides = field(default_factory=lambda: Overrides(secrets={}))
    pool: str | None = None
    """The name of the pool to run in. Default: that of the workflow to submit again or of the spec, or the default pool."""
    hosts: Sequence[Host] | None = None
    """Machines to use instead of the nodes of the pool."""
    settings: NodeSettings = NO_SETTINGS
    """Settings of the nodes that take precedence over those of the pool, the hostfile and the spec."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Additional labels. They take precedence over labels of the spec or of the workflow to submit again."""
    priority: Priority | None = None
    """The priority in the queue. Default: that of the workflow to submit again, or else ``NORMAL``."""


class PlannedWorkflow(Struct, frozen=True, kw_only=True):
    """A checked spec with a plan that fits its pool, as ``submit`` needs it."""

    checked: CheckedSpec
    overrides: Overrides
    plan: Plan
    pool: Pool
    placement: Mapping[str, str]
    """The name of the node for each task, if the pool were idle. Empty if an engine chooses the nodes."""
    blobs: Path
    """The directory with the files that the spec sends, named by their digests."""
    labels: Mapping[str, str] = field(default_factory=dict)
    priority: Priority = Priority.NORMAL
    notify: tuple[NotifyTarget, ...] = ()
    """The targets of notifications: the entries of the configuration, of this user's profile and of the spec."""


def plan(
    client: Client,
    request: SubmitRequest,
    *,
    blobs: Path | None = None,
    configuration: Configuration | None = None,
    on_pack: OnPack | None = None,
) -> PlannedWorkflow:
    """Check and plan a spec, without storing or starting a workflow.

    Args:
        client: The client whose configuration, credentials and workflows the spec may use.
        request: The spec and the options of its submission.
        blobs: The directory for copies of the files that the spec sends. Default: that of the state directory. ``submit`` needs
            the default.
        configuration: The pools. Default: read the configuration of the client.
        on_pack: Called with the number of bytes that were read, and the total number that is known so far.

    Returns:
        The planned workflow, for ``submit``.

    Raises:
        InputError: if the spec is a Python script, if there are too many labels, or if a workflow to submit again gets template
            variables or needs a secret that is not given. Also if the pool cannot use the hosts, if a package for data at URLs
            or for the backend of the pool is not installed, or if this operating system cannot run tasks and the pool is
            this machine.
        NotFound: if a workflow or the pool does not exist.
        ProblemsFound: if the spec has errors, if a file cannot be read, if a host name of ``hosts`` does not exist, or if the
            pool cannot hold a group even when idle. Also if a target of notifications is not valid, or if the rank layout does
            not allow a variable of ``--env``.

    """
    configuration = configuration or client.configuration()
    notify = own_targets(client, configuration)
    previous = find_previous(client, request.spec, request.overrides) if request.text is None else None
    if previous is not None:
        raise_errors(target_problems(client, notify, is_quick=True))
        checked, chosen = previous.checked, previous.choose_pool(configuration, request.pool, request.hosts)
    else:
        checked = check_spec(client, request.spec, request.overrides, text=request.text, notify=notify)
        chosen = choose_pool(configuration, given=request.pool, wanted=checked.spec.pool, hosts=request.hosts)
    require_supported(chosen)
    _check_hosts(chosen, request.hosts or ())
    chosen = chosen.with_settings(request.settings)
    labels = join_labels(previous.record.labels if previous else checked.spec.labels, request.labels)
    planned = plan_checked(
        checked,
        chosen,
        request.overrides,
        client.writable_directory().blobs if blobs is None else blobs,
        client.datasets_url(configuration),
        on_pack,
    )
    _check_drivers(client, planned.plan)
    return replace(
        planned,
        labels=labels,
        notify=(*notify, *checked.spec.notify),
        priority=request.priority or (previous.record.priority if previous else Priority.NORMAL),
    )


def _check_hosts(pool: Pool, hosts: Sequence[Host]) -> None:
    """Raise ``ProblemsFound`` for host names of a hostfile that do not exist."""
    unknown = unknown_hosts(pool) if hosts else {}
    hint = "correct the name, set its address as `HostName` in ~/.ssh/config, or connect to the VPN that resolves it"
    raise_errors(
        [
            Problem(where=host.where, message=f"the host name `{unknown[host.host]}` has no address", hint=hint)
            for host in hosts
            if host.host in unknown
        ]
    )


def plan_checked(
    checked: CheckedSpec, pool: Pool, overrides: Overrides, blobs: Path, datasets: str, on_pack: OnPack | None = None
) -> PlannedWorkflow:
    """Read the files that a checked spec sends, compile its plan and propose a placement.

    Args:
        checked: The checked spec.
        pool: The pool to run in.
        overrides: Values that the user gave.
        blobs: The directory for copies of the files.
        datasets: The base URL of datasets.
        on_pack: Called with the number of bytes that were read, and the total number that is known so far.

    Raises:
        ProblemsFound: if a file cannot be read, if the rank layout does not allow a variable of ``--env``, or if the pool
            cannot hold a group even when idle.

    """
    checked = with_environment(checked, pool.given.environment)
    notices = container_notices(checked.spec, pool.node_settings) + venv_notices(checked.spec, pool.node_settings)
    notices += allocation_notices(checked.spec, pool)
    checked = replace(checked, warnings=in_document_order([*checked.warnings, *notices]))
    bundles, problems = bundle_files(checked.spec, blobs, on_pack or _ignore)
    if problems:
        raise ProblemsFound([*problems, *checked.warnings])
    compiled = compile_plan(
        checked.spec, checked.worlds, pool=pool.name, bundles=bundles, secret_names=tuple(overrides.secrets), datasets=datasets,
        venv=pool.given.venv or checked.spec.venv or pool.venv,
    )  # fmt: skip
    placement, misfits = propose_placement(compiled, pool, checked.spec)
    if misfits:
        raise ProblemsFound([*misfits, *checked.warnings])
    shared = sharing_notices(checked.spec, bundles, placement, pool.nodes)
    checked = replace(checked, warnings=in_document_order([*checked.warnings, *shared]))
    return PlannedWorkflow(checked=checked, overrides=overrides, plan=compiled, pool=pool, placement=placement, blobs=blobs)


def with_environment(checked: CheckedSpec, given: Mapping[str, str]) -> CheckedSpec:
    """Return the spec with these variables in every task. Raises ``ProblemsFound`` if the rank layout does not allow them."""
    if not given:
        return checked
    added = {name: Text(value, Mark("--env")) for name, value in given.items()}
    groups = tuple(
        replace(group, tasks=tuple(replace(task, environment={**task.environment, **added}) for task in group.tasks))
        for group in checked.spec.groups
    )
    spec = replace(checked.spec, groups=groups)
    worlds, problems = check_layout(spec)
    raise_errors(problems)
    return replace(checked, spec=spec, worlds=worlds)


def check_planned(planned: PlannedWorkflow, *, on_progress: Callable[[str], None] = lambda _: None) -> PoolCheck:
    """Check the nodes of a planned workflow as ``check_pool`` does, and torch on nodes that run torchrun without an image."""
    launches = [launch for group in planned.plan.groups for launch in group.launches]
    # An engine chooses the nodes of its pools later, so they are not in the placement.
    placed = [one for one in launches if one.task in planned.placement]
    with_torch = {planned.placement[one.task] for one in placed if runs_torchrun(one.argv) and one.image is None}
    names, venv = set(planned.placement.values()), next((group.venv for group in planned.plan.groups), None)
    return check_pool_nodes(planned.pool, names, torch_nodes=with_torch, venv=venv, on_progress=on_progress)


def check_python(planned: PlannedWorkflow, modules: Sequence[str], variables: Mapping[str, str]) -> None:
    """Check that nodes of a planned workflow have the ``modules`` and the minor version of Python of this program.

    Functions can only be unpickled with the same minor version. This queries all nodes that may get a task. Nodes that do not
    answer soon, and nodes that an engine allocates later, are not checked.

    Args:
        planned: The planned workflow.
        modules: Top-level modules that the tasks import.
        variables: The environment variables of the tasks.

    Raises:
        InputError: if the Python of a node has another minor version or lacks a module.

    """
    # Most callers do not need these modules.
    from distflow.backends.machines.checks.interpreters import find_interpreters
    from distflow.documents.text import few

    pool, requests = planned.pool, [demand for group in planned.plan.groups for demand in demands(group)]

    def may_get_a_task(node: Node) -> bool:
        return any(isinstance(place([demand], [Free.whole(node)], shared=True), Placement) for demand in requests)

    nodes = list(filter(may_get_a_task, pool.nodes))
    venv, version = next((group.venv for group in planned.plan.groups), None), f"{sys.version_info[0]}.{sys.version_info[1]}"
    found = find_interpreters(pool, nodes, version=version, modules=modules, variables=variables, venv=venv)
    if other := [one for one in found if not one.has_version(version)]:
        by_python: dict[str, list[str]] = {}
        for one in other:
            by_python.setdefault(f"Python {one.version} ({one.executable})", []).append(one.node)
        nodes_with = "; ".join(f"{few(names)}: {python}" for python, names in by_python.items())
        paths = {path for one in other for path in one.others}
        example = f", for example `{min(paths)}`" if paths else ""
        raise InputError(
            f"the function needs Python {version}, like this program ({sys.executable}), but these nodes differ: {nodes_with}",
            hint=f"give the path of a Python {version} on the nodes as `python=`, or in the pool as `python:`{example}",
        )
    if lacking := [one for one in found if one.missing]:
        lacks: dict[tuple[str, str], list[str]] = {}
        for one in lacking:
            names = ", ".join(f"`{name}`" for name in one.missing)
            lacks.setdefault((names, one.executable), []).append(one.node)
        missing = "; ".join(f"{names} from {python} on {few(nodes)}" for (names, python), nodes in lacks.items())
        paths = {path for one in lacking for path in one.others}
        example = f", such as `{min(paths)}`" if paths else ""
        remedy = f"install the missing modules there, or give the path of a Python that has them as `python=`{example}"
        raise InputError(
            f"the function needs modules that are missing: {missing}",
            hint=f"add them to {venv.file}" if venv else remedy,
        )


def submit(
    client: Client,
    planned: PlannedWorkflow,
    *,
    on_stored: Callable[[WorkflowRecord], None] | None = None,
    on_fetch: OnFetch | None = None,
) -> WorkflowRecord:
    """Store a planned workflow, and make sure that a supervisor is running.

    Args:
        client: The client that planned the workflow.
        planned: The result of ``plan``.
        on_stored: Called with the record before this function waits for the supervisor, which may take a moment.
        on_fetch: Called with the progress of outputs that are fetched from ended workflows.

    Returns:
        The record of the workflow, with its id.

    Raises:
        InputError: if an output of another workflow does not exist, if that workflow has not ended, or if a secret contains a
            NUL byte.
        NodeError: if an output of another workflow cannot be fetched.
        StateError: if an output cannot be stored on this machine, such as on a full disk.
        StorageRefused: if this user has no credentials for an S3 URL in the spec.
        SupervisorError: if the supervisor does not start. The workflow is stored nevertheless, except if the supervisor of an
            older version of distflow is running and cannot be stopped.

    """
    completed = add_previous_outputs(client, planned.checked.spec, planned.plan, on_fetch or _ignore)
    return store_workflow(client, replace(planned, plan=completed), on_stored=on_stored)


def _ignore(*_: object) -> None:
    """Discard progress."""


def store_workflow(
    client: Client,
    planned: PlannedWorkflow,
    *,
    kept: Mapping[str, GroupRecord] = MappingProxyType({}),
    parent: str | None = None,
    on_stored: Callable[[WorkflowRecord], None] | None = None,
) -> WorkflowRecord:
    """Store a workflow and its secrets, start or notify the supervisor, and return the record with its id.

    Args:
        client: The client whose store gets the workflow.
        planned: The planned workflow.
        kept: The records of completed groups, by name, if this is a restart.
        parent: The id of the workflow that is restarted.
        on_stored: Called with the record before this function waits for the supervisor.

    Raises:
        InputError: if a secret contains a NUL byte.
        StorageRefused: if this user has no credentials for an S3 URL in the spec.
        SupervisorError: if the supervisor does not start. The workflow is stored nevertheless, except if the supervisor of an
            older version of distflow is running and cannot be stopped.

    """
    client.stop_outdated_supervisor()
    record = _insert(client, planned, kept, parent)
    try:
        if on_stored is not None:
            on_stored(record)
    finally:
        # Start the stored workflow even if printing its id fails.
        client.ensure_supervisor()
    return record


def _insert(client: Client, planned: PlannedWorkflow, kept: Mapping[str, GroupRecord], parent: str | None) -> WorkflowRecord:
    _check_credentials(client, planned, kept)
    directory, now, spec = client.directory, time.time(), planned.checked.spec  # noqa: TID251  the moment of submission
    record = WorkflowRecord(
        uuid=uuid.uuid4().hex,
        id="",
        name=spec.name,
        number=0,
        user=user_name(),
        pool=planned.pool.name,
        pool_key=pool_key(planned.pool),
        submitted_at=now,
        groups=tuple(
            kept.get(group.name)
            or GroupRecord(
                name=group.name,
                upstream=group.upstream,
                tasks=fresh_tasks(group),
            )
            for group in planned.plan.groups
        ),
        warnings=tuple(problem.message for problem in planned.checked.warnings),
        priority=planned.priority,
        labels=planned.labels,
        parent=parent,
    )
    details = WorkflowSubmitted(user=record.user, pool=record.pool, parent=parent, kept=tuple(kept))
    event = EventRecord(at=now, details=details, workflow=record.uuid)
    secrets = gather_secrets(planned.plan, planned.pool, directory, planned.overrides.secrets)
    write_secrets(directory.secrets, record.uuid, secrets)
    try:
        return client.store.submit(
            record,
            template=planned.checked.template,
            spec=spec.rendered,
            plan=planned.plan,
            pool=planned.pool,
            folder=str(planned.checked.folder),
            notify=planned.notify,
            events=[event],
        )
    except BaseException:
        remove_secrets(directory.secrets, record.uuid)
        raise


def write_scripts(planned: PlannedWorkflow, folder: Path) -> list[Path]:
    """Write a shell script for each task of a plan, and the files that the tasks need.

    Args:
        planned: The planned workflow.
        folder: The directory to write to. It is created if needed.

    Returns:
        The paths of the scripts.

    Raises:
        OSError: if a file cannot be written.

    """
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    written = []
    for group in planned.plan.groups:
        for launch in group.launches:
            path = folder / f"{launch.task}.sh"
            path.write_text(script(group, launch), encoding="utf-8")
            path.chmod(0o700)
            for file in launch.files:
                if file.blob is not None:
                    (folder / "blobs" / file.blob).write_bytes((planned.blobs / file.blob).read_bytes())
            written.append(path)
    return written


def pool_key(pool: Pool) -> str:
    """Return a key that is equal for pools with the same name, nodes and settings."""
    return f"{pool.name}-{hashlib.sha256(encode(pool)).hexdigest()[:8]}"


def _check_drivers(client: Client, compiled: Plan) -> None:
    """Raise ``InputError`` if this machine does not have a driver for data at URLs of the plan."""
    credentials = client.credentials_for()
    for group in compiled.groups:
        for launch in group.launches:
            urls = [data.url for data in (*launch.url_inputs, *launch.url_outputs)]
            for url in map(parse_url, (*urls, *(one.url for one in launch.checkpoints if not one.is_shared))):
                package = package_of(url, credentials(url.profile))
                if package and importlib.util.find_spec(package) is None:
                    message = f"`{launch.task}`: {url} needs the driver {package}, which is not installed"
                    raise InputError(message, hint=NO_DRIVER)


def _check_credentials(client: Client, planned: PlannedWorkflow, kept: Mapping[str, GroupRecord]) -> None:
    launches = [launch for group in planned.plan.groups if group.name not in kept for launch in group.launches]
    urls = {data.url for launch in launches for data in (*launch.url_inputs, *launch.url_outputs)}
    urls |= {one.url for launch in launches for one in launch.checkpoints if not one.is_shared}
    if not urls:
        return
    from distflow.storage.stores import check_credentials

    for url in sorted(urls):
        check_credentials(parse_url(url), client.credentials_for())


class PlannedRestart(Struct, frozen=True, kw_only=True):
    """A checked and planned restart, as ``restart`` needs it."""

    previous: PreviousWorkflow
    planned: PlannedWorkflow


def plan_restart(
    client: Client, workflow: str, overrides: Overrides, *, pool: str | None = None, on_pack: OnPack | None = None
) -> PlannedRestart:
    """Check that a workflow can be restarted and plan the restart, without storing or starting anything.

    Args:
        client: The client whose store has the workflow.
        workflow: The id or uuid of the workflow.
        overrides: The secrets of the workflow, which must be given again because their values are not kept for a restart.
        pool: The name of the pool to run in. Default: the pool of the workflow.
        on_pack: Called with the number of bytes that were read, and the total number that is known so far.

    Returns:
        The planned restart, for ``restart``.

    Raises:
        InputError: if ``workflow`` is not an id or uuid, or if the workflow has not ended, has completed, or needs a secret
            that is not given. Also if a package for data at URLs or for the backend of the pool is not installed, or if this
            operating system cannot run tasks and the pool is this machine.
        NotFound: if the workflow or the pool does not exist.
        ProblemsFound: if the spec is no longer valid, for example because a file is gone, or if the pool cannot hold a group.
            Also if a target of notifications is not valid.

    """
    configuration, directory = client.configuration(), client.writable_directory()
    previous = find_previous(client, workflow, overrides, may_be_file=False)
    if previous is None:
        raise InputError(
            f"`{workflow}` is not the id of a workflow",
            hint="`distflow workflow list` shows the newest ones, and `--count` more",
        )
    record = previous.record
    if not record.state.is_final:
        hint = f"wait until it has ended, or cancel it: distflow workflow cancel {record.id}"
        raise InputError(f"{record.id} cannot be restarted, because it has not ended: {record.status}", hint=hint)
    if record.state is WorkflowState.COMPLETED:
        hint = f"to run the whole workflow again: distflow workflow submit {record.id}"
        raise InputError(f"{record.id} completed, so there is nothing to restart", hint=hint)
    notify = own_targets(client, configuration)
    raise_errors(target_problems(client, notify, is_quick=True))
    chosen, datasets = previous.choose_pool(configuration, pool, None), client.datasets_url(configuration)
    require_supported(chosen)
    planned = plan_checked(previous.checked, chosen, overrides, directory.blobs, datasets, on_pack)
    _check_drivers(client, planned.plan)
    notify = (*notify, *previous.checked.spec.notify)
    planned = replace(planned, labels=record.labels, priority=record.priority, notify=notify)
    return PlannedRestart(previous=previous, planned=planned)


def restart(
    client: Client,
    wanted: PlannedRestart,
    *,
    on_stored: Callable[[WorkflowRecord], None] | None = None,
    on_fetch: OnFetch | None = None,
) -> WorkflowRecord:
    """Store a planned restart as a new workflow, and make sure that a supervisor is running.

    Completed groups are kept and do not run again. Their outputs are fetched from the nodes if another group needs them.

    Args:
        client: The client that planned the restart.
        wanted: The result of ``plan_restart``.
        on_stored: Called with the record before this function waits for the supervisor.
        on_fetch: Called with the progress of fetched outputs.

    Returns:
        The record of the new workflow, with its id.

    Raises:
        InputError: if a needed output does not exist, if its workflow has not ended, or if a secret contains a NUL byte.
        NodeError: if a needed output cannot be fetched.
        StateError: if an output cannot be stored on this machine, such as on a full disk.
        StorageRefused: if this user has no credentials for an S3 URL in the spec.
        SupervisorError: if the supervisor does not start. The workflow is stored nevertheless, except if the supervisor of an
            older version of distflow is running and cannot be stopped.

    """
    on_fetch = on_fetch or _ignore
    kept = _kept_groups(client, wanted.previous.record, wanted.planned.plan, on_fetch)
    completed = add_previous_outputs(client, wanted.planned.checked.spec, wanted.planned.plan, on_fetch)
    planned = replace(wanted.planned, plan=completed)
    return store_workflow(client, planned, kept=kept, parent=wanted.previous.record.id, on_stored=on_stored)


def _kept_groups(client: Client, record: WorkflowRecord, plan: Plan, on_fetch: OnFetch) -> Mapping[str, GroupRecord]:
    """Return the records of completed groups for the new workflow, after fetching their outputs that other groups need."""
    done = {group.name: group for group in record.groups if group.state is State.COMPLETED}
    wanted = {one.task for group in plan.groups if group.name not in done for launch in group.launches for one in launch.inputs}
    tasks = [(group, task) for group in done.values() for task in group.tasks if task.name in wanted]
    sources = [output_source(client, record, group, task) for group, task in tasks]
    fetched = fetch_outputs(sources, client.directory.blobs, on_fetch)
    at = now()
    saved = {task.name: Saved(at=at, digest=one.digest, size=one.size) for (_, task), one in zip(tasks, fetched, strict=True)}
    return {name: _kept_group(record, group, saved, at) for name, group in done.items()}


def _kept_group(record: WorkflowRecord, group: GroupRecord, saved: Mapping[str, Saved], at: float) -> GroupRecord:
    kept = group.kept or Kept(uuid=record.uuid, id=record.id)
    tasks: Sequence[TaskRecord] = [
        TaskRecord(
            name=task.name, lead=task.lead, attempt=task.attempt, state=task.state, ranks=task.ranks, node=task.node,
            outputs=task.outputs, output_dir=task.output_dir, has_files=task.has_files,
            saved=saved.get(task.name), log_complete=True,
        )
        for task in group.tasks
    ]  # fmt: skip
    message = f"kept from {kept.id}"
    return GroupRecord(
        name=group.name, upstream=group.upstream, state=State.COMPLETED, message=message, kept=kept, ended_at=at,
        attempt=group.attempt, tasks=tuple(tasks),
    )  # fmt: skip


def join_labels(labels: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Merge the labels of a spec with given labels, which take precedence. Raises ``InputError`` if there are too many."""
    joined = {**labels, **given}
    if len(joined) > MOST_LABELS:
        raise InputError(f"a workflow can have at most {MOST_LABELS} labels, not {len(joined)}")
    return joined
