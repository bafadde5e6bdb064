"""A few random schedules against real hosts and real processes: nothing hangs, leaks or lies.

``CHAOS_RUNS=50`` runs more of them, ``CHAOS_SEEDS=17,23`` these.
"""

from __future__ import annotations

import pytest

from chaos.hosts import Gang, draw_deed, held_leases
from chaos.schedules import seeds
from scenarios.lab import Lab

pytestmark = pytest.mark.ssh


@pytest.mark.parametrize("seed", seeds((6, 17, 33, 48, 53)))
def test_a_gang_on_real_hosts_ends_and_nothing_leaks_hangs_or_lies(lab: Lab, seed: int) -> None:
    lab.configure(connect_timeout="2s", node_lost_after="6s")
    deed = draw_deed(seed)
    wrong = Gang(lab, deed).run()
    lab.await_nothing_left()
    assert [*wrong, *held_leases(lab)] == [], deed
