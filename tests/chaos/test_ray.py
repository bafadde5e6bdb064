"""Random faults of a real Ray, its login node and the supervisor: each gang ends, and its record is correct.

A few schedules run by default. ``CHAOS_RUNS=200`` runs 200 schedules, ``CHAOS_SEEDS=17,23`` runs these two.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

import pytest

from chaos.clusters import ClusterGang, draw_cluster_schedule
from chaos.schedules import seeds
from distflow.lifecycle.states import Reason
from distflow.testing.waiting import wait_until
from scenarios.raypool import RayPool

pytestmark = [pytest.mark.ssh, pytest.mark.timeout(500)]

LOST = (("FAILED_BACKEND_ERROR", "FAILED_START_ERROR"), (Reason.NODE_LOST, Reason.START_ERROR))
CANCELED = (("FAILED_CANCELED",), (Reason.CANCELED,))


class RayFaultInjector:
    """The faults of one Ray cluster (contract: ``clusters.FaultInjector``)."""

    harmless: Sequence[str] = ("login", "freeze", "program")
    ends: Mapping[str, tuple[Sequence[str], Sequence[Reason]]] = MappingProxyType(
        {
            "remove": CANCELED,
            "ray.kill": CANCELED,
            "actor": LOST,
            "node": ((*LOST[0], *CANCELED[0]), (*LOST[1], *CANCELED[1])),
        }
    )

    def __init__(self, pool: RayPool) -> None:
        """Inject nothing yet."""
        self.pool = pool
        self._repairs: list[Callable[[], object]] = []
        self._asking = threading.Lock()
        """Held while the programs are killed, because the queries of this object need them."""

    def allocations(self) -> list[str]:
        """Return the placement groups of distflow."""
        with self._asking:
            return self.pool.cluster.allocations()

    def inject(self, fault: str, allocation: str) -> None:
        """Inject a fault."""
        cluster, login = self.pool.cluster, self.pool.login
        assert login is not None
        match fault:
            case "login":
                login.restart()
            case "freeze":
                login.freeze()
                threading.Event().wait(5.0)
                login.thaw()
            case "program":
                with self._asking:
                    cluster.kill_programs()
            case "remove":
                with self._asking:
                    cluster.ask("release", ids=[allocation])
            case "ray.kill":
                named = f"[a['name'] for a in ray.util.list_named_actors(all_namespaces=True) if '@{allocation}' in a['name']]"
                cluster.run(f"for name in {named}: ray.kill(ray.get_actor(name))")
            case "actor":
                for pid in wait_until(lambda: self._actors(allocation), 30, "an actor runs")[-1:]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            case "node":
                wait_until(lambda: self._actors(allocation), 30, "an actor runs")
                node = "n2" if cluster.residents("n2") else "n1"
                if node == "n1":  # a new head would be another cluster, so only release the gang's nodes
                    cluster.ask("release", ids=[allocation])
                    return
                cluster.kill_raylet(node)
                self._repairs.append(lambda: self._start_node(node))
            case _:
                raise ValueError(fault)

    def repair(self) -> None:
        """Undo all faults that last."""
        while self._repairs:
            self._repairs.pop()()

    def _actors(self, allocation: str) -> list[int]:
        found = f"[a['Pid'] for a in s.actors().values() if '@{allocation}' in a['Name'] and a['State'] == 'ALIVE']"
        return [int(word) for word in self.pool.cluster.run(f"import ray._private.state as s\nprint(*{found})").split()]

    def _start_node(self, node: str) -> None:
        self.pool.cluster.kill_node(node)
        self.pool.cluster.start_node(node)


@pytest.mark.parametrize("seed", seeds((4, 11, 21)))
def test_a_gang_on_ray_ends_with_a_correct_record_and_no_leftovers(far_ray_pool: RayPool, seed: int) -> None:
    far_ray_pool.configure(ping="1s", connect_timeout="5s", stop_grace="2s", peer_failed_grace="1s")
    injector = RayFaultInjector(far_ray_pool)
    schedule = draw_cluster_schedule(seed, harmless=injector.harmless, ends=tuple(injector.ends), most_tasks=2)
    assert ClusterGang(far_ray_pool.cli, injector, schedule).run() == [], schedule
    far_ray_pool.cluster.await_empty()
