"""Forward TCP ports of this machine to the node of a running task."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from distflow.backends.machines.backend import transport_of
from distflow.client.client import Client
from distflow.client.workflows import choose_tasks
from distflow.errors import InputError, NodeUnreachable, WorkflowEnded
from distflow.lifecycle.states import State
from distflow.state.record import TaskRecord, WorkflowRecord
from distflow.transports.base import Stream, Transport

__all__ = ["ForwardedPort", "forward_ports"]

_READ = 65536
_LOOK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedPort:
    """A port of this machine that is forwarded to a port of a node."""

    host: str
    local: int
    remote: int
    node: str


def forward_ports(
    client: Client,
    record: WorkflowRecord,
    task: str,
    ports: Sequence[tuple[int, int]],
    *,
    host: str = "localhost",
    connect_timeout: int = 60,
    on_ready: Callable[[ForwardedPort], None] = lambda _: None,
) -> None:
    """Forward ports of this machine to the node of a task until the task has ended, or until ``KeyboardInterrupt``.

    The ports are ports of the node, so they can also lead to other programs on it. A connection that fails causes a warning
    through ``client.notify``.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        task: The name of the task.
        ports: Pairs of a local port and a port of the node.
        host: The local address to listen on.
        connect_timeout: The maximum time for the node to answer, in seconds.
        on_ready: Called with each forwarded port after all of them are ready.

    Raises:
        InputError: if the task is not running yet, or if a local port is not available.
        NodeError: if the node is unreachable.
        NotFound: if the workflow does not have the task.
        WorkflowEnded: if the task has ended.

    """
    with ExitStack() as held:
        one = _running(record, task)
        pool = replace(client.store.pool(record.uuid), connect_timeout_s=float(connect_timeout))
        node = next(node for node in pool.nodes if node.name == one.node)
        if pool.backend == "local" and any(ours == theirs for ours, theirs in ports):
            hint = f"take another one here: --port OTHER:{ports[0][1]}"
            raise InputError(f"{node.name} is this machine: a port cannot lead to itself", hint=hint)
        listeners = {held.enter_context(contextlib.closing(_listen(host, ours))): (ours, theirs) for ours, theirs in ports}
        transport = held.enter_context(contextlib.closing(transport_of(pool, node)))
        # Report an unreachable node now, and not only at the first connection.
        transport.run(["true"], timeout_s=connect_timeout)
        for ours, theirs in ports:
            on_ready(ForwardedPort(host=host, local=ours, remote=theirs, node=node.name))
        for listener, connection in _connections(list(listeners), lambda: _running(client.store.find(record.uuid), task)):
            arguments = (transport, listeners[listener][1], connection, connect_timeout, client.notify)
            threading.Thread(target=_serve, args=arguments, name=f"port {listeners[listener][0]}", daemon=True).start()


def _running(record: WorkflowRecord, name: str) -> TaskRecord:
    """Return a running task. Raises ``WorkflowEnded`` if it has ended, and ``InputError`` if it is not running yet."""
    ((_, task),) = choose_tasks(record, [name])
    if task.state.is_final:
        raise WorkflowEnded(f"{task.name} has ended: {task.status}")
    if task.state not in (State.RUNNING, State.STOPPING) or task.node is None:
        raise InputError(
            f"{task.name} does not run yet: {task.status}", hint=f"what it waits for: distflow workflow query {record.id}"
        )
    return task


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        hint = "name another port of this machine: --port OTHER:REMOTE"
        raise InputError(f"port {port} of {host} cannot be listened on: {error.strerror or error}", hint=hint) from None


def _connections(listeners: list[socket.socket], check: Callable[[], object]) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield each new connection with its listener. Call ``check`` regularly; it may raise an error to stop."""
    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            selector.register(listener, selectors.EVENT_READ)
        while True:
            ready = selector.select(_LOOK_S)
            for key, _ in ready:
                listener = next(one for one in listeners if one is key.fileobj)
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    yield listener, connection
            if not ready:
                check()


def _serve(transport: Transport, port: int, connection: socket.socket, timeout_s: float, notify: Callable[[str], None]) -> None:
    with connection:
        try:
            stream = transport.dial(port, timeout_s=timeout_s)
        except NodeUnreachable as error:
            notify(f"warning: {error}")
            return
        receiver = threading.Thread(target=_receive, args=(stream, connection), daemon=True)
        receiver.start()
        with contextlib.suppress(OSError, NodeUnreachable):
            while data := connection.recv(_READ):
                stream.write(data)
            stream.end()
        receiver.join()
        stream.close()


def _receive(stream: Stream, connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := stream.read():
            connection.sendall(data)
    # Signal the end of the stream to the local program, which may still send.
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
