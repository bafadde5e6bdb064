"""The backend for nodes that a cluster engine allocates: one allocation for each attempt of a group.

It requests allocations, waits for them, and runs gangs on their nodes as on plain machines (``MachinesBackend``). One thread
talks to the engine: it requests, asks for the states of all allocations with one question, and releases. The engine's word
about the end of an allocation takes the place of what its nodes saw: a program that gets SIGTERM does not know that its job was
preempted.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from distflow.backends.allocated.engine import (
    Allocation,
    AllocationRequest,
    AllocationState,
    Engine,
    Granted,
    NodeRequest,
    Over,
    QuestionLimit,
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
from distflow.documents.requirements import Requirements
from distflow.errors import DistflowError, NodeUnreachable, StorageError
from distflow.lifecycle.states import Reason
from distflow.plan.credentials import GivenSecrets
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
"""Seconds from a request to the first question about it. Each further question comes later, up to ``_QUEUED_POLL_S``."""
_QUEUED_POLL_S = 10.0
_HELD_POLL_S = 30.0
"""Seconds between two questions while no allocation waits: nodes report the end of their tasks themselves."""
_RETRY_S = 10.0
"""The longest time until an engine that could not be asked is asked again, in seconds. It begins with 1 s and doubles."""
_DOUBT_S = 60.0
"""Seconds that the failure of a task waits at most for the engine's word about its allocation."""
_DOUBTFUL_POLL_S = 2.0
_UNANSWERED_S = 5.0
"""The same while the engine cannot be asked."""
_RECOVERY_S = 20.0
"""Seconds in which the ends of attempts are looked for on the login node after the end of their allocation."""
_GUESSED = (
    EndReason.RUNNER_DIED, EndReason.KEEPER_DIED, EndReason.BOTH_DIED, EndReason.REBOOTED, EndReason.STOPPED,
)  # fmt: skip
"""How a node explains an end that the engine may have caused: it stops processes by signals, and kills those that remain."""
_REQUESTS_AT_ONCE = 8
"""Requests between two questions, so that many new gangs do not delay news about the others."""
_CLOSE_S = 10.0
"""Seconds in which ``close`` tries to release what is no longer wanted."""
_LAST_S = 15.0


def open_backend(pool: Pool, *, blobs: Path, sink: Sink, logs: LogSink) -> AllocatedBackend:
    """Return the backend of a pool whose nodes an engine allocates."""
    return AllocatedBackend(pool, open_engine(pool), blobs=blobs, sink=sink, logs=logs)


@dataclass(slots=True, kw_only=True)
class _Held:
    """An allocation that was requested, and what is known of it."""

    allocation: Allocation
    request: LeaseRequest | None = None
    """The open lease request; ``None`` after it was answered."""
    id: str = ""
    """The engine's id; empty until the engine has accepted it."""
    failures: int = 0
    """How often the engine could not accept the request yet."""
    retry_at: float = 0.0
    """When it is asked again."""
    nodes: Mapping[str, str] = field(default_factory=dict)
    """Task → node, as soon as the engine has granted it."""
    is_leasing: bool = False
    """Whether the nodes have been asked for the lease."""
    connects_until: float = 0.0
    """The time by which all nodes must be connected."""
    attempts: dict[AttemptKey, bool] = field(default_factory=dict)
    """Attempts on its nodes, and whether their end was reported."""
    stopped: set[AttemptKey] = field(default_factory=set)
    """Attempts that were to be stopped."""
    doubtful: dict[AttemptKey, tuple[float, Ended]] = field(default_factory=dict)
    """Failures that wait for the engine's word, each with the time at which it was seen."""
    logged: set[AttemptKey] = field(default_factory=set)
    """Those whose complete output is here, which is reported after the failure."""
    said: str = ""
    """The last reason for waiting that was reported."""
    over: Over | None = None
    """How it ended, while the ends of its attempts are looked for."""
    recovers_until: float = 0.0
    """How long they are looked for."""
    recovering: set[AttemptKey] = field(default_factory=set)
    """Those about which nothing more will be found."""


