"""Commands in a container of a pod, over the exec API.

The connection is a WebSocket with the subprotocol ``v4.channel.k8s.io``, which all current releases of Kubernetes have. The
first byte of each message is its channel (0 standard input, 1 output, 2 errors, 3 the status at the end). Source:
``remotecommand`` of Kubernetes. Arguments are part of the URL, whose length proxies limit. Therefore, the container starts a
short program, which reads the real command from its standard input. The protocol cannot close standard input without closing
the connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from distflow.backends.machines.connection.bootstrap import python_argv
from distflow.documents.text import plain
from distflow.errors import NodeUnreachable
from distflow.transports.base import Completed, Deadline, Stream, tail_with_reason

__all__ = ["ExecChannel", "PodTransport"]

_STUB = """\
import json, os, sys
def read(size):
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            sys.exit(1)
        data += part
    return data
words = [word.encode("latin-1") for word in json.loads(read(int.from_bytes(read(4), "big")).decode("ascii"))]
try:
    os.execvp(words[0], words)
except OSError as error:
    os.write(2, words[0] + (": %s\\n" % error.strerror).encode())
    os._exit(127)
"""
"""Reads a command from the beginning of its standard input, and executes it."""
_PIECE = 64 * 1024
_MOST_OUT = 1 << 20
"""Limit of bytes that wait to be sent. A writer waits while the limit is reached."""
_MOST_IN = 4 << 20
"""Limit of bytes that wait to be read. Nothing is received while the limit is reached."""
_LARGEST_MESSAGE = 64 << 20
_TAIL = 64 * 1024
_KEEPALIVE_S = 30
_CLOSED = "the connection is closed"


class PodTransport:
    """Starts programs in a container (contract: ``transports.base.Transport``, without ``dial`` and without an end of input).

    Programs must find the end of their input themselves. The exit code is known only when the connection has ended.
    """

    reached_address: str | None = None
    named_addresses: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        python: str,
        connect: Callable[[Sequence[str]], socket.socket],
        *,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Use ``connect``, which starts a command in the container and returns the socket of its WebSocket.

        ``connect`` raises ``NodeUnreachable`` for the node ``name``. The method ``close`` calls the argument ``close``.
        """
        self._close = close
        self.name = name
        self._python = python
        self._connect = connect

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Completed:
        """Run a command to its end. After ``timeout_s``, close its connection and raise ``NodeUnreachable``."""
        deadline = Deadline(timeout_s)
        channel = self._start(argv, keeps_errors=True)
        late = threading.Timer(timeout_s, channel.close)
        late.daemon = True
        late.start()
        sender = threading.Thread(target=_send, args=(channel, input), name=f"input of {self.name}", daemon=True)
        sender.start()
        stdout = b"".join(iter(channel.read, b""))
        late.cancel()
        if channel.exit_code is None:
            if deadline.has_passed:
                raise NodeUnreachable(self.name, f"`{argv[0]}` did not finish within {timeout_s:g} s")
            raise NodeUnreachable(self.name, channel.why_ended or _CLOSED)
        return Completed(exit_code=channel.exit_code, stdout=stdout, stderr=channel.stderr())

    def open(self, argv: Sequence[str]) -> ExecChannel:
        """Start a command and keep a channel to it."""
        return self._start(argv, keeps_errors=False)

    def dial(self, port: int, *, timeout_s: float) -> Stream:  # noqa: ARG002
        """Raise ``NodeUnreachable``, because only relays connect to ports."""
        raise NodeUnreachable(self.name, f"port {port} of the pod cannot be reached directly, but only through a relay")

    def hang_up(self) -> None:
        """Do nothing: each command has its own connection."""

    def close(self) -> None:
        """Call the ``close`` of the constructor. The connections of commands stay open."""
        self._close()

    def _start(self, argv: Sequence[str], *, keeps_errors: bool) -> ExecChannel:
        command = json.dumps([os.fsencode(word).decode("latin-1") for word in argv]).encode("ascii")
        channel = ExecChannel(
            self.name, self._connect([*python_argv(self._python), "-I", "-S", "-c", _STUB]), keeps_errors=keeps_errors
        )
        channel.write(struct.pack(">I", len(command)) + command)
        return channel


