"""Random faults of a real Kubernetes, its connections and the supervisor: each gang ends, and its record is correct.

``scenarios/test_kubernetes.py`` tests dead kubelets and a minute without an API server, which take long to repair. A few
schedules run by default. ``CHAOS_RUNS=200`` runs 200 schedules, ``CHAOS_SEEDS=17,23`` runs these two.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from chaos.clusters import ClusterGang, draw_cluster_schedule
from chaos.schedules import seeds
from distflow.lifecycle.states import Reason
from distflow.testing.kubernetes import ApiProxy, KubernetesCluster
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.kubernetes_pool import KubernetesPool

pytestmark = pytest.mark.timeout(600)

CANCELED = (("FAILED_CANCELED",), (Reason.CANCELED,))
QUOTA = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}


class KubernetesFaultInjector:
    """The faults of one Kubernetes cluster (contract: ``clusters.FaultInjector``)."""

    harmless: Sequence[str] = ("streams", "api", "quota", "cordon")
    ends: Mapping[str, tuple[Sequence[str], Sequence[Reason]]] = MappingProxyType(
        {
            "delete": CANCELED,
            "owner": CANCELED,
            # Kubernetes before 1.26 deletes an evicted pod without a reason.
            "evict": (("FAILED_PREEMPTED", *CANCELED[0]), (Reason.PREEMPTED, *CANCELED[1])),
            "resident": (("FAILED_BACKEND_ERROR", "FAILED_START_ERROR"), (Reason.NODE_LOST, Reason.START_ERROR)),
        }
    )

    def __init__(self, pool: KubernetesPool, proxy: ApiProxy) -> None:
        """Inject nothing yet."""
        self.pool = pool
        self.cluster = pool.cluster
        self.proxy = proxy
        self._api = threading.Lock()
        """Held while the API server is away, so that the commands of this object wait for it."""

    def allocations(self) -> list[str]:
        """Return the owner objects of distflow, and its pods without one."""
        with self._api:
            owners, pods = self.pool.allocations(), self.cluster.objects("pods", self.pool.namespace)
        return [*owners, *(name for one in pods if (name := one["metadata"]["name"].rpartition("-")[0]) not in owners)]

    def inject(self, fault: str, allocation: str) -> None:
        """Inject a fault."""
        match fault:
            case "streams":
                self.proxy.cut()
            case "api":
                self._restart_api_server()
            case "quota":
                with self._api:
                    self.pool.create(QUOTA)
                threading.Event().wait(3.0)
                self._delete("resourcequotas", "none")
            case "cordon":
                try:
                    self._kubectl("cordon", "node1", "node2")
                    threading.Event().wait(3.0)
                finally:
                    self._kubectl("uncordon", "node1", "node2")
            case "owner":
                self._delete("configmaps", allocation)
            case "delete":
                self._delete("pods", self._pod(allocation))
            case "evict":
                self._evict(self._pod(allocation))
            case "resident":
                # The given allocation may have ended and been replaced by another one.
                os.kill(wait_until(self._current_residents, 60, "the resident program runs")[-1], signal.SIGKILL)
            case _:
                raise ValueError(fault)

    def repair(self) -> None:
        """Do nothing: no fault lasts."""

    def _current_residents(self) -> list[int]:
        return [pid for allocation in self.allocations() for pid in _residents(allocation)]

    def _kubectl(self, *words: str) -> None:
        with self._api:
            self.cluster.kubectl(*words)

    def _delete(self, kind: str, name: str) -> None:
        with self._api:
            self.pool.delete(kind, name)

    def _restart_api_server(self) -> None:
        with self._api:
            self.cluster.stop("apiserver")
            threading.Event().wait(3.0)
            self.cluster.start("apiserver")
            wait_until(lambda: self.cluster.kubectl("get", "--raw", "/readyz", check=False) == "ok", 60, "it answers")
            self.cluster.wait_for_nodes()

    def _pods(self, allocation: str) -> list[dict[str, Any]]:
        with self._api:
            return self.cluster.objects("pods", self.pool.namespace, labels=f"distflow.dev/allocation={allocation}")

    def _pod(self, allocation: str) -> str:
        """Wait until an allocation has pods, and return the last one."""
        return str(wait_until(lambda: self._pods(allocation), 60, "there is a pod")[-1]["metadata"]["name"])

    def _evict(self, pod: str) -> None:
        body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod}}
        with self._api:
            self.cluster.call("POST", f"/api/v1/namespaces/{self.pool.namespace}/pods/{pod}/eviction", body=body)


def _residents(allocation: str) -> list[int]:
    """Return the resident programs in the pods of an allocation.

    Each is a grandchild of its pod's first process. Its own children have the same command line until they execute a command.
    """
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"pod" in words and allocation.encode() in words:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid for pid, parent in parents.items() if parents.get(parent) in parents]
    return sorted(pid for pid in found if parents[parents[parents[pid]]] not in parents)


@pytest.fixture
def pool(cli: Cli, lone_kubernetes: KubernetesCluster) -> Iterator[KubernetesPool]:
    made = KubernetesPool(cli, lone_kubernetes)
    yield made
    made.close()


@pytest.mark.parametrize("seed", seeds((11, 5420)))
def test_a_gang_on_kubernetes_ends_with_a_correct_record_and_no_leftovers(pool: KubernetesPool, seed: int) -> None:
    folder, injector_type = pool.cli.folder, KubernetesFaultInjector
    schedule = draw_cluster_schedule(seed, harmless=injector_type.harmless, ends=tuple(injector_type.ends), most_tasks=2)
    with ApiProxy(pool.cluster, folder) as proxy:
        pool.configure(
            folders=(str(folder),), kubernetes={"kubeconfig": str(proxy.kubeconfig)}, start_barrier="30s", ping="1s",
            connect_timeout="5s", stop_grace="2s", peer_failed_grace="1s",
        )  # fmt: skip
        assert ClusterGang(pool.cli, KubernetesFaultInjector(pool, proxy), schedule).run() == [], schedule
        pool.await_no_objects()
