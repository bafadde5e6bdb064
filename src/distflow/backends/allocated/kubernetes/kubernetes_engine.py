"""Kubernetes as a cluster engine: the pods of an allocation belong to one owner object."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from distflow.backends.allocated.engine import (
    Allocation,
    AllocationRequest,
    AllocationState,
    Granted,
    Over,
    QueryLimit,
    Queued,
    RequestDelayed,
    RequestRefused,
    node_name,
)
from distflow.backends.allocated.kubernetes.api import ApiError, KubernetesApi
from distflow.backends.allocated.kubernetes.kubernetes_checks import check_kubernetes
from distflow.backends.allocated.kubernetes.pod_exec import PodTransport
from distflow.backends.allocated.kubernetes.pod_states import Pod, PodPhase, PodState, queue_text, state_of, vanished
from distflow.backends.allocated.kubernetes.pods import (
    ALLOCATION,
    CONTAINER,
    MANAGED,
    MARKER,
    NO_VOLCANO,
    WORKFLOW,
    index_of_host,
    new_id,
    owner_manifest,
    pod_group_manifest,
    pod_manifest,
    pod_name,
)
from distflow.backends.base import NO_EXIT_CODES
from distflow.backends.machines.checks.findings import Finding
from distflow.errors import NodeUnreachable
from distflow.lifecycle.states import Reason
from distflow.pools.model import KubernetesSettings, Pool, ssh_node
from distflow.transports.base import Transport

__all__ = ["KubernetesEngine"]

_IMAGE_S = 60.0
"""Seconds for which a pull of an image may fail before the failure is final."""
_QUOTA = re.compile(r"(?i)exceeded quota")
_BY_SEVERITY = (
    Reason.NODE_LOST, Reason.OOM_KILLED, Reason.EVICTED, Reason.PREEMPTED, Reason.IMAGE_PULL, Reason.EXEC_TIMEOUT,
    Reason.CANCELED,
)  # fmt: skip
"""Reasons of failed pods, most severe first. The most severe one of a gang explains its end. Other reasons are less severe."""


class KubernetesEngine:
    """Allocates nodes as pods (contract: ``allocated.engine.Engine``).

    1. An allocation is a ConfigMap that owns its pods. When it is deleted, Kubernetes deletes the pods, even without distflow.
    2. One query lists the pods of all allocations in the namespace.
    3. All pods of a gang must get their nodes within ``start_barrier`` after the first one. Otherwise all of them are deleted,
       because they could block another gang.
    """

    query_limit: ClassVar = QueryLimit(at_once=8.0, every_s=2.0)

    def __init__(
        self,
        pool: Pool,
        *,
        command: Callable[[str, str, str, float], Sequence[str]],
        relay: Callable[[Transport, str, str, str], Transport],
    ) -> None:
        """Use the cluster of the pool, without connecting.

        ``command(python, allocation, index, idle_release_s)`` returns the command of a container, which is the resident program
        (``allocated.engine``). ``index`` is the pod's index as text: its host is not known yet.
        ``relay(carrier, allocation, host, python)`` returns a transport to that program. ``carrier`` is a transport into the
        container.
        """
        self._pool = pool
        self._settings = pool.kubernetes or KubernetesSettings()
        self._template = pool.template or ssh_node()
        self._command = command
        self._relay = relay
        self._api = KubernetesApi(self._settings, pool=pool.name)
        self._lock = threading.Lock()
        """Guards everything below."""
        self._last: dict[str, PodState] = {}
        """Pod → its last known state, which explains the end of a pod that no longer exists."""
        self._failing_since: dict[str, float] = {}
        """Pod → time of the first failed pull of its image (monotonic clock)."""
        self._over: dict[str, Over] = {}
        self._released: set[str] = set()

    def request(self, wanted: AllocationRequest) -> str:
        """Create the owner object and the pods, unless they exist already, and return the name of the owner object."""
        try:
            owner = self._existing(wanted.allocation)
            if owner is None:
                owner = self._api.create("configmaps", owner_manifest(wanted, new_id(wanted.label)))
            allocation_id = str(owner["metadata"]["name"])
            try:
                self._create_pods(wanted, owner)
            except (ApiError, RequestRefused):
                self._api.delete("configmaps", allocation_id)
                raise
        except ApiError as error:
            raise _refusal(error, self._api.namespace, self._api.check_command) from None
        return allocation_id

    def notice(self, allocation_id: str) -> str:  # noqa: ARG002
        """Return an empty string: requests cause no warnings."""
        return ""

    def states(self, ids: Mapping[str, Sequence[str]]) -> Mapping[str, AllocationState]:
        """Return the state of each allocation. One query lists the pods of all of them.

        The remaining pods of an allocation that has ended are deleted, unless ``ids`` has no tasks for it.
        """
        with self._lock:
            found: dict[str, AllocationState] = {name: self._over[name] for name in ids if name in self._over}
        if not ids.keys() - found.keys():
            return found
        pods = self._listed()
        for name, tasks in ids.items():
            if name in found:
                continue
            state = self._state(name, tasks, pods.get(name, []))
            if isinstance(state, Over) and tasks:
                self.release([name])  # the other pods of the gang
                with self._lock:
                    self._over[name] = state
            found[name] = state
        return found

    def allocations(self) -> Mapping[str, Allocation]:
        """Return all allocations in the namespace that are not being deleted."""
        found = {}
        for one in self._owners():
            allocation = Allocation.of_marker(str((one["metadata"].get("annotations") or {}).get(MARKER, "")))
            if allocation is not None:
                found[str(one["metadata"]["name"])] = allocation
        return found

    def release(self, ids: Sequence[str], exit_codes: Mapping[str, int] = NO_EXIT_CODES) -> None:  # noqa: ARG002  deleted pods have none
        """Delete allocations with their pods."""
        for name in ids:
            try:
                self._api.delete("configmaps", name)
            except ApiError as error:
                raise NodeUnreachable(self._api.name, f"the pods of {name} could not be deleted: {error.message}") from None
            with self._lock:
                self._released.add(name)

    def transport(self, allocation_id: str, host: str) -> Transport:
        """Return a transport into a pod, without connecting."""
        name, python = node_name(host, allocation_id), self._template.python
        try:
            pod = pod_name(allocation_id, index_of_host(host))
        except ValueError:
            raise NodeUnreachable(
                name, "this is not the host of a distflow pod; such hosts have names like `node1_0`"
            ) from None
        connect = partial(self._api.exec, name, pod, CONTAINER)
        return self._relay(PodTransport(name, python, connect, close=self._api.close), allocation_id, host, python)

    def login_transport(self) -> None:
        """Return ``None``: no other machine has the files of a deleted pod."""

    def check(self, on_progress: Callable[[str], None] = lambda _: None) -> Sequence[Finding]:
        """Return the findings about the cluster and the pool's settings."""
        return list(check_kubernetes(self._pool, self._api, on_progress))

    def close(self) -> None:
        """Close the connections to the API server. Pods stay."""
        self._api.close()

    # Requests.

    def _owners(self, labels: str = "") -> list[dict[str, Any]]:
        try:
            found = self._api.objects("configmaps", labels=f"{MANAGED}{labels}")
        except ApiError as error:
            raise self._query_refused(error) from None
        return [one for one in found if isinstance(one.get("metadata"), dict) and not one["metadata"].get("deletionTimestamp")]

    def _existing(self, allocation: Allocation) -> dict[str, Any] | None:
        """Return the owner object of an earlier request whose answer may have been lost."""
        owners = self._owners(f",{WORKFLOW}={allocation.workflow}")
        same = [one for one in owners if (one["metadata"].get("annotations") or {}).get(MARKER) == allocation.marker]
        with self._lock:
            same = [one for one in same if one["metadata"]["name"] not in self._released]
        return min(same, key=lambda one: str(one["metadata"]["name"]), default=None)

    def _create_pods(self, wanted: AllocationRequest, owner: Mapping[str, Any]) -> None:
        name = str(owner["metadata"]["name"])
        python, idle_release_s = self._template.python, self._settings.idle_release_s
        pod_group = pod_group_manifest(self._settings, wanted, owner)
        if pod_group is not None:
            self._create("podgroups", pod_group)
        for index in range(len(wanted.nodes)):
            # The host is unknown until the pod has a node, so the resident program is named by the index of the pod.
            command = self._command(python, name, str(index), idle_release_s)
            self._create("pods", pod_manifest(self._pool, wanted, index, owner, command))

    def _create(self, kind: str, body: Mapping[str, Any]) -> None:
        """Create an object, unless it exists already."""
        try:
            self._api.create(kind, body)
        except ApiError as error:
            if error.status == 404 and kind == "podgroups":
                raise RequestRefused("the cluster does not have Volcano's PodGroups", hint=NO_VOLCANO) from None
            if error.status != 409:
                raise

    # Queries.

    def _query_refused(self, error: ApiError) -> NodeUnreachable:
        hint = f"run `{self._api.check_command}`, which names missing permissions"
        return NodeUnreachable(self._api.name, error.message, hint=hint)

    def _listed(self) -> dict[str, list[Pod]]:
        """Return the pods of all allocations."""
        try:
            pods = map(Pod, self._api.objects("pods", labels=MANAGED))
        except ApiError as error:
            raise self._query_refused(error) from None
        found: dict[str, list[Pod]] = {}
        for pod in pods:
            found.setdefault(str(pod.labels.get(ALLOCATION, "")), []).append(pod)
        return found

    def _state(self, name: str, tasks: Sequence[str], pods: Sequence[Pod]) -> AllocationState:
        states = {pod.name: state_of(pod) for pod in pods}
        by_name = {pod.name: pod for pod in pods}
        size = max((pod.size for pod in pods), default=0)
        missing = [found for index in range(size) if (found := pod_name(name, index)) not in states]
        with self._lock:
            last = dict(self._last)
            self._last |= {pod: self._remembered(pod, state) for pod, state in states.items()}
        if missing or not pods:
            return self._vanished(missing or [pod_name(name, 0)], last)
        failed = {pod: one for pod, one in states.items() if one.phase is PodPhase.FAILED or self._fails_too_long(pod, one)}
        if failed:
            return _failure(failed, by_name)
        if all(one.phase is PodPhase.DONE for one in states.values()):
            return Over(reason=None, message="the pods have ended, because no task and no supervisor used them")
        ending = [pod for pod, one in states.items() if one.phase is PodPhase.ENDING]
        if ending:
            lost = [pod for pod in ending if states[pod].reason is Reason.NODE_LOST]
            if lost:
                return _failure({pod: self._of_lost_node(by_name[pod], states[pod]) for pod in lost}, by_name)
            return Queued(why=f"waits for the end of its allocation: {ending[0]} is being deleted")
        if all(one.phase in (PodPhase.RUNNING, PodPhase.DONE) for one in states.values()):
            hosts = {pod.index: pod.host for pod in pods}
            names = tasks or [str(index) for index in range(len(hosts))]
            return Granted(hosts={task: hosts[index] for index, task in enumerate(names) if index in hosts})
        return self._stuck(pods, states) or Queued(why=queue_text(states))

    def _remembered(self, pod: str, state: PodState) -> PodState:
        """Return the state to remember, which keeps a known reason when the pod no longer has it."""
        before = self._last.get(pod)
        is_worse = before is not None and before.reason is not None and state.reason is None and state.phase is PodPhase.ENDING
        return before if is_worse and before is not None else state

    def _fails_too_long(self, pod: str, state: PodState) -> bool:
        with self._lock:
            if state.reason is not Reason.IMAGE_PULL:
                self._failing_since.pop(pod, None)
                return False
            return time.monotonic() - self._failing_since.setdefault(pod, time.monotonic()) > _IMAGE_S

    def _stuck(self, pods: Sequence[Pod], states: Mapping[str, PodState]) -> Over | None:
        """Return the end of an allocation if only a part of its pods gets nodes; ``None`` otherwise."""
        waiting = [pod for pod in pods if states[pod.name].phase is PodPhase.QUEUED]
        since = [pod.scheduled_at for pod in pods if pod.scheduled_at is not None]
        if not waiting or not since or _wall() - min(since) < self._pool.start_barrier_s:
            return None
        placed, why = len(pods) - len(waiting), states[waiting[0].name].message
        message = f"only {placed} of {len(pods)} pods got a node within `start_barrier`, so all were deleted"
        return Over(reason=None, message=f"{message}: {waiting[0].name} {why}")

    def _vanished(self, missing: Sequence[str], last: Mapping[str, PodState]) -> Over:
        """Return the end of an allocation with pods that no longer exist."""
        ends = {pod: vanished(last.get(pod), self._events(pod)) for pod in missing}
        failed = {pod: one for pod, one in last.items() if pod in ends and one.phase is PodPhase.FAILED}
        pod = next(iter(failed or ends))
        reason, text = ends[pod]
        return Over(reason=reason, message=f"pod {pod} {text}")

    def _events(self, pod: str) -> list[dict[str, Any]]:
        try:
            return self._api.objects("events", fields=f"involvedObject.kind=Pod,involvedObject.name={pod}")
        except ApiError:
            return []  # events only add details

    @staticmethod
    def _of_lost_node(pod: Pod, state: PodState) -> PodState:
        return PodState(phase=PodPhase.FAILED, message=f"{state.message} ({pod.node})", reason=Reason.NODE_LOST)


