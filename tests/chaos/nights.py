"""One schedule against the real supervisor and store with simulated nodes, and what must hold while it runs and after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from chaos.schedules import Fault, Schedule, behavior
from distflow.backends.base import AttemptKey, Backend, Sink
from distflow.lifecycle.clocks import Clock
from distflow.lifecycle.exits import Action, exit_code_of
from distflow.lifecycle.states import Reason, State, is_legal
from distflow.plan.model import GroupPlan
from distflow.pools.model import Pool
from distflow.state.notices import Notice
from distflow.state.record import EventRecord, GroupRecord, TaskRecord, WorkflowRecord
from distflow.state.store import Store
from distflow.structs import replace
from distflow.supervisor.decide import decide
from distflow.supervisor.loop import Supervisor
from distflow.supervisor.snapshot import Decision, LastDecision, NodeView, StoredWorkflow
from distflow.testing.attempts import Behavior
from unit.supervisor.gangs import Driver, node, pool

__all__ = ["doubles", "leaks", "lies", "play", "unfinished"]

_LEASES_END_S = 200.0
_DEEDS = 40
"""Within how many acts (twice for each save and each command) a supervisor that is to be killed is killed."""
_UNCERTAIN_S = 0.01
_OWN = (Reason.EXIT_CODE, Reason.SIGNAL)


def play(schedule: Schedule) -> list[str]:
    """Run a schedule to its end; return what is wrong, in words. Nothing is, where distflow keeps what it promises."""
    night = _Night(schedule)
    try:
        night.run()
    except AssertionError as error:
        return [*night.wrong, str(error)[:2000]]
    stepped_s = sum(abs(fault.amount) for fault in schedule.faults if fault.kind == "step")
    driver = night.driver
    return [*night.wrong, *leaks(driver), *lies(driver.workflows, driver.backend.ends, stepped_s)]


class _Doubting(Supervisor):
    """A supervisor that decides everything twice: what the last decision left may save work, and changes no decision."""

    def decide(self) -> Decision:
        found = super().decide()
        anew = decide(replace(self.snapshot(), last_decision=LastDecision()), self._now())
        assert replace(found, last_decision=anew.last_decision) == anew
        return found


class _Killed(BaseException):
    """The supervisor's process was killed."""


