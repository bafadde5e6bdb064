"""``logs`` and ``report``: the output of tasks, its selection and prefixes, and reports about missing output."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from distflow.cli.ui import documents, log_pages, report
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.state.record import End, TaskRecord, WorkflowRecord
from distflow.structs import replace
from unit.cli.screen import Screen, assert_golden
from unit.state.stored import T0, completed_group, submit, supervised, task, task_log, workflow, write_log


@pytest.fixture
def digits(screen: Screen) -> WorkflowRecord:
    """Store a workflow that completed, with its logs."""
    record = submit(screen.store, workflow([completed_group()]))
    task_log(screen.directory, record, "master", [(T0 + 20, b"epoch 1\n"), (T0 + 40.25, b"  0%|  |\r100%|##|\nlast")])
    task_log(screen.directory, record, "worker", [(T0 + 21, "größe\n".encode()), (T0 + 39, b"epoch 2\n")])
    return record


def test_lines_of_all_tasks_are_merged_by_time_with_task_names(screen: Screen, digits: WorkflowRecord) -> None:
    assert screen.run("logs", digits.id) == 0
    assert_golden("logs.txt", screen.out)
    assert screen.err == ""


def test_timestamps_have_osmos_format(screen: Screen, digits: WorkflowRecord) -> None:
    assert screen.run("logs", digits.id, "--timestamps") == 0
    assert_golden("logs_timestamps.txt", screen.out)


def test_json_output_is_one_array(screen: Screen, digits: WorkflowRecord) -> None:
    assert screen.run("logs", digits.id, "--format-type", "json") == 0
    assert_golden("logs.json", screen.out)
    assert [one["task"] for one in json.loads(screen.out)] == ["master", "worker", "worker", "master", "master"]


def test_json_output_of_follow_has_an_object_on_each_line(screen: Screen, digits: WorkflowRecord) -> None:
    assert screen.run("logs", digits.id, "-f", "-n", "2", "--format-type=json") == 0
    assert [json.loads(line)["text"] for line in screen.out.splitlines()] == ["100%|##|", "last"]


def test_without_output_nothing_is_printed(screen: Screen) -> None:
    record = submit(screen.store, workflow([completed_group()]))
    assert screen.run("logs", record.id) == 0
    assert (screen.out, screen.err) == ("", "")
    assert screen.run("logs", record.id, "--format-type", "json") == 0
    assert json.loads(screen.out) == []


def test_the_reason_is_printed_if_nothing_has_started(screen: Screen) -> None:
    waiting = [task(name, State.WAITING, started_at=None, ended_at=None, end=None) for name in ("master", "worker")]
    group = replace(
        completed_group(), state=State.WAITING, tasks=tuple(waiting), message="Waiting for nodes: \x1b[1munreachable: gpu9"
    )
    record = submit(screen.store, workflow([group], state=WorkflowState.PENDING))
    with supervised(screen.directory):
        assert screen.run("logs", record.id) == 0
    assert screen.out == ""
    assert screen.err == (
        f"{record.id} has no output, because nothing has started: PENDING: {group.name}: Waiting for nodes: unreachable: gpu9\n"
    )


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["-t", "worker"], ["[worker] größe", "[worker] epoch 2"]),
        (["--rank", "9"], ["[worker] größe", "[worker] epoch 2"]),
        (["--rank", "7", "--no-prefix"], ["epoch 1", "100%|##|", "last"]),
        (["-n", "3"], ["[worker] epoch 2", "[master] 100%|##|", "[master] last"]),
        (["-n", "1", "-t", "worker"], ["[worker] epoch 2"]),
        (["-n", "0"], []),
        (["-t", "worker", "--rank", "0", "-n", "2"], ["[master] 100%|##|", "[master] last"]),
        (["-f", "-n", "1"], ["[master] last"]),
    ],
)
def test_lines_are_selected_by_task_and_count(
    screen: Screen, digits: WorkflowRecord, arguments: list[str], lines: list[str]
) -> None:
    assert screen.run("logs", digits.id, *arguments) == 0
    assert screen.out.splitlines() == lines


@pytest.fixture
def workflow_with_ranks(screen: Screen) -> WorkflowRecord:
    """Store a workflow whose master has separate output for each rank, and whose worker's ranks share one output."""
    record = submit(screen.store, workflow([completed_group()]))
    folder = screen.directory.logs / record.uuid / "training" / "master" / "0"
    write_log(folder, [(T0, b"torchrun\n"), (T0 + 1, b"one\n"), (T0 + 2, b"three\n"), (T0 + 3, b"one again\n")])
    entries = [(T0, 0, None), (T0 + 1, 9, 1), (T0 + 2, 13, 3), (T0 + 3, 19, 1)]
    records = (struct.pack("<dQ", at, (0 if rank is None else rank + 1) << 48 | start) for at, start, rank in entries)
    (folder / "output.idx").write_bytes(b"".join(records))
    task_log(screen.directory, record, "worker", [(T0 + 4, b"shared\n[rank9]: nine\n[default2]:ten\n")])
    return record


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["-t", "master"], ["[master] torchrun", "[master rank 1] one", "[master rank 3] three", "[master rank 1] one again"]),
        (["--rank", "1"], ["[master rank 1] one", "[master rank 1] one again"]),
        (["--rank", "3", "-f"], ["[master rank 3] three"]),
        (["--rank", "1", "-n", "1", "--no-prefix"], ["one again"]),
        (["--rank", "2"], []),
        (["--rank", "1", "--rank", "3", "-n", "2"], ["[master rank 3] three", "[master rank 1] one again"]),
        (["--rank", "9"], ["[worker] shared", "[worker] [rank9]: nine"]),
        (["--rank", "10", "-f"], ["[worker] [default2]:ten"]),
    ],
)
def test_lines_are_selected_by_rank(
    screen: Screen, workflow_with_ranks: WorkflowRecord, arguments: list[str], lines: list[str]
) -> None:
    assert screen.run("logs", workflow_with_ranks.id, *arguments) == 0
    assert screen.out.splitlines() == lines
    note = "worker: its ranks share one output, so they cannot be separated; `torchrun` and `spawn` separate them\n"
    assert screen.err == (note if {"9", "10"} & {*arguments} else "")


