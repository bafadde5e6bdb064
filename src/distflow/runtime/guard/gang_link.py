"""The gang link: the keepers of a gang tell each other that one has failed, also when no supervisor is awake.

One of them, the hub, listens on the training network; the others connect to it, and again when the connection breaks. What
travels is that a task failed, and how; it goes to the hub, and from there to all. A connection that breaks says nothing, and
ends nothing. Both sides prove with each line that they know the gang's token (HMAC, RFC 2104), over numbers that both chose for
this connection, so that nothing can be repeated from another one. Loaded only for gangs of several tasks.

Each side first sends a line with its number. Every line after that is the HMAC in hexadecimal, a space, and a JSON object. The
HMAC covers the bytes of the object as they were received: nothing of a line is parsed before the HMAC is verified, so a host
without the token reaches no parser. All keepers of a gang run the same version of this module: agents and keepers come from
the runtime that one supervisor sent, whose hash names it. A peer of another version fails the check and is disconnected.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import hmac
import json
import os
import re
import selectors
import socket
import sys
import time
from typing import Callable, List, Optional, Set

from distflow.protocol import ends
from distflow.protocol.ends import EndReason
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import Json

__all__ = ["GangLink", "stops_gang"]

_LINE = 8192
"""The longest line in bytes."""
_DEPTH = 4
_NUMBER = re.compile(rb"[0-9a-f]{32}")
_STRANGERS = 32
"""Connections that the hub holds beyond two for each of the others: a flood takes no more descriptors from the task."""
_GREETING_S = 10.0
"""How long the other side has to prove itself."""
_PAUSES_S = (0.2, 1.0, 5.0, 15.0)
"""Before the hub is tried again."""
_LINGER_S = 20.0
"""How long a keeper whose gang has failed tries to tell those whom it cannot reach at once."""
_WORDS = 500
_NEVER = float("inf")

Failed = Callable[[str, str], None]
"""Hears the name of the task that failed, and how."""


def stops_gang(gang: Json, reason: EndReason, end: Json) -> bool:
    """Whether the end of a task stops its gang, by what the spec says of exit codes."""
    code = ends.code_of(end.get("exit_code"), end.get("signal"))
    return bool(gang["counts"]) and ends.counts_as_failure(reason, code, gang["success"], gang["failure"])


class GangLink:
    """One keeper's part of the link. ``tick`` is due at ``due_at``; its sockets' data in the selector are to be called."""

    def __init__(self, gang: Json, listener: int, selector: selectors.BaseSelector, failed: Failed) -> None:
        self._gang = gang
        self._selector = selector
        self._failed = failed
        self._news: Optional[Json] = None
        """The failure, once there is one; the first is the only one."""
        self._peers: List[_Peer] = []
        """Of the hub: all others. Of the others: the hub, or what may become the connection to it."""
        self._left: Set[str] = set()
        """Tasks that need no news: they ended as they should, or had it before they hung up."""
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
        """Tell the gang that this keeper's task failed."""
        self._take({"task": str(self._gang["task"]), "why": why[:_WORDS]})

    def tick(self) -> None:
        """Drop who does not prove itself; connect to the hub again."""
        self.due_at = _NEVER
        now = time.monotonic()
        for peer in [peer for peer in self._peers if not peer.is_known]:
            if now >= peer.deadline:
                self._drop(peer)
            else:
                self.due_at = min(self.due_at, peer.deadline)
        if self._listener is None and not self._peers and not self._left:
            self._connect()

    def farewell(self) -> None:
        """Before the keeper ends: see to it that the others have heard of a failure, or that nothing is to be heard."""
        until = time.monotonic() + _LINGER_S
        while self._news is not None and not self._is_told() and time.monotonic() < until:
            if time.monotonic() >= self.due_at:
                self.tick()
            for key, _ in self._selector.select(max(0.0, min(self.due_at, until) - time.monotonic())):
                key.data()
        for peer in list(self._peers):
            if peer.is_known and self._news is None:
                peer.say({"bye": self._gang["task"]})
            peer.close()

    def _is_told(self) -> bool:
        told = {peer.task for peer in self._peers if peer.knows} | self._left
        return told >= set(self._gang["others"])

    # -- the hub's side, and the others'

    def _accept(self) -> None:
        try:
            connection = self._listener.accept()[0] if self._listener else None
        except OSError:
            return
        if connection is None:
            return
        if len(self._peers) >= 2 * len(self._gang["others"]) + _STRANGERS:
            # A stranger makes room, never a connection of the gang: keepers prove themselves within a round trip.
            stranger = next((peer for peer in self._peers if not peer.is_known), None)
            if stranger is None:
                connection.close()
                return
            self._drop(stranger)
        self._add(_Peer(connection, self._gang, self._selector, self._hear, is_hub=True))

    def _connect(self) -> None:
        try:
            connection = _towards(str(self._gang["address"]), int(self._gang["port"]))
        except OSError:
            self._again()
            return
        self._add(_Peer(connection, self._gang, self._selector, self._hear, is_hub=False))

    def _add(self, peer: _Peer) -> None:
        self._peers.append(peer)
        self.due_at = min(self.due_at, peer.deadline)

    def _again(self) -> None:
        self.due_at = min(self.due_at, time.monotonic() + _PAUSES_S[min(self._tries, len(_PAUSES_S) - 1)])
        self._tries += 1

    def _drop(self, peer: _Peer) -> None:
        peer.close()
        if peer in self._peers:
            self._peers.remove(peer)
            if peer.knows:
                self._left.add(peer.task)
            if self._listener is None:
                if peer.was_refused:
                    self._left.update(self._gang["others"])  # nobody is there any more who would tell the others
                else:
                    self._again()

    def _hear(self, peer: _Peer, message: Optional[Json]) -> None:
        """Take what a peer that has proved itself says; None: it is gone, or never proved itself."""
        if message is None:
            self._drop(peer)
        elif "bye" in message:
            self._left.add(peer.task)
        elif "failed" in message:
            failed = {"task": str(message["failed"]["task"]), "why": str(message["failed"]["why"])[:_WORDS]}
            peer.knows = True
            self._take(failed)
        else:  # it has just become known
            self._tries = 0
            self._pass_on(peer)

    def _take(self, news: Json) -> None:
        if self._news is None:
            self._news = news
            if news["task"] != self._gang["task"]:
                self._failed(str(news["task"]), str(news["why"]))
        for peer in list(self._peers):
            self._pass_on(peer)

    def _pass_on(self, peer: _Peer) -> None:
        if self._news is not None and peer.is_known and not peer.was_told:
            peer.was_told = True  # the answer of who knew it already is that it knows
            peer.say({"failed": self._news})


