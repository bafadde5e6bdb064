"""What a waiting gang is told of its pool."""

from __future__ import annotations

from dataclasses import replace

from distflow.lifecycle.states import State
from distflow.plan.binding import Binding, TaskBinding
from distflow.state.record import Priority
from distflow.supervisor.queue import Leases, next_leases
from distflow.supervisor.room import share_of
from distflow.supervisor.world import NodeView, World
from unit.supervisor.gangs import group_plan, node, pool, workflow


def _asked(tasks: int, views: list[NodeView]) -> Leases:
    one = workflow(group_plan(tasks=tasks))
    groups = tuple(replace(group, state=State.SCHEDULING) for group in one.record.groups)
    waiting = replace(one, record=replace(one.record, groups=groups))
    nodes = {("lab", view.node.name): view for view in views}
    world = World(workflows=(waiting,), pools={"lab": pool(*(view.node for view in views))}, nodes=nodes)
    return next_leases(world, [share_of(waiting)], 0.0)


def _view(number: int, *, up: bool = False, error: str = "") -> NodeView:
    return NodeView(node=node(f"n{number}"), up=up, error=error, gpus=8)


def test_nothing_is_said_while_the_first_connections_are_being_made() -> None:
    leases = _asked(64, [_view(number, up=number < 60) for number in range(64)])
    assert (leases.commands, leases.messages) == ([], {})


def test_a_node_that_cannot_be_reached_is_named_while_others_are_being_connected() -> None:
    views = [_view(0, up=True), _view(1), _view(2, error="refused our key")]
    assert _asked(3, views).messages == {("u1", "train"): "connecting to n1; out of reach: n2: refused our key"}


def test_a_message_names_few_nodes_of_many() -> None:
    (words,) = _asked(64, [_view(number, error="no route") for number in range(64)]).messages.values()
    assert words.startswith("no node can be reached: n0: no route; n1: no route;")
    assert words.endswith("and 60 more")
    taken = [replace(_view(number, up=True), gpus=4) for number in range(64)]
    (words,) = _asked(64, taken).messages.values()
    assert words.startswith("no room for t0: n0: 4 of 4 GPUs free, 8 asked, ")
    assert words.endswith("and 60 more")


def test_enough_nodes_are_enough_although_others_are_not_there_yet() -> None:
    leases = _asked(2, [_view(0, up=True), _view(1), _view(2, up=True)])
    assert [sorted(command.lease.nodes.values()) for command in leases.commands if command.lease] == [["n0", "n2"]]


def test_priorities_come_before_the_order_of_submission_and_that_within_one() -> None:
    order = [Priority.LOW, Priority.NORMAL, Priority.HIGH, Priority.NORMAL, Priority.HIGH]
    gangs = [workflow(group_plan(tasks=1), uuid=f"u{number}", at=number) for number in range(len(order))]
    left = {
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
    told: dict[str, str] = {}
    while left:
        world = World(workflows=tuple(left.values()), pools={"lab": pool(node("n0"))}, nodes=views)
        leases = next_leases(world, [share_of(one) for one in left.values()], 0.0)
        (command,) = leases.commands
        served.append(command.workflow)
        words = {uuid: message for (uuid, _), message in leases.messages.items()}
        # Each is told of the one before it, and hears nothing new when others go.
        assert all(told.get(uuid, message) == message for uuid, message in words.items())
        told |= words
        assert list(words) == [uuid for uuid in ("u4", "u1", "u3", "u0") if uuid in words]
        del left[command.workflow]
    assert served == ["u2", "u4", "u1", "u3", "u0"]
    assert told == {"u4": "behind u2", "u1": "behind u4", "u3": "behind u1", "u0": "behind u3"}


def test_a_gang_that_has_its_nodes_keeps_them_whatever_comes() -> None:
    low, high = (workflow(group_plan(tasks=1), uuid=uuid) for uuid in ("low", "high"))
    (group,) = low.record.groups
    binding = Binding(tasks={"t0": TaskBinding(node="n0", address="10.0.0.1", gpu_ids=tuple(range(8)))}, port=29500)
    held = replace(group, state=State.RUNNING, binding=binding, tasks=tuple(replace(one, node="n0") for one in group.tasks))
    waits = tuple(replace(one, state=State.SCHEDULING) for one in high.record.groups)
    world = World(
        workflows=(
            replace(low, record=replace(low.record, groups=(held,), priority=Priority.LOW)),
            replace(high, record=replace(high.record, groups=waits, priority=Priority.HIGH)),
        ),
        pools={"lab": pool(node("n0"))},
        nodes={("lab", "n0"): _view(0, up=True)},
    )
    leases = next_leases(world, [share_of(one) for one in world.workflows], 0.0)
    assert leases.commands == []
    assert leases.messages["high", "train"].startswith("no room for t0")
