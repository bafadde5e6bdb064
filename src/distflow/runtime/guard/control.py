"""The ``control`` socket of an attempt, on the keeper's side: requests of agents, and notifications for all of them.

It is a socket instead of two FIFOs for four reasons. It frames long messages, and it carries replies. It wakes every connected
agent, not only the first reader (there may be two while an old connection dies). Connecting fails exactly when runner and
keeper are gone.
"""

from __future__ import annotations

import functools
import os
import selectors
import socket
import sys
from typing import Callable, List

from distflow.runtime.wire import Json, LineReader, OpError, encode

__all__ = ["CONTROL", "AgentConnections", "connect", "listen"]

CONTROL = "control"

_Answer = Callable[[Json], None]
_Requested = Callable[[Json, _Answer], None]


def _address(dir_fd: int) -> str:
    # Socket addresses are limited to 107 bytes; a path through the directory's descriptor is always short.
    return "/proc/self/fd/{}/{}".format(dir_fd, CONTROL)


def listen(dir_fd: int) -> int:
    """Create the socket in a directory. Returns its descriptor. Raises ``OSError`` if there is one already."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind(_address(dir_fd))
        os.chmod(CONTROL, 0o600, dir_fd=dir_fd)
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    return listener.detach()


def connect(directory: str) -> socket.socket:
    """Connect to the pair of the attempt in ``directory``. Raises ``OSError`` if neither runner nor keeper is running."""
    dir_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.connect(_address(dir_fd))
    except OSError:
        connection.close()
        raise
    finally:
        os.close(dir_fd)
    return connection


class AgentConnections:
    """The connected agents.

    ``requested(request, answer)`` is called for each request. Its exceptions are sent as error replies.
    """

    def __init__(self, listener: int, selector: selectors.BaseSelector, requested: _Requested) -> None:
        self._listener = socket.socket(fileno=listener)
        self._selector = selector
        self._requested = requested
        self._connections: List[socket.socket] = []
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def is_any_connected(self) -> bool:
        """Whether any agent is connected."""
        return bool(self._connections)

    def notify(self, news: str) -> None:
        """Notify every agent. An agent that has not read the previous notification needs no further one."""
        line = encode({"news": news})
        for connection in list(self._connections):
            try:
                connection.send(line)
            except BlockingIOError:
                continue
            except OSError:
                self._drop(connection)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        self._connections.append(connection)
        reader = LineReader()
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(connection, reader))
        self._send(connection, {"news": "ready"})

    def _read(self, connection: socket.socket, reader: LineReader) -> None:
        try:
            data = connection.recv(262144)
            requests = reader.feed(data)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            data, requests = b"", []
        for request in requests:
            number = request.get("id")
            try:
                self._requested(request, functools.partial(self._answer, connection, number))
            except OpError as error:
                self._send(connection, {"id": number, "ok": False, "error": error.as_json()})
            except Exception as error:  # an error in a request must not end the task
                sys.excepthook(type(error), error, error.__traceback__)
                self._send(connection, {"id": number, "ok": False, "error": {"kind": "internal", "message": repr(error)}})
        if not data:
            self._drop(connection)

    def _answer(self, connection: socket.socket, number: object, result: Json) -> None:
        self._send(connection, dict(result, id=number, ok=True))

    def _send(self, connection: socket.socket, message: Json) -> None:
        try:
            connection.send(encode(message))
        except OSError:
            self._drop(connection)  # the agent will connect again and read the files

    def _drop(self, connection: socket.socket) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection)
            connection.close()
