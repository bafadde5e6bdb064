"""``list``: the newest workflows, filtered."""

from __future__ import annotations

import json

import pytest

from distflow.lifecycle.states import Reason, WorkflowState
from unit.cli.screen import Screen, hold_against
from unit.state.stored import T0, completed_group, running_group, submit, supervised, workflow


@pytest.fixture
def several(screen: Screen) -> Screen:
    """Return a screen with five workflows that have ended, a minute apart."""
    ends = [
        ("digits", "lab", WorkflowState.COMPLETED, None),
        ("digits", "lab", WorkflowState.FAILED, Reason.EXIT_CODE),
        ("wide-resnet", "cloud", WorkflowState.FAILED, Reason.EXEC_TIMEOUT),
        ("digits", "local", WorkflowState.FAILED, None),
        ("wide-resnet", "lab", WorkflowState.CANCELED, Reason.CANCELED),
    ]
    for number, (name, pool, state, reason) in enumerate(ends):
        record = workflow(
            [completed_group()], name=name, pool=pool, state=state, reason=reason, number=number, at=T0 + 60 * number
        )
        submit(screen.store, record)
    return screen


def ids(screen: Screen, *arguments: str) -> list[str]:
    """Return the ids that are listed, from the document."""
    assert screen.run("list", "-t", "json", *arguments) == 0
    return [one["name"] for one in json.loads(screen.out)["workflows"]]


def test_the_newest_is_at_the_bottom(several: Screen) -> None:
    assert several.run("list") == 0
    hold_against("list.txt", several.out)
    assert several.err == ""


def test_programs_get_one_document_in_the_same_order(several: Screen) -> None:
    assert several.run("list", "-t", "json", "-c", "2") == 0
    hold_against("list.json", several.out)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-c", "2"], ["digits-3", "wide-resnet-2"]),
        (["-c", "2", "-f", "1"], ["wide-resnet-1", "digits-3"]),
        (["-c", "2", "-o", "desc"], ["wide-resnet-2", "digits-3"]),
        (["-n", "resnet"], ["wide-resnet-1", "wide-resnet-2"]),
        (["-n", "digits-2"], ["digits-2"]),
        (["-p", "cloud", "-p", "local"], ["wide-resnet-1", "digits-3"]),
        # One word of people is several pairs of state and reason, and a reason may be absent.
        (["-s", "FAILED"], ["digits-2", "digits-3"]),
        (["-s", "failed_exec_timeout", "-s", "COMPLETED"], ["digits-1", "wide-resnet-1"]),
        (["-s", "FAILED_CANCELED"], ["wide-resnet-2"]),
        (["-s", "RUNNING"], []),
    ],
)
def test_filters(several: Screen, arguments: list[str], expected: list[str]) -> None:
    assert ids(several, *arguments) == expected


def test_an_unknown_status_is_an_error_with_a_suggestion(several: Screen) -> None:
    assert several.run("list", "-s", "COMPLETE") == 2
    assert several.err.startswith("error: 'COMPLETE' is no status of a workflow\ndid you mean `COMPLETED`? statuses: ")
    assert several.out == ""


def test_nothing_is_a_sentence(screen: Screen) -> None:
    assert screen.run("list") == 0
    assert screen.out == "There are no workflows yet.\n"
    assert screen.run("list", "-n", "x") == 0
    assert screen.out == "No workflow matches.\n"
    assert screen.run("list", "-t", "json") == 0
    assert json.loads(screen.out) == {"workflows": []}


def test_what_has_not_started_took_no_time(screen: Screen) -> None:
    submit(screen.store, workflow([running_group()], state=WorkflowState.PENDING))
    with supervised(screen.directory):
        assert screen.run("list") == 0
    assert screen.out.splitlines()[-1].split() == [
        "ada",
        "digits-1",
        "Apr",
        "11,",
        "2025",
        "21:31",
        "UTC",
        "PENDING",
        "lab",
        "-",
    ]
