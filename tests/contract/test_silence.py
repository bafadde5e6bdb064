"""A connection that was cut does not end: its services on the node end by themselves, but not while the submitter is there."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest

from contract.conftest import NodeUnderTest, processes_with
from distflow.backends.machines.connection import stream
from distflow.backends.machines.connection.bootstrap import RUNTIME, STORAGE, Bundle, open_service, service_argv
from distflow.backends.machines.connection.transfers import Blob, fetch_output, send_blobs
from distflow.runtime.services.frames import FRAME
from distflow.runtime.services.session import REQUEST
from distflow.testing.waiting import wait_until
from distflow.transports.base import Channel
from distflow.transports.local import LocalTransport


@pytest.fixture
def here(tmp_path: Path) -> NodeUnderTest:
    return NodeUnderTest(LocalTransport(), tmp_path)


@pytest.mark.slow
def test_services_of_a_silent_connection_end(here: NodeUnderTest) -> None:
    def service(name: str, request: bytes, bundle: Bundle = RUNTIME) -> Channel:
        opened = open_service(here.transport, str(here.top), sys.executable, name, timeout_s=20, bundle=bundle)
        opened.channel.write(request)
        started.update(processes_with(str(here.top)))  # before the first ones end
        return opened.channel

    link = here.connect()
    running = here.start(link, ["sleep", "300"])
    big = here.attempt()
    (here.directory(big) / "output").mkdir(parents=True)
    (here.directory(big) / "output" / "big").write_bytes(os.urandom(5_000_000))
    name = json.dumps({"attempt": big}).encode()
    session = json.dumps({"attempt": running, "argv": ["sleep", "300"]}).encode()
    before, started = set(processes_with(str(here.top))), set[int]()
    channels = [
        service("services.sender", b""),  # before the request
        service("services.sender", name + b"\n"),  # before `at`
        service("services.sender", name + b'\n{"at": 0}\n'),  # in the middle of frames that are not read
        service("services.output_server", b""),
        service("services.output_server", name + b"\n"),  # after the list
        service("services.output_server", name + b'\n{"file": "big", "at": 0, "prefix": ""}\n'),  # in the middle of a file
        service("services.receiver", b""),
        service("services.receiver", json.dumps({"hash": "0" * 64, "size": 5}).encode() + b"\n"),  # in the middle of a blob
        service("services.session", b""),
        service("services.session", FRAME.pack(len(session), REQUEST) + session),
        # A command that takes no input, and more of it than is kept.
        service("services.session", (FRAME.pack(len(session), REQUEST) + session) + (FRAME.pack(1 << 20, 2) + bytes(1 << 20))),
        service("node_service", b"", STORAGE),
        # Before the runtime has arrived.
        here.transport.open(service_argv(str(here.top / "other"), sys.executable, "nonce", "agent.server")),
    ]

    def all_were_seen() -> bool:
        started.update(processes_with(str(here.top)))
        return len(started - before) >= len(channels)

    wait_until(all_were_seen, what="a process for each service")
    started -= before
    wait_until(lambda: not started & set(processes_with(str(here.top))), 120, "all services are gone")
    assert here.record(running) is None
    for channel in channels:
        channel.close()
    here.close()


def test_signs_of_life_disturb_no_transfer(here: NodeUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_SIGN_EVERY_S", 0.001)
    data = [os.urandom(3_000_000), b"", b"x" * 5_000_000, os.urandom(10)]
    blobs = []
    for number, content in enumerate(data):
        path = tmp_path / str(number)
        path.write_bytes(content)
        blobs.append(Blob(digest=hashlib.sha256(content).hexdigest(), path=path, size=len(content)))
    for _ in range(2):  # the second time, all are there
        send_blobs(here.transport, str(here.top), sys.executable, blobs, timeout_s=20)
    assert [(here.root / "blobs" / blob.digest).read_bytes() for blob in blobs] == data
    attempt = here.attempt()
    (here.directory(attempt) / "output").mkdir(parents=True)
    (here.directory(attempt) / "output" / "big").write_bytes(data[0])
    (tmp_path / "fetched").mkdir()
    for place in (None, "output"):
        fetched = fetch_output(
            here.transport, str(here.top), sys.executable, attempt, tmp_path / "fetched", place=place, timeout_s=20
        )
        assert (tmp_path / "fetched" / fetched.digest).stat().st_size == fetched.size > len(data[0])
    here.close()


def test_a_blob_that_became_shorter_is_an_error(here: NodeUnderTest, tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(b"short")
    blob = Blob(digest="0" * 64, path=path, size=1000)
    with pytest.raises(OSError, match="the file was truncated"):
        send_blobs(here.transport, str(here.top), sys.executable, [blob], timeout_s=20)
    here.close()
