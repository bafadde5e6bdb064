"""Convert records to JSON documents, with OSMO's field names and additional fields of distflow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from distflow.cli.render.metrics import NO_METRICS, NO_USAGE, GroupMetrics, TaskUsage
from distflow.cli.render.workflow_text import NO_LINES, NO_REMEDIES, LastLines, elapsed_s, queued_s, task_words
from distflow.documents.json_keys import name_keys
from distflow.documents.quantities import times
from distflow.lifecycle.states import State, still_awaited
from distflow.state.record import Cause, EventRecord, GroupRecord, TaskRecord, TransferProgress, WorkflowRecord

if TYPE_CHECKING:
    from distflow.plan.model import GroupPlan, Plan
    from distflow.state.metrics import Latest
    from distflow.state.samples import Usage

__all__ = ["cause_json", "event_json", "list_json", "usage_json", "workflow_json", "workflow_key"]


def workflow_json(
    record: WorkflowRecord,
    plan: Plan,
    *,
    now: float | None = None,
    last_lines: LastLines = NO_LINES,
    metrics: GroupMetrics = NO_METRICS,
    usage: TaskUsage = NO_USAGE,
    verbose: bool = False,
    outputs_until: float | None = None,
    remedies: Mapping[str, str] = NO_REMEDIES,
) -> dict[str, object]:
    """Return the JSON document of ``query --format-type json``.

    Times are ISO 8601 in UTC. Each time occurs twice: without a zone under the key listed here (``start_time``), and with its
    zone under the key that ``quantities.ZONED`` has for it (``started_at``). Durations and timeouts are in seconds. Unknown
    values are null.

    Fields with OSMO's names and meanings:

    * workflow: ``name`` (the id), ``uuid``, ``submitted_by``, ``cancelled_by``, ``parent_name`` (the id of the restarted
      workflow), ``parent_job_id`` (the number in that id), ``submit_time``, ``start_time``, ``end_time``, ``queued_time``,
      ``duration``, ``exec_timeout`` and ``queue_timeout`` (null if groups have different values), ``status``, ``pool``,
      ``priority``, ``labels``, ``tags``, ``warnings``, ``groups``;
    * group: ``name``, ``status``, its times, ``remaining_upstream_groups`` (not completed yet), ``downstream_groups``,
      ``failure_message``, ``tasks``;
    * task: ``name``, ``retry_id``, ``status``, ``failure_message``, ``exit_code``, ``node_name``, ``lead``, ``start_time``,
      ``end_time``. The latest attempt also has ``scheduling_start_time`` and ``initializing_start_time`` of its group,
      ``input_download_start_time`` and ``input_download_end_time`` of inputs that this machine fetched for it, and
      ``output_upload_start_time``.

    Additional fields of distflow:

    * the names also under the longer keys that all JSON documents use: ``workflow_id``, ``workflow_uuid``, ``group_name``,
      ``task_name``, and ``node_name`` of ``first_cause``;
    * workflow: ``outputs_until`` (the time until which `distflow node clean` keeps the output files; null if unknown);
    * workflow, group and task: ``state`` and ``reason``, which together give the ``status``;
    * group: ``exec_timeout``, ``queue_timeout``, ``upstream_groups``, ``message`` (the reason for its wait or its end),
      ``left_out`` (tasks that this attempt of an elastic group runs without), ``kept_from`` (for a restart, the id of the
      workflow in which the group completed), ``first_cause``, ``earlier_causes`` (one for each earlier attempt), and
      ``metrics`` (the latest metrics of one rank, which is the lowest rank with metrics in the last log lines: ``task``,
      ``retry_id``, ``rank``, ``step``, ``values``; null if there are none);
    * group: ``remedy`` (from `diagnose`, for a failure; null if unknown);
    * ``first_cause``: ``task``, ``node``, ``ranks``, ``pid``, ``reason``, ``message``, ``exit_code`` of the command,
      ``signal``, ``time`` by this machine's clock, ``time_uncertainty_s``, ``rivals`` (tasks that failed at the same time
      within the uncertainty), ``lines``, ``traceback``, and the messages of the ``kernel``;
    * task: ``ranks`` (such as ``8-15``), ``gpu_ids``, ``transfer`` (of its files or its output: ``sent_bytes``,
      ``total_bytes``, ``bytes_per_second``, the source or target ``url``, and the pulled ``image``), ``pid``, ``signal``,
      ``duration``, ``last_line``, ``outputs``, ``output_dir``, and ``out_of_reach`` (``since`` and ``error`` of its unreachable
      node; null if the node responds);
    * task: ``usage``, the latest use of resources by a running task: ``time``, ``cpu`` (cores), ``memory`` (bytes),
      ``gpu_utilization`` (percent, the mean of its GPUs), ``gpu_memory`` (bytes); null if unknown.

    Groups and tasks are in the order of the spec. The ``exit_code`` of a task is in OSMO's ranges: 137 for a task that was
    killed by SIGKILL, 3001 for a lost node. For a stopped task, it is the exit code of its command.

    Args:
        record: The workflow.
        plan: Its plan.
        now: The current time in seconds since the epoch. Without it, durations without an end are null.
        last_lines: The last line of each attempt's output.
        metrics: The latest metrics of each group.
        usage: The latest use of resources by each running task.
        verbose: Whether to include earlier attempts. They follow the task's latest attempt, the newest first.
        outputs_until: The time until which the output files of an ended workflow are kept, in seconds since the epoch.
        remedies: The remedy for the failure of each group, if it is known.

    """
    return {
        "name": record.id,
        "uuid": record.uuid,
        **workflow_key(record),
        "submitted_by": record.user,
        "cancelled_by": record.cancel.by if record.cancel else None,
        "parent_name": record.parent,
        "parent_job_id": int(record.parent.rpartition("-")[2]) if record.parent else None,
        "exec_timeout": _common(group.timeouts.exec_s for group in plan.groups),
        "queue_timeout": _common(group.timeouts.queue_s for group in plan.groups),
        **_workflow_fields(record, now),
        "warnings": list(record.warnings),
        **times(outputs_until=outputs_until),
        "groups": [
            _group_json(record, plan.group(group.name), group, now, last_lines, usage, verbose)
            | {"metrics": _metrics_json(metrics.get(group.name)), "remedy": remedies.get(group.name)}
            for group in record.groups
        ],
    }


def list_json(records: Sequence[WorkflowRecord], *, now: float) -> dict[str, object]:
    """Return the JSON document of ``list --format-type json``, with OSMO's field names and also ``state`` and ``reason``."""
    return {
        "workflows": [
            {"user": record.user, "name": record.id, **workflow_key(record), **_workflow_fields(record, now)}
            for record in records
        ]
    }


