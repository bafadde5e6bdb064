"""``why``: the first cause, the timeline of the nodes, and the messages if there is no failure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from distflow.cli.render.workflow_text import without_node_paths
from distflow.diagnosis import diagnose as diagnosing
from distflow.diagnosis.model import Hit, TaskOutcome, hits_in
from distflow.lifecycle.clocks import Clock
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.state import logs
from distflow.state.event_details import CancelRequested, NodeBecameReachable, NodeBecameUnreachable
from distflow.state.record import CancelRequest, End, EventRecord, GroupRecord, WorkflowRecord
from distflow.structs import replace
from unit.cli.screen import Screen, assert_golden
from unit.state.stored import T0, completed_group, failed_group, running_group, submit, supervised, task, task_log, workflow

CLOCK_BEHIND = Clock(offset_s=-30.0, uncertainty_s=0.0004)
CORRECT_CLOCK = Clock(offset_s=0.0002, uncertainty_s=0.0004)
KERNEL_LINES = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/job,task_memcg=/job,task=python3,pid=9001,uid=1000",
    "Memory cgroup out of memory: Killed process 9001 (python3) total-vm:323784kB, anon-rss:60800kB",
)


def gang() -> GroupRecord:
    """A gang whose worker failed first, on a node whose clock is behind. Two others failed, one of them at the same time."""
    group = failed_group()
    assert group.cause is not None
    cause = replace(
        group.cause, reason=Reason.OOM_KILLED, message="out of memory: the kernel killed process 9001 (python3)", pid=9001,
        clock=CLOCK_BEHIND, rivals=("third",), kernel=KERNEL_LINES,
        traceback='Traceback (most recent call last):\n  File "train.py"',
    )  # fmt: skip
    master, worker = group.tasks
    assert master.end is not None
    assert worker.end is not None
    own = End(ended_at=T0 + 90.5, exit_code=1, clock=CORRECT_CLOCK)
    return replace(
        group,
        cause=cause,
        tasks=(
            replace(master, end=replace(master.end, stopped_at=T0 + 90.2, started_at=T0 + 12, clock=CORRECT_CLOCK)),
            replace(worker, reason=Reason.OOM_KILLED, end=replace(worker.end, clock=CLOCK_BEHIND)),
            task("bystander", State.FAILED, reason=Reason.EXIT_CODE, end=own, ended_at=T0 + 90.5),
            task("third", State.FAILED, reason=Reason.EXIT_CODE, end=own, ended_at=T0 + 90.0001),
        ),
    )


def store_failed_workflow(screen: Screen) -> WorkflowRecord:
    """Store a workflow with the gang, the output of the bystander, and events of unreachable nodes."""
    upstream = replace(running_group(), name="report", state=State.FAILED, reason=Reason.UPSTREAM, tasks=(),
                       message="upstream group training did not complete: FAILED_EVICTED")  # fmt: skip
    record = submit(screen.store, workflow([gang(), upstream], state=WorkflowState.FAILED, reason=Reason.OOM_KILLED))
    task_log(screen.directory, record, "bystander", [(T0 + 90, b"RuntimeError: Connection closed by peer\n")])
    outages = [
        EventRecord(at=T0 + at, details=details, workflow=record.uuid)
        for at, details in (
            (50, NodeBecameUnreachable(node="master-node", error="no route to host\ntry the network")),
            (60, NodeBecameReachable(node="master-node")),
            (70, NodeBecameUnreachable(node="other-node", error="not one of ours")),
            (500, NodeBecameUnreachable(node="master-node", error="long after it")),
        )
    ]
    screen.store.save([], outages)
    return record


def test_why_prints_cause_timeline_and_clocks(screen: Screen) -> None:
    assert screen.run("why", store_failed_workflow(screen).id) == 0
    assert screen.err == ""
    assert_golden("why_failed.txt", screen.out)


def test_json_output_is_one_document(screen: Screen) -> None:
    assert screen.run("why", store_failed_workflow(screen).id, "-g", "training", "-t", "json") == 0
    assert_golden("why_failed.json", screen.out)
    (group,) = json.loads(screen.out)["groups"]
    assert [one["offset_s"] for one in group["timeline"]] == sorted(one["offset_s"] for one in group["timeline"])
    assert next(one for one in group["timeline"] if one["offset_s"] == 0 and one["task"])["because"] == "the first cause"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (workflow([completed_group()]), "digits-1 completed, so there is no failure to explain"),
        (
            workflow([running_group()], state=WorkflowState.RUNNING),
            "digits-1 has not ended, and no task has failed: RUNNING",
        ),
        (
            replace(
                workflow([running_group()], state=WorkflowState.CANCELED, reason=Reason.CANCELED),
                cancel=CancelRequest(at=T0, by="ada", message="wrong data"),
            ),
            "digits-1 was canceled by ada: wrong data",
        ),
    ],
    ids=["completed", "running", "canceled"],
)
def test_why_explains_the_state_if_nothing_failed(screen: Screen, record: WorkflowRecord, expected: str) -> None:
    stored = submit(screen.store, record)
    if record.cancel is not None:
        event = EventRecord(at=T0, details=CancelRequested(user="ada"), workflow=stored.uuid)
        screen.store.request_cancel(stored.uuid, record.cancel, event)
    with supervised(screen.directory):
        assert screen.run("why", stored.id) == 0
        assert screen.out == f"{expected}\n"
        assert screen.run("why", stored.id, "-t", "json") == 0
    answer = json.loads(screen.out)
    assert (answer["message"], answer["groups"]) == (expected, [])


def test_a_chosen_group_that_did_not_fail_is_not_explained_by_another_one(screen: Screen) -> None:
    group = failed_group()
    other = replace(group, name="other", tasks=tuple(replace(one, name=f"{one.name}-2") for one in group.tasks))
    record = submit(screen.store, workflow([completed_group(), other], state=WorkflowState.FAILED))
    expected = f"training: COMPLETED\nFailed groups: `other`. Details: distflow workflow why {record.id}\n"
    assert screen.run("why", record.id, "--group", "training") == 0
    assert screen.out == expected
    assert screen.run("diagnose", record.id, "--task", "master") == 0
    assert screen.out.startswith(expected)


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


def test_an_earlier_attempt_is_explained_on_request(screen: Screen) -> None:
    workflow_id = store_retried_workflow(screen)
    assert screen.run("why", workflow_id) == 0
    assert f"training was retried after a failure. Details: distflow workflow why {workflow_id} -r 0" in screen.out
    assert screen.run("why", workflow_id, "-r", "0") == 0
    assert "Group training, attempt 1 of 2: RESCHEDULED" in screen.out
    assert "First cause: worker on worker-node, rank 11: exit code 1: RuntimeError: shapes differ" in screen.out
    assert "completed" not in screen.out


def test_unknown_attempts_and_groups_are_errors(screen: Screen) -> None:
    workflow_id = store_retried_workflow(screen)
    assert screen.run("why", workflow_id, "-r", "2") == 2
    assert "no attempt 2" in screen.err
    assert "the last one is 1" in screen.err
    assert screen.run("why", workflow_id, "-g", "trainign") == 2
    assert "did you mean `training`?" in screen.err


def test_a_group_that_timed_out_has_a_message_and_no_cause(screen: Screen) -> None:
    group = replace(
        failed_group(), reason=Reason.EXEC_TIMEOUT, cause=None, stop_reason=Reason.EXEC_TIMEOUT,
        message="ran longer than 80 s (exec_timeout)",
        tasks=tuple(replace(one, reason=Reason.EXEC_TIMEOUT) for one in failed_group().tasks),
    )  # fmt: skip
    record = submit(screen.store, workflow([group], state=WorkflowState.FAILED, reason=Reason.EXEC_TIMEOUT))
    assert screen.run("why", record.id) == 0
    assert "ran longer than 80 s (exec_timeout)" in screen.out
    assert "First cause" not in screen.out
    assert screen.out.count("it ran longer than exec_timeout") == 3


@pytest.mark.parametrize("command", ["why", "diagnose", "query"])
def test_only_a_small_part_of_a_huge_output_is_read_to_explain_a_failure(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    record = store_failed_workflow(screen)
    task_log(screen.directory, record, "worker", [(T0 + 80, b"x")])
    path = screen.directory.logs / record.uuid / "training" / "worker" / "0" / "output.log"
    with path.open("r+b") as log:
        log.seek(200 << 20)  # one very long line
        log.write(b"\n{'message': 'CUDA out of memory " + b"y" * (1 << 20) + b"'}")
    read, longest = [0], [0]
    real_read = logs._read

    def counted(path: Path, offset: int, count: int) -> bytes:
        data = real_read(path, offset, count)
        read[0] += len(data)
        return data

    def measured(outcome: TaskOutcome, patterns: tuple[re.Pattern[str], ...]) -> Iterator[Hit]:
        longest[0] = max([longest[0], *map(len, outcome.lines)])
        return hits_in(outcome, patterns)

    monkeypatch.setattr(logs, "_read", counted)
    monkeypatch.setattr(diagnosing, "hits_in", measured)
    assert screen.run(command, record.id) == 0
    assert 0 < read[0] < 8 << 20
    assert longest[0] < 5000


ATTEMPT_DIRECTORY = "/home/me/.local/share/distflow/node/distflow-node/0123456789abcdef0123456789abcdef/training/node-0/1/"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f'  File "{ATTEMPT_DIRECTORY}work/train.py", line 3, in load', '  File "train.py", line 3, in load'),
        (f"open({ATTEMPT_DIRECTORY}work/data/a.csv) and {ATTEMPT_DIRECTORY}work/b", "open(data/a.csv) and b"),
        (f'File "{ATTEMPT_DIRECTORY}files/code/train.py"', 'File "/code/train.py"'),
        (f'File "/my disk{ATTEMPT_DIRECTORY}work/x"', f'File "/my disk{ATTEMPT_DIRECTORY}work/x"'),
        (f'File "{ATTEMPT_DIRECTORY}output/x"', f'File "{ATTEMPT_DIRECTORY}output/x"'),
        ('File "/opt/venv/lib/torch/nn.py", line 1', 'File "/opt/venv/lib/torch/nn.py", line 1'),
        ("/a" * 20_000 + "/distflow-node/", "/a" * 20_000 + "/distflow-node/"),
    ],
)
def test_paths_on_a_node_are_shown_relative_to_the_working_directory(line: str, shown: str) -> None:
    assert without_node_paths(line) == shown
