"""Frames of blobs: for any received bytes, a stored blob matches its hash."""

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
"""The frames of a real sender."""
BOMB = zlib.compress(b"\0" * (16 << 20))


def framed(kind: int, content: bytes) -> bytes:
    return FRAME.pack(len(content), kind) + content


def receive_stream(stream: bytes, size: int) -> tuple[bool | OpError, bool, list[Json]]:
    """Receive a stream. Returns the result, whether the blob exists, and the sent messages."""
    name, sent = hashlib.sha256(DATA).hexdigest(), list[Json]()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, name)
        result: bool | OpError
        try:
            result = receive(io.BytesIO(stream), path, name, size, sent.append)
        except OpError as error:
            result = error
        exists = os.path.exists(path)
        if exists:
            with open(path, "rb") as file:
                assert file.read() == DATA
    return result, exists, sent


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
def test_any_stream_is_received_as_a_complete_blob_an_interruption_or_an_error(pieces: list[bytes], size: int) -> None:
    result, exists, sent = receive_stream(b"".join(pieces), size)
    assert exists == (result is True)
    assert sent == [{"at": 0}]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(STREAM) - 1), st.integers(1, 255))
def test_a_stream_with_a_changed_byte_never_becomes_a_wrong_blob(position: int, change: int) -> None:
    stream = bytearray(STREAM)
    stream[position] ^= change
    result, exists, _ = receive_stream(bytes(stream), len(DATA))
    assert exists == (result is True)


def test_empty_frames_are_ignored() -> None:
    stream = framed(RAW, b"") + framed(RAW, DATA[:10]) + framed(RAW, b"") * 3 + framed(RAW, DATA[10:])
    assert receive_stream(stream, len(DATA)) == (True, True, [{"at": 0}])


def test_an_error_frame_contains_kind_and_message() -> None:
    result, _, _ = receive_stream(error_frame(OpError("no_space", "it is full")), len(DATA))
    assert isinstance(result, OpError)
    assert (result.kind, result.message) == ("no_space", "it is full")


@pytest.mark.parametrize("content", [json.dumps([1]).encode(), b"\xff", b'{"kind": "x"}', b'{"kind":' * 5000])
def test_an_error_frame_that_cannot_be_decoded_is_an_error(content: bytes) -> None:
    result, _, _ = receive_stream(framed(ERROR, content), len(DATA))
    assert isinstance(result, OpError)
    assert result.kind == "bad_request"


@pytest.mark.parametrize(
    ("data", "detail"), [(b"y" * len(DATA), "wrong checksum"), (DATA + b"y", f"{len(DATA) + 1} bytes instead of {len(DATA)}")]
)
def test_a_damaged_blob_is_described(data: bytes, detail: str) -> None:
    result, _, _ = receive_stream(framed(RAW, data), len(DATA))
    assert isinstance(result, OpError)
    assert (result.kind, result.message) == ("damaged", f"the received blob is damaged: {detail}")
