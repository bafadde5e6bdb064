"""``query``: the text and JSON about a workflow, and the exit codes for scripts."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator

import pytest

from distflow.cli.render.live import watch_workflow
from distflow.client.client import Client
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.protocol.ends import EndReason
from distflow.state.event_details import CancelRequested
from distflow.state.record import CancelRequest, End, EventRecord, GroupRecord, TransferProgress
from distflow.structs import replace
from unit.cli.screen import Screen, Terminal, assert_golden
from unit.state.stored import (
    T0,
    completed_group,
    failed_group,
    running_group,
    submit,
    supervised,
    task,
    task_log,
    workflow,
)


def store_failed_workflow(screen: Screen) -> str:
    """Store a workflow whose worker failed, with the output of its tasks, and return its id."""
    record = submit(screen.store, workflow([failed_group()], state=WorkflowState.FAILED, reason=Reason.EXIT_CODE))
    task_log(screen.directory, record, "worker", [(T0 + 90, b"epoch 1\nRuntimeError: \x1b[31mshapes\x1b[0m differ\n")])
    task_log(screen.directory, record, "master", [(T0 + 90, b"epoch 1\n 10%\r" + b" 20% " * 50)])
    return record.id


def test_a_failure_names_its_first_cause(screen: Screen) -> None:
    assert screen.run("query", store_failed_workflow(screen)) == 0
    assert screen.err == ""
    assert_golden("query_failed.txt", screen.out)


def test_verbose_adds_ids_processes_and_start_times(screen: Screen) -> None:
    assert screen.run("query", store_failed_workflow(screen), "-v") == 0
    assert_golden("query_failed_verbose.txt", screen.out)


def test_json_output_is_one_document(screen: Screen) -> None:
    assert screen.run("query", store_failed_workflow(screen), "--format-type", "json") == 0
    assert_golden("query_failed.json", screen.out)
    assert json.loads(screen.out)["groups"][0]["first_cause"]["task"] == "worker"


def store_retried_workflow(screen: Screen) -> str:
    """Store a workflow that completed in its second attempt, and return its id."""
    before, now = failed_group(), completed_group()
    assert before.cause is not None
    group = replace(
        now,
        attempt=1,
        tasks=tuple(replace(one, attempt=1) for one in now.tasks),
        earlier=tuple(replace(one, state=State.RESCHEDULED) for one in before.tasks),
        earlier_causes=(before.cause,),
    )
    return submit(screen.store, workflow([group])).id


def test_earlier_attempts_are_listed_with_their_causes(screen: Screen) -> None:
    assert screen.run("query", store_retried_workflow(screen)) == 0
    assert_golden("query_retried.txt", screen.out)


def test_verbose_shows_every_attempt(screen: Screen) -> None:
    assert screen.run("query", store_retried_workflow(screen), "-v") == 0
    assert_golden("query_retried_verbose.txt", screen.out)


def test_a_transfer_of_files_is_shown_until_it_is_complete(screen: Screen) -> None:
    progress = TransferProgress(sent=340 << 20, total=3 << 30, bytes_per_s=112.4 * 2**20, at=T0 + 5)
    waiting = replace(running_group(), state=State.INITIALIZING, tasks=(task("master", State.INITIALIZING, transfer=progress),))
    record = submit(screen.store, workflow([waiting], state=WorkflowState.PENDING))
    with supervised(screen.directory):
        assert screen.run("query", record.uuid) == 0
        assert "Copying files: 340 MiB of 3.0 GiB, 112 MiB/s" in screen.out
        assert screen.run("query", record.uuid, "-t", "json") == 0
    transfer = json.loads(screen.out)["groups"][0]["tasks"][0]["transfer"]
    assert transfer == {
        "sent_bytes": 340 << 20, "total_bytes": 3 << 30, "bytes_per_second": 117859942, "image": None, "url": None,
    }  # fmt: skip
    screen.store.save([replace(record, groups=(running_group(),), state=WorkflowState.RUNNING)], [])
    with supervised(screen.directory):
        screen.run("query", record.uuid)
    assert "Copying files" not in screen.out


def test_outputs_and_warnings_are_shown(screen: Screen) -> None:
    record = submit(screen.store, workflow([completed_group()], warnings=["spec.yaml:9: outputs stay on the node"]))
    assert screen.run("query", record.uuid) == 0
    assert_golden("query_completed.txt", screen.out)


@pytest.mark.parametrize(
    ("state", "reason", "code"),
    [
        (WorkflowState.COMPLETED, None, 0),
        (WorkflowState.FAILED, Reason.EXIT_CODE, 1),
        (WorkflowState.CANCELED, Reason.CANCELED, 1),
        (WorkflowState.RUNNING, None, 4),
        (WorkflowState.PENDING, None, 4),
    ],
)
def test_exit_status_depends_on_the_state(screen: Screen, state: WorkflowState, reason: Reason | None, code: int) -> None:
    group = completed_group() if state.is_final else running_group()
    record = submit(screen.store, workflow([group], state=state, reason=reason))
    with supervised(screen.directory):
        assert screen.run("query", record.id, "--exit-status") == code
        assert record.id in screen.out
        assert screen.run("query", record.id) == 0


def test_a_waiting_group_is_shown_with_its_reason(screen: Screen) -> None:
    waits = GroupRecord(
        name="training",
        state=State.SCHEDULING,
        message="Waiting for nodes: needs 16 GPUs on 2 nodes, 8 are free",
        tasks=tuple(
            replace(task(name, State.SCHEDULING), node=None, gpu_ids=(), started_at=None, pid=None)
            for name in ("master", "worker")
        ),
    )
    after = GroupRecord(name="report", state=State.WAITING, tasks=(replace(task("report", State.WAITING), started_at=None),))
    last = replace(after, name="mail", upstream=("training", "report"))
    record = submit(screen.store, workflow([waits, after, last], state=WorkflowState.PENDING))
    with supervised(screen.directory):
        screen.run("query", record.id)
    assert "Waiting for nodes: needs 16 GPUs on 2 nodes, 8 are free" in screen.out
    assert "waits for the groups before it" in screen.out
    assert "Group mail: WAITING\n  waits for training and report\n" in screen.out
    assert screen.err == ""


def test_the_user_and_the_reason_of_a_cancel_are_shown(screen: Screen) -> None:
    group = replace(
        failed_group(), cause=None, state=State.CANCELED, reason=Reason.CANCELED, message="canceled by bob: wrong data"
    )
    record = submit(screen.store, workflow([group], state=WorkflowState.CANCELED, reason=Reason.CANCELED))
    event = EventRecord(at=T0, details=CancelRequested(user="bob"), workflow=record.uuid)
    screen.store.request_cancel(record.uuid, CancelRequest(at=T0, by="bob", message="wrong data"), event)
    screen.run("query", record.id)
    assert "Status       FAILED_CANCELED\n" in screen.out
    assert "Canceled by  bob: wrong data\n" in screen.out
    screen.run("query", record.id, "-t", "json")
    assert json.loads(screen.out)["cancelled_by"] == "bob"


def test_the_age_of_an_old_status_is_reported(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    record = submit(screen.store, workflow([running_group()], state=WorkflowState.RUNNING), events=[("submitted", None)])
    # Do not start a supervisor: this test checks only the message.
    monkeypatch.setattr(Client, "wake", lambda _: None)
    assert screen.run("query", record.id, "-t", "json") == 0
    assert screen.err == "no supervisor was running, so this status is from 2025/04/11 21:31:07; a supervisor is starting now\n"
    assert json.loads(screen.out)["status"] == "RUNNING"


def test_an_unknown_workflow_is_an_error_with_similar_ids(screen: Screen) -> None:
    submit(screen.store, workflow([completed_group()]))
    assert screen.run("query", "digits-7") == 2
    assert screen.err == "error: there is no workflow `digits-7`\nsimilar ids: digits-1\n"
    assert screen.out == ""
    assert screen.run("query", "digits-7", "--format-type=json") == 2
    assert json.loads(screen.out)["error"]["code"] == 2


def test_watch_prints_every_change_and_ends_with_the_workflow(screen: Screen) -> None:
    record = submit(screen.store, workflow([running_group()], state=WorkflowState.RUNNING))
    ended = replace(record, state=WorkflowState.FAILED, reason=Reason.EXIT_CODE, groups=(failed_group(),))
    steps: Iterator[Callable[[], object]] = iter([lambda: None, lambda: screen.store.save([ended], [])])
    out = io.StringIO()
    with supervised(screen.directory):
        final = watch_workflow(screen.client, record, lambda one: one.status, out=out, wait=lambda _: next(steps)())
    assert final.state is WorkflowState.FAILED
    assert out.getvalue().splitlines() == [
        "digits-1: RUNNING",
        "training: RUNNING",
        "digits-1: FAILED",
        "training: FAILED: worker: exit code 1: RuntimeError: shapes differ",
        "master: FAILED: another task of its group failed first, so it was stopped",
        "worker: FAILED: exit code 1: RuntimeError: shapes differ",
    ]


def test_watch_on_a_terminal_is_erased_at_the_end(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    record = submit(screen.store, workflow([running_group()], state=WorkflowState.RUNNING))
    ended = replace(record, state=WorkflowState.COMPLETED, groups=(completed_group(),))
    out = Terminal()
    with supervised(screen.directory):
        watch_workflow(
            screen.client,
            record,
            lambda one: f"it is {one.status}\n",
            out=out,
            wait=lambda _: screen.store.save([ended], []),
        )
    assert "it is RUNNING" in out.getvalue()
    assert out.getvalue().endswith("\x1b[1A\x1b[2K")


def test_watch_of_an_ended_workflow_prints_it_once(screen: Screen) -> None:
    assert screen.run("query", store_failed_workflow(screen), "--watch", "--exit-status") == 1
    assert screen.out.startswith("digits-1: FAILED\n")
    assert "First cause: worker on worker-node, rank 11" in screen.out
    assert screen.run("query", "digits-1", "--watch", "-t", "json") == 0
    assert json.loads(screen.out)["status"] == "FAILED"


@pytest.mark.parametrize(
    ("end", "code", "shown"),
    [
        (End(ended_at=T0 + 92, reason=EndReason.STOPPED, exit_code=17), 17, " 17 "),
        (End(ended_at=T0 + 92, reason=EndReason.STOPPED, exit_code=0), 0, " 0 "),
        (End(ended_at=T0 + 92, reason=EndReason.STOPPED, signal=15), 143, " SIGTERM "),
    ],
)
@pytest.mark.parametrize("reason", [Reason.PEER_FAILED, Reason.EXEC_TIMEOUT])
def test_a_stopped_task_has_its_exit_code_in_text_and_json(
    screen: Screen, reason: Reason, end: End, code: int, shown: str
) -> None:
    group = failed_group()
    master, worker = group.tasks
    stopped = replace(master, reason=reason, end=end)
    record = submit(
        screen.store,
        workflow([replace(group, tasks=(stopped, worker))], state=WorkflowState.FAILED, reason=Reason.EXIT_CODE),
    )
    assert screen.run("query", record.id, "-t", "json") == 0
    assert json.loads(screen.out)["groups"][0]["tasks"][0]["exit_code"] == code
    assert screen.run("query", record.id) == 0
    assert shown in next(line for line in screen.out.splitlines() if line.lstrip().startswith("master "))
