"""Random faults of a real Slurm, its login node and the supervisor: each gang ends, and its record is correct.

A few schedules run by default. ``CHAOS_RUNS=200`` runs 200 schedules, ``CHAOS_SEEDS=17,23`` runs these two.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest

from chaos.clusters import ClusterGang, draw_cluster_schedule
from chaos.schedules import seeds
from distflow.lifecycle.states import Reason
from distflow.testing.waiting import wait_until
from scenarios.cluster import Cluster

pytestmark = [pytest.mark.ssh, pytest.mark.timeout(500)]


class SlurmFaultInjector:
    """The faults of one Slurm cluster (contract: ``clusters.FaultInjector``)."""

    harmless: Sequence[str] = ("login", "freeze", "long_freeze", "controller")
    ends: Mapping[str, tuple[Sequence[str], Sequence[Reason]]] = MappingProxyType(
        {
            "scancel": (("FAILED_CANCELED",), (Reason.CANCELED,)),
            "time_limit": (("FAILED_EXEC_TIMEOUT",), (Reason.EXEC_TIMEOUT,)),
            "preempt": (("FAILED_PREEMPTED",), (Reason.PREEMPTED,)),
            "node": (("FAILED_BACKEND_ERROR",), (Reason.NODE_LOST,)),
            "resident": (("FAILED_BACKEND_ERROR", "FAILED_START_ERROR"), (Reason.NODE_LOST, Reason.START_ERROR)),
        }
    )

    def __init__(self, cluster: Cluster) -> None:
        """Inject nothing yet."""
        self.cluster = cluster
        self._repairs: list[Callable[[], object]] = []
        self._controller = threading.Lock()
        """Held while the controller is stopped, so that the commands of this object wait for it."""

    def allocations(self) -> list[str]:
        """Return the jobs of distflow that wait or run."""
        with self._controller:
            return self.cluster.jobs()

    def inject(self, fault: str, allocation: str) -> None:
        """Inject a fault."""
        slurm, command = self.cluster.slurm, self._command
        login = self.cluster.login
        assert login is not None
        match fault:
            case "login":
                login.restart()
            case "freeze" | "long_freeze":
                login.freeze()
                threading.Event().wait(5.0 if fault == "freeze" else 20.0)
                login.thaw()
            case "controller":
                with self._controller:
                    slurm.stop_controller()
                    threading.Event().wait(3.0)
                    slurm.start_controller()
            case "scancel":
                command("scancel", allocation)
            case "time_limit":
                self._until_it_runs(allocation)
                try:
                    command("scontrol", "update", f"JobId={allocation}", "EndTime=now")
                except subprocess.CalledProcessError:
                    if self._state(allocation) == "RUNNING":
                        raise  # otherwise the gang has just ended by itself
            case "preempt":
                self._until_it_runs(allocation)
                options = ("-p", "urgent", "-N2", "-c16", "--output=/dev/null", "--wrap=sleep 600")
                urgent = command("sbatch", "--parsable", *options).strip()
                wait_until(lambda: self._state(urgent) != "PENDING", 60, "the urgent job runs")
                self._repairs.append(partial(command, "scancel", urgent))
            case "node":
                node = self._until_it_runs(allocation)
                slurm.kill_node(node)
                self._repairs.append(lambda: self._start_node(node, allocation))
            case "resident":
                node = self._until_it_runs(allocation)
                for pid in wait_until(lambda: self._residents(node), 30, "the resident program runs"):
                    os.kill(pid, signal.SIGKILL)
            case _:
                raise ValueError(fault)

    def repair(self) -> None:
        """Undo all faults that last."""
        while self._repairs:
            self._repairs.pop()()

    def _command(self, *words: str) -> str:
        with self._controller:
            return self.cluster.command(*words)

    def _until_it_runs(self, job: str) -> str:
        """Wait until a job runs, and return its last node."""
        wait_until(lambda: self._state(job) != "PENDING", 60, "the job runs")
        return "n2" if "n[" in self._command("squeue", "-h", "-t", "all", "-j", job, "-o", "%N") else "n1"

    def _residents(self, node: str) -> list[int]:
        found = []
        for pid in self.cluster.slurm.processes(node):
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[-3:-2] == [b"node"]:
                    found.append(pid)
        return found

    def _state(self, job: str) -> str:
        return self._command("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()

    def _start_node(self, node: str, job: str) -> None:
        wait_until(lambda: self._state(job) not in ("RUNNING", "CONFIGURING", "PENDING"), 60, "Slurm sees the lost node")
        self.cluster.slurm.start_node(node)
        self.cluster.slurm.wait_for_nodes(node)


@pytest.mark.parametrize("seed", seeds((2, 5, 11)))
def test_a_gang_on_slurm_ends_with_a_correct_record_and_no_leftovers(far_cluster: Cluster, seed: int) -> None:
    far_cluster.slurm.add_partition("urgent", PriorityTier="10", PreemptMode="OFF")
    far_cluster.configure(ping="1s", connect_timeout="5s", stop_grace="2s", peer_failed_grace="1s")
    injector = SlurmFaultInjector(far_cluster)
    schedule = draw_cluster_schedule(seed, harmless=injector.harmless, ends=tuple(injector.ends), most_tasks=2)
    assert ClusterGang(far_cluster.cli, injector, schedule).run() == [], schedule
    far_cluster.await_no_jobs()
