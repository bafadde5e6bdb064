"""The connection to a distflow service on a node: JSON lines, bytes, and keepalives at regular intervals."""

from __future__ import annotations

import contextlib
import threading
from typing import Annotated, Any, TypeAlias

import msgspec

from distflow.backends.machines.connection.bootstrap import Opened
from distflow.errors import AgentError, NodeUnreachable
from distflow.runtime.services.frames import FRAME, RAW, SILENCE_S
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import MAX_LINE
from distflow.structs import convert

__all__ = ["EMPTY_FRAME", "EMPTY_LINE", "ServiceStream"]

EMPTY_LINE = b"\n"
EMPTY_FRAME = FRAME.pack(0, RAW)
_KEEPALIVE_EVERY_S = SILENCE_S / 6

_LONGEST_TEXT = 500
"""Maximum characters of a message about data from a node."""
_LONGEST_START = 40
"""Number of bytes of a too long line that the error message shows."""
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class _Refusal(msgspec.Struct):
    """The field ``error`` of a line: a kind and the reason."""

    kind: str
    message: str


class _Line(msgspec.Struct, kw_only=True):
    """The types of the fields that services send (see docs/agent-protocol.md).

    Each line is checked against these types, because the node is not trusted.
    """

    error: _Refusal | None = None
    # receiver and output_server: the number of bytes that the receiving side already has.
    at: _Count = 0
    # sender, output_server and node_service: SHA-256, size in bytes and number of files of the data.
    hash: str = ""
    size: _Count = 0
    files: _Count = 0
    # sender: names of files that are not in the archive; the number of packed bytes and of all bytes to pack.
    left_out: list[str] = []
    packing: _Count = 0
    of: _Count = 0
    # receiver: whether the blob is complete. node_service: the number of transferred bytes.
    done: bool | _Count = 0
    # node_service: the total number of bytes; the URL, or the dataset with its version; why the supervisor must transfer the
    # data itself.
    total: _Count = 0
    label: str = ""
    relay: str = ""
    # output_server: name, size, modified_ns, is_executable and link target of each file; the number of entries that cannot be
    # sent, such as sockets; the modification time of the file that follows.
    entries: list[tuple[str, _Count, int, bool, str]] = []
    others: _Count = 0
    modified_ns: int = 0
    # venv_builder: a text about the progress; the tool that built the environment, empty if it already existed; the duration.
    building: str = ""
    built: str = ""
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class _Answer(dict[str, Any]):
    """A message of a node. Reading a field that it lacks raises ``AgentError``."""

    def __init__(self, node: str, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self._node = node

    def __missing__(self, key: str) -> Any:
        raise AgentError(self._node, "malformed", f"it sent a malformed message without `{key}`")


class ServiceStream:
    """The connection to one service. ``ended`` is the error message if the connection ends unexpectedly.

    The service closes a silent connection (``runtime.services.frames``), so a keepalive is sent at regular intervals. One
    thread may read and write; any thread may call ``close``.
    """

    def __init__(self, node: str, opened: Opened, ended: str, keepalive: bytes = EMPTY_LINE) -> None:
        """Take over the connection to a started service. ``keepalive`` is the keepalive message."""
        self._node = node
        self._channel = opened.channel
        self._buffer = bytearray(opened.received)
        self._ended = ended
        self._writing = threading.Lock()
        self._keepalive = keepalive
        self._is_over = threading.Event()
        threading.Thread(target=self._send_keepalives, name=f"keepalives to {node}", daemon=True).start()

    def write(self, data: bytes, keepalive: bytes = EMPTY_LINE) -> None:
        """Send ``data``. ``keepalive`` is the keepalive message from then on. Raises ``NodeUnreachable``."""
        with self._writing:
            self._channel.write(data)
            self._keepalive = keepalive

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self._is_over.set()
        self._channel.close()

    def _send_keepalives(self) -> None:
        while not self._is_over.wait(_KEEPALIVE_EVERY_S):
            with self._writing, contextlib.suppress(NodeUnreachable):
                self._channel.write(self._keepalive)

    def line(self) -> dict[str, Any]:
        """Wait for the next line.

        Raises ``AgentError`` if it is a refusal, malformed or too long, and ``NodeUnreachable`` if the connection ends. If a
        field is missing, ``answer["field"]`` also raises ``AgentError``.
        """
        while b"\n" not in self._buffer:
            if len(self._buffer) > MAX_LINE:
                start = self._buffer[:_LONGEST_START].decode("utf-8", "replace")
                message = f"it sent a line of more than {MAX_LINE} bytes, which begins with {start!r}"
                raise AgentError(self._node, "malformed", message)
            data = self._channel.read()
            if not data:
                raise self.broken_error()
            self._buffer += data
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = rest
        try:
            answer: dict[str, Any] = decode_object(bytes(line))
            refusal = convert(answer, _Line).error
        except ValueError as error:
            raise AgentError(self._node, "malformed", f"it sent a malformed message: {str(error)[:_LONGEST_TEXT]}") from None
        if refusal is not None:
            raise AgentError(self._node, refusal.kind, refusal.message)
        return _Answer(self._node, answer)

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes, or fewer at the end."""
        while len(self._buffer) < size:
            data = self._channel.read()
            if not data:
                break
            self._buffer += data
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def broken_error(self) -> NodeUnreachable:
        """Return the error for a connection that broke."""
        return NodeUnreachable(self._node, self._ended, hint=self._channel.stderr_tail().strip())
