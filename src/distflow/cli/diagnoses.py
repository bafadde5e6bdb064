"""Diagnoses of a workflow: found from the store and the mirrored logs, and as people and programs see them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distflow.cli.tables import Paint, plain
from distflow.cli.views import cause_words
from distflow.cli.wiring import mirror
from distflow.diagnosis.diagnose import diagnose
from distflow.diagnosis.evidence import case_of
from distflow.diagnosis.model import Diagnosis
from distflow.lifecycle.states import State
from distflow.state.mirror import LAST_LINES
from distflow.supervisor.timeline import attempt_of

if TYPE_CHECKING:
    from distflow.state.directory import StateDirectory
    from distflow.state.record import GroupRecord, WorkflowRecord
    from distflow.state.store import Store

__all__ = ["Examined", "diagnoses_json", "diagnoses_text", "examine", "remedy_of"]

_SHOWN_LINES = 5
"""The last lines of a task, where no rule explains its failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One attempt of a group that was looked at."""

    group: GroupRecord
    attempt: int
    diagnoses: tuple[Diagnosis, ...]

    @property
    def status(self) -> str:
        """As ``query`` shows it; of an earlier attempt that it was rescheduled."""
        return self.group.status if self.attempt == self.group.attempt else State.RESCHEDULED.value


def examine(
    directory: StateDirectory,
    store: Store,
    record: WorkflowRecord,
    *,
    tasks: Collection[str] = (),
    attempt: int | None = None,
) -> list[Examined]:
    """Look at the groups that failed, or whose attempt did, and at those that may hang or wait for ranks that failed unnoticed.

    With ``tasks`` only their words count. What was kept of another workflow ran there, and is told there. Reads the store and
    the mirrored logs, and reaches no node.
    """
    events, logs = store.events(record.uuid), mirror(directory)
    found = []
    for group in record.groups:
        number = group.attempt if attempt is None else attempt
        if group.kept:
            continue
        if (tasks and not any(task.name in tasks for task in group.tasks)) or number > group.attempt:
            continue
        lines = {
            task.name: logs.last_lines(record.uuid, group.name, task.name, number, LAST_LINES)
            for task in attempt_of(group, number)
            if not tasks or task.name in tasks
        }
        case = case_of(group, number, lines, events)
        if number < group.attempt or group.state is State.FAILED or case.silence or case.missing:
            found.append(Examined(group=group, attempt=number, diagnoses=diagnose(case)))
    return found


def diagnoses_text(record: WorkflowRecord, examined: Sequence[Examined], paint: Paint) -> str:
    """Return what ``diagnose`` shows."""
    lines = [f"Workflow ID  {paint.strong(record.id)}", f"Status       {paint.status(record.status)}"]
    for one in examined:
        number = f", attempt {one.attempt + 1} of {one.group.attempt + 1}" if one.group.attempt else ""
        lines += ["", f"{paint.strong(f'Group {one.group.name}')}{number}: {paint.status(one.status)}"]
        for position, diagnosis in enumerate(one.diagnoses):
            lines += [""] * bool(position) + list(_rows(record, diagnosis, paint))
        if not one.diagnoses:
            lines += [f"  {line}" for line in _unknown(record, one)]
    return "".join(f"{line}\n" for line in lines)


def diagnoses_json(record: WorkflowRecord, examined: Sequence[Examined], words: str) -> dict[str, object]:
    """Return what ``diagnose --format-type json`` prints.

    ``message`` says why there are no ``groups``. Of a group: ``retry_id``, and its ``diagnoses``, the most specific first:
    ``key`` (such as ``rank-missing``), ``cause``, ``found``, ``remedy``, and the ``task`` with the ``line`` or ``traceback``
    that shows it. Where there are none, the group's ``message`` says what to look at.
    """
    return {
        "name": record.id,
        "uuid": record.uuid,
        "status": record.status,
        "message": words or None,
        "groups": [
            {
                "name": one.group.name,
                "status": one.status,
                "retry_id": one.attempt,
                "message": None if one.diagnoses else " ".join(line.strip() for line in _unknown(record, one)),
                "diagnoses": [
                    {
                        "key": diagnosis.key,
                        "cause": diagnosis.cause,
                        "found": diagnosis.found or None,
                        "remedy": remedy_of(record, diagnosis),
                        "task": diagnosis.task or None,
                        "line": diagnosis.line or None,
                        "traceback": diagnosis.traceback or None,
                    }
                    for diagnosis in one.diagnoses
                ],
            }
            for one in examined
        ],
    }


def _rows(record: WorkflowRecord, diagnosis: Diagnosis, paint: Paint) -> Iterator[str]:
    yield f"  Cause   {paint.bad(diagnosis.cause)}"
    if diagnosis.found:
        yield f"  Found   {plain(diagnosis.found)}"
    if diagnosis.line:
        yield f"  Shown   [{diagnosis.task}] {plain(diagnosis.line)}"
    for number, line in enumerate(diagnosis.traceback.splitlines()):
        yield f"  {'' if number else 'Shown':<7} | {plain(line)}"
    yield f"  Remedy  {remedy_of(record, diagnosis)}"


def remedy_of(record: WorkflowRecord, diagnosis: Diagnosis) -> str:
    """Return what to do, with the commands for this workflow."""
    return diagnosis.remedy.replace("<id>", record.id)


def _unknown(record: WorkflowRecord, one: Examined) -> Iterator[str]:
    """Say that no rule knows this failure, and where to look."""
    retry = f" -r {one.attempt}" if one.attempt < one.group.attempt else ""
    cause = one.group.cause if one.attempt == one.group.attempt else one.group.earlier_causes[one.attempt]
    if cause is None:
        message = one.group.message.splitlines()[0] if one.group.message else one.status
        yield f"Cause   no task failed by itself: {plain(message)}"
        yield f"Remedy  The timeline shows what happened when: distflow workflow why {record.id}{retry}"
        return
    yield f"Cause   not known; no rule explains this end: {cause_words(cause)}"
    for number, line in enumerate(cause.lines[-_SHOWN_LINES:]):
        yield f"{'' if number else 'Shown':<7} | {plain(line)}"
    yield f"Remedy  Read its whole output: distflow workflow logs {record.id} --task {cause.task}{retry}"
    yield f"        The timeline shows what happened when: distflow workflow why {record.id}{retry}"
    yield "        If it happens again, `debug: true` in the group checks collectives, and"
    yield "        `timeout: {hang_timeout: 10m}` reports a gang that has become silent."
