"""Hundreds of random nights, no waiting: each seed is a schedule of faults, and after each what distflow promises holds.

``CHAOS_RUNS=5000`` runs more of them, ``CHAOS_SEEDS=17,23`` these. One that fails says its seed and what is left of it.
"""

from __future__ import annotations

import pytest

from chaos.nights import play
from chaos.schedules import draw, seeds, shrink


@pytest.mark.parametrize("seed", seeds(300))
def test_every_workflow_ends_and_nothing_leaks_hangs_or_lies(seed: int) -> None:
    schedule = draw(seed)
    if not play(schedule):
        return
    least = shrink(schedule, lambda smaller: bool(play(smaller)))
    pytest.fail("\n".join([str(least), "is wrong:", *play(least)]))
