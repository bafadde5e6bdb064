"""The backend for plain machines: one agent per node, and the gang's lease across them.

It knows nodes, attempts and the agent protocol (``docs/agent-protocol.md``), and nothing of states or policy. Each node has one
connection (``connection``), which comes back by itself; this module spreads commands over them.
"""

from __future__ import annotations

import base64
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distflow.backends.base import (
    AttemptKey,
    CheckpointRef,
    LeaseRequest,
    LogSink,
    NotBrought,
    PrepareFailed,
    Released,
    Sink,
    Staging,
    StopAccepted,
    Unanswered,
)
from distflow.backends.machines.connection.node_connection import Connection, now
from distflow.backends.machines.leasing import GangLease
from distflow.backends.machines.transfer.collecting import Collector
from distflow.backends.machines.transfer.delivering import Deliverer
from distflow.backends.machines.transfer.pace import Pace
from distflow.backends.machines.transfer.staging import Blob
from distflow.errors import AgentError, DistflowError, NodeUnreachable, StorageError
from distflow.plan.credentials import GivenSecrets
from distflow.plan.model import BoundLaunch, Container, PlannedFile
from distflow.pools.model import Node, Pool
from distflow.shell import Secret, revealed
from distflow.storage.base import Progress
from distflow.storage.credentials import Identity
from distflow.storage.task_data import Delivered, Delivery, InputRequest, RelayRequired
from distflow.transports.base import Transport
from distflow.transports.loading import load_ssh
from distflow.transports.local import LocalTransport
from distflow.transports.ssh.config import SshDestination

__all__ = ["MachinesBackend", "open_backend", "transport_of"]

_PREPARE_THREADS = 32
_COLLECT_THREADS = 32
_INLINE = 64 << 10
"""Bytes up to which a file goes along with the launch; larger ones are staged, and kept on the node for the next time."""
_PLACING_S = 3600.0
"""For unpacking and copying what was staged; a node that is gone is noticed by its silence, long before."""
_TELL_S = 5.0
_PAUSE_S = 1.0


def open_backend(pool: Pool, *, blobs: Path, sink: Sink, logs: LogSink) -> MachinesBackend:
    """Return the backend of a pool of plain machines."""
    return MachinesBackend(pool, blobs=blobs, sink=sink, logs=logs)