def _send(channel: ExecChannel, data: bytes) -> None:
    with contextlib.suppress(NodeUnreachable):
        if data:
            channel.write(data)


class ExecChannel:
    """A command's pipes over one WebSocket (contract: ``transports.base.Channel``).

    One thread does all reading and writing, because two threads must not use a TLS connection at the same time.
    """

    def __init__(self, node: str, connection: socket.socket, *, keeps_errors: bool) -> None:
        """Use ``connection`` after the handshake. ``keeps_errors``: whether to keep all of standard error, not only its end."""
        self._node = node
        self._socket = connection
        self._keeps_errors = keeps_errors
        self._changed = threading.Condition()
        """Guards everything below."""
        self._writing = threading.Lock()
        self._out = bytearray()
        self._in: list[bytes] = []
        self._in_size = 0
        self._stderr = bytearray()
        self._status: int | None = None
        self._is_ended = False
        self._is_closed = False
        self.why_ended = ""
        """Why the connection ended before the command, or why the command could not be run; otherwise empty."""
        self._wake, self._waker = socket.socketpair()
        for one in (self._socket, self._wake, self._waker):
            one.setblocking(False)
        _keep_alive(connection)
        threading.Thread(target=self._pump, name=f"exec {node}", daemon=True).start()

    def write(self, data: bytes) -> None:
        """Send ``data`` to the command's standard input."""
        with self._writing:
            for start in range(0, len(data), _PIECE):
                message = _frame(b"\x00" + data[start : start + _PIECE])
                with self._changed:
                    self._changed.wait_for(lambda: len(self._out) < _MOST_OUT or self._is_ended or self._is_closed)
                    self._require_open()
                    self._out += message
                self._wake_thread()
            with self._changed:
                self._changed.wait_for(lambda: not self._out or self._is_ended or self._is_closed)
                if self._out:
                    self._require_open()

    def read(self) -> bytes:
        """Wait for output and return up to 64 KiB of it."""
        with self._changed:
            self._changed.wait_for(lambda: self._in or self._is_ended or self._is_closed)
            if not self._in or self._is_closed:
                return b""
            data = self._in.pop(0)
            if len(data) > _PIECE:
                self._in.insert(0, data[_PIECE:])
                data = data[:_PIECE]
            was_full = self._in_size >= _MOST_IN
            self._in_size -= len(data)
        if was_full:
            self._wake_thread()
        return data

    def stderr(self) -> bytes:
        """Return the standard error that was kept."""
        with self._changed:
            return bytes(self._stderr)

    def stderr_tail(self) -> str:
        """The end of the command's standard error, and why the connection broke if it did."""
        with self._changed:
            return tail_with_reason(bytes(self._stderr[-_TAIL:]).decode("utf-8", "replace"), self.why_ended)

    @property
    def exit_code(self) -> int | None:
        """The command's exit code; ``None`` while it runs, and if the connection broke first."""
        with self._changed:
            return self._status if self._is_ended else None

    def close(self) -> None:
        """Close the connection; the command continues without its pipes."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._wake_thread()

    def _require_open(self) -> None:
        if self._is_ended or self._is_closed:
            raise NodeUnreachable(self._node, self.why_ended or _CLOSED)

    def _wake_thread(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    # The thread of the connection.

    def _pump(self) -> None:
        why = ""
        try:
            messages = _messages(self._received())
            for channel, data in messages:
                self._take(channel, data)
        except (OSError, ValueError) as error:
            why = plain(str(error))[:300] or type(error).__name__
        with self._changed:
            self._is_ended = True
            if self._status is None and not self._is_closed:
                self.why_ended = self.why_ended or why or "the connection ended before the command"
            self._changed.notify_all()
        for one in (self._socket, self._wake, self._waker):
            one.close()

    def _received(self) -> Iterator[bytes]:
        """Yield received data, and send waiting data meanwhile, until the connection ends or is closed."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while True:
            with self._changed:
                if self._is_closed:
                    return
                wants_in, wants_out = self._in_size < _MOST_IN, bool(self._out)
            # Data that TLS has decrypted already does not make the socket readable.
            has_data = wants_in and isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0
            poll.register(self._socket, (select.POLLIN if wants_in else 0) | (select.POLLOUT if wants_out else 0))
            ready = {fd for fd, _ in poll.poll(0 if has_data else None)}
            if self._wake.fileno() in ready:
                self._wake.recv(4096)
            if wants_out:
                self._send_some()
            if wants_in and (has_data or self._socket.fileno() in ready):
                with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    data = self._socket.recv(_PIECE)
                    if not data:
                        return
                    yield data

    def _send_some(self) -> None:
        with self._changed:
            data = bytes(self._out[:_PIECE])
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            sent = self._socket.send(data)
            with self._changed:
                del self._out[:sent]
                self._changed.notify_all()

    def _take(self, channel: int, data: bytes) -> None:
        with self._changed:
            if channel == _PING:
                self._out += _frame(data, opcode=10)
            elif channel == 1 and data:
                self._in.append(data)
                self._in_size += len(data)
            elif channel == 2:
                self._stderr += data
                if not self._keeps_errors and len(self._stderr) > 2 * _TAIL:
                    del self._stderr[:-_TAIL]
            elif channel == 3:
                self._status, self.why_ended = _outcome(data)
            self._changed.notify_all()


