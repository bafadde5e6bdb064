"""Removing workflows from a node, and reading its report of its workflows: names and numbers must be valid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from distflow.backends.allocated import leftovers
from distflow.backends.allocated.engine import Allocation
from distflow.backends.allocated.leftovers import reap_allocations, unknown_workflows_of_allocations
from distflow.backends.machines import cleanup, inspection
from distflow.backends.machines.cleanup import _workflow, clean_node, reap_node, uninstall_node, unknown_workflows_of_node
from distflow.backends.machines.inspection import ask_holders
from distflow.errors import NodeUnreachable
from distflow.pools.model import Node, Pool

UUID = "0b51e6a25bd54f0c9c5e6d2f4e7b1a01"


def report(**changes: Any) -> dict[str, Any]:
    attempt = {"attempt": f"{UUID}/g/t/0", "phase": "running", "pid": 7, "started_at": 1.5, "directory": "/r/x"} | changes
    return {"uuid": UUID, "memo": "", "attempts": [attempt]}


def test_a_valid_report_is_parsed() -> None:
    (attempt,) = _workflow(report(), None).attempts
    assert (attempt.name, attempt.pid, attempt.started_at, attempt.directory) == (f"{UUID}/g/t/0", 7, 1.5, "/r/x")


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt": f"{UUID}/../../x/0"}, {"attempt": f"{UUID}/g/t/-1"}, {"attempt": "other/g/t/0"}, {"attempt": 3},
        {"pid": "7"}, {"pid": -1}, {"pid": True}, {"started_at": "now"}, {"directory": "/r\x1b[2J"}, {"directory": "x" * 5000},
        {"phase": None},
    ],
)  # fmt: skip
def test_invalid_fields_are_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        _workflow(report(**changes), None)


def test_workflows_that_were_removed_before_the_connection_broke_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Link:
        def request(self, op: str, **fields: Any) -> dict[str, Any]:
            if op == "survey":
                old = {"bytes": 10, "modified_at": 0.0, "alive": []}
                return {"now": 9.0, "workflows": [{"uuid": one, **old} for one in ("a", "b", "c")], "free_bytes": 5}
            if fields["workflow"] == "b":
                raise NodeUnreachable("n1", "the connection broke")
            return {"freed_bytes": 10}

    monkeypatch.setattr(cleanup, "link_to", lambda *_: nullcontext(Link()))
    node = Node(name="n1", host="n1", root="/r", python="python3")
    pool = Pool(name="p", backend="ssh", nodes=(node,))
    found = clean_node(pool, node, older_than_s=1.0, unfinished=(), is_dry_run=False)
    assert (found.removed, found.kept, found.freed_bytes, found.free_bytes) == (("a",), 2, 10, 5)
    assert found.error == "the connection broke"


@pytest.mark.parametrize("ask", [reap_node, unknown_workflows_of_node, uninstall_node, ask_holders])
def test_errors_do_not_repeat_the_name_of_the_node(ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NodeUnreachable("n1", "connection refused")

    monkeypatch.setattr(cleanup, "link_to", refuse)
    monkeypatch.setattr(inspection, "link_to", refuse)
    node = Node(name="n1", host="n1", root="/r", python="python3")
    options: dict[object, dict[str, Any]] = {reap_node: {"is_dry_run": True}, unknown_workflows_of_node: {"known": ()}}
    assert ask(Pool(name="p", backend="ssh", nodes=(node,)), node, **options.get(ask, {})).error == "connection refused"


def test_unknown_fields_in_the_answer_of_a_node_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"user": "u", "attempt": "w/g/t/0", "pid": None, "gpus": [0, 1], "ports": [], "cpus": 0, "memory": 0}

    class Link:
        def request(self, *_: object, **__: object) -> dict[str, Any]:
            return {"holders": [known | {"color": "red"}], "foreign": []}

    monkeypatch.setattr(inspection, "link_to", lambda *_: nullcontext(Link()))
    node = Node(name="n1", host="n1", root="/r", python="python3")
    assert [one.gpus for one in ask_holders(Pool(name="p", backend="ssh", nodes=(node,)), node).holders] == [(0, 1)]


@pytest.mark.parametrize(("name", "shown"), [("p", "no answer"), ("login1", "login1: no answer")])
def test_errors_of_an_engine_name_only_a_login_node(name: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def allocations(self) -> None:
            raise NodeUnreachable(name, "no answer")

        def close(self) -> None:
            pass

    monkeypatch.setattr(leftovers, "open_engine", lambda _: Engine())
    pool = Pool(name="p", backend="slurm", nodes=())
    assert reap_allocations(pool, ended=(), unfinished=(), is_dry_run=True).error == shown
    assert [one.error for one in unknown_workflows_of_allocations(pool, known=())] == [shown]


def test_an_allocation_that_cannot_be_released_is_not_shown_as_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def allocations(self) -> dict[str, Allocation]:
            return {str(job): Allocation(workflow=f"w{job}", group="g", attempt=1) for job in (1, 2, 3)}

        def release(self, ids: Sequence[str]) -> None:
            if ids == ["2"]:
                raise NodeUnreachable("p", "no answer")

        def close(self) -> None:
            pass

    monkeypatch.setattr(leftovers, "open_engine", lambda _: Engine())
    pool = Pool(name="p", backend="slurm", nodes=())
    reaped = reap_allocations(pool, ended=("w1", "w2", "w3"), unfinished=(), is_dry_run=False)
    assert [(one.name, one.error) for one in reaped.found] == [("job 1", ""), ("job 2", "no answer")]
    assert reaped.error == "no answer"
