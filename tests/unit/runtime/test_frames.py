"""Frames on their way: whatever comes, a blob has its hash or is not there."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import zlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distflow.runtime.services.frames import ERROR, FRAME, LARGEST_FRAME, RAW, ZLIB, error_frame, frames, receive
from distflow.runtime.wire import Json, OpError

DATA = os.urandom(300) + b"x" * 2000
STREAM = b"".join(frame for _, frame in frames(io.BytesIO(DATA)))
"""What a real sender makes of it."""
BOMB = zlib.compress(b"\0" * (16 << 20))


def framed(kind: int, content: bytes) -> bytes:
    return FRAME.pack(len(content), kind) + content


def received(stream: bytes, size: int) -> tuple[bool | OpError, bool, list[Json]]:
    """What comes of a stream: the result, whether the blob is there, and what was said."""
    name, said = hashlib.sha256(DATA).hexdigest(), list[Json]()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, name)
        result: bool | OpError
        try:
            result = receive(io.BytesIO(stream), path, name, size, said.append)
        except OpError as error:
            result = error
        is_there = os.path.exists(path)
        if is_there:
            with open(path, "rb") as file:
                assert file.read() == DATA
    return result, is_there, said


_pieces = st.lists(
    st.binary(max_size=60)
    | st.sampled_from([STREAM, framed(RAW, b""), framed(RAW, DATA), framed(ZLIB, zlib.compress(DATA)), framed(ZLIB, BOMB)])
    | st.builds(framed, st.sampled_from([RAW, ZLIB, ERROR, 3, 255]), st.binary(max_size=60)),
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(_pieces, st.sampled_from([0, 1, len(DATA), len(DATA) + 1, 1 << 40]))
@example([framed(ERROR, b"[" * 100_000)], len(DATA))
@example([framed(ERROR, b'{"kind": 1e999}')], len(DATA))
@example([framed(ERROR, b"{}")], len(DATA))
@example([FRAME.pack(2**32 - 1, RAW)], len(DATA))
@example([FRAME.pack(LARGEST_FRAME, RAW)], len(DATA))
def test_a_stream_is_a_whole_blob_a_break_or_an_error(pieces: list[bytes], size: int) -> None:
    result, is_there, said = received(b"".join(pieces), size)
    assert is_there == (result is True)
    assert said == [{"at": 0}]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(STREAM) - 1), st.integers(1, 255))
def test_a_changed_byte_never_makes_another_blob(place: int, change: int) -> None:
    stream = bytearray(STREAM)
    stream[place] ^= change
    result, is_there, _ = received(bytes(stream), len(DATA))
    assert is_there == (result is True)


def test_empty_frames_between_others_change_nothing() -> None:
    stream = framed(RAW, b"") + framed(RAW, DATA[:10]) + framed(RAW, b"") * 3 + framed(RAW, DATA[10:])
    assert received(stream, len(DATA)) == (True, True, [{"at": 0}])


def test_an_error_comes_through_in_its_words() -> None:
    result, _, _ = received(error_frame(OpError("no_space", "it is full")), len(DATA))
    assert isinstance(result, OpError)
    assert (result.kind, result.message) == ("no_space", "it is full")


@pytest.mark.parametrize("content", [json.dumps([1]).encode(), b"\xff", b'{"kind": "x"}', b'{"kind":' * 5000])
def test_an_error_that_cannot_be_read_is_one(content: bytes) -> None:
    result, _, _ = received(framed(ERROR, content), len(DATA))
    assert isinstance(result, OpError)
    assert result.kind == "bad_request"
