"""What people see of many stacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distflow.backends.machines.inspection import Asked, TaskStacks
from distflow.cli.render.stacks import stacks_json, stacks_text
from distflow.cli.render.tables import Paint
from distflow.pools.model import Node


def process(pid: int, *calls: str, rank: int | None = None, error: str | None = None, name: str = "python3") -> dict[str, Any]:
    frames = [{"function": call, "file": "train.py", "line": number} for number, call in enumerate(calls, 1)]
    known: dict[str, Any] = {"pid": pid, "parent": 1, "name": name, "state": "S", "waits_in": "futex_wait", "error": error}
    ranks = {} if rank is None else {"RANK": rank}
    threads = [{"name": "MainThread", "is_active": True, "frames": frames}] if calls else None
    return known | {"is_python": name == "python3", "ranks": ranks, "threads": threads}


def task(name: str, *processes: dict[str, Any], tool: str | None = "/bin/py-spy", rule: int = 0, error: str = "") -> TaskStacks:
    node = Node(name=f"n-{name}", host="h", root="~/.distflow", python="/opt/python")
    seen = None if error else {"tool": tool, "processes": list(processes), "host_rule": rule}
    return TaskStacks(asked=Asked(task=name, group="g", attempt="a", node=node), seen=seen, error=error)


def shown(*tasks: TaskStacks) -> str:
    return stacks_text("w-1", tasks, Paint())


def test_equal_stacks_stand_together_and_the_odd_one_is_named() -> None:
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
        "elsewhere than most: worker on n-worker (pid 3, rank 2)\n"
    )


def test_two_camps_of_one_size_have_no_odd_one() -> None:
    text = shown(task("a", process(1, "f")), task("b", process(2, "g")))
    assert "elsewhere" not in text


def test_long_stacks_are_cut_and_say_so() -> None:
    text = shown(task("a", process(1, *[f"f{number}" for number in range(20)])))
    assert "    … 4 calls more\n" in text
    assert "f15 (" in text
    assert "f16 (" not in text


def test_what_could_not_be_seen_is_said_with_what_to_do() -> None:
    text = shown(
        task("a", process(1), tool=None),
        task("b", process(2, error="Error: Permission Denied"), rule=1),
        task("c", error="n-c: connection refused"),
    )
    assert "a on n-a (pid 1)" in text
    assert "    python3 sleeps in futex_wait\n" in text
    assert "c: not seen: n-c: connection refused\n" in text
    assert (
        "no Python stacks of n-a: py-spy is not there\n  install it into the node's python: /opt/python -m pip install py-spy"
        in text
    )
    assert (
        "n-b: Error: Permission Denied\n  only root may look into processes there: sudo sysctl kernel.yama.ptrace_scope=0"
        in text
    )


def test_the_document_holds_it_all() -> None:
    tasks = [task("a", process(1, "f")), task("c", error="gone")]
    document = stacks_json("w-1", tasks)
    assert document["name"] == "w-1"
    assert [(one["task"], one["node"], one["error"], len(one["processes"])) for one in document["tasks"]] == [
        ("a", "n-a", None, 1),
        ("c", "n-c", "gone", 0),
    ]


def test_the_age_of_a_heartbeat_is_told() -> None:
    one, other = task("a", process(1, "f")), task("b", process(2, "f"))
    beating = replace(one, seen={**(one.seen or {}), "heartbeat_age_s": 312.4})
    text = stacks_text("w-1", [beating, other], Paint())
    assert text.endswith("\na: its last heartbeat was 5:12 ago\n")
    assert [found["heartbeat_age_s"] for found in stacks_json("w-1", [beating, other])["tasks"]] == [312.4, None]
