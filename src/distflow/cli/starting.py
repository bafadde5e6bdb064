"""From a plan that fits to a workflow in the store, told to the person, and followed where that is wished."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from distflow.cli import wiring
from distflow.cli.command import Format
from distflow.cli.secrets import gather_secrets
from distflow.cli.submission import Overrides, Ready, pool_key
from distflow.cli.tables import plain_lines
from distflow.documents.problems import Problem
from distflow.documents.urls import parse_url
from distflow.errors import DistflowError, WorkflowEnded
from distflow.lifecycle.states import WorkflowState
from distflow.state.directory import StateDirectory
from distflow.state.event_details import WorkflowSubmitted
from distflow.state.fresh import fresh_tasks
from distflow.state.record import Event, GroupRecord, Priority, WorkflowRecord
from distflow.state.secrets import remove_secrets, write_secrets
from distflow.state.store import Store

__all__ = ["print_submitted", "store_workflow", "wait_for_end", "warn"]


def store_workflow(
    ready: Ready,
    overrides: Overrides,
    priority: Priority,
    labels: Mapping[str, str],
    directory: StateDirectory,
    store: Store,
    *,
    kept: Mapping[str, GroupRecord] = MappingProxyType({}),
    parent: str | None = None,
) -> WorkflowRecord:
    """Insert a workflow with its secrets, and return it with its id.

    ``kept`` holds the groups that have completed already, in the workflow ``parent`` that this one restarts. Raises
    ``StorageRefused`` when this user has no credentials for its data at URLs.
    """
    _check_credentials(ready, kept)
    now, spec = time.time(), ready.checked.spec  # noqa: TID251  the moment of submission
    record = WorkflowRecord(
        uuid=uuid.uuid4().hex,
        id="",
        name=spec.name,
        number=0,
        user=wiring.user_name(),
        pool=ready.pool.name,
        pool_key=pool_key(ready.pool),
        submitted_at=now,
        groups=tuple(
            kept.get(group.name)
            or GroupRecord(
                name=group.name,
                upstream=group.upstream,
                tasks=fresh_tasks(group),
            )
            for group in ready.plan.groups
        ),
        warnings=tuple(problem.message for problem in ready.checked.warnings),
        priority=priority,
        labels=labels,
        parent=parent,
    )
    told = WorkflowSubmitted(user=record.user, pool=record.pool, parent=parent, kept=tuple(kept))
    event = Event(at=now, details=told, workflow=record.uuid)
    write_secrets(directory.secrets, record.uuid, gather_secrets(ready.plan, ready.pool, directory, overrides.secrets))
    try:
        return store.submit(
            record,
            template=ready.checked.template,
            spec=spec.rendered,
            plan=ready.plan,
            pool=ready.pool,
            folder=str(ready.checked.folder),
            events=[event],
        )
    except BaseException:
        remove_secrets(directory.secrets, record.uuid)
        raise


def _check_credentials(ready: Ready, kept: Mapping[str, GroupRecord]) -> None:
    launches = [launch for group in ready.plan.groups if group.name not in kept for launch in group.launches]
    urls = {data.url for launch in launches for data in (*launch.url_inputs, *launch.url_outputs)}
    urls |= {one.url for launch in launches for one in launch.checkpoints if not one.is_shared}
    if not urls:
        return
    from distflow.storage.opening import check_credentials

    for url in sorted(urls):
        check_credentials(parse_url(url), wiring.credentials_for())


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


def wait_for_end(directory: StateDirectory, store: Store, record: WorkflowRecord, format_type: Format) -> None:
    """Follow a workflow to its end. Raises ``WorkflowEnded`` when it did not complete."""
    from distflow.cli.live import follow_workflow

    quiet = format_type is Format.JSON
    try:
        final = follow_workflow(directory, store, record, out=sys.stderr if quiet else sys.stdout, err=sys.stderr)
    except KeyboardInterrupt:
        print(f"\n{record.id} goes on; to end it: distflow workflow cancel {record.id}", file=sys.stderr)
        raise
    except BrokenPipeError:
        raise _NobodyReads(f"{record.id} goes on, and nobody reads its logs here any more") from None
    if quiet:
        from distflow.cli.documents import workflow_json

        print(json.dumps(workflow_json(final, store.plan(final.uuid)), indent=2))
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
