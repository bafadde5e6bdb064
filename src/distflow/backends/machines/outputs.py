"""Outputs and checkpoints: fetch them (``Collector``), or let nodes upload outputs (``Deliverer``), with retries."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from distflow.backends.machines.connection.node_connection import NodeConnection, now
from distflow.backends.machines.connection.transfers import TransferRate
from distflow.documents.text import report_bug
from distflow.errors import AgentError, DistflowError, NodeUnreachable, TransportError
from distflow.storage.base import Progress
from distflow.storage.credentials import Identity
from distflow.storage.failures import TransferCanceled
from distflow.storage.task_data import Delivered, Delivery, RelayRequired

__all__ = ["Collector", "Deliverer"]


_TRIES = 5
"""A transfer is given up after this number of consecutive connections without progress, but not before ``patience_s`` seconds
without progress have elapsed.

Only connections that ended while the node's agent was connected count.
"""
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 5.0


_Slot = tuple[AttemptKey, int | None]


class _Transfer(NamedTuple):
    """An output or a checkpoint that is being collected."""

    key: AttemptKey
    checkpoint: CheckpointRef | None
    """``None``: the output."""

    @property
    def slot(self) -> _Slot:
        """Equal for transfers that must not run at the same time."""
        return self.key, None if self.checkpoint is None else self.checkpoint.number


class Collector:
    """Copies outputs and checkpoints to one blob store.

    ``begin`` reserves a transfer, and ``collect`` runs it in the caller's thread.
    """

    def __init__(self, blobs: Path, sink: Sink, patience_s: float) -> None:
        """Create the collector. ``patience_s``: how long connections may fail while the node's agent is connected."""
        self._blobs = blobs
        self._sink = sink
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._under_way: set[_Slot] = set()
        self._broken: dict[_Slot, list[float]] = {}
        """Times (monotonic clock) at which consecutive connections ended that had transferred nothing."""
        self._closing = threading.Event()

    def close(self) -> None:
        """Abort running transfers."""
        self._closing.set()

    def begin(self, key: AttemptKey, checkpoint: CheckpointRef | None) -> bool:
        """Reserve the transfer of an output or a checkpoint. Returns False if it is running or waiting for a thread already."""
        transfer = _Transfer(key, checkpoint)
        with self._lock:
            if transfer.slot in self._under_way:
                return False
            self._under_way.add(transfer.slot)
            return True

    def collect(
        self,
        connection: NodeConnection,
        key: AttemptKey,
        checkpoint: CheckpointRef | None,
        place: str | None,
        stays: Callable[[str, int], bool] | None,
    ) -> None:
        """Copy the output of an attempt, or its directory ``place``, to the blob store, and report to the sink.

        The archive stays on its node if ``stays(digest, size)`` returns True.
        """
        transfer = _Transfer(key, checkpoint)
        reports = _ProgressReports(transfer, self._sink, self._closing)
        try:
            fetched = connection.fetch(key, self._blobs, reports.progress, place, stays)
        except NodeUnreachable as error:
            self._broke_off(transfer, error, is_counted=connection.is_up and not reports.has_moved)
        except AgentError as error:
            self._give_up(transfer, error.detail)
        except DistflowError as error:
            self._give_up(transfer, f"it cannot be fetched: {error}")
        except OSError as error:
            why = error.strerror or error
            self._give_up(transfer, f"it cannot be stored in {self._blobs} on the machine of the supervisor: {why}")
        except Exception as error:  # noqa: BLE001  without a report from this thread, the group would wait forever
            self._give_up(transfer, f"it cannot be fetched: {report_bug(error)}")
        else:
            self._done(transfer)
            self._sink(
                Collected(
                    at=now(), key=key, checkpoint=checkpoint, digest=fetched.digest, size=fetched.size,
                    left_out=fetched.left_out, is_everywhere=not fetched.is_here,
                )
            )  # fmt: skip

    def _broke_off(self, transfer: _Transfer, error: NodeUnreachable, *, is_counted: bool) -> None:
        at = time.monotonic()
        with self._lock:
            # A break after progress does not count, nor does one while the node is unreachable: the supervisor decides how long
            # to wait for the node.
            self._broken[transfer.slot] = ends = [*self._broken.get(transfer.slot, ()), at] if is_counted else []
        # While sshd restarts, it refuses new connections, but the agent's connection stays open.
        if len(ends) >= _TRIES and at - ends[0] >= self._patience_s:
            self._give_up(transfer, f"it cannot be fetched because the connection ended {len(ends)} times: {error.detail}")
            return
        self._closing.wait(min(_PAUSE_S * max(1, len(ends)), _LONGEST_PAUSE_S))
        with self._lock:
            self._under_way.discard(transfer.slot)
        self._sink(CollectUnanswered(at=now(), key=transfer.key, checkpoint=transfer.checkpoint))

    def _give_up(self, transfer: _Transfer, message: str) -> None:
        self._done(transfer)
        self._sink(CollectFailed(at=now(), key=transfer.key, checkpoint=transfer.checkpoint, message=message))

    def _done(self, transfer: _Transfer) -> None:
        with self._lock:
            self._under_way.discard(transfer.slot)
            self._broken.pop(transfer.slot, None)


