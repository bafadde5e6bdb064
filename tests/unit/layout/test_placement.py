"""Placement of gangs: it is deterministic, accepts each gang that fits, and otherwise gives a reason for each node."""

from __future__ import annotations

from itertools import permutations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.layout.placement import Demand, Free, Placement, place, place_near
from distflow.spec.model import TopologyRequest

GPUS = st.integers(0, 4)


def demand(task: str, gpus: int = 0, spread: str | None = "w", **more: object) -> Demand:
    return Demand(task=task, gpus=gpus, spread=spread, **more)  # type: ignore[arg-type]


def reasons(found: object) -> dict[str, tuple[str, ...]]:
    assert isinstance(found, tuple)
    return {item.task: item.reasons for item in found}


def test_tasks_are_placed_in_order_on_the_nodes_in_order() -> None:
    nodes = [Free(node=f"n{index}", gpus=8) for index in range(4)]
    found = place([demand("b", 8), demand("a", 8)], nodes, shared=False)
    assert isinstance(found, Placement)
    assert list(found.nodes.items()) == [("b", "n0"), ("a", "n1")]


def test_a_shared_node_may_run_all_tasks() -> None:
    nodes = [Free(node="local", gpus=4)]
    demands = [demand("a", 2), demand("b", 2)]
    assert place(demands, nodes, shared=True) == Placement(nodes={"a": "local", "b": "local"})
    assert reasons(place(demands, nodes, shared=False)) == {"b": ("local: used by a of the same world",)}
    third = [*demands, demand("c", 1)]
    assert reasons(place(third, nodes, shared=True)) == {"c": ("local: 0 GPUs free, 1 requested, after placing a, b",)}


def test_unknown_resources_are_not_checked() -> None:
    requested = [Demand(task="a", gpus=8, cpus=64, memory=2**40, platform="h100")]
    assert isinstance(place(requested, [Free(node="n")], shared=False), Placement)


def test_each_node_that_a_task_cannot_use_has_a_reason() -> None:
    gib = 1024**3
    requested = Demand(task="a", gpus=8, cpus=32, memory=64 * gib, platform="h100", nodes_excluded=("n0",))
    nodes = [
        Free(node="n0", gpus=8),
        Free(node="n1", gpus=8, platform="a100"),
        Free(node="n2", gpus=4, all_gpus=8),
        Free(node="n3", gpus=8, cpus=16),
        Free(node="n4", gpus=8, memory=32 * gib, all_memory=128 * gib),
    ]
    assert reasons(place([requested], nodes, shared=False)) == {
        "a": (
            "n0: excluded by nodesExcluded",
            "n1: platform a100, h100 requested",
            "n2: 4 of 8 GPUs free, 8 requested",
            "n3: 16 CPUs free, 32 requested",
            "n4: 32Gi of 128Gi memory free, 64Gi requested",
        )
    }
    assert reasons(place([requested], [], shared=False)) == {"a": ("the pool has no nodes",)}


def test_a_task_runs_only_on_nodes_with_its_labels() -> None:
    nodes = [Free(node="n0"), Free(node="n1", labels={"rack": "r2"}), Free(node="n2", labels={"rack": "r1"})]
    requested = Demand(task="a", labels={"rack": "r1"})
    assert place([requested], nodes, shared=False) == Placement(nodes={"a": "n2"})
    assert reasons(place([requested], nodes[:2], shared=False)) == {
        "a": ("n0: no label rack, r1 requested", "n1: rack r2, r1 requested")
    }


def test_an_empty_gang_is_placed() -> None:
    assert place([], [], shared=False) == Placement(nodes={})


