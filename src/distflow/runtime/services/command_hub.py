"""A program that runs many commands for one submitter, over the program's standard input and output.

``transports.multiplexed`` sends the text of this module to a machine (``python3 -c``), so it imports only the standard library.
Both sides use ``FrameReader`` and the constants.

Its arguments are a nonce and the seconds between pings. It first prints the line ``<nonce> ready``, because login scripts may
print other lines before. Then both sides send frames: ``HEADER`` (kind, number of the channel, length), then the content.

* The submitter sends ``OPEN`` (arguments, separated by NUL) to start a command, or ``DIAL`` (a port, ``>H``) to connect to
  127.0.0.1, each with a new number. Then it may send ``INPUT`` (empty at its end), ``CREDIT`` (``>I``), and ``CLOSE`` (close
  input, output) or ``KILL`` (kill the process group).
* The hub answers ``DIAL`` with ``CONNECTED`` or ``REFUSED`` (text). It sends ``OUTPUT`` and ``ERRORS`` (empty at their ends),
  ``EXIT`` (``>B``), ``CREDIT``, and ``INPUT_CLOSED`` if the command accepts no more input.

A command is over when both outputs and the command itself have ended; after ``CLOSE`` or ``KILL``, when the command itself
has ended. A connection is over when both of its directions are closed. Frames for channels that are over are ignored.

Each side may send ``WINDOW`` bytes of input or output to a channel, and more after ``CREDIT`` has reported bytes as processed.
So a channel whose data is not read does not block other channels. Standard error needs no credit, because the submitter always
reads it.

Both sides send a ``PING`` every few seconds. It has no reply, because on a slow network a reply would wait behind other data.
The hub ends when the submitter closes the connection, sends an invalid frame, or sends nothing for half a minute. Commands have
their own sessions, and continue to run without their pipes.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

__all__ = [
    "CLOSE",
    "CONNECTED",
    "COUNT",
    "CREDIT",
    "DIAL",
    "ERRORS",
    "EXIT",
    "HEADER",
    "INPUT",
    "INPUT_CLOSED",
    "KILL",
    "LARGEST_FRAME",
    "OPEN",
    "OUTPUT",
    "PING",
    "PORT",
    "READ",
    "REFUSED",
    "WINDOW",
    "FrameReader",
    "serve",
]

OPEN, DIAL, INPUT, CLOSE, KILL = 1, 2, 3, 4, 5
CREDIT, PING = 9, 10
OUTPUT, ERRORS, EXIT, INPUT_CLOSED, CONNECTED, REFUSED = 11, 12, 13, 14, 15, 16

HEADER = struct.Struct(">BII")
COUNT = struct.Struct(">I")
PORT = struct.Struct(">H")
LARGEST_FRAME = 1 << 20
WINDOW = 2 << 20
"""Maximum bytes that are sent to one reader before the reader reports them as processed."""
READ = 65536

_SILENCE_S = 30.0
_RECEIVE = 256 << 10
_MOST_OUTGOING = 256 << 10
"""While more bytes wait to be sent to the submitter, no output of commands is read."""
_FLUSH_S = 10.0
"""Time for commands to take the input that was received before the submitter was gone."""
_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)


class FrameReader:
    """Splits a stream of bytes into frames. Raises ``ValueError`` for a frame that is too long."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> List[Tuple[int, int, bytes]]:
        """Add ``data``. Returns kind, number and content of each frame that it completed."""
        self._received += data
        found = []
        at = 0
        with memoryview(self._received) as view:
            while len(view) - at >= HEADER.size:
                kind, number, size = HEADER.unpack_from(view, at)
                if size > LARGEST_FRAME:
                    raise ValueError("received a frame of {} bytes; the limit is {} bytes".format(size, LARGEST_FRAME))
                begin, end = at + HEADER.size, at + HEADER.size + size
                if end > len(view):
                    break
                found.append((kind, number, bytes(view[begin:end])))
                at = end
        del self._received[:at]
        return found


