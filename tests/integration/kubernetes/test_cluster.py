"""The Kubernetes cluster of the tests itself."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from distflow.testing.kubernetes import IMAGE, KubernetesCluster, KubernetesSource, remove_killed_cluster
from distflow.testing.waiting import wait_until

WRITE = "echo here > /dev/termination-log"
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "one"},
    "spec": {
        "restartPolicy": "Never",
        "containers": [{"name": "c", "image": IMAGE, "command": ["/busybox/busybox", "sh", "-c", WRITE]}],
    },
}


def test_a_pod_runs_and_a_stopped_kubelet_can_start_again(lone_kubernetes: KubernetesCluster) -> None:
    namespace = lone_kubernetes.create_namespace()
    lone_kubernetes.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(POD))
    wait_until(lambda: lone_kubernetes.objects("pods", namespace)[0]["status"]["phase"] == "Succeeded", 60, "the pod has run")
    (container,) = lone_kubernetes.objects("pods", namespace)[0]["status"]["containerStatuses"]
    assert container["state"]["terminated"]["message"] == "here\n"
    lone_kubernetes.stop("kubelet2")
    assert not lone_kubernetes.is_up("kubelet2")
    lone_kubernetes.start("kubelet2")
    lone_kubernetes.wait_for_nodes()
    lone_kubernetes.delete_namespace(namespace)


def test_links_and_mounts_of_a_killed_run_are_removed_but_not_processes_with_its_ids(
    kubernetes_source: KubernetesSource, tmp_path: Path
) -> None:
    if kubernetes_source.script is None:
        pytest.skip("this cluster was not started by the tests")
    folder, links = tmp_path / "cluster", ("kd12345", "kb12345-1", "kb12345-2")
    (folder / "node1").mkdir(parents=True)
    for name in links:
        subprocess.run(["ip", "link", "add", name, "type", "bridge"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder / "node1")], check=True)
    with subprocess.Popen(["sleep", "100"]) as other:
        for name, text in {"port": "12345", "nodes": "2", "pids": str(other.pid)}.items():
            (folder / name).write_text(text)
        lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        os.write(lock, json.dumps({"pid": other.pid, "folder": str(folder)}).encode())
        remove_killed_cluster(kubernetes_source.script, lock)
        os.close(lock)
        assert other.poll() is None
        other.kill()
    found = {one["ifname"] for one in json.loads(subprocess.check_output(["ip", "-j", "link"]))}
    assert not found & set(links)
    assert str(folder) not in Path("/proc/mounts").read_text()
    assert not folder.exists()
