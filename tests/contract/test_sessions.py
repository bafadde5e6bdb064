"""A command beside a task, frame by frame (docs/agent-protocol.md)."""

from __future__ import annotations

import array
import fcntl
import json
import os
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.conftest import NodeUnderTest
from distflow.backends.machines.bootstrap import open_service
from distflow.backends.machines.stream import ServiceStream
from distflow.runtime.frames import FRAME
from distflow.runtime.session import ERRORS, EXIT, INPUT, OUTPUT, REQUEST, STARTED
from distflow.testing.waiting import wait_until
from distflow.transports.local import LocalTransport


@pytest.fixture
def here(tmp_path: Path) -> Iterator[NodeUnderTest]:
    """A node whose pipes can be looked into."""
    made = NodeUnderTest(LocalTransport(), tmp_path)
    yield made
    made.close()


def held(pid: int, number: int) -> int:
    """How much waits in the pipe that is a descriptor of a process."""
    fd, count = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK), array.array("i", [0])
    try:
        fcntl.ioctl(fd, termios.FIONREAD, count)
    finally:
        os.close(fd)
    return count[0]


def is_full(pid: int) -> bool:
    return held(pid, 1) > 65536 - 4096


def test_what_is_typed_while_output_waits_to_be_read_reaches_the_command(here: NodeUnderTest) -> None:
    attempt = here.start(here.connect(), ["sleep", "600"])
    opened = open_service(here.transport, str(here.root), sys.executable, "session", timeout_s=20)
    stream = ServiceStream("here", opened, "it ended")

    def send(kind: int, data: bytes) -> None:
        opened.channel.write(FRAME.pack(len(data), kind) + data)

    def frame() -> tuple[int, bytes]:
        size, kind = FRAME.unpack(stream.read(FRAME.size))
        return kind, stream.read(size)

    try:
        floods = ["sh", "-c", "echo $$; yes & read word; kill $!; exit 7"]
        send(REQUEST, json.dumps({"attempt": attempt, "argv": floods}).encode())
        assert frame()[0] == STARTED
        command = int(frame()[1].split()[0])
        session = int(Path(f"/proc/{command}/stat").read_text().rpartition(")")[2].split()[1])
        # Nobody reads: both pipes fill up, and the session can only wait for that.
        wait_until(lambda: is_full(command) and is_full(session), 20, "nothing moves")
        send(INPUT, b"enough\n")
        wait_until(lambda: held(session, 0) == 0, 20, "the session has heard it")
        kind, data = frame()
        while kind in (OUTPUT, ERRORS):
            kind, data = frame()
        assert (kind, json.loads(data)) == (EXIT, {"code": 7, "why": ""})
    finally:
        opened.channel.close()