class AllocatedBackend:
    """Runs gangs on allocated nodes; see ``backends.base.Backend`` for the contract."""

    def __init__(self, pool: Pool, engine: Engine, *, blobs: Path, sink: Sink, logs: LogSink) -> None:
        """Create the backend. The engine is not asked before there is something to ask."""
        self._pool = pool
        self._engine = engine
        self._sink = sink
        self._machines = MachinesBackend(pool, blobs=blobs, sink=self._seen, logs=logs, open_transport=self._transport)
        self._changed = threading.Condition()
        """Guards everything below, and wakes the thread that talks to the engine."""
        self._held: dict[Allocation, _Held] = {}
        self._unwanted: dict[str, int | None] = {}
        """Ids of allocations to release, each with the exit code of its gang; ``None`` if the gang did not end by itself."""
        self._is_releasing = False
        self._kept: Collection[Allocation] = ()
        self._ended: set[str] | None = None
        """Workflows whose leftover allocations are to be found and released; ``None``: none are to be found."""
        self._up: set[str] = set()
        self._down: dict[str, NodeDown] = {}
        """Allocated nodes that are unreachable, as last reported."""
        self._is_engine_away = False
        """Whether the last question to the engine failed."""
        self._pace = _Pace(engine.question_limit)
        self._is_closing = False
        self._closes_at = 0.0
        self._thread = threading.Thread(target=self._work, name=f"allocations of {pool.name}", daemon=True)
        self._thread.start()

    # The protocol.

    def connect(self, nodes: Sequence[Node]) -> None:
        """Do nothing: nodes are connected when they are allocated."""

    def watch(self, keys: Sequence[AttemptKey]) -> None:
        """Observe attempts that an earlier process started."""
        with self._changed:
            for key in keys:
                held = self._held.setdefault(_allocation_of(key), _Held(allocation=_allocation_of(key)))
                _, held.id = host_of(key.node)
                held.nodes = {**held.nodes, key.task: key.node}
                held.attempts.setdefault(key, False)
            self._pace.hurry()
            self._changed.notify()
        self._machines.connect([self._pool.node(key.node) for key in keys])
        self._machines.watch(keys)

    def lease(self, request: LeaseRequest) -> None:
        """Request an allocation, then lease its nodes."""
        allocation = Allocation(workflow=request.workflow, group=request.group, attempt=request.attempt)
        with self._changed:
            held = self._held.setdefault(allocation, _Held(allocation=allocation))
            held.request, held.is_leasing, held.said = request, False, ""
            self._lease_if_connected(held)  # it already has nodes if an earlier lease was refused there
            self._pace.hurry()
            self._changed.notify()

    def keep(
        self,
        gangs: Collection[AttemptKey],
        ended: Collection[str] | None = None,
        exit_codes: Mapping[AttemptKey, int] = NO_EXIT_CODES,
    ) -> None:
        """Release all other allocations, and find those that ended workflows have left."""
        kept = {_allocation_of(key) for key in gangs}
        codes = {_allocation_of(key): code for key, code in exit_codes.items()}
        with self._changed:
            self._kept = kept
            for allocation in [one for one in self._held if one not in kept]:
                held = self._held.pop(allocation)
                if held.id:
                    has_run = held.request is None and held.over is None
                    self._unwanted[held.id] = codes.get(allocation) if has_run else None
                elif held.failures:
                    self._look_for([allocation.workflow])  # the answer to a request may have been lost
                self._drop(held)
            if ended is not None:
                self._look_for(ended)
            self._changed.notify()

    def build_venv(self, key: AttemptKey, venv: Requirements) -> None:
        """Build the Python environment on an allocated node."""
        self._machines.build_venv(key, venv)

    def cancel_venv(self, key: AttemptKey) -> None:
        """Stop a ``build_venv``."""
        self._machines.cancel_venv(key)

    def prepare(self, key: AttemptKey, launch: BoundLaunch, secrets: GivenSecrets, stop_grace_s: float, memo: str = "") -> None:
        """Copy files and launch record to the node."""
        self._do(key, partial(self._machines.prepare, key, launch, secrets, stop_grace_s, memo))

    def start(self, key: AttemptKey) -> None:
        """Start a prepared attempt."""
        self._do(key, partial(self._machines.start, key))

    def stop(self, key: AttemptKey, *, grace_s: float, why: str) -> None:
        """Stop an attempt."""
        with self._changed:
            held = self._held.get(_allocation_of(key))
            if held is not None:
                held.stopped.add(key)
        self._do(key, partial(self._machines.stop, key, grace_s=grace_s, why=why))

    def release(self, key: AttemptKey) -> None:
        """Release the lease of an attempt that has not started. The allocation remains until the gang no longer needs it."""
        self._do(key, partial(self._machines.release, key))

    def collect(
        self,
        key: AttemptKey,
        checkpoint: CheckpointRef | None = None,
        place: str | None = None,
        *,
        for_nodes: bool = False,  # noqa: ARG002  the next gang gets other nodes, so nothing stays on a node
    ) -> None:
        """Copy the output of an ended attempt here."""
        self._do(key, partial(self._machines.collect, key, checkpoint, place))

    def deliver(
        self, key: AttemptKey, delivery: Delivery, identity: Identity, halt: threading.Event, progress: Progress
    ) -> Delivered:
        """Let the node upload the output of an ended attempt."""
        try:
            return self._machines.deliver(key, delivery, identity, halt, progress)
        except KeyError:
            raise StorageError(f"{key.node} is no longer allocated") from None

    def is_releasing(self) -> bool:
        """Return whether allocations that are no longer wanted are still being released."""
        with self._changed:
            return self._is_releasing or bool(self._unwanted)

    def close(self) -> None:
        """Release what is no longer wanted, and close all connections. Other allocations stay."""
        with self._changed:
            self._is_closing, self._closes_at = True, time.monotonic() + _CLOSE_S
            self._changed.notify()
        self._thread.join(_CLOSE_S + _LAST_S)
        self._machines.close()
        self._engine.close()

    # What the nodes report.

    def _seen(self, seen: Observation) -> None:
        with self._changed:
            if isinstance(seen, NodeUp):
                if self._of_node(seen.node) is None:
                    return  # its allocation is over
                self._up.add(seen.node)
                self._down.pop(seen.node, None)
                self._sink(seen)
                self._lease_if_connected(self._of_node(seen.node))
            elif isinstance(seen, NodeDown):
                self._node_down(seen)
            elif isinstance(seen, Leased | LeaseRefused):
                self._lease_answered(seen)
            elif isinstance(seen, Ended | Absent | LogComplete) and (held := self._of_node(seen.key.node)) and held.over:
                self._recovered(held, seen)
            elif isinstance(seen, Ended):
                self._attempt_ended(seen)
            elif isinstance(seen, LogComplete) and (held := self._of_node(seen.key.node)) and seen.key in held.doubtful:
                held.logged.add(seen.key)
            else:
                self._sink(seen)

    def _node_down(self, seen: NodeDown) -> None:
        self._up.discard(seen.node)
        held = self._of_node(seen.node)
        if held is None or held.over is not None:
            return  # its allocation is over
        self._pace.hurry()
        self._changed.notify()
        if held.request is None:
            self._down[seen.node] = replace(seen, is_engine_away=self._is_engine_away)
            self._sink(self._down[seen.node])
        elif seen.needs_action:
            host, _ = host_of(seen.node)
            self._refuse(held, {seen.node: f"{host}: {seen.error}"}, is_final=True)
        else:
            self._say(held, f"connecting to {host_of(seen.node)[0]}: {seen.error}")

    def _lease_answered(self, seen: Leased | LeaseRefused) -> None:
        held = self._held.get(Allocation(workflow=seen.workflow, group=seen.group, attempt=seen.attempt))
        if held is None:
            return  # the gang no longer wants it
        if isinstance(seen, Leased) and held.request is not None:
            held.attempts = {_key(held, task): False for task in held.nodes}
        held.request, held.is_leasing = None, False
        self._sink(seen)

    def _attempt_ended(self, seen: Ended) -> None:
        held = self._held.get(_allocation_of(seen.key))
        if held is None or held.attempts.get(seen.key, True):
            self._sink(seen)
        elif seen.key not in held.stopped and _may_be_by_engine(seen.end):
            held.doubtful.setdefault(seen.key, (time.monotonic(), seen))
            self._pace.hurry()
            self._changed.notify()
        else:
            held.attempts[seen.key] = True
            self._sink(seen)

    # The thread that talks to the engine.

    def _work(self) -> None:
        failures, retry_at = 0, 0.0
        while True:
            with self._changed:
                self._wait(retry_at)
                if self._is_closing and not self._unwanted:
                    return
                self._give_up_doubts()
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
                        self._look_for(ended)
                    for held in self._held.values():
                        self._say(held, error.message)
                        self._believe(held, until=time.monotonic() - _UNANSWERED_S)
            except Exception:  # noqa: BLE001  only this thread asks the engine
                self._is_releasing = False
                failures += 1
                retry_at = time.monotonic() + _pause_s(failures)
                sys.excepthook(*sys.exc_info())  # the traceback goes to the supervisor's log

    def _wait(self, retry_at: float) -> None:
        """Wait until something has changed or is due. An engine that could not be asked is not asked before ``retry_at``."""
        left_s, doubt_s = retry_at - time.monotonic(), self._doubt_ends_in_s()
        if left_s > 0:
            self._changed.wait(max(0.0, min(left_s, doubt_s)))
        elif not (self._unwanted or self._ended is not None or self._is_closing):
            next_s = min(self._next_in_s(), doubt_s)
            self._changed.wait(None if next_s == math.inf else max(0.0, next_s))

    def _set_engine_away(self, is_away: bool) -> None:
        """Report unreachable nodes again if that changes what their silence means."""
        with self._changed:
            if is_away == self._is_engine_away:
                return
            self._is_engine_away = is_away
            for node, seen in self._down.items():
                self._down[node] = replace(seen, at=now(), is_engine_away=is_away)
                self._sink(self._down[node])

    def _release(self, unwanted: Mapping[str, int | None], ended: Collection[str] | None) -> None:
        ids = list(unwanted)
        if ended is not None:
            found = self._engine.allocations()
            with self._changed:
                known, kept = {held.id for held in self._held.values()}, self._kept
            ours = {*ended, *(one.workflow for one in kept)}
            left = (name for name, one in found.items() if one.workflow in ours and one not in kept and name not in known)
            ids += left
        if ids:
            self._engine.release(ids, {name: code for name, code in unwanted.items() if code is not None})

    def _request_due(self) -> None:
        """Request the allocations that have not been requested, some at a time."""
        with self._changed:
            due = [one for one in self._held.values() if one.request and not one.id and one.retry_at <= time.monotonic()]
        for held in due[:_REQUESTS_AT_ONCE]:
            request = held.request
            if request is None:
                continue
            try:
                found = self._engine.request(_wanted(held.allocation, request))
            except RequestRefused as error:
                with self._changed:
                    words = f"{error.message} ({error.hint})" if error.hint else error.message
                    self._refuse(held, {"": words}, is_final=True)
                continue
            except DistflowError as error:
                with self._changed:
                    held.failures += 1
                    held.retry_at = time.monotonic() + _pause_s(held.failures)
                    self._say(held, error.message)
                    if self._held.get(held.allocation) is not held:
                        self._look_for([held.allocation.workflow])  # it may exist although it was canceled
                if isinstance(error, NodeUnreachable):
                    return
                continue
            notice = self._engine.notice(found)
            with self._changed:
                if notice:
                    self._say(held, notice)
                held.id = found
                if self._held.get(held.allocation) is not held:
                    self._unwanted[found] = None  # it was canceled meanwhile
                self._pace.hurry()

    def _poll(self) -> None:
        """Ask for the states of all allocations, if that is due."""
        with self._changed:
            for one in list(self._held.values()):
                if one.over is not None:
                    self._over(one, one.over)
            asked = {one.id: one for one in self._held.values() if one.id and one.over is None}
            if not asked or self._due_in_s() > 0:
                return
            self._pace.begin()
            tasks = {name: tuple(one.request.nodes if one.request else one.nodes) for name, one in asked.items()}
            began = time.monotonic()
        states = self._engine.states(tasks)
        self._set_engine_away(False)
        with self._changed:
            for name, state in states.items():
                if self._held.get(asked[name].allocation) is asked[name]:
                    self._apply(asked[name], state, began)

    def _apply(self, held: _Held, state: AllocationState, asked_at: float) -> None:
        if isinstance(state, Queued):
            message = state.why or "waits in the queue"
            if state.starts_at is not None:
                message += (
                    f"; expected start: {datetime.fromtimestamp(state.starts_at, timezone.utc).astimezone():%Y-%m-%d %H:%M}"
                )
            self._say(held, message)
        elif isinstance(state, Granted):
            self._granted(held, state, asked_at)
        else:
            self._over(held, state)

    def _granted(self, held: _Held, state: Granted, asked_at: float) -> None:
        self._believe(held, until=asked_at)  # the allocation still existed then, so these tasks failed by themselves
        if held.request is None or held.is_leasing:
            return
        if not held.connects_until:
            held.connects_until = time.monotonic() + self._pool.start_barrier_s
            held.nodes = {task: node_name(host, held.id) for task, host in state.hosts.items()}
            self._machines.connect([self._pool.node(name) for name in held.nodes.values()])
        if not self._lease_if_connected(held) and time.monotonic() > held.connects_until:
            away = [name for name in held.nodes.values() if name not in self._up]
            self._refuse(held, {name: f"{name} did not answer ({held.said})" for name in away}, is_final=False)

    def _over(self, held: _Held, state: Over) -> None:
        if held.request is not None:
            # A job that ended by itself was not used by this process, which was suspended or had no connection.
            is_final = state.is_failure or state.reason not in (None, Reason.PREEMPTED, Reason.NODE_LOST)
            reason = Reason.START_ERROR if state.reason is None else state.reason
            self._refuse(held, {"": state.message}, is_final=is_final, reason=reason)
            return
        held.over = state
        is_lost = not held.recovers_until and not all(held.attempts.values())
        if (state.reason is None or state.may_be_late) and is_lost and self._engine.login_transport() is not None:
            self._recover(held)
        elif time.monotonic() >= held.recovers_until:
            self._finish(held, state)

    def _recover(self, held: _Held) -> None:
        """Look on the login node for the ends of attempts that were not seen. It has them if it shares ``root``."""
        held.recovers_until = time.monotonic() + _RECOVERY_S
        names = tuple(held.nodes.values())
        self._up.difference_update(names)
        self._machines.drop(names)
        self._machines.connect([self._pool.node(name) for name in names])
        self._machines.watch([key for key, is_reported in held.attempts.items() if not is_reported])

    def _recovered(self, held: _Held, seen: Ended | Absent | LogComplete) -> None:
        """Take what an attempt recorded. What the agent on the login node concludes from missing processes is wrong."""
        if isinstance(seen, Absent | LogComplete):
            held.recovering.add(seen.key)
        elif EndReason.of(seen.end.get("reason", EndReason.EXITED)) not in _GUESSED and not _was_killed(held.over, seen.end):
            held.attempts[seen.key] = True
            self._sink(seen)
        if held.over is not None and held.recovering.issuperset(held.attempts):
            self._finish(held, held.over)

    def _finish(self, held: _Held, state: Over) -> None:
        """Report the ends of all attempts of an allocation that has ended, and forget it."""
        self._held.pop(held.allocation, None)
        # First those on the nodes that caused the end: the first failure is the cause of the others.
        for key, is_reported in sorted(held.attempts.items(), key=lambda one: host_of(one[0].node)[0] not in state.hosts):
            _, seen = held.doubtful.get(key, (0.0, None))
            if not is_reported and (seen is None or state.reason is not None or _was_killed(state, seen.end)):
                told: dict[str, object] = dict(seen.end) if seen is not None else {}
                reason = Reason.NODE_LOST if state.reason is None else state.reason
                told |= {"reason": EndReason.ALLOCATION_OVER, "allocation": reason, "message": state.message}
                seen = Ended(at=now(), key=key, end=told, clock=seen.clock if seen is not None else None)
            if not is_reported and seen is not None:
                self._sink(seen)
            self._sink(LogComplete(at=now(), key=key))
        self._drop(held)

    # Helpers. The lock is held.

    def _lease_if_connected(self, held: _Held | None) -> bool:
        """Lease the nodes of an allocation if all of them are connected and the lease request is open."""
        if held is None or held.request is None or held.is_leasing or not held.nodes:
            return False
        if not self._up.issuperset(held.nodes.values()):
            return False
        held.is_leasing = True
        self._machines.lease(replace(held.request, nodes=held.nodes))
        return True

    def _refuse(self, held: _Held, nodes: Mapping[str, str], *, is_final: bool, reason: Reason = Reason.START_ERROR) -> None:
        """Answer the lease request with a refusal, and give up the allocation. The next request makes a new one."""
        self._held.pop(held.allocation, None)
        self._unwanted |= {held.id: None} if held.id else {}
        self._drop(held)
        self._sink(
            LeaseRefused(
                at=now(), workflow=held.allocation.workflow, group=held.allocation.group, attempt=held.allocation.attempt,
                nodes=nodes, is_final=is_final, reason=reason,
            )
        )  # fmt: skip
        self._changed.notify()

    def _say(self, held: _Held, message: str) -> None:
        """Report why an open lease request waits, if that is news."""
        if held.request is None or held.is_leasing or message == held.said:
            return
        held.said = message
        one = held.allocation
        self._sink(LeaseWaits(at=now(), workflow=one.workflow, group=one.group, attempt=one.attempt, message=message))

    def _drop(self, held: _Held) -> None:
        """Disconnect from the nodes of an allocation."""
        told = {*(key.node for key in held.attempts), *(self._up.intersection(held.nodes.values()))}
        for name in told:
            self._sink(NodeDown(at=now(), pool=self._pool.name, node=name, error="its allocation has ended"))
        self._up.difference_update(held.nodes.values())
        for name in held.nodes.values():
            self._down.pop(name, None)
        self._machines.drop(tuple(held.nodes.values()))

    def _give_up_doubts(self) -> None:
        for held in self._held.values():
            self._believe(held, until=time.monotonic() - _DOUBT_S)

    def _believe(self, held: _Held, *, until: float) -> None:
        """Report the doubtful failures that were seen until then."""
        for key, (at, seen) in list(held.doubtful.items()):
            if at <= until:
                del held.doubtful[key]
                held.attempts[key] = True
                self._sink(seen)
                if key in held.logged:
                    self._sink(LogComplete(at=now(), key=key))

    def _of_node(self, name: str) -> _Held | None:
        return next((one for one in self._held.values() if name in one.nodes.values()), None)

    def _next_in_s(self) -> float:
        """Return the seconds until the engine is to be asked without a change; infinite for never."""
        times = [one.retry_at - time.monotonic() for one in self._held.values() if one.request and not one.id]
        if any(one.id for one in self._held.values()):
            times.append(self._due_in_s())
        if any(one.over is not None for one in self._held.values()):
            times.append(1.0)
        return min(times, default=math.inf)

    def _due_in_s(self) -> float:
        """Return the seconds until the next question about all allocations."""
        is_queued = any(one.request is not None for one in self._held.values())
        most_s = _DOUBTFUL_POLL_S if any(one.doubtful for one in self._held.values()) else math.inf
        return self._pace.due_in_s(is_queued, most_s)

    def _doubt_ends_in_s(self) -> float:
        """Return the seconds until a failure no longer waits for the engine's word; infinite for never."""
        seen = [at for one in self._held.values() for at, _ in one.doubtful.values()]
        return min(seen, default=math.inf) + _DOUBT_S - time.monotonic()

    def _look_for(self, workflows: Iterable[str]) -> None:
        """Find and release what these workflows have left."""
        self._ended = {*(self._ended or ()), *workflows}

    def _do(self, key: AttemptKey, action: Callable[[], None]) -> None:
        """Give a command to a node, or report that it cannot be reached."""
        with self._changed:
            reaches = key.node in self._up
        if reaches:
            try:
                action()
                return
            except KeyError:
                pass  # the allocation ended at this moment
        self._sink(Unanswered(at=now(), key=key))

    def _transport(self, node: Node) -> Transport:
        host, allocation_id = host_of(node.name)
        with self._changed:
            held = self._of_node(node.name)
        login = self._engine.login_transport() if held is not None and held.over is not None else None
        return self._engine.transport(allocation_id, host) if login is None else login


