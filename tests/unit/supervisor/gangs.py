"""Small workflows for tests of the supervisor: plans, records and a driven world, all values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from distflow.backends.base import (
    AttemptKey,
    CollectUnanswered,
    Leased,
    LeaseRefused,
    NodeDown,
    NodeUp,
    Observation,
    Unanswered,
)
from distflow.layout.ranks import TaskRanks
from distflow.layout.ranks import World as RankWorld
from distflow.lifecycle.clocks import Clock
from distflow.lifecycle.exits import ExitActions
from distflow.plan.credentials import GivenSecrets
from distflow.plan.model import BoundLaunch, GroupPlan, Launch, Plan
from distflow.pools.model import Node, Pool
from distflow.spec.model import DataSpec, InputSpec, ResourceSpec, Retry, Timeouts
from distflow.state.record import Cause, Event, GroupRecord, TaskRecord, WorkflowRecord
from distflow.storage.identity import Identity
from distflow.supervisor.absorb import absorb, absorb_node, absorb_view
from distflow.supervisor.answering import answered
from distflow.supervisor.carrying import TransferEnded, TransferMoved
from distflow.supervisor.checkpointing import absorb_transfer, place_of
from distflow.supervisor.commands import (
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
)
from distflow.supervisor.decide import decide
from distflow.supervisor.preparing import launch_of
from distflow.supervisor.world import Decision, NodeView, Rest, Workflow, World, key_of
from distflow.testing.backend import Behaviour, FakeBackend
from distflow.testing.clock import FakeClock

__all__ = ["Driver", "group_plan", "node", "pool", "workflow"]

NO_ACTIONS, RETRY = ExitActions(), Retry()


def node(name: str, gpus: int = 8, cpus: int | None = None) -> Node:
    """A node with GPUs."""
    return Node(name=name, host=name, root="~/.distflow", python="python3", gpus=gpus, cpus=cpus)


def pool(*nodes: Node, backend: str = "ssh", **settings: float) -> Pool:
    """A pool of those nodes."""
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
    """A group of tasks ``t0``, ``t1``, …; the first leads; ``after`` names the groups that it waits for."""
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


def workflow(*groups: GroupPlan, uuid: str = "u1", at: float = 0.0) -> Workflow:
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
    return Workflow(record=record, plan=plan)


class Driver:
    """The supervisor's loop without processes: decide, act on a fake backend, absorb what it says."""

    def __init__(
        self,
        *workflows: Workflow,
        on: Pool | None = None,
        behaviour: Callable[[AttemptKey], Behaviour] = lambda _: Behaviour(),
        clocks: Mapping[str, Clock] | None = None,
    ) -> None:
        self.pool = on or pool()
        self.pools = {"lab": self.pool}
        self.clock = FakeClock()
        self.seen: deque[Observation | TransferMoved | TransferEnded] = deque()
        self.count = 0
        """What was seen so far."""
        self.backend = FakeBackend(self.pool, clock=self.clock, sink=self.seen.append, behaviour=behaviour, clocks=clocks)
        self.events: list[Event] = []
        self.workflows = {one.record.uuid: one for one in workflows}
        self.launches: dict[str, BoundLaunch] = {}
        self.alive_at: dict[tuple[str, str, str], float] = {}
        self.lines: dict[tuple[str, str, str], tuple[str, ...]] = {}
        self.bare_nodes: set[str] = set()
        """Nodes that can fetch nothing by themselves."""
        self.carrying: list[TransferData] = []
        """Data that was to be carried, in the order of the commands."""
        self.restart()

    def restart(self) -> None:
        """Forget what only the process knew, as a killed supervisor does, and ask the nodes."""
        self.in_flight: dict[CommandId, Command] = {}
        self.rest = Rest()
        now = self.clock.now()
        self.nodes = {("lab", one.name): NodeView(node=one, since=now, gpus=one.gpus, cpus=one.cpus) for one in self.pool.nodes}
        self.seen.clear()
        self.backend.connect(self.pool.nodes)
        for one in self.workflows.values():
            for group in one.record.groups:
                for task in group.attempts:
                    if task.node and not (task.state.is_final and task.log_complete and task.stray is None):
                        key = key_of(one.record, group, task)
                        assert key is not None
                        self.backend.watch([key])

    def add(self, one: Workflow) -> None:
        """Submit another workflow."""
        self.workflows[one.record.uuid] = one

    def record(self, uuid: str = "u1") -> WorkflowRecord:
        """The record of a workflow."""
        return self.workflows[uuid].record

    def group(self, uuid: str = "u1") -> GroupRecord:
        """The first group of a workflow."""
        return self.record(uuid).groups[0]

    def cause(self) -> Cause:
        """The first cause of the first group's failure."""
        cause = self.group().cause
        assert cause is not None
        return cause

    def change(self, uuid: str, **changes: object) -> None:
        """Change a record as the command line would."""
        one = self.workflows[uuid]
        self.workflows[uuid] = replace(one, record=replace(one.record, **changes))  # type: ignore[arg-type]

    def settle(self, rounds: int = 50) -> float | None:
        """Decide and act until nothing follows; return when to look again."""
        wake_at = None
        for _ in range(rounds):
            self.absorb()
            decision = self.decide()
            self.rest = decision.rest
            self.events += decision.events
            for uuid, record in decision.records.items():
                self.workflows[uuid] = replace(self.workflows[uuid], record=record)
            for command in decision.commands:
                self.act(command)
            wake_at = decision.wake_at
            if not (decision.records or decision.commands or self.seen):
                return wake_at
        raise AssertionError("the supervisor does not come to rest")

    def advance(self, seconds: float) -> None:
        """Let time pass, and what ends in it end."""
        self.clock.advance(seconds)
        self.backend.tick()
        self.settle()

    def run(self, limit: float = 10_000.0) -> None:
        """Let time pass until everything has ended."""
        deadline = self.clock.now() + limit
        wake_at = self.settle()
        while not all(one.record.state.is_final for one in self.workflows.values()):
            following = min(self.backend.next_end, wake_at if wake_at is not None else float("inf"))
            assert following <= deadline, f"nothing will ever happen: {[one.record for one in self.workflows.values()]}"
            self.clock.advance(max(0.0, following - self.clock.now()) + 0.001)
            self.backend.tick()
            wake_at = self.settle()

    def decide(self) -> Decision:
        """What follows now; nothing is done about it."""
        return decide(self.world(), self.clock.now())

    def world(self) -> World:
        """What the decision sees."""
        return World(
            workflows=tuple(self.workflows.values()), pools=self.pools, nodes=self.nodes,
            in_flight=frozenset(self.in_flight), lines=self.lines, alive_at=self.alive_at,
            rest=self.rest,
        )  # fmt: skip

    def absorb(self) -> None:
        """Take what the backend said."""
        while self.seen:
            seen = self.seen.popleft()
            self.count += 1
            if isinstance(seen, NodeUp | NodeDown):
                place = (seen.pool, seen.node)
                self.nodes = {**self.nodes, place: absorb_view(self.nodes[place], seen)}
                if isinstance(seen, NodeDown):
                    self.in_flight = {i: c for i, c in self.in_flight.items() if c.key.node != seen.node}
                for uuid, one in self.workflows.items():
                    record, events = absorb_node(one.record, seen)
                    self.events += events
                    if record is not one.record:
                        self.workflows[uuid] = replace(one, record=record)
                continue
            uuid = seen.workflow if isinstance(seen, Leased | LeaseRefused) else seen.key.workflow
            for identity in answered(seen):
                self.in_flight.pop(identity, None)
            known = self.workflows.get(uuid)
            if known is None or isinstance(seen, Unanswered | CollectUnanswered):
                continue
            if isinstance(seen, TransferMoved | TransferEnded):
                record, events = absorb_transfer(known.record, seen)
            else:
                record, events = absorb(known.record, known.plan, seen)
            self.events += events
            self.workflows[uuid] = replace(known, record=record)

    def act(self, command: Command) -> None:
        """Hand a command to the backend."""
        self.in_flight[command.identity] = command
        match command:
            case Lease():
                self.backend.lease(command.request)
            case Prepare():
                one, node = self.workflows[command.key.workflow], command.key.node
                launch = launch_of(one, command, {node: self.nodes[command.pool, node].node})
                assert launch is not None
                self.launches[command.key.name] = launch
                stores = {} if node in self.bare_nodes else {one.number: Identity(environment={}) for one in launch.brings}
                self.backend.prepare(command.key, launch, GivenSecrets(stores=stores), 30.0)
            case Start():
                self.backend.start(command.key)
            case Stop():
                self.backend.stop(command.key, grace_s=command.grace_s, why=command.why)
            case CollectOutput():
                self.backend.collect(command.key, for_nodes=command.for_nodes)
            case PackCheckpoint():
                place = place_of(self.workflows[command.key.workflow].plan.group(command.key.group), command)
                self.backend.collect(command.key, command.checkpoint, place)
            case TransferData():
                self.carrying.append(command)
            case Release():
                self.backend.release(command.key)
