"""Explain failures of workflows: the first cause, the timeline of a group, and diagnoses with remedies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from distflow.client.client import Client
from distflow.client.workflows import check_command, group_of
from distflow.diagnosis.model import Diagnosis
from distflow.documents.text import listed
from distflow.errors import NotFound
from distflow.lifecycle.states import State
from distflow.state.mirror import LAST_LINES
from distflow.supervisor.failures import missing_ranks
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
    "remedy_of",
]


class GroupFailure(Struct, frozen=True, kw_only=True):
    """The failure of one attempt of a group."""

    group: GroupRecord
    attempt: int
    moments: tuple[Moment, ...]
    """The timeline of the group's nodes around the failure."""

    @property
    def cause(self) -> Cause | None:
        """The first cause of the failure, or ``None`` if no task failed by itself."""
        return cause_of(self.group, self.attempt)

    @property
    def is_last(self) -> bool:
        """Whether this is the latest attempt of the group."""
        return self.attempt == self.group.attempt

    @property
    def clocks(self) -> Mapping[str, Clock]:
        """The clocks that were measured on nodes of the attempt, by the name of the node."""
        ended = (task for task in attempt_of(self.group, self.attempt) if task.end and task.end.clock)
        return {task.node or "": task.end.clock for task in ended if task.end and task.end.clock}


class DiagnosedGroup(Struct, frozen=True, kw_only=True):
    """The diagnoses of one attempt of a group that failed or may hang, or whose use of resources can be improved."""

    group: GroupRecord
    attempt: int
    diagnoses: tuple[Diagnosis, ...]
    """The diagnoses, the most specific first. Empty if no rule applies."""
    is_failure: bool = True
    """Whether the attempt failed, may hang, or waits for ranks whose failure was not detected."""
    findings: tuple[Diagnosis, ...] = ()
    """Findings in the use of resources, such as idle GPUs."""

    @property
    def status(self) -> str:
        """The status of the group as ``query`` shows it, or ``RESCHEDULED`` for an earlier attempt."""
        return self.group.status if self.attempt == self.group.attempt else State.RESCHEDULED.value


def remedy_of(record: WorkflowRecord, diagnosis: Diagnosis) -> str:
    """Return the remedy of a diagnosis, with the workflow's id and pool in its commands."""
    return diagnosis.remedy.replace("<id>", record.id).replace("`distflow pool check`", f"`{check_command(record)}`")


def explain_failures(
    client: Client, record: WorkflowRecord, *, groups: Sequence[str] = (), attempt: int | None = None
) -> list[GroupFailure]:
    """Return the first cause and the timeline of each failed group of a workflow.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        groups: Names of groups. Default: all groups.
        attempt: The attempt to explain, counted from 0. Default: the latest attempt of each group.

    Returns:
        One entry for each failed group, or none if no group failed.

    Raises:
        NotFound: if the workflow does not have one of the groups, or if no group has the attempt.

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
    """Return the groups that failed, or whose given attempt failed. Raises ``NotFound``."""
    for name in names:
        group_of(record, name)
    chosen = [group for group in record.groups if not names or group.name in names]
    if attempt is None:
        return [group for group in chosen if group.state is State.FAILED]
    existing = [group for group in chosen if attempt <= group.attempt]
    if not existing:
        last = max((group.attempt for group in chosen), default=0)
        message = f"{record.id} has no attempt {attempt}" + (f" of {listed(names)}" if names else "")
        raise NotFound(message, hint=f"attempts are counted from 0; the last one is {last}")
    # Groups kept from another workflow ran there, so the other workflow explains them.
    return [group for group in existing if not group.kept and (attempt < group.attempt or group.state is State.FAILED)]


def check_attempt(record: WorkflowRecord, attempt: int | None) -> None:
    """Raise ``NotFound`` if no group of a workflow has this attempt."""
    last = max((group.attempt for group in record.groups), default=0)
    if attempt is not None and attempt > last:
        raise NotFound(f"{record.id} has no attempt {attempt}", hint=f"attempts are counted from 0; the last one is {last}")


def diagnose_groups(
    client: Client,
    record: WorkflowRecord,
    *,
    groups: Collection[str] = (),
    tasks: Collection[str] = (),
    attempt: int | None = None,
    with_findings: bool = False,
) -> list[DiagnosedGroup]:
    """Diagnose groups that failed, that may hang, or that wait for ranks whose failure was not detected.

    This reads the store and the mirrored logs. It does not connect to a node. It skips groups that do not have the attempt,
    and groups that were kept from another workflow, because they ran there.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        groups: Names of the groups to diagnose. Default: all groups.
        tasks: Names of tasks whose output is used. Groups without any of them are skipped. Default: all tasks.
        attempt: The attempt to diagnose, counted from 0. Default: the latest attempt of each group.
        with_findings: Whether to also examine the use of resources, including that of groups without a failure.

    Returns:
        One entry for each diagnosed group, and for each group with findings.

    Raises:
        StateError: if the store cannot be read.

    """
    from distflow.diagnosis.diagnose import diagnose, group_outcome_of

    events = client.store.events(record.uuid)
    found = []
    for group in record.groups:
        number = group.attempt if attempt is None else attempt
        if group.kept or (groups and group.name not in groups):
            continue
        if (tasks and not any(task.name in tasks for task in group.tasks)) or number > group.attempt:
            continue
        lines = {
            task.name: client.mirror.last_lines(record.uuid, group.name, task.name, number, LAST_LINES)
            for task in attempt_of(group, number)
            if not tasks or task.name in tasks
        }
        outcome = group_outcome_of(group, number, lines, events)
        is_failure = bool(number < group.attempt or group.state is State.FAILED or outcome.silence or outcome.hidden_failure)
        findings = _findings(client, record, group, number, lines) if with_findings else ()
        if is_failure or findings:
            found.append(
                DiagnosedGroup(
                    group=group,
                    attempt=number,
                    diagnoses=diagnose(outcome) if is_failure else (),
                    is_failure=is_failure,
                    findings=findings,
                )
            )
    return found


def _findings(
    client: Client, record: WorkflowRecord, group: GroupRecord, attempt: int, lines: Mapping[str, Sequence[str]]
) -> tuple[Diagnosis, ...]:
    """Return the findings for an attempt of a group. ``lines`` are the last lines of the tasks to examine."""
    from distflow.client.measurements.samples import find_samples
    from distflow.diagnosis.resources import RankPace, ResourceUse, find_inefficiencies
    from distflow.state.logs import LogLine
    from distflow.state.metrics import latest, number, read_metrics

    tasks = [task for task in attempt_of(group, attempt) if task.name in lines]
    nodes = {task.name: task.node or "" for task in tasks}
    printed = [LogLine(name, attempt, None, text) for name in nodes for text in lines[name]]
    paces = [
        RankPace(task=one.task, node=nodes[one.task], rank=one.rank, step_s=step_s)
        for one in latest(read_metrics(printed))
        if one.rank is not None and (step_s := number(one.values.get("step_s"))) is not None
    ]
    uses = [
        ResourceUse(node=nodes[task.name], samples=samples)
        for task in tasks
        for samples in find_samples(client, record, [(group.name, task)], attempt=attempt)
    ]
    return find_inefficiencies(uses, paces)
