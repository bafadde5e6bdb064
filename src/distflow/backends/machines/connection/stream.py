"""What passes between us and a service of ours on a node: JSON lines and bytes, and signs of life while we are quiet."""

from __future__ import annotations

import contextlib
import threading
from typing import Annotated, Any, TypeAlias

import msgspec

from distflow.backends.machines.connection.bootstrap import Opened
from distflow.errors import AgentError, NodeUnreachable
from distflow.runtime.files.frames import FRAME, RAW
from distflow.runtime.services.peer import SILENCE_S
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import MAX_LINE

__all__ = ["EMPTY_FRAME", "EMPTY_LINE", "ServiceStream"]

EMPTY_LINE = b"\n"
EMPTY_FRAME = FRAME.pack(0, RAW)
_SIGN_EVERY_S = SILENCE_S / 6

_WORDS = 500
"""Characters of a message about what a node sent."""
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class _Line(msgspec.Struct, kw_only=True):
    """The fields that are relied on, in whichever line they come; the node is not trusted."""

    at: _Count = 0
    hash: str = ""
    size: _Count = 0
    files: _Count = 0
    left_out: list[str] = []
    packing: _Count = 0
    of: _Count = 0
    done: bool | _Count = 0
    total: _Count = 0
    words: str = ""
    relay: str = ""


class ServiceStream:
    """A service that serves one connection; ``ended`` says in words what its unexpected end is.

    The service closes a silent connection (``runtime.services.peer``), so something is sent every few seconds. One thread may
    read and write; any thread may call ``close``.
    """

    def __init__(self, node: str, opened: Opened, ended: str, sign: bytes = EMPTY_LINE) -> None:
        """Take over a service that answers. ``sign``: what says to it that we are there."""
        self._node = node
        self._channel = opened.channel
        self._held = bytearray(opened.received)
        self._ended = ended
        self._writing = threading.Lock()
        self._sign = sign
        self._is_over = threading.Event()
        threading.Thread(target=self._give_signs, name=f"signs of life to {node}", daemon=True).start()

    def write(self, data: bytes, sign: bytes = EMPTY_LINE) -> None:
        """Send ``data``; ``sign`` is what says from then on that we are there. Raises ``NodeUnreachable``."""
        with self._writing:
            self._channel.write(data)
            self._sign = sign

    def close(self) -> None:
        """Hang up; may be called twice."""
        self._is_over.set()
        self._channel.close()

    def _give_signs(self) -> None:
        while not self._is_over.wait(_SIGN_EVERY_S):
            with self._writing, contextlib.suppress(NodeUnreachable):
                self._channel.write(self._sign)

    def line(self) -> dict[str, Any]:
        """Wait for the next line. Raises ``AgentError`` when it is a refusal, ``NodeUnreachable`` when there is none."""
        while b"\n" not in self._held:
            data = self._channel.read()
            if not data or len(self._held) > MAX_LINE:
                raise self.broke_off()
            self._held += data
        line, _, rest = self._held.partition(b"\n")
        self._held = rest
        try:
            answer: dict[str, Any] = decode_object(bytes(line))
            refusal = answer.get("error")
            if refusal is None:
                msgspec.convert(answer, _Line)
                return answer
            kind, message = str(refusal["kind"]), str(refusal["message"])
        except (ValueError, KeyError, TypeError) as error:
            raise AgentError(self._node, "malformed", f"it sent a malformed message: {str(error)[:_WORDS]}") from None
        raise AgentError(self._node, kind, message)

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes; fewer only at the end."""
        while len(self._held) < size:
            data = self._channel.read()
            if not data:
                break
            self._held += data
        taken = bytes(self._held[:size])
        del self._held[:size]
        return taken

    def broke_off(self) -> NodeUnreachable:
        """Return the error that says so."""
        return NodeUnreachable(self._node, self._ended, hint=self._channel.stderr_tail().strip())
