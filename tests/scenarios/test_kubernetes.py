"""Gangs in pods of a real Kubernetes cluster. Faults are real."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from distflow.testing.kubernetes import IMAGE, KubernetesCluster, pod_template
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.kubernetes_pool import KubernetesPool
from scenarios.lab import copy_specs

pytestmark = pytest.mark.timeout(400)

SPIN = """
workflow:
  name: spin
  groups:
  - name: train
    tasks:
    - {name: master, lead: true, ranks: {size: 1}, command: [sh, -c, 'echo "master at $MASTER_ADDR"; sleep 600']}
    - {name: worker, ranks: {size: 1}, command: [sh, -c, 'echo "rank $DISTFLOW_RANK_OFFSET"; sleep 600']}
  resources: {default: {cpu: 0}}
"""

ONE = "".join(line for line in SPIN.splitlines(keepends=True) if "name: worker" not in line)
"""A gang of one task."""

VOLCANO = "apis/scheduling.volcano.sh/v1beta1"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
POD_GROUPS: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
    "metadata": {"name": "podgroups.scheduling.volcano.sh"},
    "spec": {
        "group": "scheduling.volcano.sh", "scope": "Namespaced",
        "names": {"plural": "podgroups", "singular": "podgroup", "kind": "PodGroup", "listKind": "PodGroupList"},
        "versions": [
            {
                "name": "v1beta1", "served": True, "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}  # fmt: skip


@pytest.fixture
def pool(kubernetes_pool: KubernetesPool) -> KubernetesPool:
    return kubernetes_pool


@pytest.fixture
def lone_pool(cli: Cli, lone_kubernetes: KubernetesCluster) -> Iterator[KubernetesPool]:
    """A pool on a cluster whose parts the test may stop."""
    made = KubernetesPool(cli, lone_kubernetes)
    yield made
    for name in ("apiserver", "kubelet1", "kubelet2"):
        if not lone_kubernetes.is_up(name):
            lone_kubernetes.start(name)
    lone_kubernetes.wait_for_nodes()
    made.close()


def _start(pool: KubernetesPool, spec: str = SPIN) -> str:
    """Submit a gang and wait until it runs."""
    workflow = pool.cli.submit(pool.cli.spec(spec))
    pool.cli.await_running(workflow, 90)
    return workflow


def _cause(answer: dict[str, Any]) -> str:
    """Return the message of the group and its first cause."""
    group = answer["groups"][0]
    return f"{group['message']} {json.dumps(group.get('first_cause'))}"


def _await_end(pool: KubernetesPool, workflow: str, *statuses: str) -> dict[str, Any]:
    """Wait until a workflow has one of ``statuses`` and none of its objects remain. Return its ``query``."""
    pool.cli.await_record(workflow, lambda record: record.state.is_final, 150)
    answer = pool.cli.query(workflow)
    assert answer["status"] in statuses, _cause(answer)
    pool.await_no_objects()
    return answer


def _phases(pool: KubernetesPool) -> dict[str, str]:
    """Return the phase of each pod, such as ``Succeeded``."""
    return {one["metadata"]["name"]: one["status"]["phase"] for one in pool.cluster.objects("pods", pool.namespace)}


def test_a_gang_runs_in_pods_with_its_ranks_and_leaves_nothing_and_reap_deletes_objects_of_ended_workflows(
    pool: KubernetesPool,
) -> None:
    """``node reap`` deletes only objects of workflows in this store."""
    cli = pool.cli
    workflow = _start(pool)
    nodes = {task["node_name"] for task in cli.tasks(workflow).values()}
    assert len(nodes) == 2
    assert {node.partition("@")[2] for node in nodes} == set(pool.allocations())
    assert "rank 1" in cli.await_log(workflow, "rank 1")
    assert cli.run("workflow", "exec", workflow, "worker", "--entry", "hostname").out.strip() == f"{pool.allocations()[0]}-1"
    assert cli.run("workflow", "cancel", workflow, "--wait", "60").code == 0
    pool.await_no_objects()
    uuid = cli.query(workflow)["uuid"]
    for name, owner in (("ours", uuid), ("foreign", "a" * 32)):
        manifest = {
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {
                "name": name, "labels": {"app.kubernetes.io/managed-by": "distflow", "distflow.dev/workflow": owner},
                "annotations": {"distflow.dev/marker": f"distflow:{owner}/train/0"},
            },
        }  # fmt: skip
        pool.create(manifest)
    shown = cli.run("node", "reap").out
    assert "ours" in shown
    assert "skipped" in shown
    assert pool.allocations() == ["foreign"]


def test_pool_check_reports_a_missing_image_or_namespace(pool: KubernetesPool) -> None:
    done = pool.cli.run("pool", "check")
    assert done.code == 0, done.out + done.err
    assert "is Python 3." in done.out
    pool.configure(kubernetes={"image": "docker.io/local/missing:1"})
    done = pool.cli.run("pool", "check")
    assert (done.code, "docker.io/local/missing:1" in done.out) == (3, True), done.out
    pool.configure(kubernetes={"namespace": "nowhere"})
    assert pool.cli.run("pool", "check").code == 3
    pool.await_no_objects()


def test_a_gang_that_cannot_be_scheduled_shows_the_reason_and_ends_by_its_queue_timeout(pool: KubernetesPool) -> None:
    cli = pool.cli
    spec = SPIN.replace("  name: spin\n", "  name: spin\n  timeout: {queue_timeout: 8s}\n", 1).replace("{cpu: 0}", "{cpu: 500}")
    workflow = cli.submit(cli.spec(spec))
    pool.cli.await_group_message(workflow, "Insufficient cpu")
    second = cli.submit(cli.spec(spec.replace("8s", "1h"), "second.yaml"))
    wait_until(lambda: len(pool.allocations()) == 2, 60, "both gangs wait")
    assert cli.run("workflow", "cancel", second, "--wait", "60").code == 0
    answer = _await_end(pool, workflow, "FAILED_QUEUE_TIMEOUT")
    assert "queue_timeout" in _cause(answer)


@pytest.mark.parametrize(
    ("image", "python", "status", "words"),
    [
        ("docker.io/local/missing:1", "python3", "FAILED_IMAGE_PULL", "docker.io/local/missing:1"),
        ("docker.io/local/skel:1", "python4", "FAILED_START_ERROR", "does not have the pool's `python`"),
    ],
)
def test_an_image_that_is_missing_or_has_no_python_is_named(
    pool: KubernetesPool, image: str, python: str, status: str, words: str
) -> None:
    pool.configure(kubernetes={"image": image}, python=python)
    workflow = pool.cli.submit(pool.cli.spec(ONE))
    assert words in _cause(_await_end(pool, workflow, status))


def test_a_pod_that_is_deleted_from_outside_is_the_cause(pool: KubernetesPool) -> None:
    workflow = _start(pool)
    pool.delete("pods", f"{pool.allocations()[0]}-1")
    answer = _await_end(pool, workflow, "FAILED_CANCELED")
    assert "was deleted" in _cause(answer)


def test_a_rank_that_is_killed_because_it_exceeds_its_memory_limit_stops_the_gang(pool: KubernetesPool) -> None:
    eat = "import time; data = bytearray(1_500_000_000); time.sleep(60)"
    spec = SPIN.replace("sleep 600']}\n  resources", f'python3 -c "{eat}"\']}}\n  resources').replace(
        "{cpu: 0}", "{memory: 300Mi}"
    )
    pool.configure(enforce_limits=False)
    workflow = pool.cli.submit(pool.cli.spec(spec))
    answer = _await_end(pool, workflow, "FAILED_EVICTED", "FAILED")
    assert answer["groups"][0]["first_cause"]["task"] == "worker", answer


def test_a_distflow_in_a_pod_needs_only_the_documented_role(
    pool: KubernetesPool, repository: Path, forking_programs: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Without a kubeconfig, distflow uses the service account of its pod, from the files that Kubernetes mounts."""
    cli, cluster = pool.cli, pool.cluster
    if not cluster.is_own:
        pytest.skip("pods of another cluster do not see the files of this machine")
    pool.configure(kubernetes={"kubeconfig": None, "namespace": None})
    page = (repository / "docs/kubernetes.md").read_text()
    role = yaml.safe_load(re.findall(r"```text\n(apiVersion: rbac.*?)```", page, re.DOTALL)[0])
    role["metadata"]["namespace"] = pool.namespace
    account = {"kind": "ServiceAccount", "apiVersion": "v1", "metadata": {"name": "runs"}}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "runs"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role["metadata"]["name"]},
        "subjects": [{"kind": "ServiceAccount", "name": "runs", "namespace": pool.namespace}],
    }  # fmt: skip
    # The test cluster does not mount these files, and its pods reach the API server only over the host's network.
    authority = (cluster.folder / "certs/apiserver.crt").read_text()
    files = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "ca"}, "data": {"ca.crt": authority}}
    sources = [
        {"serviceAccountToken": {"path": "token"}}, {"configMap": {"name": "ca"}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
    ]  # fmt: skip
    server = urlsplit(yaml.safe_load(cluster.kubeconfig.read_text())["clusters"][0]["cluster"]["server"])
    given = {"KUBERNETES_SERVICE_HOST": server.hostname, "KUBERNETES_SERVICE_PORT": str(server.port), "HOME": str(cli.folder)}
    given |= {name: cli.environment[name] for name in ("DISTFLOW_STATE", "DISTFLOW_CONFIG")}
    run = f"{forking_programs}/distflow"
    base = tmp_path_factory.getbasetemp()
    sockets = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "forking-site"
    spec = cli.spec(SPIN.replace("sleep 600", "true"))
    log = cli.folder / "log"
    command = f"exec >{log} 2>&1; {run} pool check; {run} submit {spec} --wait; while [ ! -e {log}.go ]; do sleep 0.2; done"
    mounted = map(str, (cli.folder, repository, sockets))
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "cli"}, **pod_template(*mounted)}
    (container,) = pod["spec"]["containers"]
    container |= {"name": "cli", "image": IMAGE, "command": ["sh", "-c", command]}
    container["env"] = [{"name": name, "value": value} for name, value in given.items()]
    container["volumeMounts"].append({"name": "account", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"})
    pod["spec"] |= {"restartPolicy": "Never", "hostNetwork": True, "serviceAccountName": "runs"}
    pod["spec"]["volumes"].append({"name": "account", "projected": {"sources": sources}})
    for one in (account, role, binding, files, pod):
        pool.create(one)

    wait_until(lambda: log.exists() and "rank 1" in log.read_text(), 200, "the gang has run")
    wait_until(lambda: not pool.allocations(), 90, "no allocation is left")
    assert "is Python 3." in log.read_text(), log.read_text()
    assert "these calls are not allowed" not in log.read_text(), log.read_text()
    (cli.folder / "log.go").touch()
    wait_until(lambda: _phases(pool)["cli"] == "Succeeded", 60, "the pod ends")


def test_a_stopped_kubelet_fails_the_gang_after_node_lost_after(lone_pool: KubernetesPool) -> None:
    lone_pool.configure(node_lost_after="15s")
    workflow = _start(lone_pool)
    node = next(task["node_name"] for task in lone_pool.cli.tasks(workflow).values()).partition("_")[0]
    lone_pool.cluster.stop(node.replace("node", "kubelet"))
    answer = lone_pool.cli.await_status(workflow, "FAILED_BACKEND_ERROR", timeout=150)
    assert answer["groups"][0]["first_cause"]["reason"] == "NODE_LOST"


def test_a_pod_that_its_node_evicts_for_lack_of_memory_is_named(lone_pool: KubernetesPool) -> None:
    cluster = lone_pool.cluster
    workflow = _start(lone_pool)
    nodes = {name: task["node_name"].partition("_")[0] for name, task in lone_pool.cli.tasks(workflow).items()}
    node = nodes["master"]
    kubelet, settings = node.replace("node", "kubelet"), cluster.folder / node / "kubelet.yaml"
    before = settings.read_text()
    cluster.stop(kubelet)
    try:
        assert 'memory.available: "50Mi"' in before
        settings.write_text(before.replace('memory.available: "50Mi"', 'memory.available: "99%"'))
        cluster.start(kubelet)
        answer = _await_end(lone_pool, workflow, "FAILED_EVICTED")
    finally:
        settings.write_text(before)
        if cluster.is_up(kubelet):
            cluster.stop(kubelet)
    first = answer["groups"][0]["first_cause"]
    # The scheduler may place both pods on this node, which then evicts either of them first.
    assert (nodes[first["task"]], first["reason"]) == (node, "EVICTED"), answer
    assert "memory" in first["message"].lower()


def test_a_gang_waits_for_its_quota(pool: KubernetesPool) -> None:
    cli = pool.cli
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    pool.create(quota)
    wait_until(lambda: pool.cluster.objects("resourcequotas", pool.namespace)[0].get("status", {}).get("hard"), 60, "in force")
    workflow = cli.submit(cli.spec(SPIN.replace("sleep 600", "true")))
    pool.cli.await_group_message(workflow, "quota")
    reported = cli.run("pool", "check").out
    # This depends on when the pod has ended.
    assert "quota `few` is used up" in reported or "quota `few` has room" in reported
    pool.delete("resourcequotas", "few")
    assert cli.await_status(workflow, "COMPLETED", "FAILED", timeout=120)["status"] == "COMPLETED"
    pool.await_no_objects()


def test_pods_are_deleted_when_only_some_of_them_get_nodes(pool: KubernetesPool) -> None:
    cli = pool.cli
    pool.configure(start_barrier="5s", platforms={"none": {"node_selector": {"kind": "none"}}})
    spec = SPIN.replace("{cpu: 0}", "{cpu: 0}, rare: {cpu: 0, platform: none}").replace(
        "{name: worker,", "{name: worker, resource: rare,"
    )
    workflow = cli.submit(cli.spec(spec))
    wait_until(lambda: len(pool.pods()) == 2, 60, "both pods are created")
    first = pool.allocations()
    pool.cli.await_event(workflow, "only 1 of 2 pods got a node", 90)
    wait_until(lambda: first[0] not in pool.allocations(), 60, "the first pods are deleted")
    assert cli.run("workflow", "cancel", workflow, "--wait", "60").code == 0
    pool.await_no_objects()


def _are_established(cluster: KubernetesCluster) -> bool:
    found = cluster.call("GET", f"{DEFINITIONS}/{POD_GROUPS['metadata']['name']}").get("status", {})
    return ("Established", "True") in [(one["type"], one["status"]) for one in found.get("conditions") or ()]


def test_a_volcano_pod_group_is_created_and_deleted_with_the_gang(pool: KubernetesPool) -> None:
    """First the API server does not have Volcano's objects. Then it does, but no Volcano runs, so the pods wait."""
    if not pool.cluster.is_own:
        pytest.skip("the test adds a kind of objects to the cluster")
    cli = pool.cli
    pool.configure(kubernetes={"scheduler": "volcano", "queue": "q"})
    workflow = cli.submit(cli.spec(SPIN))
    assert "does not have Volcano's PodGroups" in _cause(_await_end(pool, workflow, "FAILED_START_ERROR"))
    pool.cluster.call("POST", DEFINITIONS, body=POD_GROUPS)
    wait_until(lambda: _are_established(pool.cluster), 60, "the API server has PodGroups")
    workflow = cli.submit(cli.spec(SPIN))
    wait_until(lambda: len(pool.pods()) == 2, 60, "both pods are created")
    (group,) = pool.cluster.objects("podgroups", pool.namespace, api=VOLCANO)
    assert (group["spec"], group["metadata"]["name"]) == ({"minMember": 2, "queue": "q"}, pool.allocations()[0])
    assert cli.run("workflow", "cancel", workflow, "--wait", "60").code == 0
    wait_until(lambda: not pool.cluster.objects("podgroups", pool.namespace, api=VOLCANO), 120, "the group of pods is gone")
    pool.await_no_objects()


def test_the_pods_of_an_exported_job_have_the_ranks_of_the_spec(pool: KubernetesPool, repository: Path) -> None:
    """Kubernetes 1.20 has no Indexed Jobs, so the test gives the pods their positions.

    The output goes to a file: each of the two kubelets of this machine deletes logs of pods that only the other one knows.
    """
    cli = pool.cli
    printed = cli.folder / "printed"
    printed.mkdir()
    pool.configure(folders=(str(printed),))
    done = cli.run(
        "workflow",
        "export",
        str(copy_specs(cli, repository) / "hello_world.yaml"),
        "--to",
        "kubernetes",
        "--indexed-job",
        "--pool",
        "pods",
    )
    assert done.code == 0, done.err
    settings, service, job = yaml.safe_load_all(done.out)
    pool.create(settings)
    pool.create(service)
    for index in range(job["spec"]["completions"]):
        spec = json.loads(json.dumps(job["spec"]["template"]["spec"]))
        (container,) = spec["containers"]
        container["env"].append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
        container["command"] = ["sh", "-c", f'exec "$@" > {printed}/{index} 2>&1', "sh", *container["command"]]
        spec["hostname"] = f"{job['metadata']['name']}-{index}"
        metadata = {"name": spec["hostname"], "namespace": pool.namespace}
        pool.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    wait_until(lambda: set(_phases(pool).values()) == {"Succeeded"}, 90, "both pods end")
    for index in range(2):
        lines = (printed / str(index)).read_text()
        assert f"Hello from hello-world-{index}, node {index} of 2\nrank {index} of 2\n" in lines
        assert "the master is at hello-world-0.hello-world, port 29500" in lines


def test_a_gang_completes_although_its_supervisor_is_killed_and_the_api_server_stops(lone_pool: KubernetesPool) -> None:
    cli = lone_pool.cli
    shared = cli.folder / "shared"
    shared.mkdir()
    lone_pool.configure(folders=(str(shared),))
    script = f"for word in again late; do while [ ! -e {shared}/$word ]; do sleep 0.2; done; echo $word; done"
    workflow = _start(lone_pool, SPIN.replace("sleep 600", script))
    owners = lone_pool.allocations()
    cli.kill_supervisor()
    (shared / "again").touch()
    cli.await_running(workflow)  # its command starts the next supervisor
    wait_until(lambda: cli.logs(workflow).count("again") == 2, 90, "the next supervisor has the output of both tasks")
    lone_pool.cluster.stop("apiserver")
    lone_pool.cli.await_event(workflow, "unreachable", 90)
    (shared / "late").touch()
    lone_pool.cluster.start("apiserver")
    assert cli.await_status(workflow, "COMPLETED", "FAILED", timeout=120)["status"] == "COMPLETED"
    assert cli.logs(workflow).count("late") == 2
    assert {task["node_name"].partition("@")[2] for task in cli.tasks(workflow).values()} == set(owners)
    lone_pool.await_no_objects()