class _Peer:
    """One connection: numbers are exchanged, then lines that only who knows the token can write."""

    def __init__(
        self,
        connection: socket.socket,
        gang: Json,
        selector: selectors.BaseSelector,
        hear: Callable[[_Peer, Optional[Json]], None],
        *,
        is_hub: bool,
    ) -> None:
        self._socket: Optional[socket.socket] = connection
        self._gang = gang
        self._selector = selector
        self._hear = hear
        self._is_hub = is_hub
        self._received = bytearray()
        self._mine = os.urandom(16).hex().encode()
        self._theirs = b""
        self.task = "" if is_hub else str(gang["others"][0])
        self.is_known = False
        self.knows = False
        """Whether it has heard of the failure."""
        self.was_told = False
        self.was_refused = False
        self.deadline = time.monotonic() + _GREETING_S
        if is_hub:
            self._greet()
        else:
            selector.register(connection, selectors.EVENT_WRITE, self._connected)

    def close(self) -> None:
        """Hang up; harmless when that has happened."""
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def say(self, message: Json) -> None:
        """Send a line that proves who wrote it."""
        said = json.dumps(message).encode()
        self._send(self._mac(said, from_hub=self._is_hub) + b" " + said)

    def _connected(self) -> None:
        if self._socket is None:
            return
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self.was_refused = error == errno.ECONNREFUSED
            self._hear(self, None)
            return
        self._selector.unregister(self._socket)
        self._greet()

    def _greet(self) -> None:
        if self._socket is not None:
            self._socket.setblocking(False)
            _notice_when_gone(self._socket)
            self._selector.register(self._socket, selectors.EVENT_READ, self._read)
            self._send(self._mine)

    def _read(self) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(_LINE)
            self._received += data
            *lines, rest = bytes(self._received).split(b"\n")
            self._received = bytearray(rest)
            for line in lines:
                self._take(line)
            if len(rest) > _LINE:
                raise ValueError("a line is longer than {} bytes".format(_LINE))
        except BlockingIOError:
            return
        except (OSError, ValueError):  # it is gone, or it does not belong to the gang
            data = b""
        except Exception as error:  # a peer must never end the task, not even with a fault of this module
            sys.excepthook(type(error), error, error.__traceback__)
            data = b""
        if not data:
            self._hear(self, None)

    def _take(self, line: bytes) -> None:
        """Raises ``ValueError`` for a line that no keeper of the gang has written."""
        if not self._theirs:
            if not _NUMBER.fullmatch(line):
                raise ValueError("a greeting is 32 hexadecimal digits")
            self._theirs = line
            if not self._is_hub:
                self.say({"task": self._gang["task"]})
            return
        mac, _, text = line.partition(b" ")
        if len(line) > _LINE or not hmac.compare_digest(mac, self._mac(text, from_hub=not self._is_hub)):
            raise ValueError("the peer does not know the token")
        said = decode_object(text, max_bytes=_LINE, max_depth=_DEPTH)
        if not self.is_known:
            self.is_known = True
            if self._is_hub:
                self.task = str(said["task"])
                self.say({"welcome": self._gang["task"]})
        self._hear(self, said)

    def _mac(self, said: bytes, *, from_hub: bool) -> bytes:
        """The HMAC of a line: of the side that wrote it, the numbers of both sides (32 bytes each), and the line's bytes."""
        numbers = self._mine + self._theirs if self._is_hub else self._theirs + self._mine
        text = (b"hub " if from_hub else b"task ") + numbers + said
        return hmac.new(str(self._gang["token"]).encode(), text, hashlib.sha256).hexdigest().encode()

    def _send(self, line: bytes) -> None:
        try:
            if self._socket is not None:
                self._socket.send(line + b"\n")  # short and rare: a line that does not fit has no reader
        except OSError:
            pass  # the next read reports the error


def _towards(address: str, port: int) -> socket.socket:
    """Begin to connect. Raises ``OSError``."""
    family, kind, protocol, _, where = _looked_up(address, port)
    connection = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
    error = connection.connect_ex(where)
    if error not in (0, errno.EINPROGRESS):
        connection.close()
        raise OSError(error, os.strerror(error))
    return connection


@functools.lru_cache(maxsize=None)  # a name is looked up once: that may take its time
def _looked_up(address: str, port: int):  # type: ignore[no-untyped-def]
    return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]


def _notice_when_gone(connection: socket.socket) -> None:
    """Find out within half a minute that the other side cannot be reached, so that what is said goes another way."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
