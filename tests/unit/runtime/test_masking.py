"""Secrets in a task's output: masked wherever the data is split, without a change or delay of other output."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.runtime.files.masking import Mask, StreamMasker, clean_error, memory, read_shared, share

KEY = "-----BEGIN KEY-----\nbase64line1234567890\nshort\nbase64line0987654321\n-----END KEY-----\n"


def masked(values: list[str], *pieces: bytes) -> bytes:
    stream = StreamMasker(Mask(values))
    return b"".join(stream.feed(piece) for piece in pieces) + stream.flush()


@pytest.mark.parametrize(
    ("values", "text", "expected"),
    [
        (["s3cret"], b"the key is s3cret!\n", b"the key is ********!\n"),
        (["s3cret"], b"s3crets3cret", b"********"),
        (["s3cret\n"], b"s3cret", b"********"),
        (["abcdef", "cdefgh"], b"abcdefgh", b"********"),
        (["abcdef", "bcde"], b"abcdef bcde", b"******** ********"),
        (["aXbaXb"], b"aXbaXbaXb", b"********"),
        (["pässwört"], "das pässwört".encode(), b"das ********"),
        (["pässwört"], json.dumps({"a": "pässwört"}).encode(), b'{"a": "********"}'),
        (['a"b\\c'], json.dumps(['a"b\\c']).encode(), b'["********"]'),
        ([KEY], KEY.encode(), b"********\n"),
        ([KEY], b"see base64line0987654321\nshort\n", b"see ********\nshort\n"),
        (["abc", "True", " ", ""], b"abc True None  ", b"abc True None  "),
        (["s3cret"], b"s3cre\n", b"s3cre\n"),
    ],
)
def test_secrets_are_masked(values: list[str], text: bytes, expected: bytes) -> None:
    assert masked(values, text) == expected
    # The same output is masked if it arrives in single bytes.
    split = masked(values, *(text[at : at + 1] for at in range(len(text))))
    assert split.replace(b"****************", b"********") == expected


@given(
    st.lists(st.text("ab", min_size=4, max_size=7), min_size=1, max_size=3),
    st.text("abc", max_size=60),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_secrets_are_masked_wherever_the_data_is_split(values: list[str], text: str, cuts: list[int]) -> None:
    data, edges = text.encode(), sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [data[start:end] for start, end in pairwise(edges)]
    once, many = masked(values, data), masked(values, *pieces)
    # Where two secrets overlap, a cut between them may show as two masks.
    assert _letters(once) == _letters(many)
    assert not any(value.encode() in many for value in values)


def _letters(data: bytes) -> bytes:
    return data.replace(b"*", b"")


def test_an_ordinary_line_is_not_delayed() -> None:
    stream = StreamMasker(Mask(["s3cret"]))
    assert stream.feed(b"step 1\nsteps") == b"step 1\nstep"
    assert stream.holds
    assert stream.feed(b"!\n") == b"s!\n"
    assert not stream.holds


def test_the_rest_of_a_secret_is_masked_after_its_beginning_was_written() -> None:
    stream = StreamMasker(Mask(["s3cretvalue"]))
    assert stream.feed(b"key s3cret") == b"key "
    assert stream.flush() == b"s3cret"
    assert not stream.holds
    assert stream.feed(b"value and more") == b"******** and more"
    assert stream.feed(b"value") == b"value"


def test_the_secrets_to_mask_are_shared_between_keeper_and_runner() -> None:
    shared = memory()
    assert read_shared(shared) is None
    launch = {"secret_env": {"A": "env-value"}, "secret_files": [{"path": "files/a", "files": {"b": "file-value"}}]}
    assert share(shared, launch) is not None
    mask = read_shared(shared)
    assert mask is not None
    assert mask.text("env-value file-value other-value") == "******** ******** other-value"
    assert share(shared, {"secret_env": {}}) is None
    assert read_shared(shared) is None


def test_a_named_pipe_as_error_file_is_removed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "error.json")
    clean_error(str(tmp_path), Mask(["s3cret"]))
    assert not (tmp_path / "error.json").exists()


def test_an_error_file_is_masked_in_place(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    clean_error(str(tmp_path), Mask(["s3cret"]))
    assert not path.exists()
    path.write_text(json.dumps({"message": {"message": "s3cret\n", "extraInfo": {"s3cret": 1}}}))
    clean_error(str(tmp_path), Mask(["s3cret"]))
    assert json.loads(path.read_text()) == {"message": {"message": "********\n", "extraInfo": {"********": 1}}}
    path.unlink()
    (tmp_path / "elsewhere").write_text("s3cret")
    path.symlink_to(tmp_path / "elsewhere")
    clean_error(str(tmp_path), Mask(["s3cret"]))
    assert not os.path.lexists(path)
    assert (tmp_path / "elsewhere").read_text() == "s3cret"
