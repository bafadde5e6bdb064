"""``distflow workflow logs``."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from distflow.cli import wiring
from distflow.cli.command import Format, command_app
from distflow.cli.reading import WorkflowArgument, choose_tasks, open_workflow, pause
from distflow.cli.tables import Paint
from distflow.cli.times import iso, local_second
from distflow.state.logs import LogLine, LogSource, follow_lines, mirrored_bytes, read_lines

if TYPE_CHECKING:
    from distflow.state.directory import StateDirectory
    from distflow.state.record import TaskRecord, WorkflowRecord
    from distflow.state.store import Store

__all__ = ["Prefixes", "app", "log_sources", "what_is_missing"]

app = command_app()


@app.command(
    epilog="Examples: distflow workflow logs -f pytorch-dist-3  ·  distflow workflow logs pytorch-dist-3 --rank 11 -n 50"
)
def logs(
    workflow: WorkflowArgument,
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="Only of this task; may be repeated.")] = None,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", min=0, help="Only of the task that holds this rank; may be repeated.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the workflow has ended and its logs are complete.")
    ] = False,
    last: Annotated[int | None, typer.Option("-n", min=0, metavar="LINES", help="Begin with the last lines only.")] = None,
    attempt: Annotated[
        int | None, typer.Option("--retry-id", "-r", min=0, help="Only of this attempt, counted from 0; default: all.")
    ] = None,
    prefix: Annotated[bool, typer.Option("--prefix/--no-prefix", help="Begin each line with its [task].")] = True,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Begin each line with its time, in your zone.")] = False,
    format_type: Annotated[
        Format, typer.Option("--format-type", help="text, or json: one array; with --follow one object per line.")
    ] = Format.TEXT,
) -> None:
    """Show what the tasks print, merged by time; also after the end, and when their nodes are gone."""
    _be_tolerant()
    with open_workflow(workflow) as (directory, store, record):
        tasks = choose_tasks(record, task or [], rank or [])
        if follow:
            lines, ended = _follow(directory, store, record, tasks, attempt, last)
        else:
            lines, ended = read_lines(log_sources(directory, record, tasks, attempt), last=last), [record]
        if format_type is Format.JSON:
            _write_json(lines, follow)
        else:
            prefixes = Prefixes([one for _, one in tasks], Paint.of(sys.stdout), enabled=prefix)
            for line in lines:
                stamp = f"{local_second(line.time)} " if timestamps else ""
                sys.stdout.write(f"{stamp}{prefixes.of(line)}{line.text}\n")
        sys.stdout.flush()
        names = {one.name for _, one in tasks}
        for words in what_is_missing(directory, ended[-1], names, attempt):
            print(words, file=sys.stderr)


def log_sources(
    directory: StateDirectory, record: WorkflowRecord, tasks: Collection[tuple[str, TaskRecord]], attempt: int | None = None
) -> list[LogSource]:
    """Return where the logs of these tasks lie: of one attempt, or of all there were."""
    mirror = wiring.mirror(directory)
    return [
        LogSource(task.name, number, mirror.folder(record.uuid, group, task.name, number))
        for group, task in tasks
        for number in (range(task.attempt + 1) if attempt is None else (attempt,))
    ]


class Prefixes:
    """``[task] ``, or ``[task retry-1] ``, in the task's colour."""

    def __init__(self, tasks: Iterable[TaskRecord], paint: Paint, *, enabled: bool = True) -> None:
        """Give each task a colour of its own."""
        self._numbers = {task.name: number for number, task in enumerate(tasks)}
        self._paint = paint
        self._enabled = enabled
        self._made: dict[tuple[str, int], str] = {}

    def of(self, line: LogLine) -> str:
        """Return what stands before a line; nothing when there are to be none."""
        if not self._enabled:
            return ""
        made = self._made.get((line.task, line.attempt))
        if made is None:
            retry = f" retry-{line.attempt}" if line.attempt else ""
            made = self._paint.task(f"[{line.task}{retry}]", self._numbers.get(line.task, 0)) + " "
            self._made[line.task, line.attempt] = made
        return made


def what_is_missing(
    directory: StateDirectory, record: WorkflowRecord, tasks: Collection[str], attempt: int | None = None
) -> Iterator[str]:
    """Yield one sentence for each of the tasks that ended and whose output is not all here."""
    for group in record.groups:
        for task in group.tasks:
            if task.name not in tasks or task.end is None or attempt not in (None, task.attempt):
                continue
            here = sum(mirrored_bytes(source) for source in log_sources(directory, record, [(group.name, task)], task.attempt))
            missing = task.end.output_bytes - here
            if missing > 0 and task.log_complete:
                yield f"{task.name}: the last {missing:,} bytes of its output never came from {task.node}"
            elif missing > 0:
                yield f"{task.name}: {missing:,} bytes of its output are still on {task.node}"
            if task.end.lost_output_bytes:
                yield f"{task.name}: {task.end.lost_output_bytes:,} bytes of its output were lost: {task.node}'s disk was full"


def _follow(
    directory: StateDirectory,
    store: Store,
    record: WorkflowRecord,
    tasks: list[tuple[str, TaskRecord]],
    attempt: int | None,
    last: int | None,
) -> tuple[Iterator[LogLine], list[WorkflowRecord]]:
    from distflow.cli.live import Watch

    names = {one.name for _, one in tasks}
    watch = Watch(directory, store, record, tasks=names)
    seen = [record]

    def sources_over() -> bool:
        over = watch.logs_are_over()
        seen[:] = [watch.record]
        return over

    def wait(seconds: float) -> None:
        sys.stdout.flush()
        pause(seconds)

    lines = follow_lines(lambda: watch.sources(attempt), wait=wait, is_over=sources_over, last=last)
    return lines, seen


def _write_json(lines: Iterable[LogLine], follow: bool) -> None:
    write = sys.stdout.write
    between = "[\n  "
    for line in lines:
        value = {"time": iso(line.time), "task": line.task, "retry_id": line.attempt, "text": line.text}
        if follow:
            write(f"{json.dumps(value)}\n")
        else:
            write(f"{between}{json.dumps(value)}")
            between = ",\n  "
    if not follow:
        write("[]\n" if between.startswith("[") else "\n]\n")


def _be_tolerant() -> None:
    """Write what the terminal's encoding does not have as ``?``: logs hold anything."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
