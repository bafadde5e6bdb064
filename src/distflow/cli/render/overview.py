"""Format the output of ``distflow top``. The functions are pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distflow.cli.render.metrics import NO_BAR, progress_of, spark, usage_cells, usage_header
from distflow.cli.render.tables import Paint, table
from distflow.cli.render.workflow_json import usage_json, workflow_key
from distflow.cli.render.workflow_text import elapsed_s
from distflow.documents.json_keys import name_keys
from distflow.documents.quantities import bytes_text, count_text, duration_hms, local_second, times
from distflow.documents.text import few, plain
from distflow.lifecycle.states import State

if TYPE_CHECKING:
    from distflow.client.overview import GpuState, NodeState, Overview
    from distflow.client.workflows import WorkflowActivity
    from distflow.state.record import WorkflowRecord

__all__ = ["overview_json", "overview_text"]

_TASKS = 3
_MARKS = {"free": "·", "other": "u", "foreign": "p"}
_OTHERS = {"other": "other users", "foreign": "other programs"}


def overview_text(overview: Overview, *, now: float, paint: Paint, width: int | None) -> str:
    """Return the tables of workflows and nodes.

    Args:
        overview: The workflows and nodes.
        now: The current time in seconds since the epoch.
        paint: The colors.
        width: The width of the terminal in columns, or ``None`` if the output is not a terminal.

    """
    gpus = [gpu for node in overview.nodes for gpu in node.gpus]
    by = [(sum(gpu.state == state for gpu in gpus), text) for state, text in _OTHERS.items()]
    used = sum(map(_is_used, gpus))
    head = f"{count_text(len(overview.workflows), 'workflow')}, {used} of {count_text(len(gpus), 'GPU')} in use"
    head += "".join(f", {count} by {text}" for count, text in by if count) + _unknown(gpus)
    lines = [f"{paint.strong(head)}  {local_second(now)}", ""]
    if overview.workflows:
        usages = {key: one for _, status in overview.workflows for key, one in status.usage.items()}
        header = usage_header(usages)
        rows = [
            _workflow_row(record, task_row, status, header, now, paint)
            for record, status in overview.workflows
            for task_row in range(max(1, _running(record)))
        ]
        lines += table(
            ("Workflow", "Status", "Elapsed", "Progress", "Task", "Node", *header, "Trend"), rows, width=width
        ).splitlines()
        lines.append("")
    if overview.nodes:
        lines += table(
            ("Pool", "Node", "GPUs", "In use", "Use", "GPU memory", "Power", "Hottest", "Tasks"),
            [_node_row(node) for node in overview.nodes],
            width=width,
        ).splitlines()
        marks = [f"{_MARKS[state]} {text}" for state, text in _OTHERS.items() if any(gpu.state == state for gpu in gpus)]
        marks += [f"{NO_BAR} unknown"] if _unknown(gpus) else []
        lines += ["", f"GPUs: {_MARKS['free']} free, {', '.join(marks)}"] if marks else []
        failed = [(node.node, node.error) for node in overview.nodes if node.error]
        errors = [f"{name}: {plain(error)}" for name, error in failed]
        lines += ["", *(paint.grade(error, "warning") for error in errors)] if errors else []
    return "".join(f"{line}\n" for line in lines)


def _is_used(gpu: GpuState) -> bool:
    return gpu.task is not None or gpu.state not in (None, "free")


def _unknown(gpus: Sequence[GpuState]) -> str:
    """Return text with the number of GPUs that are not used by this user's tasks and whose node did not answer, or ``""``."""
    count = sum(gpu.task is None and gpu.state is None for gpu in gpus)
    return f", {count} unknown" if count else ""


def _running(record: WorkflowRecord) -> int:
    return sum(task.state is State.RUNNING for group in record.groups for task in group.tasks)


