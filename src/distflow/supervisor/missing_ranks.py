"""Tasks whose ranks failed although their command ended with code 0, while other ranks of the world wait for them. Pure.

A script that starts its ranks without passing on their exit code (no ``set -e``, or another command after them) seems to
succeed. The rest of the world then waits at the rendezvous for ranks that can no longer join.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from distflow.layout.ranks import rank_words
from distflow.lifecycle.states import Reason, State
from distflow.plan.model import GroupPlan
from distflow.state.record import Cause, GroupRecord, HiddenFailure, TaskRecord
from distflow.supervisor.error_reports import hidden_failure_report
from distflow.supervisor.printed_errors import without_launcher

__all__ = ["MissingRanks", "check_outputs", "hidden_cause", "missing_ranks"]

_MEET_S = 120.0
"""Seconds after the start; ranks that fail later than this may have met before."""
_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRanks:
    """Ranks that failed unnoticed, and the tasks that wait for them."""

    task: TaskRecord
    failure: HiddenFailure
    waiting: tuple[TaskRecord, ...]

    @property
    def message(self) -> str:
        """The problem as a message."""
        waiting = [task.name for task in self.waiting]
        who = f"{waiting[0]} waits" if len(waiting) == 1 else f"{len(waiting)} tasks wait"
        return f"{self.task.name} {_ended(self.failure)}; {who} for {rank_words(self.task.ranks)}"


def check_outputs(group: GroupRecord, plan: GroupPlan, lines: Callable[[TaskRecord], Sequence[str]]) -> GroupRecord:
    """Return the group after checking the output of every task that ended with code 0 while other ranks still run."""
    if not any(task.ranks and not task.state.is_final for task in group.tasks):
        return group
    for task in group.tasks:
        ended_well = task.state is State.COMPLETED and task.end is not None and task.end.is_success
        if task.ranks and ended_well and task.log_complete and not task.is_output_checked and plan.counts(task.name):
            failure = _hidden_failure(task, lines(task))
            group = group.with_task(replace(task, is_output_checked=True, hidden_failure=failure))
    return group


def missing_ranks(group: GroupRecord) -> MissingRanks | None:
    """Return the first task whose ranks failed unnoticed while others of the world run; ``None`` if there is none."""
    found = _first(group)
    waiting = tuple(task for task in group.tasks if task.ranks and not task.state.is_final)
    if found is None or found.hidden_failure is None or not waiting:
        return None
    return MissingRanks(task=found, failure=found.hidden_failure, waiting=waiting)


def hidden_cause(group: GroupRecord, cause: Cause | None, lines: Callable[[TaskRecord], Sequence[str]]) -> Cause | None:
    """Return the first cause of a failed group: the ranks that failed unnoticed, if the others waited for them."""
    task = _first(group)
    if task is None or task.hidden_failure is None:
        return cause
    is_later = cause is not None and (task.hidden_failure.have_met or cause.at < (task.ended_at or 0.0))
    if is_later:
        return cause
    printed = lines(task)
    report = hidden_failure_report(printed)
    return Cause(
        task=task.name,
        reason=Reason.EXIT_CODE,
        message=_ended(task.hidden_failure),
        at=task.ended_at or 0.0,
        node=task.node,
        ranks=(report.rank if report else "") or task.ranks,
        pid=(report.pid if report else None) or task.pid,
        exit_code=0,
        clock=task.end.clock if task.end else None,
        lines=tuple(map(str, without_launcher(printed)[-_LINES:])),
        traceback=report.traceback if report else "",
    )


def _first(group: GroupRecord) -> TaskRecord | None:
    found = [task for task in group.tasks if task.hidden_failure is not None]
    return min(found, key=lambda task: task.ended_at or 0.0, default=None)


def _hidden_failure(task: TaskRecord, lines: Sequence[str]) -> HiddenFailure | None:
    report = hidden_failure_report(lines)
    if report is None:
        return None
    ran_s = (task.ended_at or 0.0) - (task.started_at or 0.0)
    # torch labels tracebacks with the rank after init_process_group; the frames of that call have no label.
    is_joining = "init_process_group" in report.traceback or "rendezvous" in report.traceback
    have_met = report.has_joined or not (is_joining or ran_s < _MEET_S)
    return HiddenFailure(detail=report.detail, have_met=have_met)


def _ended(failure: HiddenFailure) -> str:
    return f"ended with exit code 0 although its ranks failed ({failure.detail})"
