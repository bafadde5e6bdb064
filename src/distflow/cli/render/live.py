"""Show a running workflow: changes of its status, its logs, and a status line below them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from distflow.cli.render.logs import Prefixes
from distflow.cli.render.tables import Paint
from distflow.cli.render.terminal_line import BottomLine
from distflow.cli.render.workflow_text import changes, status_line
from distflow.client.client import Client, now
from distflow.client.logs import Wait, WorkflowWatch, missing_output
from distflow.client.workflows import pause

if TYPE_CHECKING:
    from distflow.state.record import WorkflowRecord

__all__ = ["follow_workflow", "watch_workflow"]

_WATCH_S = 1.0


def follow_workflow(client: Client, record: WorkflowRecord, *, out: TextIO, err: TextIO, wait: Wait = pause) -> WorkflowRecord:
    """Write the merged logs of a workflow to ``out`` until the workflow has ended, and return its final record.

    On a terminal, the last line shows the status of the workflow. Otherwise, each change of a status is a line on ``err``.
    ``KeyboardInterrupt`` is not handled, but the status line is erased first.
    """
    watch = WorkflowWatch(client, record)
    paint = Paint.of(out)
    prefixes = Prefixes([task for group in record.groups for task in group.tasks], paint)
    bottom = BottomLine(out)
    shown: WorkflowRecord | None = None

    def show_changes(present: WorkflowRecord) -> None:
        nonlocal shown
        if not bottom.is_terminal:
            for words in changes(shown, present):
                out.flush()
                print(words, file=err, flush=True)
            shown = present

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
