"""Reading what a person named: each way to be wrong is one finding, and nothing is waited for."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from distflow.documents.problems import ProblemsFound
from distflow.documents.source import LIMIT, decode, read_bytes, read_text


def refusal(path: Path | str) -> str:
    with pytest.raises(ProblemsFound) as caught:
        read_text(str(path))
    assert len(caught.value.problems) == 1
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_text_loses_its_byte_order_mark_and_its_carriage_returns(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\rc: \xc3\xa9\n")
    assert read_text(str(path)) == "a: 1\nb: 2\nc: é\n"


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    assert f"{tmp_path}/no.yaml: error: the file does not exist" in refusal(tmp_path / "no.yaml")


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    assert "this is a directory, not a file" in refusal(tmp_path)


def test_a_file_as_a_directory_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    assert "cannot be read: Not a directory" in refusal(tmp_path / "a" / "b.yaml")


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "this is a named pipe" in refusal(tmp_path / "pipe")


def test_a_device_is_not_read() -> None:
    assert "this is a device" in refusal("/dev/zero")


def test_a_socket_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        assert "error: the file cannot be read" in refusal("s")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "secret.yaml"
    path.touch(mode=0)
    assert "cannot be read: Permission denied" in refusal(path)


def test_a_nul_in_the_path_is_no_bug_of_ours() -> None:
    assert "cannot be read" in refusal("a\0b")


def test_a_hundred_megabytes_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    with path.open("wb") as sparse:
        sparse.truncate(100 << 20)
    assert "the file is too large: 100 MiB, and the maximum is 4 MiB" in refusal(path)


def test_the_message_about_a_file_slightly_above_the_limit_does_not_contradict_itself(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_bytes(b"x" * (LIMIT + 1))
    assert "error: the file is too large: the maximum is 4 MiB\n" in refusal(path)


def test_a_larger_limit_holds_for_the_text_too(tmp_path: Path) -> None:
    path = tmp_path / "big.txt"
    path.write_bytes(b"x" * (LIMIT + 1))
    assert len(read_text(str(path), limit=2 * LIMIT)) == LIMIT + 1


def test_a_file_that_lies_about_its_size_is_bounded_too() -> None:
    # Files below /proc say that they have no bytes at all.
    with pytest.raises(ProblemsFound, match="too large"):
        read_bytes("/proc/self/status", limit=10)


def test_binary_data_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"a: 1\n\x7fELF\0\0")
    assert f"{path}:2: error: this is binary data" in refusal(path)


def test_other_encodings_name_the_line_and_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes("a: 1\nb: é\n".encode("latin-1"))
    assert f"{path}:2: error: the file is not UTF-8: byte 0xe9 at offset 8" in refusal(path)


def test_standard_input_is_bounded_like_a_file() -> None:
    with pytest.raises(ProblemsFound, match="too large"):
        decode(b"x" * (LIMIT + 1), shown="-")


def test_a_missing_file_is_reported_with_a_similar_one(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").touch()
    for name, hint in (
        ("trian.yaml", f"did you mean `{tmp_path}/train.yaml`?"),
        ("hosts", "check the path"),
        ("no/train.yaml", f"check the path: the directory `{tmp_path}/no` does not exist or cannot be read"),
    ):
        with pytest.raises(ProblemsFound) as error:
            read_text(str(tmp_path / name))
        assert [(one.message, one.hint) for one in error.value.problems] == [("the file does not exist", hint)]
