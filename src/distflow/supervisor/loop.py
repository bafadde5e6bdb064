"""The loop: observe → decide → save → act. All decisions are made in pure modules; this module executes them.

It may be killed at any instant. It saves each decision with its events in one transaction before it acts, and it may repeat
commands. When it starts, it asks the nodes for the state of every unfinished attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from distflow.backends.base import (
    AttemptKey,
    AttemptObservation,
    Backend,
    CollectUnanswered,
    Leased,
    LeaseObservation,
    LeaseRefused,
    LeaseWaits,
    NodeDown,
    NodeUp,
    Observation,
    PrepareFailed,
    Sink,
    Unanswered,
    VenvObservation,
)
from distflow.documents.text import one_line
from distflow.errors import InputError, RecordUnreadable, StateError
from distflow.lifecycle.states import Reason, State, WorkflowState
from distflow.plan.bind import bind_task
from distflow.plan.credentials import TaskSecrets, task_secrets
from distflow.plan.model import BoundLaunch
from distflow.pools.model import Node, Pool
from distflow.state.event_details import WorkflowRefused
from distflow.state.event_text import event_text
from distflow.state.mirror import LAST_LINES, Mirror
from distflow.state.notification import Notification
from distflow.state.record import EventRecord, TaskRecord, WorkflowRecord
from distflow.state.secrets import gang_token, read_secrets, remove_secrets
from distflow.state.store import Store
from distflow.structs import replace
from distflow.supervisor.checkpoints import add_checkpoints, apply_transfer, checkpoint_path, transfer_of
from distflow.supervisor.commands import (
    BuildVenv,
    CollectOutput,
    Command,
    CommandId,
    Lease,
    PackCheckpoint,
    Prepare,
    Release,
    Start,
    Stop,
    TransferData,
    TransferEnded,
    TransferMoved,
    answered,
)
from distflow.supervisor.decide import decide
from distflow.supervisor.due_notifications import due_notifications
from distflow.supervisor.observations import (
    adjust_cancel_time,
    adjust_times,
    apply_node_observation,
    apply_observation,
    end_unstarted,
    node_details,
    update_node_view,
)
from distflow.supervisor.snapshot import Decision, LastDecision, NodeView, Snapshot, StoredWorkflow, attempt_key
from distflow.supervisor.timeline import cause_of
from distflow.supervisor.transfer_threads import TransferRunner
from distflow.supervisor.transfers import add_task_inputs, add_url_inputs, archives, arrived_archives, is_needed
from distflow.supervisor.workflow_copies import encode_copy

__all__ = ["ORPHAN_PATIENCE_S", "Supervisor", "Wake", "launch_of", "secrets_of"]


ORPHAN_PATIENCE_S = 3600.0
"""Seconds after the end of a task on a lost node that the supervisor waits for the node, to stop the processes there."""

_IDLE_S = 5.0
_RELEASE_S = 60.0
"""Seconds that a supervisor without work waits until allocations are released."""
_RELEASING_STEP_S = 0.2
_ROUNDS = 20
"""The maximum number of decisions that follow from one another at one instant. More would be a bug."""
_UNREADABLE = "the record of workflow {} cannot be read and is not changed: another version of distflow wrote it; use that one"

OpenBackend = Callable[[Pool, Sink], Backend]
OpenTransfers = Callable[[Callable[[TransferMoved | TransferEnded], None]], TransferRunner]


class Wake(Struct, frozen=True, kw_only=True):
    """Another process changed the store."""


Input = Observation | TransferMoved | TransferEnded | Wake
"""The inputs that the loop waits for."""


class _LastLines(Mapping[tuple[str, str, str], tuple[str, ...]]):
    """The last lines of the tasks of unfinished groups, by workflow (uuid), group and task. They are read on access."""

    def __init__(self, workflows: Mapping[str, StoredWorkflow], mirror: Mirror) -> None:
        self._workflows = workflows
        self._mirror = mirror

    def __getitem__(self, place: tuple[str, str, str]) -> tuple[str, ...]:
        uuid, group, name = place
        task = self._workflows[uuid].record.group(group).task(name)
        return self._mirror.last_lines(uuid, group, name, task.attempt, LAST_LINES)

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        for uuid, workflow in self._workflows.items():
            for group in workflow.record.groups:
                if not group.state.is_final:
                    yield from ((uuid, group.name, task.name) for task in group.tasks)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Supervisor:
    """Supervises all unfinished workflows of one state directory until there are none."""

    def __init__(
        self,
        store: Store,
        mirror: Mirror,
        secrets: Path,
        blobs: Path,
        now: Callable[[], float],
        open_backend: OpenBackend,
        open_transfers: OpenTransfers,
        log: Callable[[str], None],
        on_notifications: Callable[[], None] = lambda: None,
    ) -> None:
        """Store the arguments. The supervisor does nothing before ``run`` or ``step`` is called.

        ``on_notifications`` is called after notifications were stored, and must not block.
        """
        self._store = store
        self._mirror = mirror
        self._secrets = secrets
        self._blobs = blobs
        self._unneeded: set[str] = set()
        """Archives (SHA-256) that are removed unless another workflow needs them."""
        self._released: set[str] = set()
        """Workflows that have ended and whose data was removed. Those that are still loaded have orphan attempts."""
        self.skipped: Collection[str] = ()
        """Workflows (uuids) that this supervisor does not change, because it cannot read their record or open their backend."""
        self._now = now
        self._open_backend = open_backend
        self._transfers = open_transfers(self.report)
        self._log = log
        self._on_notifications = on_notifications
        self._inbox: queue.SimpleQueue[Input] = queue.SimpleQueue()
        self._workflows: dict[str, StoredWorkflow] = {}
        # These two are replaced, never changed: a decision detects changes by their identity.
        self._pools: Mapping[str, Pool] = {}
        self._nodes: Mapping[tuple[str, str], NodeView] = {}
        self._last_decision = LastDecision()
        self._backends: dict[str, Backend] = {}
        self._kept: dict[str, frozenset[AttemptKey]] = {}
        """For each pool whose nodes an engine allocates: the gangs that need nodes, as last reported to the engine."""
        self._allocated: set[tuple[str, str]] = set()
        """Pool and name of the allocated nodes that attempts use."""
        self.in_flight: dict[CommandId, Command] = {}
        """Commands that were given and are not answered yet."""

    def report(self, observation: Input) -> None:
        """Queue an observation, from any thread."""
        self._inbox.put(observation)

    def wake(self) -> None:
        """Report a change of the store, from any thread."""
        self._inbox.put(Wake())

    def run(self) -> None:
        """Work until all workflows have ended. For their orphan attempts alone, work at most ``ORPHAN_PATIENCE_S`` longer.

        Then wait, for at most a minute, until the allocations of ended workflows are released. New workflows end this wait.
        """
        try:
            wake_at, needed_at = self.step(0.0), self._now()
            while (is_needed := self._is_needed()) or (self._is_releasing() and self._now() < needed_at + _RELEASE_S):
                needed_at = self._now() if is_needed else needed_at
                patience_s = _IDLE_S if is_needed else _RELEASING_STEP_S
                wake_at = self.step(patience_s if wake_at is None else min(patience_s, max(0.0, wake_at - self._now())))
        finally:
            self._transfers.close()
            for backend in self._backends.values():
                backend.close()

    def step(self, patience_s: float) -> float | None:
        """Observe, then decide and act until nothing more follows. Return when the next decision is due; ``None`` for never.

        ``patience_s`` is the time to wait for the first observation.
        """
        self.observe(patience_s)
        return self._settle()

    def _is_needed(self) -> bool:
        """Return whether there is work. Orphan attempts alone count only for a while: the next supervisor checks them again."""
        patience = self._now() - ORPHAN_PATIENCE_S
        return any(
            not _is_over(one.record) or any(task.orphan and (task.ended_at or 0) > patience for task in _tasks(one.record))
            for one in self._workflows.values()
        )

    def _is_releasing(self) -> bool:
        return any(backend.is_releasing() for backend in self._backends.values())

    # Observing.

    def observe(self, patience_s: float) -> None:
        """Take the queued observations, waiting ``patience_s`` for the first. Save the changes, and load new work."""
        batch: list[Input] = []
        with contextlib.suppress(queue.Empty):
            batch.append(self._inbox.get(timeout=patience_s))
            while True:
                batch.append(self._inbox.get_nowait())
        changed: dict[str, WorkflowRecord] = {}
        events: list[EventRecord] = []
        # The wake-up of another process may have been lost, for example if the socket was removed.
        reload = self._store.has_news()
        for observation in batch:
            if isinstance(observation, Wake):
                reload = True
            elif isinstance(observation, NodeUp | NodeDown):
                self._apply_node(observation, changed, events)
            else:
                self._apply(observation, changed, events)
        if changed or events:
            self._store.save(changed.values(), events)
        if reload:
            self._load()

    def _apply(
        self,
        observation: LeaseObservation | VenvObservation | AttemptObservation | TransferMoved | TransferEnded,
        changed: dict[str, WorkflowRecord],
        events: list[EventRecord],
    ) -> None:
        for answered_id in answered(observation):
            self.in_flight.pop(answered_id, None)
        uuid = observation.workflow if isinstance(observation, Leased | LeaseRefused | LeaseWaits) else observation.key.workflow
        workflow = self._workflows.get(uuid)
        new_archives = arrived_archives(observation)
        if workflow is None:
            self._unneeded |= new_archives  # they were in transit when their workflow ended
        if workflow is None or isinstance(observation, Unanswered | CollectUnanswered):
            return
        if isinstance(observation, TransferMoved | TransferEnded):
            record, new_events = apply_transfer(workflow.record, observation)
        else:
            record, new_events = apply_observation(workflow.record, workflow.plan, observation)
        events += new_events
        if new_archives:
            # A checkpoint replaced an earlier one, or no group needs the new archive.
            self._unneeded |= (archives(workflow.record) | new_archives) - archives(record)
        if record is not workflow.record:
            changed[uuid] = record
            self._workflows[uuid] = replace(workflow, record=record)

    def _apply_node(
        self, observation: NodeUp | NodeDown, changed: dict[str, WorkflowRecord], events: list[EventRecord]
    ) -> None:
        place = (observation.pool, observation.node)
        view = self._nodes.get(place) or self._view(observation.pool, observation.node)
        self._nodes = {**self._nodes, place: update_node_view(view, observation)}
        if isinstance(observation, NodeDown):
            is_news = view.up or view.error != observation.error
            for command_id, command in list(self.in_flight.items()):
                if command.pool == observation.pool and command.key.node == observation.node:
                    del self.in_flight[command_id]
        else:
            is_news = not view.up and bool(view.error)
        if is_news:
            self._log(event_text(node_details(observation), group=None, task=None))
        for uuid, workflow in self._workflows.items():
            record, new_events = apply_node_observation(workflow.record, observation)
            events += new_events
            if record is not workflow.record:
                changed[uuid] = record
                self._workflows[uuid] = replace(workflow, record=record)

    # Loading new work.

    def _load(self) -> None:
        """Load new workflows and cancel requests from the store.

        Of loaded workflows, only the cancel request is read, because their records are newer here than in the store.
        """
        skipped: dict[str, str | None] = dict.fromkeys(self._store.uuids(are_unfinished=True))
        for record in self._store.unfinished():
            skipped.pop(record.uuid, None)
            loaded = self._workflows.get(record.uuid)
            if loaded is not None:
                cancel = adjust_cancel_time(record.cancel, loaded.record.cancel, self._now())
                if cancel != loaded.record.cancel:
                    self._workflows[record.uuid] = replace(loaded, record=replace(loaded.record, cancel=cancel))
                continue
            try:
                backend = self._backend(record)
                plan, notify = self._store.plan(record.uuid), self._store.notify_targets(record.uuid)
            except InputError as error:
                why = one_line(error)
                if any(_gangs(record)):
                    # A later supervisor resumes it.
                    skipped[record.uuid] = f"cannot supervise workflow {record.id}, and its tasks continue: {why}"
                else:
                    self._refuse(record, why)
                continue
            except RecordUnreadable:
                skipped[record.uuid] = None
                continue
            self._workflows[record.uuid] = StoredWorkflow(
                record=adjust_times(record, plan, self._now()), plan=plan, notify=notify
            )
            keys = [
                key
                for group in record.groups
                for task in group.attempts
                if (key := attempt_key(record, group, task)) is not None
                # The backend learns of allocated nodes only from watched attempts, and may still need their output.
                and (not _is_done(task) or (self._pools[record.pool_key].is_allocated and not group.state.is_final))
            ]
            if keys:
                backend.watch(keys)
        if unreported := skipped.keys() - self.skipped:
            ids = self._store.ids()
            for uuid in unreported:
                self._log(skipped[uuid] or _UNREADABLE.format(ids.get(uuid, uuid)))
        self.skipped = skipped.keys()

    def _refuse(self, record: WorkflowRecord, message: str) -> None:
        """End a workflow whose backend this installation of distflow cannot open, without asking any node."""
        now = self._now()
        groups = tuple(
            group if group.state.is_final else end_unstarted(group, State.FAILED, Reason.START_ERROR, message, now)
            for group in record.groups
        )
        ended = replace(record, state=WorkflowState.FAILED, reason=Reason.START_ERROR, ended_at=now, groups=groups)
        due = tuple(due_notifications(self._store.notify_targets(record.uuid), record, ended, now, now))
        self._save([ended], [EventRecord(at=now, details=WorkflowRefused(message=message), workflow=record.uuid)], due)

    def _save(self, records: Iterable[WorkflowRecord], events: Iterable[EventRecord], due: Sequence[Notification] = ()) -> None:
        self._store.save(records, events, due)
        if due:
            self._on_notifications()

    def _backend(self, record: WorkflowRecord) -> Backend:
        key = record.pool_key
        if key not in self._backends:
            pool = self._store.pool(record.uuid)
            self._backends[key] = self._open_backend(pool, lambda observation: self.report(_with_key(observation, key)))
            self._pools = {**self._pools, key: pool}
            self._nodes = {**self._nodes, **{(key, node.name): self._view(key, node.name) for node in pool.nodes}}
            self._backends[key].connect(pool.nodes)
        return self._backends[key]

    def _view(self, pool: str, name: str) -> NodeView:
        """Return the view of a node about which nothing is known yet."""
        node = self._pools[pool].node(name)
        return NodeView(node=node, since=self._now(), gpus=node.gpus, cpus=node.cpus, memory=node.memory)

    # Deciding and acting.

    def _settle(self) -> float | None:
        """Decide and act until nothing more follows at once. Return when the next decision is due; ``None`` for never."""
        decision = Decision()
        for _ in range(_ROUNDS):
            decision = self.decide()
            self._last_decision = decision.last_decision
            if decision.records or decision.events or decision.notifications:
                self._save(decision.records.values(), decision.events, decision.notifications)
                for event in decision.events:
                    self._log(event.text)
            for uuid, record in decision.records.items():
                self._workflows[uuid] = replace(self._workflows[uuid], record=record)
            for command in decision.commands:
                self._act(command)
            if not decision.records and not decision.commands:
                break
        self._drop_unneeded_commands()
        self._give_back_allocations()  # before ended workflows are forgotten, because it needs their exit codes
        self._forget_finished()
        return decision.wake_at

    def _drop_unneeded_commands(self) -> None:
        """Cancel transfers and builds, and forget lease requests, that their groups no longer need."""
        for command_id, command in list(self.in_flight.items()):
            if isinstance(command, TransferData) and not is_needed(self._workflows[command.key.workflow].record, command):
                self._transfers.cancel(command)
                del self.in_flight[command_id]
            elif isinstance(command, BuildVenv) and not _waits_for_venv(self._workflows[command.key.workflow].record, command):
                self._backends[command.pool].cancel_venv(command.key)
                del self.in_flight[command_id]
            elif isinstance(command, Lease) and not _waits_for_nodes(self._workflows[command.key.workflow].record, command):
                del self.in_flight[command_id]

    def decide(self) -> Decision:
        """Return what follows from the current state, without acting on it."""
        return decide(self.snapshot(), self._now())

    def snapshot(self) -> Snapshot:
        """Return everything that a decision depends on, except the time."""
        return Snapshot(
            workflows=tuple(self._workflows.values()),
            pools=self._pools,
            nodes=self._nodes,
            in_flight=frozenset(self.in_flight),
            lines=_LastLines(self._workflows, self._mirror),
            alive_at=self._alive_at(),
            last_decision=self._last_decision,
        )

    def _alive_at(self) -> dict[tuple[str, str, str], float]:
        return {
            (uuid, group.name, task.name): at
            for uuid, workflow in self._workflows.items()
            for group in workflow.record.groups
            if group.state is State.RUNNING
            and (
                workflow.plan.group(group.name).timeouts.hang_s is not None
                or any(task.hidden_failure is not None for task in group.tasks)
            )
            for task in group.tasks
            if (at := self._mirror.alive_at(uuid, group.name, task.name, task.attempt)) is not None
        }

    def _act(self, command: Command) -> None:
        self.in_flight[command.id] = command
        backend, workflow = self._backends[command.pool], self._workflows[command.key.workflow]
        match command:
            case Lease():
                backend.lease(command.request)
            case BuildVenv():
                venv = workflow.plan.group(command.key.group).venv
                if venv is not None:
                    backend.build_venv(command.key, venv)
            case Prepare():
                self._prepare(backend, command)
            case Start():
                backend.start(command.key)
            case Stop():
                backend.stop(command.key, grace_s=command.grace_s, why=command.why)
            case Release():
                backend.release(command.key)
            case CollectOutput():
                backend.collect(command.key, for_nodes=command.for_nodes)
            case PackCheckpoint():
                place = checkpoint_path(workflow.plan.group(command.key.group), command)
                backend.collect(command.key, command.checkpoint, place)
            case TransferData():
                self._transfers.begin(command, transfer_of(workflow.plan, workflow.record, command), backend)

    def _prepare(self, backend: Backend, command: Prepare) -> None:
        workflow, pool, node = self._workflows[command.key.workflow], self._pools[command.pool], command.key.node
        launch = launch_of(workflow, command, {node: pool.node(node)})
        if launch is None:
            del self.in_flight[command.id]
            return
        try:
            secrets = secrets_of(workflow, command, self._secrets)
            identities = {one.number: self._transfers.identity(one.url) for one in launch.downloads}
            workflow_copy = encode_copy(workflow, command, self._store, os.uname().nodename, self._secrets)
        except StateError as error:
            self.report(PrepareFailed(at=self._now(), key=command.key, message=one_line(error)))
            return
        secrets = replace(secrets, stores={number: identity for number, identity in identities.items() if identity is not None})
        backend.prepare(command.key, launch, secrets, pool.stop_grace_s, workflow_copy)

    def _forget_finished(self) -> None:
        for uuid, workflow in list(self._workflows.items()):
            if not _is_over(workflow.record):
                continue
            if uuid not in self._released:
                # Only once: a restart of the workflow may have stored the same archives since then.
                self._released.add(uuid)
                remove_secrets(self._secrets, uuid)
                self._transfers.forget(uuid)
                self._unneeded |= archives(workflow.record)
            if not any(task.orphan for task in _tasks(workflow.record)):
                del self._workflows[uuid]
        # Remove nothing while archives arrive, because a sender skips an archive that is already on this machine.
        if self._unneeded and not any(_brings_archives(command) for command in self.in_flight.values()):
            active = [one for one in self._workflows.values() if not _is_over(one.record)]
            others = [archives(one.record) | one.plan.blobs for one in active]
            for digest in self._unneeded.difference(*others):
                (self._blobs / digest).unlink(missing_ok=True)
            self._unneeded.clear()
        if all(_is_over(one.record) for one in self._workflows.values()):
            for part in self._blobs.glob("*.part"):
                part.unlink(missing_ok=True)  # a partial archive of an output that no group needs now

    def _give_back_allocations(self) -> None:
        """Report to each engine which gangs still need nodes. It releases all other allocations."""
        for pool in (key for key, one in self._pools.items() if one.is_allocated):
            records = [one.record for one in self._workflows.values() if one.record.pool_key == pool]
            kept = frozenset(gang for record in records for gang in _gangs(record))
            if kept != self._kept.get(pool):
                # Only the engine knows the allocations of an earlier supervisor, so the first report names ended workflows too.
                is_first = pool not in self._kept
                codes = _exit_codes(records, self._kept.get(pool, frozenset()) - kept)
                self._kept[pool] = kept
                ended = self._store.uuids() - self._store.uuids(are_unfinished=True) if is_first else None
                self._backends[pool].keep(kept, ended, codes)
            active = [record for record in records if not _is_over(record)]
            used = {(pool, task.node) for record in active for task in _tasks(record) if task.node is not None}
            gone = {one for one in self._allocated if one[0] == pool} - used
            self._allocated = (self._allocated | used) - gone
            if gone:
                self._nodes = {place: view for place, view in self._nodes.items() if place not in gone}


def _with_key(observation: Observation, pool_key: str) -> Observation:
    """Return an observation from a backend, which knows only the name of its pool, with the key of the pool."""
    return replace(observation, pool=pool_key) if isinstance(observation, NodeUp | NodeDown) else observation


def _gangs(record: WorkflowRecord) -> Iterator[AttemptKey]:
    """Yield the attempts of groups that wait for nodes or still need their nodes."""
    for group in record.groups:
        attempts = {task.attempt for task in group.attempts if task.node is not None and not _is_done(task)}
        if not group.state.is_final and group.state is not State.WAITING:
            attempts.add(group.attempt)
        for attempt in attempts:
            yield AttemptKey(workflow=record.uuid, group=group.name, task="", attempt=attempt, node="")


_LARGEST_EXIT_CODE = 255


def _exit_codes(records: Iterable[WorkflowRecord], gangs: Collection[AttemptKey]) -> dict[AttemptKey, int]:
    """Return the exit codes of the gangs that completed or failed; 1 for a failed gang without a code from 1 to 255."""
    found = {}
    groups = {(record.uuid, group.name): group for record in records for group in record.groups}
    for gang in gangs:
        group = groups.get((gang.workflow, gang.group))
        if group is None:
            continue
        cause = cause_of(group, gang.attempt)
        if gang.attempt == group.attempt and group.state is State.COMPLETED:
            found[gang] = 0
        elif gang.attempt < group.attempt or (group.state is State.FAILED and group.reason is not Reason.CANCELED):
            code = (cause.exit_code or (cause.signal and 128 + cause.signal)) if cause is not None else None
            found[gang] = code if code and code <= _LARGEST_EXIT_CODE else 1
    return found


def _brings_archives(command: Command) -> bool:
    return isinstance(command, CollectOutput | PackCheckpoint | TransferData)


def _waits_for_venv(record: WorkflowRecord, command: BuildVenv) -> bool:
    group = record.group(command.key.group)
    return group.attempt == command.key.attempt and any(one.node == command.key.node for one in group.venv_builds)


def _waits_for_nodes(record: WorkflowRecord, command: Lease) -> bool:
    group = record.group(command.key.group)
    return group.attempt == command.key.attempt and group.state is State.SCHEDULING


def _is_over(record: WorkflowRecord) -> bool:
    return record.state.is_final and all(task.log_complete for task in _tasks(record))


def _is_done(task: TaskRecord) -> bool:
    return task.state.is_final and task.log_complete and task.orphan is None


def _tasks(record: WorkflowRecord) -> list[TaskRecord]:
    return [task for group in record.groups for task in group.attempts]


def launch_of(workflow: StoredWorkflow, command: Prepare, nodes: Mapping[str, Node]) -> BoundLaunch | None:
    """Return the complete launch of the task to prepare; ``None`` if its group has lost its lease."""
    group, plan = workflow.record.group(command.key.group), workflow.plan.group(command.key.group)
    if group.binding is None:
        return None
    launch = bind_task(
        plan.sized(len(group.tasks)), command.key.task, group.binding, workflow.record.id, nodes, command.key.attempt
    )
    launch = add_task_inputs(launch, plan.launch(command.key.task).inputs, workflow.record)
    return add_checkpoints(add_url_inputs(launch, plan, workflow.record, group), plan, group)


def secrets_of(workflow: StoredWorkflow, command: Prepare, folder: Path) -> TaskSecrets:
    """Return, from ``folder``, the secrets of the task to prepare. Raises ``StateError`` if they are missing or unreadable."""
    plan = workflow.plan.group(command.key.group).launch(command.key.task)
    try:
        secrets = task_secrets(plan, read_secrets(folder, command.key.workflow))
        token = gang_token(folder, f"{command.key.workflow}/{command.key.group}/{command.key.attempt}")
    except (OSError, json.JSONDecodeError) as error:
        remedy = "submit the workflow again, or make the files readable if access was denied"
        raise StateError(f"cannot read the secrets in `{folder}`: {error}; {remedy}") from error
    except LookupError as error:
        message = f"the stored secrets of the workflow do not contain {error.args[0]}; submit the workflow again"
        raise StateError(message) from error
    return replace(secrets, token=token)
