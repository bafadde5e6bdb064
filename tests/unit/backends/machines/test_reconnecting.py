"""The times of tries to reconnect to a node."""

from __future__ import annotations

import itertools

import pytest

from distflow.backends.machines.connection.reconnecting import ReconnectBackoff


class _Clock:
    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def _tries(
    lost_after_s: float, until_s: float, *, is_refused: bool = False, lasts_s: float = 0.0, dice: float = 1.0
) -> list[float]:
    """Return when tries begin, in seconds since the node's last message; each fails after ``lasts_s``."""
    clock = _Clock()
    tries = ReconnectBackoff(lost_after_s, clock=clock, jitter=lambda low, high: low + (high - low) * dice)
    tries.restart(0.0)
    begun = []
    while clock.at < 1000.0 + until_s:
        clock.at += tries.pause_s(is_refused=is_refused)
        begun.append(clock.at - 1000.0)
        # A running try is aborted for the last try.
        clock.at += min(lasts_s, tries.last_try_in_s or lasts_s)
    return begun


@pytest.mark.parametrize("lost_after_s", [10.0, 30.0, 45.0, 120.0, 600.0])
@pytest.mark.parametrize("dice", [0.0, 0.5, 1.0])
def test_a_node_is_tried_every_few_seconds_while_the_pool_waits_for_it(lost_after_s: float, dice: float) -> None:
    times = _tries(lost_after_s, lost_after_s, dice=dice)
    assert max(later - earlier for earlier, later in itertools.pairwise([0.0, *times])) <= 5.0


@pytest.mark.parametrize("lost_after_s", [3.0, 10.0, 45.0, 120.0, 600.0])
@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("lasts_s", [0.0, 10.0])
@pytest.mark.parametrize("dice", [0.0, 0.3, 1.0])
def test_the_last_try_begins_just_before_the_wait_ends(
    lost_after_s: float, is_refused: bool, lasts_s: float, dice: float
) -> None:
    times = _tries(lost_after_s, lost_after_s * 2, is_refused=is_refused, lasts_s=lasts_s, dice=dice)
    margin_s = min(5.0, lost_after_s / 4)
    last = [time for time in times if lost_after_s - margin_s - 0.001 <= time < lost_after_s]
    assert last
    assert last[0] == pytest.approx(lost_after_s - margin_s)


def test_refused_logins_are_retried_rarely() -> None:
    times = _tries(120.0, 1800.0, is_refused=True, dice=0.5)
    assert times[:5] == pytest.approx([10.0, 30.0, 60.0, 90.0, 115.0])
    assert len(times) <= 15


def test_a_lost_node_is_tried_rarely() -> None:
    times = [time for time in _tries(45.0, 600.0) if time > 75.0]
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) >= 30.0


def test_the_wait_begins_at_the_last_heartbeat() -> None:
    clock = _Clock()
    tries = ReconnectBackoff(20.0, clock=clock, jitter=lambda *_: 1.0)
    clock.at += 500.0
    assert tries.last_try_in_s is None
    tries.restart(8.0)
    assert tries.last_try_in_s == pytest.approx(20.0 - 8.0 - 5.0)


def test_pauses_grow_if_connections_break_at_once() -> None:
    clock = _Clock()
    tries = ReconnectBackoff(120.0, clock=clock, jitter=lambda *_: 1.0)
    pauses = []
    for _ in range(6):
        tries.restart(0.0, 0.5)
        pauses.append(tries.pause_s(is_refused=False))
    assert pauses == [0.1, 0.5, 1.0, 2.0, 4.0, 4.0]
    tries.restart(0.0, 60.0)
    assert tries.pause_s(is_refused=False) == 0.1
