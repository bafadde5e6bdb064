"""``list``: the newest workflows, filtered."""

from __future__ import annotations

import json

import pytest

from distflow.cli.app import run
from distflow.lifecycle.states import Reason, WorkflowState
from distflow.state.record import Priority, WorkflowRecord
from distflow.structs import replace
from unit.cli.screen import Screen, assert_golden
from unit.state.stored import T0, completed_group, running_group, submit, supervised, workflow


@pytest.fixture
def filled_screen(screen: Screen) -> Screen:
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


def running(number: int) -> WorkflowRecord:
    """Return a running workflow."""
    return workflow([running_group()], state=WorkflowState.RUNNING, number=number)


def ids(screen: Screen, *arguments: str) -> list[str]:
    """Return the listed ids from the JSON document."""
    assert screen.run("list", "-t", "json", *arguments) == 0
    return [one["name"] for one in json.loads(screen.out)["workflows"]]


def test_the_newest_workflow_is_listed_last(filled_screen: Screen) -> None:
    assert filled_screen.run("list") == 0
    assert_golden("list.txt", filled_screen.out)
    assert filled_screen.err == ""


def test_json_output_is_one_document_in_the_same_order(filled_screen: Screen) -> None:
    assert filled_screen.run("list", "-t", "json", "-c", "2") == 0
    assert_golden("list.json", filled_screen.out)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-c", "2"], ["digits-3", "wide-resnet-2"]),
        (["-c", "2", "-f", "1"], ["wide-resnet-1", "digits-3"]),
        (["-c", "2", "-o", "desc"], ["wide-resnet-2", "digits-3"]),
        (["-n", "resnet"], ["wide-resnet-1", "wide-resnet-2"]),
        (["-n", "digits-2"], ["digits-2"]),
        (["-p", "cloud", "-p", "local"], ["wide-resnet-1", "digits-3"]),
        # A status can mean several pairs of a state and a reason, and the reason can be absent.
        (["-s", "FAILED"], ["digits-2", "digits-3"]),
        (["-s", "failed_exec_timeout", "-s", "COMPLETED"], ["digits-1", "wide-resnet-1"]),
        (["-s", "FAILED_CANCELED"], ["wide-resnet-2"]),
        (["-s", "RUNNING"], []),
        # A status of OSMO, which workflows of distflow never have.
        (["-s", "WAITING"], []),
        (["-s", "waiting", "-s", "FAILED"], ["digits-2", "digits-3"]),
    ],
)
def test_workflows_are_selected_by_count_name_pool_and_status(
    filled_screen: Screen, arguments: list[str], expected: list[str]
) -> None:
    assert ids(filled_screen, *arguments) == expected


def test_an_unknown_status_is_an_error_with_a_suggestion(filled_screen: Screen) -> None:
    assert filled_screen.run("list", "-s", "COMPLETE") == 2
    assert filled_screen.err.startswith("error: `COMPLETE` is not a status of a workflow\ndid you mean `COMPLETED`? statuses: ")
    assert filled_screen.out == ""


def test_an_empty_list_is_reported_in_a_sentence(screen: Screen) -> None:
    assert screen.run("list") == 0
    assert screen.out == "There are no workflows yet.\n"
    assert screen.run("list", "-n", "x") == 0
    assert screen.out == "No workflow matches.\n"
    assert screen.run("list", "-t", "json") == 0
    assert json.loads(screen.out) == {"workflows": []}


def test_a_workflow_that_has_not_started_has_no_elapsed_time(screen: Screen) -> None:
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
        "NORMAL",
        "lab",
        "-",
    ]


