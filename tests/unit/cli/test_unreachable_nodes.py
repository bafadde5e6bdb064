"""Unreachable nodes in ``query``, ``cancel`` and the lines about changes."""

from __future__ import annotations

import json

from distflow.cli.render.workflow_text import cancel_json, cancel_words, changes, left_behind
from distflow.documents.quantities import local_second
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.state.record import GroupRecord, OrphanState, Outage, WorkflowRecord
from distflow.structs import replace
from unit.cli.screen import Screen
from unit.state.stored import T0, running_group, submit, supervised, task, workflow

OUTAGE = Outage(since=T0 + 60, error="me@10.0.0.2:22: it does not answer\nis the machine on?")


def _group_with_unreachable_worker() -> GroupRecord:
    worker = replace(task("worker", State.RUNNING), outage=OUTAGE)
    return replace(running_group(), tasks=(task("master", State.RUNNING), worker))


def _record(group: GroupRecord) -> WorkflowRecord:
    return workflow([group], state=WorkflowState.RUNNING)


def test_query_names_an_unreachable_node_and_its_error(screen: Screen) -> None:
    record = submit(screen.store, _record(_group_with_unreachable_worker()))
    with supervised(screen.directory):
        screen.run("query", record.id)
        assert (
            "  worker-node has been unreachable since 2025/04/11 21:32:07: me@10.0.0.2:22: it does not answer\n"
            "    is the machine on?\n"
        ) in screen.out
        screen.run("query", record.id, "-t", "json")
    tasks = json.loads(screen.out)["groups"][0]["tasks"]
    assert [one["out_of_reach"] for one in tasks] == [
        None,
        {"since": "2025-04-11T21:32:07.000", "began_at": "2025-04-11T21:32:07.000Z", "error": OUTAGE.error},
    ]


def test_an_ended_task_is_not_listed_as_unreachable() -> None:
    ended = replace(task("worker"), outage=OUTAGE)
    assert cancel_json(_record(replace(running_group(), tasks=(task("master"), ended)))) == []


def test_changes_include_lost_and_recovered_nodes() -> None:
    before, after = _record(running_group()), _record(_group_with_unreachable_worker())
    assert list(changes(before, after)) == [f"worker-node: unreachable: {OUTAGE.error.splitlines()[0]}"]
    assert list(changes(after, after)) == []
    assert list(changes(after, before)) == ["worker-node: reachable again"]


def test_cancel_reports_its_effect_on_unreachable_nodes() -> None:
    record = replace(_record(_group_with_unreachable_worker()), id="digits-1")
    lines = list(cancel_words(record, 120.0))
    assert lines[0].startswith(f"worker-node has been unreachable since {local_second(OUTAGE.since)}: me@10.0.0.2:22")
    assert lines[1] == (
        "  worker may still run on worker-node and will be stopped as soon as it responds."
        f" If that takes longer than `node_lost_after` (120 s), {record.id} ends without them."
    )
    assert list(cancel_words(_record(running_group()), 120.0)) == []


def test_a_lost_task_of_an_ended_workflow_is_reported() -> None:
    message = "worker-node has been unreachable for 2 min: it does not answer"
    lost = replace(task("worker", State.FAILED), reason=Reason.NODE_LOST, message=message, orphan=OrphanState.UNREACHABLE)
    record = _record(replace(running_group(), tasks=(task("master"), lost)))
    assert list(left_behind(record)) == [f"worker: {message}; it may still run there until worker-node responds"]