class _Life:
    """How many more times a supervisor may save or give a command: it is killed before or after one of them."""

    def __init__(self) -> None:
        self.left: int | None = None

    def spend(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise _Killed


class _MortalStore(Store):
    """A store whose user may be killed before or after it saves."""

    life: _Life

    def save(self, records: Iterable[WorkflowRecord], events: Iterable[EventRecord], notices: Iterable[Notice] = ()) -> None:
        self.life.spend()
        super().save(records, events, notices)
        self.life.spend()


class _MortalBackend:
    """A backend whose user may be killed before or after each of its commands."""

    def __init__(self, backend: Backend, life: _Life) -> None:
        self._backend = backend
        self._life = life

    def __getattr__(self, name: str) -> Callable[..., object]:
        command = getattr(self._backend, name)

        def give(*args: object, **options: object) -> object:
            self._life.spend()
            answer = command(*args, **options)
            self._life.spend()
            return answer

        return give


class _MortalDriver(Driver):
    """A driver whose supervisor can be killed in the middle of a step."""

    def __init__(self, on: Pool, behavior: Callable[[AttemptKey], Behavior], clocks: Mapping[str, Clock]) -> None:
        self._life = _Life()
        super().__init__(on=on, behavior=behavior, clocks=clocks)

    def open_store(self) -> Store:
        store = _MortalStore(self.directory.store)
        store.life = self._life
        return store

    def open_backend(self, _pool: Pool, _sink: Sink) -> Backend:
        return cast("Backend", _MortalBackend(self.backend, self._life))

    supervisor_type = _Doubting

    def die_after(self, deeds: int) -> None:
        """Kill the supervisor at an instant to come: before or after it saves or gives a command."""
        self._life.left = deeds

    def step(self) -> float | None:
        try:
            return super().step()
        except _Killed:
            self.restart()
            return super().step()

    def restart(self) -> None:
        self._life.left = None
        super().restart()


class _Night:
    """A driven world, and what was seen to be wrong in it."""

    def __init__(self, schedule: Schedule) -> None:
        self.wrong: list[str] = []
        self._schedule = schedule
        nodes = [node(f"n{number}", gpus=gpus) for number, gpus in enumerate(schedule.nodes)]
        self.driver = _MortalDriver(
            on=pool(*nodes),
            behavior=lambda key: behavior(schedule.seed, key.name),
            clocks={
                one.name: Clock(offset_s=offset_s, uncertainty_s=_UNCERTAIN_S)
                for one, offset_s in zip(nodes, schedule.offsets_s, strict=True)
            },
        )
        self.driver.backend.leases_expire = True
        self._states: dict[tuple[str, str], State] = {}
        self._heard: set[AttemptKey] = set()
        """Ended attempts that the store was compared with."""
        self._stepped = any(fault.kind == "step" for fault in schedule.faults)
        """Times that the store holds may then lie in the future, which the supervisor corrects for itself."""

    def run(self) -> None:
        """Let everything happen, then heal all nodes, cancel what hangs, and wait until nothing is left to do."""
        driver = self.driver
        for submitted in self._schedule.workflows:
            driver.add(submitted)
        driver.settle()
        for fault in self._schedule.faults:
            driver.advance(fault.after_s)
            self._look()
            _HAPPENS[fault.kind](self, fault)
            driver.settle()
            self._look()
        for one in driver.pool.nodes:
            driver.backend.heal(one.name)
        driver.settle()
        for _ in range(50):
            driver.advance(20.0)
            self._look()
        for uuid in driver.workflows:
            self._cancel_now(uuid)
        driver.run(limit=100_000)
        # Nodes give up the leases of gangs that went elsewhere.
        while driver.backend.alive and driver.backend.next_end < driver.clock.now() + _LEASES_END_S:
            driver.advance(max(0.0, driver.backend.next_end - driver.clock.now()))
            self._look()

    def _look(self) -> None:
        """What must hold at every instant."""
        self._gang_links()
        self.wrong += doubles(self.driver)
        self.wrong += self._unheard(self.driver.workflows)
        snapshot = self.driver.supervisor.snapshot()
        known = {one.record.uuid: one.record for one in snapshot.workflows}
        for uuid, one in self.driver.workflows.items():
            if uuid in known and not self._stepped and _progress(known[uuid]) != _progress(one.record):
                self.wrong.append(f"{uuid}: the store says {one.record}, and the supervisor {known[uuid]}")
            for group in one.record.groups:
                before = self._states.get((uuid, group.name), group.state)
                if before.is_final and not is_legal(before, group.state):
                    self.wrong.append(f"{uuid}/{group.name}: {before.value}, then {group.state.value}")
                self._states[uuid, group.name] = group.state
                self.wrong += self._waits_too_long(group, snapshot.nodes)

    def _unheard(self, workflows: Mapping[str, StoredWorkflow]) -> Iterator[str]:
        """Ends that a node knows, and can report, that are not in the store."""
        for key, end in self.driver.backend.ends.items():
            if key in self._heard or not end["started_at"] or not self.driver.backend.reaches(key.node):
                continue
            self._heard.add(key)
            for task in workflows[key.workflow].record.group(key.group).attempts:
                if (task.name, task.attempt, task.node) == (key.task, key.attempt, key.node) and not task.state.is_final:
                    yield f"{key.name} has ended, and the store says {task.state.value}"

    def _waits_too_long(self, group: GroupRecord, nodes: Mapping[tuple[str, str], NodeView]) -> Iterator[str]:
        """A node that is unreachable is not waited for longer than the pool says."""
        for task in group.tasks:
            view = nodes.get(("lab", task.node or ""))
            if view is not None and not view.up and not task.state.is_final:
                away_s = self.driver.clock.now() - view.since
                if away_s > self.driver.pool.node_lost_after_s:
                    yield f"{group.name}/{task.name} is {task.state.value}, and {task.node} unreachable for {away_s:g} s"

    def _gang_links(self) -> None:
        """Messages between nodes: one task of a world failed, so the others stop, even if the supervisor cannot reach them."""
        backend = self.driver.backend
        ends = backend.ends
        for key in backend.running:
            plan = self.driver.workflows[key.workflow].plan.group(key.group)
            if plan.world is not None and any(
                _failed_by_itself(plan, peer, ends[peer])
                for peer in ends
                if (peer.workflow, peer.group, peer.attempt) == (key.workflow, key.group, key.attempt)
            ):
                backend.end_after_peer_failure(key.name)
        if self.driver.seen:
            self.driver.settle()

    # What can happen.

    def _node(self, fault: Fault) -> str:
        nodes = self.driver.pool.nodes
        return nodes[int(fault.which * len(nodes))].name

    def _cut(self, fault: Fault) -> None:
        self.driver.backend.cut(self._node(fault))

    def _heal(self, fault: Fault) -> None:
        self.driver.backend.heal(self._node(fault))

    def _silence(self, fault: Fault) -> None:
        self.driver.backend.silence(self._node(fault))

    def _reboot(self, fault: Fault) -> None:
        self.driver.backend.reboot(self._node(fault))

    def _forget(self, fault: Fault) -> None:
        backend, name = self.driver.backend, self._node(fault)
        backend.cut(name)
        backend.forget(name)

    def _kill(self, fault: Fault) -> None:
        running = self.driver.backend.running
        if running:
            self.driver.backend.kill(running[int(fault.which * len(running))].name)

    def _expire(self, fault: Fault) -> None:
        alive = self.driver.backend.alive
        if alive:
            self.driver.backend.expire(alive[int(fault.which * len(alive))])

    def _restart(self, _: Fault) -> None:
        self.driver.restart()

    def _die(self, fault: Fault) -> None:
        self.driver.die_after(int(fault.which * _DEEDS))

    def _cancel(self, fault: Fault) -> None:
        self._cancel_now(
            list(self.driver.workflows)[int(fault.which * len(self.driver.workflows))], force=fault.kind == "force"
        )

    def _cancel_now(self, uuid: str, *, force: bool = False) -> None:
        if self.driver.record(uuid).cancel is None and not self.driver.record(uuid).state.is_final:
            self.driver.cancel(uuid, force=force)

    def _step(self, fault: Fault) -> None:
        self.driver.clock.advance(fault.amount)
        self.driver.backend.step(fault.amount)

    def _nothing(self, fault: Fault) -> None:
        pass


_HAPPENS: dict[str, Callable[[_Night, Fault], None]] = {
    "cut": _Night._cut,
    "heal": _Night._heal,
    "silence": _Night._silence,
    "reboot": _Night._reboot,
    "forget": _Night._forget,
    "kill": _Night._kill,
    "expire": _Night._expire,
    "restart": _Night._restart,
    "die": _Night._die,
    "cancel": _Night._cancel,
    "force": _Night._cancel,
    "step": _Night._step,
    "nothing": _Night._nothing,
}


def _progress(record: WorkflowRecord) -> tuple[object, ...]:
    return (record.state, record.reason, record.started_at, record.ended_at, record.groups)


def doubles(driver: Driver) -> Iterator[str]:
    """Tasks that run twice at once on nodes that can be reached."""
    seen: set[tuple[str, str, str]] = set()
    for key in driver.backend.running:
        if driver.backend.reaches(key.node):
            task = (key.workflow, key.group, key.task)
            if task in seen:
                yield f"{task} runs twice at once"
            seen.add(task)


def leaks(driver: Driver) -> Iterator[str]:
    """What is left although everything has ended."""
    yield from unfinished(driver.workflows)
    yield from (f"{name} is left on its node" for name in driver.backend.alive)
    yield from (f"{identity} was never answered" for identity in driver.supervisor.in_flight)


def unfinished(workflows: Mapping[str, StoredWorkflow]) -> Iterator[str]:
    """What has not ended of workflows."""
    for uuid, one in workflows.items():
        for group in one.record.groups:
            if not group.state.is_final:
                yield f"{uuid}/{group.name} has not ended: {group.state.value}"
            for task in group.attempts:
                if not task.state.is_final:
                    yield f"{uuid}/{group.name}/{task.name}/{task.attempt} has not ended: {task.state.value}"
                if task.orphan is not None:
                    yield f"{uuid}/{group.name}/{task.name}/{task.attempt} is still looked for"


def lies(
    workflows: Mapping[str, StoredWorkflow], ended: Mapping[AttemptKey, dict[str, Any]], stepped_s: float = 0.0
) -> Iterator[str]:
    """Where the records of workflows that are over differ from what truly happened on the nodes.

    ``stepped_s``: by how much our clock was set meanwhile; ends closer than that are not told apart.
    """
    ends = {(key.name, key.node): end for key, end in ended.items()}
    unsure_s = 2 * _UNCERTAIN_S + 0.001 + stepped_s
    for uuid, one in workflows.items():
        for group in one.record.groups:
            plan = one.plan.group(group.name)
            for attempt in range(group.attempt + 1):
                truth: dict[str, dict[str, Any]] = {}
                for task in (task for task in group.attempts if task.attempt == attempt):
                    name = f"{uuid}/{group.name}/{task.name}/{attempt}"
                    end = ends.get((name, task.node or ""))
                    yield from _misread(name, task, end)
                    if end is not None and task.reason in _OWN:
                        truth[task.name] = end
                yield from (f"{uuid}/{group.name}: {words}" for words in _misjudged(group, plan, attempt, truth, unsure_s))


def _misread(name: str, task: TaskRecord, end: dict[str, Any] | None) -> Iterator[str]:
    """Every exit code that existed is in the record."""
    if end is None or end["started_at"] is None or task.reason in (Reason.NODE_LOST, Reason.START_ERROR):
        return
    if task.reason is Reason.INTERNAL and task.end is None:
        return  # its node no longer knew it when it was asked
    if task.end is None or (task.end.exit_code, task.end.signal) != (end["exit_code"], end["signal"]):
        yield f"{name} ended with {end}, and the record says {task.end} ({task.state.value} {task.reason})"
    failed = end["reason"] == "exited" and (end["exit_code"] != 0)
    if failed and task.reason is Reason.PEER_FAILED:
        yield f"{name} failed by itself ({end}) and is called a victim"
    if not failed and task.reason in _OWN and end["exit_code"] is None:
        yield f"{name} was ended ({end}) and is called {task.reason}"


def _misjudged(
    group: GroupRecord, plan: GroupPlan, attempt: int, truth: dict[str, dict[str, Any]], unsure_s: float
) -> Iterator[str]:
    """The verdict names what failed first, and never what was stopped because of it."""
    tasks = {task.name: task for task in group.attempts if task.attempt == attempt}
    cause = group.earlier_causes[attempt] if attempt < group.attempt else group.cause
    if attempt == group.attempt and group.state is State.COMPLETED:
        bad = [name for name, task in tasks.items() if task.state is not State.COMPLETED and _counts(plan, task)]
        if bad:
            yield f"is COMPLETED, and {bad} did not complete"
    if cause is None or cause.reason is Reason.START_TIMEOUT:
        return
    culprit = tasks[cause.task]
    if culprit.reason is not cause.reason or cause.reason in (None, Reason.PEER_FAILED):
        yield f"the cause of attempt {attempt} is {cause}, and {culprit.name} ended with {culprit.reason}"
    own = {name: end["ended_at"] for name, end in truth.items() if _counts(plan, tasks[name])}
    if own and (culprit.reason is Reason.NODE_LOST or own.get(cause.task, cause.at) > min(own.values()) + unsure_s):
        yield f"the cause of attempt {attempt} is {cause}, and these failed by themselves: {truth}"


def _counts(plan: GroupPlan, task: TaskRecord) -> bool:
    return task.lead or not plan.ignore_nonlead_status


def _failed_by_itself(plan: GroupPlan, key: AttemptKey, end: dict[str, Any]) -> bool:
    if end["reason"] != "exited":
        return False
    reason = Reason.SIGNAL if end["signal"] else Reason.EXIT_CODE
    code = exit_code_of(reason, end["exit_code"], end["signal"], has_run=True)
    action = plan.launch(key.task).exit_actions.action(code)
    return action is not Action.COMPLETE and (code != 0 or action is not None)
