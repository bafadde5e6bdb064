"""Records as JSON documents."""

from __future__ import annotations

import json
from typing import Any

import pytest

from distflow.cli.render.workflow_json import list_json, workflow_json
from distflow.client.specs import output_schema_text
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.plan.model import Plan
from distflow.spec.model import DataSpec, Timeouts
from distflow.state.metrics import Latest
from distflow.state.record import DataKind, DataRef, Outage, TransferProgress, TransferRecord, WorkflowRecord
from distflow.structs import replace
from outputs import assert_documented
from unit.cli.screen import GOLDENS
from unit.state.stored import T0, completed_group, failed_group, plan_of, running_group, task, workflow

STEPS = (
    "scheduling_start_time", "initializing_start_time", "input_download_start_time", "input_download_end_time",
    "output_upload_start_time",
)  # fmt: skip
SHARED_INPUT, WORKER_INPUT = DataSpec(position=0, url="s3://b/in"), DataSpec(position=1, url="s3://b/own")


def with_data(record: WorkflowRecord) -> Plan:
    """Return a plan in which both tasks have one input URL, and the worker has a second one."""
    plan = plan_of(record)
    (group,) = plan.groups
    master, worker = group.launches
    launches = (replace(master, url_inputs=(SHARED_INPUT,)), replace(worker, url_inputs=(SHARED_INPUT, WORKER_INPUT)))
    return replace(plan, groups=(replace(group, launches=launches),))


def steps(record: WorkflowRecord, plan: Plan) -> dict[str, list[str | None]]:
    """Return the seconds of the times of each attempt's steps."""
    document: Any = workflow_json(record, plan, verbose=True)
    return {
        f"{task['name']} {task['retry_id']}": [None if task[name] is None else task[name][-6:] for name in STEPS]
        for task in document["groups"][0]["tasks"]
    }


def test_times_of_a_tasks_steps_are_included_if_known() -> None:
    transfers = (
        TransferRecord(data=DataRef(DataKind.FETCH, 0), task="master", since=T0 + 3, at=T0 + 4, url="s3://b/in", digest="d"),
        TransferRecord(data=DataRef(DataKind.FETCH, 1), task="worker", since=T0 + 2, at=T0 + 7, url="s3://b/own", digest="d"),
        TransferRecord(
            data=DataRef(DataKind.WRITE, 0),
            is_relayed=True,
            task="worker",
            since=T0 + 20,
            at=T0 + 21,
            url="s3://b/out",
            error="no driver",
        ),
        TransferRecord(data=DataRef(DataKind.WRITE, 0), task="worker", since=T0 + 22, at=T0 + 23, url="s3://b/out"),
    )
    group = replace(running_group(), transfer_results=transfers)
    record = replace(workflow(), groups=(group,))
    plan = with_data(record)
    second = int(T0 % 60)

    def at(seconds: int) -> str:
        return f"{(second + seconds) % 60:02}.000"

    assert steps(record, plan) == {
        "master 0": [at(1), at(2), at(3), at(4), None],
        "worker 0": [at(1), at(2), at(2), at(7), at(22)],
    }
    # Nodes fetched the first input themselves, and an older supervisor recorded no start of the second.
    old = replace(group, transfer_results=(replace(transfers[0], is_direct=True), replace(transfers[1], since=None)))
    record = replace(record, groups=(old,))
    assert steps(record, plan)["worker 0"] == [at(1), at(2), None, at(7), None]
    assert steps(record, plan)["master 0"] == [at(1), at(2), None, None, None]
    # The times are unknown for an earlier attempt, and for an attempt that waits for nodes again.
    again = replace(
        group, attempt=1, scheduling_at=T0 + 30, transfer_results=(),
        tasks=tuple(replace(one, attempt=1) for one in group.tasks),
        earlier=tuple(replace(one, state=State.RESCHEDULED) for one in group.tasks),
    )  # fmt: skip
    retried = steps(replace(record, groups=(again,)), plan)
    assert retried["master 1"] == [at(30), None, None, None, None]
    assert retried["master 0"] == [None] * 5


def test_a_workflow_has_a_timeout_if_all_groups_have_the_same() -> None:
    record = replace(workflow(groups=(running_group(),)), parent="digits-old-12")
    (group,) = plan_of(record).groups
    short = replace(group, timeouts=Timeouts(exec_s=60.0, queue_s=5.0))
    same = replace(plan_of(record), groups=(group,))
    other = replace(same, groups=(short, replace(group, name="other", timeouts=Timeouts(exec_s=3600.0, queue_s=5.0))))
    document: Any = workflow_json(record, same)
    assert (document["exec_timeout"], document["queue_timeout"], document["parent_job_id"]) == (3600.0, None, 12)
    document = workflow_json(record, other)
    assert (document["exec_timeout"], document["queue_timeout"]) == (None, 5.0)
    assert (document["groups"][0]["exec_timeout"], document["groups"][0]["queue_timeout"]) == (60.0, 5.0)


def test_documents_match_their_schemas() -> None:
    moving = TransferProgress(sent=1, total=2, bytes_per_s=0.5, at=T0)
    waiting = replace(running_group(), state=State.INITIALIZING, running_at=None)
    unreachable = replace(
        waiting,
        tasks=(
            task("master", State.INITIALIZING, transfer=moving, ended_at=None),
            task("worker", State.RUNNING, outage=Outage(since=T0, error="timeout"), ended_at=None),
        ),
    )
    records = [
        workflow((completed_group(),)),
        workflow((failed_group(),), state=WorkflowState.FAILED, reason=Reason.EXIT_CODE),
        workflow((unreachable,), state=WorkflowState.PENDING),
    ]
    metrics = {"training": Latest(task="master", attempt=0, rank=None, step=3, values={"loss": 0.5})}
    for record in records:
        document: Any = workflow_json(record, plan_of(record), now=T0 + 99, verbose=True, metrics=metrics)
        assert_documented(document, "query")
        with pytest.raises(AssertionError, match="'speed' was unexpected"):
            assert_documented(document | {"speed": 1}, "query")
        with pytest.raises(AssertionError, match="'pool' is a required property"):
            assert_documented({key: value for key, value in document.items() if key != "pool"}, "query")
    assert_documented(list_json(records, now=T0), "list")
    for name, golden in (("why", "why_failed"), ("events", "events"), ("query", "query_failed")):
        assert_documented(json.loads((GOLDENS / f"{golden}.json").read_text(encoding="utf-8")), name)


def test_schemas_name_all_states() -> None:
    definitions = json.loads(output_schema_text("query"))["$defs"]
    assert definitions["workflow"]["properties"]["state"]["enum"] == [state.value for state in WorkflowState]
    for part in ("group", "task"):
        assert definitions[part]["properties"]["state"]["enum"] == [state.value for state in State]
