"""The backend for nodes that a cluster engine allocates: one allocation for each attempt of a group.

It requests allocations, waits for them, and runs gangs on their nodes as on plain machines (``MachinesBackend``). One thread
requests and releases allocations, and queries the states of all allocations at once. A program that gets SIGTERM does not
know that its job was preempted. Therefore, the engine's reason for the end of an allocation replaces its nodes' explanations of
failed tasks.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from distflow.backends.allocated.engine import (
    Allocation,
    AllocationRequest,
    AllocationState,
    Engine,
    Granted,
    NodeRequest,
    Over,
    QueryLimit,
    Queued,
    RequestRefused,
    host_of,
    node_name,
)
from distflow.backends.allocated.engines import open_engine
from distflow.backends.base import (
    NO_EXIT_CODES,
    Absent,
    AttemptKey,
    CheckpointRef,
    Ended,
    Leased,
    LeaseRefused,
    LeaseRequest,
    LeaseWaits,
    LogComplete,
    LogSink,
    NodeDown,
    NodeUp,
    Observation,
    Sink,
    Unanswered,
)
from distflow.backends.machines.backend import MachinesBackend
from distflow.backends.steady import now
from distflow.documents.quantities import seconds_text
from distflow.documents.requirements import Requirements
from distflow.errors import DistflowError, NodeUnreachable, StorageError
from distflow.lifecycle.states import Reason
from distflow.plan.credentials import TaskSecrets
from distflow.plan.model import BoundLaunch
from distflow.pools.model import Node, Pool
from distflow.protocol.ends import EndReason, code_of
from distflow.storage.base import Progress
from distflow.storage.credentials import Identity
from distflow.storage.task_data import Delivered, Delivery
from distflow.structs import replace
from distflow.transports.base import Transport

__all__ = ["AllocatedBackend", "open_backend"]

_FIRST_POLL_S = 0.3
"""Seconds from a request or another change to the next query. Further intervals grow, up to ``_QUEUED_POLL_S``."""
_QUEUED_POLL_S = 10.0
_HELD_POLL_S = 30.0
"""Seconds between two queries while no allocation waits: nodes report the ends of their tasks themselves."""
_RETRY_S = 10.0
"""The longest pause after a failed query or request to the engine, in seconds. Pauses begin with 1 s and double."""
_DOUBT_S = 60.0
"""Maximum seconds that a task's failure is held back until the engine reports the state of the allocation."""
_DOUBTFUL_POLL_S = 2.0
"""Seconds between two queries while a failure is held back."""
_UNANSWERED_S = 5.0
"""As ``_DOUBT_S``, while the engine does not answer."""
_ENDING_S = 10.0
"""Seconds in which an engine may still list an allocation as granted while it ends the processes with ``SIGTERM``."""
_RECOVERY_S = 20.0
"""Seconds for reading recorded ends of attempts on the login node after the end of their allocation."""
_POSSIBLY_CAUSED_BY_ENGINE = (
    EndReason.RUNNER_DIED, EndReason.KEEPER_DIED, EndReason.BOTH_DIED, EndReason.REBOOTED, EndReason.STOPPED,
)  # fmt: skip
"""A node's explanations of an end that the engine may have caused, because engines end processes with signals."""
_REQUESTS_AT_ONCE = 8
"""Maximum requests between two queries, so that many new gangs do not delay reports about other gangs."""
_CLOSE_S = 10.0
"""Seconds in which ``close`` tries to release allocations that are no longer needed."""
_LAST_S = 15.0
"""Additional seconds in which ``close`` waits for the last call to the engine."""


def open_backend(pool: Pool, *, blobs: Path, sink: Sink, logs: LogSink) -> AllocatedBackend:
    """Return the backend of a pool whose nodes an engine allocates."""
    return AllocatedBackend(pool, open_engine(pool), blobs=blobs, sink=sink, logs=logs)


