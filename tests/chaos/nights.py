"""Run a schedule with the real supervisor and store and simulated nodes, and check them during the run and after it."""

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
from distflow.state.notification import Notification
from distflow.state.record import EventRecord, GroupRecord, TaskRecord, WorkflowRecord
from distflow.state.store import Store
from distflow.structs import replace
from distflow.supervisor.decide import decide
from distflow.supervisor.loop import Supervisor
from distflow.supervisor.snapshot import Decision, LastDecision, NodeView, StoredWorkflow
from distflow.testing.attempts import Behavior
from unit.supervisor.gangs import Driver, node, pool

__all__ = ["concurrent_attempts", "leftovers", "record_errors", "run_schedule", "unfinished"]

_LEASES_END_S = 200.0
_ACTS = 40
"""The fault `die` kills the supervisor within this number of acts. Each save and each command counts as two acts."""
_UNCERTAIN_S = 0.01
_OWN_FAILURES = (Reason.EXIT_CODE, Reason.SIGNAL)


def run_schedule(schedule: Schedule) -> list[str]:
    """Run a schedule to its end, and return a description of each error."""
    run = _Run(schedule)
    try:
        run.run()
    except AssertionError as error:
        return [*run.errors, str(error)[:2000]]
    stepped_s = sum(abs(fault.amount) for fault in schedule.faults if fault.kind == "step")
    driver = run.driver
    return [*run.errors, *leftovers(driver), *record_errors(driver.workflows, driver.backend.ends, stepped_s)]


class _RecomputingSupervisor(Supervisor):
    """A supervisor that makes each decision twice. Cached results of the last decision must not change it."""

    def decide(self) -> Decision:
        found = super().decide()
        recomputed = decide(replace(self.snapshot(), last_decision=LastDecision()), self._now())
        assert replace(found, last_decision=recomputed.last_decision) == recomputed
        return found


class _Killed(BaseException):
    """The supervisor's process was killed."""


class _KillCountdown:
    """The number of acts until the supervisor is killed: before or after it saves or sends a command."""

    def __init__(self) -> None:
        self.remaining: int | None = None

    def count_down(self) -> None:
        if self.remaining is not None:
            self.remaining -= 1
            if self.remaining < 0:
                raise _Killed


class _KillableStore(Store):
    """A store whose supervisor may be killed before or after it saves."""

    countdown: _KillCountdown

    def save(
        self, records: Iterable[WorkflowRecord], events: Iterable[EventRecord], notifications: Iterable[Notification] = ()
    ) -> None:
        self.countdown.count_down()
        super().save(records, events, notifications)
        self.countdown.count_down()


class _KillableBackend:
    """A backend whose supervisor may be killed before or after each command."""

    def __init__(self, backend: Backend, countdown: _KillCountdown) -> None:
        self._backend = backend
        self._countdown = countdown

    def __getattr__(self, name: str) -> Callable[..., object]:
        command = getattr(self._backend, name)

        def send(*args: object, **options: object) -> object:
            self._countdown.count_down()
            answer = command(*args, **options)
            self._countdown.count_down()
            return answer

        return send


class _KillableDriver(Driver):
    """A driver whose supervisor can be killed in the middle of a step."""

    def __init__(self, on: Pool, behavior: Callable[[AttemptKey], Behavior], clocks: Mapping[str, Clock]) -> None:
        self._countdown = _KillCountdown()
        super().__init__(on=on, behavior=behavior, clocks=clocks)

    def open_store(self) -> Store:
        store = _KillableStore(self.directory.store)
        store.countdown = self._countdown
        return store

    def open_backend(self, _pool: Pool, _sink: Sink) -> Backend:
        return cast("Backend", _KillableBackend(self.backend, self._countdown))

    supervisor_type = _RecomputingSupervisor

    def die_after(self, acts: int) -> None:
        """Kill the supervisor after a number of acts: before or after it saves or sends a command."""
        self._countdown.remaining = acts

    def step(self) -> float | None:
        try:
            return super().step()
        except _Killed:
            self.restart()
            return super().step()

    def restart(self) -> None:
        self._countdown.remaining = None
        super().restart()