class _Channel:
    """A command or a TCP connection. A descriptor that is not open is -1."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pid = 0
        """0 for a TCP connection."""
        self.code: Optional[int] = None
        self.socket: Any = None
        self.is_connecting = False
        self.input = -1
        self.output = -1
        self.errors = -1
        self.pending = bytearray()
        """Input that waits for the command."""
        self.input_ends = False
        self.written = 0
        """Bytes of input that the command has been given, but that have not been reported as processed yet."""
        self.credit = WINDOW
        self.is_closed = False


class _Gone(Exception):
    """The submitter is gone, or sent invalid frames."""


class _Hub:
    def __init__(self, ping_s: float) -> None:
        self._ping_s = ping_s
        self._ping_at = time.monotonic() + ping_s
        self._channels: Dict[int, _Channel] = {}
        self._by_fd: Dict[int, _Channel] = {}
        self._reader = FrameReader()
        self._outgoing = bytearray()
        self._is_waiting = False
        self._is_over = False
        self._received_at = time.monotonic()
        self._wakeup, wake = os.pipe()
        for fd in (self._wakeup, wake, 0, 1):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll = select.poll()
        self._own_poll = select.poll()
        """The descriptors of ``_poll`` without those of channels."""
        for poll in (self._poll, self._own_poll):
            poll.register(0, select.POLLIN)
            poll.register(1, 0)
            poll.register(self._wakeup, select.POLLIN)

    def serve(self) -> None:
        """Run commands until the submitter is gone."""
        try:
            while not self._is_over:
                self._turn(self._poll)
            while self._receive():  # data that was sent before the end
                pass
        except (_Gone, ValueError, struct.error):
            self._is_over = True
        self._flush_inputs()

    def _turn(self, poll: Any) -> None:
        now = time.monotonic()
        if now >= self._ping_at:
            self._ping_at = now + self._ping_s
            self._send(PING, 0, b"")
        left = max(0.0, min(self._ping_at, self._received_at + _SILENCE_S) - now)
        for fd, events in poll.poll(left * 1000 + 1):
            if fd == 0:
                self._receive()
            elif fd == 1:
                if not self._outgoing and events & (select.POLLERR | select.POLLHUP):
                    self._is_over = True
                self._flush()
            elif fd == self._wakeup:
                self._reap()
            else:
                # An earlier event may have closed this descriptor, and a newer channel may have reused its number. That is
                # harmless, because all descriptors are non-blocking.
                self._serve_fd(fd)
        if time.monotonic() - self._received_at > _SILENCE_S:
            raise _Gone

    def _serve_fd(self, fd: int) -> None:
        channel = self._by_fd.get(fd)
        if channel is None:
            return
        if channel.is_connecting:
            self._finish_dial(channel)
        elif fd == channel.input:
            self._write_input(channel)
        else:
            self._forward(channel, fd)

    # -- the submitter

    def _receive(self) -> bool:
        """Take a piece of the submitter's data. Return False if there is none now, and raise ``_Gone`` at its end."""
        try:
            data = os.read(0, _RECEIVE)
        except BlockingIOError:
            return False
        except OSError as error:
            raise _Gone from error
        if not data:
            raise _Gone
        self._received_at = time.monotonic()
        for kind, number, content in self._reader.feed(data):
            self._take(kind, number, content)
        return True

    def _take(self, kind: int, number: int, content: bytes) -> None:
        channel = self._channels.get(number)
        if kind in (OPEN, DIAL):
            if channel is not None:
                raise _Gone
            (self._open if kind == OPEN else self._dial)(_Channel(number), content)
        elif kind == PING or channel is None or (kind == INPUT and channel.input < 0):
            return
        elif kind == INPUT:
            channel.pending += content
            channel.input_ends = channel.input_ends or not content
            if len(channel.pending) > WINDOW:
                raise _Gone
            self._write_input(channel)
        elif kind == CREDIT:
            channel.credit += COUNT.unpack(content)[0]
            if channel.output >= 0:
                self._watch(channel.output, select.POLLIN)
        elif kind == CLOSE:
            self._close(channel)
        elif kind == KILL:
            self._kill(channel)
        else:
            raise _Gone

    def _send(self, kind: int, number: int, content: bytes) -> None:
        if self._is_over:
            return
        was_empty = not self._outgoing
        self._outgoing += HEADER.pack(kind, number, len(content))
        self._outgoing += content
        if was_empty:
            self._flush()

    def _flush(self) -> None:
        """Write to the submitter as much as is accepted now."""
        try:
            while self._outgoing:
                del self._outgoing[: _write(1, self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # the submitter is gone, but its last data may be unread
            self._is_over = True
            self._outgoing.clear()
            return
        if bool(self._outgoing) != self._is_waiting:
            self._is_waiting = not self._is_waiting
            for poll in (self._poll, self._own_poll):
                poll.modify(1, select.POLLOUT if self._is_waiting else 0)

    # -- channels

    def _open(self, channel: _Channel, content: bytes) -> None:
        pipes: List[Tuple[int, int]] = []
        try:
            pipes.extend(os.pipe() for _ in range(3))
            channel.pid = os.fork()
        except OSError as error:
            for pipe in pipes:
                os.close(pipe[0])
                os.close(pipe[1])
            text = "cannot start the command: {}\n".format(error.strerror).encode()
            for kind, data in ((ERRORS, text), (ERRORS, b""), (OUTPUT, b""), (EXIT, b"\x7e")):
                self._send(kind, channel.number, data)
            return
        if channel.pid == 0:
            _become_command(content.split(b"\0"), (pipes[0][0], pipes[1][1], pipes[2][1]))
        for fd in (pipes[0][0], pipes[1][1], pipes[2][1]):
            os.close(fd)
        channel.input, channel.output, channel.errors = pipes[0][1], pipes[1][0], pipes[2][0]
        self._add(channel)

    def _dial(self, channel: _Channel, content: bytes) -> None:
        try:
            channel.socket = socket.socket()
        except OSError as error:
            self._send(REFUSED, channel.number, str(error.strerror).encode())
            return
        channel.socket.setblocking(False)
        channel.input = channel.socket.fileno()
        code = channel.socket.connect_ex(("127.0.0.1", PORT.unpack(content)[0]))
        channel.is_connecting = True
        self._add(channel)
        if code == errno.EINPROGRESS:
            self._watch(channel.input, select.POLLOUT)
        else:
            self._finish_dial(channel, code)

    def _finish_dial(self, channel: _Channel, code: int = 0) -> None:
        channel.is_connecting = False
        code = code or channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if code:
                raise OSError(code, os.strerror(code))
            # The output gets its own descriptor, because each direction ends separately.
            channel.output = os.dup(channel.input)
        except OSError as error:
            self._send(REFUSED, channel.number, str(error.strerror).encode())
            self._drop(channel, channel.input)
            return
        self._send(CONNECTED, channel.number, b"")
        self._add(channel)
        self._write_input(channel)

    def _add(self, channel: _Channel) -> None:
        self._channels[channel.number] = channel
        for fd in (channel.input, channel.output, channel.errors):
            if fd >= 0:
                os.set_blocking(fd, False)
                self._by_fd[fd] = channel
                self._watch(fd, 0 if fd == channel.input else select.POLLIN)

    def _watch(self, fd: int, events: int) -> None:
        # A descriptor without events is unregistered, because `poll` would report a closed pipe again and again.
        if events:
            self._poll.register(fd, events)
        else:
            try:
                self._poll.unregister(fd)
            except KeyError:
                pass

    def _write_input(self, channel: _Channel) -> None:
        if channel.input < 0 or channel.is_connecting:
            return
        try:
            while channel.pending:
                size = _write(channel.input, channel.pending)
                del channel.pending[:size]
                channel.written += size
        except BlockingIOError:
            pass
        except OSError:
            self._send(INPUT_CLOSED, channel.number, b"")
            self._drop(channel, channel.input)
            return
        if channel.written >= WINDOW // 4:
            self._send(CREDIT, channel.number, COUNT.pack(channel.written))
            channel.written = 0
        if channel.pending:
            self._watch(channel.input, select.POLLOUT)
        elif channel.input_ends:
            self._drop(channel, channel.input)
        else:
            self._watch(channel.input, 0)

    def _forward(self, channel: _Channel, fd: int) -> None:
        """Send output of a command or data from a TCP connection."""
        while len(self._outgoing) >= _MOST_OUTGOING:
            self._turn(self._own_poll)
        if self._by_fd.get(fd) is not channel:
            return  # closed meanwhile
        size = min(READ, channel.credit) if fd == channel.output else READ
        if size == 0:
            self._watch(fd, 0)
            return
        try:
            data = os.read(fd, size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if fd == channel.output:
            channel.credit -= len(data)
        if not channel.is_closed:
            self._send(OUTPUT if fd == channel.output else ERRORS, channel.number, data)
        if not data:
            self._drop(channel, fd)

    def _close(self, channel: _Channel) -> None:
        """Close the output now, and the input after the received data was written.

        Standard error is still read, so that the command does not block.
        """
        channel.is_closed = True
        channel.input_ends = True
        channel.is_connecting = False
        self._drop(channel, channel.output)
        self._write_input(channel)
        self._forget_if_over(channel)

    def _kill(self, channel: _Channel) -> None:
        if channel.pid:
            for kill in (os.killpg, os.kill):  # the second for a command that has no session yet
                try:
                    kill(channel.pid, signal.SIGKILL)
                except OSError:
                    pass
        channel.is_closed = True
        for fd in (channel.input, channel.output, channel.errors):
            self._drop(channel, fd)

    def _drop(self, channel: _Channel, fd: int) -> None:
        """Close one direction, if it is open."""
        if self._by_fd.get(fd) is not channel:
            return
        self._watch(fd, 0)
        del self._by_fd[fd]
        if fd == channel.input:
            channel.input = -1
            channel.pending.clear()
        elif fd == channel.output:
            channel.output = -1
        else:
            channel.errors = -1
        if channel.socket is not None and channel.socket.fileno() == fd:
            try:
                channel.socket.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            channel.socket.close()
        else:
            os.close(fd)
        self._forget_if_over(channel)

    def _reap(self) -> None:
        try:
            os.read(self._wakeup, READ)
        except BlockingIOError:
            pass
        for channel in list(self._channels.values()):
            if channel.pid and channel.code is None:
                # The zombie is kept until its pipes have ended, so that a later KILL cannot reach a new process with its id.
                ended = os.waitid(os.P_PID, channel.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None:
                    is_signal = ended.si_code != os.CLD_EXITED
                    channel.code = ended.si_status + (128 if is_signal else 0)
                    if not channel.is_closed:
                        self._send(EXIT, channel.number, bytes([channel.code]))
                    self._forget_if_over(channel)

    def _forget_if_over(self, channel: _Channel) -> None:
        if channel.number not in self._channels:
            return
        if channel.pid:
            if channel.code is None or (not channel.is_closed and (channel.output >= 0 or channel.errors >= 0)):
                return
            os.waitpid(channel.pid, 0)
        elif channel.input >= 0 or channel.output >= 0:
            return
        del self._channels[channel.number]
        for fd in (channel.input, channel.errors):
            self._drop(channel, fd)

    def _flush_inputs(self) -> None:
        """Write the remaining input to the commands. Stop after ``_FLUSH_S``."""
        until = time.monotonic() + _FLUSH_S
        while time.monotonic() < until:
            waiting = [channel for channel in self._channels.values() if channel.input >= 0 and channel.pending]
            poll = select.poll()
            for channel in waiting:
                poll.register(channel.input, select.POLLOUT)
            if not waiting or not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                return
            for channel in waiting:
                self._write_input(channel)


def _write(fd: int, data: bytearray) -> int:
    with memoryview(data) as view, view[:READ] as piece:
        return os.write(fd, piece)


def _become_command(argv: List[bytes], streams: Tuple[int, int, int]) -> None:
    code, name = 126, argv[0]
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_NOFILE, _FILES)
        for target, fd in enumerate(streams):
            os.dup2(fd, target)
        os.execvp(name, argv)
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        os.write(2, name + ": {}\n".format(error.strerror).encode())
    finally:
        os._exit(code)


def _undo_locale_coercion() -> None:
    """Remove the ``LC_CTYPE`` that Python adds in the C locale (PEP 538). ``ssh`` may pass it to machines without UTF-8."""
    try:
        with open("/proc/self/environ", "rb") as file:
            is_given = (b"\0" + file.read()).find(b"\0LC_CTYPE=") >= 0
    except OSError:
        return
    if not is_given:
        os.environ.pop("LC_CTYPE", None)


def serve() -> None:
    """Run commands for the submitter at standard input and output."""
    _undo_locale_coercion()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES[1], _FILES[1]))
    except (OSError, ValueError):  # the hard limit may exceed the kernel's own limit
        pass
    hub = _Hub(float(sys.argv[2]))
    os.write(1, sys.argv[1].encode() + b" ready\n")
    hub.serve()


if __name__ == "__main__":
    serve()
