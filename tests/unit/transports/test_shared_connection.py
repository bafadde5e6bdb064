"""Connections that several threads share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from distflow.errors import NodeUnreachable
from distflow.transports.shared_connection import SharedConnection

_LIMIT_S = 30.0


class _SlowConnection:
    """A connection that is made when ``go`` is set, even if it is closed before."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.is_connecting = threading.Event()
        self.is_active = True

    def connect(self) -> None:
        self.is_connecting.set()
        assert self.go.wait(_LIMIT_S)

    def close(self) -> None:
        self.is_active = False


def test_after_drop_a_new_attempt_starts_although_the_old_one_has_not_ended() -> None:
    made = [_SlowConnection(), _SlowConnection()]
    connections = iter(made)
    shared = SharedConnection("n1", lambda: next(connections))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(shared.get, None)
        assert made[0].is_connecting.wait(_LIMIT_S)
        shared.drop()
        second = pool.submit(shared.get, None)
        assert made[1].is_connecting.wait(_LIMIT_S)
        made[0].go.set()
        with pytest.raises(NodeUnreachable, match="closed while it was made"):
            first.result(_LIMIT_S)
        made[1].go.set()
        assert second.result(_LIMIT_S) is made[1]
    assert shared.current is made[1]
    shared.close()
    assert [one.is_active for one in made] == [False, False]
    with pytest.raises(NodeUnreachable, match="the transport is closed"):
        shared.get(None)