class _ProgressReports:
    """Reports the progress of a transfer, at most once a second."""

    def __init__(self, transfer: _Transfer, sink: Sink, closing: threading.Event) -> None:
        self._closing = closing
        self._transfer = transfer
        self._sink = sink
        self._was_packed = False
        self._first = 0
        self._pace = TransferRate()
        self._pace.begin(0)
        self.has_moved = False
        """Whether this connection copied a part of the packed archive."""

    def progress(self, is_packed: bool, done: int, total: int) -> None:
        """Record that ``done`` of ``total`` bytes are packed or copied. Aborts the transfer when the collector is closed."""
        if self._closing.is_set():
            raise NodeUnreachable(self._transfer.key.node, "the supervisor is closing its connections")
        if is_packed and not self._was_packed:
            self._was_packed, self._first = True, done
            self._pace.begin(done)
        self.has_moved = is_packed and done > self._first
        rate = self._pace.due(done)
        if rate is not None:
            key, checkpoint = self._transfer
            self._sink(
                Collecting(
                    at=now(), key=key, checkpoint=checkpoint, is_packed=is_packed, done=done, total=total, bytes_per_s=rate
                )
            )


class Deliverer:
    """Lets nodes upload outputs, one at a time for each node."""

    def __init__(self, patience_s: float) -> None:
        """Create the deliverer. ``patience_s``: how long connections may fail while the node's agent is connected."""
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}

    def deliver(
        self, connection: NodeConnection, key: AttemptKey, delivery: Delivery, identity: Identity, halt: threading.Event,
        forward: Progress,
    ) -> Delivered:  # fmt: skip
        """Return when the whole output is uploaded. Waits for an unreachable node.

        Raises ``RelayRequired`` if the node cannot upload it or its connections fail too often, ``StorageError`` if relaying
        would not help, and ``TransferCanceled``.
        """
        tries = furthest = 0
        since = time.monotonic()
        while True:
            progress = _Progress(halt, forward)
            try:
                with self._turn(key.node, halt):
                    return connection.deliver(key, delivery, identity, progress)
            except TransportError as error:
                if progress.done > furthest or not connection.is_up:
                    tries, since = 0, time.monotonic()
                else:
                    tries += 1
                furthest = max(furthest, progress.done)
                # While sshd restarts, it refuses new connections, but the agent's connection stays open.
                if tries >= _TRIES and time.monotonic() - since >= self._patience_s:
                    raise RelayRequired(f"{error.message} (tried {tries} times)") from error
            halt.wait(min(_PAUSE_S * max(1, tries), _LONGEST_PAUSE_S))

    @contextmanager
    def _turn(self, node: str, halt: threading.Event) -> Iterator[None]:
        with self._lock:
            turn = self._turns.setdefault(node, threading.Lock())
        while not turn.acquire(timeout=_PAUSE_S):
            if halt.is_set():
                raise TransferCanceled
        try:
            if halt.is_set():
                raise TransferCanceled
            yield
        finally:
            turn.release()


class _Progress:
    """Forwards the progress, and aborts the transfer when ``halt`` is set."""

    def __init__(self, halt: threading.Event, forward: Progress) -> None:
        self._halt = halt
        self._forward = forward
        self.done = 0

    def __call__(self, done: int, total: int) -> None:
        if self._halt.is_set():
            raise TransferCanceled
        self.done = done
        self._forward(done, total)
