"""``distflow workflow outputs`` and ``fetch``: list the output files of tasks, and copy them to this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from distflow.cli.context import WorkflowArgument, open_workflow
from distflow.cli.options import AttemptOption, Format, FormatOption, TasksOption, command_app
from distflow.cli.render.tables import print_notice, table
from distflow.cli.render.terminal import ProgressLine
from distflow.cli.render.workflow_json import workflow_key
from distflow.client.outputs import FetchedFiles, TaskOutputs, fetch_output_files, list_output_files
from distflow.documents.json_keys import name_keys
from distflow.documents.quantities import bytes_text, count_text, local_minute, times
from distflow.documents.text import plain
from distflow.errors import DistflowError, NodeError
from distflow.state.record import WorkflowRecord

__all__ = ["end_fetch", "fetch_app", "fetched_text", "outputs_app", "outputs_json"]

outputs_app = command_app()
fetch_app = command_app()

_WorkdirOption = Annotated[
    bool,
    typer.Option(
        "--workdir", help="Use the files that the command wrote to its working directory, instead of those in {{output}}."
    ),
]


@outputs_app.command(
    epilog="Examples: distflow workflow outputs pytorch-dist-3  ·  distflow workflow outputs pytorch-dist-3 --task master"
)
def outputs(
    workflow: WorkflowArgument,
    task: TasksOption = None,
    workdir: _WorkdirOption = False,
    attempt: AttemptOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """List the output files of a workflow on its nodes.

    Tasks write them to {{output}}. They stay on the nodes after the workflow has ended, until `distflow node clean` removes
    them. Files in a pod of Kubernetes are lost when the pod ends.
    """
    with open_workflow(workflow) as (client, record):
        found = list_output_files(client, record, tasks=task or (), place="work" if workdir else "output", attempt=attempt)
        if format_type is Format.JSON:
            print(json.dumps(outputs_json(record, found), indent=2))
        else:
            _print_outputs(record, found, workdir, _filters(task, attempt))
    _exit_with(one.error for one in found)


@fetch_app.command(
    epilog="Examples: distflow workflow fetch pytorch-dist-3  ·  distflow workflow fetch pytorch-dist-3 '*.pt' --to results"
)
def fetch(
    workflow: WorkflowArgument,
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH…]",
            help="Files, directories or patterns such as '*.pt' in the output. Default: all.",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="DIR",
            help="The local directory. Default: ID; with --retry-id, a directory named ID-retry-NUMBER.",
            show_default=False,
        ),
    ] = None,
    task: TasksOption = None,
    workdir: _WorkdirOption = False,
    attempt: AttemptOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Copy the output files of a workflow to this machine.

    If several tasks have files, each task gets a directory. Files that already exist here are skipped, and changed files are
    replaced. Repeat the command to continue after an interruption. `distflow workflow outputs` lists the files.
    """
    with open_workflow(workflow) as (client, record), ProgressLine(sys.stderr, "fetched") as line:
        folder = Path(record.id if attempt is None else f"{record.id}-retry-{attempt}") if to is None else to
        try:
            fetched = fetch_output_files(
                client, record, folder, tasks=task or (), paths=paths or (), place="work" if workdir else "output",
                attempt=attempt,
                is_claimed=to is None,
                on_progress=lambda progress: line.update(progress.done, progress.total),
            )  # fmt: skip
        except KeyboardInterrupt:
            print("\nThe files that are complete were kept. Repeat the command to continue.", file=sys.stderr)
            raise
    if format_type is Format.JSON:
        print(json.dumps(_fetched_json(record, folder, fetched), indent=2))
    elif fetched.files or fetched.unchanged:
        print(fetched_text(fetched, folder))
    elif not fetched.errors and not fetched.problems:
        print_notice(_no_files(record, workdir, _filters(task, attempt)))
    end_fetch(fetched)


def fetched_text(fetched: FetchedFiles, folder: Path) -> str:
    """Return the line that reports fetched files."""
    skipped = f"; {fetched.unchanged:,} {_were(fetched.unchanged)} already there" if fetched.unchanged else ""
    return f"fetched {count_text(fetched.files, 'file')}, {bytes_text(fetched.size)}, to {plain(str(folder))}{skipped}"


