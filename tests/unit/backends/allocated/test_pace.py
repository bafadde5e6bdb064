"""The rate of queries to an engine."""

from __future__ import annotations

import random

import pytest

from distflow.backends.allocated.backend import _Pace
from distflow.backends.allocated.slurm.slurm_engine import SlurmEngine


class SetTime:
    """A settable clock that replaces the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("seed", range(5))
def test_slurm_is_queried_at_most_11_times_a_minute_and_at_once_after_a_pause(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, chance = SetTime(), random.Random(seed)
    monkeypatch.setattr("distflow.backends.allocated.backend.time", clock)
    pace, queries = _Pace(SlurmEngine.query_limit), []
    while clock.now < 2000.0:
        if chance.random() < 0.5:
            pace.hurry()
        if pace.due_in_s(chance.random() < 0.5, chance.choice([2.0, 1000.0])) <= 0:
            pace.begin()
            queries.append(clock.now)
        clock.now += chance.choice([0.01, 0.1, 1.0])
    assert len(queries) > 100
    assert max(sum(at <= other < at + 60.0 for other in queries) for at in queries) <= 11
    clock.now += 60.0
    pace.begin()
    pace.hurry()
    assert pace.due_in_s(is_queued=True) < 0.4
