from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from distflow.runtime import leasefiles

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PORT = "port-29500.lock"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = leasefiles.open_directory(str(tmp_path / "leases"))
    yield fd
    os.close(fd)


def test_who_only_looks_at_a_lock_takes_it_from_nobody(directory: int) -> None:
    """A port that is refused ends the gang that names it, and `pool list` looks at all of them."""
    os.close(leasefiles.lock(directory, PORT, {})[0])
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            leasefiles.said_of(directory, PORT)

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(300):
            fd, who = leasefiles.lock(directory, PORT, {"user": "me", "attempt": "a", "pid": 1})
            assert fd >= 0, who
            os.close(fd)
    finally:
        is_over.set()
        for looker in lookers:
            looker.join()


def test_who_holds_a_lock_is_named(directory: int) -> None:
    fd, _ = leasefiles.lock(directory, PORT, {"user": "me", "attempt": "a", "pid": 1})
    assert leasefiles.lock(directory, PORT, {}) == (-1, "me (attempt a, pid 1)")
    assert leasefiles.said_of(directory, PORT) == {"user": "me", "attempt": "a", "pid": 1}
    os.close(fd)
    assert leasefiles.said_of(directory, PORT) is None