@settings(max_examples=300)
@given(st.lists(GPUS, min_size=1, max_size=5), st.lists(GPUS, min_size=1, max_size=5))
def test_a_world_that_fits_is_never_refused(requested: list[int], free: list[int]) -> None:
    demands = [demand(f"t{index}", gpus) for index, gpus in enumerate(requested)]
    nodes = [Free(node=f"n{index}", gpus=gpus) for index, gpus in enumerate(free)]
    feasible = any(
        all(gpus <= room for gpus, room in zip(requested, chosen, strict=True)) for chosen in permutations(free, len(requested))
    )
    found = place(demands, nodes, shared=False)
    assert isinstance(found, Placement) == feasible
    if isinstance(found, Placement):
        assert len(set(found.nodes.values())) == len(requested)
        room = {node.node: node.gpus or 0 for node in nodes}
        assert all(item.gpus <= room[found.nodes[item.task]] for item in demands)
    else:
        assert all(len(reason) == len(nodes) for reason in reasons(found).values())


@settings(max_examples=200)
@given(
    st.lists(st.tuples(GPUS, st.sampled_from(["w", "v", None])), min_size=1, max_size=5),
    st.lists(GPUS, min_size=1, max_size=4),
)
def test_gangs_of_several_worlds_are_placed_if_possible(requested: list[tuple[int, str | None]], free: list[int]) -> None:
    demands = [demand(f"t{index}", gpus, spread) for index, (gpus, spread) in enumerate(requested)]
    nodes = [Free(node=f"n{index}", gpus=gpus) for index, gpus in enumerate(free)]

    def fits(at: int, room: list[int], held: frozenset[tuple[int, str]]) -> bool:
        if at == len(demands):
            return True
        item = demands[at]
        for node, gpus in enumerate(room):
            if gpus >= item.gpus and (node, item.spread) not in held:
                less = [*room[:node], gpus - item.gpus, *room[node + 1 :]]
                if fits(at + 1, less, held | ({(node, item.spread)} if item.spread else set())):
                    return True
        return False

    assert isinstance(place(demands, nodes, shared=False), Placement) == fits(0, free, frozenset())


def test_a_gang_of_300_tasks_is_placed_if_other_tasks_must_move() -> None:
    # The last task can run only on n0, so other tasks have to move.
    nodes = [Free(node=f"n{index}", gpus=8) for index in range(300)]
    demands = [demand(f"t{index}", 8) for index in range(299)]
    demands.append(demand("last", 8, nodes_excluded=tuple(f"n{index}" for index in range(1, 300))))
    found = place(demands, nodes, shared=False)
    assert isinstance(found, Placement)
    assert found.nodes["last"] == "n0"


RACK, ZONE = TopologyRequest(key="rack"), TopologyRequest(key="zone")


def node(name: str, gpus: int = 8, **labels: str) -> Free:
    return Free(node=name, gpus=gpus, labels=labels)


def gang(count: int, *near: TopologyRequest, gpus: int = 8) -> list[Demand]:
    return [Demand(task=f"t{number}", gpus=gpus, near=near, spread="train") for number in range(count)]


def nodes_of(placed: object) -> list[str]:
    assert isinstance(placed, Placement), placed
    return list(placed.nodes.values())


RACKS = [node("a1", rack="r1"), node("b1", rack="r2"), node("a2", rack="r1"), node("b2", rack="r2"), node("b3", rack="r2")]


def test_a_gang_runs_in_one_rack() -> None:
    assert nodes_of(place_near(gang(2, RACK), RACKS, shared=False)) == ["a1", "a2"]
    assert nodes_of(place_near(gang(3, RACK), RACKS, shared=False)) == ["b1", "b2", "b3"]


def test_without_topology_a_gang_uses_the_first_nodes() -> None:
    assert nodes_of(place_near(gang(3), RACKS, shared=False)) == ["a1", "b1", "a2"]


def test_required_topology_requests_are_never_dropped() -> None:
    refused = place_near(gang(4, RACK), RACKS, shared=False)
    assert not isinstance(refused, Placement)
    assert [one.task for one in refused] == ["t3"]
    assert "a1: rack r1, r2 requested" in refused[0].reasons


