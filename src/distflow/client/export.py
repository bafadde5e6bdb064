"""Export a spec to other systems: as a script for Slurm, as manifests for Kubernetes, or as a spec for OSMO."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from msgspec import Struct

from distflow.client.client import Client
from distflow.client.notifications.targets import own_targets
from distflow.client.spec_drafts.initial_specs import write_file
from distflow.client.specs import CheckedSpec, check_spec, find_previous, unknown_platforms
from distflow.client.submission import SubmitRequest, with_environment
from distflow.documents.problems import Mark, Problem, ProblemsFound, Severity, in_document_order
from distflow.errors import InputError
from distflow.plan.compile import compile_plan
from distflow.plan.kubernetes_manifests import Kind, kubernetes_manifests
from distflow.plan.model import Plan
from distflow.plan.osmo_spec import osmo_spec
from distflow.plan.slurm_script import slurm_script
from distflow.pools.hostfile import choose_pool
from distflow.pools.model import Pool, ssh_node
from distflow.spec.files import bundle_files
from distflow.state.record import Priority
from distflow.structs import replace

__all__ = ["Exported", "Kind", "export_to_kubernetes", "export_to_osmo", "export_to_slurm"]


class Exported(Struct, frozen=True, kw_only=True):
    """A spec in the format of another system."""

    text: str
    warnings: tuple[Problem, ...]
    """Warnings about the spec, and about its parts that the other system does not support."""
    files: tuple[Path, ...] = ()
    """The files that were written."""


def export_to_slurm(client: Client, request: SubmitRequest, *, file: Path | None = None, force: bool = False) -> Exported:
    """Write a spec as a script for Slurm that needs no distflow on the cluster.

    Args:
        client: The client whose configuration, credentials and workflows the spec may use.
        request: The spec, the values for its template, and the settings of the nodes. If it names a pool,
            the pool must have ``backend: slurm``. The pool contains the options of jobs. Default: the pool of the spec or the
            default pool, if it has this backend. Otherwise the script has no options of a pool.
        file: The file to write. Files of the spec that are too large for a script are written to the directory ``FILE.files``.
            Default: no file is written, and such files are an error.
        force: Whether to replace an existing file.

    Raises:
        InputError: if the pool is not a Slurm pool, a file cannot be written, or the spec cannot become a script.
        NotFound: if the pool or the workflow to export does not exist.
        ProblemsFound: if the spec has errors. The error contains all findings.

    """
    checked, _ = _checked(client, request)
    pool = _slurm_pool(client, request, checked)
    checked = with_environment(checked, pool.given.environment)
    with tempfile.TemporaryDirectory() as folder:
        blobs = Path(folder)
        plan, contents = _planned(client, request, checked, pool, blobs)
        name = file.name if file is not None else f"{plan.name}.{'sh' if len(plan.groups) > 1 else 'sbatch'}"
        script = slurm_script(plan, checked.spec, pool, contents, name=name, files_next_to_it=file is not None)
        written: list[Path] = []
        if file is not None:
            large = {file.with_name(f"{file.name}.files") / one: blobs / digest for one, digest in script.files.items()}
            written = _write(file, script.text, large, force=force)
    return Exported(text=script.text, warnings=(*in_document_order(checked.warnings), *script.warnings), files=tuple(written))


def export_to_kubernetes(
    client: Client, request: SubmitRequest, *, kind: Kind = "jobset", file: Path | None = None, force: bool = False
) -> Exported:
    """Write a spec as manifests for Kubernetes that need no distflow in the cluster.

    Args:
        client: The client whose configuration, credentials and workflows the spec may use.
        request: The spec, the values for its template, and the settings of the nodes. If it names a pool, the pool must have
            ``backend: kubernetes``. The pool contains the settings of pods. Default: the pool of the spec or the default pool,
            if it has this backend. Otherwise the manifests have no settings of a pool.
        kind: ``jobset``, ``job`` for plain Indexed Jobs, or ``trainjob`` for a TrainJob of Kubeflow Trainer.
        file: The file to write. Default: no file is written.
        force: Whether to replace an existing file.

    Raises:
        InputError: if the pool is not a Kubernetes pool, the file cannot be written, a task has no image, the files of a task
            are too large for a ConfigMap, or a TrainJob does not support a setting of the pool.
        NotFound: if the pool or the workflow to export does not exist.
        ProblemsFound: if the spec has errors, or manifests cannot express it.

    """
    checked, priority = _checked(client, request)
    configuration = client.configuration()
    wanted = checked.spec.pool if checked.spec.pool in configuration.pools else None
    pool = choose_pool(configuration, given=request.pool, wanted=wanted)
    if pool.kubernetes is None:
        if request.pool is not None:
            hint = "name a pool with `backend: kubernetes`, or omit --pool"
            raise InputError(f"the pool `{pool.name}` has `backend: {pool.backend}`, not `kubernetes`", hint=hint)
        pool = Pool(name="kubernetes", backend="kubernetes", nodes=(), template=ssh_node())
    pool = pool.with_settings(request.settings)
    checked = with_environment(checked, pool.given.environment)
    with tempfile.TemporaryDirectory() as folder:
        plan, contents = _planned(client, request, checked, pool, Path(folder))
    text = kubernetes_manifests(plan, checked.spec, pool, contents, kind=kind, priority=priority.value)
    hint = "add a `nodeSelector` to the manifests, or use a pool whose `platforms` has the platform"
    message = "the manifests do not select the platform `{}`, because the pool does not define it"
    left_out = [
        Problem(where=mark, severity=Severity.WARNING, message=message.format(name), hint=hint)
        for name, mark in unknown_platforms(pool, checked.spec).items()
    ]
    written = [] if file is None else _write(file, text, {}, force=force)
    return Exported(text=text, warnings=tuple(in_document_order([*checked.warnings, *left_out])), files=tuple(written))


def export_to_osmo(client: Client, request: SubmitRequest, *, file: Path | None = None, force: bool = False) -> Exported:
    """Write a spec for OSMO, without the keys that only distflow supports.

    If a few edits suffice (see ``plan.osmo_spec``), the file keeps its comments and order. If ``request`` sets no template
    variables, it also keeps its template.

    Args:
        client: The client whose credentials and workflows the spec may use.
        request: The spec and the values for its template. Its pool and the settings of nodes have no effect.
        file: The file to write. Default: no file is written.
        force: Whether to replace an existing file.

    Raises:
        InputError: if the file cannot be written, or if the request has template variables for a stored workflow or lacks its
            secrets.
        NotFound: if the workflow to export does not exist.
        ProblemsFound: if the spec has errors. The error contains all findings.

    """
    checked, _ = _checked(client, request)
    is_template = not (request.overrides.sets or request.overrides.set_strings)
    exported = osmo_spec(checked.spec, checked.worlds, checked.template if is_template else None)
    if request.overrides.secrets:
        message = "the exported spec does not contain the secrets of `--set-env`"
        hint = "pass them to `osmo workflow submit --set-env`"
        secret = Problem(where=Mark(checked.spec.file), severity=Severity.WARNING, message=message, hint=hint)
        exported = replace(exported, warnings=(*exported.warnings, secret))
    written = [] if file is None else _write(file, exported.text, {}, force=force)
    return Exported(
        text=exported.text, warnings=(*in_document_order(checked.warnings), *exported.warnings), files=tuple(written)
    )


def _checked(client: Client, request: SubmitRequest) -> tuple[CheckedSpec, Priority]:
    """Return the spec of a request, which is a file, a text or the id of a workflow, and its priority.

    Raises ``InputError``, ``NotFound`` and ``ProblemsFound``.
    """
    previous = find_previous(client, request.spec, request.overrides) if request.text is None else None
    if previous is not None:
        return previous.checked, request.priority or previous.record.priority
    notify = own_targets(client, client.configuration())
    checked = check_spec(client, request.spec, request.overrides, text=request.text, is_tolerant=True, notify=notify)
    return checked, request.priority or Priority.NORMAL


def _planned(
    client: Client, request: SubmitRequest, checked: CheckedSpec, pool: Pool, blobs: Path
) -> tuple[Plan, dict[str, bytes]]:
    """Return the plan of a spec, and the content of each of its files by digest. Also write the files to ``blobs``."""
    bundles, problems = bundle_files(checked.spec, blobs)
    if problems:
        raise ProblemsFound([*problems, *checked.warnings])
    plan = compile_plan(
        checked.spec, checked.worlds, pool=pool.name, bundles=bundles, secret_names=tuple(request.overrides.secrets),
        datasets=client.datasets_url(client.configuration()), venv=pool.given.venv or checked.spec.venv or pool.venv,
    )  # fmt: skip
    return plan, {digest: (blobs / digest).read_bytes() for digest in plan.blobs}


def _slurm_pool(client: Client, request: SubmitRequest, checked: CheckedSpec) -> Pool:
    """Return the pool of the request, or else that of the spec, or else the default pool.

    If its backend is not Slurm, raise ``InputError`` if the request names it. Otherwise return a pool without options of jobs.
    """
    configuration = client.configuration()
    wanted = checked.spec.pool if checked.spec.pool in configuration.pools else None
    pool = choose_pool(configuration, given=request.pool, wanted=wanted)
    if pool.slurm is None:
        if request.pool is not None:
            hint = "name a pool with `backend: slurm`, or omit --pool and add `#SBATCH` lines to the script"
            raise InputError(f"the pool `{pool.name}` has `backend: {pool.backend}`, not `slurm`", hint=hint)
        pool = Pool(name="slurm", backend="slurm", nodes=(), template=ssh_node())
    return pool.with_settings(request.settings)


def _write(file: Path, text: str, large: dict[Path, Path], *, force: bool) -> list[Path]:
    """Write the exported text and copy large files next to it. Raises ``InputError``."""
    if not force and (taken := next((path for path in (file, *large) if os.path.exists(path)), None)):
        raise InputError(f"`{taken}` exists already", hint="choose another name, or add --force to replace it")
    write_file(file, text, force=force)
    try:
        for path, source in large.items():
            path.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, path)
    except FileExistsError as error:
        what = f"large files of the script cannot be written to `{error.filename}`, which is not a directory"
        raise InputError(what, hint="choose another path for the script") from None
    except OSError as error:
        hint = "free some space, make its directory writable, or choose another path"
        raise InputError(f"{path} cannot be written: {error.strerror}", hint=hint) from error
    return [file, *large]
