"""Measure a gang on a real Kubernetes cluster of two nodes: from submit to the end of one all-reduce in two pods.

The peer is ``kubectl apply`` of the exported manifest with the same image, until both pods have succeeded. The cluster is that
of the tests (``DISTFLOW_TEST_KUBERNETES``), which has no Indexed Jobs and no names of pods. Therefore the peer's pods are made
from the template of the job, with their positions and the network of this machine. Fails if distflow takes more than 1.2 × the
peer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from lab import alternate, show, write_all_reduce

from distflow.testing.kubernetes import IMAGE, KubernetesCluster, find_kubernetes, pod_template
from distflow.testing.waiting import wait_until

RUNS = 3
LIMIT = 1.2


class Bench:
    """distflow with its own state directory, and a namespace."""

    def __init__(self, folder: Path, cluster: KubernetesCluster) -> None:
        self.folder = folder
        self.cluster = cluster
        self.namespace = cluster.create_namespace()
        self.environment = os.environ | {
            "DISTFLOW_STATE": str(folder / "state"),
            "DISTFLOW_CONFIG": str(folder / "distflow.yaml"),
        }
        (folder / "pod.json").write_text(json.dumps(pod_template()))
        settings = {
            "kubeconfig": str(cluster.kubeconfig),
            "namespace": self.namespace,
            "image": IMAGE,
            "pod_template": "pod.json",
        }
        pool = {"backend": "kubernetes", "python": sys.executable, "kubernetes": settings}
        (folder / "distflow.yaml").write_text(json.dumps({"pools": {"pods": pool}}))
        (folder / "spec.yaml").write_text(write_all_reduce(folder)[1])

    def run(self, *words: str) -> str:
        """Run a command of distflow to its end, and return its output."""
        done = subprocess.run(
            [sys.executable, "-m", "distflow", *words],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{words}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return done.stdout

    def manifests(self) -> list[dict[str, Any]]:
        """Return the exported objects, with pods instead of the job."""
        text = self.run("workflow", "export", "spec.yaml", "--to", "kubernetes", "--indexed-job")
        settings, _, job = yaml.safe_load_all(text)
        template, objects = pod_template()["spec"], [settings]
        for index in range(job["spec"]["completions"]):
            spec = json.loads(json.dumps(job["spec"]["template"]["spec"])) | {"hostNetwork": True}
            (container,) = spec["containers"]
            given = {one["name"]: one for one in container["env"]} | {
                "master_addr": {"name": "master_addr", "value": "127.0.0.1"},
                "index": {"name": "JOB_COMPLETION_INDEX", "value": str(index)},
                "interface": {"name": "GLOO_SOCKET_IFNAME", "value": "lo"},
            }
            container |= {"env": list(given.values()), "imagePullPolicy": "Never"}
            container["volumeMounts"] += template["containers"][0]["volumeMounts"]
            spec["volumes"] += template["volumes"]
            metadata = {"name": f"one-{index}", "namespace": self.namespace}
            objects.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        return objects

    def apply(self, objects: list[dict[str, Any]]) -> None:
        """Create the objects and wait until all pods have succeeded."""
        self.cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

        def phases() -> set[str]:
            return {one["status"]["phase"] for one in self.cluster.objects("pods", self.namespace)}

        wait_until(lambda: not phases() & {"Pending", "Running"}, 120)
        if phases() != {"Succeeded"}:
            raise RuntimeError(f"{phases()}: {self.cluster.kubectl('logs', 'one-0', '-n', self.namespace)[-2000:]}")

    def clean(self) -> None:
        """Delete all pods, and wait until they are gone."""
        self.cluster.kubectl("delete", "pods", "--all", "-n", self.namespace, "--grace-period=0", "--force")
        wait_until(lambda: not self.cluster.objects("pods", self.namespace), 60)


def main() -> int:
    """Run the measurement. Return 0 if the limit is met, 1 otherwise."""
    source = find_kubernetes(os.environ, Path(__file__).resolve().parent.parent)
    if source.script is None:
        print(source.missing or "the benchmark needs a cluster of its own")
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-") as name, KubernetesCluster(Path(name) / "kubernetes", source) as cluster:
        folder = Path(name) / "distflow"
        folder.mkdir()
        bench = Bench(folder, cluster)
        ratios = show(
            f"one all-reduce in two pods, {RUNS} runs",
            alternate(
                {
                    "kubectl apply": partial(bench.apply, bench.manifests()),
                    "distflow": lambda: (bench.run("submit", "spec.yaml", "--wait"), None)[1],
                },
                runs=RUNS,
                settle=bench.clean,
            ),
            "kubectl apply",
        )
        cluster.delete_namespace(bench.namespace)
    return int(ratios["distflow"] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
