"""Workflows as people and programs see them: pure functions from records to text and to JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from distflow.cli.reach import nodes_away
from distflow.cli.tables import Paint, cut, plain, table
from distflow.cli.times import duration, iso, local_minute, local_second
from distflow.documents.quantities import bytes_text
from distflow.layout.ranks import rank_words
from distflow.lifecycle.states import REASON_TEXT, Reason, State
from distflow.lifecycle.upstream import still_awaited, waits_for
from distflow.state.record import Cause, Event, GroupRecord, Priority, TaskRecord, Transfer, WorkflowRecord

__all__ = [
    "LastLines",
    "changes",
    "elapsed_s",
    "event_json",
    "event_line",
    "list_json",
    "list_table",
    "status_line",
    "workflow_json",
    "workflow_text",
]

LastLines = Mapping[tuple[str, str], str]
"""The last line that tasks printed, by group and task."""

_NO_LINES: LastLines = MappingProxyType({})
_LINE_WIDTH = 60
"""Columns of the last log line where there is no terminal to fit."""
_FEW_TASKS = 8


# For people.


def workflow_text(
    record: WorkflowRecord,
    *,
    now: float,
    last_lines: LastLines = _NO_LINES,
    paint: Paint | None = None,
    width: int | None = None,
    verbose: bool = False,
) -> str:
    """Return what ``query`` shows: the workflow, then each group with its first cause and its tasks."""
    paint = paint or Paint()
    lines = [
        f"Workflow ID  {paint.strong(record.id)}",
        f"Status       {paint.status(record.status)}",
        f"Pool         {record.pool}",
        f"User         {record.user}",
        f"Submitted    {local_minute(record.submitted_at)}",
    ]
    if record.started_at is None:
        lines.append(f"Queued       {duration(_queued_s(record, now))}")
    else:
        lines.append(f"Elapsed      {duration(elapsed_s(record.started_at, record.ended_at, now))}")
    if verbose:
        lines.append(f"UUID         {record.uuid}")
    if verbose or record.priority is not Priority.NORMAL:
        lines.append(f"Priority     {record.priority.value}")
    lines += [f"{name:<12} {words}" for name, words in _marks(record).items() if words]
    if record.cancel is not None:
        words = f": {record.cancel.message}" if record.cancel.message else ""
        lines.append(f"Canceled by  {record.cancel.by}{words}")
    lines += [f"Warning: {warning}" for warning in record.warnings]
    for group in record.groups:
        lines += ["", f"{paint.strong(f'Group {group.name}')}: {paint.status(group.status)}"]
        lines += [f"  {line}" for line in _group_words(group, paint)]
        lines += [f"  {line}" for away in nodes_away(group) for line in _lines(away.words)]
        rows = [_task_row(group, task, now, last_lines, paint, verbose) for task in group.tasks]
        if width is None:
            rows = [(*row[:-1], cut(row[-1], _LINE_WIDTH)) for row in rows]
        lines.append(table(_task_header(verbose), rows, width=width).rstrip("\n"))
        if verbose:
            lines += [f"  {task.name}: {_task_words(task)}" for task in group.tasks if _task_words(task)]
    outputs = [task for group in record.groups for task in group.tasks if task.outputs and task.output_dir]
    if outputs:
        lines += ["", "Outputs stay where they were written:"]
        lines += [f"  {task.name}  {task.node}:{task.output_dir}" for task in outputs]
    return "".join(f"{line}\n" for line in lines)


def list_table(records: Sequence[WorkflowRecord], *, now: float, paint: Paint | None = None) -> str:
    """Return what ``list`` shows."""
    paint = paint or Paint()
    # Few workflows have labels or tags: where none has, there is no column of dashes.
    more = [name for name in ("Labels", "Tags") if any(_marks(record)[name] for record in records)]
    rows = [
        (
            record.user,
            record.id,
            local_minute(record.submitted_at),
            paint.status(record.status),
            record.priority.value,
            *(_marks(record)[name] for name in more),
            record.pool,
            duration(elapsed_s(record.started_at, record.ended_at, now)),
        )
        for record in records
    ]
    return table(("User", "Workflow ID", "Submit Time", "Status", "Priority", *more, "Pool", "Elapsed"), rows)


def _marks(record: WorkflowRecord) -> dict[str, str]:
    labels = " ".join(f"{key}={value}" for key, value in record.labels.items())
    return {"Labels": labels, "Tags": " ".join(record.tags)}


def status_line(record: WorkflowRecord, *, now: float, paint: Paint | None = None) -> str:
    """Return a workflow in one line: ``pytorch-dist-3 RUNNING 0:42  master RUNNING · worker RUNNING``."""
    paint = paint or Paint()
    begun = record.started_at if record.started_at is not None else record.submitted_at
    head = f"{record.id} {paint.status(record.status)} {duration(elapsed_s(begun, record.ended_at, now))}"
    tasks = [(group, task) for group in record.groups for task in group.tasks]
    if len(tasks) <= _FEW_TASKS:
        parts = [f"{task.name} {paint.status(task.status)}{_transfer_words(group, task, ' (', ')')}" for group, task in tasks]
    else:
        counts: dict[str, int] = {}
        for _, task in tasks:
            counts[task.status] = counts.get(task.status, 0) + 1
        parts = [f"{count} {paint.status(status)}" for status, count in counts.items()]
    waiting = [group.message for group in record.groups if group.state is State.SCHEDULING and group.message]
    return f"{head}  {' · '.join(parts)}{f'  ({waiting[0]})' if waiting else ''}"


def changes(before: WorkflowRecord | None, after: WorkflowRecord) -> Iterator[str]:
    """Yield one line for each status that differs between two looks at a workflow; every status when there was none before."""
    if before is None or before.status != after.status:
        yield f"{after.id}: {after.status}"
    old_groups = {group.name: group for group in before.groups} if before else {}
    for group in after.groups:
        old = old_groups.get(group.name)
        if old is None or (old.status, old.message) != (group.status, group.message):
            yield f"{group.name}: {group.status}{f': {group.message}' if group.message else ''}"
        old_away = {away.node: away.error for away in nodes_away(old)} if old else {}
        away = {one.node: one.error for one in nodes_away(group)}
        news = (node for node, error in away.items() if old_away.get(node) != error)
        yield from (f"{node}: out of reach: {plain(away[node].partition(chr(10))[0])}" for node in news)
        yield from (f"{node}: reachable again" for node in old_away if node not in away and not group.state.is_final)
        old_tasks = {task.name: task.status for task in old.tasks} if old else {}
        for task in group.tasks:
            if old_tasks.get(task.name) == task.status:
                continue
            failed_itself = task.state is State.FAILED and task.reason is not Reason.PEER_FAILED
            if (len(group.tasks) <= _FEW_TASKS and before is not None) or failed_itself:
                yield f"{task.name}: {task.status}{f': {_task_words(task)}' if _task_words(task) else ''}"


def event_line(event: Event) -> str:
    """Return an event as OSMO shows it: ``2025/04/11 14:31:07 [worker] started on gpu2``."""
    if event.task is None:
        return f"{local_second(event.at)} {event.text}"
    retry = f" retry-{event.attempt}" if event.attempt else ""
    return f"{local_second(event.at)} [{event.task}{retry}] {event.text.removeprefix(f'{event.task}: ')}"


def elapsed_s(begun: float | None, ended: float | None, now: float | None) -> float | None:
    """Return how long something took, or takes already; ``None`` when it has not begun."""
    end = ended if ended is not None else now
    return None if begun is None or end is None else max(0.0, end - begun)


def _queued_s(record: WorkflowRecord, now: float | None) -> float | None:
    begun = record.started_at if record.started_at is not None else record.ended_at
    return elapsed_s(record.submitted_at, begun, now)


def _group_words(group: GroupRecord, paint: Paint) -> Iterator[str]:
    if group.cause is not None:
        yield paint.bad(f"First cause: {_cause_words(group.cause)}")
        for number, line in enumerate(group.cause.lines):
            yield f"{'Its last lines: ' if number == 0 else '                '}| {plain(line)}"
    elif group.state is State.WAITING:
        yield plain(group.message) or waits_for(group.upstream or ("the groups before it",))
    elif group.state is State.SCHEDULING:
        yield from _lines(f"waits: {group.message}" if group.message else "waits for nodes")
    elif group.message:
        yield from _lines(group.message)


def _lines(message: str) -> Iterator[str]:
    """Yield a message line by line, those after the first set off: remedies have commands that stand on lines of their own."""
    first, *rest = message.splitlines() or [""]
    yield plain(first)
    yield from (f"  {plain(line)}" for line in rest)


def _cause_words(cause: Cause) -> str:
    where = f" on {cause.node}" if cause.node else ""
    ranks = f", {rank_words(cause.ranks)}" if cause.ranks else ""
    message = plain(cause.message) or REASON_TEXT[cause.reason]
    how = _exit_words(cause.exit_code, cause.signal)
    if how and how not in message:
        message += f" ({how})"
    return f"{cause.task}{where}{ranks}: {message}"


def _exit_words(exit_code: int | None, signal: int | None) -> str:
    if signal is not None:
        from distflow.supervisor.verdict import signal_name  # few ended by one

        return signal_name(signal)
    return f"exit code {exit_code}" if exit_code is not None else ""


def _task_header(verbose: bool) -> tuple[str, ...]:
    more = ("Retry ID", "PID", "Start Time") if verbose else ()
    return ("Task", *more, "Node", "Ranks", "GPUs", "Status", "Exit", "Elapsed", "Last log line")


def _task_row(
    group: GroupRecord, task: TaskRecord, now: float, last_lines: LastLines, paint: Paint, verbose: bool
) -> tuple[str, ...]:
    end = task.end
    exit_shown = _exit_words(end.exit_code, end.signal).removeprefix("exit code ") if end else ""
    pid = str(task.pid) if task.pid is not None else ""
    more = (str(task.attempt), pid, local_minute(task.started_at)) if verbose else ()
    return (
        task.name,
        *more,
        task.node or "",
        task.ranks,
        _numbers(task.gpu_ids),
        paint.status(task.status),
        exit_shown,
        duration(elapsed_s(task.started_at, task.ended_at, now)),
        _transfer_words(group, task) or plain(last_lines.get((group.name, task.name), "")).strip(),
    )


def _transfer_words(group: GroupRecord, task: TaskRecord, before: str = "", after: str = "") -> str:
    files = group.moving(task)
    if files is None:
        return ""
    doing = f"{files.output} its output" if files.output else "receives its files"
    share = f"{bytes_text(files.sent)} of {bytes_text(files.total)}"
    return f"{before}{doing}: {share}, {bytes_text(files.bytes_per_s)}/s{after}"


def _task_words(task: TaskRecord) -> str:
    return plain(task.message) if task.message else REASON_TEXT[task.reason] if task.reason else ""


def _numbers(values: Sequence[int]) -> str:
    """Return ``0-3,6`` for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and runs[-1][1] == value - 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# For programs.


