"""What comes just then: requests and files that meet an attempt in the middle of a step.

Each test chooses the moment: it holds a real process at that step, or does in it what another process may do then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distflow.runtime import attempts, records
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from contract.conftest import NodeUnderTest

UMASK = 0o22


class ComingUp:
    """A real pair that was just forked, by an agent that is gone: it says its first word when it is let go."""

    def __init__(self, node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gate = node.root / "gate"
        first_state = records.first_state

        def held(*given: Any) -> Any:
            self._gate.read_bytes()  # a FIFO: until somebody opens it for writing
            return first_state(*given)

        monkeypatch.setattr(records, "first_state", held)
        os.mkfifo(self._gate)
        self.attempt = node.attempt()
        request = {"attempt": self.attempt, "gpus": 1, "gpu_ids": [0], "lease_dir": str(node.lease_dir), "start_timeout_s": 60}
        self._runner: int | None = attempts.create(str(node.root), request, UMASK)

    def go_on(self) -> None:
        """Let it speak."""
        self._gate.write_bytes(b"")

    def await_end(self) -> None:
        """Wait until none of it is left."""
        if self._runner is not None:
            os.waitpid(self._runner, 0)
            self._runner = None


@pytest.fixture
def coming_up(node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ComingUp]:
    node.connect().close()  # makes the root
    made = ComingUp(node, monkeypatch)
    yield made
    node.close()
    made.await_end()


def lease_is_free(node: NodeUnderTest) -> bool:
    link = node.connect()
    link.request("release", attempt=node.lease(link, gpus=1, gpu_ids=[0]))
    return True


def test_a_lease_whose_pair_is_just_coming_up_is_given_back(node: NodeUnderTest, coming_up: ComingUp) -> None:
    link = node.connect()
    answers: list[Any] = []
    link.send("release", answers.append, attempt=coming_up.attempt)
    link.request("ping")
    coming_up.go_on()
    wait_until(lambda: answers, 20, "the answer to the release")
    assert answers == [{}]
    assert not Path(node.root, coming_up.attempt).exists()
    assert lease_is_free(node)
