"""What a service of ours says on its channel: JSON lines, then bytes."""

from __future__ import annotations

import json
from typing import Any

from distflow.backends.machines.bootstrap import Opened
from distflow.errors import AgentError, NodeUnreachable
from distflow.runtime.wire import MAX_LINE

__all__ = ["ServiceStream"]


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
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise AgentError(self._node, answer["error"]["kind"], answer["error"]["message"])
        return answer

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
