"""A pool in a namespace of a real Kubernetes cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distflow.testing.kubernetes import IMAGE, KubernetesCluster, pod_template
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from scenarios.conftest import Cli

__all__ = ["KubernetesPool"]


class KubernetesPool:
    """The pool ``pods`` of a ``Cli``, and its namespace."""

    def __init__(self, cli: Cli, cluster: KubernetesCluster) -> None:
        self.cli = cli
        self.cluster = cluster
        self.namespace = cluster.create_namespace()
        self.configure()

    def configure(self, *, folders: tuple[str, ...] = (), kubernetes: dict[str, Any] | None = None, **settings: Any) -> None:
        """Write the configuration, with settings of the pool and its ``kubernetes``. ``None`` removes a setting.

        Pods mount ``folders`` of this machine.
        """
        folder = self.cli.folder
        given = {
            "kubeconfig": str(self.cluster.kubeconfig),
            "namespace": self.namespace,
            "image": IMAGE,
            "pod_template": "pod.json",
        }
        (folder / "pod.json").write_text(json.dumps(pod_template(*folders)))
        given = {name: value for name, value in (given | (kubernetes or {})).items() if value is not None}
        pool = {"backend": "kubernetes", "python": sys.executable, "kubernetes": given}
        text = json.dumps({"default_pool": "pods", "pools": {"pods": pool | settings}})
        (folder / "distflow.yaml").write_text(text)

    def create(self, manifest: Mapping[str, Any]) -> None:
        """Create an object in the namespace, in a thirtieth of the time of ``kubectl apply``."""
        api = manifest["apiVersion"]
        start = f"/apis/{api}" if "/" in api else f"/api/{api}"
        self.cluster.call("POST", f"{start}/namespaces/{self.namespace}/{manifest['kind'].lower()}s", body=manifest)

    def delete(self, kind: str, name: str) -> None:
        """Delete an object of the core API, such as a pod of the kind ``pods``, and do not wait until it is gone."""
        self.cluster.call("DELETE", f"/api/v1/namespaces/{self.namespace}/{kind}/{name}")

    def pods(self) -> list[str]:
        """The names of all pods that are not being deleted."""
        found = self.cluster.objects("pods", self.namespace)
        return [str(one["metadata"]["name"]) for one in found if "deletionTimestamp" not in one["metadata"]]

    def allocations(self) -> list[str]:
        """The names of all allocations, each of which is a ConfigMap that owns pods."""
        found = self.cluster.objects("configmaps", self.namespace, labels="app.kubernetes.io/managed-by=distflow")
        return [str(one["metadata"]["name"]) for one in found]

    def state(self) -> str:
        """Return the nodes, and the pods and events of the namespace, as text."""
        kinds = (("nodes",), ("pods", "-o", "wide", "-n", self.namespace), ("events", "-n", self.namespace))
        return "\n".join(self.cluster.kubectl("get", *words, check=False) for words in kinds)

    def await_no_objects(self) -> None:
        """Wait until the namespace contains no objects of distflow."""
        wait_until(lambda: not self.allocations() and not self.pods(), 90, "no object of distflow is left in the namespace")

    def close(self) -> None:
        """Delete the namespace."""
        self.cluster.delete_namespace(self.namespace)
