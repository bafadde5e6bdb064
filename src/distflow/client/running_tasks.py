"""Run commands alongside running tasks, read the stacks of their processes, and forward ports to their nodes."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

from msgspec import Struct

from distflow.backends.machines.backend import transport_of
from distflow.backends.machines.inspection import InspectedTask, TaskStacks, collect_stacks
from distflow.backends.machines.session import Exit, Session, Size, open_session
from distflow.client.client import Client
from distflow.client.workflows import choose_tasks
from distflow.documents.text import listed
from distflow.errors import AgentError, DistflowError, InputError, NodeUnreachable, WorkflowEnded
from distflow.lifecycle.states import State
from distflow.plan.credentials import task_secrets
from distflow.pools.model import Node, Pool
from distflow.protocol.names import attempt_name
from distflow.shell import Secret
from distflow.state.record import TaskRecord, WorkflowRecord
from distflow.state.secrets import read_secrets
from distflow.structs import replace
from distflow.transports.base import Stream, Transport

__all__ = [
    "CommandsEnded",
    "Exit",
    "ForwardedPort",
    "RunningTask",
    "Session",
    "Size",
    "TaskStacks",
    "describe_no_running_task",
    "find_running_task",
    "forward_ports",
    "read_stacks",
    "run_on_tasks",
    "running_task",
]


_RUNNING = (State.RUNNING, State.STOPPING)


class RunningTask(Struct, frozen=True, kw_only=True):
    """A running task and the data needed to start a command alongside it."""

    workflow: str
    """The id of the workflow."""
    task: str
    attempt: str
    """The name of the attempt on its node."""
    pool: Pool
    node: Node
    secrets: Mapping[str, Secret]

    def open(
        self, argv: Sequence[str], terminal: tuple[Size, str] | None, timeout_s: float, *, is_plain: bool = False
    ) -> Session:
        """Start a command on the task's node, in its directory, with its environment and GPUs.

        Child processes that remain when the command ends are killed. The command and its child processes are killed when the
        connection closes or the task ends. In a container of docker or podman, processes that the command leaves behind end
        only with the task.

        Args:
            argv: The command and its arguments.
            terminal: The size and the type (``TERM``) of a terminal for the command. ``None``: pipes instead of a terminal.
            timeout_s: The maximum time for the node to answer, in seconds.
            is_plain: Whether the command runs without the task's container, ``setup`` and secrets.

        Returns:
            A session that carries input, output and the exit code. The caller must close it.

        Raises:
            InputError: if the task has stopped running, or an argument contains a NUL byte.
            NodeError: if the node is unreachable or refuses the command.

        """
        if any("\0" in word for word in argv):
            raise InputError("an argument contains a NUL byte, which cannot be passed to a program")
        try:
            return open_session(
                self.pool,
                self.node,
                self.attempt,
                argv,
                secrets={} if is_plain else self.secrets,
                terminal=terminal,
                timeout_s=timeout_s,
                is_plain=is_plain,
            )
        except AgentError as error:
            if error.kind == "not_running":
                hint = f"details: distflow workflow query {self.workflow}"
                raise InputError(f"{self.workflow}/{self.task} is no longer running", hint=hint) from None
            raise


def find_running_task(client: Client, workflow: str, task: str, connect_timeout: int) -> RunningTask:
    """Return a running task of a workflow.

    Args:
        client: The client whose store has the workflow.
        workflow: The id or uuid of the workflow, or its name for the latest run.
        task: The name of the task.
        connect_timeout: The maximum time for the node to answer, in seconds.

    Raises:
        InputError: if the task is not running, or if one of its secrets is no longer stored.
        NotFound: if the workflow or the task does not exist.

    """
    from distflow.client.workflows import find_workflow

    record = find_workflow(client, workflow, report_age=False)
    ((group, one),) = choose_tasks(record, [task])
    return running_task(client, record, group, one, connect_timeout)


def running_task(client: Client, record: WorkflowRecord, group: str, task: TaskRecord, connect_timeout: int) -> RunningTask:
    """Return the running task that a record describes.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        group: The name of the task's group.
        task: The record of the task.
        connect_timeout: The maximum time for the node to answer, in seconds.

    Raises:
        InputError: if the task is not running, or if one of its secrets is no longer stored.

    """
    if task.state.is_final:
        hint = f"its log: distflow workflow logs {record.id} --task {task.name}"
        if task.output_dir is not None:
            hint += f"\nits files: distflow workflow fetch {record.id} --task {task.name}"
        raise InputError(f"{task.name} has ended: {task.status}", hint=hint)
    if task.state not in _RUNNING or task.node is None:
        raise InputError(f"{task.name} is not running yet: {task.status}", hint=f"details: distflow workflow query {record.id}")
    store = client.store
    pool = replace(store.pool(record.uuid), connect_timeout_s=float(connect_timeout))
    launch = store.plan(record.uuid).group(group).launch(task.name)
    try:
        secrets = task_secrets(launch, read_secrets(client.directory.secrets, record.uuid))
    except LookupError as error:
        raise InputError(f"distflow no longer stores {error.args[0]}", hint="submit the workflow again") from None
    return RunningTask(
        workflow=record.id,
        task=task.name,
        attempt=attempt_name(record.uuid, group, task.name, task.attempt),
        pool=pool,
        node=pool.node(task.node or ""),
        secrets=secrets.variables,
    )


class CommandsEnded(Struct, frozen=True, kw_only=True):
    """The results of one command that was run alongside several tasks."""

    codes: tuple[int, ...]
    """The exit codes of the commands that ran, in the order of their ends."""
    errors: tuple[DistflowError, ...]
    """The errors of the commands that did not run or whose connection broke."""


def run_on_tasks(
    tasks: Sequence[RunningTask],
    argv: Sequence[str],
    connect_timeout: int,
    *,
    on_output: Callable[[int, bool, bytes], None],
    on_exit: Callable[[int, Exit], None],
) -> CommandsEnded:
    """Run a command alongside several tasks at the same time, without a terminal and without input.

    Args:
        tasks: The running tasks (see ``find_running_task``).
        argv: The command and its arguments.
        connect_timeout: The maximum time for a node to answer, in seconds.
        on_output: Called with the index of the task, whether the bytes are standard error, and the bytes. Several threads call
            it. If it raises ``OSError``, the rest of that task's output is ignored, and its command counts as exit code 1. The
            command is ended after the commands of the other tasks have ended.
        on_exit: Called with the index of the task and the end of its command. Several threads call it. If it raises
            ``OSError``, an exit code 0 counts as 1.

    Returns:
        The exit codes and errors after all commands have ended. Errors of ``distflow.errors`` are returned, not raised.

    """
    codes: dict[int, int] = {}
    errors: list[DistflowError] = []
    sessions: list[Session] = []

    def follow(number: int, task: RunningTask) -> None:
        session = task.open(argv, None, connect_timeout)
        sessions.append(session)
        session.end_input()
        for event in session.events():
            if isinstance(event, Exit):
                codes[number] = event.code
                on_exit(number, event)
            else:
                on_output(number, *event)

    def run(number: int, task: RunningTask) -> None:
        try:
            follow(number, task)
        except DistflowError as error:
            errors.append(error)
        except OSError:
            codes[number] = codes.get(number) or 1  # the output cannot be written, because its reader has closed it

    threads = [threading.Thread(target=run, args=numbered, daemon=True) for numbered in enumerate(tasks)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for session in sessions:
            session.close()
    return CommandsEnded(codes=tuple(codes.values()), errors=tuple(errors))


def describe_no_running_task(record: WorkflowRecord) -> str:
    """Return the error message for a workflow that has no running task."""
    return f"no task of {record.id} is running; the status of the workflow is {record.status}"


def read_stacks(
    client: Client, record: WorkflowRecord, names: Sequence[str] = (), *, on_start: Callable[[int], None] = lambda _: None
) -> list[TaskStacks]:
    """Return the current stacks of the processes of running tasks. The processes are not stopped.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        names: Names of tasks. Default: all running tasks.
        on_start: Called with the number of queried nodes before the first query.

    Returns:
        The stacks of each of these tasks that is running. A node's error is part of its result and is not raised.

    Raises:
        InputError: if none of the tasks is running.
        NotFound: if the workflow does not have one of the tasks.

    """
    chosen = [(group, one) for group, one in choose_tasks(record, names) if one.state in _RUNNING]
    if not chosen:
        named = f"{listed(names)} of {record.id} {'is' if len(names) == 1 else 'are'} not running"
        message = named if names else describe_no_running_task(record)
        raise InputError(message, hint=f"details: distflow workflow query {record.id}")
    pool = client.store.pool(record.uuid)
    inspected = [
        InspectedTask(
            name=one.name,
            group=group,
            attempt=attempt_name(record.uuid, group, one.name, one.attempt),
            node=pool.node(one.node or ""),
        )
        for group, one in chosen
    ]
    on_start(len({one.node.name for one in inspected}))
    return list(collect_stacks(pool, inspected))


_READ = 65536
_CHECK_EVERY_S = 2.0


class ForwardedPort(Struct, frozen=True, kw_only=True):
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

    The port of the node may belong to any program there, not only to the task. A connection that fails causes a warning
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
        InputError: if the task or its next attempt is not running yet, if a newer attempt runs, if ``host`` is not an address
            of this machine, if a local port is not available, or if the node is this machine and a local port equals its port
            of the node.
        NodeError: if the node is unreachable.
        NotFound: if the workflow does not have the task.
        WorkflowEnded: if the task has ended.

    """
    with ExitStack() as held:
        one = _running(record, task)
        pool = replace(client.store.pool(record.uuid), connect_timeout_s=float(connect_timeout))
        node = pool.node(one.node or "")
        same = next((local for local, remote in ports if local == remote), None) if pool.backend == "local" else None
        if same is not None:
            message = f"port {same} cannot be forwarded to itself: the node {node.name} is this machine"
            raise InputError(message, hint="use another local port")
        listeners = {held.enter_context(contextlib.closing(_listen(host, local))): (local, remote) for local, remote in ports}
        transport = held.enter_context(contextlib.closing(transport_of(pool, node)))
        # Report an unreachable node now, and not only at the first connection.
        transport.run(["true"], timeout_s=connect_timeout)
        for local, remote in ports:
            on_ready(ForwardedPort(host=host, local=local, remote=remote, node=node.name))
        for listener, connection in _connections(list(listeners), lambda: _check_attempt(client.store.find(record.uuid), one)):
            arguments = (transport, listeners[listener][1], connection, connect_timeout, client.notify)
            threading.Thread(target=_serve, args=arguments, name=f"port {listeners[listener][0]}", daemon=True).start()


