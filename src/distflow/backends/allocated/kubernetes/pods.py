"""Turn a request for nodes into Kubernetes objects: an owner, and one pod for each task."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from distflow.backends.allocated.engine import AllocationRequest, NodeRequest, RequestRefused
from distflow.documents.text import did_you_mean, plain
from distflow.pools.model import KubernetesPlatform, KubernetesSettings, Pool
from distflow.pools.pod_templates import template_image, with_template

__all__ = [
    "ALLOCATION",
    "CONTAINER",
    "INDEX",
    "MANAGED",
    "MARKER",
    "NO_VOLCANO",
    "SIZE",
    "WORKFLOW",
    "host_name",
    "index_of_host",
    "new_id",
    "node_of_host",
    "owner_manifest",
    "pod_group_manifest",
    "pod_manifest",
    "pod_name",
]

MANAGED = "app.kubernetes.io/managed-by=distflow"
"""The label of all objects of distflow."""
WORKFLOW = "distflow.dev/workflow"
"""The label with the uuid of the workflow."""
ALLOCATION = "distflow.dev/allocation"
"""The label with the id of the allocation, which is the name of its owner object."""
INDEX = "distflow.dev/index"
"""The label with the position of the pod's task in the request."""
SIZE = "distflow.dev/size"
"""The label with the number of pods of the allocation."""
MARKER = "distflow.dev/marker"
"""The annotation by which distflow finds its allocations: ``Allocation.marker``, ``distflow:<uuid>/<group>/<attempt>``."""
CONTAINER = "task"
NO_VOLCANO = "remove `scheduler: volcano` from the pool's `kubernetes`, or install Volcano with scheduling.volcano.sh/v1beta1"
"""The hint if the cluster does not know the objects of ``pod_group_manifest``."""
_LONGEST_LABEL = 63
_STOP_S = 30


def new_id(label: str) -> str:
    """Return a new name for an allocation. ``label`` is ``<workflow id>/<group>``."""
    name = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:40].rstrip("-") or "distflow"
    return f"{name if name[0].isalpha() else f'w-{name}'}-{secrets.token_hex(4)}"


def pod_name(allocation_id: str, index: int) -> str:
    """Return the name of the pod of the task at this position."""
    return f"{allocation_id}-{index}"


def host_name(node: str, index: int) -> str:
    """Return the host of a pod: its node and its position (``node1_0``), because a node may have several pods of a gang."""
    return f"{node}_{index}"  # the names of nodes contain no underscore


def index_of_host(host: str) -> int:
    """Return the position of the pod of a host. Raises ``ValueError`` for other text, such as ``node1``."""
    return int(host.rpartition("_")[2])


def node_of_host(host: str) -> str:
    """Return the node of a host. A node's name is returned unchanged."""
    return re.sub(r"_[0-9]+$", "", host)


def owner_manifest(wanted: AllocationRequest, allocation_id: str) -> dict[str, Any]:
    """Return the object that owns the pods of an allocation, which are deleted with it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": allocation_id,
            "labels": _labels(wanted, allocation_id),
            "annotations": {MARKER: wanted.allocation.marker, "distflow.dev/group": plain(wanted.label)},
        },
        "data": {"about": "This object owns the pods of a distflow workflow. They end when it is deleted."},
    }


def pod_group_manifest(
    settings: KubernetesSettings, wanted: AllocationRequest, owner: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the object by which Volcano schedules the pods of an allocation together; ``None`` for other schedulers.

    The pods name it in an annotation, so Volcano does not create a PodGroup of its own. That one would have ``minMember`` 1,
    and Volcano would not start the pods together.
    """
    if settings.scheduler != "volcano":
        return None
    optional = {"queue": settings.queue, "priorityClassName": settings.priority_classes.get(wanted.priority)}
    allocation_id = str(owner["metadata"]["name"])
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {
            "name": allocation_id,
            "labels": _labels(wanted, allocation_id),
            "ownerReferences": [_owner_reference(owner)],
        },
        "spec": {"minMember": len(wanted.nodes), **{key: value for key, value in optional.items() if value}},
    }


def pod_manifest(
    pool: Pool,
    wanted: AllocationRequest,
    index: int,
    owner: Mapping[str, Any],
    command: Sequence[str],
) -> dict[str, Any]:
    """Return the pod of the task at position ``index``, merged with the pool's template.

    Args:
        pool: The pool, with its settings of Kubernetes.
        wanted: The request.
        index: The position of the task in the request.
        owner: The owner object as the API server returned it.
        command: The command of the container.

    Raises:
        RequestRefused: if there is no image, or if the pool does not have the platform.

    """
    settings, node = pool.kubernetes or KubernetesSettings(), wanted.nodes[index]
    allocation_id = str(owner["metadata"]["name"])
    platform = _platform(pool.name, settings, node.platform)
    template = json.loads(settings.pod_template)
    image = node.image or settings.image or template_image(template)
    if not image:
        raise RequestRefused(
            f"task {node.task} has no container image",
            hint="set `image` of the task, `kubernetes.image` of the pool, or the image in the pod template",
        )
    ours: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(allocation_id, index),
            "labels": {
                **_labels(wanted, allocation_id),
                INDEX: str(index),
                SIZE: str(len(wanted.nodes)),
                "distflow.dev/task": _label(node.task),
                **_queue_labels(settings, allocation_id),
            },
            "annotations": {
                MARKER: wanted.allocation.marker,
                "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
                **_queue_annotations(settings, allocation_id, len(wanted.nodes)),
            },
            "ownerReferences": [_owner_reference(owner)],
        },
        "spec": _spec(settings, platform, wanted, node),
    }
    ours["spec"]["containers"] = [_container(settings, platform, node, image, command)]
    ours["spec"]["volumes"] = [
        {"name": "distflow", "emptyDir": {}},
        {"name": "distflow-shm", "emptyDir": {"medium": "Memory"}},
        *(_host_volume(number, mount)[0] for number, mount in enumerate(node.mounts)),
    ]
    return with_template(template, ours)