class _AllocationRecord(Struct, kw_only=True):
    """An allocation that a gang needs, requested or not yet, and its known state."""

    allocation: Allocation
    request: LeaseRequest | None = None
    """The open lease request; ``None`` after it was answered."""
    id: str = ""
    """The engine's id; empty until the engine has accepted the request."""
    failures: int = 0
    """Number of failed tries to request it."""
    retry_at: float = 0.0
    """When to request it again (monotonic clock)."""
    nodes: Mapping[str, str] = field(default_factory=dict)
    """Task → node, as soon as the engine has granted it."""
    is_leasing: bool = False
    """Whether the nodes have got the lease request."""
    connects_until: float = 0.0
    """The time by which all nodes must be connected (monotonic clock); 0 before they are granted."""
    attempts: dict[AttemptKey, bool] = field(default_factory=dict)
    """Attempt on its nodes → whether its end was reported."""
    stopped: set[AttemptKey] = field(default_factory=set)
    """Attempts that distflow has stopped."""
    doubtful: dict[AttemptKey, tuple[float, Ended]] = field(default_factory=dict)
    """Attempt → time and report of its failure, held back until the engine reports the state of the allocation."""
    logged: set[AttemptKey] = field(default_factory=set)
    """Attempts in ``doubtful`` whose output is complete. ``LogComplete`` is held back until the failure is reported."""
    last_message: str = ""
    """The last reported reason for waiting."""
    over: Over | None = None
    """Its end, while recorded ends of its attempts are read."""
    recovers_until: float = 0.0
    """When to stop reading recorded ends (monotonic clock)."""
    recovered: set[AttemptKey] = field(default_factory=set)
    """Attempts whose records have been read completely."""


