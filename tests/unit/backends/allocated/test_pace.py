"""How often an engine is asked."""

from __future__ import annotations

import random

import pytest

from distflow.backends.allocated.backend import _Pace
from distflow.backends.allocated.slurm.slurm_engine import SlurmEngine


class SetTime:
    """A clock in place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("seed", range(5))
def test_slurm_is_asked_at_most_11_times_in_any_minute_and_at_once_when_that_is_rare(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, chance = SetTime(), random.Random(seed)
    monkeypatch.setattr("distflow.backends.allocated.backend.time", clock)
    pace, asked = _Pace(SlurmEngine.question_limit), []
    while clock.now < 2000.0:
        if chance.random() < 0.5:
            pace.hurry()
        if pace.due_in_s(chance.random() < 0.5, chance.choice([2.0, 1000.0])) <= 0:
            pace.begin()
            asked.append(clock.now)
        clock.now += chance.choice([0.01, 0.1, 1.0])
    assert len(asked) > 100
    assert max(sum(at <= other < at + 60.0 for other in asked) for at in asked) <= 11
    clock.now += 60.0
    pace.begin()
    pace.hurry()
    assert pace.due_in_s(is_queued=True) < 0.4
