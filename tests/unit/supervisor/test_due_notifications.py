"""Notifications: when they are due, and that each is stored once, even if the supervisor is killed."""

from __future__ import annotations

import pytest

from distflow.backends.base import AttemptKey, Backend
from distflow.documents.notify import NotifyTarget, Trigger
from distflow.documents.requirements import Requirements
from distflow.errors import InputError
from distflow.state.event_details import NotificationSent
from distflow.state.record import EventRecord
from distflow.structs import replace
from distflow.supervisor.snapshot import StoredWorkflow
from distflow.testing.backend import Behavior
from unit.supervisor.gangs import Driver, group_plan, node, pool, workflow

EVERYTHING = NotifyTarget(on=tuple(Trigger), url="https://ci.example/hook", after_s=600.0)
ENDS = NotifyTarget(credential="team")
FAILING, LONG_RUNNING = "u8", "u9"
"""Workflows with another behavior."""


def behave(key: AttemptKey) -> Behavior:
    return Behavior(seconds=10_000.0 if key.workflow == LONG_RUNNING else 5.0, exit_code=int(key.workflow == FAILING))


@pytest.fixture
def driver() -> Driver:
    """A pool with room for one gang at a time."""
    return Driver(on=pool(node("n1")), behavior=behave)


def with_targets(one: StoredWorkflow, *targets: NotifyTarget) -> StoredWorkflow:
    return replace(one, notify=targets)


def due(driver: Driver, uuid: str = "u1") -> list[tuple[int, str, str]]:
    """Return the target's number, the trigger and the subject of each due notification."""
    return [(one.target, one.on.value, one.subject) for one in driver.reader.notifications() if one.workflow == uuid]


def test_notifications_of_start_and_end_are_due_for_the_targets_that_request_them(driver: Driver) -> None:
    driver.add(with_targets(workflow(group_plan(tasks=1)), EVERYTHING, ENDS))
    driver.settle()
    assert due(driver) == [(0, "started", "")]
    driver.advance(6.0)
    assert due(driver) == [(0, "started", ""), (0, "completed", ""), (1, "completed", "")]


def test_notifications_of_a_failure_and_a_cancellation_are_due(driver: Driver) -> None:
    driver.add(with_targets(workflow(group_plan(tasks=1), uuid=FAILING), EVERYTHING))
    driver.settle()
    driver.advance(6.0)
    assert due(driver, FAILING) == [(0, "started", ""), (0, "failed", "")]
    driver.add(with_targets(workflow(group_plan(tasks=1)), EVERYTHING, ENDS))
    driver.settle()
    driver.cancel(force=True)
    driver.advance(1.0)
    assert due(driver) == [(0, "started", ""), (0, "canceled", "")]


def test_notification_of_a_long_wait_is_due_once_although_the_supervisor_is_killed(driver: Driver) -> None:
    driver.add(workflow(group_plan(tasks=1), uuid=LONG_RUNNING))
    driver.settle()
    early = NotifyTarget(on=(Trigger.WAITING,), credential="team", after_s=300.0)
    driver.add(with_targets(workflow(group_plan(tasks=1)), EVERYTHING, ENDS, early))
    waits_since = driver.clock.now()
    assert driver.settle() == waits_since + 300.0
    driver.advance(299.0)
    assert due(driver) == []
    driver.advance(2.0)
    assert due(driver) == [(2, "waiting", "train/0")]
    driver.advance(298.0)
    driver.restart()
    driver.advance(2.0)
    assert due(driver) == [(2, "waiting", "train/0"), (0, "waiting", "train/0")]
    for notification in driver.reader.notifications():
        sent = EventRecord(at=driver.clock.now(), details=NotificationSent(on="waiting", target="ci"), workflow="u1")
        driver.reader.finish_notification(notification, sent)
    for _ in range(2):
        driver.restart()
        driver.advance(60.0)
        assert due(driver) == []


def test_no_notification_is_due_while_a_python_environment_is_built(driver: Driver) -> None:
    plan = replace(group_plan(tasks=1), venv=Requirements(file="requirements.txt", lines=("torch",)))
    driver.backend.holds_builds = True
    driver.add(with_targets(workflow(plan), EVERYTHING))
    driver.settle()
    driver.advance(3600.0)
    assert driver.group().venv_builds
    assert due(driver) == []


def test_notification_is_due_for_a_workflow_that_this_version_cannot_run(driver: Driver) -> None:
    def refuse(*_: object) -> Backend:
        raise InputError("this version of distflow does not support it")

    driver.supervisor._open_backend = refuse
    driver.add(with_targets(workflow(group_plan(tasks=1)), EVERYTHING))
    driver.settle()
    assert due(driver) == [(0, "failed", "")]
