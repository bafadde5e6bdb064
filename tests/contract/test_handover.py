"""Downloads of outputs from a node: packing, transfer, resuming and checks, over every transport."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from contract.conftest import EVERY_TRANSPORT, LOCAL_TRANSPORT, launch_of, processes_with
from distflow.backends.machines.connection.bootstrap import open_service
from distflow.backends.machines.connection.transfers import Fetched, fetch_output
from distflow.errors import AgentError, NodeUnreachable
from distflow.runtime.files import safe_files
from distflow.runtime.services.frames import LARGEST_FRAME
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from contract.conftest import NodeUnderTest

pytestmark = LOCAL_TRANSPORT


def make_output(node: NodeUnderTest, attempt: str) -> Path:
    """Create the output directory of an attempt, which has no other files."""
    path = node.root / attempt / "output"
    path.mkdir(parents=True)
    return path


def fetch(
    node: NodeUnderTest, attempt: str, blobs: Path, progress_reports: list[tuple[bool, int, int]] | None = None
) -> Fetched:
    blobs.mkdir(exist_ok=True)
    progress = (lambda *report: progress_reports.append(report)) if progress_reports is not None else lambda *_: None
    return fetch_output(node.transport, str(node.top), sys.executable, attempt, blobs, timeout_s=20, progress=progress)


def members(blobs: Path, fetched: Fetched) -> dict[str, tuple[int, str | bytes | None]]:
    """Return the names of the fetched files with their modes and contents. The content of a link is its target."""
    found: dict[str, tuple[int, str | bytes | None]] = {}
    with tarfile.open(blobs / fetched.digest) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isreg() else None
            found[member.name] = (member.mode, file.read() if file else member.linkname or None)
    return found


@EVERY_TRANSPORT
def test_an_output_is_fetched_with_modes_and_links(node: NodeUnderTest, tmp_path: Path) -> None:
    attempt = node.attempt()
    output = make_output(node, attempt)
    (output / "models" / "empty").mkdir(parents=True)
    (output / "models" / "a b.pt").write_bytes(b"weights")
    (output / "models" / "a b.pt").chmod(0o664)
    (output / "run.sh").write_text("#!/bin/sh\n")
    (output / "run.sh").chmod(0o775)
    (output / "latest").symlink_to(output / "models" / "a b.pt")
    (tmp_path / "elsewhere").write_bytes(b"kept elsewhere")
    (output / "model.txt").symlink_to(tmp_path / "elsewhere")
    fetched = fetch(node, attempt, tmp_path / "blobs")
    assert members(tmp_path / "blobs", fetched) == {
        "latest": (0o700, "models/a b.pt"),
        "model.txt": (0o600, b"kept elsewhere"),
        "models": (0o700, None),
        "models/a b.pt": (0o600, b"weights"),
        "models/empty": (0o700, None),
        "run.sh": (0o700, b"#!/bin/sh\n"),
    }
    assert (fetched.files, fetched.left_out) == (6, ())
    assert (tmp_path / "blobs" / fetched.digest).stat().st_mode & 0o777 == 0o600
    # The node has stored the archive, too, so it need not be sent there.
    blobs = [{"hash": fetched.digest, "size": fetched.size}]
    assert node.connect().request("stage", blobs=blobs)["missing"] == []


def test_equal_outputs_have_one_blob_and_an_empty_output_has_one_too(node: NodeUnderTest, tmp_path: Path) -> None:
    found = []
    for stamp in (1_000_000_000, 1_000_000_000, 1_700_000_000):
        attempt = node.attempt()
        file = make_output(node, attempt) / "same"
        file.write_text("same")
        os.utime(file, (stamp, stamp))
        found.append(fetch(node, attempt, tmp_path / "blobs").digest)
    assert found[0] == found[1]
    assert found[2] != found[0], "files keep their times"
    attempt = node.attempt()
    make_output(node, attempt)
    assert members(tmp_path / "blobs", fetch(node, attempt, tmp_path / "blobs")) == {}


def test_a_packed_archive_is_not_packed_again(node: NodeUnderTest, tmp_path: Path) -> None:
    attempt = node.attempt()
    (make_output(node, attempt) / "big").write_bytes(os.urandom(3_000_000))
    first = fetch(node, attempt, tmp_path / "blobs")
    # Packing the changed output again would make another blob.
    (node.root / attempt / "output" / "big").write_bytes(b"small")
    assert fetch(node, attempt, tmp_path / "other").digest == first.digest
    progress_reports: list[tuple[bool, int, int]] = []
    fetch(node, attempt, tmp_path / "blobs", progress_reports)
    assert progress_reports == [(True, first.size, first.size)]


def test_a_broken_transfer_is_resumed(node: NodeUnderTest, tmp_path: Path) -> None:
    attempt = node.attempt()
    (make_output(node, attempt) / "big").write_bytes(os.urandom(3_000_000))
    whole = fetch(node, attempt, tmp_path / "whole")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / f"{whole.digest}.part").write_bytes((tmp_path / "whole" / whole.digest).read_bytes()[:1_234_567])
    progress_reports: list[tuple[bool, int, int]] = []
    fetched = fetch(node, attempt, blobs, progress_reports)
    assert progress_reports[0] == (True, 1_234_567, whole.size)
    assert progress_reports[-1] == (True, whole.size, whole.size)
    assert {path.name for path in blobs.iterdir()} == {fetched.digest}


@EVERY_TRANSPORT
def test_the_received_part_of_an_output_is_kept_when_the_connection_ends(node: NodeUnderTest, tmp_path: Path) -> None:
    attempt = node.attempt()
    (make_output(node, attempt) / "big").write_bytes(os.urandom(20_000_000))

    class Interrupted(Exception):
        pass

    def interrupt(is_packed: bool, done: int, total: int) -> None:
        if is_packed and done >= 2 * LARGEST_FRAME:
            raise Interrupted

    blobs = tmp_path / "blobs"
    blobs.mkdir()
    with pytest.raises(Interrupted):
        fetch_output(node.transport, str(node.top), sys.executable, attempt, blobs, timeout_s=20, progress=interrupt)
    (part,) = blobs.iterdir()
    assert part.name.endswith(".part")
    received = part.stat().st_size
    assert received >= 2 * LARGEST_FRAME
    progress_reports: list[tuple[bool, int, int]] = []
    fetched = fetch(node, attempt, blobs, progress_reports)
    assert progress_reports[0] == (True, received, fetched.size)


def test_a_damaged_part_is_discarded(node: NodeUnderTest, tmp_path: Path) -> None:
    attempt = node.attempt()
    (make_output(node, attempt) / "big").write_bytes(os.urandom(1_000_000))
    whole = fetch(node, attempt, tmp_path / "whole")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / f"{whole.digest}.part").write_bytes(b"x" * 1000)
    with pytest.raises(AgentError, match="damaged"):
        fetch(node, attempt, blobs)
    assert fetch(node, attempt, blobs) == whole


def test_files_that_cannot_be_packed_are_named(node: NodeUnderTest, tmp_path: Path) -> None:
    attempt = node.attempt()
    (make_output(node, attempt) / "data").symlink_to("/usr")
    with pytest.raises(AgentError, match="the link `data` in the task's output points to `/usr`, a directory outside of the"):
        fetch(node, attempt, tmp_path / "blobs")
    assert not [name for name in os.listdir(node.root / "blobs") if name.startswith("pack-")]
    with pytest.raises(AgentError, match="no longer exists"):
        fetch(node, node.attempt(), tmp_path / "blobs")
    with pytest.raises(AgentError, match="is not the name of an attempt"):
        fetch(node, "../../etc", tmp_path / "blobs")


def test_a_read_error_on_the_node_is_reported(node: NodeUnderTest, tmp_path: Path) -> None:
    attempt, digest = node.attempt(), "5" * 64
    make_output(node, attempt)
    # A directory in place of the archive: it counts as complete, but it cannot be read.
    (node.root / "blobs" / digest).mkdir(parents=True)
    (node.root / "blobs" / ".unmarked").touch()
    size = (node.root / "blobs" / digest).stat().st_size
    packed = {"hash": digest, "size": size, "files": 1, "left_out": []}
    (node.root / attempt / "packed.json").write_text(json.dumps(packed))
    with pytest.raises(AgentError, match="cannot read the task's packed files: Is a directory"):
        fetch(node, attempt, tmp_path / "blobs")


def test_sockets_and_pipes_are_left_out_by_name(node: NodeUnderTest, tmp_path: Path) -> None:
    attempt = node.attempt()
    output = make_output(node, attempt)
    os.mkfifo(output / "pipe")
    (output / "kept").write_text("kept")
    with socket.socket(socket.AF_UNIX) as listener:
        directory = os.open(output, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{directory}/socket")
        os.close(directory)
        fetched = fetch(node, attempt, tmp_path / "blobs")
    assert fetched.left_out == ("pipe", "socket")
    assert set(members(tmp_path / "blobs", fetched)) == {"kept"}


@EVERY_TRANSPORT
def test_a_sender_ends_with_its_connection(node: NodeUnderTest) -> None:
    attempt = node.attempt()
    (make_output(node, attempt) / "big").write_bytes(os.urandom(20_000_000))
    opened = open_service(node.transport, str(node.top), sys.executable, "services.sender", timeout_s=60)
    opened.channel.write(json.dumps({"attempt": attempt}).encode() + b"\n")
    text = bytearray(opened.received)
    while b'"hash"' not in text:
        text += opened.channel.read()
    assert processes_with(str(node.top))
    opened.channel.close()
    wait_until(lambda: not processes_with(str(node.top)), 20)


@EVERY_TRANSPORT
def test_a_node_whose_connection_closes_during_a_fetch_is_unreachable(node: NodeUnderTest, tmp_path: Path) -> None:
    class ClosingTransport:
        """The node's transport, whose channels close after the request."""

        def __getattr__(self, name: str) -> Any:
            return getattr(node.transport, name)

        def open(self, argv: list[str]) -> Any:
            channel = node.transport.open(argv)
            write = channel.write

            def write_and_close(data: bytes) -> None:
                write(data)
                if data.startswith(b'{"attempt"'):
                    channel.close()

            channel.write = write_and_close  # type: ignore[method-assign]
            return channel

    attempt = node.attempt()
    make_output(node, attempt)
    with pytest.raises(NodeUnreachable):
        fetch_output(ClosingTransport(), str(node.top), sys.executable, attempt, tmp_path, timeout_s=60)  # type: ignore[arg-type]