def _spec(
    settings: KubernetesSettings, platform: KubernetesPlatform, wanted: AllocationRequest, node: NodeRequest
) -> dict[str, Any]:
    optional: dict[str, Any] = {
        "serviceAccountName": settings.service_account,
        "schedulerName": settings.scheduler,
        "priorityClassName": settings.priority_classes.get(wanted.priority),
        "hostNetwork": settings.host_network or None,
        "dnsPolicy": "ClusterFirstWithHostNet" if settings.host_network else None,
        "nodeSelector": dict(platform.node_selector),
        "tolerations": [dict(one) for one in platform.tolerations],
        "affinity": _affinity(node.excluded),
    }
    return {
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _STOP_S,
        **{key: value for key, value in optional.items() if value},
    }


def _affinity(excluded: Sequence[str]) -> dict[str, Any]:
    """Return the rule that excludes nodes."""
    names = dict.fromkeys(map(node_of_host, excluded))
    if not names:
        return {}
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in names]
    rule = {"nodeSelectorTerms": [{"matchFields": fields}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": rule}}


def _container(
    settings: KubernetesSettings,
    platform: KubernetesPlatform,
    node: NodeRequest,
    image: str,
    command: Sequence[str],
) -> dict[str, Any]:
    gpu = platform.gpu_resource or settings.gpu_resource
    requests = {
        **({"cpu": str(node.cpus)} if node.cpus else {}),
        **({"memory": str(node.memory)} if node.memory else {}),
        **({gpu: str(node.gpus)} if node.gpus else {}),
    }
    limits = {name: value for name, value in requests.items() if name != "cpu"}  # a CPU limit would slow tasks down
    return {
        "name": CONTAINER,
        "image": image,
        "command": list(command),
        "env": [
            {"name": "DISTFLOW_NODE_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            # With this variable, the agent does not check whether other users can write to the parent directories of `root`:
            # volumes of a pod are writable for all users, but no other user has processes in the pod.
            {"name": "DISTFLOW_POD", "value": "1"},
        ],
        **({"resources": {"requests": requests, "limits": limits}} if requests else {}),
        "volumeMounts": [
            {"name": "distflow", "mountPath": "/distflow"},
            {"name": "distflow-shm", "mountPath": "/dev/shm"},  # noqa: S108  workers of data loaders need more than 64 MiB
            *(_host_volume(number, mount)[1] for number, mount in enumerate(node.mounts)),
        ],
    }


def _host_volume(number: int, mount: str) -> tuple[dict[str, Any], dict[str, Any]]:
    source, _, target = mount.partition(":")
    name = f"distflow-mount-{number}"
    return {"name": name, "hostPath": {"path": source}}, {"name": name, "mountPath": target or source}


def _labels(wanted: AllocationRequest, allocation_id: str) -> dict[str, str]:
    name, _, value = MANAGED.partition("=")
    return {name: value, WORKFLOW: wanted.allocation.workflow, ALLOCATION: allocation_id}


def _owner_reference(owner: Mapping[str, Any]) -> dict[str, Any]:
    metadata = owner["metadata"]
    return {"apiVersion": "v1", "kind": "ConfigMap", "name": metadata["name"], "uid": metadata["uid"], "controller": True}


def _queue_labels(settings: KubernetesSettings, allocation_id: str) -> dict[str, str]:
    if settings.queue is None or settings.scheduler == "volcano":
        return {}
    return {"kueue.x-k8s.io/queue-name": settings.queue, "kueue.x-k8s.io/pod-group-name": allocation_id}


def _queue_annotations(settings: KubernetesSettings, allocation_id: str, count: int) -> dict[str, str]:
    if settings.scheduler == "volcano":
        return {"scheduling.k8s.io/group-name": allocation_id}
    if settings.queue is None:
        return {}
    # Without `retriable-in-group: false`, Kueue would wait for a replacement of a failed pod, and keep the other pods and
    # their quota.
    return {"kueue.x-k8s.io/pod-group-total-count": str(count), "kueue.x-k8s.io/retriable-in-group": "false"}


def _label(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:_LONGEST_LABEL].strip("-_.")


def _platform(pool: str, settings: KubernetesSettings, name: str | None) -> KubernetesPlatform:
    if name is None:
        return KubernetesPlatform()
    if name not in settings.platforms:
        hint = did_you_mean(name, settings.platforms, what="platforms")
        if not settings.platforms:
            hint = f"add for example `platforms: {{{name}: {{node_selector: {{kind: {name}}}}}}}` to the pool"
        raise RequestRefused(f"pool `{pool}` has no platform `{name}`", hint=hint)
    return settings.platforms[name]
