"""What tasks of earlier workflows wrote, for specs that build on them: where it lies, and why it cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from distflow.cli import wiring
from distflow.cli.bring import Source, bring
from distflow.cli.reading import reading_directory
from distflow.documents.problems import Problem
from distflow.documents.words import did_you_mean
from distflow.errors import InputError, NotFound
from distflow.plan.earlier import Brought, with_earlier
from distflow.plan.model import Plan
from distflow.protocol.attempts import attempt_name
from distflow.spec.model import EarlierInput, WorkflowSpec
from distflow.state.record import GroupRecord, TaskRecord, WorkflowRecord
from distflow.state.store import Store

__all__ = ["bring_earlier", "earlier_problems", "source_of"]


def earlier_problems(spec: WorkflowSpec) -> list[Problem]:
    """Return a finding for each input from an earlier workflow that this machine's record does not have."""
    wanted = list(_wanted(spec))
    if not wanted:
        return []
    found = []
    with wiring.open_store(reading_directory()) as store:
        for one in wanted:
            try:
                _source(one, store)
            except InputError as error:
                found.append(Problem(where=one.mark, message=error.message, hint=error.hint))
    return found


def bring_earlier(spec: WorkflowSpec, plan: Plan, store: Store, blobs: Path) -> Plan:
    """Fetch what the spec takes from earlier workflows, and return its plan complete with that. Raises ``NodeError``."""
    wanted = list(dict.fromkeys((one.workflow, one.task) for one in _wanted(spec)))
    sources = [_source(EarlierInput(position=0, workflow=workflow, task=task), store) for workflow, task in wanted]
    fetched = bring(sources, blobs) if sources else []
    brought = {name: Brought(digest=one.digest, size=one.size) for name, one in zip(wanted, fetched, strict=True)}
    return with_earlier(plan, brought)


def source_of(record: WorkflowRecord, group: GroupRecord, task: TaskRecord, store: Store) -> Source:
    """Return where a task's output lies: where it ran, in however many restarts it was kept since.

    Raises ``InputError`` when it never ran.
    """
    shown = f"{task.name} of {group.kept.id if group.kept else record.id}"
    if task.node is None or task.output_dir is None:
        raise InputError(f"{shown} never ran, so it wrote nothing", hint=f"how it ended: distflow workflow query {record.id}")
    uuid = group.kept.uuid if group.kept else record.uuid
    attempt = attempt_name(uuid, group.name, task.name, task.attempt)
    return Source(shown=shown, attempt=attempt, pool=store.pool(uuid), node=task.node)


def _wanted(spec: WorkflowSpec) -> Iterator[EarlierInput]:
    for group in spec.groups:
        for task in group.tasks:
            yield from task.earlier_inputs


def _source(one: EarlierInput, store: Store) -> Source:
    record = store.find(one.workflow)
    if not record.state.is_final:
        hint = f"wait for its end: distflow workflow query {record.id} --watch"
        raise InputError(f"{record.id} has not ended: {record.status}", hint=hint)
    tasks = {task.name: (group, task) for group in record.groups for task in group.tasks}
    if one.task not in tasks:
        raise NotFound(f"{record.id} has no task `{one.task}`", hint=did_you_mean(one.task, tasks, what="tasks"))
    return source_of(record, *tasks[one.task], store)
