"""Random faults on real SSH hosts: each gang ends, its record is correct, and no process or lease remains.

A few schedules run by default. ``CHAOS_RUNS=50`` runs 50 schedules, ``CHAOS_SEEDS=17,23`` runs these two.
"""

from __future__ import annotations

import pytest

from chaos.hosts import HARMLESS_WITH_CUTS, HostGang, draw_host_schedule, held_leases
from chaos.schedules import seeds
from distflow.testing.kernel import NetnsHost
from scenarios.lab import Lab

pytestmark = pytest.mark.ssh


@pytest.mark.parametrize("seed", seeds((6, 17, 33, 48, 142)))
def test_a_gang_on_real_hosts_ends_with_a_correct_record_and_no_leftovers(lab: Lab, seed: int) -> None:
    lab.configure(connect_timeout="2s", node_lost_after="6s")
    schedule = draw_host_schedule(seed)
    errors = HostGang(lab, schedule).run()
    lab.await_no_processes()
    assert [*errors, *held_leases(lab)] == [], schedule


@pytest.mark.parametrize("seed", seeds((36, 38)))
def test_a_gang_on_hosts_that_are_cut_off_ends_with_a_correct_record_and_no_leftovers(
    far_lab: Lab, hosts: dict[str, NetnsHost], seed: int
) -> None:
    far_lab.configure(connect_timeout="2s", node_lost_after="6s")
    schedule = draw_host_schedule(seed, most_tasks=2, harmless=HARMLESS_WITH_CUTS)
    errors = HostGang(far_lab, schedule, hosts).run()
    far_lab.await_no_processes()
    assert [*errors, *held_leases(far_lab)] == [], schedule
