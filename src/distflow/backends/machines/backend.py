"""The backend for plain machines: one agent per node, and gang leases across nodes.

It handles nodes, attempts and the agent protocol (``docs/agent-protocol.md``), but neither states nor policy. Each node has
one ``NodeConnection``, which reconnects by itself. This module passes each command to the ``NodeConnection`` of its node.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from distflow.backends.base import (
    NO_EXIT_CODES,
    AttemptKey,
    CheckpointRef,
    InputNotFetched,
    LeaseRequest,
    LogSink,
    PrepareFailed,
    Released,
    Sink,
    Staging,
    StopAccepted,
    Unanswered,
    VenvBuilt,
    VenvFailed,
    VenvProgress,
)
from distflow.backends.machines.checks.torch_search import TORCH_PROBE, why_no_torch
from distflow.backends.machines.connection.bootstrap import connect
from distflow.backends.machines.connection.destination import destination_of
from distflow.backends.machines.connection.link import AgentLink
from distflow.backends.machines.connection.node_connection import NodeConnection, now
from distflow.backends.machines.connection.transfers import Blob, TransferRate
from distflow.backends.machines.leasing import GangLease
from distflow.backends.machines.outputs import Collector, Deliverer
from distflow.documents.requirements import Requirements
from distflow.documents.text import plain, plain_lines, report_bug
from distflow.errors import AgentError, DistflowError, InputError, NodeUnreachable, StorageError
from distflow.plan.credentials import TaskSecrets
from distflow.plan.model import ATTEMPT_DIR, BoundLaunch, Container, PlannedFile, runs_torchrun
from distflow.pools.model import Node, Pool
from distflow.protocol.names import Operation
from distflow.shell import Secret, revealed
from distflow.storage.base import Progress
from distflow.storage.credentials import Identity
from distflow.storage.task_data import Delivered, Delivery, InputRequest, RelayRequired
from distflow.transports.base import Transport
from distflow.transports.local import LocalTransport
from distflow.transports.ssh import load_ssh

__all__ = ["MachinesBackend", "link_to", "open_backend", "transport_of"]

_PREPARE_THREADS = 32
_COLLECT_THREADS = 32
_BUILD_THREADS = 64
_INLINE = 64 << 10
"""Largest blob that the launch record contains, in bytes. Larger blobs are staged, and stay on the node for later attempts."""
_PLACING_S = 3600.0
"""Timeout for placing staged files or pulling an image. A dead node is detected long before, because its heartbeats stop."""
_REPORT_INTERVAL_S = 5.0
_PAUSE_S = 1.0
_TORCH_S = 30.0
_LONGEST_ERROR = 4000


def open_backend(pool: Pool, *, blobs: Path, sink: Sink, logs: LogSink) -> MachinesBackend:
    """Return the backend of a pool of plain machines."""
    return MachinesBackend(pool, blobs=blobs, sink=sink, logs=logs)


class MachinesBackend:
    """Runs gangs on nodes through their agents; see ``backends.base.Backend`` for the contract."""

    def __init__(
        self, pool: Pool, *, blobs: Path, sink: Sink, logs: LogSink, open_transport: Callable[[Node], Transport] | None = None
    ) -> None:
        """Create the backend without connecting. ``open_transport`` replaces ``transport_of``."""
        self._open_transport = open_transport or partial(transport_of, pool)
        self._pool = pool
        self._blobs = blobs
        self._sink = sink
        self._logs = logs
        self._connections: dict[str, NodeConnection] = {}
        self._lock = threading.Lock()
        self._halts: dict[AttemptKey, threading.Event] = {}
        """Events of attempts that are being prepared. An event is set if its attempt is stopped, released or prepared again."""
        self._torch_checked: set[tuple[str | None, ...]] = set()
        """Settings of tasks (see ``_check_torch``) with which the node's Python has torchrun, or may have it."""
        self._collector = Collector(blobs, sink, pool.node_lost_after_s)
        self._deliverer = Deliverer(pool.node_lost_after_s)
        self._builds: dict[AttemptKey, _VenvBuild] = {}
        """The Python environments that are being built."""
        self._building = ThreadPoolExecutor(max_workers=_BUILD_THREADS, thread_name_prefix="venv")
        self._workers = ThreadPoolExecutor(max_workers=_PREPARE_THREADS, thread_name_prefix="prepare")
        # Separate threads: the outputs of a slow node may wait for hours, and the start of a gang must not.
        self._collecting = ThreadPoolExecutor(max_workers=_COLLECT_THREADS, thread_name_prefix="collect")

    def connect(self, nodes: Sequence[Node]) -> None:
        """Connect to these nodes, and stay connected."""
        for node in nodes:
            if node.name not in self._connections:
                connection = NodeConnection(self._pool, node, self._open_transport(node), self._sink, self._logs)
                self._connections[node.name] = connection
                connection.begin()

    def watch(self, keys: Sequence[AttemptKey]) -> None:
        """Observe these existing attempts, and mirror their output."""
        for key in keys:
            if key.node in self._connections:
                self._connections[key.node].watch(key)

    def lease(self, request: LeaseRequest) -> None:
        """Request a lease from each node of the gang. If one refuses, release the others."""
        GangLease(request, self._connections, self._sink).begin()

    def keep(
        self,
        gangs: Collection[AttemptKey],
        ended: Collection[str] | None = None,
        exit_codes: Mapping[AttemptKey, int] = NO_EXIT_CODES,
    ) -> None:
        """Do nothing: this backend allocates no nodes."""

    def drop(self, names: Collection[str]) -> None:
        """Close the connections to nodes that are no longer part of the pool."""
        dropped = [connection for name in names if (connection := self._connections.pop(name, None)) is not None]
        for connection in dropped:
            # `close` waits for threads, and these may be waiting for the caller.
            threading.Thread(target=connection.close, name=f"close {connection.node.name}", daemon=True).start()

    def build_venv(self, key: AttemptKey, venv: Requirements) -> None:
        """Build the Python environment in a thread, because that may take minutes."""
        build = _VenvBuild()
        with self._lock:
            self._builds[key] = build
        self._building.submit(self._build_venv, key, venv, build)

    def cancel_venv(self, key: AttemptKey) -> None:
        """Stop a build by ending its connection."""
        with self._lock:
            build = self._builds.pop(key, None)
        if build is not None:
            build.cancel()

    def prepare(self, key: AttemptKey, launch: BoundLaunch, secrets: TaskSecrets, stop_grace_s: float, memo: str = "") -> None:
        """Fetch inputs, stage large files, pull the image, then write the launch record, in a thread: it may take minutes.

        Stops an earlier call for the same attempt that is still running (its connection broke, or it belongs to an earlier
        lease). That call then reports at most ``Unanswered``.
        """
        self._halt(key)
        halt, connection = threading.Event(), self._connections[key.node]
        with self._lock:
            self._halts[key] = halt
        self._workers.submit(self._prepare, connection, key, launch, secrets, stop_grace_s, memo, halt)

    def start(self, key: AttemptKey) -> None:
        """Start a prepared attempt. Its status reports the start."""

        def answered(connection: NodeConnection, answer: Mapping[str, Any] | DistflowError) -> None:
            if isinstance(answer, AgentError):
                self._refused(connection, key, answer)
            elif isinstance(answer, DistflowError):
                self._sink(Unanswered(at=now(), key=key))

        self._send(key, "start", answered)

    def stop(self, key: AttemptKey, *, grace_s: float, why: str) -> None:
        """Begin to stop an attempt. Its status reports the end."""
        self._halt(key)

        def answered(connection: NodeConnection, answer: Mapping[str, Any] | DistflowError) -> None:
            if isinstance(answer, DistflowError) and not (isinstance(answer, AgentError) and answer.kind == "not_found"):
                self._sink(Unanswered(at=now(), key=key))
            elif isinstance(answer, DistflowError):
                connection.report(key, {"phase": "absent"})
            else:
                self._sink(StopAccepted(at=now(), key=key, grace_s=grace_s))

        self._send(key, "stop", answered, grace_s=grace_s, why=why)

    def release(self, key: AttemptKey) -> None:
        """Release the lease of an attempt that has not started."""
        self._halt(key)

        def answered(connection: NodeConnection, answer: Mapping[str, Any] | DistflowError) -> None:
            if isinstance(answer, DistflowError) and not (isinstance(answer, AgentError) and answer.kind == "not_found"):
                self._sink(Unanswered(at=now(), key=key))
            else:
                connection.forget(key)
                self._sink(Released(at=now(), key=key))

        self._send(key, "release", answered)

    def collect(
        self, key: AttemptKey, checkpoint: CheckpointRef | None = None, place: str | None = None, *, for_nodes: bool = False
    ) -> None:
        """Pack and fetch an output, or a checkpoint's directory, in a thread, because that may take minutes."""
        stays, connection = self._is_everywhere if for_nodes else None, self._connections[key.node]
        if self._collector.begin(key, checkpoint):
            self._collecting.submit(self._collector.collect, connection, key, checkpoint, place, stays)

    def deliver(
        self, key: AttemptKey, delivery: Delivery, identity: Identity, halt: threading.Event, progress: Progress
    ) -> Delivered:
        """Let the node upload the output of an ended attempt to the store in ``delivery``."""
        return self._deliverer.deliver(self._connections[key.node], key, delivery, identity, halt, progress)

    def is_releasing(self) -> bool:
        """Return False: this backend allocates no nodes."""
        return False

    def close(self) -> None:
        """Close all connections."""
        self._collector.close()
        for connection in tuple(self._connections.values()):  # `drop` may run in another thread
            connection.close()
        for workers in (self._workers, self._collecting, self._building):
            workers.shutdown(wait=False, cancel_futures=True)

    def _halt(self, key: AttemptKey) -> None:
        """Cancel a running preparation of an attempt."""
        with self._lock:
            halt = self._halts.pop(key, None)
        if halt is not None:
            halt.set()

    def _is_everywhere(self, digest: str, size: int) -> bool:
        """Return whether every node of the pool has a blob.

        False for small blobs, which this machine must have, because it writes them into launch records.
        """
        return size > _INLINE and all(one.has(digest, size) for one in tuple(self._connections.values()))

    def _send(self, key: AttemptKey, op: Operation, answered: Any, **fields: Any) -> None:
        connection = self._connections[key.node]
        connection.watch(key)
        # `answered` gets the connection, because the node may be dropped before it answers.
        connection.send(op, partial(answered, connection), attempt=key.name, **fields)

    def _prepare(
        self, connection: NodeConnection, key: AttemptKey, launch: BoundLaunch, secrets: TaskSecrets, stop_grace_s: float,
        memo: str, halt: threading.Event,
    ) -> None:  # fmt: skip
        try:
            if launch.container is None and runs_torchrun(launch.argv):
                self._check_torch(connection, launch)
            self._fetch_inputs(connection, key, launch, secrets, self._progress_callback(key, halt))
            self._stage(connection, launch, self._progress_callback(key, halt))
            if launch.container is not None:
                self._pull(connection, key, launch, launch.container, secrets.login)
            record = {
                "argv": list(launch.argv),
                "env": dict(launch.environment),
                "secret_env": revealed(secrets.variables),
                "secret_files": [{"path": path, "files": revealed(files)} for path, files in secrets.directories.items()],
                "path_prepend": connection.path_prepend(),
                "python_path": list(launch.python_path),
                "path": list(launch.path),
                "files": [
                    {"path": file.path, "mode": file.mode, "is_tar": file.is_tar, "only": file.only, "within": file.within}
                    | ({"reusable": True} if file.reusable else {})
                    | self._content(file)
                    for file in launch.files
                ],
                "cwd": "work",
                "stop_grace_s": stop_grace_s,
                "shell_prelude": launch.setup,
                "venv": launch.venv,
                "folders": list(launch.folders),
                "output_link": launch.output_link,
                "mounts": list(launch.mounts),
                "container": None if launch.container is None else asdict(launch.container),
                "memory": launch.memory,
                "ranks": launch.ranks,
                "max_log": self._pool.max_log if launch.max_log is None else launch.max_log,
                "self_stop_after_s": self._pool.self_stop_after_s,
                "gang": self._gang(launch, secrets),
            }
            if halt.is_set():
                raise _Unwanted
            connection.request("prepare", timeout_s=_PLACING_S, attempt=key.name, launch=record, memo=memo)
        except _Unwanted:
            return  # the stop, the release or the next try reports the result
        except Exception as error:  # noqa: BLE001  without a report from this thread, the gang would wait forever
            if not halt.is_set():
                self._not_prepared(connection, key, error, halt)
        else:
            if not halt.is_set():
                connection.report(key, {"phase": "prepared"})
        finally:
            with self._lock:
                if self._halts.get(key) is halt:
                    del self._halts[key]

    def _build_venv(self, key: AttemptKey, venv: Requirements, build: _VenvBuild) -> None:
        reported_at = 0.0

        def progress(message: str, seconds: float) -> None:
            nonlocal reported_at
            build.check()
            if seconds - reported_at >= _REPORT_INTERVAL_S:
                reported_at = seconds
                self._sink(VenvProgress(at=now(), key=key, message=plain(message), seconds=seconds))

        try:
            build.check()  # it may have been canceled while it waited for a thread
            if (connection := self._connections.get(key.node)) is None:
                raise NodeUnreachable(key.node, "its allocation has ended")
            tool, seconds = connection.build_venv(venv, progress, build.opened)
        except _Unwanted:
            return
        except NodeUnreachable as error:
            build.halt.wait(_PAUSE_S)  # a restarting sshd refuses connections at once: do not retry in a busy loop
            seen: VenvFailed | VenvBuilt = VenvFailed(at=now(), key=key, message=error.message, is_final=False)
        except Exception as error:  # noqa: BLE001  without a report from this thread, the gang would wait forever
            if isinstance(error, AgentError):
                message = f"{key.node}: {plain_lines(error.detail[:_LONGEST_ERROR])}"
            elif isinstance(error, DistflowError):
                message = str(error)
            else:
                message = f"{key.node}: {report_bug(error)}"
            seen = VenvFailed(at=now(), key=key, message=message, is_final=True)
        else:
            seen = VenvBuilt(at=now(), key=key, tool=plain(tool), seconds=seconds)
        with self._lock:
            if self._builds.get(key) is build:
                del self._builds[key]
        if not build.halt.is_set():
            self._sink(seen)

    def _not_prepared(self, connection: NodeConnection, key: AttemptKey, error: Exception, halt: threading.Event) -> None:
        if isinstance(error, NodeUnreachable):
            # The supervisor retries at once, and a restarting sshd refuses at once: avoid a busy loop.
            halt.wait(_PAUSE_S)
            self._sink(Unanswered(at=now(), key=key))
        elif isinstance(error, _Relay):
            self._sink(InputNotFetched(at=now(), key=key, number=error.number, why=error.why))
        elif isinstance(error, StorageError):
            self._sink(PrepareFailed(at=now(), key=key, message=f"an input cannot be fetched: {error}", is_data=True))
        elif isinstance(error, AgentError):
            self._refused(connection, key, error)
        elif isinstance(error, DistflowError | OSError):
            self._sink(PrepareFailed(at=now(), key=key, message=str(error)))
        else:
            self._sink(PrepareFailed(at=now(), key=key, message=report_bug(error)))

    def _gang(self, launch: BoundLaunch, secrets: TaskSecrets) -> dict[str, Any] | None:
        if launch.gang is None or secrets.token is None:
            return None
        return asdict(launch.gang) | {"token": secrets.token.reveal(), "grace_s": self._pool.peer_failed_grace_s}

    def _fetch_inputs(
        self, connection: NodeConnection, key: AttemptKey, launch: BoundLaunch, secrets: TaskSecrets, progress: Progress
    ) -> None:
        """Let the node fetch its inputs. Raises ``_Relay`` for the first input that it cannot fetch itself."""
        for download in launch.downloads:
            identity = secrets.stores.get(download.number)
            if identity is None:
                raise _Relay(download.number, "its credentials are no longer available")
            request = InputRequest(url=download.url, regex=download.regex, dataset=download.dataset)
            try:
                connection.fetch_input(key, request, download.path, identity, progress)
            except RelayRequired as why:
                raise _Relay(download.number, str(why)) from None

    def _progress_callback(self, key: AttemptKey, halt: threading.Event) -> Progress:
        """Return a progress callback, which reports the transfer and ends it if the attempt is no longer wanted."""
        pace = TransferRate()

        def progress(done: int, total: int) -> None:
            if halt.is_set():
                raise _Unwanted
            rate = pace.due(done)
            if rate is not None:
                self._sink(Staging(at=now(), key=key, sent=done, total=total, bytes_per_s=rate))

        return progress

    def _stage(self, connection: NodeConnection, launch: BoundLaunch, progress: Progress) -> None:
        blobs = {
            file.blob: Blob(digest=file.blob, path=self._blobs / file.blob, size=file.size, name=file.shown)
            for file in launch.files
            if file.blob is not None and file.size > _INLINE
        }
        if blobs:
            connection.stage(list(blobs.values()), progress)

    def _pull(
        self,
        connection: NodeConnection,
        key: AttemptKey,
        launch: BoundLaunch,
        container: Container,
        login: tuple[str, Secret] | None,
    ) -> None:
        """Pull the task's image on its node, and report regularly that this continues: the progress is unknown."""
        pulled = threading.Event()

        def report() -> None:
            while not pulled.wait(_REPORT_INTERVAL_S):
                self._sink(Staging(at=now(), key=key, sent=0, total=0, bytes_per_s=0.0, image=container.image))

        threading.Thread(target=report, name=f"image of {key.name}", daemon=True).start()
        try:
            env, path = dict(launch.environment), connection.path_prepend()
            extra = {"login": {"registry": login[0], "auth": login[1].reveal()}} if login else {}
            connection.request("pull", timeout_s=_PLACING_S, container=asdict(container), env=env, path_prepend=path, **extra)
        finally:
            pulled.set()

    def _check_torch(self, connection: NodeConnection, launch: BoundLaunch) -> None:
        """Raise ``InputError`` if the node's Python certainly has no torchrun. A check that succeeded is not repeated.

        If the node refuses the check, the result is unknown, and the start will report the error.
        """
        environment = dict(launch.environment)
        checked = (
            launch.node,
            launch.argv[0],
            launch.setup,
            launch.venv,
            environment.get("PATH"),
            environment.get("PYTHONPATH"),
        )
        if checked in self._torch_checked or ATTEMPT_DIR in environment.get("PYTHONPATH", ""):
            return
        try:
            answer = connection.request(
                "run", argv=[launch.argv[0], "-c", TORCH_PROBE], env=environment, path_prepend=connection.path_prepend(),
                shell_prelude=launch.setup, venv=launch.venv, limit_s=_TORCH_S, timeout_s=_TORCH_S + 10.0,
            )  # fmt: skip
        except AgentError:
            return  # the start will report the error
        why = why_no_torch(answer, in_venv=launch.venv is not None)
        if why:
            raise InputError(f"torchrun cannot start: {why}")
        self._torch_checked.add(checked)

    def _content(self, file: PlannedFile) -> dict[str, str]:
        """Return a file's content: its text, its data as base64 if it is small, or a reference to a staged blob."""
        if file.blob is None:
            return {"text": file.text or ""}
        if file.size <= _INLINE:
            return {"data": base64.b64encode((self._blobs / file.blob).read_bytes()).decode()}
        return {"blob": file.blob}

    def _refused(self, connection: NodeConnection, key: AttemptKey, error: AgentError) -> None:
        if error.kind == "not_found":
            # Runner and keeper gave up waiting or were killed: the lease is lost.
            connection.report(key, {"phase": "absent"})
        elif error.kind != "conflict":  # in a conflict, the attempt has ended, and its status reports the reason
            is_image = error.kind == "image_pull"
            self._sink(PrepareFailed(at=now(), key=key, message=error.message, is_image=is_image))


