"""Random faults on simulated nodes with a manual clock: each workflow ends, its record is correct, and nothing is left.

``CHAOS_RUNS=5000`` runs 5000 schedules, ``CHAOS_SEEDS=17,23`` runs these two. A failure shows the seed and the shrunk schedule.
"""

from __future__ import annotations

import pytest

from chaos.nights import run_schedule
from chaos.schedules import draw, seeds, shrink


@pytest.mark.parametrize("seed", seeds(range(200)))
def test_every_workflow_ends_with_a_correct_record_and_no_leftovers(seed: int) -> None:
    schedule = draw(seed)
    if not run_schedule(schedule):
        return
    least = shrink(schedule, lambda smaller: bool(run_schedule(smaller)))
    pytest.fail("\n".join([str(least), "is wrong:", *run_schedule(least)]))


def test_a_schedule_shrinks_to_its_cause_of_failure() -> None:
    schedule = draw(3)

    def is_cut_and_killed(smaller: object) -> bool:
        return {"cut", "kill"} <= {fault.kind for fault in getattr(smaller, "faults")}  # noqa: B009

    assert is_cut_and_killed(schedule)
    least = shrink(schedule, is_cut_and_killed)
    assert sorted(fault.kind for fault in least.faults) == ["cut", "kill"]
    assert (len(least.workflows), [fault.after_s for fault in least.faults]) == (1, [0.0, 0.0])
    assert str(least).startswith("seed 3: ")