@pytest.fixture
def labeled_screen(screen: Screen) -> Screen:
    """Return a screen with three workflows that have ended, a day apart, with labels, tags and priorities."""
    marks = [(Priority.HIGH, {"team": "vision"}), (Priority.NORMAL, {"team": "speech", "run": "a.1"}), (Priority.LOW, {})]
    for number, (priority, labels) in enumerate(marks):
        record = workflow([completed_group()], number=number, at=T0 + 86400 * number)
        record = submit(screen.store, replace(record, priority=priority, labels=labels))
        screen.store.tag(record.uuid, add=["all", f"tag-{number}"])
    return screen


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--label", "team=*"], [1, 2]),
        (["--label", "team=(vision|x)"], [1]),
        (["--label", "team=*", "--label", "run=a*"], [2]),
        (["--no-label", "run"], [1, 3]),
        (["--tags", "tag-0", "tag-2"], [1, 3]),
        (["--priority", "low", "HIGH"], [1, 3]),
        (["--submitted-after", "2025-04-12"], [2, 3]),
        (["--submitted-after", "2025-04-12", "--submitted-before", "2025-04-13"], [2]),
        (["-u", "bob"], []),
        (["-u", "bob", "ada", "-s", "COMPLETED", "FAILED"], [1, 2, 3]),
        (["--all-users"], [1, 2, 3]),
    ],
)
def test_workflows_are_selected_by_label_tag_priority_date_and_user(
    labeled_screen: Screen, arguments: list[str], expected: list[int]
) -> None:
    assert ids(labeled_screen, *arguments) == [f"digits-{number}" for number in expected]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--label", "team"], "is not of the form KEY=SELECTOR"),
        (["--label", "team=[a]"], "use letters"),
        (["--label", "-=a"], "is not a valid label key"),
        (["--label", "team=(a)"], "alternatives such as `(a|b)`"),
        (["--label", "team=" + "(a|b)" * 6], "more than 32 patterns"),
        (["--no-label", "a=b"], "is not a valid label key"),
        (["--priority", "urgent"], "`urgent` is not a priority"),
        (["--submitted-after", "yesterday"], "is not a valid date\nuse the form YYYY-MM-DD"),
        (["--submitted-after", "2025-04-13", "--submitted-before", "2025-04-12"], "is later than"),
        (["-u", "ada", "--all-users"], "cannot be combined"),
    ],
)
def test_invalid_filters_are_errors(screen: Screen, arguments: list[str], message: str) -> None:
    assert screen.run("list", *arguments) == 2
    assert message in screen.err


def test_labels_tags_and_priorities_are_shown_if_present(labeled_screen: Screen) -> None:
    assert labeled_screen.run("list") == 0
    assert_golden("list_marked.txt", labeled_screen.out)
    assert labeled_screen.run("query", "digits-2") == 0
    assert "Labels       team=speech run=a.1\nTags         all tag-1\n" in labeled_screen.out
    assert "Priority" not in labeled_screen.out
    assert labeled_screen.run("query", "digits-1") == 0
    assert "Priority     HIGH\n" in labeled_screen.out
    assert labeled_screen.run("query", "digits-1", "-t", "json") == 0
    answer = json.loads(labeled_screen.out)
    assert (answer["priority"], answer["labels"], answer["tags"]) == ("HIGH", {"team": "vision"}, ["all", "tag-0"])


@pytest.mark.parametrize("broken", ["groups SET record", "documents SET plan"])
def test_an_unreadable_record_does_not_hide_tasks_of_other_workflows(
    screen: Screen, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    names = [submit(screen.store, running(number)).id for number in (1, 2)]
    screen.store._db.execute(f"UPDATE {broken} = ? WHERE workflow = ?", (b'{"name": "tra', running(1).uuid))
    capsys.readouterr()
    with supervised(screen.directory):
        assert run(["task", "list", "--all-users"]) == 0
        shown = capsys.readouterr()
    assert (names[0] in shown.out, names[1] in shown.out) == (False, True)
    assert f"warning: {names[0]} is left out" in shown.err
    assert run(["resource", "list", "--all", "-t", "json"]) == 0
    assert capsys.readouterr().err.startswith(f"warning: the usage of workflow {names[0]} is not included")