def test_an_output_never_fills_the_disk_of_the_supervisor(
    node: NodeUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A node may report any size, and a full disk would stop the supervisor.
    attempt = node.attempt()
    (make_output(node, attempt) / "weights").write_bytes(b"x" * 100_000)
    with monkeypatch.context() as small:
        small.setattr(safe_files, "_RESERVE", 1 << 62, raising=False)
        small.setattr(safe_files, "_SHARE", 1, raising=False)
        with pytest.raises(OSError, match=r"no room for .*; .* must stay free on this disk"):
            fetch(node, attempt, tmp_path / "blobs")
    assert fetch(node, attempt, tmp_path / "blobs").files == 1


def test_files_of_an_input_keep_their_times_and_can_be_zipped(node: NodeUnderTest, tmp_path: Path) -> None:
    first = node.attempt()
    output = make_output(node, first)
    for name, at in (("new", 1_600_000_000), ("old", 0)):
        (output / name).write_text("x")
        os.utime(output / name, (at, at))
    fetched = fetch(node, first, tmp_path / "blobs")
    link, attempt = node.connect(), node.attempt()
    node.lease(link, attempt)
    files = [{"path": "input/0", "mode": 0o700, "is_tar": True, "blob": fetched.digest, "only": ""}]
    link.request("prepare", attempt=attempt, launch=launch_of(["true"], files=files))
    top = node.root / attempt / "input" / "0"
    assert (top / "new").stat().st_mtime == 1_600_000_000
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.write(top / "new")
        archive.write(top / "old")
    link.request("release", attempt=attempt)


@pytest.mark.parametrize(("only", "placed"), [("", {"a.pt", "logs/a.txt"}), (r".*\.pt", {"a.pt"}), ("logs/", {"logs/a.txt"})])
def test_an_input_is_placed_below_the_attempt(node: NodeUnderTest, tmp_path: Path, only: str, placed: set[str]) -> None:
    first = node.attempt()
    output = make_output(node, first)
    (output / "logs" / "old").mkdir(parents=True)
    (output / "logs" / "a.txt").write_text("log")
    (output / "a.pt").write_text("weights")
    fetched = fetch(node, first, tmp_path / "blobs")
    link, attempt = node.connect(), node.attempt()
    node.lease(link, attempt)
    files = [{"path": "input/0", "mode": 0o700, "is_tar": True, "blob": fetched.digest, "only": only}]
    link.request("prepare", attempt=attempt, launch=launch_of(["true"], files=files))
    top = node.root / attempt / "input" / "0"
    assert {str(path.relative_to(top)) for path in top.rglob("*") if path.is_file()} == placed
    assert all(path.stat().st_mode & 0o077 == 0 for path in (top, *top.rglob("*")))
    link.request("release", attempt=attempt)


def test_an_invalid_regular_expression_is_refused(node: NodeUnderTest) -> None:
    from distflow.runtime.files.unpacking import unpack
    from distflow.runtime.wire import OpError

    empty = io.BytesIO()
    with tarfile.open(fileobj=empty, mode="w"):
        pass
    with pytest.raises(OpError, match="not a regular expression"):
        unpack(empty, str(node.root), "(")