def workflow_key(record: WorkflowRecord) -> dict[str, object]:
    """Return the keys that identify a workflow in JSON documents. Many documents also have OSMO's ``name`` and ``uuid``."""
    return {"workflow_id": record.id, "workflow_uuid": record.uuid}


def event_json(event: EventRecord) -> dict[str, object]:
    """Return an event for ``events --format-type json``."""
    return {
        "sequence": event.sequence,
        **times(time=event.at),
        "kind": event.kind,
        "code": event.code,
        **name_keys(group=event.group, task=event.task),
        "retry_id": event.attempt,
        "text": event.text,
        "fields": asdict(event.details) if event.code is not None else {},
    }


def cause_json(cause: Cause) -> dict[str, object]:
    """Return a first cause for the JSON documents of ``query`` and ``why``."""
    return {
        **name_keys(task=cause.task, node=cause.node),
        "ranks": cause.ranks,
        "pid": cause.pid,
        "reason": cause.reason.value,
        "message": cause.message,
        "exit_code": cause.exit_code,
        "signal": cause.signal,
        **times(time=cause.at),
        "time_uncertainty_s": cause.clock.uncertainty_s if cause.clock else None,
        "rivals": list(cause.rivals),
        "lines": list(cause.lines),
        "traceback": cause.traceback or None,
        "kernel": list(cause.kernel),
    }


def _workflow_fields(record: WorkflowRecord, now: float | None) -> dict[str, object]:
    return {
        **times(submit_time=record.submitted_at),
        **times(start_time=record.started_at),
        **times(end_time=record.ended_at),
        "queued_time": queued_s(record, now),
        "duration": elapsed_s(record.started_at, record.ended_at, now),
        "status": record.status,
        "state": record.state.value,
        "reason": record.reason.value if record.reason else None,
        "pool": record.pool,
        "priority": record.priority.value,
        "labels": dict(record.labels),
        "tags": list(record.tags),
    }


