"""Records, plans and mirrored logs of workflows, like those that the supervisor stores."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.plan.model import GroupPlan, Launch, Plan
from distflow.pools.model import Pool
from distflow.protocol.ends import EndReason
from distflow.spec.model import Timeouts
from distflow.state.directory import StateDirectory
from distflow.state.event_details import Message
from distflow.state.mirror import Mirror
from distflow.state.record import Cause, End, EventRecord, GroupRecord, TaskRecord, WorkflowRecord
from distflow.state.store import Store
from distflow.structs import replace
from distflow.supervisor.process import SupervisorLock

T0 = 1_744_407_067.0
"""2025-04-11 21:31:07 UTC."""

UUID = "0b51e6a2-5bd5-4f0c-9c5e-6d2f4e7b1a{:02}"


def workflow(
    groups: Sequence[GroupRecord] = (),
    *,
    state: WorkflowState = WorkflowState.COMPLETED,
    reason: Reason | None = None,
    name: str = "digits",
    number: int = 1,
    at: float = T0,
    pool: str = "lab",
    warnings: Sequence[str] = (),
) -> WorkflowRecord:
    """Return a workflow. ``number`` is only in its uuid; ``submit`` assigns its number and id."""
    return WorkflowRecord(
        uuid=UUID.format(number),
        id="",
        name=name,
        number=0,
        user="ada",
        pool=pool,
        pool_key=pool,
        submitted_at=at,
        state=state,
        reason=reason,
        started_at=None if state is WorkflowState.PENDING else at + 12,
        ended_at=at + 95 if state.is_final else None,
        groups=tuple(groups),
        warnings=tuple(warnings),
    )


def task(name: str, state: State = State.COMPLETED, **fields: object) -> TaskRecord:
    """Return a task that ran on the node ``<name>-node``. ``fields`` replace these values."""
    plain = TaskRecord(
        name=name,
        lead=name == "master",
        state=state,
        ranks={"master": "0-7", "worker": "8-15"}.get(name, ""),
        node=f"{name}-node",
        gpu_ids=tuple(range(8)),
        pid=4711,
        started_at=T0 + 12,
        ended_at=T0 + 95 if state.is_final else None,
        end=End(ended_at=T0 + 95, exit_code=0) if state is State.COMPLETED else None,
        log_complete=state.is_final,
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


def completed_group() -> GroupRecord:
    """Return a group whose tasks ``master`` and ``worker`` completed."""
    return GroupRecord(
        name="training",
        state=State.COMPLETED,
        tasks=(task("master", outputs=("dataset",), output_dir="/scratch/ada/x/output"), task("worker")),
        scheduling_at=T0 + 1,
        initializing_at=T0 + 2,
        running_at=T0 + 12,
        ended_at=T0 + 95,
    )


def failed_group() -> GroupRecord:
    """Return a group whose task ``worker`` failed first."""
    failed = End(ended_at=T0 + 90, exit_code=1, output_bytes=48)
    stopped = End(ended_at=T0 + 92, reason=EndReason.STOPPED, signal=15)
    message = "exit code 1: RuntimeError: shapes differ"
    cause = Cause(
        task="worker",
        reason=Reason.EXIT_CODE,
        message=message,
        at=T0 + 90,
        node="worker-node",
        ranks="11",
        exit_code=1,
        lines=("Traceback (most recent call last):", '  File "train.py", line 3', "RuntimeError: shapes differ"),
    )
    return GroupRecord(
        name="training",
        state=State.FAILED,
        reason=Reason.EXIT_CODE,
        message=f"worker: {message}",
        cause=cause,
        tasks=(
            task("master", State.FAILED, reason=Reason.PEER_FAILED, end=stopped, ended_at=T0 + 92),
            task("worker", State.FAILED, reason=Reason.EXIT_CODE, message=message, end=failed, ended_at=T0 + 90),
        ),
        scheduling_at=T0 + 1,
        initializing_at=T0 + 2,
        running_at=T0 + 12,
        stopping_at=T0 + 90,
        ended_at=T0 + 92,
    )


def running_group() -> GroupRecord:
    """Return a group whose tasks ``master`` and ``worker`` are running."""
    return GroupRecord(
        name="training",
        state=State.RUNNING,
        tasks=(task("master", State.RUNNING), task("worker", State.RUNNING)),
        scheduling_at=T0 + 1,
        initializing_at=T0 + 2,
        running_at=T0 + 12,
    )


def plan_of(record: WorkflowRecord) -> Plan:
    """Return a plan that fits the record of a workflow."""
    groups = (
        GroupPlan(
            name=group.name,
            launches=tuple(Launch(task=one.name, lead=one.lead, argv=("true",), environment={}) for one in group.tasks),
            timeouts=Timeouts(exec_s=3600.0),
        )
        for group in record.groups
    )
    return Plan(name=record.name, pool=record.pool, groups=tuple(groups))


def submit(
    store: Store,
    record: WorkflowRecord,
    *,
    spec: str = "workflow: {}\n",
    events: Iterable[tuple[str, str | None]] = (),
    backend: str = "ssh",
) -> WorkflowRecord:
    """Store a workflow and its events. ``events`` are pairs of a text and the name of a task."""
    plan, pool = plan_of(record), Pool(name=record.pool, backend=backend, nodes=())
    records = [
        EventRecord(
            at=T0 + 3 * number, details=Message(text=text), workflow=record.uuid, group="training", task=name, attempt=0
        )
        for number, (text, name) in enumerate(events)
    ]
    return store.submit(record, template=f"# template\n{spec}", spec=spec, plan=plan, pool=pool, events=records)


def write_log(folder: Path, reads: Iterable[tuple[float, bytes]]) -> None:
    """Write the mirrored output of an attempt. ``reads`` has the time and the data of each read on the node."""
    folder.mkdir(parents=True, exist_ok=True)
    log, index = folder / "output.log", folder / "output.idx"
    for at, data in reads:
        offset = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            file.write(data)
        with index.open("ab") as file:
            file.write(struct.pack("<dQ", at, offset))


def task_log(directory: StateDirectory, record: WorkflowRecord, name: str, reads: Iterable[tuple[float, bytes]]) -> None:
    """Write the mirrored output of a task in the group ``training``."""
    write_log(Mirror(directory.logs).folder(record.uuid, "training", name, 0), reads)


@contextmanager
def supervised(directory: StateDirectory) -> Iterator[None]:
    """Hold the supervisor's lock, so that no command starts a supervisor."""
    lock = SupervisorLock(directory)
    assert lock.take()
    try:
        yield
    finally:
        lock.release()
