"""Hundreds of random nights, no waiting: each seed is a schedule of faults, and after each what distflow promises holds.

``CHAOS_RUNS=5000`` runs more of them, ``CHAOS_SEEDS=17,23`` these. One that fails says its seed and what is left of it.
"""

from __future__ import annotations

import pytest

from chaos.nights import play
from chaos.schedules import draw, seeds, shrink


@pytest.mark.parametrize("seed", seeds(range(200)))
def test_every_workflow_ends_and_nothing_leaks_hangs_or_lies(seed: int) -> None:
    schedule = draw(seed)
    if not play(schedule):
        return
    least = shrink(schedule, lambda smaller: bool(play(smaller)))
    pytest.fail("\n".join([str(least), "is wrong:", *play(least)]))


def test_a_schedule_shrinks_to_its_cause_of_failure() -> None:
    schedule = draw(3)

    def is_cut_and_killed(smaller: object) -> bool:
        return {"cut", "kill"} <= {fault.kind for fault in getattr(smaller, "faults")}  # noqa: B009

    assert is_cut_and_killed(schedule)
    least = shrink(schedule, is_cut_and_killed)
    assert sorted(fault.kind for fault in least.faults) == ["cut", "kill"]
    assert (len(least.workflows), [fault.after_s for fault in least.faults]) == (1, [0.0, 0.0])
    assert str(least).startswith("seed 3: ")