def _group_json(
    record: WorkflowRecord,
    plan: GroupPlan,
    group: GroupRecord,
    now: float | None,
    last_lines: LastLines,
    usage: TaskUsage,
    verbose: bool,
) -> dict[str, object]:
    states = {one.name: one.state for one in record.groups}
    return {
        "name": group.name,
        "group_name": group.name,
        "status": group.status,
        "state": group.state.value,
        "reason": group.reason.value if group.reason else None,
        **times(scheduling_start_time=group.scheduling_at),
        **times(initializing_start_time=group.initializing_at),
        **times(start_time=group.running_at),
        **times(end_time=group.ended_at),
        "exec_timeout": plan.timeouts.exec_s,
        "queue_timeout": plan.timeouts.queue_s,
        "upstream_groups": list(group.upstream),
        "remaining_upstream_groups": list(still_awaited(group.upstream, states)),
        "downstream_groups": [one.name for one in record.groups if group.name in one.upstream],
        "failure_message": group.message or None if group.state in (State.FAILED, State.CANCELED) else None,
        "message": group.message,
        "left_out": list(group.left_out),
        "kept_from": group.kept.id if group.kept else None,
        "first_cause": cause_json(group.cause) if group.cause else None,
        "earlier_causes": [cause_json(cause) for cause in group.earlier_causes],
        "tasks": [
            _task_json(plan, group, task, now, last_lines.get(key), usage.get(key))
            for task in (group.attempts if verbose else group.tasks)
            for key in [(group.name, task.name, task.attempt)]
        ],
    }


def _metrics_json(latest: Latest | None) -> dict[str, object] | None:
    if latest is None:
        return None
    return {
        **name_keys(task=latest.task),
        "retry_id": latest.attempt,
        "rank": latest.rank,
        "step": latest.step,
        "values": dict(latest.values),
    }


def _transfer_json(files: TransferProgress) -> dict[str, object]:
    return {
        "sent_bytes": files.sent,
        "total_bytes": files.total,
        "bytes_per_second": round(files.bytes_per_s),
        "image": files.image or None,
        "url": files.url or None,
    }


def _task_json(
    plan: GroupPlan, group: GroupRecord, task: TaskRecord, now: float | None, last_line: str | None, usage: Usage | None
) -> dict[str, object]:
    moving = group.current_transfer(task)
    failed = task.state in (State.FAILED, State.CANCELED, State.RESCHEDULED)
    return {
        "name": task.name,
        "task_name": task.name,
        "retry_id": task.attempt,
        "lead": task.lead,
        "status": task.status,
        "state": task.state.value,
        "reason": task.reason.value if task.reason else None,
        "failure_message": (task_words(task) or None) if failed else None,
        "exit_code": task.exit_code,
        "signal": task.end.signal if task.end else None,
        "node_name": task.node,
        "ranks": task.ranks,
        "gpu_ids": list(task.gpu_ids),
        "transfer": _transfer_json(moving) if moving else None,
        "pid": task.pid,
        **_steps_json(plan, group, task),
        **times(start_time=task.started_at),
        **times(end_time=task.ended_at),
        "duration": elapsed_s(task.started_at, task.ended_at, now),
        "last_line": last_line,
        "usage": usage_json(usage),
        "outputs": list(task.outputs),
        "output_dir": task.output_dir,
        "out_of_reach": _outage_json(task),
    }


def usage_json(usage: Usage | None) -> dict[str, object] | None:
    """Return the use of resources by a task, or ``None`` if it is unknown."""
    if usage is None:
        return None
    return {
        **times(time=usage.time),
        "cpu": usage.cpu,
        "memory": usage.memory,
        "gpu_utilization": usage.gpu_utilization,
        "gpu_memory": usage.gpu_memory,
    }


def _steps_json(plan: GroupPlan, group: GroupRecord, task: TaskRecord) -> dict[str, object]:
    """Return the times of a task's steps before and after it ran. They are recorded only for the latest attempt."""
    from distflow.supervisor.transfers import (
        fetched_inputs,
        written_outputs,
    )  # imported here because commands without tasks do not need it

    is_latest = task.attempt == group.attempt
    scheduling = group.scheduling_at if is_latest else None
    initializing = group.initializing_at if is_latest else None
    if scheduling is not None and initializing is not None and initializing < scheduling:
        initializing = None  # this is the time of the previous attempt
    fetched = fetched_inputs(plan, group, task.name) if is_latest else []
    begun = [one.since for one in fetched if one.since is not None]
    written = [one.since for one in written_outputs(group, task.name) if one.since is not None] if is_latest else []
    return {
        **times(scheduling_start_time=scheduling),
        **times(initializing_start_time=initializing),
        **times(input_download_start_time=min(begun, default=None)),
        **times(input_download_end_time=max((one.at for one in fetched), default=None)),
        **times(output_upload_start_time=min(written, default=None)),
    }


def _common(values: Iterable[float | None]) -> float | None:
    """Return the common value, or ``None`` if the values differ."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _outage_json(task: TaskRecord) -> dict[str, object] | None:
    if task.outage is None or task.state.is_final:
        return None
    return {**times(since=task.outage.since), "error": task.outage.error}
