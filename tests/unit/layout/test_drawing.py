"""The drawing of a rank layout in text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distflow.layout.drawing import Bar, draw, draw_world, rank_text
from distflow.layout.ranks import TaskRanks, WorldLayout


def test_each_task_of_a_layout_has_a_bar() -> None:
    sizes = [("master", 0), ("worker", 8), ("worker-2", 16)]
    ranks = tuple(TaskRanks(task=name, offset=at, size=8, node_rank=at // 8) for name, at in sizes)
    assert draw_world(WorldLayout(world_size=24, tasks=ranks, style="flags")).splitlines() == [
        "ranks     0       8       16      24",
        "master    ########                    0-7",
        "worker            ########            8-15",
        "worker-2                  ########    16-23",
    ]


def test_gaps_overlaps_and_ranks_beyond_the_world_size_are_marked() -> None:
    bars = [Bar(name="a", offset=0, size=20), Bar(name="b", offset=18, size=4), Bar(name="c", offset=24, size=10)]
    assert draw(bars, 32).splitlines() == [
        "ranks   0                 18  22        32",
        "a       ##################!!                0-19",
        "b                         !!##              18-21",
        "c                               ########>>  24-33",
        "(none)                        ..            22-23",
        "! claimed more than once   . claimed by no task   > beyond the world size",
    ]


@given(st.lists(st.tuples(st.integers(-5, 3000), st.integers(0, 3000)), min_size=1, max_size=40), st.integers(1, 5000))
def test_any_claims_can_be_drawn_in_ascii_and_within_bounds(claims: list[tuple[int, int]], world_size: int) -> None:
    bars = [Bar(name=f"t{index}", offset=offset, size=size) for index, (offset, size) in enumerate(claims)]
    text = draw(bars, world_size)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 150


def test_one_rank_and_a_range_of_ranks_are_formatted() -> None:
    assert (rank_text(3, 4), rank_text(3, 8)) == ("3", "3-7")
