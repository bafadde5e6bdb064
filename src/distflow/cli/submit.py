"""``distflow workflow submit`` and ``validate``."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from distflow.cli import wiring
from distflow.cli.again import earlier
from distflow.cli.command import Format, FormatOption, HostfileOption, command_app
from distflow.cli.earlier import bring_earlier
from distflow.cli.searching import priorities
from distflow.cli.starting import print_submitted, store_workflow, wait_for_end, warn
from distflow.cli.submission import (
    Checked,
    Overrides,
    Ready,
    check,
    join_labels,
    parse_labels,
    parse_overrides,
    plan_for,
    propose,
)
from distflow.cli.tables import plain_lines
from distflow.documents.problems import Problem, ProblemsFound, Severity, in_document_order
from distflow.errors import InputError
from distflow.lifecycle.upstream import waits_for
from distflow.plan.compile import compile_plan
from distflow.plan.containers import container_notices
from distflow.plan.render import plan_json, plan_text, script
from distflow.plan.sharing import sharing_notices
from distflow.pools.choose import choose_pool
from distflow.pools.hostfile import Host
from distflow.pools.model import Configuration
from distflow.spec.bundles import bundle_files
from distflow.state.record import Priority
from distflow.supervisor.process import ensure_supervisor, hold_supervisor

__all__ = ["submit_app", "validate_app"]

submit_app = command_app()
validate_app = command_app()

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set a template variable; the value is read as YAML (3, true, text)."),
]
SetStringOption = Annotated[
    list[str] | None, typer.Option("--set-string", metavar="NAME=VALUE", help="Set a template variable to a text.")
]
PoolOption = Annotated[str | None, typer.Option("--pool", "-p", help="Run in this pool, whatever the spec says.")]
FileArgument = Annotated[
    str,
    typer.Argument(metavar="FILE|ID", help="The spec, a YAML file; - for standard input; or the id of a workflow: its spec."),
]
LabelOption = Annotated[
    list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Add a label, to find it by; may be repeated.")
]


@submit_app.command(
    epilog="Examples: distflow workflow submit workflow_specs/pytorch_dist.yaml --set epochs=3 --wait"
    "  ·  distflow workflow submit train.yaml --dry-run"
)
def submit(
    file: FileArgument,
    sets: SetOption = None,
    set_string: SetStringOption = None,
    set_env: Annotated[
        list[str] | None,
        typer.Option(
            "--set-env",
            metavar="NAME[=VALUE]",
            help="Set a variable in every task; its value is kept secret. NAME alone: the value that it has here.",
        ),
    ] = None,
    pool: PoolOption = None,
    hostfile: HostfileOption = None,
    priority: Annotated[
        str | None,
        typer.Option(
            "--priority", metavar="HIGH|NORMAL|LOW", help="When it gets its turn in the queue; NORMAL when not given."
        ),
    ] = None,
    label: LabelOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan, start nothing.")] = False,
    scripts: Annotated[
        Path | None,
        typer.Option("--scripts", metavar="DIR", help="With --dry-run: write one shell script per task there."),
    ] = None,
    preflight: Annotated[
        bool,
        typer.Option("--preflight", help="First check the nodes, as `distflow pool check` does; start nothing on bad ones."),
    ] = False,
    rsync: Annotated[
        str | None,
        typer.Option(
            "--rsync",
            metavar="LOCAL:REMOTE",
            help="Copy LOCAL to the lead of the first group while it runs, as `workflow rsync upload --daemon` does.",
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Follow the logs and end as the workflow ends.")] = False,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Check a spec, place it and run it. Prints the workflow's id.

    Everything about its ranks, files and resources is checked before anything starts. The workflow runs on when this
    terminal closes. The id of a workflow submits its spec again, with its labels and its priority.
    """
    urgency = priorities([priority])[0] if priority is not None else None
    given_labels = parse_labels(label or [])
    overrides = parse_overrides(sets or [], set_string or [], set_env or [])
    copied = _rsync_paths(rsync) if rsync is not None else None
    configuration, hosts = wiring.configuration(), wiring.hosts(hostfile)
    datasets = wiring.datasets_url(configuration)
    is_dry = dry_run or scripts is not None
    # It loads its modules while the spec is checked here; should that fail, it ends with this process.
    backends = ["ssh"] if hosts is not None else [one.backend for one in configuration.pools.values()]
    held = None if is_dry else hold_supervisor(wiring.state_directory(), backends)
    before = earlier(file, overrides)
    if before is not None:
        checked, chosen = before.checked, before.pool(configuration, pool, hosts)
    else:
        checked = check(file, overrides)
        chosen = choose_pool(configuration, given=pool, wanted=checked.spec.pool, hosts=hosts)
    labels = join_labels(before.record.labels if before else checked.spec.labels, given_labels)
    urgency = urgency or (before.record.priority if before else Priority.NORMAL)
    if is_dry:
        with tempfile.TemporaryDirectory() as blobs:
            _dry_run(plan_for(checked, chosen, overrides, Path(blobs), datasets), scripts, format_type, Path(blobs))
        return
    directory = wiring.state_directory()
    ready = plan_for(checked, chosen, overrides, directory.blobs, datasets)
    warn(ready.checked.warnings)
    if preflight:
        from distflow.cli.preflight import check_nodes

        check_nodes(ready.pool, set(ready.placement.values()))
    with wiring.open_store(directory) as store:
        ready = replace(ready, plan=bring_earlier(ready.checked.spec, ready.plan, store, directory.blobs))
        record = store_workflow(ready, overrides, urgency, labels, directory, store)
        try:
            if not (wait and format_type is Format.JSON):
                print_submitted(record, format_type)
        finally:
            # It is stored, whether or not somebody reads its id.
            ensure_supervisor(directory, held=held)
        if copied is not None:
            from distflow.cli.rsync import rsync_beside

            rsync_beside(directory, record, *copied)
        if wait:
            wait_for_end(directory, store, record, format_type)


