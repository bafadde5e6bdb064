"""Restart ended workflows: submit a new workflow that runs the groups that did not complete."""

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
    """A checked and planned restart, as ``restart`` needs it."""

    previous: PreviousWorkflow
    planned: PlannedWorkflow


def plan_restart(client: Client, workflow: str, overrides: Overrides, *, pool: str | None = None) -> PlannedRestart:
    """Check that a workflow can be restarted and plan the restart, without storing or starting anything.

    Args:
        client: The client whose store has the workflow.
        workflow: The id or uuid of the workflow.
        overrides: The secrets of the workflow, which must be given again because their values were not stored.
        pool: The name of the pool to run in. Default: the pool of the workflow.

    Returns:
        The planned restart, for ``restart``.

    Raises:
        InputError: if the workflow has not ended, has completed, or needs a secret that is not given.
        NotFound: if the workflow or the pool does not exist.
        ProblemsFound: if the spec is no longer valid, for example because a file is gone, or if no pool can hold a group.

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
    """Store a planned restart as a new workflow, and make sure that a supervisor is running.

    Completed groups are kept and do not run again. Their outputs are fetched from the nodes if another group needs them.

    Args:
        client: The client that planned the restart.
        wanted: The result of ``plan_restart``.
        on_stored: Called with the record before the supervisor is awaited.
        on_fetch: Called with the progress of fetched outputs.

    Returns:
        The record of the new workflow, with its id.

    Raises:
        InputError: if a needed output does not exist.
        NodeError: if a needed output cannot be fetched.
        StorageRefused: if this user has no credentials for data at URLs in the spec.
        SupervisorError: if the supervisor does not start. The workflow is stored in this case.

    """
    on_fetch = on_fetch or _ignore
    kept = _keep(client, wanted.previous.record, wanted.planned.plan, on_fetch)
    completed = add_previous_outputs(client, wanted.planned.checked.spec, wanted.planned.plan, on_fetch)
    planned = replace(wanted.planned, plan=completed)
    return store_workflow(client, planned, kept=kept, parent=wanted.previous.record.id, on_stored=on_stored)


def _ignore(_: FetchProgress) -> None:
    """Discard progress."""


def _keep(client: Client, record: WorkflowRecord, plan: Plan, on_fetch: OnFetch) -> Mapping[str, GroupRecord]:
    """Return the records of completed groups for the new workflow, after fetching their outputs that other groups need."""
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
