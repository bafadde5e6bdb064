"""``distflow workflow port-forward``."""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated

import typer

from distflow.backends.machines.backend import transport_of
from distflow.cli.command import command_app
from distflow.cli.reading import WorkflowArgument, choose_tasks, open_workflow
from distflow.cli.tables import plain_lines
from distflow.errors import InputError, NodeUnreachable, WorkflowEnded
from distflow.lifecycle.states import State
from distflow.state.record import TaskRecord, WorkflowRecord
from distflow.transports.base import Stream, Transport

__all__ = ["app", "parse_ports"]

app = command_app()

_READ = 65536
_LOOK_S = 2.0
_MOST = 30


@app.command(
    "port-forward",
    epilog="Examples: distflow workflow port-forward pytorch-dist-3 master --port 6006  ·  … --port 8080:80,9000-9003",
)
def port_forward(
    workflow: WorkflowArgument,
    task: Annotated[str, typer.Argument(metavar="TASK", help="The task whose node is meant.")],
    port: Annotated[
        str,
        typer.Option(
            "--port", metavar="LOCAL[:REMOTE],…", help="Ports here and there; ranges a-b or a-b:c-d; lists with commas."
        ),
    ],
    host: Annotated[str, typer.Option("--host", help="The address of this machine to listen on.")] = "localhost",
    connect_timeout: Annotated[
        int, typer.Option("--connect-timeout", metavar="SECONDS", min=1, help="How long the node may take to answer.")
    ] = 60,
) -> None:
    """Reach TCP ports of a running task's node from here, until Ctrl-C or the end of the task.

    What listens there may listen on the node's loopback only. It is the node that is reached, not the task alone: other
    programs there have ports as well.
    """
    pairs = parse_ports(port)
    with open_workflow(workflow, tell_age=False) as (_, store, record), ExitStack() as held:
        one = _running(record, task)
        pool = replace(store.pool(record.uuid), connect_timeout_s=float(connect_timeout))
        node = next(node for node in pool.nodes if node.name == one.node)
        if pool.backend == "local" and any(ours == theirs for ours, theirs in pairs):
            hint = f"take another one here: --port OTHER:{pairs[0][1]}"
            raise InputError(f"{node.name} is this machine: a port cannot lead to itself", hint=hint)
        doors = {held.enter_context(contextlib.closing(_listen(host, ours))): (ours, theirs) for ours, theirs in pairs}
        transport = held.enter_context(contextlib.closing(transport_of(pool, node)))
        # A node that is unreachable is reported now, and not to the first who comes.
        transport.run(["true"], timeout_s=connect_timeout)
        for ours, theirs in pairs:
            print(f"{host}:{ours} is port {theirs} of {node.name}; Ctrl-C ends it", file=sys.stderr, flush=True)
        for door, connection in _visitors(list(doors), lambda: _running(store.find(record.uuid), task)):
            arguments = (transport, doors[door][1], connection, connect_timeout)
            threading.Thread(target=_serve, args=arguments, name=f"port {doors[door][0]}", daemon=True).start()


def parse_ports(text: str) -> list[tuple[int, int]]:
    """Return the pairs of ports here and there. Raises ``InputError``.

    >>> parse_ports("8080:80,9000-9001")
    [(8080, 80), (9000, 9000), (9001, 9001)]
    """
    pairs: list[tuple[int, int]] = []
    for part in text.split(","):
        ours, colon, theirs = part.partition(":")
        here, there = _range(ours, text), _range(theirs if colon else ours, text)
        if len(here) != len(there):
            raise InputError(f"--port {part}: {len(here)} ports here, and {len(there)} there")
        pairs += zip(here, there, strict=True)
    if len(pairs) > _MOST:
        raise InputError(f"--port names {len(pairs)} ports; at most {_MOST} are forwarded at once")
    if len({ours for ours, _ in pairs}) < len(pairs):
        raise InputError(f"--port {text} names a port of this machine twice")
    return pairs


def _range(text: str, whole: str) -> range:
    first, dash, last = text.partition("-")
    words = (first, last) if dash else (first, first)
    if not all(word.isascii() and word.isdigit() and 1 <= int(word) <= 65535 for word in words):
        raise InputError(
            f"--port {whole}: {text!r} is no port", hint="write LOCAL or LOCAL:REMOTE, such as 8080:80, or a range 8000-8003"
        )
    if dash and int(first) >= int(last):
        raise InputError(f"--port {whole}: the range {text} is empty")
    return range(int(words[0]), int(words[1]) + 1)


def _running(record: WorkflowRecord, name: str) -> TaskRecord:
    """Return a task that runs. Raises ``InputError``, and ``WorkflowEnded`` for one that does no more."""
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


def _visitors(doors: list[socket.socket], look: Callable[[], object]) -> Iterator[tuple[socket.socket, socket.socket]]:
    with selectors.DefaultSelector() as selector:
        for door in doors:
            selector.register(door, selectors.EVENT_READ)
        while True:
            ready = selector.select(_LOOK_S)
            for key, _ in ready:
                door = next(one for one in doors if one is key.fileobj)
                with contextlib.suppress(OSError):
                    connection, _ = door.accept()
                    yield door, connection
            if not ready:
                look()


def _serve(transport: Transport, port: int, connection: socket.socket, timeout_s: float) -> None:
    with connection:
        try:
            stream = transport.dial(port, timeout_s=timeout_s)
        except NodeUnreachable as error:
            print(f"warning: {plain_lines(str(error))}", file=sys.stderr)
            return
        back = threading.Thread(target=_back, args=(stream, connection), daemon=True)
        back.start()
        with contextlib.suppress(OSError, NodeUnreachable):
            while data := connection.recv(_READ):
                stream.write(data)
            stream.end()
        back.join()
        stream.close()


def _back(stream: Stream, connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := stream.read():
            connection.sendall(data)
    # Whoever is here reads to the end, and is told it.
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
