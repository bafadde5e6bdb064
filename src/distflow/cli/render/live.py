"""Show the output of tasks: prefixed lines, error files, and the logs and status of a running workflow."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TextIO

from distflow.cli.render.tables import Paint
from distflow.cli.render.terminal import BottomLine
from distflow.cli.render.workflow_text import changes, missing_nodes, status_line
from distflow.client.client import Client, now
from distflow.client.logs import Wait, WorkflowWatch, missing_output
from distflow.client.workflows import check_command, pause
from distflow.documents.json_keys import name_keys
from distflow.documents.text import plain
from distflow.errors import NodeError
from distflow.lifecycle.states import WorkflowState
from distflow.protocol.error_file import parse_error_file

if TYPE_CHECKING:
    from distflow.client.logs import LogLine
    from distflow.state.record import TaskRecord, WorkflowRecord

__all__ = ["Prefixes", "error_text", "follow_workflow", "show_errors", "watch_workflow"]


_WATCH_S = 1.0
_REMINDER_POLLS = 600
"""The number of polls without a change, at ten per second, after which a reminder about a waiting workflow is printed."""


def follow_workflow(client: Client, record: WorkflowRecord, *, out: TextIO, err: TextIO, wait: Wait = pause) -> WorkflowRecord:
    """Write the merged logs of a workflow to ``out`` until the workflow has ended, and return its final record.

    On a terminal, the last line shows the status of the workflow. Otherwise, each change of a status is a line on ``err``,
    and ``err`` gets a reminder about once a minute while the workflow waits for its start. In both cases, ``err`` immediately
    names unreachable nodes that prevent the start. ``KeyboardInterrupt`` is not handled, but the status line is erased first.

    Raises:
        NodeError: if the workflow has not started because a node must be repaired by a person.

    """
    watch = WorkflowWatch(client, record)
    paint = Paint.of(out)
    prefixes = Prefixes([task for group in record.groups for task in group.tasks], paint)
    bottom = BottomLine(out)
    shown: WorkflowRecord | None = None
    same_polls = 0

    def show_changes(present: WorkflowRecord) -> None:
        nonlocal shown, same_polls
        before, shown = shown, present
        for group in present.groups:
            if present.state is WorkflowState.PENDING and group.missing_nodes is not None and group.missing_nodes.needs_action:
                (node, error), *_ = group.missing_nodes.errors.items()
                raise NodeError(node, error, hint=f"all problems of the nodes: {check_command(present)}")
        news = [] if bottom.is_terminal else list(changes(before, present))
        same_polls = 0 if news else same_polls + 1
        if same_polls >= _REMINDER_POLLS and present.state is WorkflowState.PENDING and not bottom.is_terminal:
            same_polls = 0
            cancel = f"distflow workflow cancel {present.id}"
            news = [f"{present.id}: still waiting to start. Ctrl-C does not cancel it; to cancel it: {cancel}"]
        news += missing_nodes(before, present, check_command(present), with_errors=bottom.is_terminal)
        if news:
            bottom.clear()
            out.flush()
        for words in news:
            print(words, file=err, flush=True)

    def refresh_and_wait(seconds: float) -> None:
        if bottom.is_terminal:
            bottom.show(status_line(watch.record, now=now(), paint=paint))
        out.flush()
        wait(seconds)

    try:
        for line in watch.lines(wait=refresh_and_wait, on_poll=show_changes):
            bottom.clear()
            out.write(f"{prefixes.of(line)}{line.text}\n")
    finally:
        bottom.clear()
        out.flush()
    if bottom.is_terminal:
        print(status_line(watch.record, now=now(), paint=paint), file=out, flush=True)
    names = {task.name for group in watch.record.groups for task in group.tasks}
    for words in missing_output(client, watch.record, names):
        print(words, file=err)
    return watch.record


def watch_workflow(
    client: Client,
    record: WorkflowRecord,
    render: Callable[[WorkflowRecord], str],
    *,
    out: TextIO | None,
    wait: Wait = pause,
) -> WorkflowRecord:
    """Show a workflow until it has ended, and return its final record.

    On a terminal, the text of ``render`` is refreshed in place and erased at the end. Otherwise, each change of a status is a
    line. If ``out`` is ``None``, nothing is shown.
    """
    watch = WorkflowWatch(client, record)
    if out is not None and out.isatty():
        return _watch_live(watch, render, out, wait)
    shown: WorkflowRecord | None = None
    while True:
        if out is not None:
            for words in changes(shown, watch.record):
                print(words, file=out, flush=True)
        shown = watch.record
        if shown.state.is_final:
            return shown
        wait(_WATCH_S)
        watch.refresh()


def _watch_live(watch: WorkflowWatch, render: Callable[[WorkflowRecord], str], out: TextIO, wait: Wait) -> WorkflowRecord:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(file=out), transient=True, auto_refresh=False) as live:
        while not watch.record.state.is_final:
            live.update(Text.from_ansi(render(watch.record), no_wrap=True, overflow="ellipsis"), refresh=True)
            wait(_WATCH_S)
            watch.refresh()
    return watch.record


class Prefixes:
    """Prefixes of log lines in the color of the task, such as ``[task retry-1 rank 3] ``.

    The first attempt has no ``retry``, and a line of an unknown rank has no ``rank``.
    """

    def __init__(self, tasks: Iterable[TaskRecord], paint: Paint, *, enabled: bool = True) -> None:
        """Assign a color to each task."""
        self._numbers = {task.name: number for number, task in enumerate(tasks)}
        self._paint = paint
        self._enabled = enabled
        self._made: dict[tuple[str, int, int | None], str] = {}

    def of(self, line: LogLine) -> str:
        """Return the prefix of a line, or an empty text if prefixes are disabled."""
        if not self._enabled:
            return ""
        key = line.task, line.attempt, line.rank
        made = self._made.get(key)
        if made is None:
            retry = f" retry-{line.attempt}" if line.attempt else ""
            rank = "" if line.rank is None else f" rank {line.rank}"
            made = self._paint.task(f"[{line.task}{retry}{rank}]", self._numbers.get(line.task, 0)) + " "
            self._made[key] = made
        return made


def show_errors(record: WorkflowRecord, group: str, task: str, attempt: int | None, *, as_json: bool) -> None:
    """Print the error files of one or all attempts of a task. If there are none, print the command that shows its output.

    With ``as_json``, print an entry for each of these attempts. Its ``error`` is null if the attempt has no error file.
    """
    chosen = [one for one in record.group(group).attempts if one.name == task and attempt in (None, one.attempt)]
    attempts = sorted(chosen, key=lambda one: one.attempt)
    if as_json:
        shown = [{**name_keys(task=one.name), "retry_id": one.attempt, "error": _error(one)} for one in attempts]
        print(json.dumps(shown, indent=2))
        return
    found = [(one, error) for one in attempts if (error := _error(one)) is not None]
    for one, error in found:
        for line in error_text(error).splitlines():
            print(f"[{task}{f' retry-{one.attempt}' if one.attempt else ''}] {plain(line)}")
    if not found:
        has_ended = bool(attempts) and all(one.state.is_final for one in attempts)
        print(
            f"{task} has not written an error file{'' if has_ended else ' yet'}. Its output: "
            f"distflow workflow logs {record.id} --task {task}",
            file=sys.stderr,
        )


def error_text(error: Mapping[str, object]) -> str:
    """Return an error file as text: message and call stack if it has torch's format, JSON otherwise."""
    report = parse_error_file(error)
    if report is None:
        return json.dumps(error, indent=2)
    return f"{report.message}\n{report.callstack}" if report.callstack else report.message


def _error(task: TaskRecord) -> Mapping[str, object] | None:
    return task.end.error if task.end is not None else None