def _failure(failed: Mapping[str, PodState], pods: Mapping[str, Pod]) -> Over:
    """Return the end of an allocation with these failed pods."""

    def rank(pod: str) -> int:
        reason = failed[pod].reason
        return _BY_SEVERITY.index(reason) if reason in _BY_SEVERITY else len(_BY_SEVERITY)

    worst = min(failed, key=rank)
    reason = failed[worst].reason
    return Over(
        reason=reason,
        message=f"pod {worst} {failed[worst].message}",
        hosts=tuple(pods[pod].host for pod in failed if failed[pod].reason is reason and pods[pod].node),
        is_failure=failed[worst].is_final,
    )


def _refusal(error: ApiError, namespace: str, check_command: str) -> Exception:
    """Return the error for a request that the API server did not accept. ``check_command`` checks the pool."""
    if _QUOTA.search(error.message):
        return RequestDelayed(f"the quota of namespace `{namespace}` does not allow the pods now: {error.message}")
    hint = f"check the pool's `kubernetes` and its pod template with `{check_command}`"
    if error.status == 404:
        hint = f"create the namespace `{namespace}`, or change `kubernetes.namespace` of the pool"
    elif error.status == 403 and "cannot create" in error.message:
        hint = f"ask an administrator for the role in docs/kubernetes.md; `{check_command}` lists the missing permissions"
    elif "PodSecurity" in error.message:
        hint = "add a `securityContext` to the pod template, or use another namespace"
    return RequestRefused(f"Kubernetes refused the allocation: {error.message}", hint=hint)


def _wall() -> float:
    """Return the time, for comparison with timestamps of the API server."""
    return time.time()  # noqa: TID251  only this clock is comparable