def _workflow_row(
    record: WorkflowRecord, number: int, status: WorkflowActivity, header: Sequence[str], now: float, paint: Paint
) -> tuple[str, ...]:
    """Return the row of a running task, or of a workflow without any. The first row also has the cells about the workflow."""
    begun = record.started_at if record.started_at is not None else record.submitted_at
    elapsed = duration_hms(elapsed_s(begun, None, now))
    own = (record.id, paint.status(record.status), elapsed) if number == 0 else (" ", " ", " ")
    running = [(group, task) for group in record.groups for task in group.tasks if task.state is State.RUNNING]
    if number >= len(running):
        return (*own, "", "", "", *("" for _ in header), "")
    group, task = running[number]
    latest = status.metrics.get(group.name)
    progress = ""
    if latest is not None and (latest.task == task.name or number == 0):
        share = progress_of(latest)
        progress = f"step {latest.step}" if share is None else f"{share:.0%}"
    usage = status.usage.get((group.name, task.name, task.attempt))
    trend = spark(usage.recent) if usage is not None else ""
    return (*own, progress, task.name, task.node or "", *usage_cells(usage, header), trend)


def _node_row(node: NodeState) -> tuple[str, ...]:
    values = [gpu.values for gpu in node.gpus if gpu.values]
    known = {name: [one[name] for one in values if name in one] for name in ("utilization", "memory", "power", "temperature")}
    bars = "".join(
        _mark(gpu) if gpu.task is None else spark([gpu.values["utilization"]]) if "utilization" in gpu.values else NO_BAR
        for gpu in node.gpus
    )
    use = known["utilization"]
    return (
        node.pool,
        node.node,
        bars,
        f"{sum(map(_is_used, node.gpus))}/{len(node.gpus)}{_unknown(node.gpus)}",
        f"{sum(use) / len(use):.0f}%" if use else "",
        bytes_text(sum(known["memory"])) if known["memory"] else "",
        f"{sum(known['power']):.0f} W" if known["power"] else "",
        f"{max(known['temperature']):.0f} °C" if known["temperature"] else "",
        plain(
            few([*node.tasks, *dict.fromkeys(gpu.by for gpu in node.gpus if gpu.task is None and gpu.by)], ", ", most=_TASKS)
        ),
    )


def _mark(gpu: GpuState) -> str:
    """Return the mark of a GPU that none of this user's tasks in the store uses."""
    return _MARKS.get(gpu.state or "", NO_BAR)


def overview_json(overview: Overview, *, now: float) -> dict[str, object]:
    """Return the JSON document of ``distflow top``.

    A workflow has ``status``, ``pool``, ``user``, ``duration`` in seconds and its unfinished ``tasks`` with ``usage`` as in
    ``query``. A node has ``pool``, ``gpus``, ``tasks`` and ``error``. Each GPU has ``index``, the workflow and task that use
    it, the latest ``values`` (docs/metrics.md), ``state`` (``free``, ``mine``, ``other`` or ``foreign``) and ``used_by``. For
    GPUs that none of this user's tasks in the store uses, ``state`` and ``used_by`` are null if the node did not respond.
    """
    return {
        **times(time=now),
        "workflows": [
            {
                **workflow_key(record),
                "status": record.status,
                "pool": record.pool,
                "user": record.user,
                "duration": elapsed_s(record.started_at, None, now),
                "tasks": [
                    {
                        **name_keys(group=group.name, task=task.name, node=task.node),
                        "status": task.status,
                        "gpu_ids": list(task.gpu_ids),
                        "usage": usage_json(status.usage.get((group.name, task.name, task.attempt))),
                    }
                    for group in record.groups
                    for task in group.tasks
                    if not task.state.is_final
                ],
            }
            for record, status in overview.workflows
        ],
        "nodes": [
            {
                "pool": node.pool,
                **name_keys(node=node.node),
                "gpus": [_gpu_json(gpu) for gpu in node.gpus],
                "tasks": list(node.tasks),
                "error": node.error or None,
            }
            for node in overview.nodes
        ],
    }


def _gpu_json(gpu: GpuState) -> dict[str, object]:
    workflow, _, task = (gpu.task or "").partition("/")
    return {
        "index": gpu.index,
        "workflow_id": workflow or None,
        **name_keys(task=task or None),
        "values": dict(gpu.values),
        "state": gpu.state,
        "used_by": gpu.task or gpu.by or None,
    }
