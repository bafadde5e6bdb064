"""Transports to allocated nodes for commands such as ``workflow exec``. All transports of a pool share one engine."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from distflow.backends.allocated.engine import Engine, RequestRefused, host_of
from distflow.errors import NodeUnreachable
from distflow.pools.model import Pool
from distflow.transports.base import Channel, Completed, Stream, Transport

__all__ = ["AllocatedNode", "Engines", "NodeChannel", "SharedEngine"]

_T = TypeVar("_T")

_CACHED_S = 2.0
"""How long an answer of the engine is used."""


class Engines:
    """The engines that transports of this process use, one for each pool. An engine stays open while a transport uses it."""

    def __init__(self, open_engine: Callable[[Pool], Engine]) -> None:
        """``open_engine`` returns the engine of a pool."""
        self._open_engine = open_engine
        self._lock = threading.Lock()
        self._open: list[SharedEngine] = []

    def transport(self, pool: Pool, name: str) -> AllocatedNode:
        """Return a transport to the node ``name`` of a pool, without connecting."""
        with self._lock:
            shared = next((one for one in self._open if one.pool == pool), None)
            if shared is None:
                shared = SharedEngine(pool, self._open_engine(pool))
                self._open.append(shared)
            shared.users += 1
        return AllocatedNode(name, shared, self._leave)

    def _leave(self, shared: SharedEngine) -> None:
        with self._lock:
            shared.users -= 1
            if shared.users:
                return
            self._open.remove(shared)
        shared.engine.close()


class SharedEngine:
    """An engine, and the number of transports that use it."""

    def __init__(self, pool: Pool, engine: Engine) -> None:
        """Use an engine, at first without transports."""
        self.pool = pool
        self.engine = engine
        self.users = 0
        self._querying = threading.Lock()
        """Held during a query, so that several transports share its answer."""
        self._existing: Collection[str] = ()
        self._queried_at = -math.inf

    def exists(self, allocation: str) -> bool:
        """Return whether the engine lists an allocation. Raises the errors of ``Engine``."""
        with self._querying:
            if time.monotonic() - self._queried_at >= _CACHED_S:
                self._existing, self._queried_at = self.engine.allocations().keys(), time.monotonic()
            return allocation in self._existing

    def invalidate(self) -> None:
        """Discard the last answer of the engine, because an operation failed."""
        with self._querying:
            self._queried_at = -math.inf


class AllocatedNode:
    """A node of an allocation (contract: ``transports.base.Transport``).

    Each operation goes to the node while the allocation exists. After its end, operations go to the login node, if the engine
    has one: it has the node's files if they are on a shared file system. ``hang_up`` closes only the channels to the node
    itself. ``close`` also closes the engine, and with it the channels to the login node, if no other transport uses the engine.
    """

    reached_address: str | None = None
    named_addresses: tuple[str, ...] = ()

    def __init__(self, name: str, shared: SharedEngine, leave: Callable[[SharedEngine], None]) -> None:
        """Use the engine of ``shared``. ``close`` calls ``leave``."""
        self.name = name
        self._host, self._allocation = host_of(name)
        self._shared = shared
        self._leave = leave
        self._inside = shared.engine.transport(self._allocation, self._host)
        self._lock = threading.Lock()
        self._is_closed = False

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Completed:
        """Run a command to its end."""
        return self._do(lambda target: target.run(argv, input=input, timeout_s=timeout_s))

    def open(self, argv: Sequence[str]) -> Channel:
        """Start a command and keep a channel to it."""
        return NodeChannel(lambda: self._do(lambda target: target.open(argv)), self._has_ended)

    def dial(self, port: int, *, timeout_s: float) -> Stream:
        """Connect to a TCP port of the node."""
        return self._do(lambda target: target.dial(port, timeout_s=timeout_s))

    def hang_up(self) -> None:
        """Close the channels to the node. The next operation checks again whether the allocation exists."""
        self._shared.invalidate()
        self._inside.hang_up()

    def close(self) -> None:
        """Close the channels to the node for good, and the engine if no other transport uses it."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._inside.close()
        self._leave(self._shared)

    def _has_ended(self) -> bool:
        """Query the engine again, and return whether the allocation has ended; False if the engine cannot be queried."""
        self._shared.invalidate()
        try:
            return not self._shared.exists(self._allocation)
        except (NodeUnreachable, RequestRefused):
            return False

    def _do(self, action: Callable[[Transport], _T]) -> _T:
        if self._is_closed:
            raise NodeUnreachable(self.name, "the transport is closed")
        try:
            exists = self._shared.exists(self._allocation)
        except RequestRefused as error:  # the kubeconfig or a package of this machine cannot be used
            raise NodeUnreachable(self.name, error.message, hint=error.hint) from error
        target = self._inside if exists else self._shared.engine.login_transport()
        if target is None:
            raise NodeUnreachable(self.name, "its allocation has ended, and its files were removed with it")
        try:
            return action(target)
        except NodeUnreachable:
            self._shared.invalidate()
            raise


class NodeChannel:
    """A command's pipes (contract: ``transports.base.Channel``).

    If the allocation ends before the command has sent output or an exit code, the first ``read`` starts the command again,
    on the login node, unless ``write`` was called. The command may have run on the node already, so it must be safe to run
    twice.
    """

    def __init__(self, start: Callable[[], Channel], has_ended: Callable[[], bool]) -> None:
        """Start the command by ``start``. ``has_ended`` returns whether the allocation has ended."""
        self._start = start
        self._has_ended = has_ended
        self._is_used = False
        """Whether ``write`` was called, or a call of ``read`` has returned."""
        self._is_closed = False
        self._lock = threading.Lock()
        """Guards the replacement of ``_channel``."""
        self._channel = start()

    def write(self, data: bytes) -> None:
        """Send ``data`` to the command's standard input."""
        with self._lock:
            self._is_used = True
        self._channel.write(data)

    def read(self) -> bytes:
        """Wait for output and return up to 64 KiB of it."""
        data = self._channel.read()
        if not data and self._restart_on_login_node():
            data = self._channel.read()
        self._is_used = True
        return data

    def stderr_tail(self) -> str:
        """The end of the command's standard error."""
        return self._channel.stderr_tail()

    @property
    def exit_code(self) -> int | None:
        """The command's exit code; ``None`` while it runs, and if the connection ended first."""
        return self._channel.exit_code

    def close(self) -> None:
        """Close the pipes; the command continues."""
        with self._lock:
            self._is_closed = True
            self._channel.close()

    def _restart_on_login_node(self) -> bool:
        """Start the command again on the login node, in the case that the class describes. Returns whether it started."""
        if not self._is_unused() or self._channel.exit_code is not None or not self._has_ended():
            return False
        with self._lock:
            if not self._is_unused():
                return False
            self._channel.close()
            try:
                self._channel = self._start()
            except NodeUnreachable:
                return False
            return True

    def _is_unused(self) -> bool:
        return not (self._is_used or self._is_closed)
