"""``tag``: add, remove and list tags."""

from __future__ import annotations

import json
from typing import cast

import pytest

from distflow.cli.ui import documents
from unit.cli.screen import Screen
from unit.state.stored import completed_group, submit, workflow


def test_tags_are_added_to_several_workflows_and_removed(screen: Screen) -> None:
    for number in (1, 2):
        submit(screen.store, workflow([completed_group()], number=number))
    assert screen.run("tag", "-w", "digits-1", "digits-2", "-a", "good", "fast") == 0
    assert screen.out == "digits-1: fast good\ndigits-2: fast good\n"
    assert screen.run("tag", "--workflow", "digits-2", "--remove", "good", "--add", "slow", "-r", "fast", "-t", "json") == 0
    assert json.loads(screen.out) == {"workflows": [{"name": "digits-2", "workflow_id": "digits-2", "tags": ["slow"]}]}
    assert screen.run("tag", "-w", "digits-2", "-r", "slow") == 0
    assert screen.out == "digits-2: no tags\n"
    assert screen.run("tag", "-t", "json") == 0
    assert json.loads(screen.out) == {"tags": [{"name": "fast", "workflows": 1}, {"name": "good", "workflows": 1}]}
    assert screen.run("tag") == 0
    assert screen.out.splitlines()[-1].split() == ["good", "1"]


def test_the_web_page_filters_by_tag_or_label(screen: Screen) -> None:
    submit(screen.store, workflow([completed_group()]))
    assert screen.run("tag", "-w", "digits-1", "-a", "good") == 0
    for text, count in (("#good", 1), ("#good=1", 0)):
        found = documents.workflows(screen.client, text, "", count=9, offset=0)["workflows"]
        assert len(cast("list[object]", found)) == count


def test_missing_tags_are_reported_in_a_sentence(screen: Screen) -> None:
    assert screen.run("tag") == 0
    assert screen.out == "There are no tags yet.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-a", "good"], "no workflow is given"),
        (["-w", "digits-1"], "no tag is given"),
        (["-w", "digits-1", "-a", "a,b"], "`a,b` is not a valid tag"),
        (["-w", "digits-1", "digits-9", "-a", "good"], "there is no workflow `digits-9`"),
    ],
)
def test_an_incomplete_request_changes_nothing(screen: Screen, arguments: list[str], message: str) -> None:
    submit(screen.store, workflow([completed_group()]))
    assert screen.run("tag", *arguments) == 2
    assert message in screen.err
    assert screen.store.tags() == {}
