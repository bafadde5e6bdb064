"""Why workflows fail: the first cause and the timeline of a group, and diagnoses with what to do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distflow.client.client import Client
from distflow.client.workflows import group_of
from distflow.diagnosis.model import Diagnosis
from distflow.errors import NotFound
from distflow.lifecycle.states import State
from distflow.state.mirror import LAST_LINES
from distflow.supervisor.error_reports import signal_name
from distflow.supervisor.missing_ranks import missing_ranks
from distflow.supervisor.timeline import Moment, attempt_of, cause_of, moments

if TYPE_CHECKING:
    from distflow.lifecycle.clocks import Clock
    from distflow.state.record import Cause, GroupRecord, WorkflowRecord

__all__ = [
    "DiagnosedGroup",
    "Diagnosis",
    "GroupFailure",
    "Moment",
    "check_attempt",
    "diagnose_groups",
    "explain_failures",
    "missing_ranks",
    "signal_name",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFailure:
    """Why one attempt of a group failed."""

    group: GroupRecord
    attempt: int
    moments: tuple[Moment, ...]
    """What happened on its nodes around the failure, in order."""

    @property
    def cause(self) -> Cause | None:
        """Its first cause; ``None`` where nothing of it failed by itself."""
        return cause_of(self.group, self.attempt)

    @property
    def is_last(self) -> bool:
        """Whether the group was not tried again after it."""
        return self.attempt == self.group.attempt

    @property
    def clocks(self) -> Mapping[str, Clock]:
        """Those of its nodes, where they were measured."""
        ended = (task for task in attempt_of(self.group, self.attempt) if task.end and task.end.clock)
        return {task.node or "": task.end.clock for task in ended if task.end and task.end.clock}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedGroup:
    """One attempt of a group that failed, or that may hang."""

    group: GroupRecord
    attempt: int
    diagnoses: tuple[Diagnosis, ...]
    """The most specific first; empty where no rule explains it."""

    @property
    def status(self) -> str:
        """As ``query`` shows it; of an earlier attempt that it was rescheduled."""
        return self.group.status if self.attempt == self.group.attempt else State.RESCHEDULED.value


def explain_failures(
    client: Client, record: WorkflowRecord, *, groups: Sequence[str] = (), attempt: int | None = None
) -> list[GroupFailure]:
    """Return why groups of a workflow failed; nothing where none did.

    Args:
        client: Where the workflow is known.
        record: The workflow.
        groups: Only these groups.
        attempt: Of this attempt, counted from 0; else of the last.

    Raises:
        NotFound: for a group or an attempt that the workflow does not have.

    """
    events = client.store.events(record.uuid)
    found = []
    for group in _failed_groups(record, groups, attempt):
        number = group.attempt if attempt is None else attempt
        lines = {
            task.name: client.mirror.last_lines(record.uuid, group.name, task.name, number, LAST_LINES)
            for task in attempt_of(group, number)
        }
        found.append(GroupFailure(group=group, attempt=number, moments=moments(group, number, list(events), lines)))
    return found


def _failed_groups(record: WorkflowRecord, names: Sequence[str], attempt: int | None) -> list[GroupRecord]:
    """Return the groups to explain: those that failed, or whose attempt did."""
    for name in names:
        group_of(record, name)
    asked = [group for group in record.groups if not names or group.name in names]
    if attempt is None:
        return [group for group in asked if group.state is State.FAILED]
    there = [group for group in asked if attempt <= group.attempt]
    if not there:
        most = max((group.attempt for group in asked), default=0)
        raise NotFound(f"{record.id} has no attempt {attempt}", hint=f"attempts are counted from 0; the last is {most}")
    # What was kept of another workflow ran there, and is told there.
    return [group for group in there if not group.kept and (attempt < group.attempt or group.state is State.FAILED)]


def check_attempt(record: WorkflowRecord, attempt: int | None) -> None:
    """Raise ``NotFound`` for an attempt that no group of a workflow has."""
    last = max((group.attempt for group in record.groups), default=0)
    if attempt is not None and attempt > last:
        raise NotFound(f"{record.id} has no attempt {attempt}", hint=f"attempts are counted from 0; the last is {last}")


def diagnose_groups(
    client: Client, record: WorkflowRecord, *, tasks: Collection[str] = (), attempt: int | None = None
) -> list[DiagnosedGroup]:
    """Diagnose the groups that failed, or whose attempt did, and those that may hang or wait for ranks that failed unnoticed.

    Reads the store and the mirrored logs, and reaches no node. Groups that were kept of another workflow ran there, and are
    explained there.

    Args:
        client: Where the workflow is known.
        record: The workflow.
        tasks: Only the output of these tasks counts.
        attempt: Of this attempt, counted from 0; else of the last.

    """
    from distflow.diagnosis.diagnose import diagnose
    from distflow.diagnosis.evidence import case_of

    events = client.store.events(record.uuid)
    found = []
    for group in record.groups:
        number = group.attempt if attempt is None else attempt
        if group.kept:
            continue
        if (tasks and not any(task.name in tasks for task in group.tasks)) or number > group.attempt:
            continue
        lines = {
            task.name: client.mirror.last_lines(record.uuid, group.name, task.name, number, LAST_LINES)
            for task in attempt_of(group, number)
            if not tasks or task.name in tasks
        }
        case = case_of(group, number, lines, events)
        if number < group.attempt or group.state is State.FAILED or case.silence or case.missing:
            found.append(DiagnosedGroup(group=group, attempt=number, diagnoses=diagnose(case)))
    return found
