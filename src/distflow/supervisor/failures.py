"""Determine the final states of tasks, and the first cause of a group's failure. This module does no I/O.

A task that distflow stopped is the cause only if an exception of its own was ending it already. Tasks that only report the loss
of a peer come after tasks that failed by themselves.

A script that starts its ranks without passing on their exit code (another command after them, and no ``set -e``) seems to
succeed. The rest of the world then waits at the rendezvous for ranks that can no longer join. The output of such a task is
therefore searched for a failure of its ranks, although its command ended with code 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from distflow.documents.quantities import bytes_text
from distflow.layout.ranks import rank_label
from distflow.lifecycle.clocks import Clock
from distflow.lifecycle.exits import Action, ExitActions, action_of
from distflow.lifecycle.states import Reason, State
from distflow.plan.model import GroupPlan
from distflow.protocol.ends import EndReason, signal_name
from distflow.protocol.error_file import is_symptom, parse_error_file
from distflow.state.ends import PrintedLine
from distflow.state.record import Cause, End, GroupRecord, HiddenFailure, TaskRecord
from distflow.structs import replace
from distflow.supervisor.error_reports import (
    FailureReport,
    failure_report,
    hidden_failure_report,
    raised_before_stop,
    without_launcher,
)

__all__ = [
    "MissingRanks",
    "by_exit_actions",
    "check_outputs",
    "conclude",
    "end_from",
    "first_cause",
    "hidden_cause",
    "missing_ranks",
    "with_own_failures",
]


_UNATTENDED = "its node had no contact with the supervisor for longer than `self_stop_after`, so the node stopped it"
# The keeper is the parent of the command, and the runner is the parent of the keeper.
_RUNNER_DIED = "the process that guards it on the node was killed, so it was stopped"
_KEEPER_DIED = "the process that runs it on the node was killed, so it was stopped"
_BOTH_DIED = (
    "both processes that guard it on the node were killed (by hand, by the kernel for lack of memory, or by systemd at logout:"
    " `KillUserProcesses=no` in the node's logind.conf prevents that), so it was stopped"
)

_LINES = 20
"""The number of last lines of the task's output that a cause contains."""
_KILLED = re.compile(r"Killed process (\d+),?(?: UID \d+,)? \((.*?)\)")

_TIMES = ("started_at", "stopped_at", "ended_at")
"""The fields of an end that are times of its node's clock."""

_STOPPED: dict[Reason | None, tuple[State, Reason | None, str]] = {
    Reason.CANCELED: (State.CANCELED, Reason.CANCELED, ""),
    Reason.EXEC_TIMEOUT: (State.FAILED, Reason.EXEC_TIMEOUT, ""),
    Reason.PEER_FAILED: (State.FAILED, Reason.PEER_FAILED, ""),
    Reason.START_TIMEOUT: (State.FAILED, Reason.START_TIMEOUT, "stopped, because not all tasks of the gang could be started"),
    None: (State.COMPLETED, None, "stopped, because the lead completed"),
}


def end_from(raw: dict[str, Any], at: float, clock: Clock | None = None) -> End:
    """Convert a node's record of an end, and its times to the supervisor's clock. ``at`` is the time of the observation.

    Unknown fields are ignored, and missing ones have their defaults. The end is never later than its observation.
    """
    known = {name: raw[name] for name in End.__struct_fields__ if name in raw and raw[name] is not None}
    if clock is not None:
        known |= {name: clock.ours(known[name]) for name in _TIMES if name in known}
    if known.get("reason") is not None:
        known["reason"] = EndReason.of(known["reason"])
    kernel = raw.get("kernel") or {}
    known |= {"oom_pid": kernel.get("oom_pid"), "kernel": tuple(kernel.get("lines") or ())}
    return End(**known | {"ended_at": min(at, known.get("ended_at", at)), "clock": clock})


def conclude(task: TaskRecord, group: GroupRecord, end: End) -> TaskRecord:
    """Return the task with its final state, reason and message."""
    state, reason, message = _conclusion(group, end)
    if end.lost_output_bytes:
        message = "; ".join(
            filter(None, [message, f"{bytes_text(end.lost_output_bytes)} of output lost: the node's disk was full or failed"])
        )
    return replace(
        task,
        state=state,
        reason=reason,
        message=message,
        end=end,
        started_at=task.started_at if task.started_at is not None else end.started_at,
        ended_at=end.ended_at,
    )