def end_fetch(fetched: FetchedFiles) -> None:
    """Print notes about moved, omitted and unreadable files, and the errors of tasks.

    If there are errors or unreadable files, exit with the code of the first error, or of ``NodeError``.
    """
    if fetched.moved is not None:
        print_notice(f"note: the directory had the results of another workflow; they were moved to {fetched.moved}")
    if fetched.is_mixed:
        print_notice(
            "note: the directory also contains other files, which distflow did not fetch. To keep the results apart: `--to DIR`"
        )
    if fetched.left_out:
        print_notice(
            f"note: {count_text(fetched.left_out, 'file')} left out: sockets, pipes, devices, broken links,"
            " and links to directories outside of the task's directory"
        )
    for problem in fetched.problems:
        print_notice(f"warning: {problem}")
    _exit_with(fetched.errors, has_failed=bool(fetched.problems))


def _filters(task: Sequence[str] | None, attempt: int | None) -> str:
    """Return the options that choose these tasks and this attempt, each after a space."""
    return "".join(f" --task {name}" for name in task or ()) + ("" if attempt is None else f" --retry-id {attempt}")


def _print_outputs(record: WorkflowRecord, found: Sequence[TaskOutputs], workdir: bool, filters: str) -> None:
    rows = [
        (one.task, bytes_text(file.size), local_minute(file.modified_at), plain(file.path) + _arrow(file.link))
        for one in found
        for file in one.files
    ]
    if rows:
        print(table(("Task", "Size", "Modified", "Path"), rows), end="")
        size = sum(file.size for one in found for file in one.files)
        option = " --workdir" if workdir else ""
        print_notice(
            f"{count_text(len(rows), 'file')}, {bytes_text(size)}. "
            f"To copy them: distflow workflow fetch {record.id}{option}{filters}"
        )
    elif not any(one.error for one in found):
        print_notice(_no_files(record, workdir, filters))
    if left_out := sum(one.left_out for one in found):
        print_notice(
            f"note: {count_text(left_out, 'file')} not listed: sockets, pipes, devices, broken links,"
            " and links to directories outside of the task's directory"
        )


def _arrow(link: str) -> str:
    return f" -> {plain(link)}" if link else ""


def _no_files(record: WorkflowRecord, workdir: bool, filters: str) -> str:
    chosen = "the chosen tasks or attempt of " if filters else ""
    if workdir:
        return f"The commands of {chosen}{record.id} wrote no files to their working directories."
    other = f"distflow workflow outputs {record.id} --workdir{filters}"
    where = f"{chosen}{record.id}: " if filters else f"{record.id} has "
    return f"{where}no files in {{{{output}}}}. To list the files in the working directories: {other}"


def outputs_json(record: WorkflowRecord, found: Sequence[TaskOutputs]) -> dict[str, object]:
    """Return the JSON document of ``outputs --format-type json``: for each task its node, directory and files."""
    return {
        "name": record.id,
        "uuid": record.uuid,
        **workflow_key(record),
        "tasks": [
            {
                "name": one.task,
                "task_name": one.task,
                **name_keys(node=one.node),
                "directory": one.directory,
                "files": [
                    {"path": file.path, "bytes": file.size, **times(modified=file.modified_at), "link": file.link or None}
                    for file in one.files
                ],
                "left_out": one.left_out,
                "error": None if one.error is None else one.error.message,
            }
            for one in found
        ],
    }


def _fetched_json(record: WorkflowRecord, folder: Path, fetched: FetchedFiles) -> dict[str, object]:
    """Return the JSON document of ``fetch --format-type json``: counts, and the local directory of each task."""
    return {
        "name": record.id,
        "uuid": record.uuid,
        **workflow_key(record),
        "folder": str(folder),
        "files": fetched.files,
        "bytes": fetched.size,
        "already_there": fetched.unchanged,
        "left_out": fetched.left_out,
        "tasks": [{"name": name, "task_name": name, "folder": str(path)} for name, path in fetched.folders.items()],
        "errors": [*fetched.problems, *(error.message for error in fetched.errors)],
    }


def _exit_with(errors: Iterable[DistflowError | None], *, has_failed: bool = False) -> None:
    """Print errors to standard error, and exit with the code of the first one.

    Without errors, exit with the code of ``NodeError`` if ``has_failed``, and return otherwise.
    """
    known = [error for error in errors if error is not None]
    for error in known:
        print_notice(f"error: {error}")
    if known or has_failed:
        raise typer.Exit(known[0].exit_code if known else NodeError.exit_code)


def _were(number: int) -> str:
    return "was" if number == 1 else "were"
