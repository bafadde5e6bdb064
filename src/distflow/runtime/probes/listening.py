"""Listening sockets on one address of this node, so that only hosts on that network reach them."""

from __future__ import annotations

import errno
import re
import socket
from typing import Optional, Tuple

from distflow.runtime.wire import OpError

__all__ = ["listen_on"]

_BACKLOG = 1024


def listen_on(address: str) -> Tuple[socket.socket, Optional[bool]]:
    """Return a non-blocking listening socket on a free port, and whether ``address`` belongs to this node.

    The socket listens on every address if ``address`` is not this node's (because of address translation). It also does so for
    a host name; the second value is then ``None``, because resolving a name may take long. Raises ``OpError``.
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
    where = socket.getaddrinfo(address, 0, family, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)[0][4]
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
