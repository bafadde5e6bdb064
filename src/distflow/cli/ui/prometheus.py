"""Unfinished workflows as metrics for Prometheus (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distflow.client.client import Client
from distflow.client.measurements.metrics import number
from distflow.client.measurements.samples import find_samples
from distflow.client.workflows import choose_tasks, find_workflow, list_workflows, read_status
from distflow.errors import DistflowError
from distflow.lifecycle.states import State
from distflow.state.search import Search

__all__ = ["prometheus_text"]

_MOST = 500
_HELP = {
    "distflow_workflows": f"Unfinished workflows by pool and status, at most {_MOST} in total.",
    "distflow_task_running": "1 for each running task.",
    "distflow_task_resource": "The latest sample of a task's use of CPU, memory, disk, network or GPUs.",
    "distflow_metric": "The latest metrics of the lowest rank of a group that printed metrics.",
}

_Sample = tuple[str, Mapping[str, object], float]
"""The name of a metric, its labels and its value."""


def prometheus_text(client: Client) -> str:
    """Return the metrics of at most 500 unfinished workflows in the text format of Prometheus."""
    found: dict[str, list[str]] = {name: [] for name in _HELP}
    for name, labels, value in _samples(client):
        shown = ",".join(f'{key}="{_escaped(str(one))}"' for key, one in labels.items() if one is not None)
        found[name].append(f"{name}{{{shown}}} {value:.17g}\n")
    return "".join(f"# HELP {name} {_HELP[name]}\n# TYPE {name} gauge\n{''.join(lines)}" for name, lines in found.items())


def _samples(client: Client) -> Iterator[_Sample]:
    listed = list_workflows(client, Search(unfinished=True), count=_MOST)
    counts: dict[tuple[str, str], int] = {}
    for one in listed:
        counts[one.pool, one.status] = counts.get((one.pool, one.status), 0) + 1
    for (pool, status), count in counts.items():
        yield "distflow_workflows", {"pool": pool, "status": status}, count
    for one in listed:
        try:
            record = find_workflow(client, one.uuid, report_age=False)
            status_of = read_status(client, record)
        except DistflowError:
            continue  # another version of distflow may have stored an unreadable record
        running = [(group, task) for group, task in choose_tasks(record, ()) if task.state is State.RUNNING]
        for _, task in running:
            yield "distflow_task_running", {"workflow": record.id, "task_name": task.name, "node_name": task.node}, 1
        for group, task in running:
            for samples in find_samples(client, record, [(group, task)], attempt=task.attempt, is_recent=True):
                for name, value in samples.latest().items():
                    labels = {"workflow": record.id, "task_name": task.name, "name": name.removeprefix("system/")}
                    yield "distflow_task_resource", labels, value
        for latest in status_of.metrics.values():
            own = {"workflow": record.id, "task_name": latest.task, "rank": latest.rank}
            yield "distflow_metric", {**own, "name": "step"}, latest.step
            for name, scalar in latest.values.items():
                if (value_or_none := number(scalar)) is not None:
                    yield "distflow_metric", {**own, "name": name}, value_or_none


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
