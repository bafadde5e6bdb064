"""A backend in memory, with a clock that tests set. It implements the protocol ``backends.base.Backend``.

Tests can make its nodes fail like real ones: become unreachable, lose responses, restart, or kill an attempt. ``Behavior``
describes how a task runs there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any

from distflow.backends.base import (
    NO_EXIT_CODES,
    Absent,
    AttemptKey,
    AttemptObservation,
    CheckpointRef,
    Collected,
    CollectFailed,
    CollectUnanswered,
    Ended,
    InputNotFetched,
    Leased,
    LeaseRefused,
    LeaseRequest,
    LogComplete,
    LogSink,
    NodeDown,
    NodeUp,
    Observation,
    Prepared,
    PrepareFailed,
    Released,
    Sink,
    Started,
    StopAccepted,
    Unanswered,
    VenvBuilt,
    VenvFailed,
)
from distflow.documents.requirements import Requirements
from distflow.lifecycle.clocks import Clock
from distflow.plan.credentials import TaskSecrets
from distflow.plan.model import Binding, BoundLaunch, TaskBinding
from distflow.pools.model import Node, Pool
from distflow.storage.task_data import Delivered, RelayRequired
from distflow.structs import replace
from distflow.testing.attempts import Attempt, Attempts, Behavior

__all__ = ["Behavior", "FakeBackend"]


_CORRECT_CLOCK = Clock(offset_s=0.0, uncertainty_s=0.0)


class FakeBackend:
    """Nodes in memory."""

    def __init__(
        self,
        pool: Pool,
        *,
        now: Callable[[], float],
        sink: Sink,
        logs: LogSink | None = None,
        behavior: Callable[[AttemptKey], Behavior] = lambda _: Behavior(),
        clocks: Mapping[str, Clock] | None = None,
    ) -> None:
        """Create the pool's nodes, which are reachable after ``connect``. ``clocks`` has the clocks that are wrong, by node."""
        self._pool = pool
        self._now = now
        self._sink = sink
        self._is_closed = False
        self._logs = logs
        self._behavior = behavior
        self._clocks = dict(clocks or {})
        self._nodes = {node.name: node for node in pool.nodes}
        self._up: dict[str, bool] = {}
        self._silent: set[str] = set()
        self._attempts = Attempts()
        self._next_port = 20000
        self.starts: list[str] = []
        """Names of started attempts; one entry for each start."""
        self.collected: list[str] = []
        """Names of attempts whose output was collected; one entry for each collection."""
        self.launches: dict[str, BoundLaunch] = {}
        """The launch with which each attempt was last prepared, by the attempt's name."""
        self.bare_nodes: set[str] = set()
        """Nodes that cannot fetch data themselves."""
        self.holds_outputs = False
        """Whether ``collect`` reports nothing, like a transfer that does not end."""
        self.shares_files = False
        """Whether all nodes see the same files."""
        self.leases_expire = False
        """Whether leases of attempts that do not start in time expire."""

        self.venvs: dict[str, bool | str] = {}
        """By node: whether it has every Python environment, or the error of its builds. Without an error, builds succeed."""
        self.builds: list[AttemptKey] = []
        """The requested builds of Python environments."""
        self.canceled_builds: list[AttemptKey] = []
        self.holds_builds = False
        """Whether builds continue until ``end_build`` is called."""

    # The protocol `Backend`.

    def keep(
        self,
        gangs: Collection[AttemptKey],
        ended: Collection[str] | None = None,
        exit_codes: Mapping[AttemptKey, int] = NO_EXIT_CODES,
    ) -> None:
        """Do nothing: nodes are not allocated."""

    def connect(self, nodes: Sequence[Node]) -> None:
        """Make the nodes reachable, except those that were cut."""
        self._is_closed = False
        for node in nodes:
            self._up.setdefault(node.name, True)
            if self.reaches(node.name):
                self._emit_node_up(node)

    def watch(self, keys: Sequence[AttemptKey]) -> None:
        """Report these attempts now, after each reconnection and when they end."""
        for key in keys:
            self._attempts.watch(key)
            if self._up.get(key.node):
                self._report(key)

    def build_venv(self, key: AttemptKey, venv: Requirements) -> None:  # noqa: ARG002  required by the protocol
        """Build the Python environment at once, unless a test holds builds back."""
        self.builds.append(key)
        if not self.holds_builds:
            self.end_build(key)

    def end_build(self, key: AttemptKey) -> None:
        """Report the result of a build, as ``venvs`` determines it."""
        why = self.venvs.get(key.node)
        if isinstance(why, str):
            self._sink(VenvFailed(at=self._now(), key=key, message=why, is_final=True))
            return
        self.venvs[key.node] = True
        self._sink(VenvBuilt(at=self._now(), key=key, tool="pip", seconds=3.0))

    def cancel_venv(self, key: AttemptKey) -> None:
        """Record a canceled build."""
        self.canceled_builds.append(key)

    def lease(self, request: LeaseRequest) -> None:
        """Grant the lease if every node is reachable and responds, and has the GPUs and the requested Python environments."""
        lacking = {
            task: name for task, name in request.nodes.items() if task in request.venvs and self.venvs.get(name) is not True
        }
        if lacking:
            self._sink(
                LeaseRefused(
                    at=self._now(), workflow=request.workflow, group=request.group, attempt=request.attempt, nodes={},
                    without_venv=lacking,
                )
            )  # fmt: skip
            return
        chosen: dict[str, tuple[int, ...]] = {}
        for task, name in request.nodes.items():
            key = request.key(task)
            held = self._attempts.alive.get(key)
            if held is not None:
                chosen[task] = held.gpus
                continue
            taken = {gpu for one in self._attempts.on(name) for gpu in one.gpus}
            taken |= {gpu for other, gpus in chosen.items() if request.nodes[other] == name for gpu in gpus}
            left = [gpu for gpu in range(self._nodes[name].gpus or 0) if gpu not in taken]
            if not self._up.get(name) or len(left) < request.gpus[task]:
                self._refuse(request, name, "busy" if self._up.get(name) else "unreachable")
                return
            chosen[task] = tuple(left[: request.gpus[task]])
        port = request.port
        if port == "any":
            self._next_port += 1
            port = self._next_port
        for task in request.nodes:
            key = request.key(task)
            self._attempts.watch(key)
            if key not in self._attempts.alive:
                expires_at = self._now() + request.start_timeout_s if self.leases_expire else float("inf")
                self._attempts.add(Attempt(key, chosen[task], expires_at))
        silent = sorted(self._silent.intersection(request.nodes.values()))
        if silent:
            self._refuse(request, silent[0], "does not answer")
            return
        bindings = {
            task: TaskBinding(node=name, address="192.0.2.1", interface="fake0", gpu_ids=chosen[task])
            for task, name in request.nodes.items()
        }
        self._emit(
            Leased(
                at=self._now(), workflow=request.workflow, group=request.group, attempt=request.attempt,
                binding=Binding(tasks=bindings, port=port if isinstance(port, int) else None),
            )
        )  # fmt: skip

    def prepare(
        self,
        key: AttemptKey,
        launch: BoundLaunch,
        secrets: TaskSecrets,
        stop_grace_s: float,  # noqa: ARG002
        memo: str = "",  # noqa: ARG002
    ) -> None:
        """Prepare an attempt."""
        if not self._watch_if_reachable(key):
            return
        attempt = self._attempts.known.get(key)
        if attempt is None:
            self._emit_kind(Absent, key)
            return
        self.launches[key.name] = launch
        attempt.behavior = self._behavior(key)
        if attempt.behavior.prepare_error:
            self._emit_unless_silent(PrepareFailed(at=self._now(), key=key, message=attempt.behavior.prepare_error), key)
        elif relayed := [
            one.number for one in launch.downloads if key.node in self.bare_nodes or one.number not in secrets.stores
        ]:
            self._emit_unless_silent(
                InputNotFetched(at=self._now(), key=key, number=relayed[0], why="no credentials for it"), key
            )
        elif attempt.phase == "leased":
            attempt.phase = "prepared"
            self._emit_kind(Prepared, key)
        else:
            self._report(key)

    def start(self, key: AttemptKey) -> None:
        """Start an attempt if it is prepared and has not started yet."""
        if not self._watch_if_reachable(key):
            return
        attempt = self._attempts.known.get(key)
        if attempt is not None and attempt.phase == "prepared":
            self.starts.append(key.name)
            attempt.phase, attempt.started_at = "running", self._now()
            attempt.ends_at = attempt.started_at + attempt.behavior.seconds
        self._report(key)

    def stop(self, key: AttemptKey, *, grace_s: float, why: str) -> None:  # noqa: ARG002
        """Stop an attempt, at once or after the grace period."""
        if not self._watch_if_reachable(key):
            return
        attempt = self._attempts.known.get(key)
        if attempt is None:
            self._emit_kind(Absent, key)
            return
        if attempt.end is None:
            attempt.stopped_at = self._now()
            attempt.ends_at = attempt.stopped_at + (0.0 if attempt.behavior.obeys_term else grace_s)
            attempt.phase = "stopping"
            self._emit_unless_silent(StopAccepted(at=self._now(), key=key, grace_s=grace_s), key)
            if attempt.ends_at <= self._now():
                self._finish(attempt, attempt.ends_at)
        else:
            self._report(key)

    def release(self, key: AttemptKey) -> None:
        """Forget an attempt that has not started. Report any other attempt."""
        if self._watch_if_reachable(key):
            attempt = self._attempts.known.get(key)
            has_run = attempt is not None and attempt.started_at > 0
            if not has_run:
                self._attempts.drop(key)
                self._emit_kind(Released, key)
            else:
                self._report(key)

    def collect(
        self,
        key: AttemptKey,
        checkpoint: CheckpointRef | None = None,
        place: str | None = None,
        *,
        for_nodes: bool = False,
    ) -> None:
        """Report the output as collected, unless the node is unreachable, or the behavior or ``holds_outputs`` prevents that.

        The contents of a directory (``place``) change with the clock.
        """
        attempt = self._attempts.known.get(key)
        self._attempts.watch(key)
        if self._up.get(key.node) and self.holds_outputs:
            return
        if not self._up.get(key.node):
            self._emit(CollectUnanswered(at=self._now(), key=key, checkpoint=checkpoint))
            return
        now, error = self._now(), attempt.behavior.collect_error if attempt else "the output no longer exists"
        if error:
            self._emit_unless_silent(CollectFailed(at=now, key=key, checkpoint=checkpoint, message=error), key)
        else:
            self.collected.append(key.name if place is None else f"{key.name}/{place}")
            content = key.name if place is None else f"{key.name}/{place}/{now}"
            digest, is_everywhere = hashlib.sha256(content.encode()).hexdigest(), for_nodes and self.shares_files
            self._emit_unless_silent(
                Collected(at=now, key=key, checkpoint=checkpoint, digest=digest, size=10240, is_everywhere=is_everywhere), key
            )

    def deliver(self, key: AttemptKey, *_: object) -> Delivered:
        """Raise ``RelayRequired``, like a node without a driver for the storage."""
        raise RelayRequired(f"{key.node}: the node has no driver for the storage")

    def is_releasing(self) -> bool:
        """Return False: these nodes are not allocated."""
        return False

    def close(self) -> None:
        """Close the connections. Attempts continue; they are reported after ``connect`` and a new ``watch``."""
        self._is_closed = True
        self._attempts.unwatch()

    # Events that tests trigger.

    def tick(self) -> None:
        """End all attempts that are due."""
        now = self._now()
        for attempt in [one for one in self._attempts.alive.values() if one.due_at <= now]:
            if attempt.started_at > 0 or attempt.ends_at <= now:
                self._finish(attempt, attempt.ends_at)
            else:
                self._expire(attempt)

    def kill(self, name: str, number: int = 9) -> None:
        """End a running attempt by a signal."""
        for attempt in self._named(name, "running", "stopping"):
            attempt.behavior = Behavior(seconds=0, signal=number)
            attempt.stopped_at = None
            self._finish(attempt, self._now())

    def end_after_peer_failure(self, name: str) -> None:
        """End a running attempt, as its node does when another task of the gang has failed."""
        for attempt in self._named(name, "running"):
            self._finish(attempt, self._now(), "peer_failed")

    def expire(self, name: str) -> None:
        """End an attempt that has not started, as its node does when the lease expires."""
        for attempt in self._named(name, "leased", "prepared"):
            self._expire(attempt)

    def cut(self, node: str, *, is_engine_away: bool = False) -> None:
        """Make a node unreachable. Its attempts continue. A repeated call may change ``is_engine_away``."""
        self._silent.discard(node)
        self._up[node] = False
        self._emit(NodeDown(at=self._now(), pool=self._pool.name, node=node, error="cut", is_engine_away=is_engine_away))

    def silence(self, node: str) -> None:
        """Let a node execute commands without responding, until ``cut`` or ``heal``. The responses are lost."""
        if self._up.get(node):
            self._silent.add(node)

    def heal(self, node: str) -> None:
        """Make a node reachable again. It reports its watched attempts."""
        if node in self._silent:
            self.cut(node)
        if not self._up.get(node):
            self._up[node] = True
            self._emit_node_up(self._nodes[node])
            for key in self._attempts.watched(node):
                self._report(key)

    def reboot(self, node: str) -> None:
        """Make a node unreachable and end all of its attempts. It can report their ends after ``heal``."""
        self.cut(node)
        for attempt in self._attempts.on(node):
            self._finish(attempt, self._now(), "rebooted")

    def forget(self, node: str) -> None:
        """Remove all processes and files from a node."""
        self._attempts.forget(lambda key: key.node == node)

    def clean(self, workflows: Container[str]) -> None:
        """Remove the files of workflows that have ended, as nodes do some time later."""
        self._attempts.forget(lambda key: key.workflow in workflows, unwatch=True)

    def step(self, seconds: float) -> None:
        """Adjust all times and the offsets of the nodes' clocks after this machine's clock was moved by ``seconds``."""
        for attempt in self._attempts.known.values():
            attempt.step(seconds)
        for node in self._pool.nodes:
            clock = self._clocks.get(node.name, _CORRECT_CLOCK)
            self._clocks[node.name] = replace(clock, offset_s=clock.offset_s - seconds)

    def reaches(self, node: str) -> bool:
        """Whether a node is reachable and responds."""
        return bool(self._up.get(node)) and node not in self._silent

    @property
    def alive(self) -> list[str]:
        """Names of the attempts that run or hold a lease."""
        return [key.name for key in self._attempts.alive]

    @property
    def running(self) -> list[AttemptKey]:
        """The running attempts, including those on unreachable nodes."""
        return [key for key, attempt in self._attempts.alive.items() if attempt.is_running]

    @property
    def ends(self) -> dict[AttemptKey, dict[str, Any]]:
        """The recorded ends of all attempts on the nodes, reported or not, in this machine's time."""
        return {key: attempt.end for key, attempt in self._attempts.known.items() if attempt.end is not None}

    @property
    def next_end(self) -> float:
        """The time at which the next attempt ends by itself, or at which its lease expires; infinite if there is none."""
        return min((attempt.due_at for attempt in self._attempts.alive.values()), default=float("inf"))

    # Internals.

    def _named(self, name: str, *phases: str) -> list[Attempt]:
        return [one for key, one in self._attempts.alive.items() if key.name == name and one.phase in phases]

    def _finish(self, attempt: Attempt, at: float, why: str = "") -> None:
        attempt.finish(at, why)
        self._end_and_report(attempt)

    def _expire(self, attempt: Attempt) -> None:
        attempt.phase = "ended"
        attempt.end = {"reason": "start_timeout", "started_at": None, "ended_at": self._now()}
        self._end_and_report(attempt)

    def _end_and_report(self, attempt: Attempt) -> None:
        self._attempts.end(attempt.key)
        if self._up.get(attempt.key.node) and self._attempts.is_watched(attempt.key):
            self._report(attempt.key)

    def _report(self, key: AttemptKey) -> None:
        attempt = self._attempts.known.get(key)
        if attempt is None:
            self._emit_kind(Absent, key)
        elif attempt.phase == "prepared":
            self._emit_kind(Prepared, key)
        else:
            clock = self._clock_of(key)
            if attempt.started_at > 0:
                started = attempt.started_at + clock.offset_s
                self._emit_unless_silent(Started(at=self._now(), key=key, pid=1, started_at=started, clock=clock), key)
            if attempt.end is not None:
                if self._logs is not None and attempt.behavior.output:
                    self._logs.write(key, "output.log", 0, attempt.behavior.output)
                self._emit_unless_silent(Ended(at=self._now(), key=key, end=attempt.end_in_time_of(clock), clock=clock), key)
                self._emit_kind(LogComplete, key)

    def _emit(self, observation: Observation) -> None:
        if not self._is_closed:
            self._sink(observation)

    def _clock_of(self, key: AttemptKey) -> Clock:
        return self._clocks.get(key.node, _CORRECT_CLOCK)

    def _emit_node_up(self, node: Node) -> None:
        self._emit(NodeUp(at=self._now(), pool=self._pool.name, node=node.name))

    def _watch_if_reachable(self, key: AttemptKey) -> bool:
        self._attempts.watch(key)
        if self._up.get(key.node):
            return True
        self._emit(Unanswered(at=self._now(), key=key))
        return False

    def _refuse(self, request: LeaseRequest, node: str, why: str) -> None:
        self._emit(
            LeaseRefused(
                at=self._now(), workflow=request.workflow, group=request.group, attempt=request.attempt,
                nodes={node: f"{node}: {why}"},
            )
        )  # fmt: skip

    def _emit_kind(self, kind: type[Absent | Prepared | Released | LogComplete], key: AttemptKey) -> None:
        self._emit_unless_silent(kind(at=self._now(), key=key), key)

    def _emit_unless_silent(self, observation: AttemptObservation, key: AttemptKey) -> None:
        if key.node not in self._silent:
            self._emit(observation)