def workflow_json(record: WorkflowRecord, *, now: float | None = None, last_lines: LastLines = _NO_LINES) -> dict[str, object]:
    """Return a workflow as ``query --format-type json`` prints it.

    OSMO's names, with its meaning: ``name`` (the id), ``uuid``, ``submitted_by``, ``cancelled_by``, ``submit_time``,
    ``start_time``, ``end_time``, ``queued_time`` and ``duration`` (seconds), ``status``, ``pool``, ``priority``,
    ``labels``, ``tags``, ``warnings``, ``groups``; of a group ``name``, ``status``, its times,
    ``remaining_upstream_groups`` (that have not completed), ``downstream_groups``, ``failure_message``, ``tasks``; of a
    task ``name``, ``retry_id``, ``status``,
    ``failure_message``, ``exit_code``, ``node_name``, ``lead``, its times. Times are ISO 8601 in UTC without a zone; what is
    not known is null.

    distflow's own: ``state`` and ``reason`` (of which ``status`` is made); of a group ``upstream_groups``, ``message`` (what
    it waits for, or why it ended) and ``first_cause`` (``task``, ``node``, ``ranks``, ``reason``, ``message``, ``exit_code``,
    ``signal``, ``time``, ``lines``); of a task ``ranks`` (such as ``8-15``), ``gpu_ids``, ``transfer`` (of its files or output
    that are on their way: ``sent_bytes``, ``total_bytes``, ``bytes_per_second``), ``pid``, ``signal``, ``duration``,
    ``last_line``, ``outputs``, ``output_dir``, ``out_of_reach`` (of its node: ``since`` and ``error``; null when it answers).

    Groups and tasks stand in the order of the spec. Without ``now``, durations of what has not ended are null.
    """
    return {
        "name": record.id,
        "uuid": record.uuid,
        "submitted_by": record.user,
        "cancelled_by": record.cancel.by if record.cancel else None,
        **_workflow_fields(record, now),
        "warnings": list(record.warnings),
        "groups": [_group_json(record, group, now, last_lines) for group in record.groups],
    }


