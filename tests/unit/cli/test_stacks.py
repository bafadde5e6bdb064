"""The output of ``workflow stacks``: stacks of processes, and collectives of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from distflow.backends.machines.inspection import InspectedTask, TaskStacks
from distflow.cli.render.stacks import collective_lines, stacks_json, stacks_text
from distflow.cli.render.tables import Paint
from distflow.pools.model import Node
from distflow.structs import replace


def process(pid: int, *calls: str, rank: int | None = None, error: str | None = None, name: str = "python3") -> dict[str, Any]:
    frames = [{"function": call, "file": "train.py", "line": number} for number, call in enumerate(calls, 1)]
    known: dict[str, Any] = {"pid": pid, "parent": 1, "name": name, "state": "S", "waits_in": "futex_wait", "error": error}
    ranks = {} if rank is None else {"RANK": rank}
    threads = [{"name": "MainThread", "is_active": True, "frames": frames}] if calls else None
    return known | {"is_python": name == "python3", "ranks": ranks, "threads": threads}


def task(
    name: str, *processes: dict[str, Any], tool: str | None = "/bin/py-spy", rule: int = 0, error: str = "",
    python: str = "/opt/python",
) -> TaskStacks:  # fmt: skip
    node = Node(name=f"n-{name}", host="h", root="~/.distflow", python=python)
    answer = None if error else {"tool": tool, "processes": list(processes), "host_rule": rule}
    return TaskStacks(task=InspectedTask(name=name, group="g", attempt="a", node=node), report=answer, error=error)


def shown(*tasks: TaskStacks) -> str:
    return stacks_text("w-1", tasks, Paint())


def test_equal_stacks_are_grouped_and_a_different_one_is_named() -> None:
    text = shown(
        task("master", process(1, "all_reduce", "main", rank=0), process(9, name="sh")),
        task("worker", process(2, "all_reduce", "main", rank=1), process(3, "load", "main", rank=2)),
    )
    assert text == (
        "2 processes here: master on n-master (pid 1, rank 0), worker on n-worker (pid 2, rank 1)\n"
        "    all_reduce (train.py:1)\n"
        "    main (train.py:2)\n"
        "\n"
        "1 process here: worker on n-worker (pid 3, rank 2)\n"
        "    load (train.py:1)\n"
        "    main (train.py:2)\n"
        "\n"
        "different from most: worker on n-worker (pid 3, rank 2)\n"
    )


def test_launchers_are_left_out_if_their_ranks_are_known() -> None:
    launcher = process(5, "run", "main")
    ranks = [process(pid, "all_reduce", rank=pid - 6) | {"parent": 5} for pid in (6, 7)]
    loader = process(8, "read") | {"parent": 6}
    text = shown(task("a", launcher, *ranks, loader))
    assert "pid 5" not in text
    assert "2 processes here: a on n-a (pid 6, rank 0), a on n-a (pid 7, rank 1)" in text
    assert "1 process here: a on n-a (pid 8)" in text
    assert "pid 5" in shown(task("a", launcher, process(6, "all_reduce") | {"parent": 5}))  # no process is known to be a rank


def test_two_stacks_of_equal_frequency_are_not_called_different() -> None:
    text = shown(task("a", process(1, "f")), task("b", process(2, "g")))
    assert "different from most" not in text


def test_long_stacks_are_cut_with_a_note() -> None:
    text = shown(task("a", process(1, *[f"f{number}" for number in range(20)])))
    assert "    … 4 more calls\n" in text
    assert "f15 (" in text
    assert "f16 (" not in text


def test_missing_stacks_are_reported_with_remedies() -> None:
    text = shown(
        task("a", process(1), tool=None),
        task("b", process(2, error="Error: Permission Denied"), rule=1),
        task("c", error="n-c: connection refused"),
        task("d", process(1), tool=None, python="/opt/other"),
        task("e", process(1), tool=None),
    )
    assert "a on n-a (pid 1)" in text
    assert "    python3 sleeps in futex_wait\n" in text
    assert "c: no stacks: n-c: connection refused\n" in text
    assert (
        "no Python stacks of n-a, n-e: py-spy is not installed\n"
        "  install it for the node's Python: /opt/python -m pip install py-spy\n"
        "no Python stacks of n-d: py-spy is not installed\n"
        "  install it for the node's Python: /opt/other -m pip install py-spy\n" in text
    )
    assert (
        "n-b: Error: Permission Denied\n"
        "  only root may inspect processes there; to change that: sudo sysctl kernel.yama.ptrace_scope=0" in text
    )
    # With rule 3, not even root may inspect processes.
    assert "only root" not in shown(task("b", process(2, error="Error: Permission Denied"), rule=3))


def test_json_contains_stacks_and_errors() -> None:
    tasks = [task("a", process(1, "f")), task("c", error="gone")]
    document = stacks_json("w-1", tasks)
    assert document["name"] == "w-1"
    assert [(one["task"], one["node"], one["error"], len(one["processes"])) for one in document["tasks"]] == [
        ("a", "n-a", None, 1),
        ("c", "n-c", "gone", 0),
    ]


def test_the_age_of_a_heartbeat_is_shown() -> None:
    one, other = task("a", process(1, "f")), task("b", process(2, "f"))
    beating = replace(one, report={**(one.report or {}), "heartbeat_age_s": 312.4})
    text = stacks_text("w-1", [beating, other], Paint())
    assert text.endswith("\na: last heartbeat 5:12 ago\n")
    assert [found["heartbeat_age_s"] for found in stacks_json("w-1", [beating, other])["tasks"]] == [312.4, None]


Report = tuple[int, str, bool, int]
"""The number and operation of a collective, whether it has ended, and the number of the last entered collective."""
IN_5, AFTER_4 = (5, "all_reduce", False, 5), (4, "all_reduce", True, 4)


def rank_reports(
    name: str, reports: dict[int, Report], *, group: str = "g", world: range = range(4), pg: str = "0 default_pg"
) -> TaskStacks:
    node = Node(name=f"n-{name}", host="h", root="~/.distflow", python="/opt/python")
    collectives = []
    for rank, (number, operation, is_over, entered) in reports.items():
        state = {"number": number, "operation": operation, "is_over": is_over, "entered": entered}
        collectives.append({"rank": rank, "groups": [{"name": "0 default_pg", "ranks": [*world], **state}]})
    answer: dict[str, Any] = {"tool": None, "processes": [], "collectives": collectives}
    return TaskStacks(task=InspectedTask(name=name, group=group, attempt="a", node=node), report=answer)


def shown_collectives(*tasks: TaskStacks) -> str:
    return "\n".join(collective_lines(tasks, Paint()))


def test_a_rank_that_has_not_entered_a_collective_is_named() -> None:
    assert shown_collectives(rank_reports("master", {0: IN_5, 1: IN_5}), rank_reports("worker", {2: IN_5, 3: AFTER_4})) == (
        "process group 0 default_pg, ranks 0-3\n"
        "    in all_reduce, collective 5: ranks 0-2\n"
        "    after all_reduce, collective 4: rank 3\n"
        "  ranks 0-2 wait in all_reduce for rank 3 (worker on n-worker)\n"
    )


def test_a_rank_that_is_ahead_is_not_named_as_missing() -> None:
    """A rank can queue collectives, and wait in a later one."""
    text = shown_collectives(
        rank_reports("a", {0: (5, "broadcast", False, 9), 1: (6, "all_reduce", False, 6), 2: (4, "barrier", True, 4)})
    )
    assert "  rank 0 waits in broadcast for rank 2 (a on n-a)\n" in text
    assert text.index("collective 6: rank 1") < text.index("collective 5: rank 0") < text.index("collective 4: rank 2")


def test_a_rank_with_queued_collectives_is_named_as_waiting() -> None:
    text = shown_collectives(
        rank_reports("a", {0: (3, "barrier", False, 8), 1: (3, "barrier", False, 3), 2: (0, "", True, 0), 3: (2, "x", True, 2)})
    )
    assert "    before the first collective: rank 2\n" in text
    assert "  ranks 0-1 wait in barrier for rank 2 (a on n-a), rank 3 (a on n-a)\n" in text


def test_different_operations_with_one_number_are_a_mismatch() -> None:
    text = shown_collectives(rank_reports("a", {0: IN_5, 1: IN_5, 2: (5, "broadcast", False, 5), 3: IN_5}))
    assert "  collective 5 differs between ranks: all_reduce on ranks 0-1, 3, broadcast on rank 2\n" in text
    assert "wait" not in text


def test_no_rank_is_missing_if_all_are_in_the_same_collective() -> None:
    text = shown_collectives(rank_reports("a", dict.fromkeys(range(4), IN_5)))
    assert text == "process group 0 default_pg, ranks 0-3\n    in all_reduce, collective 5: ranks 0-3\n"


def test_ranks_without_a_report_are_unknown() -> None:
    assert "    unknown: ranks 0, 3\n" in shown_collectives(rank_reports("a", {1: IN_5, 2: IN_5}))


def test_worlds_of_two_groups_of_a_workflow_are_not_mixed() -> None:
    text = shown_collectives(
        rank_reports("a", {0: IN_5}, group="g", world=range(1)), rank_reports("b", {0: AFTER_4}, group="h", world=range(1))
    )
    assert text == "process group 0 default_pg, rank 0\n    in all_reduce, collective 5: rank 0\n"


@pytest.mark.parametrize(
    ("tasks", "text"),
    [
        ([rank_reports("a", {0: AFTER_4, 1: AFTER_4})], "No rank waits in a collective.\n"),
        ([rank_reports("a", {})], ""),
        ([], ""),
    ],
)
def test_no_collectives_are_listed_if_no_rank_waits(tasks: list[TaskStacks], text: str) -> None:
    assert shown_collectives(*tasks) == text


def test_many_missing_ranks_are_cut_and_control_characters_are_removed() -> None:
    reports = dict.fromkeys(range(20), AFTER_4) | {20: (5, "all\x1b[31m", False, 5)}
    text = shown_collectives(rank_reports("a", reports, world=range(21)))
    assert text.endswith("rank 7 (a on n-a), and 12 more\n")
    assert "\x1b" not in text


def test_json_contains_the_report_of_each_rank() -> None:
    stacks = rank_reports("a", {0: IN_5})
    assert stacks_json("w-1", [stacks])["tasks"][0]["collectives"] == (stacks.report or {})["collectives"]
