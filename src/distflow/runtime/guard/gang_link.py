"""The gang link: keepers of a gang report a failed task to each other, even while no supervisor runs.

One keeper, the hub, listens on the training network. The other keepers connect to it, and reconnect when the connection breaks.
A keeper reports the failure of its task to the hub, and the hub reports it to all other keepers. A broken connection does not
count as a failure. Each message has a keyed hash (RFC 7693), with which both sides prove that they have the gang's secret
token. The hash covers random numbers that both sides chose for this connection, so no line of another connection can be
replayed.

Each side first sends a line with its random number. Every line after that is the hash in hexadecimal, a space, and a JSON
object. The hash covers the bytes of the object as they were received. The object is parsed only after its hash was verified,
so a host without the token cannot reach the JSON parser.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import selectors
import socket
import sys
import time

from distflow.protocol import ends
from distflow.protocol.ends import EndReason
from distflow.protocol.light_typing import Callable, List, Optional, Set
from distflow.runtime.hashing import compare_digest, keyed_hash
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import Json

__all__ = ["GangLink", "stops_gang"]

_MAX_LINE = 8192
"""The longest line in bytes."""
_MAX_DEPTH = 4
_NUMBER = rb"[0-9a-f]{32}"
_EXTRA_CONNECTIONS = 32
"""The hub accepts two connections for every other task, and this many more.