def test_preferred_topology_requests_are_dropped_if_there_is_no_room() -> None:
    preferred = TopologyRequest(key="rack", required=False)
    assert nodes_of(place_near(gang(3, preferred), RACKS, shared=False)) == ["b1", "b2", "b3"]
    assert len(nodes_of(place_near(gang(5, preferred), RACKS, shared=False))) == 5


def test_the_last_preferred_request_is_dropped_first() -> None:
    nodes = [node("a", zone="z1", rack="r1"), node("b", zone="z2", rack="r2"), node("c", zone="z2", rack="r3")]
    requests = (TopologyRequest(key="zone", required=False), TopologyRequest(key="rack", required=False))
    assert nodes_of(place_near(gang(2, *requests), nodes, shared=False)) == ["b", "c"]


def test_each_topology_group_has_its_own_rack() -> None:
    left, right = TopologyRequest(key="rack", group="left"), TopologyRequest(key="rack", group="right")
    demands = [*gang(2, left), *(Demand(task=f"u{number}", gpus=8, near=(right,), spread="train") for number in range(3))]
    assert nodes_of(place_near(demands, RACKS, shared=False)) == ["a1", "a2", "b1", "b2", "b3"]


def test_tasks_without_topology_run_on_any_node() -> None:
    demands = [*gang(2, RACK), Demand(task="helper")]
    assert nodes_of(place_near(demands, [node("x"), *RACKS], shared=False)) == ["a1", "a2", "x"]


def test_a_label_that_no_node_has_is_named() -> None:
    refused = place_near(gang(2, ZONE), RACKS, shared=False)
    assert not isinstance(refused, Placement)
    assert refused[0].reasons == ("no node has the label `zone`, which the task's `topology` requests",)


def test_a_pool_of_one_node_satisfies_topology_requests() -> None:
    assert nodes_of(place_near(gang(2, ZONE, gpus=4), [node("local")], shared=True)) == ["local", "local"]


MACHINES = st.tuples(st.sampled_from(["r1", "r2", ""]), st.sampled_from(["z1", "z2"]), st.integers(0, 8))
TOPOLOGY_REQUESTS = st.lists(
    st.sampled_from([RACK, ZONE, TopologyRequest(key="rack", group="b")]), max_size=2, unique_by=lambda near: near.key
)


@settings(max_examples=150)
@given(st.lists(MACHINES, min_size=2, max_size=5), st.lists(TOPOLOGY_REQUESTS, max_size=3))
def test_a_placement_is_found_exactly_when_there_is_one(
    machines: list[tuple[str, str, int]], requests: list[list[TopologyRequest]]
) -> None:
    nodes = [
        node(f"n{number}", gpus, zone=zone, **({"rack": rack} if rack else {}))
        for number, (rack, zone, gpus) in enumerate(machines)
    ]
    demands = [Demand(task=f"t{number}", gpus=4, near=tuple(near)) for number, near in enumerate(requests)]

    def fits(chosen: tuple[int, ...]) -> bool:
        used = [sum(4 for at in chosen if at == number) for number in range(len(nodes))]
        units: dict[tuple[str, str], set[str | None]] = {}
        for demand, at in zip(demands, chosen, strict=True):
            for near in demand.near:
                units.setdefault((near.key, near.group), set()).add(nodes[at].labels.get(near.key))
        has_room = all(requested <= (nodes[number].gpus or 0) for number, requested in enumerate(used))
        return has_room and all(len(values) == 1 and None not in values for values in units.values())

    is_possible = any(fits(chosen) for chosen in product(range(len(nodes)), repeat=len(demands)))
    found = place_near(demands, nodes, shared=False)
    assert isinstance(found, Placement) == is_possible
    if isinstance(found, Placement):
        assert fits(tuple(int(found.nodes[demand.task][1:]) for demand in demands))
    assert isinstance(place(demands, nodes, shared=False), Placement) or not is_possible
