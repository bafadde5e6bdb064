"""Listing the files of an attempt, and fetching them into a local directory, from a node that is not trusted."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from contract.conftest import EVERY_TRANSPORT, LOCAL_TRANSPORT, NodeUnderTest
from distflow.backends.machines.connection import output_reader
from distflow.backends.machines.connection.output_reader import OutputReader
from distflow.errors import AgentError, NodeUnreachable, StorageError
from distflow.runtime.services.frames import FRAME, RAW
from distflow.runtime.wire import encode

pytestmark = LOCAL_TRANSPORT


def reader(node: NodeUnderTest, attempt: str, **options: Any) -> OutputReader:
    return OutputReader(node.transport, str(node.top), sys.executable, attempt, timeout_s=20, **options)


def fetch(one: OutputReader, folder: Path) -> output_reader.FetchCounts:
    counts = output_reader.FetchCounts()
    with one:
        one.fetch(one.files, folder, lambda *_: None, counts)
    return counts


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@EVERY_TRANSPORT
def test_files_of_an_attempt_are_listed_and_fetched(node: NodeUnderTest, tmp_path: Path) -> None:
    attempt, local_directory = node.attempt(), tmp_path / "here"
    output = node.directory(attempt) / "output"
    (output / "steps" / "100").mkdir(parents=True)
    (output / "empty").mkdir()
    expected = {"model.pt": os.urandom(3_000_000), "steps/100/state": b"x" * 200_000, "nothing": b"", "naïve \udcff": b"bytes"}
    expected |= {f"many/{number}": str(number).encode() for number in range(600)}
    (output / "many").mkdir()
    for name, content in expected.items():
        (output / name).write_bytes(content)
    (output / "nothing").chmod(0o755)
    os.utime(output / "model.pt", ns=(1, 1_700_000_000_123_456_789))
    (output / "latest").symlink_to("steps/100")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "log.txt").write_text("of the task")
    (output / "log.txt").symlink_to(elsewhere / "log.txt")
    (output / "dataset").symlink_to(elsewhere)
    os.mkfifo(output / "pipe")
    local_directory.mkdir()
    with reader(node, attempt) as one:
        assert len(one.files) == len(expected) + 2
        assert one.others == 2
        progress: dict[str, int] = {}
        counts = output_reader.FetchCounts()
        one.fetch(one.files, local_directory, progress.__setitem__, counts)
    assert (counts.files, counts.unchanged, counts.left_out, counts.problems) == (len(expected) + 2, 0, 0, [])
    linked = {"latest/state": expected["steps/100/state"], "log.txt": b"of the task"}
    assert contents(local_directory) == {
        name: content for name, content in (expected | linked).items() if not name.startswith("latest")
    }
    assert os.readlink(local_directory / "latest") == "steps/100"
    assert progress["model.pt"] == 3_000_000
    assert (local_directory / "model.pt").stat().st_mtime_ns == 1_700_000_000_123_456_789
    assert os.access(local_directory / "nothing", os.X_OK)
    assert not os.access(local_directory / "model.pt", os.X_OK)
    assert not list(local_directory.rglob(".distflow*"))

    # Only changes are fetched again.
    (output / "model.pt").write_bytes(b"newer")
    (output / "steps/100/state").unlink()
    counts = fetch(reader(node, attempt), local_directory)
    assert (counts.files, counts.size, counts.unchanged) == (1, 5, len(expected))
    assert (local_directory / "model.pt").read_bytes() == b"newer"


def test_an_interrupted_file_continues_where_it_stopped(node: NodeUnderTest, tmp_path: Path) -> None:
    attempt = node.attempt()
    output = node.directory(attempt) / "output"
    output.mkdir(parents=True)
    content = os.urandom(4_000_000)
    (output / "model.pt").write_bytes(content)

    def fetch_until_interrupted() -> int:
        def stop(_: str, done: int) -> None:
            if done >= 1_000_000:
                raise KeyboardInterrupt

        with reader(node, attempt) as one, pytest.raises(KeyboardInterrupt):
            one.fetch(one.files, tmp_path, stop, output_reader.FetchCounts())
        assert not (tmp_path / "model.pt").exists()
        (part,) = tmp_path.glob(".distflow-*.part")
        return part.stat().st_size

    part_size = fetch_until_interrupted()
    reached: list[int] = []
    with reader(node, attempt) as one:
        one.fetch(one.files, tmp_path, lambda _, done: reached.append(done), output_reader.FetchCounts())
    assert reached[0] == part_size
    assert (tmp_path / "model.pt").read_bytes() == content

    # A file that has changed meanwhile is fetched from its start.
    os.unlink(tmp_path / "model.pt")
    fetch_until_interrupted()
    (output / "model.pt").write_bytes(content[::-1])
    fetch(reader(node, attempt), tmp_path)
    assert (tmp_path / "model.pt").read_bytes() == content[::-1]
    assert not list(tmp_path.glob(".distflow*"))


def test_only_files_that_the_command_wrote_to_its_working_directory_are_listed(node: NodeUnderTest, tmp_path: Path) -> None:
    link = node.connect()
    script = "mkdir -p out __pycache__; echo m > out/model; echo c > __pycache__/x.pyc; echo e >> edited; cat given sent"
    files: list[dict[str, Any]] = [{"path": f"work/{name}", "text": name} for name in ("given", "edited")]
    files.append({"path": "work/sent", "blob": node.stage(b"blob")})  # its time may be in the future
    attempt = node.start(link, ["sh", "-c", script], files=files)
    node.await_end(attempt)
    with reader(node, attempt, place="work") as one:
        assert sorted(file.name for file in one.files) == ["edited", "out/model"]
    with reader(node, attempt) as one:
        assert one.files == ()
    with pytest.raises(AgentError, match="no longer exists"):
        reader(node, node.attempt())


class _HostileTransport:
    """A transport to a node with the given file list and answers."""

    name = "evil"

    def __init__(self, entries: list[list[Any]], answers: bytes = b"") -> None:
        self._data = encode({"entries": entries}) + encode({"others": 0}) + answers

    def open(self, argv: list[str]) -> _HostileTransport:
        nonce = argv[-2]
        self._data = f"{nonce} have\n{nonce} ready\n".encode() + self._data
        return self

    def read(self) -> bytes:
        data, self._data = self._data, b""
        return data

    def write(self, _: bytes) -> None:
        pass

    def stderr_tail(self) -> str:
        return ""

    def close(self) -> None:
        pass

    exit_code = None


def hostile(entries: list[list[Any]], *answers: bytes) -> OutputReader:
    return OutputReader(_HostileTransport(entries, b"".join(answers)), "~", "python3", "a", timeout_s=5)  # type: ignore[arg-type]


def answer(content: bytes, digest: str | None = None, **fields: int) -> bytes:
    head = {"at": 0, "size": len(content), "modified_ns": -5, **fields}
    tail = {"hash": hashlib.sha256(content).hexdigest() if digest is None else digest}
    return encode(head) + FRAME.pack(len(content), RAW) + content + encode(tail)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a//x", "", "a\0", "x" * 5000, "."])
def test_a_name_that_leads_outside_is_refused(name: str) -> None:
    with pytest.raises(AgentError, match="invalid file name"):
        hostile([[name, 1, 0, False, ""]])


@pytest.mark.parametrize("link", ["..", "/etc", "../x", "a/../../x", "./x", "a//b"])
def test_a_link_that_leads_outside_is_left_out(link: str, tmp_path: Path) -> None:
    counts = fetch(hostile([["l", 1, 0, False, link]]), tmp_path)
    assert (counts.left_out, counts.files) == (1, 0)
    assert not os.path.lexists(tmp_path / "l")


def test_a_link_that_leads_outside_through_another_link_is_left_out(tmp_path: Path) -> None:
    local_directory = tmp_path / "here"
    local_directory.mkdir()
    entries = [["d/e/l", 1, 0, False, "../../f"], ["d/e/l/x", 1, 0, False, "../../../secret"], ["d/k", 1, 0, False, "../f"]]
    counts = fetch(hostile(entries), local_directory)
    assert (counts.files, counts.left_out) == (2, 1)

    # A file is not written through a link of an earlier fetch that leads outside.
    (local_directory / "out").symlink_to(tmp_path)
    with pytest.raises(StorageError, match="leads through a link out of"):
        fetch(hostile([["out/x", 1, 0, False, ""]], answer(b"1")), local_directory)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        (answer(b"abc", digest="0"), "wrong checksum"),
        (answer(b"abc", size=2), "more bytes of `x`"),
        (answer(b"abc", at=2), "did not continue `x` at the requested byte: run the command again"),
        (b'{"at": 0, "size": -1}\n', "malformed"),
        (b'{"size": 3}\n', "malformed message without `at`"),
        (encode({"at": 0, "size": 3, "modified_ns": 0}) + FRAME.pack(1 << 30, RAW), "invalid header"),
    ],
)
def test_a_damaged_answer_is_refused(answers: bytes, match: str, tmp_path: Path) -> None:
    with pytest.raises(AgentError, match=match):
        fetch(hostile([["x", 3, 0, False, ""]], answers), tmp_path)
    assert not (tmp_path / "x").exists()


def test_more_files_than_can_be_listed_are_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_reader, "_MAX_FILES", 2)
    with pytest.raises(AgentError, match="more than 2 files, the maximum that distflow can list") as refused:
        hostile([[f"f{number}", 1, 0, False, ""] for number in range(3)])
    assert "pack files into archives" in refused.value.hint


def test_a_connection_that_breaks_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NodeUnreachable):
        fetch(hostile([["x", 3, 0, False, ""]], answer(b"abc")[:-80]), tmp_path)


def test_a_file_that_cannot_be_read_does_not_stop_the_others(tmp_path: Path) -> None:
    refused = encode({"error": {"kind": "permission", "message": "cannot read `a`"}})
    counts = fetch(hostile([["a", 1, 0, False, ""], ["b", 1, 0, False, ""]], refused, answer(b"1")), tmp_path)
    assert counts.problems == ["a: cannot read `a`"]
    assert contents(tmp_path) == {"b": b"1"}


def test_local_obstacles_are_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="not enough space"):
        fetch(hostile([["x", 1 << 60, 0, False, ""]]), tmp_path)
    (tmp_path / "x").mkdir()
    with pytest.raises(StorageError, match="it is a directory here"):
        fetch(hostile([["x", 1, 0, False, ""]], answer(b"1")), tmp_path)