@validate_app.command(epilog="Example: distflow workflow validate workflow_specs/pytorch_dist.yaml --set gpus=8")
def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Specs; each is checked by itself.")],
    sets: SetOption = None,
    set_string: SetStringOption = None,
    pool: PoolOption = None,
    label: LabelOption = None,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Check specs, above all their rank layout. Works offline, reaches no node and starts nothing."""
    overrides, labels = parse_overrides(sets or [], set_string or [], []), parse_labels(label or [])
    configuration, hosts = wiring.configuration(), wiring.hosts(hostfile)
    results: list[dict[str, object]] = []
    problems: list[Problem] = []
    for file in files:
        try:
            checked, warnings = _validate_one(file, overrides, configuration, pool, hosts)
            join_labels(checked.spec.labels, labels)
        except ProblemsFound as error:
            problems += error.problems
            continue
        if format_type is Format.TEXT:
            warn(warnings)
            print(_valid_text(file, checked), end="")
        results.append({"file": file, "valid": True, "warnings": [problem.as_json() for problem in warnings]})
    if problems:
        raise ProblemsFound(problems)
    if format_type is Format.JSON:
        print(json.dumps({"specs": results}, indent=2))


def _rsync_paths(pair: str) -> tuple[str, str]:
    """Return what is to be copied where. Raises ``InputError``, also when there is no rsync here."""
    from distflow.cli.rsync import split_local
    from distflow.cli.rsyncing import program

    program()
    return split_local(pair)


def _validate_one(
    file: str, overrides: Overrides, configuration: Configuration, pool: str | None, hosts: Sequence[Host] | None
) -> tuple[Checked, list[Problem]]:
    """Check one spec and return it with its warnings. Raises ``ProblemsFound``."""
    checked = check(file, overrides, is_tolerant=True)
    chosen = choose_pool(configuration, given=pool, wanted=checked.spec.pool, hosts=hosts)
    with tempfile.TemporaryDirectory() as blobs:
        bundles, problems = bundle_files(checked.spec, Path(blobs))
    if problems:
        raise ProblemsFound([*problems, *checked.warnings])
    plan = compile_plan(checked.spec, checked.worlds, pool=chosen.name, bundles=bundles)
    # Whether it fits here is no fault of the spec: it may be meant for other machines.
    placement, misfits = propose(plan, chosen, checked.spec, Severity.WARNING)
    notices = container_notices(checked.spec, chosen.nodes) + sharing_notices(checked.spec, bundles, placement, chosen.nodes)
    return checked, [*in_document_order([*checked.warnings, *notices]), *misfits]


def _valid_text(file: str, checked: Checked) -> str:
    groups = len(checked.spec.groups)
    tasks = sum(len(group.tasks) for group in checked.spec.groups)
    lines = [f"{file}: valid: {groups} group{'s' * (groups != 1)}, {tasks} task{'s' * (tasks != 1)}"]
    lines += [f"  {group.name} {waits_for(group.upstream)}" for group in checked.spec.groups if group.upstream]
    for name, picture in checked.pictures.items():
        lines += ["", f"  {name}", *("  " + line for line in picture.splitlines()), ""]
    return "\n".join(lines) + "\n"


def _dry_run(ready: Ready, scripts: Path | None, format_type: Format, blobs: Path) -> None:
    warn(ready.checked.warnings)
    if scripts is not None:
        try:
            _write_scripts(ready, scripts, blobs)
        except OSError as error:
            raise InputError(f"--scripts: {error.filename or scripts}: {error.strerror}") from error
    if format_type is Format.JSON:
        print(json.dumps(plan_json(ready.plan, ready.placement), indent=2))
    else:
        print(plain_lines(plan_text(ready.plan, ready.placement, ready.checked.pictures)), end="")


def _write_scripts(ready: Ready, folder: Path, blobs: Path) -> None:
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    for group in ready.plan.groups:
        for launch in group.launches:
            path = folder / f"{launch.task}.sh"
            path.write_text(script(group, launch), encoding="utf-8")
            path.chmod(0o700)
            for file in launch.files:
                if file.blob is not None:
                    (folder / "blobs" / file.blob).write_bytes((blobs / file.blob).read_bytes())
            print(f"wrote {path}", file=sys.stderr)
