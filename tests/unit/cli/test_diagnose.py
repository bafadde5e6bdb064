"""``diagnose``: its text and JSON, and its messages if there is no diagnosis."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from distflow.cli.options import Format
from distflow.cli.workflow.submission import wait_for_end
from distflow.errors import WorkflowEnded
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.state.event_details import HangOver, HangSuspected
from distflow.state.record import EventRecord, Kept, WorkflowRecord
from distflow.structs import replace
from distflow.testing.backend import Behavior
from unit.cli.screen import Screen, assert_golden
from unit.state.stored import T0, completed_group, failed_group, running_group, submit, supervised, task_log, workflow
from unit.supervisor.gangs import Driver, group_plan
from unit.supervisor.gangs import workflow as planned

MISMATCH = (
    b"[rank11]: RuntimeError: Detected mismatch between collectives on ranks. Rank 11 is running collective: "
    b"CollectiveFingerPrint(SequenceNumber=7, OpType=ALLREDUCE, TensorShape=[2, 3], TensorDtypes=Float), but Rank 0 is running "
    b"collective: CollectiveFingerPrint(SequenceNumber=7, OpType=BARRIER).\n"
)


def store_failed_workflow(screen: Screen) -> WorkflowRecord:
    """Store a workflow whose worker failed because of mismatched collectives; its master then lost the connection."""
    record = submit(screen.store, workflow([failed_group()], state=WorkflowState.FAILED, reason=Reason.EXIT_CODE))
    task_log(screen.directory, record, "master", [(T0 + 90, b"RuntimeError: Connection closed by peer\n")])
    task_log(screen.directory, record, "worker", [(T0 + 90, b"step 12\n" + MISMATCH)])
    return record


def test_diagnose_prints_cause_and_remedy(screen: Screen) -> None:
    record = store_failed_workflow(screen)
    assert screen.run("diagnose", record.id) == 0
    assert screen.err == ""
    assert_golden("diagnose.txt", screen.out)


def test_json_output_is_one_document(screen: Screen) -> None:
    record = store_failed_workflow(screen)
    assert screen.run("diagnose", record.id, "-t", "json") == 0
    assert_golden("diagnose.json", screen.out)
    json.loads(screen.out)


def test_why_names_the_diagnosis(screen: Screen) -> None:
    record = store_failed_workflow(screen)
    assert screen.run("why", record.id) == 0
    assert "\nDiagnosis  ranks called different collectives\nRemedy     Every rank must call" in screen.out
    assert screen.out.endswith(f"\nDetails: distflow workflow diagnose {record.id}\n")


def test_a_remedy_names_the_pool_to_check(screen: Screen) -> None:
    record = submit(screen.store, workflow([failed_group()], state=WorkflowState.FAILED, reason=Reason.EXIT_CODE))
    line = b"gpu2:812 NCCL WARN Mismatched NCCL version detected : rank 8 version 22705 rank 0 version 22703\n"
    task_log(screen.directory, record, "worker", [(T0 + 90, line)])
    assert screen.run("diagnose", record.id, "-t", "json") == 0
    assert f"`distflow pool check --pool {record.pool}` shows the torch of each node" in screen.out


def output_after_logs(
    screen: Screen, capsys: pytest.CaptureFixture[str], record: WorkflowRecord, *, fetches: bool = False
) -> str:
    """Return the output of `submit --wait` that follows the logs of an ended workflow."""
    with contextlib.suppress(WorkflowEnded):
        wait_for_end(screen.client, record, Format.TEXT, fetches=fetches)
    *_, err = capsys.readouterr()
    return err[err.index("First cause:") :] if "First cause:" in err else err.splitlines(keepends=True)[-1]


def test_submit_wait_ends_with_cause_remedy_and_commands(screen: Screen, capsys: pytest.CaptureFixture[str]) -> None:
    group = failed_group()
    assert group.cause is not None
    traceback_lines = ('  File "train.py", line 3, in step', "    dist.all_reduce(loss)", "RuntimeError: shapes differ")
    cause = replace(group.cause, traceback="\n".join(("Traceback (most recent call last):", *traceback_lines)))
    tasks = tuple(replace(one, output_dir="/x/output") for one in group.tasks)
    report = replace(
        group, name="report", state=State.FAILED, reason=Reason.UPSTREAM, cause=None, tasks=(), message="training failed"
    )
    record = submit(
        screen.store,
        workflow([replace(group, cause=cause, tasks=tasks), report], state=WorkflowState.FAILED, reason=Reason.EXIT_CODE),
    )
    task_log(screen.directory, record, "worker", [(T0 + 90, MISMATCH)])
    assert_golden("end_failed.txt", output_after_logs(screen, capsys, record))
    assert "Outputs:" not in output_after_logs(screen, capsys, record, fetches=True)
    assert screen.run("query", record.id) == 0
    assert "\n  Remedy: Every rank must call" in screen.out
    assert "\n    |     dist.all_reduce(loss)\n" in screen.out
    assert screen.run("query", record.id, "-t", "json") == 0
    assert json.loads(screen.out)["groups"][0]["remedy"].startswith("Every rank must call")


def test_submit_wait_ends_with_the_outputs_of_a_completed_workflow(screen: Screen, capsys: pytest.CaptureFixture[str]) -> None:
    record = submit(screen.store, workflow([completed_group()]))
    found = "Outputs: on the nodes at least until Apr 25, 2025 21:32 UTC: distflow workflow fetch digits-1\n"
    assert output_after_logs(screen, capsys, record) == found


def test_submit_wait_ends_with_the_command_for_details_if_there_is_no_first_cause(
    screen: Screen, capsys: pytest.CaptureFixture[str]
) -> None:
    group = replace(failed_group(), cause=None, reason=Reason.UPSTREAM, message="training failed")
    record = submit(screen.store, workflow([group], state=WorkflowState.FAILED, reason=Reason.UPSTREAM))
    assert output_after_logs(screen, capsys, record) == f"Details: distflow workflow query {record.id}\n"


def test_diagnose_uses_only_the_output_of_the_selected_tasks(screen: Screen) -> None:
    record = store_failed_workflow(screen)
    assert screen.run("diagnose", record.id, "--task", "master", "-t", "json") == 0
    (group,) = json.loads(screen.out)["groups"]
    assert [one["key"] for one in group["diagnoses"]] == ["peer-died"]
    assert screen.run("diagnose", record.id, "--task", "mastr") == 2
    assert "did you mean `master`?" in screen.err


def test_a_failure_that_matches_no_rule_is_reported_as_unknown(screen: Screen) -> None:
    record = submit(screen.store, workflow([failed_group()], state=WorkflowState.FAILED, reason=Reason.EXIT_CODE))
    assert screen.run("diagnose", record.id) == 0
    assert "Cause   unknown: no rule matches this failure: worker on worker-node, rank 11: exit code 1: Runtime" in screen.out
    assert "  Shown   | Traceback (most recent call last):\n" in screen.out
    assert f"distflow workflow logs {record.id} --task worker\n" in screen.out
    assert screen.run("why", record.id) == 0
    assert "diagnose" not in screen.out


def test_an_earlier_attempt_is_diagnosed_on_request(screen: Screen) -> None:
    before, now = failed_group(), completed_group()
    assert before.cause is not None
    group = replace(
        now,
        attempt=1,
        tasks=tuple(replace(one, attempt=1) for one in now.tasks),
        earlier=tuple(replace(one, state=State.RESCHEDULED) for one in before.tasks),
        earlier_causes=(before.cause,),
    )
    record = submit(screen.store, workflow([group]))
    task_log(screen.directory, record, "worker", [(T0 + 90, MISMATCH)])
    assert screen.run("diagnose", record.id) == 0
    assert "there is no failure to explain" in screen.out
    assert screen.run("diagnose", record.id, "-r", "0") == 0
    assert "Group training, attempt 1 of 2: RESCHEDULED" in screen.out
    assert "ranks called different collectives" in screen.out
    assert screen.run("diagnose", record.id, "-r", "2") == 2
    assert "the last one is 1" in screen.err


def test_attempts_of_a_kept_group_are_not_explained_in_the_restart(screen: Screen) -> None:
    tasks = tuple(replace(one, name=f"kept-{one.name}", attempt=1) for one in completed_group().tasks)
    kept = replace(completed_group(), name="kept", tasks=tasks, attempt=1, kept=Kept(uuid="0" * 32, id="digits-7"))
    record = submit(screen.store, workflow([kept, failed_group()], state=WorkflowState.FAILED, reason=Reason.EXIT_CODE))
    for verb in ("diagnose", "why"):
        assert screen.run(verb, record.id, "-r", "0") == 0, screen.err
        assert "Group training: FAILED" in screen.out
        assert "Group kept" not in screen.out


def test_a_silent_gang_is_diagnosed_until_it_makes_progress(screen: Screen) -> None:
    """Use events from the supervisor, because the diagnosis must not depend on their texts."""
    driver = Driver(planned(group_plan(hang_s=30)), behavior=lambda _: Behavior(seconds=float("inf")))
    driver.settle()
    driver.advance(30)
    (silent,) = [event for event in driver.events if isinstance(event.details, HangSuspected)]
    driver.beat("t0")
    driver.advance(10)
    assert driver.group().message == ""
    (over,) = [event for event in driver.events if isinstance(event.details, HangOver)]
    record = submit(screen.store, workflow([running_group()], state=WorkflowState.RUNNING))

    def store(at: float, event: EventRecord) -> None:
        screen.store.save([], [replace(event, at=at, workflow=record.uuid, group="training")])

    store(T0 + 60, silent)
    with supervised(screen.directory):
        assert screen.run("diagnose", record.id, "-t", "json") == 0
        (group,) = json.loads(screen.out)["groups"]
        assert [(one["key"], one["found"]) for one in group["diagnoses"]] == [
            ("hang", "no task has printed anything or sent a heartbeat for 30 s (hang_timeout)")
        ]
        store(T0 + 70, over)
        assert screen.run("diagnose", record.id) == 0
    assert "no task has failed" in screen.out


def test_the_exception_in_a_log_is_diagnosed_if_the_cause_has_no_traceback(screen: Screen) -> None:
    record = submit(screen.store, workflow([failed_group()], state=WorkflowState.FAILED, reason=Reason.EXIT_CODE))
    output = (Path(__file__).parents[2] / "goldens" / "torchrun" / "2.6" / "two_nodes.1.txt").read_bytes()
    task_log(screen.directory, record, "worker", [(T0 + 90, output)])
    assert screen.run("diagnose", record.id) == 0
    assert "raised RuntimeError: bad batch 17 (/data/gang.py, line 8)" in screen.out
    assert "  Shown   | Traceback (most recent call last):\n          |   File" in screen.out
    assert screen.run("query", record.id) == 0
    assert "[rank2]: RuntimeError" in screen.out.splitlines()[-1]
