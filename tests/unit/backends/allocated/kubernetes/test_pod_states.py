"""The meaning of pod states: statuses that kubelets and schedulers of several releases write."""

from __future__ import annotations

from typing import Any

import pytest

from distflow.backends.allocated.kubernetes.pod_states import (
    FAILURES,
    TERMINATIONS,
    WAITING,
    Pod,
    PodPhase,
    failure_of,
    state_of,
    vanished,
)
from distflow.lifecycle.states import Reason


def pod(status: dict[str, Any], *, node: str = "n1", deleted: bool = False) -> Pod:
    metadata: dict[str, Any] = {"name": "p-0", "uid": "u", "labels": {"distflow.dev/index": "0"}}
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    spec = {"containers": [{"name": "task", "image": "i:1"}]} | ({"nodeName": node} if node else {})
    return Pod({"metadata": metadata, "spec": spec, "status": status})


def container(phase: str, **state: Any) -> dict[str, Any]:
    return {
        "phase": phase,
        "containerStatuses": [{"name": "sidecar", "state": {"running": {}}}, {"name": "task", "state": state}],
    }


UNSCHEDULABLE = {
    "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
    "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
}  # fmt: skip
NO_PYTHON = (
    "failed to create containerd task: OCI runtime create failed: container_linux.go:380: starting container process caused: "
    'exec: "python3": executable file not found in $PATH: unknown'
)
GATED = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "Scheduling is blocked"}


def disrupted(reason: str) -> dict[str, Any]:
    return {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason}]}


@pytest.mark.parametrize(
    ("found", "phase", "reason", "words"),
    [
        (pod({"phase": "Pending"}, node=""), PodPhase.QUEUED, None, "waits to be scheduled"),
        (
            pod({"phase": "Pending", "conditions": [UNSCHEDULABLE]}, node=""),
            PodPhase.QUEUED,
            None,
            "2 Insufficient nvidia.com/gpu",
        ),
        (pod({"phase": "Pending", "conditions": [GATED]}, node=""), PodPhase.QUEUED, None, "waits for its queue"),
        (pod({"phase": "Pending"}), PodPhase.STARTING, None, "is being created"),
        (pod(container("Pending", waiting={"reason": "ContainerCreating"})), PodPhase.STARTING, None, "is being created"),
        (pod(container("Pending", waiting={"reason": "BrandNew"})), PodPhase.STARTING, None, "is being created"),
        (
            pod(container("Pending", waiting={"reason": "ErrImagePull", "message": "dial tcp: i/o timeout"})),
            PodPhase.STARTING,
            Reason.IMAGE_PULL,
            "i:1",
        ),
        (
            pod(container("Pending", waiting={"reason": "ErrImagePull", "message": "docker.io/i:1: not found"})),
            PodPhase.FAILED,
            Reason.IMAGE_PULL,
            "i:1",
        ),
        (pod(container("Pending", waiting={"reason": "ErrImageNeverPull"})), PodPhase.FAILED, Reason.IMAGE_PULL, "pull policy"),
        (
            pod(container("Pending", waiting={"reason": "RunContainerError", "message": NO_PYTHON})),
            PodPhase.FAILED,
            Reason.START_ERROR,
            "`i:1` does not have the pool's `python`",
        ),
        (pod(container("Running", running={})), PodPhase.RUNNING, None, ""),
        (pod(container("Running", running={}), deleted=True), PodPhase.ENDING, None, "deleted"),
        (
            pod(container("Running", running={}) | {"conditions": [{"type": "Ready", "status": "False"}]}, deleted=True),
            PodPhase.ENDING,
            Reason.NODE_LOST,
            "no longer responds",
        ),
        (
            pod(container("Running", running={}) | disrupted("PreemptionByScheduler"), deleted=True),
            PodPhase.ENDING,
            Reason.PREEMPTED,
            "",
        ),
        (
            pod(container("Running", running={}) | disrupted("DeletionByTaintManager"), deleted=True),
            PodPhase.ENDING,
            Reason.NODE_LOST,
            "",
        ),
        (pod(container("Succeeded", terminated={"reason": "Completed", "exitCode": 0})), PodPhase.DONE, None, ""),
        (
            pod(container("Failed", terminated={"reason": "OOMKilled", "exitCode": 137})),
            PodPhase.FAILED,
            Reason.OOM_KILLED,
            "was killed because it reached its memory limit, or because its node ran out of memory",
        ),
        (
            pod(container("Failed", terminated={"reason": "StartError", "exitCode": 128, "message": NO_PYTHON})),
            PodPhase.FAILED,
            Reason.START_ERROR,
            "`i:1` does not have the pool's `python`",
        ),
        (
            pod(container("Failed", terminated={"reason": "Error", "exitCode": 1})),
            PodPhase.FAILED,
            Reason.START_ERROR,
            "exit code 1",
        ),
        (
            pod({"phase": "Failed", "reason": "Evicted", "message": "low on resource: memory"}),
            PodPhase.FAILED,
            Reason.EVICTED,
            "memory",
        ),
        (pod({"phase": "Failed"}, deleted=True), PodPhase.ENDING, None, "deleted"),
        (pod({"phase": "Failed", "reason": "Shutdown"}), PodPhase.FAILED, Reason.NODE_LOST, "shut down"),
        (pod({"phase": "Failed", "reason": "OutOfcpu"}, node="n1"), PodPhase.FAILED, Reason.NODE_LOST, "too few CPUs"),
        (pod({"phase": "Failed", "reason": "Unheard"}), PodPhase.FAILED, Reason.START_ERROR, "Unheard"),
    ],
)
def test_each_state_of_a_pod_has_a_phase_and_a_reason(found: Pod, phase: PodPhase, reason: Reason | None, words: str) -> None:
    state = state_of(found)
    assert (state.phase, state.reason) == (phase, reason)
    assert words in state.message