class AllocatedBackend:
    """Runs gangs on allocated nodes; see ``backends.base.Backend`` for the contract."""

    def __init__(self, pool: Pool, engine: Engine, *, blobs: Path, sink: Sink, logs: LogSink) -> None:
        """Create the backend, without connecting to the engine."""
        self._pool = pool
        self._engine = engine
        self._sink = sink
        self._machines = MachinesBackend(pool, blobs=blobs, sink=self._observe, logs=logs, open_transport=self._transport)
        self._changed = threading.Condition()
        """Guards everything below, and wakes the thread that uses the engine."""
        self._records: dict[Allocation, _AllocationRecord] = {}
        self._unwanted: dict[str, int | None] = {}
        """Id of an allocation to release → exit code of its gang; ``None`` if the gang did not end by itself."""
        self._is_releasing = False
        self._kept: Collection[Allocation] = ()
        self._ended: set[str] | None = None
        """Workflows whose leftover allocations must be found and released; ``None``: do not search."""
        self._up: set[str] = set()
        self._down: dict[str, NodeDown] = {}
        """Unreachable allocated node → the last report about it."""
        self._is_engine_away = False
        """Whether the engine did not answer, and no query of states has succeeded since."""
        self._pace = _Pace(engine.query_limit)
        self._is_closing = False
        self._closes_at = 0.0
        self._thread = threading.Thread(target=self._work, name=f"allocations of {pool.name}", daemon=True)
        self._thread.start()

    # Methods of the protocol `Backend`.

    def connect(self, nodes: Sequence[Node]) -> None:
        """Do nothing: nodes are connected when they are allocated."""

    def watch(self, keys: Sequence[AttemptKey]) -> None:
        """Observe attempts on allocated nodes, such as those that an earlier process started."""
        with self._changed:
            for key in keys:
                record = self._records.setdefault(_allocation_of(key), _AllocationRecord(allocation=_allocation_of(key)))
                _, record.id = host_of(key.node)
                record.nodes = {**record.nodes, key.task: key.node}
                record.attempts.setdefault(key, False)
            self._pace.hurry()
            self._changed.notify()
        self._machines.connect([self._pool.node(key.node) for key in keys])
        self._machines.watch(keys)

    def lease(self, request: LeaseRequest) -> None:
        """Request an allocation, then lease its nodes."""
        allocation = Allocation(workflow=request.workflow, group=request.group, attempt=request.attempt)
        with self._changed:
            record = self._records.setdefault(allocation, _AllocationRecord(allocation=allocation))
            record.request, record.is_leasing, record.last_message = request, False, ""
            self._lease_if_connected(record)  # the allocation has nodes already if they refused an earlier lease
            self._pace.hurry()
            self._changed.notify()

    def keep(
        self,
        gangs: Collection[AttemptKey],
        ended: Collection[str] | None = None,
        exit_codes: Mapping[AttemptKey, int] = NO_EXIT_CODES,
    ) -> None:
        """Release the allocations of all gangs that are not in ``gangs``, and leftover allocations of ``ended`` workflows."""
        kept = {_allocation_of(key) for key in gangs}
        codes = {_allocation_of(key): code for key, code in exit_codes.items()}
        with self._changed:
            self._kept = kept
            for allocation in [one for one in self._records if one not in kept]:
                record = self._records.pop(allocation)
                if record.id:
                    has_run = record.request is None and record.over is None
                    self._unwanted[record.id] = codes.get(allocation) if has_run else None
                elif record.failures:
                    self._find_leftovers([allocation.workflow])  # the answer to a request may have been lost
                self._drop(record)
            if ended is not None:
                self._find_leftovers(ended)
            self._changed.notify()

    def build_venv(self, key: AttemptKey, venv: Requirements) -> None:
        """Build the Python environment on an allocated node."""
        self._machines.build_venv(key, venv)

    def cancel_venv(self, key: AttemptKey) -> None:
        """Stop a ``build_venv`` that is no longer needed."""
        self._machines.cancel_venv(key)

    def prepare(self, key: AttemptKey, launch: BoundLaunch, secrets: TaskSecrets, stop_grace_s: float, memo: str = "") -> None:
        """Bring inputs, files, image and launch record to the node."""
        self._command(key, partial(self._machines.prepare, key, launch, secrets, stop_grace_s, memo))

    def start(self, key: AttemptKey) -> None:
        """Start a prepared attempt."""
        self._command(key, partial(self._machines.start, key))

    def stop(self, key: AttemptKey, *, grace_s: float, why: str) -> None:
        """Stop an attempt."""
        with self._changed:
            record = self._records.get(_allocation_of(key))
            if record is not None:
                record.stopped.add(key)
        self._command(key, partial(self._machines.stop, key, grace_s=grace_s, why=why))

    def release(self, key: AttemptKey) -> None:
        """Release the lease of an attempt that has not started. The allocation remains until the gang no longer needs it."""
        self._command(key, partial(self._machines.release, key))

    def collect(
        self,
        key: AttemptKey,
        checkpoint: CheckpointRef | None = None,
        place: str | None = None,
        *,
        for_nodes: bool = False,  # noqa: ARG002  the next gang gets other nodes, so outputs cannot stay on nodes
    ) -> None:
        """Copy the output of an ended attempt to this machine."""
        self._command(key, partial(self._machines.collect, key, checkpoint, place))

    def deliver(
        self, key: AttemptKey, delivery: Delivery, identity: Identity, halt: threading.Event, progress: Progress
    ) -> Delivered:
        """Let the node upload the output of an ended attempt."""
        try:
            return self._machines.deliver(key, delivery, identity, halt, progress)
        except KeyError:
            raise StorageError(f"{key.node} is no longer allocated") from None

    def is_releasing(self) -> bool:
        """Return whether allocations that are no longer needed are still being released."""
        with self._changed:
            return self._is_releasing or bool(self._unwanted)

    def close(self) -> None:
        """Release allocations that are no longer needed, and close all connections. Other allocations stay."""
        with self._changed:
            self._is_closing, self._closes_at = True, time.monotonic() + _CLOSE_S
            self._changed.notify()
        self._thread.join(_CLOSE_S + _LAST_S)
        self._machines.close()
        self._engine.close()

    # Observations of nodes.

    def _observe(self, report: Observation) -> None:
        with self._changed:
            if isinstance(report, NodeUp):
                if self._of_node(report.node) is None:
                    return  # its allocation has ended
                self._up.add(report.node)
                self._down.pop(report.node, None)
                self._sink(report)
                self._lease_if_connected(self._of_node(report.node))
            elif isinstance(report, NodeDown):
                self._node_down(report)
            elif isinstance(report, Leased | LeaseRefused):
                self._lease_answered(report)
            elif (
                isinstance(report, Ended | Absent | LogComplete) and (record := self._of_node(report.key.node)) and record.over
            ):
                self._recovered(record, report)
            elif isinstance(report, Ended):
                self._attempt_ended(report)
            elif (
                isinstance(report, LogComplete) and (record := self._of_node(report.key.node)) and report.key in record.doubtful
            ):
                record.logged.add(report.key)
            else:
                self._sink(report)

    def _node_down(self, report: NodeDown) -> None:
        self._up.discard(report.node)
        record = self._of_node(report.node)
        if record is None or record.over is not None:
            return  # its allocation has ended
        self._pace.hurry()
        self._changed.notify()
        if record.request is None:
            self._down[report.node] = replace(report, is_engine_away=self._is_engine_away)
            self._sink(self._down[report.node])
        elif report.needs_action:
            host, _ = host_of(report.node)
            self._refuse(record, {report.node: f"{host}: {report.error}"}, is_final=True)
        else:
            self._report_waiting(record, f"connecting to {host_of(report.node)[0]}: {report.error}")

    def _lease_answered(self, report: Leased | LeaseRefused) -> None:
        record = self._records.get(Allocation(workflow=report.workflow, group=report.group, attempt=report.attempt))
        if record is None:
            return  # the gang no longer needs it
        if isinstance(report, Leased) and record.request is not None:
            record.attempts = {_key(record, task): False for task in record.nodes}
        record.request, record.is_leasing = None, False
        self._sink(report)

    def _attempt_ended(self, report: Ended) -> None:
        record = self._records.get(_allocation_of(report.key))
        if record is None or record.attempts.get(report.key, True):
            self._sink(report)
        elif report.key not in record.stopped and _may_be_by_engine(report.end):
            record.doubtful.setdefault(report.key, (time.monotonic(), report))
            self._pace.hurry()
            self._changed.notify()
        else:
            record.attempts[report.key] = True
            self._sink(report)

    # The thread that uses the engine.

    def _work(self) -> None:
        failures, retry_at = 0, 0.0
        while True:
            with self._changed:
                self._wait(retry_at)
                if self._is_closing and not self._unwanted:
                    return
                self._report_old_failures()
                if time.monotonic() < retry_at:
                    continue
                unwanted, self._unwanted = self._unwanted, {}
                ended, self._ended = self._ended, None
                self._is_releasing = bool(unwanted)
            try:
                self._release(unwanted, ended)
                self._is_releasing = False
                if not self._is_closing:
                    self._request_due()
                    self._poll()
                failures = 0
            except DistflowError as error:
                failures += 1
                retry_at = time.monotonic() + _pause_s(failures)
                self._set_engine_away(True)
                with self._changed:
                    if self._is_closing and time.monotonic() > self._closes_at:
                        return
                    self._unwanted, self._is_releasing = unwanted | self._unwanted, False
                    if ended is not None:
                        self._find_leftovers(ended)
                    for record in self._records.values():
                        self._report_waiting(record, error.message)
                        self._report_failures(record, until=time.monotonic() - _UNANSWERED_S)
            except Exception:  # noqa: BLE001  without this thread, no allocation is requested or released
                self._is_releasing = False
                failures += 1
                retry_at = time.monotonic() + _pause_s(failures)
                sys.excepthook(*sys.exc_info())  # the traceback goes to the supervisor's log

    def _wait(self, retry_at: float) -> None:
        """Wait until work is due or the state has changed, and after a failure of the engine until ``retry_at``."""
        left_s, doubt_s = retry_at - time.monotonic(), self._doubt_ends_in_s()
        if left_s > 0:
            self._changed.wait(max(0.0, min(left_s, doubt_s)))
        elif not (self._unwanted or self._ended is not None or self._is_closing):
            next_s = min(self._next_in_s(), doubt_s)
            self._changed.wait(None if next_s == math.inf else max(0.0, next_s))

    def _set_engine_away(self, is_away: bool) -> None:
        """Record whether the engine is unreachable. If that has changed, report the unreachable nodes again."""
        with self._changed:
            if is_away == self._is_engine_away:
                return
            self._is_engine_away = is_away
            for node, report in self._down.items():
                self._down[node] = replace(report, at=now(), is_engine_away=is_away)
                self._sink(self._down[node])

    def _release(self, unwanted: Mapping[str, int | None], ended: Collection[str] | None) -> None:
        ids = list(unwanted)
        if ended is not None:
            found = self._engine.allocations()
            with self._changed:
                known, kept = {record.id for record in self._records.values()}, self._kept
            ours = {*ended, *(one.workflow for one in kept)}
            leftovers = (name for name, one in found.items() if one.workflow in ours and one not in kept and name not in known)
            ids += leftovers
        if ids:
            self._engine.release(ids, {name: code for name, code in unwanted.items() if code is not None})

    def _request_due(self) -> None:
        """Request at most ``_REQUESTS_AT_ONCE`` of the allocations that have not been requested."""
        with self._changed:
            due = [one for one in self._records.values() if one.request and not one.id and one.retry_at <= time.monotonic()]
        for record in due[:_REQUESTS_AT_ONCE]:
            request = record.request
            if request is None:
                continue
            try:
                found = self._engine.request(_wanted(record.allocation, request))
            except RequestRefused as error:
                with self._changed:
                    message = f"{error.message} ({error.hint})" if error.hint else error.message
                    self._refuse(record, {"": message}, is_final=True)
                continue
            except DistflowError as error:
                with self._changed:
                    record.failures += 1
                    record.retry_at = time.monotonic() + _pause_s(record.failures)
                    self._report_waiting(record, error.message)
                    if self._records.get(record.allocation) is not record:
                        self._find_leftovers([record.allocation.workflow])  # the canceled allocation may exist
                if isinstance(error, NodeUnreachable):
                    return
                continue
            notice = self._engine.notice(found)
            with self._changed:
                if notice:
                    self._report_waiting(record, notice)
                record.id = found
                if self._records.get(record.allocation) is not record:
                    self._unwanted[found] = None  # it was canceled meanwhile
                self._pace.hurry()

    def _poll(self) -> None:
        """Query the states of all allocations, if that is due."""
        with self._changed:
            for one in list(self._records.values()):
                if one.over is not None:
                    self._allocation_ended(one, one.over)
            queried = {one.id: one for one in self._records.values() if one.id and one.over is None}
            if not queried or self._due_in_s() > 0:
                return
            self._pace.begin()
            tasks = {name: tuple(one.request.nodes if one.request else one.nodes) for name, one in queried.items()}
            began = time.monotonic()
        states = self._engine.states(tasks)
        self._set_engine_away(False)
        with self._changed:
            for name, state in states.items():
                if self._records.get(queried[name].allocation) is queried[name]:
                    self._apply(queried[name], state, began)

    def _apply(self, record: _AllocationRecord, state: AllocationState, queried_at: float) -> None:
        if isinstance(state, Queued):
            message = state.why or "waits in the queue"
            if state.starts_at is not None:
                message += (
                    f"; expected start: {datetime.fromtimestamp(state.starts_at, timezone.utc).astimezone():%Y-%m-%d %H:%M}"
                )
            self._report_waiting(record, message)
        elif isinstance(state, Granted):
            self._granted(record, state, queried_at)
        else:
            self._allocation_ended(record, state)

    def _granted(self, record: _AllocationRecord, state: Granted, queried_at: float) -> None:
        # The allocation existed at the time of the query, so earlier failures were the tasks' own. But if SIGTERM ended a task,
        # the allocation may have been ending.
        self._report_failures(record, until=queried_at, terminated_until=queried_at - _ENDING_S)
        if record.request is None or record.is_leasing:
            return
        if not record.connects_until:
            record.connects_until = time.monotonic() + self._pool.start_barrier_s
            record.last_message = ""  # it described the wait for nodes
            record.nodes = {task: node_name(host, record.id) for task, host in state.hosts.items()}
            self._machines.connect([self._pool.node(name) for name in record.nodes.values()])
        if not self._lease_if_connected(record) and time.monotonic() > record.connects_until:
            away = [name for name in record.nodes.values() if name not in self._up]
            why = f"within {seconds_text(self._pool.start_barrier_s)} (`start_barrier`)"
            why += f": {record.last_message}" if record.last_message else ""
            self._refuse(record, {name: f"{host_of(name)[0]} did not answer {why}" for name in away}, is_final=False)

    def _allocation_ended(self, record: _AllocationRecord, state: Over) -> None:
        if record.request is not None:
            # Without a reason, the allocation probably ended after ``idle_release``, because this process was suspended or had
            # no connection. The gang may then request another allocation.
            is_final = state.is_failure or state.reason not in (None, Reason.PREEMPTED, Reason.NODE_LOST)
            reason = Reason.START_ERROR if state.reason is None else state.reason
            self._refuse(record, {"": state.message}, is_final=is_final, reason=reason)
            return
        record.over = state
        is_lost = not record.recovers_until and not all(record.attempts.values())
        if (state.reason is None or state.tasks_may_have_ended) and is_lost and self._engine.login_transport() is not None:
            self._recover(record)
        elif time.monotonic() >= record.recovers_until:
            self._finish(record, state)

    def _recover(self, record: _AllocationRecord) -> None:
        """Read unreported ends of attempts on the login node, which has them if it shares ``root``."""
        record.recovers_until = time.monotonic() + _RECOVERY_S
        names = tuple(record.nodes.values())
        self._up.difference_update(names)
        self._machines.drop(names)
        self._machines.connect([self._pool.node(name) for name in names])
        self._machines.watch([key for key, is_reported in record.attempts.items() if not is_reported])

    def _recovered(self, record: _AllocationRecord, report: Ended | Absent | LogComplete) -> None:
        """Handle a report of the agent on the login node.

        An end that the engine may have caused (``_POSSIBLY_CAUSED_BY_ENGINE`` or ``_was_killed``) is ignored. The agent on the
        login node also reports such an end if it cannot find the processes of an attempt, which ran on another machine.
        """
        if isinstance(report, Absent | LogComplete):
            record.recovered.add(report.key)
        elif EndReason.of(report.end.get("reason", EndReason.EXITED)) not in _POSSIBLY_CAUSED_BY_ENGINE and not _was_killed(
            record.over, report.end
        ):
            record.attempts[report.key] = True
            self._sink(report)
        if record.over is not None and record.recovered.issuperset(record.attempts):
            self._finish(record, record.over)

    def _finish(self, record: _AllocationRecord, state: Over) -> None:
        """Report the unreported ends of attempts of an ended allocation, and forget the allocation."""
        self._records.pop(record.allocation, None)
        # Attempts on the nodes that caused the end come first, because the first reported failure counts as the cause.
        for key, is_reported in sorted(record.attempts.items(), key=lambda one: host_of(one[0].node)[0] not in state.hosts):
            _, report = record.doubtful.get(key, (0.0, None))
            if not is_reported and (report is None or state.reason is not None or _was_killed(state, report.end)):
                end: dict[str, object] = dict(report.end) if report is not None else {}
                reason = Reason.NODE_LOST if state.reason is None else state.reason
                end |= {"reason": EndReason.ALLOCATION_OVER, "allocation": reason, "message": state.message}
                report = Ended(at=now(), key=key, end=end, clock=report.clock if report is not None else None)
            if not is_reported and report is not None:
                self._sink(report)
            self._sink(LogComplete(at=now(), key=key))
        self._drop(record)

    # Helpers. Their callers hold the lock, except those of `_command` and `_transport`.

    def _lease_if_connected(self, record: _AllocationRecord | None) -> bool:
        """Send the open lease request to the nodes of an allocation if all are connected. Returns whether it was sent."""
        if record is None or record.request is None or record.is_leasing or not record.nodes:
            return False
        if not self._up.issuperset(record.nodes.values()):
            return False
        record.is_leasing = True
        self._machines.lease(replace(record.request, nodes=record.nodes))
        return True

    def _refuse(
        self, record: _AllocationRecord, nodes: Mapping[str, str], *, is_final: bool, reason: Reason = Reason.START_ERROR
    ) -> None:
        """Answer the lease request with a refusal, and release the allocation. The next request creates another one."""
        self._records.pop(record.allocation, None)
        self._unwanted |= {record.id: None} if record.id else {}
        self._drop(record)
        self._sink(
            LeaseRefused(
                at=now(), workflow=record.allocation.workflow, group=record.allocation.group, attempt=record.allocation.attempt,
                nodes=nodes, is_final=is_final, reason=reason,
            )
        )  # fmt: skip
        self._changed.notify()

    def _report_waiting(self, record: _AllocationRecord, message: str) -> None:
        """Report why an open lease request waits, if the reason has changed."""
        if record.request is None or record.is_leasing or message == record.last_message:
            return
        record.last_message = message
        one = record.allocation
        self._sink(LeaseWaits(at=now(), workflow=one.workflow, group=one.group, attempt=one.attempt, message=message))

    def _drop(self, record: _AllocationRecord) -> None:
        """Disconnect from the nodes of an allocation."""
        nodes = {*(key.node for key in record.attempts), *(self._up.intersection(record.nodes.values()))}
        for name in nodes:
            self._sink(NodeDown(at=now(), pool=self._pool.name, node=name, error="its allocation has ended"))
        self._up.difference_update(record.nodes.values())
        for name in record.nodes.values():
            self._down.pop(name, None)
        self._machines.drop(tuple(record.nodes.values()))

    def _report_old_failures(self) -> None:
        for record in self._records.values():
            self._report_failures(record, until=time.monotonic() - _DOUBT_S)

    def _report_failures(self, record: _AllocationRecord, *, until: float, terminated_until: float = math.inf) -> None:
        """Report the failures in ``doubtful`` that were observed until the time ``until``.

        Those of tasks that ``SIGTERM`` ended are reported only if they were observed until ``terminated_until``, too.
        """
        for key, (at, report) in list(record.doubtful.items()):
            if at <= (min(until, terminated_until) if _was_terminated(report.end) else until):
                del record.doubtful[key]
                record.attempts[key] = True
                self._sink(report)
                if key in record.logged:
                    self._sink(LogComplete(at=now(), key=key))

    def _of_node(self, name: str) -> _AllocationRecord | None:
        return next((one for one in self._records.values() if name in one.nodes.values()), None)

    def _next_in_s(self) -> float:
        """Return the seconds until the next request or query if nothing changes; infinite if none is due."""
        times = [one.retry_at - time.monotonic() for one in self._records.values() if one.request and not one.id]
        if any(one.id for one in self._records.values()):
            times.append(self._due_in_s())
        if any(one.over is not None for one in self._records.values()):
            times.append(1.0)
        return min(times, default=math.inf)

    def _due_in_s(self) -> float:
        """Return the seconds until the next query."""
        is_queued = any(one.request is not None for one in self._records.values())
        most_s = _DOUBTFUL_POLL_S if any(one.doubtful for one in self._records.values()) else math.inf
        return self._pace.due_in_s(is_queued, most_s)

    def _doubt_ends_in_s(self) -> float:
        """Return the seconds until the oldest failure in ``doubtful`` must be reported; infinite if there is none."""
        times = [at for one in self._records.values() for at, _ in one.doubtful.values()]
        return min(times, default=math.inf) + _DOUBT_S - time.monotonic()

    def _find_leftovers(self, workflows: Iterable[str]) -> None:
        """Let the thread find and release leftover allocations of these workflows."""
        self._ended = {*(self._ended or ()), *workflows}

    def _command(self, key: AttemptKey, action: Callable[[], None]) -> None:
        """Send a command to a node, or report ``Unanswered`` if the node is unreachable."""
        with self._changed:
            is_up = key.node in self._up
        if is_up:
            try:
                action()
                return
            except KeyError:
                pass  # the allocation has just ended
        self._sink(Unanswered(at=now(), key=key))

    def _transport(self, node: Node) -> Transport:
        host, allocation_id = host_of(node.name)
        with self._changed:
            record = self._of_node(node.name)
        login = self._engine.login_transport() if record is not None and record.over is not None else None
        return self._engine.transport(allocation_id, host) if login is None else login


