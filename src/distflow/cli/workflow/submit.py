"""``distflow workflow submit`` and ``validate``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer

from distflow.cli.context import open_client
from distflow.cli.options import Format, FormatOption, HostfileOption, command_app
from distflow.cli.render.submission import FetchLine, print_submitted, wait_for_end, warn
from distflow.cli.render.tables import Paint
from distflow.cli.search_options import priorities
from distflow.client.submitting.labels import check_label, join_labels
from distflow.client.submitting.specs import CheckedSpec, Overrides, validate
from distflow.client.submitting.submission import PlannedWorkflow, SubmitRequest, plan, submit, write_scripts
from distflow.documents.problems import Problem, ProblemsFound
from distflow.documents.text import plain_lines
from distflow.errors import InputError, NodeError
from distflow.lifecycle.states import waits_for
from distflow.plan.render import plan_json, plan_text
from distflow.pools.model import Pool
from distflow.shell import Secret

__all__ = [
    "check_nodes",
    "parse_overrides",
    "submit_app",
    "validate_app",
]

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
    "submit",
    epilog="Examples: distflow workflow submit workflow_specs/pytorch_dist.yaml --set epochs=3 --wait"
    "  ·  distflow workflow submit train.yaml --dry-run",
)
def submit_workflow(
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
    labels = _parse_labels(label or [])
    overrides = parse_overrides(sets or [], set_string or [], set_env or [])
    copied = _rsync_paths(rsync) if rsync is not None else None
    with open_client() as client:
        configuration, hosts = client.configuration(), client.hosts(hostfile)
        is_dry = dry_run or scripts is not None
        if not is_dry:
            client.load_supervisor(["ssh"] if hosts is not None else [one.backend for one in configuration.pools.values()])
        request = SubmitRequest(
            spec=file, text=_stdin(file), overrides=overrides, pool=pool, hosts=hosts, labels=labels, priority=urgency
        )
        if is_dry:
            with tempfile.TemporaryDirectory() as blobs:
                _dry_run(plan(client, request, blobs=Path(blobs), configuration=configuration), scripts, format_type)
            return
        planned = plan(client, request, configuration=configuration)
        warn(planned.checked.warnings)
        if preflight:
            check_nodes(planned.pool, set(planned.placement.values()))
        is_quiet = wait and format_type is Format.JSON
        with FetchLine(sys.stderr) as line:
            record = submit(
                client,
                planned,
                on_stored=None if is_quiet else lambda stored: print_submitted(stored, format_type),
                on_fetch=line.show,
            )
        if copied is not None:
            from distflow.cli.workflow.rsync import copy_to_first_lead

            copy_to_first_lead(client, record, *copied)
        if wait:
            wait_for_end(client, record, format_type)


@validate_app.command("validate", epilog="Example: distflow workflow validate workflow_specs/pytorch_dist.yaml --set gpus=8")
def validate_specs(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Specs; each is checked by itself.")],
    sets: SetOption = None,
    set_string: SetStringOption = None,
    pool: PoolOption = None,
    label: LabelOption = None,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Check specs, above all their rank layout. Works offline, reaches no node and starts nothing."""
    overrides, labels = parse_overrides(sets or [], set_string or [], []), _parse_labels(label or [])
    results: list[dict[str, object]] = []
    problems: list[Problem] = []
    with open_client() as client:
        configuration, hosts = client.configuration(), client.hosts(hostfile)
        for file in files:
            try:
                checked, warnings = validate(client, file, overrides, configuration, pool=pool, hosts=hosts, text=_stdin(file))
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


def parse_overrides(sets: Sequence[str], set_strings: Sequence[str], set_env: Sequence[str]) -> Overrides:
    """Parse the values of ``--set``, ``--set-string`` and ``--set-env``.

    Raises:
        InputError: if a value has no ``=``. The message never contains the value of a secret.

    """
    secrets: dict[str, Secret] = {}
    for position, item in enumerate(set_env, 1):
        name, equals, value = item.partition("=")
        if not equals and item in os.environ:
            value = os.environ[item]
        elif not equals or not name:
            hint = "NAME alone takes the value from this command's own environment, where there is no variable of that name"
            raise InputError(f"--set-env number {position} is not of the form NAME=VALUE", hint=hint)
        secrets[name] = Secret(value)
    return Overrides(
        sets=tuple(_pair("--set", item) for item in sets),
        set_strings=tuple(_pair("--set-string", item) for item in set_strings),
        secrets=secrets,
    )


def _pair(flag: str, item: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals or not name:
        raise InputError(f"{flag} {item!r} is not of the form NAME=VALUE")
    return name, value


def _parse_labels(items: Sequence[str]) -> dict[str, str]:
    """Return the labels of ``--label``. Raises ``InputError`` if one is not valid."""
    labels = dict(_pair("--label", item) for item in items)
    for key, value in labels.items():
        try:
            check_label(key, value)
        except ValueError as error:
            raise InputError(f"--label {key}={value}: {error}") from None
    return labels


def _stdin(file: str) -> str | None:
    return sys.stdin.read() if file == "-" else None


def _rsync_paths(pair: str) -> tuple[str, str]:
    """Return the local and the remote path of ``--rsync``. Raises ``InputError``, also if rsync is not installed."""
    from distflow.cli.workflow.rsync import split_local
    from distflow.client.rsync.copies import check_rsync_here

    check_rsync_here()
    return split_local(pair)


def _valid_text(file: str, checked: CheckedSpec) -> str:
    groups = len(checked.spec.groups)
    tasks = sum(len(group.tasks) for group in checked.spec.groups)
    lines = [f"{file}: valid: {groups} group{'s' * (groups != 1)}, {tasks} task{'s' * (tasks != 1)}"]
    lines += [f"  {group.name} {waits_for(group.upstream)}" for group in checked.spec.groups if group.upstream]
    for name, picture in checked.pictures.items():
        lines += ["", f"  {name}", *("  " + line for line in picture.splitlines()), ""]
    return "\n".join(lines) + "\n"


def _dry_run(planned: PlannedWorkflow, scripts: Path | None, format_type: Format) -> None:
    warn(planned.checked.warnings)
    if scripts is not None:
        try:
            for path in write_scripts(planned, scripts):
                print(f"wrote {path}", file=sys.stderr)
        except OSError as error:
            raise InputError(f"--scripts: {error.filename or scripts}: {error.strerror}") from error
    if format_type is Format.JSON:
        print(json.dumps(plan_json(planned.plan, planned.placement), indent=2))
    else:
        print(plain_lines(plan_text(planned.plan, planned.placement, planned.checked.pictures)), end="")


def check_nodes(pool: Pool, names: Collection[str]) -> None:
    """Check nodes as ``pool check`` does, and print the findings to standard error.

    Raises ``typer.Exit`` with the exit code of ``NodeError`` if a gang cannot run on these nodes.
    """
    from distflow.cli.render.pool_check import findings_text
    from distflow.cli.render.terminal_line import BottomLine
    from distflow.client.pools import check_pool_nodes

    bottom = BottomLine(sys.stderr)
    try:
        found = check_pool_nodes(pool, names, on_progress=lambda text: bottom.show(f"checking: {text} …")).verdict
    finally:
        bottom.clear()
    paint = Paint.of(sys.stderr)
    for line in findings_text(found, paint):
        print(line, file=sys.stderr)
    if not found.can_run:
        print(
            f"{paint.bad(found.text)}\nnothing was started; all of it: distflow pool check --pool {pool.name}", file=sys.stderr
        )
        raise typer.Exit(NodeError.exit_code)
