"""A command in a running task's environment, frame by frame (docs/agent-protocol.md)."""

from __future__ import annotations

import array
import fcntl
import json
import os
import select
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.conftest import NodeUnderTest
from distflow.backends.machines.connection.bootstrap import open_service
from distflow.backends.machines.connection.stream import ServiceStream
from distflow.runtime.processes import list_processes
from distflow.runtime.services.frames import FRAME
from distflow.runtime.services.session import ERRORS, EXIT, INPUT, OUTPUT, REQUEST, RESIZE, STARTED
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


def below(pid: int) -> Iterator[int]:
    """The living children of a process."""
    return (one.pid for one in list_processes() if one.ppid == pid and one.is_alive)


def is_full(pid: int) -> bool:
    """Whether nothing more goes into what a process writes to: pages of a pipe that are not filled count, too."""
    fd, poll = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK), select.poll()
    try:
        poll.register(fd, select.POLLOUT)
        return not poll.poll(0)
    finally:
        os.close(fd)


class Frames:
    """A session as it is on the wire."""

    def __init__(self, node: NodeUnderTest, attempt: str, argv: list[str], terminal: object = None) -> None:
        opened = open_service(node.transport, str(node.top), sys.executable, "services.session", timeout_s=60)
        self.channel = opened.channel
        self._stream = ServiceStream("here", opened, "it ended", b"")
        self.send(REQUEST, json.dumps({"attempt": attempt, "argv": argv, "terminal": terminal}).encode())
        assert self.next()[0] == STARTED

    def send(self, kind: int, data: bytes) -> None:
        self.channel.write(FRAME.pack(len(data), kind) + data)

    def next(self) -> tuple[int, bytes]:
        size, kind = FRAME.unpack(self._stream.read(FRAME.size))
        return kind, self._stream.read(size)

    def end(self) -> object:
        """The report of the end, when all output before it has been read."""
        kind, data = self.next()
        while kind in (OUTPUT, ERRORS):
            kind, data = self.next()
        assert kind == EXIT
        return json.loads(data)


@pytest.fixture
def flood(here: NodeUnderTest) -> Iterator[tuple[Frames, str, int]]:
    """A session whose output waits to be read, its attempt, and the process that serves it."""
    attempt = here.start(here.connect(), ["sleep", "600"])
    frames = Frames(here, attempt, ["sh", "-c", "echo $$; yes & read word; kill $!; exit 7"])
    try:
        command = int(frames.next()[1].split()[0])
        session = int(Path(f"/proc/{command}/stat").read_text().rpartition(")")[2].split()[1])
        # No process reads: both pipes fill up, and the session can only wait for that.
        wait_until(lambda: is_full(command) and is_full(session), 20, "nothing moves")
        yield frames, attempt, session
    finally:
        frames.channel.close()


@pytest.mark.parametrize("size", [b"no JSON", b'{"rows": [1]}', b'{"rows": 1e400}'])
def test_an_invalid_size_of_the_terminal_ends_the_command(here: NodeUnderTest, size: bytes) -> None:
    attempt = here.start(here.connect(), ["sleep", "600"])
    frames = Frames(here, attempt, ["sh", "-c", "echo up; exec sleep 600"], {"rows": 24, "columns": 80, "term": "dumb"})
    assert frames.next()[0] == OUTPUT  # until the command runs, it has no process group to hang up
    frames.send(RESIZE, size)
    assert frames.end() == {"code": 129, "why": ""}
    frames.channel.close()


def test_input_reaches_the_command_while_output_waits(flood: tuple[Frames, str, int]) -> None:
    frames, _, session = flood
    frames.send(INPUT, b"enough\n")
    wait_until(lambda: held(session, 0) == 0, 20, "the session has heard it")
    assert frames.end() == {"code": 7, "why": ""}


def test_the_end_of_the_task_is_reported_after_its_unread_output(here: NodeUnderTest, flood: tuple[Frames, str, int]) -> None:
    frames, attempt, session = flood
    here.connect().request("stop", attempt=attempt, grace_s=5, why="by the test")
    wait_until(lambda: not list(below(session)), 20, "the command is gone")
    assert frames.end() == {"code": 129, "why": "the task has ended, so the command was killed"}
