"""Measure distflow on a real Kubernetes cluster of two nodes.

``all-reduce``: from submit to the end of one all-reduce in two pods. The peer is ``kubectl apply`` of the exported manifest
with the same image, until both pods have succeeded. The cluster of the tests (``DISTFLOW_TEST_KUBERNETES``) supports neither
Indexed Jobs nor host names of pods. Therefore the script makes the peer's pods from the template of the job, and sets their
indexes. Both use the network of this machine. Fails if distflow takes more than 1.2 × the time of the peer.

``calls``: calls of the API server in a minute, while 10 workflows of one task each run, and again while 100 more wait for a
node. (The machine of this cluster cannot run 100 pods.) Fails for more than 12 calls without the waiting workflows, or 20 with
them.

Without an argument, both run. The file is not called ``kubernetes.py``, because programs in this directory and mypy would then
import it instead of the client library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from lab import alternate, show, write_all_reduce

import distflow
from distflow.testing.kubernetes import IMAGE, ApiProxy, KubernetesCluster, find_kubernetes, pod_template
from distflow.testing.waiting import wait_until

RUNS = 5
LIMIT = 1.2
RUNNING, WAITING = 10, 100
MOST_CALLS, MOST_CALLS_WAITING = 12, 20
SPIN = """
workflow:
  name: {name}
  tasks: [{{name: spin, command: [sleep, 100000]}}]
  resources: {{default: {{cpu: {cpu}}}}}
"""


class Bench:
    """Runs distflow and kubectl in a new namespace of the cluster. distflow has its own state directory."""

    def __init__(self, folder: Path, cluster: KubernetesCluster) -> None:
        self.folder = folder
        self.cluster = cluster
        self.namespace = cluster.create_namespace()
        self.environment = os.environ | {
            "DISTFLOW_STATE": str(folder / "state"),
            "DISTFLOW_CONFIG": str(folder / "distflow.yaml"),
        }
        template = pod_template()
        template["spec"]["hostNetwork"] = True
        (folder / "pod.json").write_text(json.dumps(template))
        self.configure(cluster.kubeconfig)
        (folder / "spec.yaml").write_text(write_all_reduce(folder)[1])

    def configure(self, kubeconfig: Path) -> None:
        """Write the configuration of distflow."""
        settings = {
            "kubeconfig": str(kubeconfig),
            "namespace": self.namespace,
            "image": IMAGE,
            "pod_template": "pod.json",
        }
        pool = {"backend": "kubernetes", "python": sys.executable, "kubernetes": settings}
        (self.folder / "distflow.yaml").write_text(json.dumps({"pools": {"pods": pool}}))

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
            spec |= {"dnsPolicy": template["dnsPolicy"], "dnsConfig": template["dnsConfig"]}
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


def all_reduce(bench: Bench) -> bool:
    """Measure the all-reduce. Return whether the limit is met."""
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
    return ratios["distflow"] <= LIMIT


def calls(bench: Bench) -> bool:
    """Count the calls while workflows run and wait. Return whether the limits are met."""
    with ApiProxy(bench.cluster, bench.folder) as proxy:
        bench.configure(proxy.kubeconfig)
        os.environ.update(bench.environment)
        running = [distflow.submit(SPIN.format(name="runs", cpu=0)) for _ in range(RUNNING)]
        wait_until(lambda: all(one.status == "RUNNING" for one in running), 600, f"{RUNNING} workflows run")
        few = _in_a_minute(proxy, f"{RUNNING} running workflows, limit {MOST_CALLS}")
        before = proxy.calls.copy()
        waiting = [distflow.submit(SPIN.format(name="waits", cpu=500)) for _ in range(WAITING)]

        def pods() -> int:
            return len(bench.cluster.objects("pods", bench.namespace))

        wait_until(lambda: pods() == RUNNING + WAITING, 600, f"{WAITING} pods wait")
        print(f"to request {WAITING} more: {dict(proxy.calls - before)}")
        many = _in_a_minute(proxy, f"{RUNNING} running and {WAITING} waiting workflows, limit {MOST_CALLS_WAITING}")
        answer = bench.cluster.kubectl("get", "--raw", f"/api/v1/namespaces/{bench.namespace}/pods")
        print(f"one list of {pods()} pods: {len(answer) / 2**20:.1f} MiB")
        for one in (*running, *waiting):
            one.cancel()
        wait_until(lambda: not pods(), 600, "no pod is left")
    return few <= MOST_CALLS and many <= MOST_CALLS_WAITING


def _in_a_minute(proxy: ApiProxy, what: str) -> int:
    before = proxy.calls.copy()
    threading.Event().wait(60)
    found = proxy.calls - before
    print(f"calls in a minute, {what}: {sum(found.values())} {dict(found)}", flush=True)
    return sum(found.values())


def main() -> int:
    """Run the measurements. Return 0 if the limits are met, 1 otherwise."""
    source = find_kubernetes(os.environ, Path(__file__).resolve().parent.parent)
    if source.script is None:
        print(source.missing or "the benchmark must start the cluster itself: set DISTFLOW_TEST_KUBERNETES")
        return 0
    known = {"all-reduce": all_reduce, "calls": calls}
    with tempfile.TemporaryDirectory(prefix="bench-") as name, KubernetesCluster(Path(name) / "kubernetes", source) as cluster:
        folder = Path(name) / "distflow"
        folder.mkdir()
        bench = Bench(folder, cluster)
        are_met = [known[word](bench) for word in sys.argv[1:] or known]
        cluster.delete_namespace(bench.namespace)
    return int(not all(are_met))


if __name__ == "__main__":
    sys.exit(main())
