"""Convert stored workflows to ``TrainJob`` and ``Event`` objects, and to messages about failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timezone

from distflow.kubeflow.runtimes import DEFAULT_RUNTIME, RUNTIMES, runtime_in
from distflow.kubeflow.types import (
    TRAINJOB_COMPLETE,
    TRAINJOB_CREATED,
    TRAINJOB_FAILED,
    TRAINJOB_RUNNING,
    Event,
    Step,
    TrainJob,
)
from distflow.lifecycle.states import State, WorkflowState
from distflow.plan.model import Launch, Plan
from distflow.pools.model import Pool
from distflow.state.record import EventRecord as StoredEvent
from distflow.state.record import WorkflowRecord

__all__ = ["DELETED_TAG", "JOB_LABEL", "RUNTIME_LABEL", "events_of", "failure_text", "job_of", "steps_of"]

JOB_LABEL, RUNTIME_LABEL, DELETED_TAG = "kubeflow-trainjob", "kubeflow-runtime", "kubeflow-deleted"

_JOB_STATUS = {
    WorkflowState.PENDING: TRAINJOB_CREATED,
    WorkflowState.RUNNING: TRAINJOB_RUNNING,
    WorkflowState.COMPLETED: TRAINJOB_COMPLETE,
}
_STEP_STATUS = {
    State.WAITING: "Pending",
    State.SCHEDULING: "Pending",
    State.INITIALIZING: "Pending",
    State.RUNNING: "Running",
    State.STOPPING: "Running",
    State.COMPLETED: "Succeeded",
}


def job_of(record: WorkflowRecord, plan: Plan, pool: Pool) -> TrainJob:
    """Return a workflow as a job."""
    name = record.labels[JOB_LABEL]
    runtime = record.labels.get(RUNTIME_LABEL, DEFAULT_RUNTIME)
    launches = {launch.task: launch for group in plan.groups for launch in group.launches}
    steps = []
    for task in (task for group in record.groups for task in group.tasks):
        device, count = _device(launches[task.name])
        steps.append(
            Step(
                name=task.name,
                status=_STEP_STATUS.get(task.state, "Failed"),
                pod_name=f"{name}-{task.name}",
                device=device,
                device_count=count,
            )
        )
    return TrainJob(
        name=name,
        runtime=runtime_in(pool, runtime if runtime in RUNTIMES else DEFAULT_RUNTIME),
        steps=steps,
        num_nodes=len(steps),
        creation_timestamp=_time(record.submitted_at),
        status=_JOB_STATUS.get(record.state, TRAINJOB_FAILED),
    )


def _device(launch: Launch) -> tuple[str, str]:
    if launch.resource.gpu:
        return "gpu", str(launch.resource.gpu)
    return "cpu", str(launch.resource.cpu or (launch.ranks.size if launch.ranks else 1))


def steps_of(record: WorkflowRecord) -> list[str]:
    """Return the names of the steps of a job."""
    return [task.name for group in record.groups for task in group.tasks]


def events_of(record: WorkflowRecord, events: Iterable[StoredEvent]) -> list[Event]:
    """Convert stored events to Kubeflow's, oldest first."""
    name = record.labels[JOB_LABEL]
    return [
        Event(
            involved_object_kind="TrainJob" if event.task is None else "Pod",
            involved_object_name=name if event.task is None else f"{name}-{event.task}",
            message=event.text,
            reason=(event.code or "message").title().replace("_", ""),
            event_time=_time(event.at),
        )
        for event in sorted(events, key=lambda event: event.at)
    ]


def failure_text(record: WorkflowRecord, last_lines: Mapping[str, str]) -> str:
    """Return the message for a failed job: the first cause with its traceback or last lines, and the status of each task.

    ``last_lines`` has the last line of each task's output. If the first cause is known, the lines of the other tasks are shown.
    """
    name = record.labels[JOB_LABEL]
    cause = record.first_cause
    lines = [f"TrainJob {name} is Failed: {record.end_text or record.status}"]
    if cause is not None:
        lines += [f"  {line}" for line in cause.traceback.splitlines() or cause.lines]
    for task in (task for group in record.groups for task in group.tasks):
        exit_code = f", exit_code={task.exit_code}" if task.exit_code is not None else ""
        is_other = cause is not None and task.name in last_lines and task.name != cause.task
        last_line = f": {last_lines[task.name]}" if is_other else ""
        lines.append(f"{task.name}: status={task.status}{exit_code}{last_line}")
    return "\n".join([*lines, f"details: distflow workflow why {record.id}"])


def _time(at: float) -> datetime:
    return datetime.fromtimestamp(at, timezone.utc)