class _Unwanted(Exception):
    """The attempt or the Python environment is no longer needed."""


class _VenvBuild:
    """The build of a Python environment in one thread, which another thread may cancel."""

    def __init__(self) -> None:
        self.halt = threading.Event()
        self._close: Callable[[], None] | None = None

    def check(self) -> None:
        """Raise ``_Unwanted`` if the build was canceled."""
        if self.halt.is_set():
            raise _Unwanted

    def opened(self, close: Callable[[], None]) -> None:
        """Store the function that closes the build's connection. Raises ``_Unwanted`` if the build was canceled."""
        self._close = close
        self.check()

    def cancel(self) -> None:
        """Cancel the build. Does not wait for its node, which may not respond."""
        self.halt.set()
        if self._close is not None:
            threading.Thread(target=self._close, name="cancel venv", daemon=True).start()


class _Relay(Exception):
    """This machine must relay an input, because the node cannot fetch it."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(number, why)
        self.number, self.why = number, why


@contextmanager
def link_to(pool: Pool, node: Node) -> Iterator[AgentLink]:
    """Connect to a node's agent for a few requests. Raises ``NodeError``."""
    transport = transport_of(pool, node)
    try:
        link = connect(transport, node.root, node.python, timeout_s=pool.connect_timeout_s)
        try:
            yield link
        finally:
            link.close()
    finally:
        transport.close()


def transport_of(pool: Pool, node: Node) -> Transport:
    """Return the transport to a node, without connecting to it."""
    if pool.backend == "local":
        return LocalTransport(node.name)
    if pool.is_allocated:
        from distflow.backends.allocated.engines import open_transport  # noqa: PLC0415  circular import

        return open_transport(pool, node)
    return load_ssh()(node.name, destination_of(pool, node))
