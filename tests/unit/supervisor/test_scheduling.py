"""The leases of waiting gangs, and the messages about why they wait."""

from __future__ import annotations

import pytest

from distflow.backends.base import NodeUp
from distflow.lifecycle.states import State
from distflow.plan.binding import Binding, TaskBinding
from distflow.state.event_details import GroupWaiting
from distflow.state.record import Priority, UnreachableNodes
from distflow.structs import replace
from distflow.supervisor.observations import announce_wait, update_node_view
from distflow.supervisor.scheduling import Leases, capacity, free, next_leases, pool_usage
from distflow.supervisor.snapshot import HeldResources, NodeView, PoolUsage, Snapshot
from unit.supervisor.gangs import group_plan, node, pool, workflow


def _leases_for(tasks: int, views: list[NodeView], gpus: int = 8, **requested: int) -> Leases:
    """Decide about one waiting gang."""
    one = workflow(group_plan(tasks=tasks, gpus=gpus, **requested))  # type: ignore[arg-type]
    groups = tuple(replace(group, state=State.SCHEDULING) for group in one.record.groups)
    waiting = replace(one, record=replace(one.record, groups=groups))
    nodes = {("lab", view.node.name): view for view in views}
    snapshot = Snapshot(workflows=(waiting,), pools={"lab": pool(*(view.node for view in views))}, nodes=nodes)
    return next_leases(snapshot, [pool_usage(waiting)], 0.0)


def _view(number: int, *, up: bool = False, error: str = "") -> NodeView:
    return NodeView(node=node(f"n{number}"), up=up, error=error, gpus=8)


def _reported_view(number: int, *, configured: int | None, gpus: int, machine: str = "") -> NodeView:
    """The view of a node after its first report."""
    one = replace(node(f"n{number}"), gpus=configured)
    return update_node_view(
        NodeView(node=one, gpus=one.gpus), NodeUp(at=0.0, pool="lab", node=one.name, gpus=gpus, lease_directory_id=machine)
    )


def test_no_message_while_the_first_connections_are_made() -> None:
    leases = _leases_for(64, [_view(number, up=number < 60) for number in range(64)])
    assert (leases.commands, leases.messages) == ([], {})


def test_unreachable_node_is_named_while_others_are_being_connected() -> None:
    views = [_view(0, up=True), _view(1), _view(2, error="refused the key")]
    assert _leases_for(3, views).messages == {("u1", "train"): "connecting to n1; unreachable: n2: refused the key"}


@pytest.mark.parametrize(
    ("others", "missing"),
    [
        ([_view(1, up=True)], None),  # there is room without n2
        ([_view(1)], None),  # n1 is still being connected
        ([], UnreachableNodes(errors={"n2": "refused the key"}, needs_action=True)),
        (
            [_view(1, error="no route")],
            UnreachableNodes(errors={"n1": "no route", "n2": "refused the key"}, needs_action=False),
        ),
    ],
)
def test_unreachable_nodes_that_a_gang_needs_are_named(others: list[NodeView], missing: UnreachableNodes | None) -> None:
    views = [_view(0, up=True), *others, replace(_view(2, error="refused the key"), needs_action=True)]
    assert _leases_for(2, views).unreachable.get(("u1", "train")) == missing


def test_a_message_names_only_the_first_nodes_of_many() -> None:
    (message,) = _leases_for(64, [_view(number, error="no route") for number in range(64)]).messages.values()
    assert message.startswith("no node can be reached: n0: no route; n1: no route;")
    assert message.endswith("and 60 more")
    small = [replace(_view(number, up=True), gpus=4) for number in range(64)]
    (message,) = _leases_for(64, small).failures.values()
    assert message.startswith("pool lab cannot run it, even when idle: no room for t0: n0: 4 of 4 GPUs free, 8 requested, ")
    assert message.endswith("and 60 more")


