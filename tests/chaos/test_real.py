"""A few random schedules against real hosts and real processes: nothing hangs, leaks or lies.

``CHAOS_RUNS=50`` runs more of them, ``CHAOS_SEEDS=17,23`` these.
"""

from __future__ import annotations

import pytest

from chaos.hosts import CUTTING, Gang, draw_deed, held_leases
from chaos.schedules import seeds
from distflow.testing.kernel import NetnsHost
from scenarios.lab import Lab

pytestmark = pytest.mark.ssh


@pytest.mark.parametrize("seed", seeds((6, 17, 33, 48, 142)))
def test_a_gang_on_real_hosts_ends_and_nothing_leaks_hangs_or_lies(lab: Lab, seed: int) -> None:
    lab.configure(connect_timeout="2s", node_lost_after="6s")
    deed = draw_deed(seed)
    wrong = Gang(lab, deed).run()
    lab.await_nothing_left()
    assert [*wrong, *held_leases(lab)] == [], deed


@pytest.mark.parametrize("seed", seeds((36, 38)))
def test_the_same_where_links_are_cut(far_lab: Lab, hosts: dict[str, NetnsHost], seed: int) -> None:
    far_lab.configure(connect_timeout="2s", node_lost_after="6s")
    deed = draw_deed(seed, most_tasks=2, harmless=CUTTING)
    wrong = Gang(far_lab, deed, hosts).run()
    far_lab.await_nothing_left()
    assert [*wrong, *held_leases(far_lab)] == [], deed
