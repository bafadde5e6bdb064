"""Carrying data in threads: what is repeated does the same again, what fails is told of, what is called off is not."""

from __future__ import annotations

import hashlib
import io
import queue
import tarfile
import threading
from pathlib import Path

import pytest

from distflow.backends.base import AttemptKey
from distflow.state.record import DataKind, DataRef
from distflow.structs import replace
from distflow.supervisor.commands import TransferData, TransferEnded, TransferMoved
from distflow.supervisor.transfer_threads import ThreadedTransfers
from distflow.supervisor.transfers import Transfer
from distflow.testing.waiting import FakeClock, wait_until

KEY = AttemptKey(workflow="u1", group="g", task="t", attempt=0, node="")
COMMAND = TransferData("lab", KEY, DataRef(DataKind.WRITE, 0))


class Place:
    """A transfers with folders and a sink of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blobs = folder / "blobs"
        self.blobs.mkdir(exist_ok=True)
        self.seen: queue.SimpleQueue[TransferMoved | TransferEnded] = queue.SimpleQueue()
        self.transfers = ThreadedTransfers(self.blobs, folder / "transfers", FakeClock().now, self.seen.put)

    def blob(self, **files: bytes) -> str:
        """Make an archive as a node's output is one."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        digest = hashlib.sha256(buffer.getvalue()).hexdigest()
        (self.blobs / digest).write_bytes(buffer.getvalue())
        return digest

    def carry(self, transfer: Transfer, command: TransferData = COMMAND) -> TransferEnded:
        """Do it, and return how it ended."""
        self.transfers.begin(command, transfer)
        while True:
            seen = self.seen.get(timeout=60)
            if isinstance(seen, TransferEnded):
                return seen


def test_what_is_written_twice_is_one_version(tmp_path: Path) -> None:
    place = Place(tmp_path)
    transfer = Transfer(
        data=DataRef(DataKind.WRITE, 0), url=f"file://{tmp_path}/sets", regex="", digest=place.blob(x=b"1"), dataset="m"
    )
    outcomes = [Place(tmp_path).carry(transfer).outcome for _ in range(2)]
    assert [(one.url, one.files, one.error) for one in outcomes] == [("dataset m:1", 1, "")] * 2
    assert not (tmp_path / "transfers" / "u1" / "g" / "t" / "write-0").exists()


def test_what_is_fetched_twice_is_one_blob(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_bytes(b"1")
    fetched = [
        Place(tmp_path).carry(Transfer(data=DataRef(DataKind.FETCH, 0), url=f"file://{tmp_path}/data", regex="")).outcome
        for _ in range(2)
    ]
    (digest,) = {one.digest for one in fetched}
    with tarfile.open(tmp_path / "blobs" / digest) as tar:
        assert tar.getnames() == ["x"]


def test_a_url_with_nothing_below_it_is_an_empty_directory(tmp_path: Path) -> None:
    outcome = Place(tmp_path).carry(Transfer(data=DataRef(DataKind.FETCH, 0), url="file:///nowhere/at/all", regex="")).outcome
    assert (outcome.error, outcome.files) == ("", 0)
    with tarfile.open(tmp_path / "blobs" / outcome.digest) as tar:
        assert tar.getnames() == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sftp://-oProxyCommand=x/y", "has no valid host and port"),
    ],
)
def test_what_fails_is_told_of(url: str, words: str, tmp_path: Path) -> None:
    seen = Place(tmp_path).carry(Transfer(data=DataRef(DataKind.FETCH, 0), url=url, regex=""))
    assert words in seen.outcome.error
    assert "\n" not in seen.outcome.error


def test_a_blob_that_is_gone_is_told_of(tmp_path: Path) -> None:
    seen = Place(tmp_path).carry(
        Transfer(data=DataRef(DataKind.WRITE, 0), url=f"file://{tmp_path}/out", regex="", digest="0" * 64)
    )
    assert "No such file" in seen.outcome.error


def test_what_is_called_off_ends_and_is_not_heard_of(tmp_path: Path) -> None:
    place = Place(tmp_path)
    # Nobody listens on the port of discarded data: it is tried again and again.
    place.transfers.begin(COMMAND, Transfer(data=DataRef(DataKind.WRITE, 0), url="http://127.0.0.1:9/x", regex=""))
    place.transfers.cancel(COMMAND)
    wait_until(lambda: not any(thread.name == "data write/0" for thread in threading.enumerate()), 20)
    assert place.seen.empty()


def test_one_that_ends_while_all_are_let_go_of_keeps_none_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the disk is full: the supervisor cannot write, and neither can a transfer."""
    place = Place(tmp_path)
    commands = [replace(COMMAND, data=DataRef(DataKind.WRITE, number)) for number in range(3)]
    for one in commands:
        place.transfers.begin(one, Transfer(data=one.data, url="http://127.0.0.1:9/x", regex=""))
    halts = dict(place.transfers._halts)
    first, ending, last = (halts[one.identity] for one in commands)
    let_go = first.set

    def and_another_one_ends() -> None:
        let_go()
        place.transfers._halts.pop(commands[1].identity)

    monkeypatch.setattr(first, "set", and_another_one_ends)
    try:
        place.transfers.close()
        assert last.is_set()
    finally:
        for halt in (first, ending, last):
            threading.Event.set(halt)
    wait_until(lambda: not any(thread.name.startswith("data write/") for thread in threading.enumerate()), 20)
