"""Connect to a node of a Ray cluster through the login node.

The node's actor listens at an address and port, its endpoint.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import threading
from collections.abc import Callable, Sequence

from distflow.backends.allocated.ray.states import Endpoint
from distflow.backends.machines.connection.bootstrap import python_argv
from distflow.errors import NodeUnreachable
from distflow.transports.base import Channel, Completed, Stream, Transport

__all__ = ["EndpointTransport"]

_TEST_S = 10.0


class EndpointTransport:
    """Starts Python programs on a node, for a ``MultiplexedTransport``, which runs commands through one such program.

    ``hang_up`` and ``close`` close only the channels to this node. The engine closes the transport to the login node.
    """

    reached_address: str | None = None
    named_addresses: tuple[str, ...] = ()

    def __init__(self, name: str, login: Transport, find: Callable[[], Endpoint], python: str) -> None:
        """Run programs on node ``name``.

        ``find`` returns the endpoint of the node's actor. It is called for each channel, and may block or raise
        ``NodeUnreachable``. ``python`` is the interpreter on the login node.
        """
        self.name = name
        self._login = login
        self._find = find
        self._python = python
        self._lock = threading.Lock()
        self._channels: list[Channel] = []
        self._is_suspect = False
        self._is_closed = False

    def open(self, argv: Sequence[str]) -> Channel:
        """Start a Python program on the node. The actor's interpreter runs it, so ``argv[0]`` is ignored.

        After ``hang_up``, the first call tests the login node, and hangs up its transport if the test fails. Raises
        ``NodeUnreachable``.
        """
        if self._is_closed:
            raise NodeUnreachable(self.name, "the transport is closed")
        try:
            if self._is_suspect:
                self._test_login()
            endpoint = self._find()
            channel = self._login.open([*python_argv(self._python), "-I", "-S", "-c", _source()])
            request = {"address": endpoint.address, "port": endpoint.port, "token": endpoint.token, "argv": list(argv[1:])}
            channel.write(json.dumps(request).encode() + b"\n")
        except NodeUnreachable as error:
            if error.node == self.name:  # `find` reports that the allocation has no endpoint on this node
                raise
            raise type(error)(self.name, f"its login node {error.message}", hint=error.hint) from error
        with self._lock:
            self._channels = [one for one in self._channels if one.exit_code is None] + [channel]
        return channel

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Completed:
        """Not supported: ``MultiplexedTransport`` runs commands over its channel."""
        raise NotImplementedError

    def dial(self, port: int, *, timeout_s: float) -> Stream:
        """Not supported: ``MultiplexedTransport`` connects over its channel."""
        raise NotImplementedError

    def hang_up(self) -> None:
        """Close the channels. The next ``open`` first tests the connection to the login node."""
        self._is_suspect = True
        self._close_channels()

    def close(self) -> None:
        """Close the channels for good."""
        self._is_closed = True
        self._close_channels()

    def _test_login(self) -> None:
        try:
            self._login.run(["true"], timeout_s=_TEST_S)
        except NodeUnreachable:
            self._login.hang_up()
            raise
        self._is_suspect = False

    def _close_channels(self) -> None:
        with self._lock:
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()


@functools.cache
def _source() -> str:
    return importlib.resources.files("distflow.runtime.services").joinpath("endpoint_client.py").read_text()