class MachinesBackend:
    """Runs gangs on nodes through their agents; see ``backends.base.Backend`` for the contract."""

    def __init__(self, pool: Pool, *, blobs: Path, sink: Sink, logs: LogSink) -> None:
        """Connect to nothing yet."""
        self._pool = pool
        self._blobs = blobs
        self._sink = sink
        self._logs = logs
        self._connections: dict[str, Connection] = {}
        self._lock = threading.Lock()
        self._halts: dict[AttemptKey, threading.Event] = {}
        """Attempts that are being prepared, with the latest try; set when one is stopped or prepared anew meanwhile."""
        self._collector = Collector(blobs, sink, pool.node_lost_after_s)
        self._deliverer = Deliverer(pool.node_lost_after_s)
        self._workers = ThreadPoolExecutor(max_workers=_PREPARE_THREADS, thread_name_prefix="prepare")
        # Of their own: the outputs of one slow node may wait in line for hours, and a gang's start must not.
        self._collecting = ThreadPoolExecutor(max_workers=_COLLECT_THREADS, thread_name_prefix="collect")

    def connect(self, nodes: Sequence[Node]) -> None:
        """Hold connections to these nodes from now on."""
        for node in nodes:
            if node.name not in self._connections:
                connection = Connection(self._pool, node, transport_of(self._pool, node), self._sink, self._logs)
                self._connections[node.name] = connection
                connection.begin()

    def watch(self, keys: Sequence[AttemptKey]) -> None:
        """Observe these attempts of an earlier time, and mirror their output."""
        for key in keys:
            if key.node in self._connections:
                self._connections[key.node].watch(key)

    def lease(self, request: LeaseRequest) -> None:
        """Ask every node for its part; when one refuses, give the others back."""
        GangLease(request, self._connections, self._sink).begin()

    def prepare(self, key: AttemptKey, launch: BoundLaunch, secrets: GivenSecrets, stop_grace_s: float, memo: str = "") -> None:
        """Stage what is large, then write the launch record; in a thread, because that may take minutes.

        Nothing is heard any more of a try that is still under way: its connection has broken, or its lease is another one.
        """
        self._halt(key)
        halt = threading.Event()
        with self._lock:
            self._halts[key] = halt
        self._workers.submit(self._prepare, key, launch, secrets, stop_grace_s, memo, halt)

    def start(self, key: AttemptKey) -> None:
        """Start a prepared attempt; that it runs is told by its status."""

        def answered(answer: Mapping[str, Any] | DistflowError) -> None:
            if isinstance(answer, AgentError):
                self._refused(key, answer)
            elif isinstance(answer, DistflowError):
                self._sink(Unanswered(at=now(), key=key))

        self._send(key, "start", answered)

    def stop(self, key: AttemptKey, *, grace_s: float, why: str) -> None:
        """Begin the ladder; the end is told by the status."""
        self._halt(key)

        def answered(answer: Mapping[str, Any] | DistflowError) -> None:
            if isinstance(answer, DistflowError) and not (isinstance(answer, AgentError) and answer.kind == "not_found"):
                self._sink(Unanswered(at=now(), key=key))
            elif isinstance(answer, DistflowError):
                self._connections[key.node].report(key, {"phase": "absent"})
            else:
                self._sink(StopAccepted(at=now(), key=key, grace_s=grace_s))

        self._send(key, "stop", answered, grace_s=grace_s, why=why)

    def release(self, key: AttemptKey) -> None:
        """Give back a lease before the start."""
        self._halt(key)

        def answered(answer: Mapping[str, Any] | DistflowError) -> None:
            if isinstance(answer, DistflowError) and not (isinstance(answer, AgentError) and answer.kind == "not_found"):
                self._sink(Unanswered(at=now(), key=key))
            else:
                self._connections[key.node].forget(key)
                self._sink(Released(at=now(), key=key))

        self._send(key, "release", answered)

    def collect(
        self, key: AttemptKey, checkpoint: CheckpointRef | None = None, place: str | None = None, *, for_nodes: bool = False
    ) -> None:
        """Pack and fetch the output of an ended attempt, or a directory of it; in a thread, because that may take minutes."""
        stays, connection = self._is_everywhere if for_nodes else None, self._connections[key.node]
        if self._collector.begin(key, checkpoint):
            self._collecting.submit(self._collector.collect, connection, key, checkpoint, place, stays)

    def deliver(
        self, key: AttemptKey, delivery: Delivery, identity: Identity, halt: threading.Event, told: Progress
    ) -> Delivered:
        """Have its node bring the output of an ended attempt to its store."""
        return self._deliverer.deliver(self._connections[key.node], key, delivery, identity, halt, told)

    def close(self) -> None:
        """Let go of all connections."""
        self._collector.close()
        for connection in self._connections.values():
            connection.close()
        for workers in (self._workers, self._collecting):
            workers.shutdown(wait=False, cancel_futures=True)

    def _halt(self, key: AttemptKey) -> None:
        """Let go of what is on its way to an attempt that nobody wants any more."""
        with self._lock:
            halt = self._halts.pop(key, None)
        if halt is not None:
            halt.set()

    def _is_everywhere(self, digest: str, size: int) -> bool:
        """Whether every node of the pool sees a blob already; what goes along with a launch must be here all the same."""
        return size > _INLINE and all(one.has(digest, size) for one in self._connections.values())

    def _send(self, key: AttemptKey, op: str, answered: Any, **fields: Any) -> None:
        self._connections[key.node].watch(key)
        self._connections[key.node].send(op, answered, attempt=key.name, **fields)

    def _prepare(
        self, key: AttemptKey, launch: BoundLaunch, secrets: GivenSecrets, stop_grace_s: float, memo: str, halt: threading.Event
    ) -> None:
        connection = self._connections[key.node]
        try:
            self._bring(connection, key, launch, secrets, self._telling(key, halt))
            self._stage(connection, launch, self._telling(key, halt))
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
                    | self._content(file)
                    for file in launch.files
                ],
                "cwd": "work",
                "stop_grace_s": stop_grace_s,
                "shell_prelude": launch.setup,
                "folders": list(launch.folders),
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
            return  # it is being stopped, which is told by its end; or the next try tells what becomes of it
        except Exception as error:  # noqa: BLE001  nobody waits for this thread: without an answer, the gang would wait
            if not halt.is_set():
                self._not_prepared(key, error, halt)
        else:
            if not halt.is_set():
                connection.report(key, {"phase": "prepared"})
        finally:
            with self._lock:
                if self._halts.get(key) is halt:
                    del self._halts[key]

    def _not_prepared(self, key: AttemptKey, error: Exception, halt: threading.Event) -> None:
        if isinstance(error, NodeUnreachable):
            # The next try follows at once: an sshd that is being restarted refuses connections without any delay.
            halt.wait(_PAUSE_S)
            self._sink(Unanswered(at=now(), key=key))
        elif isinstance(error, _Relay):
            self._sink(NotBrought(at=now(), key=key, number=error.number, why=error.why))
        elif isinstance(error, StorageError):
            self._sink(PrepareFailed(at=now(), key=key, message=f"an input cannot be fetched: {error}", is_data=True))
        elif isinstance(error, AgentError):
            self._refused(key, error)
        elif isinstance(error, DistflowError | OSError):
            self._sink(PrepareFailed(at=now(), key=key, message=str(error)))
        else:
            self._sink(PrepareFailed(at=now(), key=key, message=f"unexpected error: {error!r}"))
            sys.excepthook(type(error), error, error.__traceback__)  # the traceback goes to the supervisor's log

    def _gang(self, launch: BoundLaunch, secrets: GivenSecrets) -> dict[str, Any] | None:
        if launch.gang is None or secrets.token is None:
            return None
        return asdict(launch.gang) | {"token": secrets.token.reveal(), "grace_s": self._pool.peer_failed_grace_s}

    def _bring(
        self, connection: Connection, key: AttemptKey, launch: BoundLaunch, secrets: GivenSecrets, told: Progress
    ) -> None:
        """Have the node fetch the inputs that it can fetch by itself."""
        for one in launch.brings:
            identity = secrets.stores.get(one.number)
            if identity is None:
                raise _Relay(one.number, "no node may be told the credentials any more")
            arrival = InputRequest(url=one.url, regex=one.regex, dataset=one.dataset)
            try:
                connection.bring(key, arrival, one.path, identity, told)
            except RelayRequired as why:
                raise _Relay(one.number, str(why)) from None

    def _telling(self, key: AttemptKey, halt: threading.Event) -> Progress:
        """Return what takes how many bytes are there, and of how many; it ends the transfer of what nobody wants any more."""
        pace = Pace()

        def told(done: int, total: int) -> None:
            if halt.is_set():
                raise _Unwanted
            rate = pace.due(done)
            if rate is not None:
                self._sink(Staging(at=now(), key=key, sent=done, total=total, bytes_per_s=rate))

        return told

    def _stage(self, connection: Connection, launch: BoundLaunch, told: Progress) -> None:
        blobs = {
            file.blob: Blob(digest=file.blob, path=self._blobs / file.blob, size=file.size)
            for file in launch.files
            if file.blob is not None and file.size > _INLINE
        }
        if blobs:
            connection.stage(list(blobs.values()), told)

    def _pull(
        self,
        connection: Connection,
        key: AttemptKey,
        launch: BoundLaunch,
        container: Container,
        login: tuple[str, Secret] | None,
    ) -> None:
        """Have the task's image on its node; it is told that this goes on, as nobody knows how far it is."""
        pulled = threading.Event()

        def tell() -> None:
            while not pulled.wait(_TELL_S):
                self._sink(Staging(at=now(), key=key, sent=0, total=0, bytes_per_s=0.0, image=container.image))

        threading.Thread(target=tell, name=f"image of {key.name}", daemon=True).start()
        try:
            env, path = dict(launch.environment), connection.path_prepend()
            given = {"login": {"registry": login[0], "auth": login[1].reveal()}} if login else {}
            connection.request("pull", timeout_s=_PLACING_S, container=asdict(container), env=env, path_prepend=path, **given)
        finally:
            pulled.set()

    def _content(self, file: PlannedFile) -> dict[str, str]:
        """Return what a file's content is: filled in here, small enough to go along, or a blob that was staged."""
        if file.blob is None:
            return {"text": file.text or ""}
        if file.size <= _INLINE:
            return {"data": base64.b64encode((self._blobs / file.blob).read_bytes()).decode()}
        return {"blob": file.blob}

    def _refused(self, key: AttemptKey, error: AgentError) -> None:
        if error.kind == "not_found":
            # Its pair gave up waiting, or was killed: the lease is lost.
            self._connections[key.node].report(key, {"phase": "absent"})
        elif error.kind != "conflict":  # it has ended, which its status tells, and why: that may be nobody's fault
            is_image = error.kind == "image_pull"
            self._sink(PrepareFailed(at=now(), key=key, message=error.message, is_image=is_image))


class _Unwanted(Exception):
    """The attempt whose files are on their way is being stopped."""


class _Relay(Exception):
    """A node cannot fetch an input."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(number, why)
        self.number, self.why = number, why


def transport_of(pool: Pool, node: Node) -> Transport:
    """Return the way to a node; nothing is connected yet."""
    if pool.backend == "local":
        return LocalTransport(node.name)
    return load_ssh()(
        node.name,
        SshDestination(
            host=node.host,
            port=node.port,
            user=node.user,
            identity_file=node.identity_file,
            host_key_policy=pool.host_key_policy,
            connect_timeout_s=pool.connect_timeout_s,
            config_file=pool.ssh_config,
        ),
    )
