"""Uploads of files to a node: transfer, resuming, checks and reuse, over every transport."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from contract.conftest import EVERY_TRANSPORT, LOCAL_TRANSPORT, launch_of, try_clean
from distflow.backends.machines.connection.bootstrap import open_service
from distflow.backends.machines.connection.transfers import Blob, send_blobs
from distflow.errors import AgentError, NodeUnreachable
from distflow.runtime.services.frames import FRAME, LARGEST_FRAME, RAW, ZLIB
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from contract.conftest import NodeUnderTest
    from distflow.backends.machines.connection.bootstrap import Opened

pytestmark = LOCAL_TRANSPORT


def blob_of(path: Path, data: bytes) -> Blob:
    path.write_bytes(data)
    return Blob(digest=hashlib.sha256(data).hexdigest(), path=path, size=len(data), name="a file")


def send(node: NodeUnderTest, *blobs: Blob) -> list[int]:
    """Send blobs; return the reports of progress."""
    progress_reports: list[int] = []
    send_blobs(node.transport, str(node.top), sys.executable, blobs, timeout_s=20, progress=progress_reports.append)
    return progress_reports


def missing(node: NodeUnderTest, *blobs: Blob) -> Any:
    requested = [{"hash": blob.digest, "size": blob.size} for blob in blobs]
    return node.connect().request("stage", blobs=requested)["missing"]


def receiver(node: NodeUnderTest) -> Opened:
    return open_service(node.transport, str(node.top), sys.executable, "services.receiver", timeout_s=60)


def header(blob: Blob) -> bytes:
    return json.dumps({"hash": blob.digest, "size": blob.size}).encode() + b"\n"


def answer(opened: Opened) -> dict[str, Any]:
    text = opened.received
    while b"\n" not in text:
        data = opened.channel.read()
        assert data, opened.channel.stderr_tail()
        text += data
    found: dict[str, Any] = json.loads(text.partition(b"\n")[0])
    return found


def sizes_in_blobs(node: NodeUnderTest) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (node.root / "blobs").iterdir()}


@EVERY_TRANSPORT
def test_blobs_arrive_whole_and_are_sent_once(node: NodeUnderTest, tmp_path: Path) -> None:
    noise = blob_of(tmp_path / "noise", os.urandom(3_000_000))
    words = blob_of(tmp_path / "words", b"the same words again " * 200_000)
    nothing = blob_of(tmp_path / "nothing", b"")
    assert missing(node, noise, words, nothing) == [noise.digest, words.digest, nothing.digest]
    progress_reports = send(node, noise, words, nothing)
    assert progress_reports == sorted(progress_reports)
    assert progress_reports[-1] == noise.size + words.size
    assert missing(node, noise, words, nothing) == []
    assert {path.name: path.read_bytes() for path in (node.root / "blobs").iterdir()} == {
        blob.digest: blob.path.read_bytes() for blob in (noise, words, nothing)
    }
    # Files that the node has are not sent again, for any requester.
    assert send(node, noise) == [noise.size]


def test_compressible_files_are_sent_compressed(node: NodeUnderTest, tmp_path: Path) -> None:
    words = blob_of(tmp_path / "words", b"the same words again " * 200_000)
    opened = receiver(node)
    opened.channel.write(header(words))
    assert answer(opened) == {"at": 0}
    opened.channel.close()
    sent: list[int] = []

    class CountingTransport:
        """The node's transport, which counts the written bytes."""

        def __getattr__(self, name: str) -> Any:
            return getattr(node.transport, name)

        def open(self, argv: list[str]) -> Any:
            channel = node.transport.open(argv)
            write = channel.write

            def count(data: bytes) -> None:
                sent.append(len(data))
                write(data)

            channel.write = count  # type: ignore[method-assign]
            return channel

    send_blobs(CountingTransport(), str(node.top), sys.executable, [words], timeout_s=60)  # type: ignore[arg-type]
    assert sum(sent) < words.size / 10
    assert missing(node, words) == []


