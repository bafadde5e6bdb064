"""The Kubernetes objects that distflow creates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from distflow.backends.allocated.engine import Allocation, AllocationRequest, NodeRequest, RequestRefused
from distflow.backends.allocated.kubernetes.pods import (
    host_name,
    index_of_host,
    new_id,
    node_of_host,
    owner_manifest,
    pod_group_manifest,
    pod_manifest,
)
from distflow.pools.model import KubernetesPlatform, KubernetesSettings, Pool

OWNER = {"metadata": {"name": "train-3-1a2b3c4d", "uid": "u"}}


def request_for(*nodes: NodeRequest, priority: str = "NORMAL") -> AllocationRequest:
    allocation = Allocation(workflow="a" * 32, group="g", attempt=0)
    return AllocationRequest(allocation=allocation, label="train-3/g", nodes=nodes, priority=priority)


def manifest_of(node: NodeRequest, settings: KubernetesSettings, priority: str = "NORMAL") -> dict[str, Any]:
    pool = Pool(name="k", backend="kubernetes", nodes=(), kubernetes=settings)
    return pod_manifest(pool, request_for(node, NodeRequest(task="other"), priority=priority), 0, OWNER, ["python3"])


def test_a_pod_has_what_the_task_requests() -> None:
    platform = KubernetesPlatform(node_selector={"kind": "h"}, tolerations=({"key": "gpu"},))
    settings = KubernetesSettings(
        image="i:1", service_account="train", priority_classes={"HIGH": "urgent"}, platforms={"h": platform}
    )
    node = NodeRequest(
        task="w_0", gpus=8, cpus=4, memory=2**30, platform="h", excluded=("n1_0", "10.0.0.1"), image="j:2", mounts=("/data:/d",)
    )
    pod = manifest_of(node, settings, "HIGH")
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    assert (spec["serviceAccountName"], spec["priorityClassName"], spec["nodeSelector"]) == ("train", "urgent", {"kind": "h"})
    assert container["image"] == "j:2"
    assert container["resources"]["requests"] == {"cpu": "4", "memory": str(2**30), "nvidia.com/gpu": "8"}
    assert container["resources"]["limits"] == {"memory": str(2**30), "nvidia.com/gpu": "8"}
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [one["values"] for one in terms[0]["matchFields"]] == [["n1"], ["10.0.0.1"]]
    assert {"name": "distflow-mount-0", "mountPath": "/d"} in container["volumeMounts"]
    assert pod["metadata"]["ownerReferences"][0]["name"] == OWNER["metadata"]["name"]


@pytest.mark.parametrize("release", ["1.25", "1.37"])
def test_manifests_are_valid_in_several_releases_of_kubernetes(release: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    node = NodeRequest(task="w", gpus=8, cpus=4, memory=2**30, excluded=("n1_0",), mounts=("/data",))
    validate.validate(manifest_of(node, KubernetesSettings(image="i:1", queue="q", host_network=True)), release, strict=True)
    validate.validate(owner_manifest(request_for(node), "train-3-1a2b3c4d"), release, strict=True)


def test_a_template_is_merged_and_its_mounts_replace_others() -> None:
    template = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "securityContext": {"runAsUser": 1000},
            "containers": [{"args": ["x"], "volumeMounts": [{"name": "mine", "mountPath": "/dev/shm"}]}, {"name": "sidecar"}],
            "volumes": [{"name": "mine", "emptyDir": {}}],
        },
    }
    pod = manifest_of(NodeRequest(task="w"), KubernetesSettings(image="i:1", pod_template=json.dumps(template)))
    assert pod["metadata"]["labels"]["team"] == "a"
    assert [one["name"] for one in pod["spec"]["containers"]] == ["task", "sidecar"]
    assert "args" not in pod["spec"]["containers"][0]
    assert [one["name"] for one in pod["spec"]["volumes"]] == ["mine", "distflow"]
    assert pod["spec"]["securityContext"] == {"runAsUser": 1000}


def test_kueue_admits_the_pods_of_a_group_together_and_releases_them_together() -> None:
    settings = KubernetesSettings(image="i:1", queue="team-a")
    metadata = manifest_of(NodeRequest(task="w"), settings)["metadata"]
    given = {name: value for name, value in (metadata["labels"] | metadata["annotations"]).items() if "kueue" in name}
    assert given == {
        "kueue.x-k8s.io/queue-name": "team-a",
        "kueue.x-k8s.io/pod-group-name": OWNER["metadata"]["name"],
        "kueue.x-k8s.io/pod-group-total-count": "2",
        "kueue.x-k8s.io/retriable-in-group": "false",
    }
    # Kueue reads these as labels, the others as annotations.
    assert {"kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/pod-group-name"} == {
        name for name in metadata["labels"] if "kueue" in name
    }
    assert pod_group_manifest(settings, request_for(), OWNER) is None


def test_volcano_schedules_the_pods_of_a_group_together() -> None:
    settings = KubernetesSettings(image="i:1", queue="q", scheduler="volcano", priority_classes={"HIGH": "urgent"})
    pod = manifest_of(NodeRequest(task="w"), settings)
    group = pod_group_manifest(settings, request_for(NodeRequest(task="w"), NodeRequest(task="x"), priority="HIGH"), OWNER)
    assert group is not None
    assert group["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    assert group["spec"] == {"minMember": 2, "queue": "q", "priorityClassName": "urgent"}
    assert pod["spec"]["schedulerName"] == "volcano"
    assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == group["metadata"]["name"]
    assert pod["metadata"]["ownerReferences"] == group["metadata"]["ownerReferences"]
    assert not [name for name in pod["metadata"]["labels"] if "kueue" in name]


def test_a_task_without_an_image_or_with_an_unknown_platform_is_refused() -> None:
    with pytest.raises(RequestRefused, match="task w has no container image"):
        manifest_of(NodeRequest(task="w"), KubernetesSettings())
    with pytest.raises(RequestRefused, match="has no platform `h200`"):
        manifest_of(NodeRequest(task="w", platform="h200"), KubernetesSettings(image="i:1"))


@pytest.mark.parametrize("label", ["train-3/g", "Ünï_code/x", "3/4", "x" * 90 + "/y", "/"])
def test_allocation_names_are_valid(label: str) -> None:
    name = new_id(label)
    assert name == name.lower()
    assert len(f"{name}-123456") <= 63
    assert name[0].isalpha()
    owner = owner_manifest(request_for(), name)
    assert owner["metadata"]["labels"]["distflow.dev/allocation"] == name


def test_the_host_name_of_a_pod_contains_its_node_and_index() -> None:
    assert host_name("10.0.0.1", 12) == "10.0.0.1_12"
    assert (index_of_host("10.0.0.1_12"), node_of_host("10.0.0.1_12"), node_of_host("10.0.0.1")) == (12, "10.0.0.1", "10.0.0.1")