def test_json_lines_contain_the_rank(screen: Screen, workflow_with_ranks: WorkflowRecord) -> None:
    screen.run("logs", workflow_with_ranks.id, "-t", "master", "--format-type", "json")
    assert [line["rank"] for line in json.loads(screen.out)] == [None, 1, 3, 1]


def test_later_attempts_are_marked_and_can_be_selected(screen: Screen) -> None:
    group = replace(completed_group(), attempt=1, tasks=(task("master", attempt=1),))
    record = submit(screen.store, workflow([group]))
    task_log(screen.directory, record, "master", [(T0, b"first\n")])
    write_log(screen.directory.logs / record.uuid / "training" / "master" / "1", [(T0 + 5, b"second\n")])
    screen.run("logs", record.id)
    assert screen.out == "[master] first\n[master retry-1] second\n"
    screen.run("logs", record.id, "-r", "1")
    assert screen.out == "[master retry-1] second\n"
    assert screen.run("logs", record.id, "-r", "2") == 2
    assert "has no attempt 2\nattempts are counted from 0; the last one is 1\n" in screen.err


def test_an_unknown_task_is_an_error_that_lists_all_tasks(screen: Screen, digits: WorkflowRecord) -> None:
    assert screen.run("logs", digits.id, "-t", "workers") == 2
    assert screen.err == "error: digits-1 has no task `workers`\ndid you mean `worker`? tasks: `master`, `worker`\n"
    assert screen.run("logs", digits.id, "--rank", "16") == 2
    assert screen.err == "error: no task of digits-1 holds rank 16\nranks: master 0-7, worker 8-15\n"
    assert screen.run("logs", digits.id, "-t", "json", "--format-type", "json") == 2
    assert json.loads(screen.out)["error"]["message"] == "digits-1 has no task `json`"


def test_missing_output_is_reported(screen: Screen) -> None:
    def ended(name: str, *, lost: int = 0, complete: bool = True) -> TaskRecord:
        end = End(ended_at=T0 + 90, exit_code=1, output_bytes=1207, lost_output_bytes=lost)
        return task(name, State.FAILED, reason=Reason.EXIT_CODE, end=end, log_complete=complete)

    tasks = (ended("master", lost=5000), ended("worker", complete=False))
    group = replace(completed_group(), state=State.FAILED, tasks=tasks)
    # Mark the workflow as finished in the store. No supervisor then starts, and the node is not contacted again.
    record = submit(screen.store, workflow([group], state=WorkflowState.FAILED, reason=Reason.EXIT_CODE))
    task_log(screen.directory, record, "master", [(T0, b"1234567\n")])
    task_log(screen.directory, record, "worker", [(T0, b"x" * 207)])
    screen.store._db.execute("UPDATE workflows SET unfinished = 0")
    assert screen.run("logs", record.id, "-n", "0") == 0
    assert screen.err.splitlines() == [
        "master: the last 1,199 bytes of its output were not received from master-node",
        "master: 5,000 bytes of its output were lost: master-node had a full or failed disk",
        "worker: 1,000 bytes of its output are still on worker-node",
    ]
    assert screen.run("logs", record.id, "-t", "master", "-n", "0") == 0
    assert "worker" not in screen.err


def test_an_html_report_shows_which_lines_of_a_long_log_are_left_out(
    screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_pages, "_MOST_LINES", 100)
    monkeypatch.setattr(report, "_LINES_AT_ONCE", 10)
    monkeypatch.setattr(report, "_MOST_LOG_BYTES", 400)
    monkeypatch.setattr(documents, "LIVE_PARTS", {"outputs": lambda *_: {}})
    record = submit(screen.store, workflow([completed_group()]))
    task_log(screen.directory, record, "master", [(T0 + 20, b"".join(b"line %d\n" % number for number in range(1, 111)))])
    report.write_report(screen.client, record, tmp_path / "long.html")
    embedded = re.search(r'id="report">(.*?)</script>', (tmp_path / "long.html").read_text())
    assert embedded is not None
    logs = json.loads(embedded[1])["logs"]
    texts = [text for _, _, text in logs["lines"]]
    assert texts == [
        "… the first 50 lines are left out …",
        *(f"line {number}" for number in range(51, 61)),
        "… 40 lines are left out …",
        *(f"line {number}" for number in range(101, 111)),
    ]
    assert logs["remarks"] == [
        f"The first 50 lines and 40 lines in the middle are left out. All lines: distflow workflow logs {record.id}"
    ]


def test_closing_the_pipe_is_not_an_error(screen: Screen) -> None:
    record = submit(screen.store, workflow([completed_group()]))
    task_log(screen.directory, record, "master", [(T0, b"a line of some length\n" * 200_000)])
    command = [sys.executable, "-m", "distflow", "workflow", "logs", record.id]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"[master] a line of some length\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