class _Run:
    """The run of a schedule, with its errors."""

    def __init__(self, schedule: Schedule) -> None:
        self.errors: list[str] = []
        self._schedule = schedule
        nodes = [node(f"n{number}", gpus=gpus) for number, gpus in enumerate(schedule.nodes)]
        self.driver = _KillableDriver(
            on=pool(*nodes),
            behavior=lambda key: behavior(schedule.seed, key.name),
            clocks={
                one.name: Clock(offset_s=offset_s, uncertainty_s=_UNCERTAIN_S)
                for one, offset_s in zip(nodes, schedule.offsets_s, strict=True)
            },
        )
        self.driver.backend.leases_expire = True
        self._states: dict[tuple[str, str], State] = {}
        self._checked_ends: set[AttemptKey] = set()
        """Ended attempts that were compared with the store."""
        self._has_steps = any(fault.kind == "step" for fault in schedule.faults)
        """Times in the store may then be in the future. The supervisor corrects its own copy."""

    def run(self) -> None:
        """Inject all faults, heal all nodes, cancel unfinished workflows, and wait until nothing is left to do."""
        driver = self.driver
        for submitted in self._schedule.workflows:
            driver.add(submitted)
        driver.settle()
        for fault in self._schedule.faults:
            driver.advance(fault.after_s)
            self._check()
            _INJECT[fault.kind](self, fault)
            driver.settle()
            self._check()
        for one in driver.pool.nodes:
            driver.backend.heal(one.name)
        driver.settle()
        for _ in range(50):
            driver.advance(20.0)
            self._check()
        for uuid in driver.workflows:
            self._cancel_now(uuid)
        driver.run(limit=100_000)
        # Leases expire on nodes whose gangs run elsewhere.
        while driver.backend.alive and driver.backend.next_end < driver.clock.now() + _LEASES_END_S:
            driver.advance(max(0.0, driver.backend.next_end - driver.clock.now()))
            self._check()

    def _check(self) -> None:
        """Check the conditions that must hold at every moment."""
        self._gang_links()
        self.errors += concurrent_attempts(self.driver)
        self.errors += self._missing_ends(self.driver.workflows)
        snapshot = self.driver.supervisor.snapshot()
        known = {one.record.uuid: one.record for one in snapshot.workflows}
        for uuid, one in self.driver.workflows.items():
            if uuid in known and not self._has_steps and _progress(known[uuid]) != _progress(one.record):
                self.errors.append(f"{uuid}: the store says {one.record}, and the supervisor {known[uuid]}")
            for group in one.record.groups:
                before = self._states.get((uuid, group.name), group.state)
                if before.is_final and not is_legal(before, group.state):
                    self.errors.append(f"{uuid}/{group.name}: {before.value}, then {group.state.value}")
                self._states[uuid, group.name] = group.state
                self.errors += self._waits_too_long(group, snapshot.nodes)

    def _missing_ends(self, workflows: Mapping[str, StoredWorkflow]) -> Iterator[str]:
        """Find ends that a reachable node has recorded and that are not in the store."""
        for key, end in self.driver.backend.ends.items():
            if key in self._checked_ends or not end["started_at"] or not self.driver.backend.reaches(key.node):
                continue
            self._checked_ends.add(key)
            for task in workflows[key.workflow].record.group(key.group).attempts:
                if (task.name, task.attempt, task.node) == (key.task, key.attempt, key.node) and not task.state.is_final:
                    yield f"{key.name} has ended, and the store says {task.state.value}"

    def _waits_too_long(self, group: GroupRecord, nodes: Mapping[tuple[str, str], NodeView]) -> Iterator[str]:
        """Find tasks on a node that has been unreachable for longer than `node_lost_after_s`."""
        for task in group.tasks:
            view = nodes.get(("lab", task.node or ""))
            if view is not None and not view.up and not task.state.is_final:
                away_s = self.driver.clock.now() - view.since
                if away_s > self.driver.pool.node_lost_after_s:
                    yield f"{group.name}/{task.name} is {task.state.value}, and {task.node} unreachable for {away_s:g} s"

    def _gang_links(self) -> None:
        """Simulate the gang link: stop the peers of a failed task, even if the supervisor cannot reach them."""
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
        if self.driver.observations:
            self.driver.settle()

    # Faults.

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
        self.driver.die_after(int(fault.which * _ACTS))

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


_INJECT: dict[str, Callable[[_Run, Fault], None]] = {
    "cut": _Run._cut,
    "heal": _Run._heal,
    "silence": _Run._silence,
    "reboot": _Run._reboot,
    "forget": _Run._forget,
    "kill": _Run._kill,
    "expire": _Run._expire,
    "restart": _Run._restart,
    "die": _Run._die,
    "cancel": _Run._cancel,
    "force": _Run._cancel,
    "step": _Run._step,
    "nothing": _Run._nothing,
}


def _progress(record: WorkflowRecord) -> tuple[object, ...]:
    return (record.state, record.reason, record.started_at, record.ended_at, record.groups)


def concurrent_attempts(driver: Driver) -> Iterator[str]:
    """Find tasks that run twice at once on reachable nodes."""
    found: set[tuple[str, str, str]] = set()
    for key in driver.backend.running:
        if driver.backend.reaches(key.node):
            task = (key.workflow, key.group, key.task)
            if task in found:
                yield f"{task} runs twice at once"
            found.add(task)


def leftovers(driver: Driver) -> Iterator[str]:
    """Find unfinished workflows, attempts on nodes and unanswered requests."""
    yield from unfinished(driver.workflows)
    yield from (f"{name} is left on its node" for name in driver.backend.alive)
    yield from (f"{identity} was never answered" for identity in driver.supervisor.in_flight)


