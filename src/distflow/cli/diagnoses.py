"""Diagnoses of a workflow as people and programs see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from distflow.cli.tables import Paint
from distflow.cli.views import cause_words
from distflow.documents.printable import plain

if TYPE_CHECKING:
    from distflow.client.failures import DiagnosedGroup, Diagnosis
    from distflow.state.record import WorkflowRecord

__all__ = ["diagnoses_json", "diagnoses_text", "remedy_of"]

_SHOWN_LINES = 5
"""The last lines of a task, where no rule explains its failure."""


def diagnoses_text(record: WorkflowRecord, examined: Sequence[DiagnosedGroup], paint: Paint) -> str:
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


def diagnoses_json(record: WorkflowRecord, examined: Sequence[DiagnosedGroup], words: str) -> dict[str, object]:
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


def _unknown(record: WorkflowRecord, one: DiagnosedGroup) -> Iterator[str]:
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