def _pause_s(failures: int) -> float:
    """Return the seconds until an engine is asked again after this number of failures."""
    return float(min(_RETRY_S, 2.0 ** (failures - 1)))


class _Pace:
    """When the engine is asked: soon after a change, then ever more rarely, and never too often."""

    def __init__(self, limit: QuestionLimit) -> None:
        self._limit = limit
        self._last = time.monotonic()
        self._wait_s = _QUEUED_POLL_S
        self._allowed = limit.at_once
        self._counted_at = time.monotonic()
        self.is_urgent = False

    def hurry(self) -> None:
        """Ask soon, because something has changed."""
        self._wait_s = _FIRST_POLL_S
        self.is_urgent = True

    def due_in_s(self, is_queued: bool, most_s: float = math.inf) -> float:
        """Return the seconds until the next question.

        ``is_queued``: whether an allocation waits. ``most_s``: the longest time between two questions, if there may be one.
        """
        wait_s = min(most_s, self._wait_s if is_queued or self.is_urgent else _HELD_POLL_S)
        lacking = max(0.0, 1.0 - self._allowed_now()) * self._limit.every_s
        return max(self._last + wait_s - time.monotonic(), lacking)

    def begin(self) -> None:
        """Count a question that is asked now."""
        self._allowed, self._counted_at = self._allowed_now() - 1.0, time.monotonic()
        self._last = time.monotonic()
        # The more questions may follow each other quickly, the more closely they do.
        self._wait_s = min(self._wait_s * (1.0 + 2.0 / self._limit.at_once), _QUEUED_POLL_S)
        self.is_urgent = False

    def _allowed_now(self) -> float:
        return min(self._limit.at_once, self._allowed + (time.monotonic() - self._counted_at) / self._limit.every_s)


def _allocation_of(key: AttemptKey) -> Allocation:
    return Allocation(workflow=key.workflow, group=key.group, attempt=key.attempt)


def _key(held: _Held, task: str) -> AttemptKey:
    one = held.allocation
    return AttemptKey(workflow=one.workflow, group=one.group, task=task, attempt=one.attempt, node=held.nodes[task])


def _may_be_by_engine(end: Mapping[str, Any]) -> bool:
    """Return whether the engine may have caused an end: not if the command succeeded, and not if distflow stopped it."""
    reason = EndReason.of(end.get("reason", EndReason.EXITED))
    return reason in _GUESSED or (reason is EndReason.EXITED and end.get("exit_code") != 0)


def _was_killed(over: Over | None, end: Mapping[str, Any]) -> bool:
    """Return whether the engine killed a task because a program that distflow started failed on another node."""
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