def _running(record: WorkflowRecord, name: str) -> TaskRecord:
    """Return a running task. Raises ``WorkflowEnded`` if it has ended, and ``InputError`` if it is not running yet."""
    ((_, task),) = choose_tasks(record, [name])
    if task.state.is_final:
        raise WorkflowEnded(f"{task.name} has ended: {task.status}")
    if task.state not in (State.RUNNING, State.STOPPING) or task.node is None:
        raise InputError(f"{task.name} is not running yet: {task.status}", hint=f"details: distflow workflow query {record.id}")
    return task


def _check_attempt(record: WorkflowRecord, forwarded: TaskRecord) -> None:
    """Raise an error as ``_running`` does, and also ``InputError`` if a newer attempt of the task runs."""
    task = _running(record, forwarded.name)
    if (task.node, task.attempt) != (forwarded.node, forwarded.attempt):
        hint = f"run the command again to forward the ports to {task.node}"
        raise InputError(f"the attempt of {task.name} on {forwarded.node} has ended; a new one runs on {task.node}", hint=hint)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        hint = "name an address of this machine, such as `localhost`" if is_host else "use another local port"
        raise InputError(f"cannot listen on port {port} of {host}: {error.strerror or error}", hint=hint) from None


def _connections(listeners: list[socket.socket], check: Callable[[], object]) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield pairs of a listener and a new connection.

    ``check`` is called after each 2 s without a connection, and for a connection if the last call was at least 2 s ago.
    ``check`` may raise an error to stop.
    """
    checked_at = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            selector.register(listener, selectors.EVENT_READ)
        while True:
            ready = selector.select(_CHECK_EVERY_S)
            if not ready or time.monotonic() - checked_at >= _CHECK_EVERY_S:
                check()
                checked_at = time.monotonic()
            for key, _ in ready:
                listener = next(one for one in listeners if one is key.fileobj)
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    yield listener, connection


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
