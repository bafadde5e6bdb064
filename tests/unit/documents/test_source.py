"""Reading a file that the user names: each error is one problem, and reading never waits."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from distflow.documents.problems import ProblemsFound
from distflow.documents.source import LIMIT, decode, read_bytes, read_text


def error_of(path: Path | str) -> str:
    with pytest.raises(ProblemsFound) as caught:
        read_text(str(path))
    assert len(caught.value.problems) == 1
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_text_loses_its_byte_order_mark_and_its_carriage_returns(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\rc: \xc3\xa9\n")
    assert read_text(str(path)) == "a: 1\nb: 2\nc: é\n"


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    assert f"{tmp_path}/no.yaml: error: the file does not exist" in error_of(tmp_path / "no.yaml")


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    assert "this is a directory, not a regular file" in error_of(tmp_path)


def test_a_path_below_a_file_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    assert "cannot be read: Not a directory" in error_of(tmp_path / "a" / "b.yaml")


def test_a_named_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "this is a named pipe" in error_of(tmp_path / "pipe")


def test_a_device_is_not_read() -> None:
    assert "this is a device" in error_of("/dev/zero")


def test_a_socket_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        assert "error: the file cannot be read" in error_of("s")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "secret.yaml"
    path.touch(mode=0)
    assert "cannot be read: Permission denied" in error_of(path)


def test_a_path_with_a_nul_cannot_be_read() -> None:
    assert "cannot be read" in error_of("a\0b")


def test_a_large_file_is_refused_with_its_size(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    with path.open("wb") as sparse:
        sparse.truncate(100 << 20)
    assert "the file is too large: 100 MiB, and the maximum is 4 MiB" in error_of(path)


def test_the_message_about_a_file_slightly_above_the_limit_does_not_contradict_itself(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_bytes(b"x" * (LIMIT + 1))
    assert "error: the file is too large: the maximum is 4 MiB\n" in error_of(path)


def test_a_larger_limit_allows_a_larger_text(tmp_path: Path) -> None:
    path = tmp_path / "big.txt"
    path.write_bytes(b"x" * (LIMIT + 1))
    assert len(read_text(str(path), limit=2 * LIMIT)) == LIMIT + 1


def test_a_file_whose_size_is_wrong_is_limited_too() -> None:
    # The size of files below /proc is 0.
    with pytest.raises(ProblemsFound, match="too large"):
        read_bytes("/proc/self/status", limit=10)


def test_the_line_of_binary_data_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"a: 1\n\x7fELF\0\0")
    assert f"{path}:2: error: this is binary data" in error_of(path)


def test_the_line_and_the_byte_of_another_encoding_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes("a: 1\nb: é\n".encode("latin-1"))
    assert f"{path}:2: error: the file is not UTF-8: byte 0xe9 at offset 8" in error_of(path)


def test_standard_input_is_limited_like_a_file() -> None:
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