def list_json(records: Sequence[WorkflowRecord], *, now: float) -> dict[str, object]:
    """Return workflows as ``list --format-type json`` prints them: OSMO's names, and ``state`` and ``reason``."""
    return {
        "workflows": [
            {"user": record.user, "name": record.id, "workflow_uuid": record.uuid, **_workflow_fields(record, now)}
            for record in records
        ]
    }


def event_json(event: Event) -> dict[str, object]:
    """Return an event as ``events --format-type json`` prints it."""
    return {
        "sequence": event.sequence,
        "time": iso(event.at),
        "kind": event.kind,
        "group": event.group,
        "task": event.task,
        "retry_id": event.attempt,
        "text": event.text,
    }


def _workflow_fields(record: WorkflowRecord, now: float | None) -> dict[str, object]:
    return {
        "submit_time": iso(record.submitted_at),
        "start_time": iso(record.started_at),
        "end_time": iso(record.ended_at),
        "queued_time": _queued_s(record, now),
        "duration": elapsed_s(record.started_at, record.ended_at, now),
        "status": record.status,
        "state": record.state.value,
        "reason": record.reason.value if record.reason else None,
        "pool": record.pool,
        "priority": record.priority.value,
        "labels": dict(record.labels),
        "tags": list(record.tags),
    }


