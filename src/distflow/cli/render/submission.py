"""What ``submit`` and ``restart`` show: warnings, the new workflow's id, and its logs until it has ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import TextIO

from distflow.cli.options import Format
from distflow.cli.render.terminal_line import Bottom
from distflow.client.client import Client
from distflow.client.submitting.previous_outputs import FetchProgress
from distflow.documents.printable import plain_lines
from distflow.documents.problems import Problem
from distflow.documents.quantities import bytes_text
from distflow.errors import DistflowError, WorkflowEnded
from distflow.lifecycle.states import WorkflowState
from distflow.state.record import WorkflowRecord

__all__ = ["FetchLine", "print_submitted", "wait_for_end", "warn"]


class FetchLine:
    """The last line of a terminal, which shows how far outputs of ended workflows are; a context manager."""

    def __init__(self, out: TextIO) -> None:
        """Show nothing yet."""
        self._bottom = Bottom(out)

    def __enter__(self) -> FetchLine:
        """Show nothing yet."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Remove the line."""
        self._bottom.clear()

    def show(self, progress: FetchProgress) -> None:
        """Show how far it is."""
        doing = "fetching" if progress.is_packed else "packing"
        share = f"{bytes_text(progress.done)} of {bytes_text(progress.total)}, {bytes_text(progress.bytes_per_s)}/s"
        self._bottom.show(f"{doing} what {progress.source} wrote: {share}")


def print_submitted(record: WorkflowRecord, format_type: Format) -> None:
    """Print the id; on a terminal also what to do with it."""
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
    """Follow a workflow to its end. Raises ``WorkflowEnded`` when it did not complete."""
    from distflow.cli.render.live import follow_workflow

    quiet = format_type is Format.JSON
    try:
        final = follow_workflow(client, record, out=sys.stderr if quiet else sys.stdout, err=sys.stderr)
    except KeyboardInterrupt:
        print(f"\n{record.id} goes on; to end it: distflow workflow cancel {record.id}", file=sys.stderr)
        raise
    except BrokenPipeError:
        raise _NobodyReads(f"{record.id} goes on, and nobody reads its logs here any more") from None
    if quiet:
        from distflow.cli.render.workflow_json import workflow_json
        from distflow.client.workflows import plan_of

        print(json.dumps(workflow_json(final, plan_of(client, final)), indent=2))
    if final.state is not WorkflowState.COMPLETED:
        if sys.stderr.isatty():
            _print_causes(final)
        raise WorkflowEnded("")


class _NobodyReads(DistflowError):
    exit_code = 4
    """As of ``query --exit-status`` where a workflow has not ended yet."""


def _print_causes(record: WorkflowRecord) -> None:
    """Say why it failed, where the status line has just said that it did."""
    for group in record.groups:
        if group.message:
            print(f"{group.name}: {group.status}: {plain_lines(group.message)}", file=sys.stderr)
    print(f"more: distflow workflow query {record.id}", file=sys.stderr)


def warn(warnings: Iterable[Problem]) -> None:
    """Show findings that stop nothing."""
    for problem in warnings:
        print(plain_lines(problem.as_text()), file=sys.stderr)
