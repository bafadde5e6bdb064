"""Bringing blobs to a node: one stream over a connection of its own, packed where that pays, taken up where it broke off.

The node's end is ``runtime.receiver``; the format is on the page of the agent protocol.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distflow.backends.machines.bootstrap import Opened, open_service
from distflow.errors import AgentError, NodeUnreachable
from distflow.runtime.frames import frames
from distflow.transports.base import Transport

__all__ = ["Blob", "send_blobs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A file of this machine that nodes know by its content."""

    digest: str
    """SHA-256, hexadecimal."""
    path: Path
    size: int
    """Bytes."""


def send_blobs(
    transport: Transport,
    root: str,
    python: str,
    blobs: Sequence[Blob],
    *,
    timeout_s: float,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Send blobs one after the other; ``progress`` is told how many bytes of all of them are there.

    ``timeout_s`` bounds how long the node may take to answer at first. Raises ``AgentError`` when the node refuses one (no
    space, damaged), ``NodeUnreachable`` and ``BootstrapFailed`` as connections do, ``OSError`` when a blob cannot be read here.
    """
    opened = open_service(transport, root, python, "receiver", timeout_s=timeout_s)
    try:
        answers = _Answers(transport.name, opened)
        before = 0
        for blob in blobs:
            _send(opened, answers, blob, lambda at, before=before: progress(before + at))  # type: ignore[misc]
            before += blob.size
    finally:
        opened.channel.close()


def _send(opened: Opened, answers: _Answers, blob: Blob, progress: Callable[[int], None]) -> None:
    header = json.dumps({"hash": blob.digest, "size": blob.size}).encode()
    answers.after(lambda: opened.channel.write(header + b"\n"))
    at = int(answers.next()["at"])
    progress(at)
    with blob.path.open("rb") as source:
        if at:
            source.seek(at)
        for size, frame in frames(source):
            answers.after(lambda frame=frame: opened.channel.write(frame))  # type: ignore[misc]
            at += size
            progress(at)
    answers.next()


class _Answers:
    """What the receiver says, a line each."""

    def __init__(self, node: str, opened: Opened) -> None:
        self._node = node
        self._channel = opened.channel
        self._text = opened.received

    def next(self) -> dict[str, Any]:
        """Wait for the next answer. Raises ``AgentError`` when it is a refusal, ``NodeUnreachable`` when there is none."""
        while b"\n" not in self._text:
            data = self._channel.read()
            if not data:
                raise NodeUnreachable(
                    self._node, "the connection that sent files ended", hint=self._channel.stderr_tail().strip()
                )
            self._text += data
        line, _, self._text = self._text.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise AgentError(self._node, answer["error"]["kind"], answer["error"]["message"])
        return answer

    def after(self, write: Callable[[], None]) -> None:
        """Write; a receiver that ended before has said why."""
        try:
            write()
        except NodeUnreachable:
            self.next()
            raise
