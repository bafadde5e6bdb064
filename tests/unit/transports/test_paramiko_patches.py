"""A fix of paramiko that needs no server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from distflow.transports.ssh.config import Hop, SshDestination, resolve_hop
from distflow.transports.ssh.paramiko_patches import HOST_KEY_ALGORITHMS, ChannelSocket, PatchedTransport


class BrokenChannel:
    """A channel whose connection has broken: closing it fails, as paramiko's own does when it cannot send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.send = connection.send
        self.recv = connection.recv
        self.settimeout = connection.settimeout
        self.closed = False

    def close(self) -> None:
        self.closed = True
        self._connection.close()
        raise EOFError


class OuterTransport:
    @contextlib.contextmanager
    def on_behalf_of(self, _channel: object) -> Iterator[None]:
        yield


def test_a_channel_that_fails_to_close_wakes_threads_that_wait_for_the_connection() -> None:
    ours, theirs = socket.socketpair()
    outer: Any = OuterTransport()
    channel: Any = BrokenChannel(ours)
    host = resolve_hop(Hop(host="n1"), SshDestination(host="n1", config_file="none"))
    transport = PatchedTransport(ChannelSocket(outer, channel), host, HOST_KEY_ALGORITHMS)
    ended = threading.Event()
    transport.start_client(event=ended)
    theirs.close()
    assert ended.wait(60)
    assert not transport.is_active()
    assert channel.closed
