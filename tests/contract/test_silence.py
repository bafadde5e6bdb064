"""A cut connection does not close, so services on the node end after silence. Keepalives prevent that on a working one."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from contract.conftest import NodeUnderTest, processes_with
from distflow.backends.machines.connection import stream
from distflow.backends.machines.connection.bootstrap import RUNTIME, STORAGE, SourceArchive, open_service, service_argv
from distflow.backends.machines.connection.transfers import Blob, fetch_output, send_blobs
from distflow.errors import StateError
from distflow.runtime.processes import is_alive, read_process
from distflow.runtime.services.frames import FRAME
from distflow.runtime.services.session import REQUEST
from distflow.testing.waiting import wait_until
from distflow.transports.local import LocalTransport


@pytest.fixture
def local_node(tmp_path: Path) -> Iterator[NodeUnderTest]:
    """A node on this machine, without SSH."""
    made = NodeUnderTest(LocalTransport(), tmp_path)
    yield made
    made.close()


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Close the connections of a test, also if it fails. Open pipes would fail another test."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.slow
def test_services_of_a_silent_connection_end(local_node: NodeUnderTest, closing: ExitStack) -> None:
    def service(name: str, request: bytes, bundle: SourceArchive = RUNTIME) -> None:
        opened = open_service(local_node.transport, str(local_node.top), sys.executable, name, timeout_s=60, bundle=bundle)
        closing.callback(opened.channel.close)
        opened.channel.write(request)
        started.update(services())  # before the first services end

    def services() -> set[tuple[int, int]]:
        """Ids and start times of all processes except the agent and those that it forks, which continue."""
        found = [read_process(pid) for pid in set(processes_with(str(local_node.top))) - set(processes_with("agent.server"))]
        return {(one.pid, one.start) for one in found if one is not None}

    link = local_node.connect()
    running = local_node.start(link, ["sleep", "300"])
    big = local_node.attempt()
    (local_node.directory(big) / "output").mkdir(parents=True)
    (local_node.directory(big) / "output" / "big").write_bytes(os.urandom(5_000_000))
    name = json.dumps({"attempt": big}).encode()
    session = json.dumps({"attempt": running, "argv": ["sleep", "300"]}).encode()
    started = set[tuple[int, int]]()
    requests = [
        ("services.sender", b""),  # before the request
        ("services.sender", name + b"\n"),  # before `at`
        ("services.sender", name + b'\n{"at": 0}\n'),  # in the middle of frames that are not read
        ("services.output_server", b""),
        ("services.output_server", name + b"\n"),  # after the list
        ("services.output_server", name + b'\n{"file": "big", "at": 0, "prefix": ""}\n'),  # in the middle of a file
        ("services.receiver", b""),
        ("services.receiver", json.dumps({"hash": "0" * 64, "size": 5}).encode() + b"\n"),  # in the middle of a blob
        ("services.session", b""),
        ("services.session", FRAME.pack(len(session), REQUEST) + session),
        # A command that reads no input, with more input than the service buffers.
        ("services.session", (FRAME.pack(len(session), REQUEST) + session) + (FRAME.pack(1 << 20, 2) + bytes(1 << 20))),
    ]
    for one, request in requests:
        service(one, request)
    service("node_service", b"", STORAGE)
    # Before the runtime has arrived.
    argv = service_argv(str(local_node.top / "other"), sys.executable, "nonce", "services.session")
    closing.callback(local_node.transport.open(argv).close)

    def all_have_started() -> bool:
        started.update(services())
        return len(started) >= len(requests) + 2

    wait_until(all_have_started, 60, "a process for each service")
    # They end after 30 s. Meanwhile, only these processes are read, and not all of the machine.
    wait_until(lambda: not any(is_alive(*one) for one in started), 120, "all services are gone")
    assert local_node.record(running) is None


def test_keepalives_do_not_disturb_transfers(
    local_node: NodeUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_KEEPALIVE_EVERY_S", 0.001)
    data = [os.urandom(3_000_000), b"", b"x" * 5_000_000, os.urandom(10)]
    blobs = []
    for number, content in enumerate(data):
        path = tmp_path / str(number)
        path.write_bytes(content)
        blobs.append(Blob(digest=hashlib.sha256(content).hexdigest(), path=path, size=len(content), name="a file"))
    for _ in range(2):  # the second time, the node has all blobs
        send_blobs(local_node.transport, str(local_node.top), sys.executable, blobs, timeout_s=60)
    assert [(local_node.root / "blobs" / blob.digest).read_bytes() for blob in blobs] == data
    attempt = local_node.attempt()
    (local_node.directory(attempt) / "output").mkdir(parents=True)
    (local_node.directory(attempt) / "output" / "big").write_bytes(data[0])
    (tmp_path / "fetched").mkdir()
    for place in (None, "output"):
        fetched = fetch_output(
            local_node.transport, str(local_node.top), sys.executable, attempt, tmp_path / "fetched", place=place, timeout_s=20
        )
        assert (tmp_path / "fetched" / fetched.digest).stat().st_size == fetched.size > len(data[0])


def test_a_blob_that_became_shorter_is_an_error(local_node: NodeUnderTest, tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(b"short")
    blob = Blob(digest="0" * 64, path=path, size=1000, name="a file")
    with pytest.raises(StateError, match="the copy of `a file` in the state directory became shorter"):
        send_blobs(local_node.transport, str(local_node.top), sys.executable, [blob], timeout_s=60)
