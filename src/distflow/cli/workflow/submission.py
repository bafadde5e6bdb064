"""Steps of ``submit``, ``validate``, ``restart``, ``run`` and ``export``: parse options, print plans and follow workflows."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

import typer

from distflow.cli.options import Format, pool_check_command
from distflow.cli.render.tables import Paint
from distflow.cli.render.terminal import BottomLine
from distflow.client.client import Client
from distflow.client.previous_outputs import FetchProgress
from distflow.client.specs import CheckedSpec, Overrides
from distflow.client.submission import PlannedRestart, PlannedWorkflow, check_planned, write_scripts
from distflow.documents.problems import Problem
from distflow.documents.quantities import bytes_text
from distflow.documents.text import plain_lines
from distflow.errors import DistflowError, InputError, NodeError, WorkflowEnded
from distflow.lifecycle.states import WorkflowState, waiting_text
from distflow.plan.render import plan_json, plan_text
from distflow.shell import Secret
from distflow.spec.names import check_label
from distflow.state.record import WorkflowRecord

__all__ = [
    "check_nodes",
    "dry_run",
    "parse_labels",
    "parse_overrides",
    "print_plan",
    "print_submitted",
    "read_stdin",
    "rsync_paths",
    "start",
    "valid_text",
    "wait_for_end",
    "warn",
]


def parse_overrides(sets: Sequence[str], set_strings: Sequence[str], set_env: Sequence[str]) -> Overrides:
    """Parse the values of ``--set``, ``--set-string`` and ``--set-env``.

    Raises:
        InputError: if a value has no ``=`` or no name, or if a variable in ``set_env`` without ``=`` is not in the environment.
            The message never contains the value of a secret.

    """
    secrets: dict[str, Secret] = {}
    for position, item in enumerate(set_env, 1):
        name, equals, value = item.partition("=")
        if not equals and item in os.environ:
            value = os.environ[item]
        elif not equals or not name:
            hint = "write NAME=VALUE, or export the variable and write only NAME"
            message = f"value {position} of --set-env is neither NAME=VALUE nor a variable in the environment of this command"
            raise InputError(message, hint=hint)
        secrets[name] = Secret(value)
    return Overrides(
        sets=tuple(_pair("--set", item) for item in sets),
        set_strings=tuple(_pair("--set-string", item) for item in set_strings),
        secrets=secrets,
    )


def _pair(flag: str, item: str, name_of: str = "NAME") -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals or not name:
        example = f"{name or name_of.lower()}=VALUE"
        raise InputError(f"{flag} `{item}` is not of the form {name_of}=VALUE", hint=f"write {flag} {example}")
    return name, value


def parse_labels(items: Sequence[str]) -> dict[str, str]:
    """Return the labels of ``--label``. Raises ``InputError`` if one is not valid."""
    labels = dict(_pair("--label", item, "KEY") for item in items)
    for key, value in labels.items():
        try:
            check_label(key, value)
        except ValueError as error:
            raise InputError(f"--label {key}={value}: {error}") from None
    return labels


def read_stdin(file: str) -> str | None:
    """Return the text of a spec on standard input, or ``None`` for a file or the id of a workflow."""
    return sys.stdin.read() if file == "-" else None


def rsync_paths(pair: str) -> tuple[str, str]:
    """Return the local and the remote path of ``--rsync``. Raises ``InputError``, also if rsync is not installed."""
    from distflow.cli.workflow.rsync import split_local
    from distflow.client.rsync.copies import check_rsync_here

    check_rsync_here()
    return split_local(pair)


def valid_text(file: str, checked: CheckedSpec) -> str:
    """Return the lines for a valid spec: the number of groups and tasks, the order of the groups, and their rank layouts."""
    groups = len(checked.spec.groups)
    tasks = sum(len(group.tasks) for group in checked.spec.groups)
    lines = [f"{file}: valid: {groups} group{'s' * (groups != 1)}, {tasks} task{'s' * (tasks != 1)}"]
    lines += [f"  {group.name} {waiting_text(group.upstream)}" for group in checked.spec.groups if group.upstream]
    for name, picture in checked.pictures.items():
        lines += ["", f"  {name}", *("  " + line for line in picture.splitlines()), ""]
    return "\n".join(lines) + "\n"


def dry_run(planned: PlannedWorkflow, scripts: Path | None, format_type: Format) -> None:
    """Print a plan, and write the scripts of its tasks into the directory ``scripts``.

    Raises ``InputError`` if a script cannot be written.
    """
    if scripts is not None:
        try:
            for path in write_scripts(planned, scripts):
                print(f"wrote {path}", file=sys.stderr)
        except OSError as error:
            message = f"--scripts: `{error.filename or scripts}` cannot be written: {error.strerror}"
            raise InputError(message, hint="choose a directory that you can write to") from error
    print_plan(planned, format_type)


def print_plan(planned: PlannedWorkflow, format_type: Format) -> None:
    """Print a plan, and its warnings to standard error."""
    warn(planned.checked.warnings)
    if format_type is Format.JSON:
        print(json.dumps(plan_json(planned.plan, planned.placement), indent=2))
    else:
        print(plain_lines(plan_text(planned.plan, planned.placement, planned.checked.pictures)), end="")


def check_nodes(planned: PlannedWorkflow, hostfile: str | None) -> None:
    """Check the nodes of a workflow as ``pool check`` does, and print the findings to standard error.

    Raises ``typer.Exit`` with the exit code of ``NodeError`` if a gang cannot run on these nodes.
    """
    from distflow.cli.render.nodes import findings_text
    from distflow.cli.render.terminal import BottomLine

    bottom = BottomLine(sys.stderr)
    try:
        found = check_planned(planned, on_progress=lambda text: bottom.show(f"{text} …")).verdict
    finally:
        bottom.clear()
    paint = Paint.of(sys.stderr)
    for line in findings_text(found, paint):
        print(line, file=sys.stderr)
    if not found.can_run:
        details = pool_check_command(planned.pool.name, hostfile=hostfile)
        print(f"{paint.bad(found.text)}\nNothing was started. Details: {details}", file=sys.stderr)
        raise typer.Exit(NodeError.exit_code)


def start(
    client: Client,
    submit_or_restart: Callable[..., WorkflowRecord],
    planned: PlannedWorkflow | PlannedRestart,
    wait: bool,
    format_type: Format,
) -> WorkflowRecord:
    """Call ``submit`` or ``restart``, and print the id of the new workflow. With ``wait``, JSON is printed only at the end."""
    is_quiet = wait and format_type is Format.JSON
    with _FetchLine(sys.stderr) as line:
        on_stored = None if is_quiet else lambda stored: print_submitted(stored, format_type)
        return submit_or_restart(client, planned, on_stored=on_stored, on_fetch=line.show)


class _FetchLine:
    """The progress of fetched outputs at the bottom of a terminal, as a context manager."""

    def __init__(self, out: TextIO) -> None:
        """Create the line without showing it."""
        self._bottom = BottomLine(out)

    def __enter__(self) -> _FetchLine:
        """Return the line. The first call of ``show`` shows it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Erase the line."""
        self._bottom.clear()

    def show(self, progress: FetchProgress) -> None:
        """Show the progress of one output."""
        doing = "Fetching" if progress.is_packed else "Packing"
        share = f"{bytes_text(progress.done)} of {bytes_text(progress.total)}, {bytes_text(progress.bytes_per_s)}/s"
        self._bottom.show(f"{doing} output of {progress.source}: {share}")


def print_submitted(record: WorkflowRecord, format_type: Format) -> None:
    """Print the id of a new workflow or, with JSON, a document. On a terminal, commands to follow it come after the id."""
    if format_type is Format.JSON:
        print(json.dumps(_submitted_json(record), indent=2), flush=True)
        return
    print(record.id, flush=True)
    if sys.stderr.isatty():
        print(f"Logs:    distflow workflow logs -f {record.id}", file=sys.stderr)
        print(f"Status:  distflow workflow query {record.id}", file=sys.stderr)


def _submitted_json(record: WorkflowRecord) -> dict[str, object]:
    from distflow.cli.render.workflow_json import workflow_key  # imported here because only JSON needs it

    return {
        "name": record.id,
        "uuid": record.uuid,
        **workflow_key(record),
        "pool": record.pool,
        "warnings": list(record.warnings),
        "parent_name": record.parent,
    }


def wait_for_end(
    client: Client,
    record: WorkflowRecord,
    format_type: Format,
    *,
    fetches: bool = False,
    on_end: Callable[[WorkflowRecord], None] | None = None,
) -> None:
    """Print the logs of a workflow until it has ended, then the first cause of a failure, and commands for logs and outputs.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        format_type: With JSON, the logs are printed to standard error, and standard output is one document.
        fetches: Whether the caller fetches the output files afterwards. The command for them is then not printed.
        on_end: Called with the ended workflow, before the last lines are printed.

    Raises:
        NodeError: if the workflow cannot start before a person repairs a node. The workflow is then canceled.
        WorkflowEnded: if the workflow did not complete.
        DistflowError: with exit code 4 if the reader of the output closes the pipe. The workflow continues.

    """
    from distflow.cli.render.live import follow_workflow
    from distflow.client.workflows import cancel

    quiet = format_type is Format.JSON
    try:
        final = follow_workflow(client, record, out=sys.stderr if quiet else sys.stdout, err=sys.stderr)
    except KeyboardInterrupt:
        print(f"\n{record.id} continues to run. To cancel it: distflow workflow cancel {record.id}", file=sys.stderr)
        raise
    except NodeError as error:
        cancel(client, [record.uuid], message=f"it cannot start: {error.message}")
        hint = f"{record.id} was canceled before it started, because a retry does not help; {error.hint}"
        raise NodeError(error.node, error.detail, hint=hint) from None
    except BrokenPipeError:
        raise _OutputClosed(
            f"{record.id} continues to run, but the program that read the logs, such as `head`, has exited",
            hint=f"to follow it again: distflow workflow logs --follow {record.id}",
        ) from None
    if on_end is not None:
        on_end(final)
    _print_end(client, final, format_type, fetches=fetches)
    if final.state is not WorkflowState.COMPLETED:
        raise WorkflowEnded("")


class _OutputClosed(DistflowError):
    exit_code = 4
    """The same exit code as that of ``query --exit-status`` for a workflow that has not ended."""


def _print_end(client: Client, record: WorkflowRecord, format_type: Format, *, fetches: bool) -> None:
    """Print the first cause of a failure and the commands for logs and outputs. With JSON, first print the document."""
    from distflow.cli.render.failures import end_text, remedies_of
    from distflow.client.workflows import outputs_until

    examined = []
    if record.state is not WorkflowState.COMPLETED:
        from distflow.client.failures import diagnose_groups

        examined = diagnose_groups(client, record)
    until = outputs_until(client, record)
    if format_type is Format.JSON:
        from distflow.cli.render.workflow_json import workflow_json
        from distflow.client.workflows import plan_of

        remedies = remedies_of(record, examined)
        document = workflow_json(record, plan_of(client, record), outputs_until=until, remedies=remedies)
        print(json.dumps(document, indent=2))
    text = end_text(record, examined, paint=Paint.of(sys.stderr), outputs_until=until, fetches=fetches)
    with suppress(OSError):  # if standard error is closed, the exit code still reports the end
        print(text, end="", file=sys.stderr, flush=True)


def warn(warnings: Iterable[Problem]) -> None:
    """Print warnings to standard error."""
    for problem in warnings:
        print(plain_lines(problem.as_text()), file=sys.stderr)
