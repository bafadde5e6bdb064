"""Restarting: a new workflow for the groups of an ended one that did not complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from distflow.client.client import Client, now
from distflow.client.submitting.previous_outputs import (
    FetchProgress,
    OnFetch,
    add_previous_outputs,
    fetch_outputs,
    output_source,
)
from distflow.client.submitting.resubmission import PreviousWorkflow, find_previous
from distflow.client.submitting.specs import Overrides
from distflow.client.submitting.submission import PlannedWorkflow, plan_checked, store_workflow
from distflow.errors import InputError
from distflow.lifecycle.states import State, WorkflowState
from distflow.plan.model import Plan
from distflow.state.record import GroupRecord, Kept, Saved, TaskRecord, WorkflowRecord

__all__ = ["PlannedRestart", "plan_restart", "restart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRestart:
    """A restart that is checked and planned: all that ``restart`` stores."""

    previous: PreviousWorkflow
    planned: PlannedWorkflow


def plan_restart(client: Client, workflow: str, overrides: Overrides, *, pool: str | None = None) -> PlannedRestart:
    """Check that a workflow can be restarted, and plan that; nothing is stored or started.

    Args:
        client: Where the workflow is known.
        workflow: Its id or uuid.
        overrides: The secrets that it had; their values were not kept.
        pool: The pool to run in; else the one that it ran in.

    Raises:
        InputError: for a workflow that has not ended, or that completed.
        NotFound: for an unknown one.
        ProblemsFound: for what has changed around its spec.

    """
    configuration, directory = client.configuration(), client.writable_directory()
    previous = find_previous(client, workflow, overrides)
    if previous is None:
        raise InputError(f"{workflow!r} is no id of a workflow", hint="`distflow workflow list` shows the ones there are")
    record = previous.record
    if not record.state.is_final:
        hint = f"wait for its end, or end it: distflow workflow cancel {record.id}"
        raise InputError(f"{record.id} has not ended: {record.status}", hint=hint)
    if record.state is WorkflowState.COMPLETED:
        hint = f"to run all of it again: distflow workflow submit {record.id}"
        raise InputError(f"{record.id} completed: there is nothing to restart", hint=hint)
    chosen, datasets = previous.choose_pool(configuration, pool, None), client.datasets_url(configuration)
    planned = plan_checked(previous.checked, chosen, overrides, directory.blobs, datasets)
    return PlannedRestart(previous=previous, planned=replace(planned, labels=record.labels, priority=record.priority))


def restart(
    client: Client,
    wanted: PlannedRestart,
    *,
    on_stored: Callable[[WorkflowRecord], None] | None = None,
    on_fetch: OnFetch | None = None,
) -> WorkflowRecord:
    """Store a planned restart as a new workflow and see to it that a supervisor runs it; return its record.

    Groups that completed are kept: they do not run, and the outputs that other groups take of them are fetched from their
    nodes. ``on_stored`` and ``on_fetch`` and the errors are those of ``submit``.
    """
    on_fetch = on_fetch or _ignore
    kept = _keep(client, wanted.previous.record, wanted.planned.plan, on_fetch)
    completed = add_previous_outputs(client, wanted.planned.checked.spec, wanted.planned.plan, on_fetch)
    planned = replace(wanted.planned, plan=completed)
    return store_workflow(client, planned, kept=kept, parent=wanted.previous.record.id, on_stored=on_stored)


def _ignore(_: FetchProgress) -> None:
    """Take no notice."""


def _keep(client: Client, record: WorkflowRecord, plan: Plan, on_fetch: OnFetch) -> Mapping[str, GroupRecord]:
    """Return the groups that completed as they stand in the new workflow, with what those that run again take of them."""
    done = {group.name: group for group in record.groups if group.state is State.COMPLETED}
    wanted = {one.task for group in plan.groups if group.name not in done for launch in group.launches for one in launch.inputs}
    tasks = [(group, task) for group in done.values() for task in group.tasks if task.name in wanted]
    sources = [output_source(client, record, group, task) for group, task in tasks]
    fetched = fetch_outputs(sources, client.directory.blobs, on_fetch)
    at = now()
    saved = {task.name: Saved(at=at, digest=one.digest, size=one.size) for (_, task), one in zip(tasks, fetched, strict=True)}
    return {name: _kept(record, group, saved, at) for name, group in done.items()}


def _kept(record: WorkflowRecord, group: GroupRecord, saved: Mapping[str, Saved], at: float) -> GroupRecord:
    kept = group.kept or Kept(uuid=record.uuid, id=record.id)
    tasks: Sequence[TaskRecord] = [
        TaskRecord(
            name=task.name, lead=task.lead, attempt=task.attempt, state=task.state, ranks=task.ranks, node=task.node,
            outputs=task.outputs, output_dir=task.output_dir, saved=saved.get(task.name), log_complete=True,
        )
        for task in group.tasks
    ]  # fmt: skip
    message = f"kept from {kept.id}"
    return GroupRecord(
        name=group.name, upstream=group.upstream, state=State.COMPLETED, message=message, kept=kept, ended_at=at,
        attempt=group.attempt, tasks=tuple(tasks),
    )  # fmt: skip
