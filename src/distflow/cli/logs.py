"""``distflow workflow logs``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from distflow.cli.command import Format, command_app
from distflow.cli.live import Watch
from distflow.cli.metrictext import held_ranks
from distflow.cli.output import Prefixes, RankChoice, lines_of_ranks, log_sources, what_is_missing
from distflow.cli.reading import WorkflowArgument, choose_tasks, open_workflow, pause
from distflow.cli.tables import Paint
from distflow.cli.times import iso, local_second
from distflow.errors import InputError
from distflow.state.logs import Keep, LogLine, LogSource, follow_lines, mirrored_bytes, read_lines, tells_ranks

if TYPE_CHECKING:
    from distflow.state.directory import StateDirectory
    from distflow.state.record import TaskRecord, WorkflowRecord
    from distflow.state.store import Store

__all__ = ["app"]

app = command_app()


@app.command(
    epilog="Examples: distflow workflow logs -f pytorch-dist-3  ·  distflow workflow logs pytorch-dist-3 --rank 11 -n 50"
)
def logs(
    workflow: WorkflowArgument,
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="Only of this task; may be repeated.")] = None,
    rank: Annotated[list[int] | None, typer.Option("--rank", min=0, help="Only of this rank; may be repeated.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the workflow has ended and its logs are complete.")
    ] = False,
    last: Annotated[int | None, typer.Option("-n", min=0, metavar="LINES", help="Begin with the last lines only.")] = None,
    attempt: Annotated[
        int | None, typer.Option("--retry-id", "-r", min=0, help="Only of this attempt, counted from 0; default: all.")
    ] = None,
    error: Annotated[
        bool, typer.Option("--error", help="What one task wrote to its error file (torch's format) instead; with --task.")
    ] = False,
    prefix: Annotated[bool, typer.Option("--prefix/--no-prefix", help="Begin each line with its [task].")] = True,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Begin each line with its time, in your zone.")] = False,
    format_type: Annotated[
        Format, typer.Option("--format-type", help="text, or json: one array; with --follow one object per line.")
    ] = Format.TEXT,
) -> None:
    """Show what the tasks print, merged by time; also after the end, and when their nodes are gone."""
    if error and (follow or last is not None or len(task or rank or ()) != 1):
        raise InputError("--error shows one task's error file", hint="name the task with --task, without --follow and -n")
    with open_workflow(workflow) as (directory, store, record):
        tasks = choose_tasks(record, task or [], rank or [])
        if error:
            from distflow.cli.errorfiles import show_errors

            show_errors(record, tasks[0][0], tasks[0][1].name, attempt, as_json=format_type is Format.JSON)
            return
        sources = log_sources(directory, record, tasks, attempt)
        chosen = _chosen(tasks, task or [], rank or [])
        keep = lines_of_ranks(sources, chosen, follow=follow) if chosen else None
        if follow:
            lines, ended = _follow(directory, store, record, tasks, attempt, last, keep)
        else:
            lines, ended = read_lines(sources, last=last, keep=keep), [record]
        if format_type is Format.JSON:
            _write_json(lines, follow)
        else:
            prefixes = Prefixes([one for _, one in tasks], Paint.of(sys.stdout), enabled=prefix)
            for line in lines:
                stamp = f"{local_second(line.time)} " if timestamps else ""
                sys.stdout.write(f"{stamp}{prefixes.of(line)}{line.text}\n")
        sys.stdout.flush()
        names = {one.name for _, one in tasks}
        for words in (*what_is_missing(directory, ended[-1], names, attempt), *_not_told_apart(sources, chosen)):
            print(words, file=sys.stderr)


def _chosen(tasks: list[tuple[str, TaskRecord]], names: list[str], ranks: list[int]) -> dict[str, RankChoice]:
    """Return which ranks are wanted of tasks of which not everything is."""
    choices = {
        one.name: RankChoice(held=held_ranks(one.ranks), ranks=frozenset(ranks))
        for _, one in tasks
        if ranks and one.name not in names
    }
    return {name: choice for name, choice in choices.items() if not choice.has_all}


def _not_told_apart(sources: list[LogSource], chosen: dict[str, RankChoice]) -> Iterator[str]:
    """Yield one sentence for each task of which ranks were asked for, and whose ranks share one output."""
    for name in chosen:
        own = [one for one in sources if one.task == name and mirrored_bytes(one)]
        if own and not any(tells_ranks(one) for one in own):
            yield f"{name}: its ranks share one output, so `--rank` cannot choose; torchrun and `spawn` give each its own"


def _follow(
    directory: StateDirectory,
    store: Store,
    record: WorkflowRecord,
    tasks: list[tuple[str, TaskRecord]],
    attempt: int | None,
    last: int | None,
    keep: Keep | None,
) -> tuple[Iterator[LogLine], list[WorkflowRecord]]:
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

    lines = follow_lines(lambda: watch.sources(attempt), wait=wait, is_over=sources_over, last=last, keep=keep)
    return lines, seen


def _write_json(lines: Iterable[LogLine], follow: bool) -> None:
    write = sys.stdout.write
    between = "[\n  "
    for line in lines:
        value = {"time": iso(line.time), "task": line.task, "rank": line.rank, "retry_id": line.attempt, "text": line.text}
        if follow:
            write(f"{json.dumps(value)}\n")
        else:
            write(f"{between}{json.dumps(value)}")
            between = ",\n  "
    if not follow:
        write("[]\n" if between.startswith("[") else "\n]\n")