The limit keeps a flood of connections from using up its file descriptors.
"""
_AUTHENTICATION_TIMEOUT_S = 10.0
"""Time in which a peer must prove that it has the token."""
_RETRY_DELAYS_S = (0.2, 1.0, 5.0, 15.0)
"""Delays between attempts to connect to the hub."""
_LINGER_S = 20.0
"""How long a keeper of a failed gang tries to notify keepers that it cannot reach immediately."""
_MAX_TEXT = 500
_NEVER = float("inf")

OnFailure = Callable[[str, str], None]
"""Callback that gets the name of the failed task and how it failed."""


def stops_gang(gang: Json, reason: EndReason, end: Json) -> bool:
    """Return whether this end stops the gang: it is a failure by ``exitActions``, and failures of this task stop the gang."""
    code = ends.code_of(end.get("exit_code"), end.get("signal"))
    return bool(gang["counts"]) and ends.counts_as_failure(reason, code, gang["success"], gang["failure"])


class GangLink:
    """One keeper's part of the link.

    Call ``tick`` at ``due_at``. Its sockets are in the selector, with callbacks as data. ``listener`` is the hub's listening
    descriptor, and -1 in other keepers.
    """

    def __init__(self, gang: Json, listener: int, selector: selectors.BaseSelector, on_failure: OnFailure) -> None:
        self._gang = gang
        self._selector = selector
        self._on_failure = on_failure
        self._failure: Optional[Json] = None
        """The first reported failure. Later failures are ignored."""
        self._peers: List[_Peer] = []
        """In the hub: all connections, even unauthenticated ones. In the others: the connection to the hub, complete or not."""
        self._done: Set[str] = set()
        """Tasks that need no notice: they ended before a failure, or confirmed it before they disconnected.

        If the hub is gone, all tasks.
        """
        self._tries = 0
        self.due_at = _NEVER
        self._listener: Optional[socket.socket] = None
        if listener >= 0:
            self._listener = socket.socket(fileno=os.dup(listener))
            self._listener.setblocking(False)
            selector.register(self._listener, selectors.EVENT_READ, self._accept)
        else:
            self._connect()

    def fail(self, why: str) -> None:
        """Report to the gang that this keeper's task failed."""
        self._spread_failure({"task": str(self._gang["task"]), "why": why[:_MAX_TEXT]})

    def tick(self) -> None:
        """Disconnect peers that did not authenticate in time. Keepers other than the hub then reconnect to it."""
        self.due_at = _NEVER
        now = time.monotonic()
        for peer in [peer for peer in self._peers if not peer.is_authenticated]:
            if now >= peer.deadline:
                self._drop(peer)
            else:
                self.due_at = min(self.due_at, peer.deadline)
        if self._listener is None and not self._peers and not self._done:
            self._connect()

    def finish(self) -> None:
        """Report the failure, or else the normal end, to the gang. Call this before the keeper exits.

        After a failure, the hub waits until all other keepers know it, and another keeper waits until the hub knows it, but at
        most ``_LINGER_S``.
        """
        until = time.monotonic() + _LINGER_S
        while self._failure is not None and not self._are_all_informed() and time.monotonic() < until:
            if time.monotonic() >= self.due_at:
                self.tick()
            for key, _ in self._selector.select(max(0.0, min(self.due_at, until) - time.monotonic())):
                key.data()
        for peer in list(self._peers):
            if peer.is_authenticated and self._failure is None:
                peer.send_message({"bye": self._gang["task"]})
            peer.close()

    def _are_all_informed(self) -> bool:
        informed = {peer.task for peer in self._peers if peer.knows_failure} | self._done
        return informed >= set(self._gang["others"])

    # -- connections

    def _accept(self) -> None:
        try:
            connection = self._listener.accept()[0] if self._listener else None
        except OSError:
            return
        if connection is None:
            return
        if len(self._peers) >= 2 * len(self._gang["others"]) + _EXTRA_CONNECTIONS:
            # Replace only an unauthenticated connection. Keepers of the gang authenticate within a round trip.
            unauthenticated = next((peer for peer in self._peers if not peer.is_authenticated), None)
            if unauthenticated is None:
                connection.close()
                return
            self._drop(unauthenticated)
        self._add(_Peer(connection, self._gang, self._selector, self._on_message, is_hub=True))

    def _connect(self) -> None:
        try:
            connection = _start_connecting(str(self._gang["address"]), int(self._gang["port"]))
        except OSError:
            self._schedule_reconnect()
            return
        self._add(_Peer(connection, self._gang, self._selector, self._on_message, is_hub=False))

    def _add(self, peer: _Peer) -> None:
        self._peers.append(peer)
        self.due_at = min(self.due_at, peer.deadline)

    def _schedule_reconnect(self) -> None:
        self.due_at = min(self.due_at, time.monotonic() + _RETRY_DELAYS_S[min(self._tries, len(_RETRY_DELAYS_S) - 1)])
        self._tries += 1

    def _drop(self, peer: _Peer) -> None:
        peer.close()
        if peer in self._peers:
            self._peers.remove(peer)
            if peer.knows_failure:
                self._done.add(peer.task)
            if self._listener is None:
                if peer.was_refused:
                    self._done.update(self._gang["others"])  # the hub is gone, so no keeper can be notified
                else:
                    self._schedule_reconnect()

    def _on_message(self, peer: _Peer, message: Optional[Json]) -> None:
        """Handle a message of an authenticated peer. None means that the connection ended, perhaps before authentication."""
        if message is None:
            self._drop(peer)
        elif "bye" in message:
            self._done.add(peer.task)
        elif "failed" in message:
            failure = {"task": str(message["failed"]["task"]), "why": str(message["failed"]["why"])[:_MAX_TEXT]}
            peer.knows_failure = True
            self._spread_failure(failure)
        else:  # the peer has just authenticated
            self._tries = 0
            self._send_failure_to(peer)

    def _spread_failure(self, failure: Json) -> None:
        if self._failure is None:
            self._failure = failure
            if failure["task"] != self._gang["task"]:
                self._on_failure(str(failure["task"]), str(failure["why"]))
        for peer in list(self._peers):
            self._send_failure_to(peer)

    def _send_failure_to(self, peer: _Peer) -> None:
        if self._failure is not None and peer.is_authenticated and not peer.was_sent_failure:
            peer.was_sent_failure = True  # each peer replies with the failure, which shows that it has received it
            peer.send_message({"failed": self._failure})


