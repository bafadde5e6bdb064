"""``fan_out``: limited parallelism, and one outcome for each node, in order."""

from __future__ import annotations

import threading

import pytest

from distflow.errors import NodeUnreachable
from distflow.transports.base import Transport, fan_out
from distflow.transports.local import LocalTransport


def test_outcomes_have_the_order_of_the_nodes() -> None:
    transports = [LocalTransport(f"n{number}") for number in range(20)]

    def action(transport: Transport) -> str:
        if transport.name.endswith("3"):
            raise NodeUnreachable(transport.name, "gone")
        return transport.name.upper()

    outcomes = fan_out(transports, action, limit=4)
    assert [one.node for one in outcomes] == [one.name for one in transports]
    assert [one.node for one in outcomes if not one.is_ok] == ["n3", "n13"]
    assert [one.value for one in outcomes if one.is_ok] == [f"N{number}" for number in range(20) if number not in (3, 13)]
    assert str(outcomes[3].error) == "n3: gone"


def test_the_limit_is_respected() -> None:
    lock, running, most = threading.Lock(), [0], [0]
    full = threading.Event()

    def action(_: Transport) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
            if running[0] == 3:
                full.set()
        assert full.wait(60)
        with lock:
            running[0] -= 1

    fan_out([LocalTransport(str(number)) for number in range(9)], action, limit=3)
    assert most == [3]


def test_without_nodes_there_are_no_outcomes() -> None:
    assert fan_out([], lambda one: one.name) == ()


def test_a_bug_is_raised() -> None:
    def action(_: Transport) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fan_out([LocalTransport()], action)
