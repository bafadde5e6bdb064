"""The output of ``submit`` and ``restart``: warnings, the id of the new workflow, and its logs until it has ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import TextIO

from distflow.cli.options import Format
from distflow.cli.render.terminal_line import BottomLine
from distflow.client.client import Client
from distflow.client.submitting.previous_outputs import FetchProgress
from distflow.documents.problems import Problem
from distflow.documents.quantities import bytes_text
from distflow.documents.text import plain_lines
from distflow.errors import DistflowError, WorkflowEnded
from distflow.lifecycle.states import WorkflowState
from distflow.state.record import WorkflowRecord

__all__ = ["FetchLine", "print_submitted", "wait_for_end", "warn"]


class FetchLine:
    """The progress of fetched outputs at the bottom of a terminal, as a context manager."""

    def __init__(self, out: TextIO) -> None:
        """Create the line without showing it."""
        self._bottom = BottomLine(out)

    def __enter__(self) -> FetchLine:
        """Return the line. The first call of ``show`` shows it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Erase the line."""
        self._bottom.clear()

    def show(self, progress: FetchProgress) -> None:
        """Show the progress of one output."""
        doing = "fetching" if progress.is_packed else "packing"
        share = f"{bytes_text(progress.done)} of {bytes_text(progress.total)}, {bytes_text(progress.bytes_per_s)}/s"
        self._bottom.show(f"{doing} what {progress.source} wrote: {share}")


def print_submitted(record: WorkflowRecord, format_type: Format) -> None:
    """Print the id of a new workflow. On a terminal, also print commands to follow it."""
    if format_type is Format.JSON:
        print(json.dumps(_submitted_json(record), indent=2), flush=True)
        return
    print(record.id, flush=True)
    if sys.stderr.isatty():
        print(f"follow it:  distflow workflow logs -f {record.id}", file=sys.stderr)
        print(f"where it is:  distflow workflow query {record.id}", file=sys.stderr)


def _submitted_json(record: WorkflowRecord) -> dict[str, object]:
    return {
        "name": record.id,
        "uuid": record.uuid,
        "pool": record.pool,
        "warnings": list(record.warnings),
        "parent_name": record.parent,
    }


def wait_for_end(client: Client, record: WorkflowRecord, format_type: Format) -> None:
    """Print the logs of a workflow until it has ended.

    Raises:
        WorkflowEnded: if the workflow did not complete.
        DistflowError: with exit code 4 if the reader of the output closes the pipe. The workflow continues.

    """
    from distflow.cli.render.live import follow_workflow

    quiet = format_type is Format.JSON
    try:
        final = follow_workflow(client, record, out=sys.stderr if quiet else sys.stdout, err=sys.stderr)
    except KeyboardInterrupt:
        print(f"\n{record.id} continues to run; to cancel it: distflow workflow cancel {record.id}", file=sys.stderr)
        raise
    except BrokenPipeError:
        raise _OutputClosed(f"{record.id} goes on, and nobody reads its logs here any more") from None
    if quiet:
        from distflow.cli.render.workflow_json import workflow_json
        from distflow.client.workflows import plan_of

        print(json.dumps(workflow_json(final, plan_of(client, final)), indent=2))
    if final.state is not WorkflowState.COMPLETED:
        if sys.stderr.isatty():
            _print_causes(final)
        raise WorkflowEnded("")


class _OutputClosed(DistflowError):
    exit_code = 4
    """The same exit code as that of ``query --exit-status`` for a workflow that has not ended."""


def _print_causes(record: WorkflowRecord) -> None:
    """Print the reason of each group's failure, after the status line has reported the failure."""
    for group in record.groups:
        if group.message:
            print(f"{group.name}: {group.status}: {plain_lines(group.message)}", file=sys.stderr)
    print(f"more: distflow workflow query {record.id}", file=sys.stderr)


def warn(warnings: Iterable[Problem]) -> None:
    """Print warnings to standard error."""
    for problem in warnings:
        print(plain_lines(problem.as_text()), file=sys.stderr)
