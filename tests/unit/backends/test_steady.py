"""The clock of a supervisor's decisions."""

from __future__ import annotations

import time

import pytest

from distflow.backends import steady
from distflow.backends.steady import SteadyTime


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_setting_the_clock_changes_no_duration(jump_s: float) -> None:
    at = {"wall": 1_000_000.0, "elapsed": 50.0}
    steady = SteadyTime(lambda: at["wall"], lambda: at["elapsed"])
    assert steady.now() == 1_000_000.0
    at["wall"] += jump_s + 2.0
    at["elapsed"] += 2.0
    assert steady.now() == 1_000_002.0


def test_the_time_starts_at_the_clock_of_the_machine() -> None:
    before = time.clock_gettime(time.CLOCK_REALTIME)
    assert abs(steady.now() - before) < 60.0
