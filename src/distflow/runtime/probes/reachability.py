"""Reachability of nodes: sockets that listen for a limited time, and connections to such sockets on other nodes.

The agent itself owns the sockets. Connecting may take long, so it is a job for a child process.
"""

from __future__ import annotations

import errno
import re
import selectors
import socket
import time

from distflow.protocol.light_typing import Callable, Optional, Tuple
from distflow.runtime.agent.loop import Loop
from distflow.runtime.wire import Json, OpError

__all__ = ["Listeners", "listen_on", "reach"]


_MAX_TIME_S = 600.0
_AT_ONCE = 64
_KINDS = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "no_route",
    errno.ENETUNREACH: "no_route",
    errno.ETIMEDOUT: "timeout",
}


def reach(request: Json) -> Callable[[], Json]:
    """Return a job that connects to each target and checks the word that it receives. Its ``results`` are in the same order."""
    targets = [(str(one["address"]), int(one["port"]), str(one["word"])) for one in request["targets"]]
    timeout_s = min(float(request.get("limit_s") or 5.0), _MAX_TIME_S)

    def work() -> Json:
        from concurrent.futures import ThreadPoolExecutor  # only the child needs it

        with ThreadPoolExecutor(max_workers=_AT_ONCE) as workers:
            return {"results": list(workers.map(lambda one: _reach(one[0], one[1], one[2], timeout_s), targets))}

    return work


class Listeners:
    """Sockets that send a given word to each connection, and close after a time limit."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def listen(self, request: Json) -> Json:
        """Listen on a free port of ``address``, or of all addresses if ``address`` is a name or belongs to another node."""
        word = str(request["word"]).encode() + b"\n"
        timeout_s = min(float(request.get("limit_s") or 30.0), _MAX_TIME_S)
        listener, is_own = listen_on(str(request["address"]))

        def accept(_events: int) -> None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.setblocking(False)
                try:
                    connection.send(word)
                except OSError:
                    pass  # the peer has disconnected

        def close() -> None:
            self._loop.watch(listener.fileno(), 0, accept)
            listener.close()

        self._loop.watch(listener.fileno(), selectors.EVENT_READ, accept)
        self._loop.later(timeout_s, close)
        return {"port": listener.getsockname()[1], "is_own": is_own}


def _reach(address: str, port: int, word: str, timeout_s: float) -> Json:
    begin = time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as connection:
            received, expected = b"", word.encode() + b"\n"
            while len(received) < len(expected):
                data = connection.recv(len(expected) - len(received))
                if not data:
                    break
                received += data
    except socket.gaierror as error:
        return {"kind": "no_name", "message": error.strerror or str(error)}
    except socket.timeout:
        return {"kind": "timeout", "message": "no answer within {:g} s".format(timeout_s)}
    except OSError as error:
        return {"kind": _KINDS.get(error.errno or 0, "other"), "message": error.strerror or str(error)}
    if received != expected:
        return {"kind": "stranger", "message": "another program answers at this address"}
    return {"kind": "ok", "ms": round((time.monotonic() - begin) * 1000, 3)}


_BACKLOG = 1024


def listen_on(address: str) -> Tuple[socket.socket, Optional[bool]]:
    """Return a non-blocking listening socket on a free port, and whether ``address`` belongs to this node.

    The socket listens on all addresses if ``address`` does not belong to this node, because the network may translate it. For
    a host name, it also listens on all addresses, and the second value is ``None``, because resolving a name may take long.
    Raises ``OpError``.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if family == socket.AF_INET6 or re.fullmatch(r"[0-9.]+", address):
        try:
            return _listening(family, address), True
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise OpError.from_os(error, "cannot listen on {}".format(address)) from error
        is_own: Optional[bool] = False
    else:
        is_own = None
    try:
        return _listening(socket.AF_INET6, "::"), is_own
    except OSError:  # this node has no IPv6
        try:
            return _listening(socket.AF_INET, "0.0.0.0"), is_own
        except OSError as error:
            raise OpError.from_os(error, "cannot listen on any address") from error


def _listening(family: int, address: str) -> socket.socket:
    # Pass bytes: for a string, Python would import its IDNA codec, which takes several milliseconds.
    where = socket.getaddrinfo(address.encode(), 0, family, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)[0][4]
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
