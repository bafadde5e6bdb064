"""The cluster that the other tests of Kubernetes use."""

from __future__ import annotations

import json

from distflow.testing.kubernetes import IMAGE, KubernetesCluster
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


def test_a_pod_runs_and_a_killed_kubelet_comes_back(lone_kubernetes: KubernetesCluster) -> None:
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
