"""The relay: it runs on an allocated node, and connects its standard streams to a command or a port there.

The cluster's engine, such as Slurm, starts a Python interpreter on the node with the text of this file as an argument
(``backends/allocated/relay.py``).

``run`` lets the resident program (``resident.py``) start a command. The relay copies bytes: the command does not
inherit the relay's descriptors. The relay therefore ends as soon as the command has ended, even if background processes still
have the command's pipes open. The command gets pipes even if the engine gives the relay a terminal. Engines add messages of
their own to standard error and change exit codes. Therefore the command's standard error is between two lines of the relay:
``MARK start`` and ``MARK exit CODE``.

``dial`` connects to a port. The end of standard input ends the connection.

``end`` lets the resident program end the allocation, such as a Slurm job, with an exit code.

Standard input consists of frames, each a length (``>I``) and the content, because not every engine passes on the end of
standard input. A frame without content ends the input of the command or the port.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import struct
import sys
import time
from typing import List, Optional, Set

__all__ = ["CONNECTED", "ENDED", "dial", "end", "main", "run"]

CONNECTED = b"+"
"""The first output of ``dial``."""
ENDED = b"ended"
"""The output of ``end``."""
_READ = 65536
_RESIDENT_S = 15.0
"""The maximum time to wait for the resident program, which starts together with the job."""


def main(argv: List[str]) -> int:
    """Run ``run MARK JOB HOST LIMIT_S ARGV...`` (``-``: no limit), ``dial PORT TIMEOUT_S`` or ``end JOB HOST EXIT_CODE``."""
    if argv[0] == "dial":
        return dial(int(argv[1]), float(argv[2]))
    if argv[0] == "end":
        return end(_prefix(argv[1], argv[2]), int(argv[3]))
    limit_s = None if argv[4] == "-" else float(argv[4])
    return run(argv[1], _prefix(argv[2], argv[3]), limit_s, argv[5:])


def _prefix(job: str, host: str) -> str:
    return "distflow-{}-{}-{}-".format(os.getuid(), job, host)


def run(mark: str, prefix: str, limit_s: Optional[float], argv: List[str]) -> int:
    """Let the resident program whose socket name has ``prefix`` run a command.

    Returns 0 after printing the command's exit code, or 1 if there is no resident program or it ends first.
    """
    resident = _resident(prefix)
    if resident is None:
        _write(2, b"distflow's resident program is not running on this node\n")
        return 1
    (stdin, into), (out, stdout), (errors, stderr) = os.pipe(), os.pipe(), os.pipe()
    request = json.dumps({"argv": [os.fsencode(word).decode("latin-1") for word in argv], "limit_s": limit_s}).encode("ascii")
    _write(2, "{} start\n".format(mark).encode())
    rights = array.array("i", [stdin, stdout, stderr])
    resident.sendmsg([struct.pack(">I", len(request))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    resident.sendall(request)
    for fd in (stdin, stdout, stderr):
        os.close(fd)
    for fd in (into, out, errors):
        os.set_blocking(fd, False)
    answer = _copy(resident, into, out, errors)
    if not answer:
        _write(2, b"distflow's resident program has ended\n")
        return 1
    for source, target in ((out, 1), (errors, 2)):
        while _forward(source, target):
            continue
    _write(2, "{} exit {}\n".format(mark, int(answer)).encode())
    return 0


def end(prefix: str, exit_code: int) -> int:
    """End the job. Returns 0 if the resident program confirms the request, and 1 if not, also if the job ends first."""
    resident = _resident(prefix)
    if resident is None:
        return 1
    request = json.dumps({"end": exit_code}).encode("ascii")
    resident.sendall(struct.pack(">I", len(request)) + request)
    if not resident.recv(64):
        return 1
    _write(1, ENDED)
    return 0


def _resident(prefix: str) -> Optional[socket.socket]:
    """Connect to the resident program; None if it does not run within ``_RESIDENT_S``.

    Its socket is found in the kernel's list, because the end of the name is random.
    """
    mark = b"@" + prefix.encode()
    deadline = time.monotonic() + _RESIDENT_S
    while True:
        with open("/proc/net/unix", "rb") as file:
            names = {line.split()[-1] for line in file if mark in line}
        for name in names:
            if name.startswith(mark):
                one = socket.socket(socket.AF_UNIX)
                try:
                    one.connect(b"\0" + name[1:])
                    if struct.unpack("3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] == os.getuid():
                        return one
                except OSError:  # it has just ended
                    pass
                one.close()
        if time.monotonic() > deadline:
            return None
        select.poll().poll(100)


class _Frames:
    """The frames that arrive at standard input."""

    def __init__(self) -> None:
        self._data = b""
        self._left = 0
        self.is_ended = False
        """Whether a frame without content, or the end of standard input, has arrived."""

    def read(self) -> bytes:
        """Return the content that can be read now; it may be empty."""
        data = os.read(0, _READ)
        self.is_ended = self.is_ended or not data
        self._data += data
        content = []
        while self._data and not self.is_ended:
            if self._left:
                content.append(self._data[: self._left])
                self._data = self._data[self._left :]
                self._left -= len(content[-1])
            elif len(self._data) >= 4:
                self._left = struct.unpack(">I", self._data[:4])[0]
                self._data = self._data[4:]
                self.is_ended = self._left == 0
            else:
                break
        return b"".join(content)


class _Input:
    """The command's standard input: the content of the frames at this program's standard input."""

    def __init__(self, pipe: int) -> None:
        self._pipe: Optional[int] = pipe
        self._frames = _Frames()
        self._data = b""

    def register(self, poll: select.poll) -> None:
        """Let ``poll`` report when input can be read or written, and when the command closes the pipe."""
        if not (self._frames.is_ended or self._data):
            poll.register(0, select.POLLIN)
        if self._pipe is not None:
            poll.register(self._pipe, select.POLLOUT if self._data else 0)

    def move(self, ready: Set[int]) -> None:
        """Read and write without waiting. Once the command has closed the pipe, input is discarded."""
        is_closed = self._pipe in ready and not self._data  # without data, `poll` reports only an error of the pipe
        if 0 in ready:
            self._data = self._frames.read()
        if self._pipe is not None:
            try:
                self._data = self._data[os.write(self._pipe, self._data) :]
            except BlockingIOError:
                pass
            except OSError:
                is_closed = True
            if is_closed or (self._frames.is_ended and not self._data):
                os.close(self._pipe)
                self._pipe = None
        if self._pipe is None:
            self._data = b""


def _copy(resident: socket.socket, into: int, out: int, errors: int) -> bytes:
    """Copy until the resident program answers. Returns the answer; empty if the resident program ended first."""
    outputs, stdin = {out: 1, errors: 2}, _Input(into)
    while True:
        poll = select.poll()
        for fd in (resident.fileno(), *outputs):
            poll.register(fd, select.POLLIN)
        stdin.register(poll)
        ready = {fd for fd, _ in poll.poll()}
        for fd in ready & set(outputs):
            if not _forward(fd, outputs[fd]):
                del outputs[fd]
        stdin.move(ready)
        if resident.fileno() in ready:
            return resident.recv(64)


def _forward(source: int, target: int) -> bool:
    """Copy the data that can be read now. Returns False if there is none, or at the end."""
    try:
        data = os.read(source, _READ)
    except BlockingIOError:
        return False
    _write(target, data)
    return bool(data)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def dial(port: int, timeout_s: float) -> int:
    """Connect standard input and output to a port of this node. Returns 1 if the connection fails, else 0."""
    try:
        peer = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
    except OSError as error:
        _write(2, "{}\n".format(error.strerror or error).encode())
        return 1
    # Otherwise, `send` would block if the server does not read, and its output would no longer be copied.
    peer.setblocking(False)
    _write(1, CONNECTED)
    frames, data, is_shut = _Frames(), b"", False
    while True:
        poll = select.poll()
        poll.register(peer.fileno(), select.POLLIN | (select.POLLOUT if data else 0))
        if not data:
            poll.register(0, select.POLLIN)
        ready = dict(poll.poll())
        if ready.get(peer.fileno(), 0) & ~select.POLLOUT:
            received = peer.recv(_READ)
            if not received:
                return 0
            _write(1, received)
        if 0 in ready:
            if is_shut:
                return 0  # this is the end of standard input
            data = frames.read()
        if data:
            try:
                data = data[peer.send(data) :]
            except BlockingIOError:
                continue
        if frames.is_ended and not data and not is_shut:
            peer.shutdown(socket.SHUT_WR)
            is_shut = True


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (BrokenPipeError, ConnectionResetError):  # the other side has closed the connection
        sys.exit(1)
