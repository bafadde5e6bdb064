"""``distflow workflow restart``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from distflow.cli import wiring
from distflow.cli.again import Earlier, earlier
from distflow.cli.bring import bring
from distflow.cli.command import Format, FormatOption, command_app
from distflow.cli.earlier import bring_earlier, source_of
from distflow.cli.reading import WorkflowArgument
from distflow.cli.starting import print_submitted, store_workflow, wait_for_end, warn
from distflow.cli.submission import parse_overrides, plan_for
from distflow.errors import InputError
from distflow.lifecycle.states import State, WorkflowState
from distflow.plan.model import Plan
from distflow.state.directory import StateDirectory
from distflow.state.record import GroupRecord, Kept, Saved, TaskRecord, WorkflowRecord
from distflow.state.store import Store
from distflow.supervisor.clock import SystemClock
from distflow.supervisor.process import ensure_supervisor

__all__ = ["app"]

app = command_app()


@app.command(epilog="Example: distflow workflow restart pipeline-3 --wait")
def restart(
    workflow: WorkflowArgument,
    set_env: Annotated[
        list[str] | None,
        typer.Option("--set-env", metavar="NAME[=VALUE]", help="Give a secret value again; those of the run are not kept."),
    ] = None,
    pool: Annotated[str | None, typer.Option("--pool", "-p", help="Run in this pool; else in the one it ran in.")] = None,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Follow the logs and end as the workflow ends.")] = False,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Run the groups of a workflow that did not complete once more, as a new workflow.

    Groups that completed are kept: they do not run, and what their tasks wrote is fetched from their nodes for those that take
    it. Spec, labels and priority are those of the run; files that the spec sends are read anew.
    """
    overrides = parse_overrides([], [], set_env or [])
    configuration, directory = wiring.configuration(), wiring.state_directory()
    before = earlier(workflow, overrides)
    if before is None:
        raise InputError(f"{workflow!r} is no id of a workflow", hint="`distflow workflow list` shows the ones there are")
    record = before.record
    if not record.state.is_final:
        hint = f"wait for its end, or end it: distflow workflow cancel {record.id}"
        raise InputError(f"{record.id} has not ended: {record.status}", hint=hint)
    if record.state is WorkflowState.COMPLETED:
        hint = f"to run all of it again: distflow workflow submit {record.id}"
        raise InputError(f"{record.id} completed: there is nothing to restart", hint=hint)
    ready = plan_for(
        before.checked, before.pool(configuration, pool, None), overrides, directory.blobs, wiring.datasets_url(configuration)
    )
    warn(ready.checked.warnings)
    with wiring.open_store(directory) as store:
        kept = _keep(before, ready.plan, store, directory)
        ready = replace(ready, plan=bring_earlier(ready.checked.spec, ready.plan, store, directory.blobs))
        new = store_workflow(
            ready, overrides, record.priority, record.labels, directory, store, kept=kept, parent=record.id
        )  # fmt: skip
        try:
            if not (wait and format_type is Format.JSON):
                print_submitted(new, format_type)
        finally:
            # It is stored, whether or not somebody reads its id.
            ensure_supervisor(directory)
        if wait:
            wait_for_end(directory, store, new, format_type)


def _keep(before: Earlier, plan: Plan, store: Store, directory: StateDirectory) -> Mapping[str, GroupRecord]:
    """Return the groups that completed as they stand in the new workflow, with what those that run again take of them."""
    done = {group.name: group for group in before.record.groups if group.state is State.COMPLETED}
    wanted = {one.task for group in plan.groups if group.name not in done for launch in group.launches for one in launch.inputs}
    tasks = [(group, task) for group in done.values() for task in group.tasks if task.name in wanted]
    fetched = bring([source_of(before.record, group, task, store) for group, task in tasks], directory.blobs)
    now = SystemClock().now()
    saved = {task.name: Saved(at=now, digest=one.digest, size=one.size) for (_, task), one in zip(tasks, fetched, strict=True)}
    return {name: _kept(before.record, group, saved, now) for name, group in done.items()}


def _kept(record: WorkflowRecord, group: GroupRecord, saved: Mapping[str, Saved], now: float) -> GroupRecord:
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
        name=group.name, upstream=group.upstream, state=State.COMPLETED, message=message, kept=kept, ended_at=now,
        attempt=group.attempt, tasks=tuple(tasks),
    )  # fmt: skip
