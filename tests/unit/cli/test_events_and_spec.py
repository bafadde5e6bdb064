"""``events`` and ``spec``: the history and the spec of a workflow."""

from __future__ import annotations

import io
import json

import pytest

from distflow.state.record import WorkflowRecord
from unit.cli.screen import Screen, Terminal, assert_golden
from unit.state.stored import completed_group, submit, workflow


@pytest.fixture
def digits(screen: Screen) -> WorkflowRecord:
    """Store a workflow with events."""
    events = [
        ("submitted by ada", None),
        ("training: has its nodes: master on gpu1, worker on gpu2, port 29512", None),
        ("master: started on gpu1, ranks 0-7 (pid 4711)", "master"),
        ("worker: started on gpu2, ranks 8-15 (pid 815)", "worker"),
        ("workflow digits-1: COMPLETED", None),
    ]
    return submit(screen.store, workflow([completed_group()]), spec="workflow:\n  name: digits", events=events)


def test_events_are_listed_in_order(screen: Screen, digits: WorkflowRecord) -> None:
    assert screen.run("events", digits.id) == 0
    assert_golden("events.txt", screen.out)
    expected = screen.out
    assert screen.run("events", digits.uuid, "--follow") == 0
    assert screen.out == expected


def test_json_output_is_one_document_and_one_line_per_event_with_follow(screen: Screen, digits: WorkflowRecord) -> None:
    assert screen.run("events", digits.id, "--format-type", "json") == 0
    assert_golden("events.json", screen.out)
    expected = json.loads(screen.out)["events"]
    assert screen.run("events", digits.id, "-f", "--format-type", "json") == 0
    assert [json.loads(line) for line in screen.out.splitlines()] == expected


def test_events_of_one_task_can_be_selected(screen: Screen, digits: WorkflowRecord) -> None:
    assert screen.run("events", digits.id, "-t", "worker") == 0
    assert screen.out == "2025/04/11 21:31:16 [worker] started on gpu2, ranks 8-15 (pid 815)\n"
    assert screen.run("events", digits.id, "-t", "wroker") == 2
    assert "did you mean `worker`?" in screen.err


def test_the_spec_is_printed_as_it_ran_or_as_submitted(screen: Screen, digits: WorkflowRecord) -> None:
    assert screen.run("spec", digits.id) == 0
    assert screen.out == "workflow:\n  name: digits\n"
    assert screen.run("spec", digits.id, "--template") == 0
    assert screen.out == "# template\nworkflow:\n  name: digits\n"
    assert screen.run("spec", "nothing-1") == 2
    assert screen.err.startswith("error: there is no workflow `nothing-1`\n")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_control_characters_of_a_spec_are_escaped_on_a_terminal(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    text = "command: [curl]\r# nothing here \x1b[2K\n\tx\n"
    record = submit(screen.store, workflow([completed_group()]), spec=text)
    out = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    assert screen.run("spec", record.id) == 0
    assert out.getvalue() == ("command: [curl] # nothing here \n x\n" if is_terminal else text)