@pytest.mark.parametrize("word", [*FAILURES, *TERMINATIONS, *WAITING, "", "Unheard"])
def test_every_reason_has_a_meaning(word: str) -> None:
    for found in (
        pod({"phase": "Failed", "reason": word, "message": "m"}),
        pod(container("Failed", terminated={"reason": word, "exitCode": 1, "message": "m"})),
        pod(container("Pending", waiting={"reason": word, "message": "m"})),
    ):
        assert state_of(found).phase in (PodPhase.FAILED, PodPhase.STARTING)
    reason, text = failure_of(word, "m")
    assert isinstance(reason, Reason)
    assert text


@pytest.mark.parametrize("status", [None, [], {"phase": 3}, {"containerStatuses": {}}, {"conditions": [3], "phase": "Running"}])
def test_a_malformed_status_raises_nothing(status: Any) -> None:
    assert state_of(Pod({"metadata": None, "spec": [], "status": status})).phase in PodPhase


def test_a_missing_pod_is_explained_by_its_last_state_or_by_events() -> None:
    lost = state_of(pod(container("Running", running={}) | disrupted("DeletionByPodGC"), deleted=True))
    assert vanished(lost, [])[0] is Reason.NODE_LOST
    assert vanished(None, [{"reason": "Scheduled"}, {"reason": "Preempted"}])[0] is Reason.PREEMPTED
    assert vanished(None, [])[0] is Reason.CANCELED
    for word in ("PreemptionByScheduler", "EvictionByEvictionAPI", "DeletionByTaintManager", "Unheard"):
        ending = state_of(pod(container("Running", running={}) | disrupted(word), deleted=True))
        expected = FAILURES.get(word, (Reason.PREEMPTED, "was preempted or evicted (Unheard)"))
        assert vanished(ending, []) == expected, "not the text of another cause with the same reason"
    evicted = state_of(pod({"phase": "Failed", "reason": "Evicted"}))
    assert vanished(evicted, [])[0] is Reason.EVICTED
