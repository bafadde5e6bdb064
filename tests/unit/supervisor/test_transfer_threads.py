"""Data transfers in threads: repetitions have the same result, failures are reported, and canceled transfers report nothing."""

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


class TransferSetup:
    """``ThreadedTransfers`` with its own directories and sink."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blobs = folder / "blobs"
        self.blobs.mkdir(exist_ok=True)
        self.reports: queue.SimpleQueue[TransferMoved | TransferEnded] = queue.SimpleQueue()
        self.transfers = ThreadedTransfers(self.blobs, folder / "transfers", FakeClock().now, self.reports.put)

    def blob(self, **files: bytes) -> str:
        """Create an archive like that of a node's output, and return its digest."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        digest = hashlib.sha256(buffer.getvalue()).hexdigest()
        (self.blobs / digest).write_bytes(buffer.getvalue())
        return digest

    def run(self, transfer: Transfer, command: TransferData = COMMAND) -> TransferEnded:
        """Run a transfer, and return its end."""
        self.transfers.begin(command, transfer)
        while True:
            report = self.reports.get(timeout=60)
            if isinstance(report, TransferEnded):
                return report


def test_repeated_write_creates_one_version(tmp_path: Path) -> None:
    setup = TransferSetup(tmp_path)
    transfer = Transfer(
        data=DataRef(DataKind.WRITE, 0), url=f"file://{tmp_path}/sets", regex="", digest=setup.blob(x=b"1"), dataset="m"
    )
    outcomes = [TransferSetup(tmp_path).run(transfer).outcome for _ in range(2)]
    assert [(one.url, one.files, one.error) for one in outcomes] == [("dataset m:1", 1, "")] * 2
    assert not (tmp_path / "transfers" / "u1" / "g" / "t" / "write-0").exists()


def test_repeated_fetch_creates_one_blob(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_bytes(b"1")
    fetched = [
        TransferSetup(tmp_path).run(Transfer(data=DataRef(DataKind.FETCH, 0), url=f"file://{tmp_path}/data", regex="")).outcome
        for _ in range(2)
    ]
    (digest,) = {one.digest for one in fetched}
    with tarfile.open(tmp_path / "blobs" / digest) as tar:
        assert tar.getnames() == ["x"]


def test_fetch_of_a_url_without_files_creates_an_empty_archive(tmp_path: Path) -> None:
    outcome = (
        TransferSetup(tmp_path).run(Transfer(data=DataRef(DataKind.FETCH, 0), url="file:///nowhere/at/all", regex="")).outcome
    )
    assert (outcome.error, outcome.files) == ("", 0)
    with tarfile.open(tmp_path / "blobs" / outcome.digest) as tar:
        assert tar.getnames() == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sftp://-oProxyCommand=x/y", "has no valid host and port"),
    ],
)
def test_failed_fetch_is_reported_in_one_line(url: str, message: str, tmp_path: Path) -> None:
    ended = TransferSetup(tmp_path).run(Transfer(data=DataRef(DataKind.FETCH, 0), url=url, regex=""))
    assert message in ended.outcome.error
    assert "\n" not in ended.outcome.error


def test_write_of_a_missing_blob_is_reported(tmp_path: Path) -> None:
    ended = TransferSetup(tmp_path).run(
        Transfer(data=DataRef(DataKind.WRITE, 0), url=f"file://{tmp_path}/out", regex="", digest="0" * 64)
    )
    assert "No such file" in ended.outcome.error


def test_canceled_transfer_ends_without_a_report(tmp_path: Path) -> None:
    setup = TransferSetup(tmp_path)
    # No server listens on this port, so the transfer is retried.
    setup.transfers.begin(COMMAND, Transfer(data=DataRef(DataKind.WRITE, 0), url="http://127.0.0.1:9/x", regex=""))
    setup.transfers.cancel(COMMAND)
    wait_until(lambda: not any(thread.name == "data write/0" for thread in threading.enumerate()), 20)
    assert setup.reports.empty()


def test_close_ends_all_transfers_although_one_ends_by_itself_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens if the disk is full: neither the supervisor nor a transfer can write."""
    setup = TransferSetup(tmp_path)
    commands = [replace(COMMAND, data=DataRef(DataKind.WRITE, number)) for number in range(3)]
    for one in commands:
        setup.transfers.begin(one, Transfer(data=one.data, url="http://127.0.0.1:9/x", regex=""))
    halts = dict(setup.transfers._halts)
    first, ending, last = (halts[one.id] for one in commands)
    halt_first = first.set

    def halt_while_another_ends() -> None:
        halt_first()
        setup.transfers._halts.pop(commands[1].id)

    monkeypatch.setattr(first, "set", halt_while_another_ends)
    try:
        setup.transfers.close()
        assert last.is_set()
    finally:
        for halt in (first, ending, last):
            threading.Event.set(halt)
    wait_until(lambda: not any(thread.name.startswith("data write/") for thread in threading.enumerate()), 20)
