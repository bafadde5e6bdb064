"""Workflows that are put together again from what nodes hold."""

from __future__ import annotations

from distflow.backends.base import AttemptKey
from distflow.lifecycle.states import State, WorkflowState
from distflow.state.record import WorkflowRecord
from distflow.supervisor.adopting import Place, rebuild
from distflow.supervisor.memo import Memo
from distflow.testing.backend import Behaviour
from unit.supervisor.gangs import Driver, workflow


def test_a_task_whose_node_was_out_of_reach_when_it_was_adopted_has_started_when_that_says_so() -> None:
    noted: list[WorkflowRecord] = []

    def behave(_: AttemptKey) -> Behaviour:
        noted.append(driver.record())
        return Behaviour(seconds=60)

    driver = Driver(workflow(), behaviour=behave)
    driver.settle()
    memo = Memo(record=noted[-1], plan=driver.workflows["u1"].plan, template="", spec="", host="theirs")
    driver.backend.cut("n2")
    place = Place(node="n1", phase="running", pid=1, started_at=driver.clock.now(), directory="/r/u1/train/t0/0")
    rebuilt = rebuild(memo, {"u1/train/t0/0": place}, nodes=["n1", "n2"], now=driver.clock.now())
    driver.rewrite(rebuilt.record)
    driver.advance(1.0)
    assert (driver.group().state, driver.group().task("t1").started_at) == (State.RUNNING, None)
    driver.backend.heal("n2")
    driver.settle()
    assert driver.group().task("t1").started_at == driver.group().task("t0").started_at
    driver.run()
    assert driver.record().state is WorkflowState.COMPLETED
    assert len(driver.backend.starts) == 2
