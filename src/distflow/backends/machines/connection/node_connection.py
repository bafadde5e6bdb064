"""One node's connection, which is kept open and reopened. It reports observations and passes output to the log sink.

One thread per node connects and waits. Messages of the agent arrive in the link's reader thread. The first ``hello`` of each
connection names all watched attempts, and the node answers with their statuses, so a broken connection loses nothing.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from distflow.backends.base import (
    Absent,
    AttemptKey,
    Ended,
    LogComplete,
    LogSink,
    NodeDown,
    NodeUp,
    OutputLost,
    OutputWaits,
    Prepared,
    Sink,
    Started,
    StopAccepted,
)
from distflow.backends.machines.connection.bootstrap import connect
from distflow.backends.machines.connection.link import AgentLink, now
from distflow.backends.machines.connection.reconnecting import ReconnectBackoff, heartbeat_s
from distflow.backends.machines.connection.training_address import path_prepend, training_address
from distflow.backends.machines.connection.transfers import (
    Blob,
    Fetched,
    build_venv_on_node,
    deliver_from_node,
    fetch_on_node,
    fetch_output,
    send_blobs,
)
from distflow.documents.requirements import Requirements
from distflow.documents.text import report_bug
from distflow.errors import (
    AuthenticationRefused,
    BootstrapFailed,
    DistflowError,
    HostKeyMismatch,
    HostKeyUnknown,
    NodeError,
    NodeUnreachable,
)
from distflow.lifecycle.clocks import Clock
from distflow.pools.model import Node, Pool
from distflow.protocol.names import Operation
from distflow.storage.base import Progress
from distflow.storage.credentials import Identity
from distflow.storage.task_data import Delivered, Delivery, InputRequest
from distflow.transports.base import Transport

__all__ = ["NodeConnection", "OnAnswer", "now"]

OnAnswer = Callable[[Mapping[str, Any] | DistflowError], None]

_LOG_KINDS = ("idx", "log", "samples")
"""Kinds of mirrored files. The index comes first, because it assigns the text to ranks."""
_ROOM_S = 5.0
"""Seconds between tries to resume output that this machine could not store."""
_END = "exit.json"


class NodeConnection:
    """The communication with one node."""

    def __init__(self, pool: Pool, node: Node, transport: Transport, sink: Sink, logs: LogSink) -> None:
        """Create the connection without connecting."""
        self.node = node
        self._pool = pool
        self._transport = transport
        self._sink = sink
        self._logs = logs
        self._lock = threading.Lock()
        self._staging = threading.Lock()
        self._fetching = threading.Lock()
        self._link: AgentLink | None = None
        self._facts: Mapping[str, Any] = {}
        self._watched: dict[str, AttemptKey] = {}
        self._streams: dict[int, tuple[AttemptKey, str]] = {}
        """Number of a stream → the attempt and the kind of file that it mirrors."""
        self._tailed: set[str] = set()
        """Attempts whose output is requested on this connection."""
        self._drained: dict[str, set[str]] = {}
        """Attempt → the parts of its data that are complete on this connection (``_mark_complete``)."""
        self._waiting: set[tuple[AttemptKey, str]] = set()
        """Output (attempt and kind of file) that stays on its node, because this machine could not store it."""
        self._losing: set[str] = set()
        """Attempts whose loss of output has been reported."""
        self._unwanted: set[AttemptKey] = set()
        """Leases to release as soon as the node answers."""
        self._next_stream = 0
        self._closing = threading.Event()
        self._broken = threading.Event()
        self._error = ""

    # Called by the backend.

    def begin(self) -> None:
        """Connect, and stay connected, in a thread."""
        threading.Thread(target=self._keep_connected, name=f"node {self.node.name}", daemon=True).start()

    def close(self) -> None:
        """Close the connection. Tasks on the node continue."""
        self._closing.set()
        self._broken.set()
        if self._link is not None:
            self._link.close()
        self._transport.close()

    def watch(self, key: AttemptKey) -> None:
        """Observe an attempt from now on. Request its status from the node if this connection does not watch it yet."""
        with self._lock:
            was_watched = key.name in self._watched
            self._watched[key.name] = key
            link = self._link
        if not was_watched and link is not None:
            self.send("watch", lambda answer: self._report_statuses(answer, [key]), watch=[key.name])

    def forget(self, key: AttemptKey) -> None:
        """Stop observing an attempt."""
        with self._lock:
            self._watched.pop(key.name, None)
            self._tailed.discard(key.name)

    def release_lease(self, key: AttemptKey, waits: Mapping[str, Any] | None = None) -> None:
        """Release the lease of an attempt that will not start. If the node does not answer, release it after a reconnection.

        If the attempt was requested again and is watched by then, the lease is kept. ``waits``: the resources on this node that
        its gang still waits for.
        """
        with self._lock:
            if (link := self._link) is None:
                self._unwanted.add(key)
        if link is not None:
            self._give_back(link, key, waits)

    def _give_back(self, link: AgentLink, key: AttemptKey, waits: Mapping[str, Any] | None = None) -> None:
        def answered(answer: Mapping[str, Any] | DistflowError) -> None:
            if isinstance(answer, NodeUnreachable):
                with self._lock:
                    self._unwanted.add(key)

        link.send("release", answered, attempt=key.name, **({"waits": waits} if waits else {}))

    def _give_back_all(self, link: AgentLink) -> None:
        with self._lock:
            unwanted, self._unwanted = {key for key in self._unwanted if key.name not in self._watched}, set()
        for key in unwanted:
            self._give_back(link, key)

    def send(self, op: Operation, answered: OnAnswer, **fields: Any) -> None:
        """Send a request to the agent.

        ``answered`` is called once, from another thread, or at once if there is no connection.
        """
        link = self._link
        if link is None:
            answered(NodeUnreachable(self.node.name, self._error or "not connected"))
            return
        link.send(op, answered, **fields)

    def request(self, op: Operation, **fields: Any) -> Mapping[str, Any]:
        """Send a request to the agent and wait for the answer. Raises ``AgentError`` or ``NodeUnreachable``."""
        link = self._link
        if link is None:
            raise NodeUnreachable(self.node.name, self._error or "not connected")
        return link.request(op, **fields)

    def stage(self, blobs: Sequence[Blob], progress: Callable[[int, int], None]) -> None:
        """Copy missing blobs to the node. ``progress`` gets the copied and the total bytes.

        Calls run one at a time, so that several tasks on a node send no file twice. Raises the errors of ``send_blobs``, and
        ``NodeError`` if neither the node nor this machine has a blob.
        """
        with self._staging:
            wanted = [{"hash": blob.digest, "size": blob.size} for blob in blobs]
            missing = self.request("stage", blobs=wanted)["missing"]
            lacking = [blob for blob in blobs if blob.digest in missing]
            if gone := [blob.name for blob in lacking if not blob.path.exists()]:
                raise NodeError(
                    self.node.name,
                    f"it does not have {gone[0]}, and neither does the machine of the supervisor",
                    hint="submit the workflow again",
                )
            if lacking:
                total = sum(blob.size for blob in lacking)
                send_blobs(
                    self._transport,
                    self.node.root,
                    self.node.python,
                    lacking,
                    timeout_s=self._pool.connect_timeout_s,
                    progress=lambda sent: progress(sent, total),
                )

    def has(self, digest: str, size: int) -> bool:
        """Return whether the node has a blob. False if it does not answer."""
        try:
            return not self.request("stage", blobs=[{"hash": digest, "size": size}])["missing"]
        except NodeError:
            return False

    def fetch(
        self, key: AttemptKey, blobs: Path, progress: Callable[[bool, int, int], None], place: str | None = None,
        stays: Callable[[str, int], bool] | None = None,
    ) -> Fetched:  # fmt: skip
        """Copy the output of an attempt, or its directory ``place``, to the blob store ``blobs``.

        ``progress`` and ``stays`` are those of ``fetch_output``, and so are the errors. Calls run one at a time.
        """
        with self._fetching:
            return fetch_output(
                self._transport,
                self.node.root,
                self.node.python,
                key.name,
                blobs,
                place=place,
                timeout_s=self._pool.connect_timeout_s,
                progress=progress,
                stays=stays,
            )

    def deliver(self, key: AttemptKey, delivery: Delivery, identity: Identity, progress: Progress) -> Delivered:
        """Let the node upload an attempt's output to the store in ``delivery``. Raises the errors of ``deliver_from_node``."""
        return deliver_from_node(
            self._transport, self.node.root, self.node.python, key.name, delivery, identity,
            environment=self.node.environment, timeout_s=self._pool.connect_timeout_s, progress=progress,
        )  # fmt: skip

    def fetch_input(self, key: AttemptKey, request: InputRequest, place: str, identity: Identity, progress: Progress) -> None:
        """Let the node fetch an input into a directory of the attempt. Raises the errors of ``fetch_on_node``."""
        fetch_on_node(
            self._transport, self.node.root, self.node.python, key.name, request, place, identity,
            environment=self.node.environment, timeout_s=self._pool.connect_timeout_s, progress=progress,
        )  # fmt: skip

    def build_venv(
        self, venv: Requirements, progress: Callable[[str, float], None], opened: Callable[[Callable[[], None]], None]
    ) -> tuple[str, float]:
        """Build a Python environment on the node, unless it exists. Returns and raises like ``build_venv_on_node``."""
        request = {
            "venv": venv.digest(self.node.environment), "file": venv.file, "lines": venv.lines, "constraints": venv.constraints,
            "env": dict(self.node.environment), "path_prepend": self.path_prepend(), "shell_prelude": self.node.setup,
            "limit_s": self._pool.venv_timeout_s,
        }  # fmt: skip
        return build_venv_on_node(
            self._transport,
            self.node.root,
            self.node.python,
            request,
            timeout_s=self._pool.connect_timeout_s,
            progress=progress,
            opened=opened,
        )

    @property
    def is_up(self) -> bool:
        """Whether the agent is connected, as far as is known."""
        return self._link is not None

    @property
    def gpu_ids(self) -> list[int]:
        """Return the GPUs of the node that may be leased."""
        return list(range(self.node.usable_gpus(self._facts.get("gpus")) or 0))

    @property
    def granted_gpus(self) -> list[int] | None:
        """Return the GPUs that the engine granted with the node, so that no lease is needed; ``None`` if no engine did."""
        if not self._pool.is_allocated:
            return None
        visible = self._facts.get("visible_gpus")
        if not isinstance(visible, str):
            return self.gpu_ids  # the engine hides all others
        named = visible.split(",") if visible else []
        # If GPUs are named by uuid, a task sees only these, and CUDA numbers them from 0.
        return [int(one) for one in named] if all(one.isdecimal() for one in named) else list(range(len(named)))

    @property
    def amounts(self) -> dict[str, int]:
        """Return the CPUs and the memory of the node that may be leased. Resources that are not configured are left out."""
        node, facts = self.node, self._facts
        usable = {
            "cpus": (node.cpus, node.usable_cpus(facts.get("cpus"))),
            "memory": (node.memory, node.usable_memory(facts.get("memory"))),
        }
        return {name: amount for name, (configured, amount) in usable.items() if configured is not None and amount is not None}

    def address(self) -> tuple[str, str]:
        """Return the node's address on the training network, and the interface that owns it (empty when not found)."""
        return training_address(self.node, self._transport, self._facts)

    def path_prepend(self) -> list[str]:
        """Return the first entries of the tasks' PATH: the directory of the configured Python, where a venv has its tools."""
        return path_prepend(self.node, self._facts)

    @property
    def clock(self) -> Clock | None:
        """Return the offset of the node's clock from this machine's; ``None`` without a connection or an answered ping."""
        return self._link.clock if self._link is not None else None

    def report(self, key: AttemptKey, status: Mapping[str, Any]) -> None:
        """Turn an attempt's status on its node into observations, and mirror the output of an attempt that has started."""
        phase, at, clock = status.get("phase"), now(), self.clock
        if phase == "absent":
            self.forget(key)
            self._sink(Absent(at=at, key=key))
        elif phase == "prepared":
            self._sink(Prepared(at=at, key=key))
        elif phase in ("running", "stopping", "ended"):
            self._tail(key)
            started, pid = status.get("started_at"), status.get("pid")
            if started is not None:  # the status of a short attempt may arrive only after its end
                directory = str(status.get("directory") or "")
                self._sink(Started(at=at, key=key, pid=pid, started_at=float(started), clock=clock, directory=directory))
            if status.get("loses_output") and key.name not in self._losing:
                self._losing.add(key.name)
                self._sink(OutputLost(at=at, key=key))
            if phase == "stopping":
                self._sink(StopAccepted(at=at, key=key))
            elif phase == "ended":
                end = dict(status.get("end") or {})
                self._sink(Ended(at=at, key=key, end=end, clock=clock, has_files=status.get("has_files")))
                self._mark_complete(key, _END)

    # Connecting and reconnecting.

    def _keep_connected(self) -> None:
        tries = ReconnectBackoff(self._pool.node_lost_after_s)
        while True:
            self._broken.clear()  # before the check: `close` sets `_closing` and then `_broken`
            if self._closing.is_set():
                return
            is_refused, needs_action, heard_at = False, False, None
            try:
                with self._connect(tries) as link:
                    began = time.monotonic()
                    self._greet(link)
                    while not self._broken.wait(_ROOM_S):
                        self._resume_waiting()
                silent_s = link.silent_s
                tries.restart(silent_s, time.monotonic() - began)
                heard_at = now() - silent_s
                if silent_s >= link.ping_s:
                    self._transport.hang_up()  # a dead connection would delay the next try
            except DistflowError as error:
                self._error, is_refused = _error_text(error), isinstance(error, AuthenticationRefused)
                needs_action = isinstance(error, AuthenticationRefused | HostKeyUnknown | HostKeyMismatch | BootstrapFailed)
                if isinstance(error, NodeUnreachable):
                    self._transport.hang_up()
            except Exception as error:  # noqa: BLE001  only this thread reconnects
                self._error = report_bug(error)
            with self._lock:
                self._link = None
                self._streams.clear()
                self._tailed.clear()
                self._drained.clear()
                self._waiting.clear()
            if self._closing.is_set():
                return
            self._sink(
                NodeDown(
                    at=now(), pool=self._pool.name, node=self.node.name, error=self._error, since=heard_at,
                    needs_action=needs_action,
                )
            )  # fmt: skip
            self._closing.wait(tries.pause_s(is_refused=is_refused))

    def _connect(self, tries: ReconnectBackoff) -> closing[AgentLink]:
        """Start an agent. The caller's ``with`` block closes the link, whose pings would otherwise keep the agent alive.

        If this try still runs when the last try within ``node_lost_after`` must begin, it is aborted.
        """
        abort = None
        if (last_try_in_s := tries.last_try_in_s) is not None:
            abort = threading.Timer(last_try_in_s, self._transport.hang_up)
            abort.daemon = True
            abort.start()
        try:
            link = connect(
                self._transport, self.node.root, self.node.python, timeout_s=self._pool.connect_timeout_s,
                ping_s=heartbeat_s(self._pool.ping_s, self._pool.node_lost_after_s), on_event=self._pushed,
                on_close=self._closed,
            )  # fmt: skip
        finally:
            if abort is not None:
                abort.cancel()
        return closing(link)

    def _greet(self, link: AgentLink) -> None:
        with self._lock:
            keys = list(self._watched.values())
        self._give_back_all(link)  # before the node is reported as up and the same lease is requested again
        watched = [key.name for key in keys]
        link.request(
            "hello", then=lambda answer: self._welcomed(link, answer, keys), watch=watched, lease_dir=self.node.lease_dir
        )

    def _welcomed(self, link: AgentLink, answer: Mapping[str, Any], keys: list[AttemptKey]) -> None:
        """Handle the answer to the first ``hello`` of a connection, which named the watched attempts ``keys``."""
        facts = self._facts = answer["facts"]
        self._link = link
        self._give_back_all(link)  # leases that became unwanted during the hello
        self._sink(
            NodeUp(
                at=now(), pool=self._pool.name, node=self.node.name, gpus=facts.get("gpus"), cpus=facts.get("cpus"),
                memory=facts.get("memory"), platform=self.node.platform,
                lease_directory_id=str(facts.get("machine") or ""),
            )
        )  # fmt: skip
        self._report_statuses(answer, keys)
        with self._lock:
            late = [key for key in self._watched.values() if key not in keys]
        if late:
            self.send("watch", lambda answer: self._report_statuses(answer, late), watch=[key.name for key in late])

    def _report_statuses(self, answer: Mapping[str, Any] | DistflowError, keys: list[AttemptKey]) -> None:
        if isinstance(answer, DistflowError):
            return
        for key in keys:
            self.report(key, answer["attempts"].get(key.name) or {"phase": "absent"})

    def _closed(self, error: DistflowError | None) -> None:
        self._error = _error_text(error) if error is not None else "closed"
        with self._lock:
            self._link = None
        self._broken.set()

    # Events of the agent.

    def _pushed(self, event: Mapping[str, Any]) -> None:
        kind = event.get("event")
        if kind in ("status", "beat"):
            with self._lock:
                key = self._watched.get(event["attempt"])
            if key is not None and kind == "status":
                self.report(key, event["status"])
            elif key is not None:
                self._logs.record_heartbeat(key, now() - event["age_s"])
        elif kind == "data":
            self._take_output(event)
        elif kind == "eof":
            self._stream_ended(event)

    def _tail(self, key: AttemptKey) -> None:
        with self._lock:
            if key.name in self._tailed or self._link is None:
                return
            self._tailed.add(key.name)
        for kind in _LOG_KINDS:
            self._begin_stream(key, kind)

    def _begin_stream(self, key: AttemptKey, kind: str) -> None:
        with self._lock:
            self._next_stream += 1
            stream = self._next_stream
            self._streams[stream] = (key, kind)
        file, offset = self._logs.resume_position(key, kind)
        self.send("tail", lambda _: None, stream=stream, attempt=key.name, file=file, offset=offset)

    def _take_output(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            source = self._streams.get(event["stream"])
        if source is None:
            return
        data = base64.b64decode(event["data"])
        try:
            self._logs.write(source[0], event["file"], event["offset"], data)
        except OSError:  # no room, or a disk error
            self._wait_for_room(event["stream"], source)
            return
        link = self._link
        if link is not None:
            link.credit(event["stream"], len(data))

    def _wait_for_room(self, stream: int, source: tuple[AttemptKey, str]) -> None:
        """Leave the rest of an output on its node for a while. Other output continues."""
        with self._lock:
            is_first = not self._waiting
            self._waiting.add(source)
            self._streams.pop(stream, None)
        self.send("untail", lambda _: None, stream=stream)
        if is_first:
            self._sink(OutputWaits(at=now(), key=source[0]))

    def _resume_waiting(self) -> None:
        with self._lock:
            waiting = list(self._waiting) if self._logs.has_room() else []
            self._waiting.difference_update(waiting)
        for key, kind in waiting:
            self._begin_stream(key, kind)

    def _stream_ended(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            source = self._streams.pop(event["stream"], None)
        if source is not None and self._mark_complete(*source) >= set(_LOG_KINDS):
            self._sink(LogComplete(at=now(), key=source[0]))

    def _mark_complete(self, key: AttemptKey, what: str) -> set[str]:
        """Record that a part of an attempt's data is complete on this connection, and return all complete parts.

        An attempt with all parts is no longer watched, so that later ``hello`` requests do not name it.
        """
        with self._lock:
            complete = self._drained.setdefault(key.name, set())
            complete.add(what)
            if complete >= {_END, *_LOG_KINDS}:
                del self._drained[key.name]
                self._watched.pop(key.name, None)
                self._tailed.discard(key.name)
            return complete


def _error_text(error: DistflowError) -> str:
    """Return the error, and its remedy in parentheses, without the node's name. A remedy may have several lines."""
    return f"{error.detail} ({error.hint})" if error.hint else error.detail
