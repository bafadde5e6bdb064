"""Who is at which collective, as people see it."""

from __future__ import annotations

from typing import Any

import pytest

from distflow.backends.machines.inspection import Asked, TaskStacks
from distflow.cli.render.collectives import collective_lines
from distflow.cli.render.stacks import stacks_json
from distflow.cli.render.tables import Paint
from distflow.pools.model import Node

Place = tuple[int, str, bool, int]
"""Number, operation, whether it is over, the last one begun."""
IN_5, AFTER_4 = (5, "all_reduce", False, 5), (4, "all_reduce", True, 4)


def task(
    name: str, places: dict[int, Place], *, group: str = "g", world: range = range(4), pg: str = "0 default_pg"
) -> TaskStacks:
    node = Node(name=f"n-{name}", host="h", root="~/.distflow", python="/opt/python")
    told = []
    for rank, (number, operation, is_over, entered) in places.items():
        there = {"number": number, "operation": operation, "is_over": is_over, "entered": entered}
        told.append({"rank": rank, "groups": [{"name": "0 default_pg", "ranks": [*world], **there}]})
    seen: dict[str, Any] = {"tool": None, "processes": [], "collectives": told}
    return TaskStacks(asked=Asked(task=name, group=group, attempt="a", node=node), seen=seen)


def shown(*tasks: TaskStacks) -> str:
    return "\n".join(collective_lines(tasks, Paint()))


def test_who_has_not_come_to_the_collective_that_others_wait_in_is_named() -> None:
    assert shown(task("master", {0: IN_5, 1: IN_5}), task("worker", {2: IN_5, 3: AFTER_4})) == (
        "process group 0 default_pg, ranks 0-3\n"
        "    in all_reduce, collective 5: ranks 0-2\n"
        "    after all_reduce, collective 4: rank 3\n"
        "  ranks 0-2 wait in all_reduce for rank 3 (worker on n-worker)\n"
    )


def test_a_rank_that_has_run_ahead_is_not_waited_for() -> None:
    """It queues its collectives, and the one that it waits in is a later one."""
    text = shown(task("a", {0: (5, "broadcast", False, 9), 1: (6, "all_reduce", False, 6), 2: (4, "barrier", True, 4)}))
    assert "  rank 0 waits in broadcast for rank 2 (a on n-a)\n" in text
    assert text.index("collective 6: rank 1") < text.index("collective 5: rank 0") < text.index("collective 4: rank 2")


def test_one_that_has_begun_it_while_it_waits_in_an_earlier_one_is_named_as_waiting() -> None:
    text = shown(
        task("a", {0: (3, "barrier", False, 8), 1: (3, "barrier", False, 3), 2: (0, "", True, 0), 3: (2, "x", True, 2)})
    )
    assert "    before the first collective: rank 2\n" in text
    assert "  ranks 0-1 wait in barrier for rank 2 (a on n-a), rank 3 (a on n-a)\n" in text


def test_different_operations_under_one_number_are_a_mismatch() -> None:
    text = shown(task("a", {0: IN_5, 1: IN_5, 2: (5, "broadcast", False, 5), 3: IN_5}))
    assert "  collective 5 is not the same everywhere: all_reduce on ranks 0-1, 3, broadcast on rank 2\n" in text
    assert "wait" not in text


def test_all_in_the_same_one_have_nobody_to_wait_for() -> None:
    text = shown(task("a", dict.fromkeys(range(4), IN_5)))
    assert text == "process group 0 default_pg, ranks 0-3\n    in all_reduce, collective 5: ranks 0-3\n"


def test_ranks_that_told_nothing_are_named_as_such() -> None:
    assert "    not known of: ranks 0, 3\n" in shown(task("a", {1: IN_5, 2: IN_5}))


def test_worlds_of_two_groups_of_a_workflow_are_not_mixed() -> None:
    text = shown(task("a", {0: IN_5}, group="g", world=range(1)), task("b", {0: AFTER_4}, group="h", world=range(1)))
    assert text == "process group 0 default_pg, rank 0\n    in all_reduce, collective 5: rank 0\n"


@pytest.mark.parametrize(
    ("tasks", "text"),
    [([task("a", {0: AFTER_4, 1: AFTER_4})], "no rank waits in a collective\n"), ([task("a", {})], ""), ([], "")],
)
def test_where_nobody_waits_that_is_all_there_is_to_say(tasks: list[TaskStacks], text: str) -> None:
    assert shown(*tasks) == text


def test_many_that_are_missing_are_cut_and_terminals_are_safe() -> None:
    places = dict.fromkeys(range(20), AFTER_4) | {20: (5, "all\x1b[31m", False, 5)}
    text = shown(task("a", places, world=range(21)))
    assert text.endswith("rank 7 (a on n-a), and 12 more\n")
    assert "\x1b" not in text


def test_the_document_has_what_each_rank_told() -> None:
    seen = task("a", {0: IN_5})
    assert stacks_json("w-1", [seen])["tasks"][0]["collectives"] == (seen.seen or {})["collectives"]