def with_own_failures(group: GroupRecord, counts: Callable[[str], bool], lines: Mapping[str, tuple[str, ...]]) -> GroupRecord:
    """Return the group after a search for stopped tasks that had failed by themselves (``raised_before_stop``).

    The search takes place only if all failures so far report the loss of a peer. ``counts`` returns whether the failure of the
    named task fails the group. ``lines`` are the last lines of each task's output.
    """
    counted = [task for task in group.tasks if counts(task.name)]
    failed = [task for task in counted if task.state is State.FAILED and task.reason is not Reason.PEER_FAILED]
    if not failed or any(_blame_order(task, failure_report(task.end, lines.get(task.name, ()))) != 1 for task in failed):
        return group
    for task in counted:
        if task.reason is Reason.PEER_FAILED and task.end and raised_before_stop(task.end, lines.get(task.name, ())):
            group = group.with_task(replace(task, reason=Reason.EXIT_CODE, message="failed before it was stopped"))
    return group


def by_exit_actions(task: TaskRecord, actions: ExitActions) -> TaskRecord:
    """Return an ended task after its spec's exit actions: they may count a failure as a success, or the reverse."""
    code, number = (task.end.exit_code, task.end.signal) if task.end else (None, None)
    action = action_of(actions, task.reason, code, number, has_run=task.started_at is not None)
    if task.state is State.FAILED and action is Action.COMPLETE:
        message = f"{task.message}: counts as success (exitActions)"
        return replace(task, state=State.COMPLETED, reason=None, message=message)
    succeeded = task.state is State.COMPLETED and task.end is not None and task.end.is_success
    if succeeded and action in (Action.FAIL, Action.RESCHEDULE):
        message = "exit code 0: counts as failure (exitActions)"
        return replace(task, state=State.FAILED, reason=Reason.EXIT_CODE, message=message)
    return task


_Conclusion = tuple[State, Reason | None, str]


def _conclusion(group: GroupRecord, end: End) -> _Conclusion:  # noqa: C901  one case for each reason
    match end.reason:
        case EndReason.PEER_FAILED if _failed_before_stop(end):
            return _by_command(end)
        case EndReason.STOPPED if group.stop_reason is Reason.PEER_FAILED and _failed_before_stop(end):
            return _by_command(end)
        case EndReason.STOPPED | EndReason.RELEASED:
            if group.state is not State.STOPPING:
                return State.FAILED, Reason.INTERNAL, "stopped on its node, but not by this supervisor"
            return _STOPPED.get(group.stop_reason, (State.FAILED, Reason.PEER_FAILED, ""))
        case EndReason.PEER_FAILED:
            return State.FAILED, Reason.PEER_FAILED, end.message or ""
        case EndReason.ALLOCATION_OVER if group.state is State.STOPPING and not _awaits_cause(group):
            return _STOPPED.get(group.stop_reason, (State.FAILED, Reason.PEER_FAILED, ""))
        case EndReason.ALLOCATION_OVER:
            return State.FAILED, end.allocation or Reason.NODE_LOST, end.message or "its allocation ended"
        case EndReason.UNATTENDED:
            return State.FAILED, Reason.NODE_LOST, end.message or _UNATTENDED
        case _ if end.exit_code == 0:
            return State.COMPLETED, None, ""
        case EndReason.EVICTED:
            return State.FAILED, Reason.EVICTED, end.message or "it used more than it requested"
        case EndReason.START_ERROR:
            return State.FAILED, Reason.START_ERROR, end.message or "the command could not be started"
        case EndReason.START_TIMEOUT:
            return State.FAILED, Reason.START_TIMEOUT, end.message or "the command to start did not arrive in time"
        case EndReason.REBOOTED:
            return State.FAILED, Reason.NODE_LOST, end.message or "its node was rebooted"
        case _ if end.oom_pid is not None:
            return State.FAILED, Reason.OOM_KILLED, _oom_message(end.oom_pid, end.kernel)
        case EndReason.RUNNER_DIED:
            return State.FAILED, Reason.INTERNAL, _RUNNER_DIED
        case EndReason.KEEPER_DIED:
            return State.FAILED, Reason.INTERNAL, _KEEPER_DIED
        case EndReason.BOTH_DIED:
            return State.FAILED, Reason.INTERNAL, _BOTH_DIED
        case EndReason.EXITED | EndReason.UNKNOWN:
            return _by_command(end)


