"""The other end of a service: heard while it speaks, given up when it is silent."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from distflow.runtime.services import frames
from distflow.runtime.services.frames import Gone, Peer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ends() -> Iterator[tuple[Peer, int, int]]:
    """A peer, where it is written to, and where it writes."""
    (there, write), (read, out) = os.pipe(), os.pipe()
    yield Peer(there, out), write, read
    for fd in (there, write, read, out):
        try:
            os.close(fd)
        except OSError:
            continue  # the test closed it


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "SILENCE_S", 0.2)


def test_lines_and_bytes_come_in_order_and_empty_lines_say_nothing(ends: tuple[Peer, int, int]) -> None:
    one, write, _ = ends
    os.write(write, b"\n\n{}\n\nabc\ndef")
    assert one.line(100) == b"{}\n"
    assert one.line(100) == b"abc\n"
    assert one.read(2) == b"de"
    os.write(write, b"\n" + b"x" * 50)
    assert one.read(2) == b"f\n"
    assert one.line(20) == b"x" * 20
    os.close(write)
    assert one.read(100) == b"x" * 30
    assert one.read(100) == b""
    assert one.line(100) == b""


@pytest.mark.usefixtures("_impatient")
def test_silence_ends_every_wait(ends: tuple[Peer, int, int]) -> None:
    one, write, _ = ends
    os.write(write, b"half a line")
    assert one.line(100) == b""
    assert one.read(100) == b"half a line"
    with pytest.raises(Gone):
        one.write(b"x" * 1_000_000)  # more than a pipe holds, and nobody reads
    threading.Event().wait(0.3)
    with pytest.raises(Gone):
        one.check()


@pytest.mark.usefixtures("_impatient")
def test_whoever_gives_signs_is_waited_for(ends: tuple[Peer, int, int]) -> None:
    one, write, read = ends
    over = threading.Event()

    def give_signs() -> None:
        for _ in range(20):
            over.wait(0.05)
            os.write(write, b"\n")
        os.read(read, 1 << 20)
        os.write(write, b"at last\n")

    signs = threading.Thread(target=give_signs)
    signs.start()
    one.write(b"x" * 100_000)  # waits for a second
    assert one.line(100) == b"at last\n"
    signs.join()
    one.check()


def test_an_end_of_the_connection_is_noticed_while_writing(ends: tuple[Peer, int, int]) -> None:
    one, write, _ = ends
    os.close(write)
    with pytest.raises(Gone):
        one.write(b"x" * 1_000_000)
