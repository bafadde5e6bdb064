"""A backend in memory, with a clock that tests set. It keeps the contract of ``backends.base.Backend``.

It can fail like real nodes on request: be unreachable, lose answers, restart, or kill an attempt. ``Behaviour`` describes what
runs there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from distflow.backends.base import (
    Absent,
    AttemptKey,
    AttemptObservation,
    CheckpointRef,
    Collected,
    CollectFailed,
    CollectUnanswered,
    Ended,
    Leased,
    LeaseRefused,
    LeaseRequest,
    LogComplete,
    LogSink,
    NodeDown,
    NodeUp,
    NotBrought,
    Observation,
    Prepared,
    PrepareFailed,
    Released,
    Sink,
    Started,
    StopAccepted,
    Unanswered,
)
from distflow.lifecycle.clocks import Clock
from distflow.plan.credentials import GivenSecrets
from distflow.plan.model import Binding, BoundLaunch, TaskBinding
from distflow.pools.model import Node, Pool
from distflow.storage.task_data import Delivered, RelayRequired
from distflow.structs import replace
from distflow.supervisor.clock import Clock as OurClock
from distflow.testing.attempts import Attempt, Attempts, Behaviour

__all__ = ["Behaviour", "FakeBackend"]


_RIGHT = Clock(offset_s=0.0, uncertainty_s=0.0)


class FakeBackend:
    """Nodes in memory."""

    def __init__(
        self,
        pool: Pool,
        *,
        clock: OurClock,
        sink: Sink,
        logs: LogSink | None = None,
        behaviour: Callable[[AttemptKey], Behaviour] = lambda _: Behaviour(),
        clocks: Mapping[str, Clock] | None = None,
    ) -> None:
        """Make the pool's nodes; all can be reached once ``connect`` was called. ``clocks``: those that are not right."""
        self._pool = pool
        self._clock = clock
        self._sink = sink
        self._is_closed = False
        self._logs = logs
        self._behaviour = behaviour
        self._clocks = dict(clocks or {})
        self._nodes = {node.name: node for node in pool.nodes}
        self._up: dict[str, bool] = {}
        self._silent: set[str] = set()
        self._attempts = Attempts()
        self._next_port = 20000
        self.starts: list[str] = []
        """Names of the attempts that were started, each time that they were."""
        self.collected: list[str] = []
        """The same for those whose output was collected."""
        self.launches: dict[str, BoundLaunch] = {}
        """What each attempt was prepared with last, by its name."""
        self.bare_nodes: set[str] = set()
        """Nodes that can fetch no data by themselves."""
        self.holds_outputs = False
        """Outputs are long on their way: ``collect`` is not answered."""
        self.shares_files = False
        """All nodes see the same files."""
        self.leases_expire = False
        """Nodes give up what was not started within the time that its lease names."""

    # The protocol.

    def connect(self, nodes: Sequence[Node]) -> None:
        """Make the nodes reachable."""
        self._is_closed = False
        for node in nodes:
            self._up.setdefault(node.name, True)
            if self.reaches(node.name):
                self._say_up(node)

    def watch(self, keys: Sequence[AttemptKey]) -> None:
        """Report these attempts now and after each reconnection."""
        for key in keys:
            self._attempts.watch(key)
            if self._up.get(key.node):
                self._report(key)

    def lease(self, request: LeaseRequest) -> None:
        """Grant when every node can be reached and has the GPUs."""
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
                expires_at = self._clock.now() + request.start_timeout_s if self.leases_expire else float("inf")
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
                at=self._clock.now(), workflow=request.workflow, group=request.group, attempt=request.attempt,
                binding=Binding(tasks=bindings, port=port if isinstance(port, int) else None),
            )
        )  # fmt: skip

    def prepare(
        self,
        key: AttemptKey,
        launch: BoundLaunch,
        secrets: GivenSecrets,
        stop_grace_s: float,  # noqa: ARG002
        memo: str = "",  # noqa: ARG002
    ) -> None:
        """Make an attempt ready."""
        if not self._reaches(key):
            return
        attempt = self._attempts.known.get(key)
        if attempt is None:
            self._tell(Absent, key)
            return
        self.launches[key.name] = launch
        attempt.behaviour = self._behaviour(key)
        if attempt.behaviour.refuses:
            self._say(PrepareFailed(at=self._clock.now(), key=key, message=attempt.behaviour.refuses), key)
        elif relayed := [
            one.number for one in launch.brings if key.node in self.bare_nodes or one.number not in secrets.stores
        ]:
            self._say(NotBrought(at=self._clock.now(), key=key, number=relayed[0], why="no credentials for it"), key)
        elif attempt.phase == "leased":
            attempt.phase = "prepared"
            self._tell(Prepared, key)
        else:
            self._report(key)

    def start(self, key: AttemptKey) -> None:
        """Start an attempt, once."""
        if not self._reaches(key):
            return
        attempt = self._attempts.known.get(key)
        if attempt is not None and attempt.phase == "prepared":
            self.starts.append(key.name)
            attempt.phase, attempt.started_at = "running", self._clock.now()
            attempt.ends_at = attempt.started_at + attempt.behaviour.seconds
        self._report(key)

    def stop(self, key: AttemptKey, *, grace_s: float, why: str) -> None:  # noqa: ARG002
        """Stop an attempt, at once or after the grace."""
        if not self._reaches(key):
            return
        attempt = self._attempts.known.get(key)
        if attempt is None:
            self._tell(Absent, key)
            return
        if attempt.end is None:
            attempt.stopped_at = self._clock.now()
            attempt.ends_at = attempt.stopped_at + (0.0 if attempt.behaviour.obeys_term else grace_s)
            attempt.phase = "stopping"
            self._say(StopAccepted(at=self._clock.now(), key=key, grace_s=grace_s), key)
            if attempt.ends_at <= self._clock.now():
                self._finish(attempt, attempt.ends_at)
        else:
            self._report(key)

    def release(self, key: AttemptKey) -> None:
        """Forget an attempt that has not started."""
        if self._reaches(key):
            attempt = self._attempts.known.get(key)
            has_run = attempt is not None and attempt.started_at > 0
            if not has_run:
                self._attempts.drop(key)
                self._tell(Released, key)
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
        """Say that the output is here, unless it is spoilt or ``holds_outputs`` keeps it for now.

        Of a directory (``place``) each look finds something new.
        """
        attempt = self._attempts.known.get(key)
        self._attempts.watch(key)
        if self._up.get(key.node) and self.holds_outputs:
            return
        if not self._up.get(key.node):
            self._emit(CollectUnanswered(at=self._clock.now(), key=key, checkpoint=checkpoint))
            return
        now, spoils = self._clock.now(), attempt.behaviour.spoils if attempt else "it is not there any more"
        if spoils:
            self._say(CollectFailed(at=now, key=key, checkpoint=checkpoint, message=spoils), key)
        else:
            self.collected.append(key.name if place is None else f"{key.name}/{place}")
            what = key.name if place is None else f"{key.name}/{place}/{now}"
            digest, stays = hashlib.sha256(what.encode()).hexdigest(), for_nodes and self.shares_files
            seen = Collected(at=now, key=key, checkpoint=checkpoint, digest=digest, size=10240, is_everywhere=stays)
            self._say(seen, key)

    def deliver(self, key: AttemptKey, *_: object) -> Delivered:
        """Be a node that has no driver."""
        raise RelayRequired(f"{key.node}: it has no driver")

    def close(self) -> None:
        """Let go: attempts go on, nothing is said until ``connect``, and of attempts until they are watched again."""
        self._is_closed = True
        self._attempts.unwatch()

    # What a test does to it.

    def tick(self) -> None:
        """Let everything end whose time has come."""
        now = self._clock.now()
        for attempt in [one for one in self._attempts.alive.values() if one.due_at <= now]:
            if attempt.started_at > 0 or attempt.ends_at <= now:
                self._finish(attempt, attempt.ends_at)
            else:
                self._expire(attempt)

    def kill(self, name: str, number: int = 9) -> None:
        """End a running attempt by a signal."""
        for attempt in self._named(name, "running", "stopping"):
            attempt.behaviour = Behaviour(seconds=0, signal=number)
            attempt.stopped_at = None
            self._finish(attempt, self._clock.now())

    def leave(self, name: str) -> None:
        """End a running attempt because its gang told its node that another one failed."""
        for attempt in self._named(name, "running"):
            self._finish(attempt, self._clock.now(), "peer_failed")

    def expire(self, name: str) -> None:
        """End an attempt that waited too long for its start, as its node does."""
        for attempt in self._named(name, "leased", "prepared"):
            self._expire(attempt)

    def cut(self, node: str) -> None:
        """Make a node unreachable; what runs there goes on."""
        self._silent.discard(node)
        if self._up.get(node):
            self._up[node] = False
            self._emit(NodeDown(at=self._clock.now(), pool=self._pool.name, node=node, error="cut"))

    def silence(self, node: str) -> None:
        """Let a node execute commands and never answer, until ``cut`` or ``heal``. No answer comes later."""
        if self._up.get(node):
            self._silent.add(node)

    def heal(self, node: str) -> None:
        """Bring a node back; it says how its attempts stand."""
        if node in self._silent:
            self.cut(node)
        if not self._up.get(node):
            self._up[node] = True
            self._say_up(self._nodes[node])
            for key in self._attempts.watched(node):
                self._report(key)

    def reboot(self, node: str) -> None:
        """End everything on a node; it is unreachable then, and knows afterwards what it was."""
        self.cut(node)
        for attempt in self._attempts.on(node):
            self._finish(attempt, self._clock.now(), "rebooted")

    def forget(self, node: str) -> None:
        """Let nothing be left on a node, no process and no file."""
        self._attempts.forget(lambda key: key.node == node)

    def clean(self, workflows: Container[str]) -> None:
        """Let nothing be left of workflows that have ended, as nodes do some time later."""
        self._attempts.forget(lambda key: key.workflow in workflows, unwatch=True)

    def step(self, seconds: float) -> None:
        """Our clock was just set forward or back; those of the nodes were not, and that is known."""
        for attempt in self._attempts.known.values():
            attempt.step(seconds)
        for node in self._pool.nodes:
            known = self._clocks.get(node.name, _RIGHT)
            self._clocks[node.name] = replace(known, offset_s=known.offset_s - seconds)

    def reaches(self, node: str) -> bool:
        """Whether a node can be reached and answers."""
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
        """The ends of all attempts that nodes know of, reported or not, in this machine's time."""
        return {key: attempt.end for key, attempt in self._attempts.known.items() if attempt.end is not None}

    @property
    def next_end(self) -> float:
        """When the next attempt ends by itself."""
        return min((attempt.due_at for attempt in self._attempts.alive.values()), default=float("inf"))

    # Inside.

    def _named(self, name: str, *phases: str) -> list[Attempt]:
        return [one for key, one in self._attempts.alive.items() if key.name == name and one.phase in phases]

    def _finish(self, attempt: Attempt, at: float, why: str = "") -> None:
        attempt.finish(at, why)
        self._is_over(attempt)

    def _expire(self, attempt: Attempt) -> None:
        attempt.phase = "ended"
        attempt.end = {"reason": "start_timeout", "started_at": None, "ended_at": self._clock.now()}
        self._is_over(attempt)

    def _is_over(self, attempt: Attempt) -> None:
        self._attempts.end(attempt.key)
        if self._up.get(attempt.key.node) and self._attempts.is_watched(attempt.key):
            self._report(attempt.key)

    def _report(self, key: AttemptKey) -> None:
        attempt = self._attempts.known.get(key)
        if attempt is None:
            self._tell(Absent, key)
        elif attempt.phase == "prepared":
            self._tell(Prepared, key)
        else:
            clock = self._clock_of(key)
            if attempt.started_at > 0:
                started = attempt.started_at + clock.offset_s
                self._say(Started(at=self._clock.now(), key=key, pid=1, started_at=started, clock=clock), key)
            if attempt.end is not None:
                if self._logs is not None and attempt.behaviour.output:
                    self._logs.write(key, "output.log", 0, attempt.behaviour.output)
                self._say(Ended(at=self._clock.now(), key=key, end=attempt.end_by(clock), clock=clock), key)
                self._tell(LogComplete, key)

    def _emit(self, seen: Observation) -> None:
        if not self._is_closed:
            self._sink(seen)

    def _clock_of(self, key: AttemptKey) -> Clock:
        return self._clocks.get(key.node, _RIGHT)

    def _say_up(self, node: Node) -> None:
        self._emit(NodeUp(at=self._clock.now(), pool=self._pool.name, node=node.name))

    def _reaches(self, key: AttemptKey) -> bool:
        self._attempts.watch(key)
        if self._up.get(key.node):
            return True
        self._emit(Unanswered(at=self._clock.now(), key=key))
        return False

    def _refuse(self, request: LeaseRequest, node: str, why: str) -> None:
        self._emit(
            LeaseRefused(
                at=self._clock.now(), workflow=request.workflow, group=request.group, attempt=request.attempt,
                nodes={node: f"{node}: {why}"},
            )
        )  # fmt: skip

    def _tell(self, kind: type[Absent | Prepared | Released | LogComplete], key: AttemptKey) -> None:
        self._say(kind(at=self._clock.now(), key=key), key)

    def _say(self, seen: AttemptObservation, key: AttemptKey) -> None:
        if key.node not in self._silent:
            self._emit(seen)