def _awaits_cause(group: GroupRecord) -> bool:
    """Return whether the group stops because of a failed task whose own end is not known yet."""
    return group.stop_reason is Reason.PEER_FAILED and not any(
        (task.state is State.FAILED and task.reason is not Reason.PEER_FAILED) or task.hidden_failure for task in group.tasks
    )


def _failed_before_stop(end: End) -> bool:
    """Return whether the command had raised an exception of its own before it was stopped.

    A process takes a while to end after its exception. Its peers lose the connection to it in that time, and may end sooner.
    """
    error = parse_error_file(end.error)
    if not end.exit_code or error is None or error.raised_at is None or is_symptom(error.message):
        return False
    return end.was_stopped_after(error.raised_at)


def _by_command(end: End) -> _Conclusion:
    """Return the conclusion from the signal or the exit code of the command."""
    if end.signal is not None:
        return State.FAILED, Reason.SIGNAL, f"killed by {signal_name(end.signal)}"
    message = f"exit code {end.exit_code}" if end.exit_code is not None else "ended without an exit code"
    return State.FAILED, Reason.EXIT_CODE, message


def _oom_message(pid: int, kernel: Sequence[str]) -> str:
    message = f"out of memory: the kernel killed process {pid}"
    killed = next((match for match in map(_KILLED.search, kernel) if match and int(match[1]) == pid), None)
    if killed is None:
        return message
    held = re.search(r"anon-rss:(\d+)kB", killed.string)
    return f"{message} ({killed[2]})" + (f", which held {bytes_text(int(held[1]) << 10)}" if held else "")


def first_cause(tasks: Sequence[TaskRecord], lines: Mapping[str, tuple[str, ...]]) -> Cause | None:
    """Return the cause of a group's failure, or ``None`` if tasks failed only because a peer failed, or not at all.

    ``lines`` are the last lines of each task's output. The cause is the earliest of the tasks that failed by themselves. Tasks
    that only report the loss of a peer come after the others, and tasks whose node was lost come last. If the nodes' clocks are
    not known well enough to order two failures, the spec's order decides, and the cause names the others as well.
    """
    failed = [task for task in tasks if task.state is State.FAILED and task.reason is not Reason.PEER_FAILED]
    if not failed:
        return None
    reports = {task.name: failure_report(task.end, lines.get(task.name, ())) for task in failed}
    order = {task.name: _blame_order(task, reports[task.name]) for task in failed}
    suspects = [task for task in failed if order[task.name] == min(order.values())]
    earliest = min(suspects, key=lambda task: task.ended_at or 0.0)
    first, *rivals = [task for task in suspects if not _is_later(task, earliest)]
    end, report = first.end or End(ended_at=first.ended_at or 0.0), reports[first.name]
    return Cause(
        task=first.name,
        reason=first.reason or Reason.INTERNAL,
        message=f"{first.message}: {report.detail}" if report.detail else first.message,
        at=first.ended_at or 0.0,
        node=first.node,
        ranks=report.rank or first.ranks,
        pid=report.pid or end.oom_pid or first.pid,
        exit_code=end.exit_code,
        signal=end.signal,
        rank_signal=report.signal,
        clock=end.clock,
        rivals=tuple(task.name for task in rivals),
        lines=_last_lines(lines.get(first.name, ()), report.rank),
        traceback=report.traceback,
        kernel=end.kernel,
    )


def _last_lines(printed: Sequence[str], rank: str) -> tuple[str, ...]:
    """Return the last lines for a cause: those of the failed rank if each rank has its own output."""
    lines = without_launcher(printed)
    own = [line for line in lines if isinstance(line, PrintedLine) and str(line.rank) == rank]
    return tuple(map(str, (own or lines)[-_LINES:]))


