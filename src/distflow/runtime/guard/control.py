"""Descriptors that runner and keeper inherit at the fork (``AttemptHandles``), and their socket ``control`` for agents.

A socket has advantages over two FIFOs. It transfers long messages and replies. It wakes every connected agent, not only the
first reader (there may be two agents while an old connection ends). It refuses connections only if runner and keeper are gone.
"""

from __future__ import annotations

import fcntl
import functools
import os
import selectors
import socket
import sys

from distflow.protocol.light_typing import Callable, FrozenSet, List, NamedTuple, Optional, Set
from distflow.runtime.leases import lease_files
from distflow.runtime.wire import Json, LineReader, OpError, encode

__all__ = ["AgentConnections", "AttemptHandles", "connect", "listen"]


_CONTROL = "control"

_Answer = Callable[[Json], None]
_OnRequest = Callable[[Json, _Answer], None]


def _address(dir_fd: int) -> str:
    # Socket addresses are limited to 107 bytes; a path through the directory's descriptor is always short.
    return "/proc/self/fd/{}/{}".format(dir_fd, _CONTROL)


def listen(dir_fd: int) -> int:
    """Create the socket in a directory. Returns its descriptor. Raises ``OSError`` if the socket exists already."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind(_address(dir_fd))
        os.chmod(_CONTROL, 0o600, dir_fd=dir_fd)
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    return listener.detach()


def connect(directory: str) -> socket.socket:
    """Connect to the pair of the attempt in ``directory``. Raises ``OSError`` if neither runner nor keeper is running.

    Raises ``BlockingIOError`` if a process listens but has too many unaccepted connections.
    """
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

    ``on_request(request, answer)`` is called for each request. Its exceptions are sent as error replies.
    """

    def __init__(self, listener: int, selector: selectors.BaseSelector, on_request: _OnRequest) -> None:
        self._listener = socket.socket(fileno=listener)
        self._selector = selector
        self._on_request = on_request
        self._connections: List[socket.socket] = []
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def is_any_connected(self) -> bool:
        """Whether any agent is connected."""
        return bool(self._connections)

    def notify(self, news: str) -> None:
        """Send the news to every agent. An agent with too many unread messages is skipped."""
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
                self._on_request(request, functools.partial(self._answer, connection, number))
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


class AttemptHandles(NamedTuple):
    """Descriptors and facts of one attempt. All descriptors are open, and an exec closes them."""

    attempt: str
    directory: str
    dir_fd: int
    listener: int
    """The listening socket ``control``. Runner and keeper both hold it, so connections are refused only when both are gone."""
    locks: List[int]
    """Lock files of the GPUs, of the port, and of the share of CPUs and memory."""
    port_sockets: List[int]
    record: int
    """The file that becomes ``exit.json``. Its space is allocated before the start, for the case of a full disk."""
    state: int
    log: int
    output_index: int
    """``output.idx``: the time and the rank of each piece of output."""
    errors: int
    """``pair.log``: the standard error of runner and keeper."""
    umask: int
    """The umask of the login, which the command gets. Runner and keeper use 077."""
    gpu_ids: List[int]
    other_gpus: FrozenSet[str]
    """PCI bus addresses of the node's GPUs that do not belong to the attempt, as far as they are known."""
    port: Optional[int]
    link: int
    """Descriptor on which the hub of the gang link listens; -1 for tasks that are not the hub."""
    link_port: Optional[int]
    start_timeout_s: float
    holder: Json
    """The description of the lease's holder in the lock files."""

    def descriptors(self) -> Set[int]:
        """Return all open descriptors."""
        single = {self.dir_fd, self.listener, self.record, self.state, self.log, self.output_index, self.errors}
        return single | set(self.locks) | set(self.port_sockets) | ({self.link} if self.link >= 0 else set())

    def sign_locks(self, pid: int) -> None:
        """Write the description of the holder, with the process id ``pid``, into the lock files."""
        for fd in self.locks:
            lease_files.write_holder(fd, dict(lease_files.read_holder(fd) or {}, **dict(self.holder, pid=pid)))

    def unlock(self) -> None:
        """Release the locks of the lease, for all processes that share these descriptors."""
        for fd in self.locks:
            fcntl.flock(fd, fcntl.LOCK_UN)
