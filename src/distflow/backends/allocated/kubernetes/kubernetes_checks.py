"""Check a pool on Kubernetes: access, quotas, GPUs, and a pod with the pool's image."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from distflow.backends.allocated.engine import Allocation, AllocationRequest, NodeRequest, RequestRefused
from distflow.backends.allocated.kubernetes.api import ApiError, KubernetesApi
from distflow.backends.allocated.kubernetes.pod_states import Pod, PodPhase, state_of
from distflow.backends.allocated.kubernetes.pods import NO_VOLCANO, new_id, owner_manifest, pod_group_manifest, pod_manifest
from distflow.backends.machines.checks.findings import Finding, error, note, warning
from distflow.backends.machines.checks.measured import python_trouble
from distflow.backends.machines.connection.bootstrap import python_argv
from distflow.documents.text import listed, plain
from distflow.pools.model import KubernetesPlatform, KubernetesSettings, Pool, ssh_node
from distflow.transports.base import Deadline

__all__ = ["check_kubernetes"]

_Rules: TypeAlias = Sequence[tuple[str, str, tuple[str, ...]]]
_ROLE: _Rules = (
    ("configmaps", "", ("create", "list", "delete")),
    ("pods", "", ("create", "list")),
    ("pods", "exec", ("get", "create")),
)
"""Resource, subresource and verbs that distflow needs in the namespace."""
_VOLCANO: _Rules = (("podgroups", "", ("create",)),)
_OPTIONAL: _Rules = (("events", "", ("list",)),)
_POD_S = 90.0
_POLL_S = 1.0
_REMEDY = "change the `kubernetes` settings or the pod template of the pool, or ask the administrator of the cluster"
"""The remedy for a refusal that no other remedy fits."""
_PROBE = "import sys; open('/dev/termination-log', 'w').write(sys.version.split()[0])"


def check_kubernetes(pool: Pool, api: KubernetesApi, progress: Callable[[str], None] = lambda _: None) -> Iterator[Finding]:
    """Yield the findings. Creates at most one short-lived pod, and the object that owns it. Raises ``NodeUnreachable``."""
    check = _Check(pool, api)
    progress("connecting to the API server")
    try:
        yield from check.server()
    except RequestRefused as refused:
        yield error("kubernetes", ("kubeconfig",), refused.message, refused.hint)
        return
    progress("checking permissions")
    lacking = list(check.access())
    yield from lacking
    if any(one.grade.value == "error" for one in lacking):
        return
    yield from check.quotas()
    accepted = []
    for platform in ("", *check.settings.platforms):
        progress(f"checking whether a pod would be accepted{_of(platform)}")
        found = [*check.gpus(platform), *check.admission(platform)]
        yield from found
        accepted += [] if any(one.grade.value == "error" for one in found) else [platform]
    if "" in accepted:
        progress("running Python in a pod")
        yield from check.python()


def _of(platform: str) -> str:
    return f" (platform `{platform}`)" if platform else ""


class _Check:
    def __init__(self, pool: Pool, api: KubernetesApi) -> None:
        self._pool = pool
        self.settings = pool.kubernetes or KubernetesSettings()
        self._api = api
        self._at = (api.name,)

    def server(self) -> Iterator[Finding]:
        """Yield a note with the version. Raises ``NodeUnreachable`` if the API server does not answer."""
        try:
            version = plain(str(self._api.call("GET", "/version").get("gitVersion", "")))[:40]
        except ApiError:
            version = "of unknown version"
        yield note("kubernetes", self._at, f"Kubernetes {version}, namespace `{self._api.namespace}`", "")

    def access(self) -> Iterator[Finding]:
        """Check that the user may make the calls that distflow needs."""
        missing, optional = self._refused(_ROLE), self._refused(_OPTIONAL)
        if self.settings.scheduler == "volcano":
            missing += self._refused(_VOLCANO, "scheduling.volcano.sh")
        if missing:
            yield error(
                "rbac", self._at, f"these calls are not allowed in namespace `{self._api.namespace}`: {listed(missing)}",
                "ask the cluster's administrator for the role in docs/kubernetes.md",
            )  # fmt: skip
        if optional:
            yield note("rbac", self._at, f"{listed(optional)} is not allowed, so some causes of failures remain unknown", "")

    def _refused(self, wanted: _Rules, group: str = "") -> list[str]:
        found: list[str] = []
        for resource, subresource, verbs in wanted:
            for verb in verbs:
                attributes = {"namespace": self._api.namespace, "verb": verb, "group": group, "resource": resource}
                attributes["subresource"] = subresource
                body = {
                    "apiVersion": "authorization.k8s.io/v1",
                    "kind": "SelfSubjectAccessReview",
                    "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
                }
                try:
                    answer = self._api.call("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=body)
                except ApiError:
                    return found  # later calls will show what is allowed
                if not (answer.get("status") or {}).get("allowed"):
                    found.append(f"{verb} {resource}{f'/{subresource}' if subresource else ''}")
        return found

    def quotas(self) -> Iterator[Finding]:
        """Check for quotas of pods and ConfigMaps that are used up."""
        try:
            quotas = self._api.objects("resourcequotas")
        except ApiError:
            return
        for one in quotas:
            status = one.get("status") or {}
            hard, used = status.get("hard") or {}, status.get("used") or {}
            full = [
                f"{plain(name)} {plain(str(used.get(name)))} of {plain(str(most))}"
                for name, most in hard.items()
                if _concerns_distflow(name) and _is_used_up(used.get(name), most)
            ]
            name = plain(str((one.get("metadata") or {}).get("name", "")))
            if full:
                yield warning(
                    "quota",
                    self._at,
                    f"quota `{name}` is used up: {', '.join(full)}",
                    "workflows that need more of these resources wait until other objects release them",
                )
            else:
                yield note("quota", self._at, f"quota `{name}` has room for pods and ConfigMaps", "")

    def gpus(self, platform: str) -> Iterator[Finding]:
        """Check that nodes of a platform exist and have its GPUs, if the nodes may be listed."""
        settings = self.settings.platforms.get(platform, KubernetesPlatform())
        wanted = settings.gpu_resource or self.settings.gpu_resource
        selector = ",".join(f"{key}={value}" for key, value in settings.node_selector.items())
        try:
            answer = self._api.call("GET", "/api/v1/nodes", query={"labelSelector": selector} if selector else None)
        except ApiError:
            if not platform:
                yield note("gpus", self._at, "the GPUs of the nodes were not checked: listing nodes is not allowed", "")
            return
        nodes = [one for one in answer.get("items") or [] if isinstance(one, dict)]
        if not nodes and not selector:
            yield error("platform", self._at, "the cluster has no node", "add nodes, or choose another cluster")
            return
        if not nodes:
            yield error(
                "platform", self._at, f"no node has the labels `{selector}`{_of(platform)}",
                "change `node_selector` of the platform; `kubectl get nodes --show-labels` lists labels",
            )  # fmt: skip
            return
        amounts = [(one.get("status") or {}).get("allocatable") or {} for one in nodes]
        if any(str(amount.get(wanted, "0")) != "0" for amount in amounts):
            return
        known = sorted(
            {plain(str(name)) for amount in amounts for name in amount if "/" in str(name) and "hugepages" not in str(name)}
        )
        has = f"the nodes have {listed(known)}" if known else "the nodes have no extended resources"
        yield warning(
            "gpus",
            self._at,
            f"no node has the resource `{wanted}`{_of(platform)}",
            f"tasks that request GPUs cannot run; {has}",
        )

    def admission(self, platform: str) -> Iterator[Finding]:
        """Let the API server check a pod without creating it: its template, pod security, quotas and webhooks."""
        owner = {"metadata": {"name": "distflow-check", "uid": "00000000-0000-0000-0000-000000000000"}}
        wanted = _request(platform)
        kind = "pod"
        try:
            self._api.create("pods", pod_manifest(self._pool, wanted, 0, owner, ["true"]), is_dry=True)
            pod_group = pod_group_manifest(self.settings, wanted, owner)
            if pod_group is not None:
                kind = "PodGroup"
                self._api.create("podgroups", pod_group, is_dry=True)
        except RequestRefused as refused:
            yield error("pod", self._at, refused.message, refused.hint)
        except ApiError as refused:
            hint = _REMEDY
            if "exceeded quota" in refused.message:
                hint = "wait until other pods release the quota, or ask the administrator of the cluster for more"
            elif "PodSecurity" in refused.message:
                hint = "add a `securityContext` to the pod template"
            elif refused.status == 404 and kind == "PodGroup":
                hint = NO_VOLCANO
            yield error("pod", self._at, f"Kubernetes refuses a {kind}{_of(platform)}: {refused.message}", hint)
        else:
            yield note("pod", self._at, f"Kubernetes accepts a pod{_of(platform)}", "")

    def python(self) -> Iterator[Finding]:
        """Run the pool's Python in a pod with its image."""
        python = (self._pool.template or ssh_node()).python
        wanted = _request("")
        manifest = owner_manifest(wanted, name := new_id(wanted.label))
        try:
            owner = self._api.create("configmaps", manifest)
            pod = self._api.create("pods", pod_manifest(self._pool, wanted, 0, owner, [*python_argv(python), "-c", _PROBE]))
            finding = self._outcome(python, str(pod["metadata"]["name"]))
        except ApiError as refused:
            message = f"Kubernetes refused a request of the pod check: {refused.message}"
            finding = error("pod", self._at, message, _REMEDY)
        finally:
            remaining = self._delete(name)
        yield finding
        yield from remaining

    def _delete(self, name: str) -> list[Finding]:
        """Delete a ConfigMap, and with it the pods that it owns. Returns a warning if it may remain."""
        try:
            self._api.delete("configmaps", name)
        except ApiError as refused:
            hint = f"delete it: kubectl --namespace {self._api.namespace} delete configmap {name}"
            return [warning("pod", self._at, f"the ConfigMap `{name}` of this check may remain: {refused.message}", hint)]
        return []

    def _outcome(self, python: str, name: str) -> Finding:
        deadline, pause, last = Deadline(_POD_S), threading.Event(), "unknown"
        while not deadline.has_passed:
            found = self._api.objects("pods", fields=f"metadata.name={name}")
            if not found:
                return warning("pod", self._at, "the pod of the check was deleted", "run the check again")
            pod = Pod(found[0])
            state = state_of(pod)
            if state.phase is PodPhase.DONE:
                version = _message(pod)
                trouble = python_trouble(0, version)
                if trouble:
                    hint = (
                        "use an image with Python 3.8 or newer, or set `python` of the pool to such an interpreter in the image"
                    )
                    return error("python", self._at, f"in `{pod.image}`, `{python}` {plain(trouble)}", hint)
                return note("python", self._at, f"in `{pod.image}`, `{python}` is Python {version or 'of unknown version'}", "")
            if state.phase is PodPhase.FAILED:
                hint = "change `kubernetes.image` or `python` of the pool" if state.is_final else "run the check again"
                return error("image", self._at, f"a pod {state.message}", hint)
            last = state.message or ("running" if state.phase is PodPhase.RUNNING else last)
            pause.wait(_POLL_S)
        return warning(
            "pod", self._at, f"the pod of the check did not complete within {_POD_S:g} s; its last status: {last}",
            "check whether the cluster has free nodes, and whether they can pull the image",
        )  # fmt: skip