@pytest.mark.parametrize("configured", [None, 8])
def test_a_gang_that_the_pool_can_never_hold_fails_with_the_configured_and_the_reported_number(configured: int | None) -> None:
    views = [_reported_view(number, configured=configured, gpus=0) for number in range(2)]
    leases = _leases_for(2, views)
    assert leases.commands == []
    (message,) = leases.failures.values()
    assert message.startswith("pool lab cannot run it, even when idle: no room for t0: n0: 0 of 0 GPUs free, 8 requested")
    assert ("(the configuration says 8 GPUs, the node reports 0)" in message) is (configured == 8)
    # A node that has not been reached yet may have the GPUs.
    leases = _leases_for(1, [views[0], _view(1, error="no route")])
    assert (leases.commands, leases.failures) == ([], {})
    # With `check_capacity: false`, the configured number counts, because distflow cannot count some accelerators.
    trusted = [replace(view.node, gpus=8, check_capacity=False) for view in views]
    node_up = NodeUp(at=0.0, pool="lab", node="n", gpus=0)
    leases = _leases_for(2, [update_node_view(NodeView(node=one, gpus=8), node_up) for one in trusted])
    assert len(leases.commands) == 1


GIB = 1 << 30
TOO_LITTLE = "(the configuration says 200 GiB of memory, the node reports 62 GiB)"


@pytest.mark.parametrize(
    ("requested", "configured", "message"),
    [
        (
            {"cpus": 5},
            {"cpus": 8},
            "no room for t0: n0: 4 of 4 CPUs free, 5 requested (the configuration says 8 CPUs, the node reports 4)",
        ),
        (
            {"memory": 100 * GIB},
            {"memory": 200 * GIB},
            f"no room for t0: n0: 62Gi of 62Gi memory free, 100Gi requested {TOO_LITTLE}",
        ),
        ({"cpus": 4}, {"cpus": 8}, ""),
        ({"cpus": 5}, {"cpus": 8, "check_capacity": False}, ""),
        ({"memory": 64 * GIB}, {"memory": 64 * GIB}, ""),  # the kernel reserves some of the installed memory
    ],
)
def test_cpus_and_memory_that_a_node_does_not_have_are_not_leased(
    requested: dict[str, int], configured: dict[str, int], message: str
) -> None:
    one = replace(node("n0", gpus=0), **configured)  # type: ignore[arg-type]
    node_up = NodeUp(at=0.0, pool="lab", node="n0", gpus=0, cpus=4, memory=62 * GIB)
    view = update_node_view(NodeView(node=one, gpus=0, cpus=one.cpus, memory=one.memory), node_up)
    leases = _leases_for(1, [view], 0, **requested)
    if message:
        assert list(leases.failures.values()) == [f"pool lab cannot run it, even when idle: {message}"]
    else:
        assert (len(leases.commands), leases.failures) == (1, {})


def test_a_retried_gang_waits_for_gpus_that_a_node_has_lost() -> None:
    one = workflow(group_plan(tasks=1))
    groups = tuple(replace(group, state=State.SCHEDULING, attempt=1) for group in one.record.groups)
    waiting = replace(one, record=replace(one.record, groups=groups))
    view = _reported_view(0, configured=8, gpus=7)
    snapshot = Snapshot(workflows=(waiting,), pools={"lab": pool(view.node)}, nodes={("lab", "n0"): view})
    leases = next_leases(snapshot, [pool_usage(waiting)], 0.0)
    assert leases.failures == {}
    (message,) = leases.messages.values()
    assert "7 of 7 GPUs free, 8 requested (the configuration says 8 GPUs, the node reports 7)" in message


def test_pool_entries_of_one_machine_count_its_gpus_once() -> None:
    views = [_reported_view(number, configured=8, gpus=8, machine="one") for number in range(2)]
    (message,) = _leases_for(2, views).failures.values()
    assert "n1: 0 of 0 GPUs free, 8 requested (on the same machine as n0, or with the same lease_dir)" in message
    # While a gang holds the GPUs, the next gang waits, and does not request them under the other name.
    (command,) = _leases_for(1, views).commands
    assert command.request is not None
    assert command.request.nodes == {"t0": "n0"}
    assert [(one.gpus, one.note != "") for one in capacity(views)] == [(8, False), (0, True)]
    held = PoolUsage(workflow=workflow(group_plan(tasks=1)), waiting=(), holds=(HeldResources(node="n1", gpus=8, port=29500),))
    assert [one.gpus for one in free(views, [held], None)] == [0, 0]
    assert [one.closed for one in free(views, [held], 29500)] == ["port 29500 is taken"] * 2
    # Tasks without counted resources may run on both entries.
    (command,) = _leases_for(2, views, gpus=0).commands
    assert command.request is not None
    assert sorted(command.request.nodes.values()) == ["n0", "n1"]


