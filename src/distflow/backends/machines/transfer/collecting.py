"""Collecting the outputs of ended attempts: each is packed and fetched until it is here, or is known never to come."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from distflow.backends.base import (
    AttemptKey,
    CheckpointRef,
    Collected,
    CollectFailed,
    Collecting,
    CollectUnanswered,
    Sink,
)
from distflow.backends.machines.connection.node_connection import Connection, now
from distflow.backends.machines.transfer.pace import Pace
from distflow.errors import AgentError, DistflowError, NodeUnreachable

__all__ = ["Collector"]

_TRIES = 5
"""Connections that may end one after the other without having brought anything, while the node itself answers."""
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 5.0


_Slot = tuple[AttemptKey, int | None]


class _One(NamedTuple):
    """What is being collected."""

    key: AttemptKey
    checkpoint: CheckpointRef | None
    """``None``: the output."""

    @property
    def slot(self) -> _Slot:
        """Equal for what may not be under way twice at once."""
        return self.key, None if self.checkpoint is None else self.checkpoint.number


class Collector:
    """Collects into one blob store: what ``begin`` takes on, ``collect`` does, in a thread for each output."""

    def __init__(self, blobs: Path, sink: Sink, patience_s: float) -> None:
        """Begin nothing. ``patience_s``: for how long connections may fail while the node's agent still answers."""
        self._blobs = blobs
        self._sink = sink
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._under_way: set[_Slot] = set()
        self._broken: dict[_Slot, list[float]] = {}
        """When connections ended that brought nothing, one after the other (monotonic)."""
        self._closing = threading.Event()

    def close(self) -> None:
        """Wait for nothing any more."""
        self._closing.set()

    def begin(self, key: AttemptKey, checkpoint: CheckpointRef | None) -> bool:
        """Take on the output of an attempt; false when it is under way already, or waits in line for a thread."""
        one = _One(key, checkpoint)
        with self._lock:
            if one.slot in self._under_way:
                return False
            self._under_way.add(one.slot)
            return True

    def collect(
        self,
        connection: Connection,
        key: AttemptKey,
        checkpoint: CheckpointRef | None,
        place: str | None,
        stays: Callable[[str, int], bool] | None,
    ) -> None:
        """Bring the output of an attempt here, or its directory ``place``, and tell the sink.

        An archive of which ``stays`` is true need not come.
        """
        one = _One(key, checkpoint)
        told = _Told(one, self._sink, self._closing)
        try:
            fetched = connection.fetch(key, self._blobs, told.progress, place, stays)
        except NodeUnreachable as error:
            self._broke_off(one, error, is_accident=told.has_moved or not connection.is_up)
        except AgentError as error:
            self._give_up(one, error.detail)
        except DistflowError as error:
            self._give_up(one, f"it cannot be fetched: {error}")
        except OSError as error:
            self._give_up(one, f"it cannot be kept in {self._blobs}, on the machine of the supervisor: {error.strerror}")
        except Exception as error:  # noqa: BLE001  nobody waits for this thread: without an answer, the group would wait forever
            self._give_up(one, f"it cannot be fetched, unexpected error: {error!r}")
            sys.excepthook(*sys.exc_info())  # the traceback goes to the supervisor's log
        else:
            self._done(one)
            self._sink(
                Collected(
                    at=now(), key=key, checkpoint=checkpoint, digest=fetched.digest, size=fetched.size,
                    left_out=fetched.left_out, is_everywhere=not fetched.is_here,
                )
            )  # fmt: skip

    def _broke_off(self, one: _One, error: NodeUnreachable, *, is_accident: bool) -> None:
        at = time.monotonic()
        with self._lock:
            # A node that is gone is waited for as long as the pool allows; that is decided elsewhere.
            self._broken[one.slot] = ends = [] if is_accident else [*self._broken.get(one.slot, ()), at]
        # An sshd that is being restarted accepts no connection while the agent's connection still stands.
        if len(ends) >= _TRIES and at - ends[0] >= self._patience_s:
            self._give_up(one, f"it cannot be fetched, the connection ended {len(ends)} times: {error.detail}")
            return
        self._closing.wait(min(_PAUSE_S * max(1, len(ends)), _LONGEST_PAUSE_S))
        with self._lock:
            self._under_way.discard(one.slot)
        self._sink(CollectUnanswered(at=now(), key=one.key, checkpoint=one.checkpoint))

    def _give_up(self, one: _One, message: str) -> None:
        self._done(one)
        self._sink(CollectFailed(at=now(), key=one.key, checkpoint=one.checkpoint, message=message))

    def _done(self, one: _One) -> None:
        with self._lock:
            self._under_way.discard(one.slot)
            self._broken.pop(one.slot, None)


class _Told:
    """Tells how far an output is, every second."""

    def __init__(self, one: _One, sink: Sink, closing: threading.Event) -> None:
        self._closing = closing
        self._one = one
        self._sink = sink
        self._was_packed = False
        self._first = 0
        self._pace = Pace()
        self._pace.begin(0)
        self.has_moved = False
        """Whether this connection brought anything."""

    def progress(self, is_packed: bool, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` bytes are packed, or here. Ends the transfer when nobody waits for it any more."""
        if self._closing.is_set():
            raise NodeUnreachable(self._one.key.node, "let go")
        if is_packed and not self._was_packed:
            self._was_packed, self._first = True, done
            self._pace.begin(done)
        self.has_moved = is_packed and done > self._first
        rate = self._pace.due(done)
        if rate is not None:
            key, checkpoint = self._one
            self._sink(
                Collecting(
                    at=now(), key=key, checkpoint=checkpoint, is_packed=is_packed, done=done, total=total, bytes_per_s=rate
                )
            )