def _message(pod: Pod) -> str:
    text = str((pod.container("terminated") or {}).get("message", ""))
    return text if re.fullmatch(r"[0-9a-z.+]{1,30}", text) else ""


def _concerns_distflow(key: str) -> bool:
    """Return whether a key of a quota limits pods or ConfigMaps, the objects that distflow creates.

    Source: https://kubernetes.io/docs/concepts/policy/resource-quotas/
    """
    is_resource = key.startswith(("requests.", "limits.")) and key != "requests.storage"
    return is_resource or key.rpartition("/")[2] in ("pods", "configmaps", "cpu", "memory", "ephemeral-storage")


def _is_used_up(used: object, hard: object) -> bool:
    """Return whether a resource of a quota is used up. The values are Kubernetes quantities, such as ``2`` and ``2000m``."""
    from kubernetes.utils.quantity import parse_quantity  # noqa: PLC0415  an optional package that takes long to import

    try:
        return bool(parse_quantity(used) >= parse_quantity(hard))
    except (ValueError, ArithmeticError):
        return False


def _request(platform: str) -> AllocationRequest:
    allocation = Allocation(workflow="check", group="check", attempt=0)
    node = NodeRequest(task="check", platform=platform or None)
    return AllocationRequest(allocation=allocation, label="distflow-check", nodes=(node,))