def _is_later(task: TaskRecord, earliest: TaskRecord) -> bool:
    """Return whether the task certainly ended after ``earliest``, given the uncertainty of their nodes' clocks."""
    after_s = (task.ended_at or 0.0) - (earliest.ended_at or 0.0)
    if task.node == earliest.node:
        return after_s > 0
    return after_s > sum(one.end.clock.uncertainty_s for one in (task, earliest) if one.end and one.end.clock)


def _blame_order(task: TaskRecord, report: FailureReport) -> int:
    """Return 0 for a failure by itself, 1 for one that only reports the loss of a peer, 2 for the loss of the node."""
    if task.reason is Reason.NODE_LOST:
        return 2
    is_by_output = task.reason is Reason.EXIT_CODE or (bool(report.detail) and task.reason is not Reason.OOM_KILLED)
    return int(is_by_output and report.is_symptom)


_RENDEZVOUS_S = 120.0
"""Ranks that fail later than this many seconds after the start may have joined the rendezvous before."""


class MissingRanks(Struct, frozen=True, kw_only=True):
    """Ranks that failed unnoticed, and the tasks that wait for them."""

    task: TaskRecord
    """The task of the failed ranks."""
    failure: HiddenFailure
    waiting: tuple[TaskRecord, ...]

    @property
    def message(self) -> str:
        """The problem as a message."""
        waiting = [task.name for task in self.waiting]
        who = f"{waiting[0]} waits" if len(waiting) == 1 else f"{len(waiting)} tasks wait"
        return f"{self.task.name} {_hidden_text(self.failure)}; {who} for {rank_label(self.task.ranks)}"


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
    """Return the first task whose ranks failed unnoticed, and the tasks with ranks that still run.

    Return ``None`` unless both exist.
    """
    found = _first_hidden(group)
    waiting = tuple(task for task in group.tasks if task.ranks and not task.state.is_final)
    if found is None or found.hidden_failure is None or not waiting:
        return None
    return MissingRanks(task=found, failure=found.hidden_failure, waiting=waiting)


def hidden_cause(group: GroupRecord, cause: Cause | None, lines: Callable[[TaskRecord], Sequence[str]]) -> Cause | None:
    """Return the first cause of a failed group: the ranks that failed unnoticed, if there are any, else ``cause``.

    Return ``cause`` also if it is earlier than the end of these ranks' task, or if these ranks may have passed the rendezvous.
    """
    task = _first_hidden(group)
    if task is None or task.hidden_failure is None:
        return cause
    is_later = cause is not None and (task.hidden_failure.may_have_joined or cause.at < (task.ended_at or 0.0))
    if is_later:
        return cause
    printed = lines(task)
    report = hidden_failure_report(printed)
    return Cause(
        task=task.name,
        reason=Reason.EXIT_CODE,
        message=_hidden_text(task.hidden_failure),
        at=task.ended_at or 0.0,
        node=task.node,
        ranks=(report.rank if report else "") or task.ranks,
        pid=(report.pid if report else None) or task.pid,
        exit_code=0,
        clock=task.end.clock if task.end else None,
        lines=_last_lines(printed, report.rank if report else ""),
        traceback=report.traceback if report else "",
    )


def _first_hidden(group: GroupRecord) -> TaskRecord | None:
    """Return the first task that ended with code 0 although its ranks failed."""
    found = [task for task in group.tasks if task.hidden_failure is not None]
    return min(found, key=lambda task: task.ended_at or 0.0, default=None)


def _hidden_failure(task: TaskRecord, lines: Sequence[str]) -> HiddenFailure | None:
    report = hidden_failure_report(lines)
    if report is None:
        return None
    ran_s = (task.ended_at or 0.0) - (task.started_at or 0.0)
    # torch labels tracebacks with the rank only after init_process_group, so a traceback from that call has no label.
    is_joining = "init_process_group" in report.traceback or "rendezvous" in report.traceback
    may_have_joined = report.has_joined or not (is_joining or ran_s < _RENDEZVOUS_S)
    return HiddenFailure(detail=report.detail, may_have_joined=may_have_joined)


def _hidden_text(failure: HiddenFailure) -> str:
    return f"ended with exit code 0 although its ranks failed ({failure.detail})"