@EVERY_TRANSPORT
def test_a_broken_transfer_is_resumed(node: NodeUnderTest, tmp_path: Path) -> None:
    blob = blob_of(tmp_path / "blob", os.urandom(2_000_000))
    opened = receiver(node)
    opened.channel.write(header(blob))
    assert answer(opened) == {"at": 0}
    with blob.path.open("rb") as file:
        half = file.read(LARGEST_FRAME)
    opened.channel.write(FRAME.pack(len(half), RAW) + half + FRAME.pack(1000, RAW) + b"then it breaks off")
    opened.channel.close()
    part = f"{blob.digest}.part"
    wait_until(lambda: sizes_in_blobs(node).get(part) == LARGEST_FRAME, 20)
    progress_reports = send(node, blob)
    assert progress_reports[0] == LARGEST_FRAME
    assert sizes_in_blobs(node) == {blob.digest: blob.size}


def test_a_damaged_blob_is_refused_and_removed(node: NodeUnderTest, tmp_path: Path) -> None:
    blob = blob_of(tmp_path / "blob", b"right")
    for frame, kind in (
        (FRAME.pack(5, RAW) + b"wrong", "damaged"),
        (FRAME.pack(5, ZLIB) + b"wrong", "damaged"),
        (FRAME.pack(LARGEST_FRAME + 1, RAW), "bad_request"),
        (FRAME.pack(5, 7) + b"right", "bad_request"),
    ):
        opened = receiver(node)
        opened.channel.write(header(blob))
        answer(opened)
        opened.channel.write(frame)
        assert answer(opened)["error"]["kind"] == kind
        opened.channel.close()
        wait_until(lambda: all(size == 0 for size in sizes_in_blobs(node).values()), 20)
    send(node, blob)
    assert sizes_in_blobs(node) == {blob.digest: 5}


@pytest.mark.parametrize("name", ["../../escape", "x" * 64, "", None, 5])
def test_a_blob_name_that_is_not_a_hash_is_refused(node: NodeUnderTest, name: object) -> None:
    opened = receiver(node)
    opened.channel.write(json.dumps({"hash": name, "size": 5}).encode() + b"\n")
    assert answer(opened)["error"]["kind"] == "bad_request"
    opened.channel.close()


def test_a_file_that_changed_before_its_upload_is_refused(node: NodeUnderTest, tmp_path: Path) -> None:
    blob = blob_of(tmp_path / "blob", os.urandom(2_000_000))
    blob.path.write_bytes(os.urandom(2_000_000))
    with pytest.raises(AgentError, match="damaged"):
        send(node, blob)
    assert missing(node, blob) == [blob.digest]