def test_event_of_a_waiting_gang_is_not_repeated() -> None:
    group = replace(workflow(group_plan(tasks=1)).record.groups[0], state=State.SCHEDULING, scheduling_at=1.0)
    events = []
    for number in range(20):
        group, event = announce_wait(group, f"n{number % 2}: 6 of 8 GPUs are free")
        assert group.message == f"Waiting for nodes: n{number % 2}: 6 of 8 GPUs are free"
        events.append(event)
    assert [event for event in events if event is not None] == [
        GroupWaiting(message=f"Waiting for nodes: n{number}: 6 of 8 GPUs are free") for number in range(2)
    ]
    # The next attempt is another wait.
    group, event = announce_wait(replace(group, attempt=1, scheduling_at=2.0, message=""), "n0: 6 of 8 GPUs are free")
    assert event


def test_gang_starts_on_enough_nodes_although_others_are_being_connected() -> None:
    leases = _leases_for(2, [_view(0, up=True), _view(1), _view(2, up=True)])
    assert [sorted(command.request.nodes.values()) for command in leases.commands] == [["n0", "n2"]]


def test_gangs_are_ordered_by_priority_and_then_by_submission() -> None:
    order = [Priority.LOW, Priority.NORMAL, Priority.HIGH, Priority.NORMAL, Priority.HIGH]
    gangs = [workflow(group_plan(tasks=1), uuid=f"u{number}", at=number) for number in range(len(order))]
    waiting = {
        one.record.uuid: replace(
            one,
            record=replace(
                one.record,
                id=one.record.uuid,
                priority=priority,
                groups=tuple(replace(group, state=State.SCHEDULING) for group in one.record.groups),
            ),
        )
        for one, priority in zip(gangs, order, strict=True)
    }
    views = {("lab", "n0"): _view(0, up=True)}
    served: list[str] = []
    messages: dict[str, str] = {}
    while waiting:
        snapshot = Snapshot(workflows=tuple(waiting.values()), pools={"lab": pool(node("n0"))}, nodes=views)
        leases = next_leases(snapshot, [pool_usage(one) for one in waiting.values()], 0.0)
        (command,) = leases.commands
        served.append(command.key.workflow)
        current = {uuid: message for (uuid, _), message in leases.messages.items()}
        # Each gang names the one before it, and its message does not change when others leave the queue.
        assert all(messages.get(uuid, message) == message for uuid, message in current.items())
        messages |= current
        assert list(current) == [uuid for uuid in ("u4", "u1", "u3", "u0") if uuid in current]
        del waiting[command.key.workflow]
    assert served == ["u2", "u4", "u1", "u3", "u0"]
    assert messages == {"u4": "behind u2", "u1": "behind u4", "u3": "behind u1", "u0": "behind u3"}


def test_gang_that_waits_behind_a_group_of_its_own_workflow_names_the_group() -> None:
    one = workflow(*(group_plan(name, tasks=1) for name in ("first", "second")))
    groups = tuple(replace(group, state=State.SCHEDULING) for group in one.record.groups)
    one = replace(one, record=replace(one.record, groups=groups))
    snapshot = Snapshot(
        workflows=(one,), pools={"lab": pool(node("n0"))}, nodes={("lab", "n0"): _view(0, up=True)},
    )  # fmt: skip
    leases = next_leases(snapshot, [pool_usage(one)], 0.0)
    assert leases.messages == {("u1", "second"): "behind the group first of this workflow"}


def test_gang_with_nodes_keeps_them_despite_higher_priorities() -> None:
    low, high = (workflow(group_plan(tasks=1), uuid=uuid) for uuid in ("low", "high"))
    (group,) = low.record.groups
    binding = Binding(tasks={"t0": TaskBinding(node="n0", address="10.0.0.1", gpu_ids=tuple(range(8)))}, port=29500)
    held = replace(group, state=State.RUNNING, binding=binding, tasks=tuple(replace(one, node="n0") for one in group.tasks))
    waiting = tuple(replace(one, state=State.SCHEDULING) for one in high.record.groups)
    snapshot = Snapshot(
        workflows=(
            replace(low, record=replace(low.record, groups=(held,), priority=Priority.LOW)),
            replace(high, record=replace(high.record, groups=waiting, priority=Priority.HIGH)),
        ),
        pools={"lab": pool(node("n0"))},
        nodes={("lab", "n0"): _view(0, up=True)},
    )
    leases = next_leases(snapshot, [pool_usage(one) for one in snapshot.workflows], 0.0)
    assert leases.commands == []
    assert leases.messages["high", "train"].startswith("no room for t0")