def _pause_s(failures: int) -> float:
    """Return the seconds until the next try to use the engine after this number of failures."""
    return float(min(_RETRY_S, 2.0 ** (failures - 1)))


class _Pace:
    """The times of queries: soon after a change, then at growing intervals, and never above the ``QueryLimit``."""

    def __init__(self, limit: QueryLimit) -> None:
        self._limit = limit
        self._last = time.monotonic()
        self._wait_s = _QUEUED_POLL_S
        self._allowed = limit.at_once
        self._counted_at = time.monotonic()
        self.is_urgent = False

    def hurry(self) -> None:
        """Query soon, because something has changed."""
        self._wait_s = _FIRST_POLL_S
        self.is_urgent = True

    def due_in_s(self, is_queued: bool, most_s: float = math.inf) -> float:
        """Return the seconds until the next query.

        ``is_queued``: whether an allocation waits. ``most_s``: the longest time between two queries.
        """
        wait_s = min(most_s, self._wait_s if is_queued or self.is_urgent else _HELD_POLL_S)
        lacking = max(0.0, 1.0 - self._allowed_now()) * self._limit.every_s
        return max(self._last + wait_s - time.monotonic(), lacking)

    def begin(self) -> None:
        """Count a query that begins now."""
        self._allowed, self._counted_at = self._allowed_now() - 1.0, time.monotonic()
        self._last = time.monotonic()
        # The more queries may follow each other quickly, the more slowly the interval grows.
        self._wait_s = min(self._wait_s * (1.0 + 2.0 / self._limit.at_once), _QUEUED_POLL_S)
        self.is_urgent = False

    def _allowed_now(self) -> float:
        return min(self._limit.at_once, self._allowed + (time.monotonic() - self._counted_at) / self._limit.every_s)


