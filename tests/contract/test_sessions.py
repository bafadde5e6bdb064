"""The protocol of `workflow exec`: frames of a command in a running task's environment (docs/agent-protocol.md)."""

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
def local_node(tmp_path: Path) -> Iterator[NodeUnderTest]:
    """A node on this machine, so that the tests can inspect pipes."""
    made = NodeUnderTest(LocalTransport(), tmp_path)
    yield made
    made.close()


def unread_bytes(pid: int, number: int) -> int:
    """The number of unread bytes in the pipe that is a descriptor of a process."""
    fd, count = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK), array.array("i", [0])
    try:
        fcntl.ioctl(fd, termios.FIONREAD, count)
    finally:
        os.close(fd)
    return count[0]


def children_of(pid: int) -> Iterator[int]:
    """The running children of a process."""
    return (one.pid for one in list_processes() if one.ppid == pid and one.is_alive)


def is_full(pid: int) -> bool:
    """Whether the pipe of a process's standard output is full. Partly filled pages count as full."""
    fd, poll = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK), select.poll()
    try:
        poll.register(fd, select.POLLOUT)
        return not poll.poll(0)
    finally:
        os.close(fd)


class RawSession:
    """A session whose frames the test reads and writes itself."""

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

    def read_end(self) -> object:
        """Read all output, and return the report of the end."""
        kind, data = self.next()
        while kind in (OUTPUT, ERRORS):
            kind, data = self.next()
        assert kind == EXIT
        return json.loads(data)


@pytest.fixture
def blocked_session(local_node: NodeUnderTest) -> Iterator[tuple[RawSession, str, int]]:
    """A session whose pipes are full of unread output, its attempt, and the process that serves it."""
    attempt = local_node.start(local_node.connect(), ["sleep", "600"])
    frames = RawSession(local_node, attempt, ["sh", "-c", "echo $$; yes & read word; kill $!; exit 7"])
    try:
        command = int(frames.next()[1].split()[0])
        session = int(Path(f"/proc/{command}/stat").read_text().rpartition(")")[2].split()[1])
        # No process reads the output, so both pipes become full, and the session waits.
        wait_until(lambda: is_full(command) and is_full(session), 20, "both pipes are full")
        yield frames, attempt, session
    finally:
        frames.channel.close()


@pytest.mark.parametrize("size", [b"no JSON", b'{"rows": [1]}', b'{"rows": 1e400}'])
def test_an_invalid_size_of_the_terminal_ends_the_command(local_node: NodeUnderTest, size: bytes) -> None:
    attempt = local_node.start(local_node.connect(), ["sleep", "600"])
    frames = RawSession(
        local_node, attempt, ["sh", "-c", "echo up; exec sleep 600"], {"rows": 24, "columns": 80, "term": "dumb"}
    )
    assert frames.next()[0] == OUTPUT  # before the command runs, it has no process group that could get SIGHUP
    frames.send(RESIZE, size)
    assert frames.read_end() == {"code": 129, "why": ""}
    frames.channel.close()


def test_input_reaches_the_command_while_output_waits(blocked_session: tuple[RawSession, str, int]) -> None:
    frames, _, session = blocked_session
    frames.send(INPUT, b"enough\n")
    wait_until(lambda: unread_bytes(session, 0) == 0, 20, "the session has read the input")
    assert frames.read_end() == {"code": 7, "why": ""}


def test_the_end_of_the_task_is_reported_after_its_unread_output(
    local_node: NodeUnderTest, blocked_session: tuple[RawSession, str, int]
) -> None:
    frames, attempt, session = blocked_session
    local_node.connect().request("stop", attempt=attempt, grace_s=5, why="by the test")
    wait_until(lambda: not list(children_of(session)), 20, "the command is gone")
    assert frames.read_end() == {"code": 129, "why": "the task has ended, so the command was killed"}
