"""Run many commands over one channel of another transport.

sshd allows ten sessions for one connection by default (``MaxSessions``), and administrators of login nodes want few logins.
``MultiplexedTransport`` starts one program, the command hub, through another transport. The hub runs all commands.
``runtime.services.command_hub`` describes the messages.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import itertools
import secrets
import struct
import threading
from collections import deque
from collections.abc import Sequence

from distflow.errors import BootstrapFailed, NodeUnreachable, TransportError
from distflow.runtime.services import command_hub as hub
from distflow.transports.base import Channel, Completed, Deadline, Transport, command_closed, tail_with_reason
from distflow.transports.shared_connection import SharedConnection

__all__ = ["MultiplexedChannel", "MultiplexedTransport"]

_PIECE = 256 << 10
"""Maximum bytes of input in one frame."""
_MOST_QUEUED = 1 << 20
"""Input is queued only while fewer bytes than this wait to be sent, over all channels."""
_TAIL = 16384
_DRAIN_TIMEOUT_S = 2.0
_FLUSH_S = 1.0
_REASON_S = 1.0
_SILENT_PINGS = 3
_START_S = 30.0
_MOST_NOISE = 4 << 20
_NOT_FOUND = 127
_SIGNALED = 128
_NO_CONNECTION = 255
"""The exit code of programs such as ``ssh`` that could not connect."""
_SHOWN = 2000


class MultiplexedTransport:
    """Runs all commands over one channel of ``inner`` (contract: ``transports.base.Transport``).

    1. The first call opens the channel. After it broke, the next call opens another one.
    2. A machine that sends nothing for three heartbeats is unreachable, and ``inner`` hangs up.
    3. ``hang_up`` and ``close`` also apply to ``inner``.
    """

    def __init__(self, inner: Transport, *, python: str = "python3", ping_s: float = 5.0) -> None:
        """``python``: the interpreter on the machine of ``inner``. ``ping_s``: the interval of heartbeats."""
        self.name = inner.name
        self._inner = inner
        self._shared = SharedConnection(inner.name, lambda: _HubConnection(inner, python, ping_s))

    @property
    def reached_address(self) -> str | None:
        """The address that ``inner`` reached."""
        return self._inner.reached_address

    @property
    def named_addresses(self) -> tuple[str, ...]:
        """The addresses of ``inner``."""
        return self._inner.named_addresses

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Completed:
        """Run a command to its end; ``timeout_s`` includes the time to connect."""
        deadline = Deadline(timeout_s)
        return self._shared.get(deadline).start(argv, collects=True).complete(argv[0], input, deadline)

    def open(self, argv: Sequence[str]) -> MultiplexedChannel:
        """Start a command and keep a channel to it."""
        return self._shared.get(None).start(argv, collects=False)

    def dial(self, port: int, *, timeout_s: float) -> MultiplexedChannel:
        """Connect to a TCP port of the machine."""
        deadline = Deadline(timeout_s)
        return self._shared.get(deadline).dial(port, deadline)

    def hang_up(self) -> None:
        """Drop this connection and that of ``inner``. The next call connects again."""
        self._shared.drop()
        self._inner.hang_up()

    def close(self) -> None:
        """Close both connections for good. Remote processes continue."""
        if (connection := self._shared.current) is not None:
            connection.flush(_FLUSH_S)
        self._shared.close()
        self._inner.close()


class MultiplexedChannel:
    """A command's pipes, or a TCP connection (contracts: ``transports.base.Channel`` and ``Stream``).

    The connection's lock protects the fields that change.
    """

    def __init__(self, connection: _HubConnection, number: int, *, is_command: bool, collects: bool) -> None:
        """``collects``: keep all of standard error, and accept any amount of output."""
        self._connection = connection
        self._number = number
        self._is_command = is_command
        self._collects = collects
        self._writing = threading.Lock()
        self._changed = threading.Condition(connection.lock)
        self._credit = hub.WINDOW
        self._allowed = hub.WINDOW
        self._unreported = 0
        self._output = bytearray()
        self._stderr = bytearray()
        self._output_ended = False
        self._stderr_ended = False
        self._code: int | None = None
        self._input_closed = False
        self._input_ended = False
        self._answer: str | None = None
        """For a TCP connection: why it failed; empty if it succeeded, ``None`` before the hub has answered."""
        self._is_closed = False
        self._error: NodeUnreachable | None = None

    # -- for users

    def read(self) -> bytes:
        """Wait for data and return up to 64 KiB of it."""
        with self._connection.lock:
            self._changed.wait_for(lambda: self._output or self._output_ended or self._is_cut)
            if self._is_closed:
                return b""
            if not self._output:
                self._changed.wait_for(lambda: self._is_over or self._is_cut, _DRAIN_TIMEOUT_S if self._is_command else 0)
                return b""
            with memoryview(self._output) as view, view[: hub.READ] as piece:
                data = bytes(piece)
            del self._output[: len(data)]
            self._allow(len(data))
            return data

    def write(self, data: bytes) -> None:
        """Send ``data``."""
        self._write(data, None)

    def end(self) -> None:
        """Close the sending direction."""
        with self._writing, self._connection.lock:
            if not self._input_ended:
                self._put(hub.INPUT)
                self._input_ended = True

    def stderr_tail(self) -> str:
        """The end of the command's standard error, and why the connection broke if it did."""
        with self._connection.lock:
            tail = bytes(self._stderr[-_TAIL:]).decode("utf-8", "replace")
            return tail_with_reason(tail, "" if self._error is None or self._is_closed else self._error.message)

    @property
    def exit_code(self) -> int | None:
        """The command's exit code; ``None`` while it runs, and if the connection broke first."""
        return self._code

    def close(self) -> None:
        """Close the pipes; the command continues."""
        self._close(hub.CLOSE)

    # -- for the transport

    def complete(self, program: str, stdin: bytes, deadline: Deadline) -> Completed:
        """Give the command its input, and wait for its end."""
        node = self._connection.node
        try:
            # A command may end without reading all of its input.
            with contextlib.suppress(NodeUnreachable):
                self._write(stdin, deadline)
                self.end()
            with self._connection.lock:
                self._changed.wait_for(lambda: self._is_over or self._is_cut, deadline.left())
                if self._is_over and self._code is not None:
                    return Completed(exit_code=self._code, stdout=bytes(self._output), stderr=bytes(self._stderr))
                error = self._error
            if error is not None:
                raise NodeUnreachable(node, f"the connection broke while `{program}` ran: {error.detail}", hint=error.hint)
            raise NodeUnreachable(node, f"`{program}` did not finish within {deadline.seconds:g} s")
        finally:
            self._close(hub.KILL)

    def wait_connected(self, port: int, deadline: Deadline) -> None:
        """Wait until the hub has connected to the port."""
        with self._connection.lock:
            self._changed.wait_for(lambda: self._answer is not None or self._is_cut, deadline.left())
            error, refusal = self._error, self._answer
        if refusal == "":
            return
        self.close()
        if error is not None:
            raise _copy_of(error)
        if refusal is not None:
            raise NodeUnreachable(self._connection.node, f"nothing answers on its port {port} ({refusal})")
        raise NodeUnreachable(self._connection.node, f"no connection to its port {port} within {deadline.seconds:g} s")

    def take(self, kind: int, content: bytes) -> None:
        """Handle a message. The lock is held. Raises ``ValueError`` or ``struct.error`` if the message is invalid."""
        if kind == hub.OUTPUT:
            self._allowed -= len(content)
            if self._output_ended:
                raise ValueError("output after the end of the output")
            if self._allowed < 0:
                raise ValueError("more output than distflow requested")
            self._output += content
            self._output_ended = not content
            self._allow(len(content) if self._collects else 0)
        elif kind == hub.ERRORS:
            self._stderr += content
            self._stderr_ended = self._stderr_ended or not content
            del self._stderr[: 0 if self._collects else -_TAIL]
        elif kind == hub.EXIT:
            (self._code,) = content
        elif kind == hub.CREDIT:
            self._credit += hub.COUNT.unpack(content)[0]
            if self._credit > hub.WINDOW:
                raise ValueError("more input was processed than was sent")
        elif kind == hub.INPUT_CLOSED:
            self._input_closed = True
        elif kind in (hub.CONNECTED, hub.REFUSED):
            self._answer = content[:_SHOWN].decode("utf-8", "replace")
        else:
            raise ValueError(f"unknown message kind {kind}")
        if self._is_over:
            self._connection.forget(self._number)
        self._changed.notify_all()

    def wake(self) -> None:
        """Wake a waiting ``write``, which checks whether the queue has room. The lock is held."""
        self._changed.notify_all()

    def cut(self, error: NodeUnreachable) -> None:
        """End the channel, because the connection broke. The lock is held."""
        self._error = error
        self._code = None  # its output may be incomplete
        self._changed.notify_all()

    @property
    def _is_over(self) -> bool:
        """Whether the command has ended and all of its output has arrived, or both directions of the TCP connection ended."""
        return self._output_ended and (
            (self._stderr_ended and self._code is not None) if self._is_command else self._input_ended or self._input_closed
        )

    @property
    def _is_cut(self) -> bool:
        return self._is_closed or self._error is not None

    def _allow(self, size: int) -> None:
        """Allow the hub to send ``size`` more bytes. The lock is held."""
        self._unreported += size
        if self._unreported >= hub.WINDOW // 4:
            self._allowed += self._unreported
            self._put(hub.CREDIT, hub.COUNT.pack(self._unreported))
            self._unreported = 0

    def _put(self, kind: int, content: bytes | memoryview = b"") -> None:
        if not self._is_cut and not self._is_over:
            self._connection.put(kind, self._number, content)

    def _write(self, data: bytes, deadline: Deadline | None) -> None:
        view = memoryview(bytes(data))  # slices of the view are queued without a copy
        with self._writing:
            while view:
                with self._connection.lock:
                    size = min(self._wait_for_credit(deadline), len(view), _PIECE)
                    self._credit -= size
                    self._put(hub.INPUT, view[:size])
                view = view[size:]

    def _wait_for_credit(self, deadline: Deadline | None) -> int:
        """Wait until input may be sent, and return its maximum size in bytes. The lock is held."""
        while True:
            if self._error is not None:
                raise _copy_of(self._error)
            if self._is_closed or self._input_ended:
                raise command_closed(self._connection.node)
            if self._input_closed or self._is_over:
                closed = "the command has ended or closed its input"
                what = closed if self._is_command else "the other side closed the connection"
                raise NodeUnreachable(self._connection.node, what)
            if self._credit and self._connection.has_room(self):
                return self._credit
            if not self._changed.wait(None if deadline is None else deadline.left()):
                raise NodeUnreachable(self._connection.node, "the command did not read its input in time")

    def _close(self, kind: int) -> None:
        with self._connection.lock:
            self._put(kind)
            self._is_closed = True
            self._output.clear()
            self._connection.forget(self._number)
            self._changed.notify_all()


