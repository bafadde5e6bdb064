"""What a service of ours says on its channel: JSON lines, then bytes."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

from distflow.backends.machines.bootstrap import Opened
from distflow.errors import AgentError, NodeUnreachable
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import MAX_LINE

__all__ = ["ServiceStream"]

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
    """The reading side of a service; ``ended`` says in words what its unexpected end is."""

    def __init__(self, node: str, opened: Opened, ended: str) -> None:
        """Read what has not been read yet."""
        self._node = node
        self._channel = opened.channel
        self._held = bytearray(opened.received)
        self._ended = ended

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
