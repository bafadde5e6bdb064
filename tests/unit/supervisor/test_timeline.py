"""The timeline of a failure. ``tests/goldens/cli/why_failed.txt`` shows a complete one."""

from __future__ import annotations

import pytest

from distflow.lifecycle.states import Reason, State
from distflow.protocol.ends import EndReason
from distflow.state.event_details import Message, NodeBecameReachable, NodeBecameUnreachable
from distflow.state.record import Cause, End, EventRecord, GroupRecord, TaskRecord
from distflow.structs import replace
from distflow.supervisor.timeline import Moment, attempt_of, cause_of, moments, show_end

CAUSE = Cause(task="a", reason=Reason.EXIT_CODE, message="exit code 1", at=10.0, rivals=("r",))


def _task(name: str, reason: Reason | None, *, state: State = State.FAILED, **end: object) -> TaskRecord:
    ended = End(**{"ended_at": 11.0, "exit_code": 1, **end})  # type: ignore[arg-type]
    return TaskRecord(name=name, state=state, reason=reason, node=f"n-{name}", end=ended, ended_at=11.0)


def _last_moment(task: TaskRecord, *lines: str, cause: Cause | None = CAUSE) -> Moment:
    group = GroupRecord(name="g", tasks=(task,), state=State.FAILED, cause=cause)
    return moments(group, 0, (), {task.name: lines})[-1]


@pytest.mark.parametrize(
    ("task", "lines", "because"),
    [
        (_task("a", Reason.EXIT_CODE), (), "the first cause"),
        (_task("r", Reason.EXIT_CODE), (), "failed by itself, at the same time as a as far as the clocks can tell"),
        (_task("b", Reason.EXIT_CODE), (), "failed by itself, after the first cause"),
        (_task("b", Reason.EXIT_CODE), ("Connection reset by peer",), "it reports that a peer was gone"),
        (_task("b", Reason.OOM_KILLED), ("Connection reset by peer",), "failed by itself, after the first cause"),
        (_task("b", Reason.PEER_FAILED, signal=15), (), "a failed"),
        (_task("b", Reason.NODE_LOST), (), "its node was lost or could not be reached for longer than node_lost_after"),
        (_task("b", None, state=State.COMPLETED, exit_code=0), (), "completed"),
    ],
)
def test_end_of_a_task_is_explained(task: TaskRecord, lines: tuple[str, ...], because: str) -> None:
    assert _last_moment(task, *lines).because == because


@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("cause", [None, CAUSE])
def test_every_reason_has_an_explanation(reason: Reason, cause: Cause | None) -> None:
    assert _last_moment(_task("b", reason), cause=cause).because


def test_ends_are_shown_by_their_usual_names() -> None:
    assert show_end(End(ended_at=1.0, signal=9)) == "SIGKILL"
    assert show_end(End(ended_at=1.0, exit_code=3)) == "exit code 3"
    assert show_end(End(ended_at=1.0, reason=EndReason.BOTH_DIED)) == "both died"


def test_timeline_contains_only_one_attempt() -> None:
    current = replace(_task("a", None, state=State.COMPLETED, exit_code=0), attempt=1)
    group = GroupRecord(
        name="g",
        tasks=(current,),
        attempt=1,
        earlier=(_task("a", Reason.EXIT_CODE),),
        earlier_causes=(CAUSE,),
        stopping_at=50.0,
    )
    assert (cause_of(group, 0), cause_of(group, 1)) == (CAUSE, None)
    assert [task.attempt for task in attempt_of(group, 0)] == [0]
    assert [moment.because for moment in moments(group, 0, (), {})] == ["the first cause"]


def test_timeline_contains_only_events_of_its_nodes_and_time() -> None:
    task = replace(_task("a", Reason.EXIT_CODE), started_at=1.0)
    events = [
        EventRecord(at=5.0, details=NodeBecameUnreachable(node="n-a", error="no route\nremedy"), workflow="u"),
        EventRecord(at=6.0, details=NodeBecameUnreachable(node="n-b", error="another's"), workflow="u"),
        EventRecord(at=7.0, details=Message(text="n-a: RUNNING"), workflow="u"),
        EventRecord(at=99.0, details=NodeBecameReachable(node="n-a"), workflow="u"),
    ]
    group = GroupRecord(name="g", tasks=(task,), state=State.FAILED, cause=CAUSE)
    assert [moment.text for moment in moments(group, 0, events, {})] == [
        "started",
        "unreachable: no route",
        "ended: exit code 1",
    ]
