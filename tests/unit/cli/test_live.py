"""``submit --wait`` and ``logs -f``: following a workflow until its end."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from distflow.cli.render import live
from distflow.cli.render.live import follow_workflow
from distflow.client.logs import WorkflowWatch
from distflow.errors import NodeError
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.state.record import End, GroupRecord, UnreachableNodes, WorkflowRecord
from distflow.structs import replace
from unit.cli.screen import Screen, Terminal
from unit.state.stored import T0, completed_group, failed_group, running_group, submit, supervised, task, task_log, workflow


class ScriptedRun:
    """A running workflow that changes by one step at each wait of the command that follows it."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.record = submit(screen.store, workflow([running_group()], state=WorkflowState.RUNNING))
        self.steps: list[Callable[[], object]] = []
        self.waits = 0

    def add_output(self, name: str, at: float, data: bytes) -> None:
        self.steps.append(lambda: task_log(self.screen.directory, self.record, name, [(T0 + at, data)]))

    def add_end(self, group: GroupRecord, state: WorkflowState, reason: Reason | None = None) -> None:
        ended = replace(self.record, groups=(group,), state=state, reason=reason, ended_at=T0 + 95)
        self.steps.append(lambda: self.screen.store.save([ended], []))

    def wait(self, seconds: float) -> None:
        assert 0 < seconds <= 1
        self.waits += 1
        assert self.waits < 500, "following does not end"
        if self.steps:
            self.steps.pop(0)()

    def follow(self, out: io.StringIO, err: io.StringIO) -> WorkflowRecord:
        with supervised(self.screen.directory):
            return follow_workflow(self.screen.client, self.record, out=out, err=err, wait=self.wait)


def test_logs_go_to_standard_output_and_status_changes_to_standard_error(screen: Screen) -> None:
    run = ScriptedRun(screen)
    run.add_output("master", 20, b"epoch 1\n")
    run.add_output("worker", 21, b"epoch 1\nhalf a li")
    run.add_output("worker", 22, b"ne\n")
    run.add_end(completed_group(), WorkflowState.COMPLETED)
    out, err = io.StringIO(), io.StringIO()
    assert run.follow(out, err).state is WorkflowState.COMPLETED
    assert out.getvalue() == "[master] epoch 1\n[worker] epoch 1\n[worker] half a line\n"
    assert err.getvalue().splitlines() == [
        "digits-1: RUNNING",
        "training: RUNNING",
        "digits-1: COMPLETED",
        "training: COMPLETED",
        "master: COMPLETED",
        "worker: COMPLETED",
    ]