def _group_json(record: WorkflowRecord, group: GroupRecord, now: float | None, last_lines: LastLines) -> dict[str, object]:
    states = {one.name: one.state for one in record.groups}
    return {
        "name": group.name,
        "status": group.status,
        "state": group.state.value,
        "reason": group.reason.value if group.reason else None,
        "scheduling_start_time": iso(group.scheduling_at),
        "initializing_start_time": iso(group.initializing_at),
        "start_time": iso(group.running_at),
        "end_time": iso(group.ended_at),
        "upstream_groups": list(group.upstream),
        "remaining_upstream_groups": list(still_awaited(group.upstream, states)),
        "downstream_groups": [one.name for one in record.groups if group.name in one.upstream],
        "failure_message": group.message or None if group.state in (State.FAILED, State.CANCELED) else None,
        "message": group.message,
        "first_cause": _cause_json(group.cause) if group.cause else None,
        "tasks": [_task_json(group, task, now, last_lines.get((group.name, task.name))) for task in group.tasks],
    }


def _cause_json(cause: Cause) -> dict[str, object]:
    return {
        "task": cause.task,
        "node": cause.node,
        "ranks": cause.ranks,
        "reason": cause.reason.value,
        "message": cause.message,
        "exit_code": cause.exit_code,
        "signal": cause.signal,
        "time": iso(cause.at),
        "lines": list(cause.lines),
    }


def _transfer_json(files: Transfer) -> dict[str, object]:
    return {"sent_bytes": files.sent, "total_bytes": files.total, "bytes_per_second": round(files.bytes_per_s)}


def _task_json(group: GroupRecord, task: TaskRecord, now: float | None, last_line: str | None) -> dict[str, object]:
    moving = group.moving(task)
    failed = task.state in (State.FAILED, State.CANCELED)
    return {
        "name": task.name,
        "retry_id": task.attempt,
        "lead": task.lead,
        "status": task.status,
        "state": task.state.value,
        "reason": task.reason.value if task.reason else None,
        "failure_message": (_task_words(task) or None) if failed else None,
        "exit_code": task.end.exit_code if task.end else None,
        "signal": task.end.signal if task.end else None,
        "node_name": task.node,
        "ranks": task.ranks,
        "gpu_ids": list(task.gpu_ids),
        "transfer": _transfer_json(moving) if moving else None,
        "pid": task.pid,
        "start_time": iso(task.started_at),
        "end_time": iso(task.ended_at),
        "duration": elapsed_s(task.started_at, task.ended_at, now),
        "last_line": last_line,
        "outputs": list(task.outputs),
        "output_dir": task.output_dir,
        "out_of_reach": _away_json(task),
    }


def _away_json(task: TaskRecord) -> dict[str, object] | None:
    if task.out_of_reach is None or task.state.is_final:
        return None
    return {"since": iso(task.out_of_reach.since), "error": task.out_of_reach.error}