class _Peer:
    """One connection: both sides exchange numbers, then lines that only holders of the token can write."""

    def __init__(
        self,
        connection: socket.socket,
        gang: Json,
        selector: selectors.BaseSelector,
        on_message: Callable[[_Peer, Optional[Json]], None],
        *,
        is_hub: bool,
    ) -> None:
        self._socket: Optional[socket.socket] = connection
        self._gang = gang
        self._selector = selector
        self._on_message = on_message
        self._is_hub = is_hub
        """Whether this keeper, and not the peer, is the hub."""
        self._received = bytearray()
        self._own_number = os.urandom(16).hex().encode()
        self._peer_number = b""
        self.task = "" if is_hub else str(gang["others"][0])
        self.is_authenticated = False
        self.knows_failure = False
        """Whether the peer has reported or confirmed the failure."""
        self.was_sent_failure = False
        self.was_refused = False
        self.deadline = time.monotonic() + _AUTHENTICATION_TIMEOUT_S
        if is_hub:
            self._greet()
        else:
            selector.register(connection, selectors.EVENT_WRITE, self._connected)

    def close(self) -> None:
        """Close the connection. Does nothing if it is closed."""
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def send_message(self, message: Json) -> None:
        """Send a line with its hash."""
        body = json.dumps(message).encode()
        self._send(self._mac(body, from_hub=self._is_hub) + b" " + body)

    def _connected(self) -> None:
        if self._socket is None:
            return
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self.was_refused = error == errno.ECONNREFUSED
            self._on_message(self, None)
            return
        self._selector.unregister(self._socket)
        self._greet()

    def _greet(self) -> None:
        if self._socket is not None:
            self._socket.setblocking(False)
            _enable_keepalive(self._socket)
            self._selector.register(self._socket, selectors.EVENT_READ, self._read)
            self._send(self._own_number)

    def _read(self) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(_MAX_LINE)
            self._received += data
            *lines, rest = bytes(self._received).split(b"\n")
            self._received = bytearray(rest)
            for line in lines:
                self._handle_line(line)
            if len(rest) > _MAX_LINE:
                raise ValueError("a line is longer than {} bytes".format(_MAX_LINE))
        except BlockingIOError:
            return
        except (OSError, ValueError):  # the peer disconnected, or does not belong to the gang
            data = b""
        except Exception as error:  # a peer must never end the task, not even through a bug in this module
            sys.excepthook(type(error), error, error.__traceback__)
            data = b""
        if not data:
            self._on_message(self, None)

    def _handle_line(self, line: bytes) -> None:
        """Handle a line. Raises ``ValueError`` if it is malformed or its hash is wrong."""
        if not self._peer_number:
            if not re.fullmatch(_NUMBER, line):
                raise ValueError("the peer's greeting is not 32 hexadecimal digits")
            self._peer_number = line
            if not self._is_hub:
                self.send_message({"task": self._gang["task"]})
            return
        mac, _, text = line.partition(b" ")
        if len(line) > _MAX_LINE:
            raise ValueError("the line is longer than {} bytes".format(_MAX_LINE))
        if not compare_digest(mac, self._mac(text, from_hub=not self._is_hub)):
            raise ValueError("the peer does not have the token")
        body = decode_object(text, max_bytes=_MAX_LINE, max_depth=_MAX_DEPTH)
        if not self.is_authenticated:
            self.is_authenticated = True
            if self._is_hub:
                self.task = str(body["task"])
                self.send_message({"welcome": self._gang["task"]})
        self._on_message(self, body)

    def _mac(self, body: bytes, *, from_hub: bool) -> bytes:
        """Return the keyed hash of the sender's role, the numbers of both sides (32 bytes each) and the body."""
        numbers = self._own_number + self._peer_number if self._is_hub else self._peer_number + self._own_number
        text = (b"hub " if from_hub else b"task ") + numbers + body
        return keyed_hash(str(self._gang["token"]).encode(), text)

    def _send(self, line: bytes) -> None:
        try:
            if self._socket is not None:
                self._socket.send(line + b"\n")  # lines are short and rare, so they always fit unless the peer does not read
        except OSError:
            pass  # the next read reports the error


def _start_connecting(address: str, port: int) -> socket.socket:
    """Start to connect without waiting for the connection; only resolving a name may block. Raises ``OSError``."""
    family, kind, protocol, _, where = _resolve(address, port)
    connection = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
    error = connection.connect_ex(where)
    if error not in (0, errno.EINPROGRESS):
        connection.close()
        raise OSError(error, os.strerror(error))
    return connection


@functools.lru_cache(maxsize=None)  # a name is resolved once, because that can be slow
def _resolve(address: str, port: int):  # type: ignore[no-untyped-def]
    # For a string, Python imports its IDNA codec, which takes several milliseconds in every keeper.
    host = address.encode() if address.isascii() else address
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]


def _enable_keepalive(connection: socket.socket) -> None:
    """Enable TCP options that detect an unreachable peer within half a minute, so that the keepers reconnect."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