def test_a_workflow_that_waits_in_the_queue_causes_one_reminder(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_REMINDER_POLLS", 3)
    run = ScriptedRun(screen)
    waiting = replace(running_group(), state=State.SCHEDULING, message="Waiting for nodes: unreachable: gpu9")
    run.record = replace(run.record, groups=(waiting,), state=WorkflowState.PENDING)
    screen.store.save([run.record], [])
    run.steps = [lambda: None] * 5
    run.add_end(completed_group(), WorkflowState.COMPLETED)
    err = io.StringIO()
    run.follow(io.StringIO(), err)
    assert err.getvalue().splitlines()[:3] == [
        "digits-1: PENDING",
        "training: SCHEDULING: Waiting for nodes: unreachable: gpu9",
        "digits-1: still waiting to start. Ctrl-C does not cancel it; to cancel it: distflow workflow cancel digits-1",
    ]
    assert err.getvalue().count("still waiting") == 1


@pytest.mark.parametrize("is_terminal", [False, True])
def test_unreachable_nodes_that_prevent_the_start_are_named_once(screen: Screen, *, is_terminal: bool) -> None:
    run = ScriptedRun(screen)
    missing = UnreachableNodes(errors={"gpu9": "no route"}, needs_action=False)
    waiting = replace(running_group(), state=State.SCHEDULING, message="Waiting for nodes: gpu9: no route", unreachable=missing)
    pending = replace(run.record, groups=(waiting,), state=WorkflowState.PENDING)
    run.steps = [lambda: screen.store.save([pending], []), *[lambda: None] * 3]
    run.add_end(completed_group(), WorkflowState.COMPLETED)
    err = io.StringIO()
    run.follow(Terminal() if is_terminal else io.StringIO(), err)
    shown = err.getvalue()
    assert shown.count("training cannot start before distflow reaches gpu9\n") == 1
    assert "  distflow keeps trying. To check all nodes: distflow pool check --pool lab\n" in shown
    assert shown.count("no route") == 1


def test_following_ends_if_a_person_must_repair_a_node_first(screen: Screen) -> None:
    run = ScriptedRun(screen)
    missing = UnreachableNodes(errors={"gpu9": "refused the key"}, needs_action=True)
    waiting = replace(running_group(), state=State.SCHEDULING, unreachable=missing)
    pending = replace(run.record, groups=(waiting,), state=WorkflowState.PENDING)
    run.steps = [lambda: screen.store.save([pending], [])]
    with pytest.raises(NodeError, match="gpu9: refused the key"):
        run.follow(io.StringIO(), io.StringIO())


def test_a_terminal_has_a_status_line_at_the_bottom(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = ScriptedRun(screen)
    run.add_output("master", 20, b"epoch 1\n")
    run.add_end(failed_group(), WorkflowState.FAILED, Reason.EXIT_CODE)
    out, err = Terminal(), io.StringIO()
    run.follow(out, err)
    lines = out.getvalue().split("\r\x1b[K")
    assert lines[0].startswith("digits-1 RUNNING ")
    assert lines[0].endswith("  master RUNNING · worker RUNNING")
    assert lines[1].startswith("[master] epoch 1\ndigits-1 RUNNING ")
    assert lines[-1] == "digits-1 FAILED 1:23  master FAILED · worker FAILED\n"
    assert err.getvalue() == "worker: the last 48 bytes of its output were not received from worker-node\n"


def test_the_status_line_never_wraps(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    run = ScriptedRun(screen)
    run.add_end(completed_group(), WorkflowState.COMPLETED)
    out = Terminal()
    run.follow(out, io.StringIO())
    first = out.getvalue().split("\r\x1b[K")[0]
    assert first.startswith("digits-1 RUNNING")
    assert first.endswith("…")
    assert len(first) <= 29


def test_an_interrupt_clears_the_status_line_and_is_raised_again(screen: Screen) -> None:
    run = ScriptedRun(screen)

    def interrupt() -> None:
        raise KeyboardInterrupt

    run.steps = [lambda: None, interrupt]
    out = Terminal()
    with pytest.raises(KeyboardInterrupt):
        run.follow(out, io.StringIO())
    assert out.getvalue().endswith("\r\x1b[K")


def test_output_after_the_end_is_awaited_for_a_limited_time(screen: Screen) -> None:
    run = ScriptedRun(screen)
    end = End(ended_at=T0 + 90, exit_code=0, output_bytes=1000)
    incomplete = tuple(task(name, end=end, log_complete=False) for name in ("master", "worker"))
    run.add_end(replace(completed_group(), tasks=incomplete), WorkflowState.COMPLETED)
    run.steps += [lambda: None] * 40
    run.add_output("worker", 91, b"a late line\n")
    out, err = io.StringIO(), io.StringIO()
    run.follow(out, err)
    assert out.getvalue() == "[worker] a late line\n"
    # 10 s without output at 0.1 s for each poll, counted again after the late line.
    assert 41 + 100 <= run.waits <= 41 + 100 + 6
    assert "worker: 988 bytes of its output are still on worker-node" in err.getvalue()


def test_logs_are_over_when_those_of_the_chosen_tasks_are_complete(screen: Screen) -> None:
    tasks = (task("master"), task("worker", State.COMPLETED, log_complete=False))
    record = submit(screen.store, workflow([replace(completed_group(), tasks=tasks)]))
    assert WorkflowWatch(screen.client, record, tasks={"master"}).logs_are_over()
    assert not WorkflowWatch(screen.client, record).logs_are_over()


def test_the_status_line_counts_many_tasks_by_state(screen: Screen) -> None:
    from distflow.cli.render.workflow_text import changes, status_line

    tasks = tuple(task(f"worker{number}", State.RUNNING) for number in range(60))
    waiting = tuple(task(f"late{number}", State.INITIALIZING) for number in range(4))
    record = workflow([replace(running_group(), tasks=(*tasks, *waiting))], state=WorkflowState.RUNNING)
    record = replace(record, id="wide-1")
    assert status_line(record, now=T0 + 54) == "wide-1 RUNNING 0:42  60 RUNNING · 4 INITIALIZING"
    assert list(changes(None, record)) == ["wide-1: RUNNING", "training: RUNNING"]
    assert list(changes(record, record)) == []
