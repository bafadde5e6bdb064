"""Effects of observations on records. Those that arrive late, twice or out of order change nothing."""

from __future__ import annotations

from distflow.backends.base import AttemptKey, Ended, Leased, NodeDown, NodeUp, Prepared, Staging, Started
from distflow.lifecycle.states import State
from distflow.state.record import TransferProgress
from distflow.structs import replace
from distflow.supervisor.observations import apply_node_observation, apply_observation, update_node_view
from distflow.testing.backend import Behavior
from unit.supervisor.gangs import Driver, workflow

PLAN = workflow().plan


def _running() -> Driver:
    driver = Driver(workflow(), behavior=lambda _: Behavior(seconds=float("inf")))
    driver.settle()
    return driver


def _key(task: str = "t0", attempt: int = 0, node: str = "n1") -> AttemptKey:
    return AttemptKey(workflow="u1", group="train", task=task, attempt=attempt, node=node)


def test_a_second_end_of_a_task_is_ignored() -> None:
    record, events = apply_observation(
        _running().record(), PLAN, Ended(at=5.0, key=_key(), end={"exit_code": 3, "ended_at": 5.0})
    )
    assert record.groups[0].task("t0").state is State.FAILED
    assert len(events) == 1
    unchanged, events = apply_observation(record, PLAN, Ended(at=6.0, key=_key(), end={"exit_code": 0, "ended_at": 6.0}))
    assert unchanged == record
    assert events == []


def test_progress_of_a_transfer_is_kept_until_its_files_have_arrived() -> None:
    driver = Driver(workflow(), behavior=lambda _: Behavior(seconds=float("inf")))
    driver.backend.prepare = lambda *_: None  # type: ignore[method-assign]
    driver.settle()
    staging = Staging(at=5.0, key=_key(), sent=10, total=40, bytes_per_s=5.0)
    record, events = apply_observation(driver.record(), PLAN, staging)
    assert record.groups[0].task("t0").transfer == TransferProgress(sent=10, total=40, bytes_per_s=5.0, at=5.0)
    assert events == []
    record, _ = apply_observation(record, PLAN, Prepared(at=6.0, key=_key()))
    assert record.groups[0].task("t0").transfer is None
    assert apply_observation(record, PLAN, staging) == (record, [])


def test_observations_of_other_attempts_or_nodes_are_ignored() -> None:
    record = _running().record()
    for key in (_key(attempt=1), _key(node="n2")):
        assert apply_observation(record, PLAN, Ended(at=5.0, key=key, end={"exit_code": 3})) == (record, [])


def test_second_lease_does_not_restart_a_gang() -> None:
    driver = _running()
    binding = driver.group().binding
    assert binding is not None
    late = Leased(at=9.0, workflow="u1", group="train", attempt=0, binding=binding)
    assert apply_observation(driver.record(), PLAN, late) == (driver.record(), [])


def test_running_task_is_not_prepared_or_started_again() -> None:
    record = _running().record()
    assert apply_observation(record, PLAN, Prepared(at=9.0, key=_key())) == (record, [])
    assert apply_observation(record, PLAN, Started(at=9.0, key=_key(), pid=7, started_at=9.0)) == (record, [])


def test_outage_of_a_node_is_stored_with_its_unfinished_tasks_and_reported_once() -> None:
    record = _running().record()
    pool = record.pool_key
    lost, events = apply_node_observation(record, NodeDown(at=7.0, pool=pool, node="n1", error="no route"))
    assert [event.text for event in events] == ["n1: unreachable: no route"]
    outage = lost.groups[0].task("t0").outage
    assert outage is not None
    assert (outage.since, outage.error) == (7.0, "no route")
    assert lost.groups[0].task("t1").outage is None
    assert apply_node_observation(lost, NodeDown(at=8.0, pool=pool, node="n1", error="no route")) == (lost, [])
    # The error may change, but the beginning of the outage does not.
    other, events = apply_node_observation(lost, NodeDown(at=9.0, pool=pool, node="n1", error="refused"))
    outage = other.groups[0].task("t0").outage
    assert outage is not None
    assert (outage.since, outage.error, len(events)) == (7.0, "refused", 1)
    recovered, events = apply_node_observation(other, NodeUp(at=10.0, pool=pool, node="n1"))
    assert recovered == record
    assert [event.text for event in events] == ["n1: reachable again"]
    assert apply_node_observation(recovered, NodeUp(at=11.0, pool=pool, node="n1")) == (recovered, [])


def test_outage_begins_at_the_last_message_of_the_node() -> None:
    driver = _running()
    record = driver.record()
    down = NodeDown(at=20.0, pool=record.pool_key, node="n1", error="silent", since=5.0)
    outage = apply_node_observation(record, down)[0].groups[0].task("t0").outage
    assert outage is not None
    assert outage.since == 5.0
    view = update_node_view(replace(driver.supervisor.snapshot().nodes["lab", "n1"], up=True, since=1.0), down)
    assert (view.up, view.since) == (False, 5.0)
    # Later failed attempts to connect do not change the time.
    assert update_node_view(view, replace(down, at=30.0, since=None)).since == 5.0
    assert update_node_view(view, NodeUp(at=31.0, pool=record.pool_key, node="n1")).since == 31.0


def test_outage_of_a_node_does_not_change_workflows_without_running_tasks_on_it() -> None:
    record = _running().record()
    assert apply_node_observation(record, NodeDown(at=7.0, pool=record.pool_key, node="n9", error="x")) == (record, [])
    assert apply_node_observation(record, NodeDown(at=7.0, pool="another", node="n1", error="x")) == (record, [])
    ended = replace(
        record,
        groups=tuple(
            replace(group, tasks=tuple(replace(task, state=State.COMPLETED) for task in group.tasks)) for group in record.groups
        ),
    )
    assert apply_node_observation(ended, NodeDown(at=7.0, pool=record.pool_key, node="n1", error="x")) == (ended, [])
