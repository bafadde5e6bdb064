"""Small workflows for tests of the supervisor: plans and records, and the real supervisor on a store and simulated nodes."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from distflow.backends.base import AttemptKey, Backend, Observation, Sink
from distflow.layout.ranks import TaskRanks
from distflow.layout.ranks import WorldLayout as RankWorld
from distflow.lifecycle.clocks import Clock
from distflow.lifecycle.exits import ExitActions
from distflow.plan.model import GroupPlan, Launch, Plan
from distflow.pools.model import Node, Pool
from distflow.protocol.names import attempt_name
from distflow.spec.model import DataSpec, InputSpec, ResourceSpec, Retry, Timeouts
from distflow.state.codec import encode
from distflow.state.directory import StateDirectory
from distflow.state.event_details import CancelRequested
from distflow.state.mirror import Mirror
from distflow.state.record import CancelRequest, Cause, EventRecord, GroupRecord, TaskRecord, WorkflowRecord
from distflow.state.store import Store
from distflow.structs import replace
from distflow.supervisor.commands import TransferEnded, TransferMoved
from distflow.supervisor.loop import Supervisor
from distflow.supervisor.snapshot import StoredWorkflow
from distflow.testing.backend import Behavior, FakeBackend
from distflow.testing.transfers import FakeTransfers
from distflow.testing.waiting import FakeClock

__all__ = ["Driver", "group_plan", "node", "pool", "workflow"]

NO_ACTIONS, RETRY = ExitActions(), Retry()


def node(name: str, gpus: int = 8, cpus: int | None = None) -> Node:
    """A node with GPUs."""
    return Node(name=name, host=name, root="~/.distflow", python="python3", gpus=gpus, cpus=cpus)


def pool(*nodes: Node, backend: str = "ssh", **settings: float) -> Pool:
    """A pool of these nodes. Default: two nodes."""
    return replace(Pool(name="lab", backend=backend, nodes=nodes or (node("n1"), node("n2"))), **settings)  # type: ignore[arg-type]


def group_plan(
    name: str = "train",
    tasks: int = 2,
    *,
    world: bool = True,
    gpus: int = 8,
    cpus: int | None = None,
    memory: int | None = None,
    port: int | None = None,
    ignore: bool | None = None,
    exec_s: float | None = None,
    queue_s: float | None = None,
    hang_s: float | None = None,
    barrier: bool = True,
    stop_on_missing_ranks: bool | None = None,
    after: tuple[str, ...] = (),
    exit_actions: ExitActions = NO_ACTIONS,
    retry: Retry = RETRY,
    inputs: tuple[InputSpec, ...] = (),
    url_inputs: tuple[DataSpec, ...] = (),
    url_outputs: tuple[DataSpec, ...] = (),
) -> GroupPlan:
    """A group of tasks ``t0``, ``t1``, …, of which ``t0`` is the lead. ``after`` names the groups that it waits for."""
    ranks = [TaskRanks(task=f"t{i}", offset=i * 8, size=8, node_rank=i) for i in range(tasks)]
    rank_world = RankWorld(world_size=8 * tasks, tasks=tuple(ranks), style="ranks", port=port) if world else None
    return GroupPlan(
        name=name,
        world=rank_world,
        barrier=barrier,
        stop_on_missing_ranks=stop_on_missing_ranks,
        ignore_nonlead_status=(not world) if ignore is None else ignore,
        timeouts=Timeouts(exec_s=exec_s, queue_s=queue_s, hang_s=hang_s),
        upstream=after,
        retry=retry,
        launches=tuple(
            Launch(
                task=item.task,
                lead=item.node_rank == 0,
                argv=("true",),
                environment={"MASTER_ADDR": "@@MASTER_ADDR@@"},
                ranks=item if world else None,
                resource=ResourceSpec(gpu=gpus, cpu=cpus, memory=memory),
                inputs=inputs,
                url_inputs=url_inputs,
                url_outputs=url_outputs,
                exit_actions=exit_actions,
            )
            for item in ranks
        ),
    )


def workflow(*groups: GroupPlan, uuid: str = "u1", at: float = 0.0) -> StoredWorkflow:
    """A workflow that was just submitted."""
    plan = Plan(name="w", pool="lab", groups=groups or (group_plan(),))
    record = WorkflowRecord(
        uuid=uuid, id=f"w-{uuid}", name="w", number=1, user="me", pool="lab", pool_key="lab", submitted_at=at,
        groups=tuple(
            GroupRecord(
                name=g.name, upstream=g.upstream, tasks=tuple(
                    TaskRecord(name=one.task, lead=one.lead, ranks=one.ranks.text if one.ranks else "") for one in g.launches
                ),
            )
            for g in plan.groups
        ),
    )  # fmt: skip
    return StoredWorkflow(record=record, plan=plan)


class Driver:
    """Steps the real supervisor, with the real store, on simulated nodes and a clock that the test sets.

    Tests read all workflows from the store, through a separate connection.
    """

    def __init__(
        self,
        *workflows: StoredWorkflow,
        on: Pool | None = None,
        behavior: Callable[[AttemptKey], Behavior] = lambda _: Behavior(),
        clocks: Mapping[str, Clock] | None = None,
    ) -> None:
        self.pool = on or pool()
        self.clock = FakeClock()
        self.observations: deque[Observation | TransferMoved | TransferEnded] = deque()
        """Observations that the supervisor does not have yet."""
        self.observation_count = 0
        """The number of observations that were delivered to the supervisor."""
        self.log: list[str] = []
        folder = tempfile.mkdtemp(prefix="distflow-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.directory = StateDirectory(Path(folder))
        for made in (self.directory.blobs, self.directory.secrets, self.directory.logs):
            made.mkdir()
        self.mirror = Mirror(self.directory.logs, self.clock.now)
        self.backend = FakeBackend(
            self.pool, now=self.clock.now, sink=self.observations.append, behavior=behavior, clocks=clocks
        )
        self.transfers = FakeTransfers()
        self.reader = Store(self.directory.store)
        weakref.finalize(self, self.reader.close)
        self._pool_document = msgspec.Raw(encode(self.pool))
        """Encoded once, because the pool may have thousands of nodes."""
        self._plans: dict[str, Plan] = {}
        self._workflows: dict[str, StoredWorkflow] = {}
        for one in workflows:
            self.add(one)
        self._open()

    # Parts that a subclass can replace.

    supervisor_type = Supervisor

    def open_store(self) -> Store:
        """Open the store for the supervisor."""
        return Store(self.directory.store)

    def open_backend(self, _pool: Pool, _sink: Sink) -> Backend:
        """Return the fake backend. A restarted supervisor gets the same one."""
        return self.backend

    def open_transfers(self, _sink: object) -> FakeTransfers:
        """Return the fake transfers. A restarted supervisor gets the same ones."""
        return self.transfers

    # Actions of a test.

    def _open(self) -> None:
        self.store = self.open_store()
        self._closing = weakref.finalize(self, self.store.close)
        self.supervisor = self.supervisor_type(
            self.store, self.mirror, self.directory.secrets, self.directory.blobs, self.clock.now,
            self.open_backend, self.open_transfers, self.log.append,
        )  # fmt: skip
        self.supervisor.observe(0.0)

    def restart(self) -> None:
        """Kill the supervisor, lose its pending observations, and start another one on the same store and nodes."""
        self._closing()
        self.backend.close()
        self.observations.clear()
        self._open()

    def add(self, one: StoredWorkflow) -> None:
        """Submit a workflow."""
        document: Any = self._pool_document
        self.reader.submit(one.record, template="", spec="", plan=one.plan, pool=document, notify=one.notify)
        self._plans[one.record.uuid] = self.reader.plan(one.record.uuid)

    def cancel(self, uuid: str = "u1", *, force: bool = False, message: str = "") -> None:
        """Request the cancellation of a workflow, as the command line does."""
        request = CancelRequest(at=self.clock.now(), by="me", force=force, message=message)
        event = EventRecord(at=self.clock.now(), details=CancelRequested(user="me"), workflow=uuid)
        self.reader.request_cancel(uuid, request, event)

    def rewrite(self, record: WorkflowRecord) -> None:
        """Replace the record of a workflow in the store, and restart the supervisor."""
        self.reader.save([record], [])
        self.restart()

    def output(self, task: str, lines: tuple[str, ...], *, group: str = "train", uuid: str = "u1", attempt: int = 0) -> None:
        """Mirror these lines as the complete output of a task."""
        text = "".join(f"{line}\n" for line in lines)
        self.mirror.write(attempt_name(uuid, group, task, attempt), "output.log", 0, text.encode())

    def beat(self, task: str, at: float | None = None, *, group: str = "train", uuid: str = "u1") -> None:
        """Record a heartbeat of a task, now or at another time."""
        self.mirror.record_heartbeat(attempt_name(uuid, group, task, 0), self.clock.now() if at is None else at)

    def step(self) -> float | None:
        """Let the supervisor apply the pending observations, decide and act. Return when the next decision is due."""
        self._deliver()
        return self.supervisor.step(0.0)

    def settle(self, rounds: int = 50) -> float | None:
        """Step until nothing more follows. Return when the next decision is due."""
        for _ in range(rounds):
            wake_at = self.step()
            if not self.observations and self.supervisor._inbox.empty():
                return wake_at
        raise AssertionError("the supervisor does not settle")

    def observe(self) -> None:
        """Let the supervisor apply all observations without a decision."""
        self.supervisor.observe(0.0)
        while self.observations:
            self._deliver()
            self.supervisor.observe(0.0)

    def advance(self, seconds: float) -> None:
        """Let time pass, and end the commands that end in this time."""
        self.clock.advance(seconds)
        self.backend.tick()
        self.settle()

    def run(self, limit: float = 10_000.0) -> None:
        """Let time pass until all workflows have ended."""
        deadline = self.clock.now() + limit
        wake_at = self.settle()
        while not all(one.record.state.is_final for one in self.workflows.values()):
            following = min(self.backend.next_end, wake_at if wake_at is not None else float("inf"))
            assert following <= deadline, (
                f"no event follows before the limit: {[one.record for one in self.workflows.values()]}"
            )
            self.clock.advance(max(0.0, following - self.clock.now()) + 0.001)
            self.backend.tick()
            wake_at = self.settle()

    def _deliver(self) -> None:
        self.observation_count += len(self.observations)
        while self.observations:
            self.supervisor.report(self.observations.popleft())

    # Contents of the store.

    @property
    def workflows(self) -> Mapping[str, StoredWorkflow]:
        """All workflows by uuid, in the order of their submission."""
        if self.reader.has_news() or len(self._workflows) != len(self._plans):
            self._workflows = {
                uuid: StoredWorkflow(record=self.reader.find(uuid), plan=plan) for uuid, plan in self._plans.items()
            }
        return self._workflows

    @property
    def events(self) -> list[EventRecord]:
        """The events of all workflows, in order."""
        stored = (event for uuid in self._plans for event in self.reader.events(uuid))
        events = [event for event in stored if not isinstance(event.details, CancelRequested)]
        return sorted(events, key=lambda event: event.sequence)

    def record(self, uuid: str = "u1") -> WorkflowRecord:
        """The record of a workflow."""
        return self.workflows[uuid].record

    def group(self, uuid: str = "u1") -> GroupRecord:
        """The first group of a workflow."""
        return self.record(uuid).groups[0]

    def cause(self) -> Cause:
        """The cause of the first group's failure."""
        cause = self.group().cause
        assert cause is not None
        return cause