def _allocation_of(key: AttemptKey) -> Allocation:
    return Allocation(workflow=key.workflow, group=key.group, attempt=key.attempt)


def _key(record: _AllocationRecord, task: str) -> AttemptKey:
    one = record.allocation
    return AttemptKey(workflow=one.workflow, group=one.group, task=task, attempt=one.attempt, node=record.nodes[task])


def _may_be_by_engine(end: Mapping[str, Any]) -> bool:
    """Return whether the engine may have caused an end: a failure of the command, or an end that looks like a stop or a kill.

    The caller excludes attempts that distflow has stopped.
    """
    reason = EndReason.of(end.get("reason", EndReason.EXITED))
    return reason in _POSSIBLY_CAUSED_BY_ENGINE or (reason is EndReason.EXITED and end.get("exit_code") != 0)


def _was_terminated(end: Mapping[str, Any]) -> bool:
    """Return whether ``SIGTERM`` ended a task. Its processes got the signal, or its keeper, which then stopped the task."""
    is_stopped = EndReason.of(end.get("reason", EndReason.EXITED)) is EndReason.STOPPED
    return is_stopped or code_of(end.get("exit_code"), end.get("signal")) == 128 + signal.SIGTERM


def _was_killed(over: Over | None, end: Mapping[str, Any]) -> bool:
    """Return whether the engine seems to have killed a task because distflow's resident program failed on a node."""
    killed = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
    return over is not None and over.is_failure and code_of(end.get("exit_code"), end.get("signal")) in killed


def _wanted(allocation: Allocation, request: LeaseRequest) -> AllocationRequest:
    hosts = {name: host for names in request.excluded.values() for name in names if (host := name.rpartition("@")[0] or name)}
    return AllocationRequest(
        allocation=allocation,
        label=f"{request.workflow_id}/{request.group}",
        nodes=tuple(
            NodeRequest(
                task=task,
                gpus=request.gpus.get(task, 0),
                cpus=request.cpus.get(task, 0),
                memory=request.memory.get(task, 0),
                platform=request.platforms.get(task),
                excluded=tuple(hosts[name] for name in request.excluded.get(task, ())),
                image=request.images.get(task),
                mounts=request.mounts.get(task, ()),
            )
            for task in request.nodes
        ),
        time_limit_s=request.time_limit_s,
        margin_s=request.margin_s,
        priority=request.priority,
    )