_PING = 256


def _messages(received: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield channel (``_PING`` for a ping) and data of each message in a stream of WebSocket frames.

    Raises ``ValueError`` for invalid data.
    """
    data, message = bytearray(), bytearray()
    for part in received:
        data += part
        while (found := _next_frame(data)) is not None:
            is_last, opcode, content = found
            if opcode == 8:
                return
            if opcode == 9:
                yield _PING, content
            elif opcode in (0, 1, 2):
                message += content
                if len(message) > _LARGEST_MESSAGE:
                    raise ValueError(f"the API server sent a message of more than {_LARGEST_MESSAGE >> 20} MiB")
                if is_last and message:
                    yield message[0], bytes(message[1:])
                if is_last:
                    message.clear()


def _next_frame(data: bytearray) -> tuple[bool, int, bytes] | None:
    """Remove the first frame of ``data``. Returns whether it ends a message, its opcode and content; ``None`` if incomplete."""
    if len(data) < 2:
        return None
    size, start = data[1] & 0x7F, 2
    if data[1] & 0x80:
        raise ValueError("the API server sent a masked frame")
    if size > 125:
        start += 2 if size == 126 else 8
        if len(data) < start:
            return None
        size = int.from_bytes(data[2:start], "big")
    if size > _LARGEST_MESSAGE:
        raise ValueError(f"the API server sent a message of more than {_LARGEST_MESSAGE >> 20} MiB")
    if len(data) < start + size:
        return None
    content = bytes(data[start : start + size])
    is_last, opcode = bool(data[0] & 0x80), data[0] & 0x0F
    del data[: start + size]
    return is_last, opcode, content


def _frame(content: bytes, opcode: int = 2) -> bytes:
    """Return a masked WebSocket frame (RFC 6455)."""
    size = len(content)
    head = bytes([0x80 | opcode])
    head += (
        bytes([0x80 | size])
        if size < 126
        else (b"\xfe" + struct.pack(">H", size) if size < 65536 else b"\xff" + struct.pack(">Q", size))
    )
    mask = os.urandom(4)
    key = (mask * (size // 4 + 1))[:size]
    masked = (int.from_bytes(content, "little") ^ int.from_bytes(key, "little")).to_bytes(size, "little")
    return head + mask + masked


def _outcome(data: bytes) -> tuple[int | None, str]:
    """Return the exit code in a status message; ``None`` with the reason if the command could not be run."""
    try:
        status: Any = json.loads(data)
        if status["status"] == "Success":
            return 0, ""
        for cause in (status.get("details") or {}).get("causes") or ():
            if cause.get("reason") == "ExitCode":
                return int(cause["message"]), ""
        return None, plain(str(status.get("message")))[:500]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, f"the status of the command is malformed: {plain(data[:200].decode('utf-8', 'replace'))}"


def _keep_alive(connection: socket.socket) -> None:
    """Enable TCP keepalives, so that the kernel detects a dead connection."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", _KEEPALIVE_S), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
