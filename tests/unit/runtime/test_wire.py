"""The messages between agent and supervisor, as lines of a stream."""

from __future__ import annotations

import errno
import os

import pytest

from distflow.runtime.wire import LineReader, OpError, OutQueue, encode


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_messages_are_read_wherever_the_stream_is_split(size: int) -> None:
    messages = [{"id": 1, "text": 'ü→\n"x"'}, {}, {"id": 2, "list": [1, None, True]}]
    stream = b"".join(encode(message) for message in messages)
    reader = LineReader()
    found = []
    for at in range(0, len(stream), size):
        found += reader.feed(stream[at : at + size])
    assert found == messages


def test_empty_lines_are_ignored() -> None:
    assert LineReader().feed(b'\n  \n{"a":1}\n') == [{"a": 1}]


@pytest.mark.parametrize("garbage", [b"hello\n", b"[1]\n", b"3\n", b"\xff\xfe\n"])
def test_a_line_that_is_not_a_message_is_an_error(garbage: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        LineReader().feed(garbage)


def test_a_line_without_an_end_is_limited() -> None:
    reader = LineReader(limit=100)
    reader.feed(b"x" * 100)
    with pytest.raises(ValueError, match="100 bytes"):
        reader.feed(b"x")


def test_text_that_is_not_unicode_can_be_encoded() -> None:
    assert encode({"name": "a\udcff"}) == b'{"name":"a\\udcff"}\n'


def test_urgent_lines_overtake_bulk_lines_but_never_split_them() -> None:
    read, write = os.pipe()
    try:
        os.set_blocking(write, False)
        os.set_blocking(read, False)
        queue = OutQueue()
        big = b"b" * 300_000 + b"\n"
        for _ in range(2):
            queue.put(big, bulk=True)
        queue.write_to(write)  # the first one is on its way now
        queue.put(b"urgent\n")
        received = b""
        while queue:
            received += os.read(read, 1 << 20)
            queue.write_to(write)
        received += os.read(read, 1 << 20)
        assert received == big + b"urgent\n" + big
        assert queue.bulk_bytes == 0
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, "no_space"), (errno.EDQUOT, "no_space"), (errno.EACCES, "permission"), (errno.EIO, "internal")],
)
def test_errors_of_the_system_get_the_protocols_kinds(number: int, kind: str) -> None:
    error = OpError.from_os(OSError(number, os.strerror(number), "/some/file"), "it failed")
    assert error.kind == kind
    assert "/some/file" in error.message