def unfinished(workflows: Mapping[str, StoredWorkflow]) -> Iterator[str]:
    """Find groups and tasks that have not ended."""
    for uuid, one in workflows.items():
        for group in one.record.groups:
            if not group.state.is_final:
                yield f"{uuid}/{group.name} has not ended: {group.state.value}"
            for task in group.attempts:
                if not task.state.is_final:
                    yield f"{uuid}/{group.name}/{task.name}/{task.attempt} has not ended: {task.state.value}"
                if task.orphan is not None:
                    yield f"{uuid}/{group.name}/{task.name}/{task.attempt} is still searched for"


def record_errors(
    workflows: Mapping[str, StoredWorkflow], ended: Mapping[AttemptKey, dict[str, Any]], stepped_s: float = 0.0
) -> Iterator[str]:
    """Find differences between the records of ended workflows and the ends on the nodes.

    ``stepped_s`` is the sum of all steps of this machine's clock. The order of ends that are closer is not checked.
    """
    ends = {(key.name, key.node): end for key, end in ended.items()}
    uncertain_s = 2 * _UNCERTAIN_S + 0.001 + stepped_s
    for uuid, one in workflows.items():
        for group in one.record.groups:
            plan = one.plan.group(group.name)
            for attempt in range(group.attempt + 1):
                own_failures: dict[str, dict[str, Any]] = {}
                for task in (task for task in group.attempts if task.attempt == attempt):
                    name = f"{uuid}/{group.name}/{task.name}/{attempt}"
                    end = ends.get((name, task.node or ""))
                    yield from _exit_code_errors(name, task, end)
                    if end is not None and task.reason in _OWN_FAILURES:
                        own_failures[task.name] = end
                yield from (
                    f"{uuid}/{group.name}: {error}" for error in _cause_errors(group, plan, attempt, own_failures, uncertain_s)
                )


def _exit_code_errors(name: str, task: TaskRecord, end: dict[str, Any] | None) -> Iterator[str]:
    """Check that the record has the exit code of an attempt."""
    if end is None or end["started_at"] is None or task.reason in (Reason.NODE_LOST, Reason.START_ERROR):
        return
    if task.reason is Reason.INTERNAL and task.end is None:
        return  # its node no longer had a record of it
    if task.end is None or (task.end.exit_code, task.end.signal) != (end["exit_code"], end["signal"]):
        yield f"{name} ended with {end}, and the record says {task.end} ({task.state.value} {task.reason})"
    failed = end["reason"] == "exited" and (end["exit_code"] != 0)
    if failed and task.reason is Reason.PEER_FAILED:
        yield f"{name} failed by itself ({end}) and is recorded as stopped because of a peer"
    if not failed and task.reason in _OWN_FAILURES and end["exit_code"] is None:
        yield f"{name} was ended ({end}) and is recorded as {task.reason}"


def _cause_errors(
    group: GroupRecord, plan: GroupPlan, attempt: int, own_failures: dict[str, dict[str, Any]], uncertain_s: float
) -> Iterator[str]:
    """Check that the recorded cause is the first failure, and not a task that was stopped because of it."""
    tasks = {task.name: task for task in group.attempts if task.attempt == attempt}
    cause = group.earlier_causes[attempt] if attempt < group.attempt else group.cause
    if attempt == group.attempt and group.state is State.COMPLETED:
        incomplete = [name for name, task in tasks.items() if task.state is not State.COMPLETED and _counts(plan, task)]
        if incomplete:
            yield f"is COMPLETED, and {incomplete} did not complete"
    if cause is None or cause.reason is Reason.START_TIMEOUT:
        return
    culprit = tasks[cause.task]
    if culprit.reason is not cause.reason or cause.reason in (None, Reason.PEER_FAILED):
        yield f"the cause of attempt {attempt} is {cause}, and {culprit.name} ended with {culprit.reason}"
    own = {name: end["ended_at"] for name, end in own_failures.items() if _counts(plan, tasks[name])}
    if own and (culprit.reason is Reason.NODE_LOST or own.get(cause.task, cause.at) > min(own.values()) + uncertain_s):
        yield f"the cause of attempt {attempt} is {cause}, and these failed by themselves: {own_failures}"


def _counts(plan: GroupPlan, task: TaskRecord) -> bool:
    return task.lead or not plan.ignore_nonlead_status


def _failed_by_itself(plan: GroupPlan, key: AttemptKey, end: dict[str, Any]) -> bool:
    if end["reason"] != "exited":
        return False
    reason = Reason.SIGNAL if end["signal"] else Reason.EXIT_CODE
    code = exit_code_of(reason, end["exit_code"], end["signal"], has_run=True)
    action = plan.launch(key.task).exit_actions.action(code)
    return action is not Action.COMPLETE and (code != 0 or action is not None)