class _HubConnection:
    """The channel to one hub (protocol: ``shared_connection.Connection``)."""

    def __init__(self, inner: Transport, python: str, ping_s: float) -> None:
        self.node = inner.name
        self.lock = threading.Lock()
        self._inner = inner
        self._python = python
        self._ping_s = ping_s
        self._nonce = f"distflow-{secrets.token_hex(12)}"
        self._channel: Channel | None = None
        self._numbers = itertools.count(1)
        self._channels: dict[int, MultiplexedChannel] = {}
        self._outgoing: deque[bytes | memoryview] = deque()
        self._queued = 0
        self._is_writing = False
        self._queue_changed = threading.Condition(self.lock)
        self._waiting: list[MultiplexedChannel] = []
        self._is_ready = threading.Event()
        """Also set if the connection ends before the hub is ready."""
        self._has_ended = threading.Event()
        self._broken_by: TransportError | None = None
        self._error: TransportError | None = None
        self._silent_pings = 0

    def connect(self) -> None:
        """Start the hub."""
        channel = self._inner.open([self._python, "-I", "-S", "-c", _source(), self._nonce, f"{self._ping_s:g}"])
        self._channel = channel
        for target, what in ((self._read, "reader"), (self._write, "writer"), (self._ping, "heartbeats")):
            threading.Thread(target=target, args=(channel,), name=f"{what} of {self.node}", daemon=True).start()
        if not self._is_ready.wait(_START_S):
            self._fail(NodeUnreachable(self.node, f"`{self._python}` did not answer within {_START_S:g} s"))
        if self._error is not None:
            channel.close()
            raise self._error

    @property
    def is_active(self) -> bool:
        """Whether the connection is open, as far as this side knows."""
        return self._is_ready.is_set() and not self._has_ended.is_set()

    def close(self) -> None:
        """Close the channel. The hub ends, and commands continue."""
        self._end(NodeUnreachable(self.node, "the connection was closed"))

    def flush(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` until all frames have been sent, or the connection ends."""
        with self.lock:
            self._queue_changed.wait_for(
                lambda: self._has_ended.is_set() or not (self._outgoing or self._is_writing), timeout_s
            )

    def start(self, argv: Sequence[str], *, collects: bool) -> MultiplexedChannel:
        """Start a command."""
        words = [word.encode("utf-8", "surrogateescape") for word in argv]
        if any(b"\0" in word for word in words):
            raise ValueError("embedded null byte")
        content = b"\0".join(words)
        if len(content) > hub.LARGEST_FRAME:
            raise TransportError(
                self.node,
                f"the arguments of `{argv[0]}` are longer than {hub.LARGEST_FRAME >> 20} MiB",
                hint="pass them in a file",
            )
        return self._begin(hub.OPEN, content, is_command=True, collects=collects)

    def dial(self, port: int, deadline: Deadline) -> MultiplexedChannel:
        """Connect to a port."""
        stream = self._begin(hub.DIAL, hub.PORT.pack(port), is_command=False, collects=False)
        stream.wait_connected(port, deadline)
        return stream

    def _begin(self, kind: int, content: bytes, *, is_command: bool, collects: bool) -> MultiplexedChannel:
        with self.lock:
            if self._error is not None:
                raise _copy_of(self._error)
            number = next(self._numbers)
            made = MultiplexedChannel(self, number, is_command=is_command, collects=collects)
            self._channels[number] = made
            self.put(kind, number, content)
        return made

    # -- with the lock held

    def put(self, kind: int, number: int, content: bytes | memoryview = b"") -> None:
        """Queue a frame. Only input is limited (``has_room``); other frames are few."""
        if self._has_ended.is_set():
            return
        self._outgoing += (hub.HEADER.pack(kind, number, len(content)), content)
        self._queued += len(content)
        self._queue_changed.notify_all()

    def has_room(self, channel: MultiplexedChannel) -> bool:
        """Return whether input may be queued. If not, ``channel`` is woken later."""
        if self._queued < _MOST_QUEUED:
            return True
        self._waiting.append(channel)
        return False

    def forget(self, number: int) -> None:
        """Ignore further frames of a channel."""
        self._channels.pop(number, None)

    # -- the three threads

    def _write(self, channel: Channel) -> None:
        while True:
            with self.lock:
                self._is_writing = False
                self._queue_changed.notify_all()
                self._queue_changed.wait_for(lambda: self._outgoing or self._has_ended.is_set())
                if self._has_ended.is_set():
                    return
                batch = b"".join(self._outgoing)
                self._outgoing.clear()
                self._queued = 0
                self._is_writing = True
                waiting, self._waiting = self._waiting, []
                for one in waiting:
                    one.wake()
            try:
                channel.write(batch)
            except NodeUnreachable as error:
                if not self._has_ended.wait(_REASON_S):  # the reader knows the reason better
                    self._fail(error)
                return

    def _ping(self, _channel: Channel) -> None:
        # Intervals are counted instead of seconds, so that a suspension of this process does not count as silence.
        while not self._has_ended.wait(self._ping_s):
            if not self._is_ready.is_set():
                continue
            if self._silent_pings >= _SILENT_PINGS:
                silent_s = _SILENT_PINGS * self._ping_s
                self._fail(NodeUnreachable(self.node, f"no heartbeat for {silent_s:g} s"))
                return
            self._silent_pings += 1
            with self.lock:
                self.put(hub.PING, 0)

    def _read(self, channel: Channel) -> None:
        reader = hub.FrameReader()
        try:
            data = self._greeting(channel)
            while data is not None:
                with self.lock:
                    for kind, number, content in reader.feed(data):
                        self._take(kind, number, content)
                data = channel.read() or None
                self._silent_pings = 0
        except (ValueError, struct.error) as error:
            self._end(NodeUnreachable(self.node, f"it sent a malformed message: {str(error)[:_SHOWN]}"))
            return
        code = channel.exit_code
        how = "broke" if code is None else f"ended (exit code {code})"
        stderr = channel.stderr_tail().strip()[-_SHOWN:]
        ended = NodeUnreachable(self.node, f"the connection to distflow's process there {how}", hint=stderr)
        self._fail(ended, is_broken=code is None)

    def _take(self, kind: int, number: int, content: bytes) -> None:
        if kind != hub.PING and (channel := self._channels.get(number)) is not None:
            channel.take(kind, content)

    def _greeting(self, channel: Channel) -> bytes | None:
        """Return the data after the hub's first line; ``None`` if the hub did not start."""
        line = f"{self._nonce} ready\n".encode()
        noise = b""
        while line not in noise:
            data = channel.read()
            if not data or len(noise) > _MOST_NOISE:
                self._fail(self._start_error(channel, noise + data), is_broken=channel.exit_code is None)
                return None
            noise += data
        self._is_ready.set()
        return noise.partition(line)[2]

    def _start_error(self, channel: Channel, noise: bytes) -> TransportError:
        code = channel.exit_code
        printed = "\n".join(filter(None, [noise.decode("utf-8", "replace").strip(), channel.stderr_tail().strip()]))
        hint = f"The node printed:\n{printed[-_SHOWN:]}" if printed else ""
        if code is None or code == _NO_CONNECTION:
            is_noisy = code is None and len(noise) > _MOST_NOISE
            what = f"the node printed more than {_MOST_NOISE >> 20} MiB" if is_noisy else "the connection broke"
            return NodeUnreachable(self.node, f"{what} before `{self._python}` answered", hint=hint)
        if code > _SIGNALED:
            return NodeUnreachable(self.node, f"signal {code - _SIGNALED} ended `{self._python}` before it answered", hint=hint)
        if code == _NOT_FOUND:
            what = f"Python 3.8 or newer is needed; `{self._python}` does not exist"
            remedy = f"install it there; a login without a terminal must find it as `{self._python}`"
        else:
            what = f"the connection ended with exit code {code} before `{self._python}` answered"
            remedy = f"check that `{self._python}` is Python 3.8 or newer, and that the login's shell runs commands"
        return BootstrapFailed(self.node, what, hint=f"{remedy}\n{hint}".rstrip())

    def _fail(self, error: TransportError, *, is_broken: bool = True) -> None:
        """End the connection with ``error``. ``is_broken``: hang up ``inner`` first, so that the next call reconnects."""
        if is_broken and not self._has_ended.is_set():
            self._broken_by = self._broken_by or error
            self._inner.hang_up()
        self._end(error)

    def _end(self, error: TransportError) -> None:
        with self.lock:
            if not self._has_ended.is_set():
                self._error = error = self._broken_by or error
                self._has_ended.set()
                for channel in self._channels.values():
                    channel.cut(_copy_of(error))
                self._channels.clear()
                self._outgoing.clear()
                self._queue_changed.notify_all()
        self._is_ready.set()
        if self._channel is not None:
            self._channel.close()


def _copy_of(error: TransportError) -> NodeUnreachable:
    """Return a ``NodeUnreachable`` with the same message. Each thread raises its own exception."""
    return NodeUnreachable(error.node, error.detail, hint=error.hint)


@functools.cache
def _source() -> str:
    return importlib.resources.files("distflow.runtime.services").joinpath("command_hub.py").read_text(encoding="utf-8")
