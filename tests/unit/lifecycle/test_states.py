"""The tables of states and reasons are complete, and the state of a workflow follows from its groups as in OSMO."""

from __future__ import annotations

import itertools

import pytest

from distflow.lifecycle.states import (
    REASON_TEXT,
    TRANSITIONS,
    WORKFLOW_TRANSITIONS,
    Reason,
    State,
    WorkflowState,
    is_legal,
    roll_up_workflow,
    status_of,
    workflow_status_of,
)

OSMO_STATUSES = {
    "PENDING", "WAITING", "SCHEDULING", "INITIALIZING", "RUNNING", "STOPPING", "COMPLETED", "RESCHEDULED", "FAILED",
    "FAILED_CANCELED", "FAILED_SERVER_ERROR", "FAILED_BACKEND_ERROR", "FAILED_EXEC_TIMEOUT", "FAILED_QUEUE_TIMEOUT",
    "FAILED_IMAGE_PULL", "FAILED_UPSTREAM", "FAILED_EVICTED", "FAILED_START_ERROR", "FAILED_START_TIMEOUT",
    "FAILED_PREEMPTED", "FAILED_SUBMISSION",
}  # fmt: skip


def test_every_state_and_reason_is_in_its_table() -> None:
    assert set(TRANSITIONS) == set(State)
    assert set(WORKFLOW_TRANSITIONS) == set(WorkflowState)
    assert set(REASON_TEXT) == set(Reason)


@pytest.mark.parametrize(("state", "reason"), list(itertools.product(State, [None, *Reason])))
def test_every_state_and_reason_of_a_task_has_a_status_of_osmo(state: State, reason: Reason | None) -> None:
    assert status_of(state, reason) in OSMO_STATUSES


@pytest.mark.parametrize(("state", "reason"), list(itertools.product(WorkflowState, [None, *Reason])))
def test_every_state_and_reason_of_a_workflow_has_a_status_of_osmo(state: WorkflowState, reason: Reason | None) -> None:
    assert workflow_status_of(state, reason) in OSMO_STATUSES


def test_final_states_are_left_only_by_a_retry() -> None:
    for before, after in itertools.product(State, State):
        if before is not after and (before.is_final or after is State.RESCHEDULED):
            assert is_legal(before, after) is (before.is_final and after is State.RESCHEDULED)


def test_a_final_state_can_be_reached_from_every_state() -> None:
    for state in State:
        reached, frontier = {state}, [state]
        while frontier:
            frontier = [after for before in frontier for after in TRANSITIONS[before] if after not in reached]
            reached |= set(frontier)
        assert any(one.is_final for one in reached), state


C, F, R, W = State.COMPLETED, State.FAILED, State.RUNNING, State.SCHEDULING


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([(W, None)], (WorkflowState.PENDING, None)),
        ([(C, None), (W, None)], (WorkflowState.RUNNING, None)),
        ([(C, None), (C, None)], (WorkflowState.COMPLETED, None)),
        ([(F, Reason.EXIT_CODE), (R, None)], (WorkflowState.RUNNING, None)),
        ([(F, Reason.EXIT_CODE), (F, Reason.UPSTREAM)], (WorkflowState.FAILED, Reason.EXIT_CODE)),
        ([(F, Reason.EXIT_CODE), (F, Reason.SIGNAL)], (WorkflowState.FAILED, None)),
        ([(F, Reason.EXIT_CODE), (F, Reason.EXEC_TIMEOUT)], (WorkflowState.FAILED, Reason.EXEC_TIMEOUT)),
        ([(F, Reason.EXIT_CODE), (State.CANCELED, Reason.CANCELED)], (WorkflowState.CANCELED, Reason.CANCELED)),
    ],
)
def test_the_state_of_a_workflow_follows_from_those_of_its_groups(
    groups: list[tuple[State, Reason | None]], expected: tuple[WorkflowState, Reason | None]
) -> None:
    assert roll_up_workflow(groups) == expected
