"""The submitter at the other end of a service: it counts as gone when it sends nothing for some time."""

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
def peer_and_pipes() -> Iterator[tuple[Peer, int, int]]:
    """A peer, the descriptor from which it reads, and the descriptor to which it writes."""
    (incoming, write), (read, outgoing) = os.pipe(), os.pipe()
    yield Peer(incoming, outgoing), write, read
    for fd in (incoming, write, read, outgoing):
        try:
            os.close(fd)
        except OSError:
            continue  # the test closed it


@pytest.fixture
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "SILENCE_S", 0.2)


def test_lines_and_bytes_are_read_in_order_and_empty_lines_are_skipped(peer_and_pipes: tuple[Peer, int, int]) -> None:
    one, write, _ = peer_and_pipes
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


@pytest.mark.usefixtures("_short_silence")
def test_silence_of_the_submitter_ends_every_wait(peer_and_pipes: tuple[Peer, int, int]) -> None:
    one, write, _ = peer_and_pipes
    os.write(write, b"half a line")
    assert one.line(100) == b""
    assert one.read(100) == b"half a line"
    with pytest.raises(Gone):
        one.write(b"x" * 1_000_000)  # more than a pipe holds
    threading.Event().wait(0.3)
    with pytest.raises(Gone):
        one.check()


@pytest.mark.usefixtures("_short_silence")
def test_a_submitter_that_sends_empty_lines_is_not_gone(peer_and_pipes: tuple[Peer, int, int]) -> None:
    one, write, read = peer_and_pipes
    timer = threading.Event()

    def send_lines() -> None:
        for _ in range(20):
            timer.wait(0.05)
            os.write(write, b"\n")
        os.read(read, 1 << 20)
        os.write(write, b"at last\n")

    sender = threading.Thread(target=send_lines)
    sender.start()
    one.write(b"x" * 100_000)  # waits for a second
    assert one.line(100) == b"at last\n"
    sender.join()
    one.check()


def test_an_end_of_the_connection_is_noticed_while_writing(peer_and_pipes: tuple[Peer, int, int]) -> None:
    one, write, _ = peer_and_pipes
    os.close(write)
    with pytest.raises(Gone):
        one.write(b"x" * 1_000_000)
