"""Tasks near each other: units by label, what is required, and what is given up."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.layout.placement.node_placement import Demand, Free, Placement, place
from distflow.layout.placement.topology import place_near
from distflow.spec.model import Near

RACK, ZONE = Near(key="rack"), Near(key="zone")


def node(name: str, gpus: int = 8, **labels: str) -> Free:
    return Free(node=name, gpus=gpus, labels=labels)


def gang(count: int, *near: Near, gpus: int = 8) -> list[Demand]:
    return [Demand(task=f"t{number}", gpus=gpus, near=near, spread="train") for number in range(count)]


def nodes_of(placed: object) -> list[str]:
    assert isinstance(placed, Placement), placed
    return list(placed.nodes.values())


RACKS = [node("a1", rack="r1"), node("b1", rack="r2"), node("a2", rack="r1"), node("b2", rack="r2"), node("b3", rack="r2")]


def test_a_gang_stands_in_one_unit() -> None:
    assert nodes_of(place_near(gang(2, RACK), RACKS, shared=False)) == ["a1", "a2"]
    assert nodes_of(place_near(gang(3, RACK), RACKS, shared=False)) == ["b1", "b2", "b3"]


def test_without_topology_nothing_changes() -> None:
    assert nodes_of(place_near(gang(3), RACKS, shared=False)) == ["a1", "b1", "a2"]


def test_what_is_required_is_never_given_up() -> None:
    left = place_near(gang(4, RACK), RACKS, shared=False)
    assert not isinstance(left, Placement)
    assert [one.task for one in left] == ["t3"]
    assert "a1: rack r1, r2 asked" in left[0].reasons


def test_what_is_preferred_is_given_up_where_there_is_no_room() -> None:
    preferred = Near(key="rack", required=False)
    assert nodes_of(place_near(gang(3, preferred), RACKS, shared=False)) == ["b1", "b2", "b3"]
    assert len(nodes_of(place_near(gang(5, preferred), RACKS, shared=False))) == 5


def test_the_last_preferred_is_given_up_first() -> None:
    nodes = [node("a", zone="z1", rack="r1"), node("b", zone="z2", rack="r2"), node("c", zone="z2", rack="r3")]
    wishes = (Near(key="zone", required=False), Near(key="rack", required=False))
    assert nodes_of(place_near(gang(2, *wishes), nodes, shared=False)) == ["b", "c"]


def test_groups_have_units_of_their_own() -> None:
    left, right = Near(key="rack", group="left"), Near(key="rack", group="right")
    demands = [*gang(2, left), *(Demand(task=f"u{number}", gpus=8, near=(right,), spread="train") for number in range(3))]
    assert nodes_of(place_near(demands, RACKS, shared=False)) == ["a1", "a2", "b1", "b2", "b3"]


def test_tasks_without_a_wish_stand_anywhere() -> None:
    demands = [*gang(2, RACK), Demand(task="helper")]
    assert nodes_of(place_near(demands, [node("x"), *RACKS], shared=False)) == ["a1", "a2", "x"]


def test_a_label_that_no_node_has_is_named() -> None:
    left = place_near(gang(2, ZONE), RACKS, shared=False)
    assert not isinstance(left, Placement)
    assert left[0].reasons == ("no node has the label `zone`, which its topology asks for",)


def test_a_pool_of_one_node_is_one_unit() -> None:
    assert nodes_of(place_near(gang(2, ZONE, gpus=4), [node("local")], shared=True)) == ["local", "local"]


MACHINES = st.tuples(st.sampled_from(["r1", "r2", ""]), st.sampled_from(["z1", "z2"]), st.integers(0, 8))
WISHES = st.lists(st.sampled_from([RACK, ZONE, Near(key="rack", group="b")]), max_size=2, unique_by=lambda near: near.key)


@settings(max_examples=150)
@given(st.lists(MACHINES, min_size=2, max_size=5), st.lists(WISHES, max_size=3))
def test_a_placement_is_found_exactly_when_there_is_one(machines: list[tuple[str, str, int]], wishes: list[list[Near]]) -> None:
    nodes = [
        node(f"n{number}", gpus, zone=zone, **({"rack": rack} if rack else {}))
        for number, (rack, zone, gpus) in enumerate(machines)
    ]
    demands = [Demand(task=f"t{number}", gpus=4, near=tuple(near)) for number, near in enumerate(wishes)]

    def fits(chosen: tuple[int, ...]) -> bool:
        used = [sum(4 for at in chosen if at == number) for number in range(len(nodes))]
        units: dict[tuple[str, str], set[str | None]] = {}
        for demand, at in zip(demands, chosen, strict=True):
            for near in demand.near:
                units.setdefault((near.key, near.group), set()).add(nodes[at].labels.get(near.key))
        roomy = all(asked <= (nodes[number].gpus or 0) for number, asked in enumerate(used))
        return roomy and all(len(values) == 1 and None not in values for values in units.values())

    there_is = any(fits(chosen) for chosen in product(range(len(nodes)), repeat=len(demands)))
    found = place_near(demands, nodes, shared=False)
    assert isinstance(found, Placement) == there_is
    if isinstance(found, Placement):
        assert fits(tuple(int(found.nodes[demand.task][1:]) for demand in demands))
    assert isinstance(place(demands, nodes, shared=False), Placement) or not there_is