def test_a_blob_damaged_by_a_power_cut_is_sent_again(node: NodeUnderTest, tmp_path: Path) -> None:
    blob = blob_of(tmp_path / "blob", os.urandom(2_000_000))
    send(node, blob)
    stored = node.root / "blobs" / blob.digest
    times = stored.stat()
    stored.write_bytes(b"")  # its name and its times are on the disk, but its content is not
    os.utime(stored, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert missing(node, blob) == [blob.digest]
    send(node, blob)
    assert missing(node, blob) == []
    assert stored.read_bytes() == blob.path.read_bytes()


def test_two_uploads_of_the_same_blob_at_once_both_succeed(node: NodeUnderTest, tmp_path: Path) -> None:
    blob = blob_of(tmp_path / "blob", os.urandom(1_000_000))
    opened = receiver(node)
    opened.channel.write(header(blob))
    assert answer(opened) == {"at": 0}
    thread = threading.Thread(target=lambda: send(node, blob))
    thread.start()
    thread.join(20)
    assert sizes_in_blobs(node)[blob.digest] == blob.size
    opened.channel.write(FRAME.pack(blob.size, RAW) + blob.path.read_bytes())
    assert answer(opened) == {"done": True}
    opened.channel.close()
    assert sizes_in_blobs(node) == {blob.digest: blob.size}


@pytest.mark.transports("ssh")  # a local transport has no connection that could break
def test_a_connection_that_ends_while_it_sends_is_unreachable(node: NodeUnderTest, tmp_path: Path) -> None:
    blob = blob_of(tmp_path / "blob", os.urandom(8_000_000))

    def cut(at: int) -> None:
        if at > 1_000_000:
            node.transport.close()

    with pytest.raises(NodeUnreachable):
        send_blobs(node.transport, str(node.top), sys.executable, [blob], timeout_s=20, progress=cut)


def test_a_large_and_a_small_file_are_placed(node: NodeUnderTest) -> None:
    data = os.urandom(1_000_000)
    link = node.connect()
    files = [
        {"path": "work/large.bin", "blob": node.stage(data), "mode": 0o640},
        {"path": "work/small.bin", "data": "AAEC", "mode": 0o600},
    ]
    attempt = node.start(link, ["true"], files=files)
    node.await_end(attempt)
    assert (node.directory(attempt) / "work/large.bin").read_bytes() == data
    assert (node.directory(attempt) / "work/large.bin").stat().st_mode & 0o777 == 0o640
    assert (node.directory(attempt) / "work/small.bin").read_bytes() == b"\0\1\2"


def test_changes_of_a_task_to_its_file_do_not_affect_others(node: NodeUnderTest) -> None:
    link = node.connect()
    data = os.urandom(1_000_000)
    name = node.stage(data)
    requested = [{"hash": name, "size": len(data)}]

    def run(script: str) -> bytes:
        attempt = node.start(link, ["sh", "-c", script], files=[{"path": "work/d", "blob": name, "mode": 0o600}])
        assert node.await_end(attempt)["exit_code"] == 0
        return (node.directory(attempt) / "work/d").read_bytes()

    assert run("true") == data
    # The first attempt has the blob's own file. This one has a copy, so its changes do not affect others.
    assert run("printf x >> d") == data + b"x"
    assert link.request("stage", blobs=requested)["missing"] == []
    assert run("true") == data
    wait_until(lambda: try_clean(link, node.workflow), 20, "the workflow is cleaned")
    # This attempt has the blob's own file and changes it, so the blob must be sent again.
    assert run("printf x >> d") == data + b"x"
    assert link.request("stage", blobs=requested)["missing"] == [name]
    attempt = node.lease(link)
    with pytest.raises(AgentError, match="or a task changed it"):
        link.request("prepare", attempt=attempt, launch=launch_of(["true"], files=[{"path": "work/d", "blob": name}]))
    assert node.stage(data) == name
    assert run("true") == data


def test_every_attempt_gets_a_copy_where_file_times_have_no_fractions(node: NodeUnderTest) -> None:
    link = node.connect()
    name = node.stage(b"data")
    (node.root / "blobs" / ".unmarked").touch()
    os.utime(node.root / "blobs" / name, (1_000_000_000, 1_000_000_000))
    attempt = node.start(link, ["sh", "-c", "printf x >> d"], files=[{"path": "work/d", "blob": name, "mode": 0o600}])
    assert node.await_end(attempt)["exit_code"] == 0
    assert (node.root / "blobs" / name).read_bytes() == b"data"
    assert link.request("stage", blobs=[{"hash": name, "size": 4}])["missing"] == []


def test_preparing_with_a_blob_that_was_not_staged_is_refused(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.lease(link)
    with pytest.raises(AgentError) as caught:
        link.request("prepare", attempt=attempt, launch=launch_of(["true"], files=[{"path": "work/x", "blob": "0" * 64}]))
    assert caught.value.kind == "not_found"


def test_old_partial_uploads_are_removed_and_recent_ones_are_kept(node: NodeUnderTest, tmp_path: Path) -> None:
    blob = blob_of(tmp_path / "blob", b"some")
    send(node, blob)
    old, young = node.root / "blobs" / f"{'0' * 64}.part", node.root / "blobs" / f"{'1' * 64}.part"
    shutil.copy(blob.path, old)
    shutil.copy(blob.path, young)
    os.utime(old, (0, 0))
    assert missing(node, blob) == []
    assert sorted(sizes_in_blobs(node)) == sorted([blob.digest, young.name])
