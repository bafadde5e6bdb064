"""Kubernetes' reports about pods, and their meaning for distflow: phases, container states, conditions and reasons.

The reasons are those of Kubernetes 1.20 to 1.37 (``pkg/kubelet``, ``pkg/scheduler`` and ``api/core/v1`` in its sources). If a
reason is not known, the phase of the pod decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from distflow.backends.allocated.kubernetes.pods import CONTAINER, INDEX, SIZE, host_name
from distflow.documents.text import few, plain
from distflow.lifecycle.states import Reason

__all__ = [
    "FAILURES",
    "TERMINATIONS",
    "WAITING",
    "Pod",
    "PodPhase",
    "PodState",
    "failure_of",
    "queue_text",
    "state_of",
    "vanished",
]

_LONGEST = 400


class PodPhase(Enum):
    """The meaning of a pod's state for its allocation."""

    QUEUED = "queued"
    """It waits for a node, or for another condition that the scheduler or a queue decides."""
    STARTING = "starting"
    """It has a node, and its container is being started."""
    RUNNING = "running"
    ENDING = "ending"
    DONE = "done"
    """Its program ended by itself with exit code 0. A resident program does that when it is idle."""
    FAILED = "failed"


class PodState(Struct, frozen=True, kw_only=True):
    """The state of one pod."""

    phase: PodPhase
    message: str = ""
    """Why it waits, or how it ended."""
    reason: Reason | None = None
    """Why it failed, is ending, or cannot start yet; ``None`` if Kubernetes reports no reason."""
    is_final: bool = False
    """Whether another pod would fail in the same way."""


FAILURES: Mapping[str, tuple[Reason, str]] = MappingProxyType(
    {
        "Evicted": (Reason.EVICTED, "was evicted"),
        "Preempting": (Reason.PREEMPTED, "was preempted by a critical pod"),
        "PreemptionByScheduler": (Reason.PREEMPTED, "was preempted by a pod of higher priority"),
        "PreemptionByKubeScheduler": (Reason.PREEMPTED, "was preempted by a pod of higher priority"),
        "Preempted": (Reason.PREEMPTED, "was preempted by a pod of higher priority"),
        "EvictionByEvictionAPI": (Reason.PREEMPTED, "was evicted, for example because its node is drained"),
        "DeletionByTaintManager": (Reason.NODE_LOST, "was deleted because its node is tainted, for example unreachable"),
        "TaintManagerEviction": (Reason.NODE_LOST, "was deleted because its node is tainted, for example unreachable"),
        "DeletionByPodGC": (Reason.NODE_LOST, "was deleted because its node no longer exists"),
        "TerminationByKubelet": (Reason.EVICTED, "was ended by its node, which ran short of resources or was shut down"),
        "NodeLost": (Reason.NODE_LOST, "was on a node that no longer responds"),
        "NodeControllerEviction": (Reason.NODE_LOST, "was on a node that no longer responds"),
        "NodeNotReady": (Reason.NODE_LOST, "is on a node that no longer responds"),
        "NodeShutdown": (Reason.NODE_LOST, "was on a node that was shut down"),
        "Shutdown": (Reason.NODE_LOST, "was on a node that was shut down"),
        "Terminated": (Reason.NODE_LOST, "was on a node that was shut down"),
        "NodeAffinity": (Reason.NODE_LOST, "no longer matches its node after a restart of the node"),
        "OutOfcpu": (Reason.NODE_LOST, "was refused by its node, which had too few CPUs"),
        "OutOfmemory": (Reason.NODE_LOST, "was refused by its node, which had too little memory"),
        "OutOfpods": (Reason.NODE_LOST, "was refused by its node, which had too many pods"),
        "UnexpectedAdmissionError": (Reason.NODE_LOST, "was refused by its node"),
        "TopologyAffinityError": (Reason.NODE_LOST, "was refused by its node, which could not align its resources"),
        "AppArmor": (Reason.START_ERROR, "was refused by its node, which has no such AppArmor profile"),
        "SysctlForbidden": (Reason.START_ERROR, "was refused by its node, because it sets a forbidden sysctl"),
        "DeadlineExceeded": (Reason.EXEC_TIMEOUT, "reached its deadline"),
    }
)
"""Reason of a failed pod, of a ``DisruptionTarget`` condition or of an event → distflow's reason, and the end of a sentence
about the pod."""

TERMINATIONS: Mapping[str, tuple[Reason, str]] = MappingProxyType(
    {
        "OOMKilled": (
            Reason.OOM_KILLED,
            "was killed because it reached its memory limit, or because its node ran out of memory",
        ),
        "Evicted": (Reason.EVICTED, "was evicted"),
        "DeadlineExceeded": (Reason.EXEC_TIMEOUT, "reached its deadline"),
        "ContainerCannotRun": (Reason.START_ERROR, "could not be started"),
        "StartError": (Reason.START_ERROR, "could not be started"),
        "ContainerStatusUnknown": (Reason.NODE_LOST, "was lost by its node"),
        "Error": (Reason.START_ERROR, "failed"),
        "Completed": (Reason.START_ERROR, "ended"),
    }
)
"""Reason of a terminated container → distflow's reason, and the end of a sentence about the pod."""

WAITING: Mapping[str, tuple[Reason | None, str, bool]] = MappingProxyType(
    {
        "ContainerCreating": (None, "its container is being created", False),
        "PodInitializing": (None, "its container is being initialized", False),
        "ErrImagePull": (Reason.IMAGE_PULL, "its image could not be pulled", False),
        "ImagePullBackOff": (Reason.IMAGE_PULL, "its image could not be pulled", False),
        "RegistryUnavailable": (Reason.IMAGE_PULL, "the registry of its image does not answer", False),
        "ErrImageNeverPull": (Reason.IMAGE_PULL, "its node does not have the image, and its pull policy is `Never`", True),
        "InvalidImageName": (Reason.IMAGE_PULL, "the name of its image is not valid", True),
        "ImageInspectError": (Reason.IMAGE_PULL, "its image could not be inspected", True),
        "SignatureValidationFailed": (Reason.IMAGE_PULL, "the signature of its image is not valid", True),
        "CreateContainerConfigError": (Reason.START_ERROR, "its container could not be configured", True),
        "CreateContainerError": (Reason.START_ERROR, "its container could not be created", True),
        "RunContainerError": (Reason.START_ERROR, "its container could not be started", True),
        "CrashLoopBackOff": (Reason.START_ERROR, "its container fails again and again", True),
        "PreCreateHookError": (Reason.START_ERROR, "its container could not be created", True),
        "PreStartHookError": (Reason.START_ERROR, "its container could not be started", True),
        "PostStartHookError": (Reason.START_ERROR, "a hook of its container failed", True),
    }
)
"""Reason of a waiting container → distflow's reason (``None``: normal), a text, and whether the failure is final.

With a reason, the text is a clause after ``cannot start:``. Otherwise, ``on`` and the node follow.
"""

_PERMANENT_PULL_ERROR = re.compile(
    r"(?i)not found|manifest unknown|does not exist|pull access denied|authorization failed|authentication required"
    r"|unauthorized|name unknown|no match for platform|invalid reference|no such host"
)
"""Matches error messages of a pull that would fail again."""
_NO_PROGRAM = re.compile(r'exec: "?([^":]+)"?: (?:executable file not found|stat .*no such file)|no such file or directory')


class Pod:
    """A pod as the API server describes it. Fields of other types than expected count as missing."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        """Use the JSON of a pod."""
        self._data = data
        self._status = _mapping(data.get("status"))
        self._metadata = _mapping(data.get("metadata"))

    @property
    def name(self) -> str:
        """Its name."""
        return _text(self._metadata.get("name"))

    @property
    def uid(self) -> str:
        """Its unique id."""
        return _text(self._metadata.get("uid"))

    @property
    def labels(self) -> Mapping[str, Any]:
        """Its labels."""
        return _mapping(self._metadata.get("labels"))

    @property
    def index(self) -> int | None:
        """The position of its task in the request."""
        return self._number(INDEX)

    @property
    def size(self) -> int:
        """The number of pods of its allocation; 0 if that is not known."""
        return self._number(SIZE) or 0

    @property
    def node(self) -> str:
        """Its node; empty if it has none yet."""
        return _text(_mapping(self._data.get("spec")).get("nodeName"))

    @property
    def host(self) -> str:
        """Its host, for transports (``host_name``)."""
        return host_name(self.node, self.index or 0)

    @property
    def image(self) -> str:
        """The image of its container."""
        containers = _mapping(self._data.get("spec")).get("containers")
        first = _mapping(containers[0]) if isinstance(containers, list) and containers else {}
        return _text(first.get("image"))

    @property
    def is_deleted(self) -> bool:
        """Whether its deletion has begun."""
        return bool(self._metadata.get("deletionTimestamp"))

    @property
    def scheduled_at(self) -> float | None:
        """When it got its node, in seconds since the epoch."""
        found = self.condition("PodScheduled")
        return _time(found.get("lastTransitionTime")) if found.get("status") == "True" else None

    @property
    def phase(self) -> str:
        """Its phase, as Kubernetes names it."""
        return _text(self._status.get("phase"))

    @property
    def reason(self) -> str:
        """Kubernetes' reason for its phase; may be empty."""
        return _text(self._status.get("reason"))

    @property
    def message(self) -> str:
        """The reason as a sentence; may be empty."""
        return _text(self._status.get("message"))

    def _number(self, label: str) -> int | None:
        text = _text(self.labels.get(label))
        return int(text) if text.isdecimal() and len(text) < 7 else None

    def condition(self, kind: str) -> Mapping[str, Any]:
        """Return a condition; empty if it has none of the kind."""
        found = self._status.get("conditions")
        conditions = map(_mapping, found) if isinstance(found, list) else iter(())
        return next((one for one in conditions if one.get("type") == kind), {})

    def container(self, state: str) -> Mapping[str, Any] | None:
        """Return the details of the container's state if that is ``state``: ``waiting``, ``running`` or ``terminated``."""
        found = self._status.get("containerStatuses")
        statuses = [_mapping(one) for one in found] if isinstance(found, list) else []
        ours = next((one for one in statuses if one.get("name") == CONTAINER), statuses[0] if statuses else {})
        value = _mapping(ours.get("state")).get(state)
        return _mapping(value) if isinstance(value, Mapping) else None


def state_of(pod: Pod) -> PodState:
    """Return the state of a pod that exists."""
    if pod.phase == "Failed" or pod.container("terminated") is not None:
        return _ended(pod)
    if pod.phase == "Succeeded":
        return PodState(phase=PodPhase.DONE, message="has ended")
    if pod.is_deleted:
        reason, text = _why_deleted(pod)
        return PodState(phase=PodPhase.ENDING, message=text, reason=reason)
    if pod.container("running") is not None:
        return PodState(phase=PodPhase.RUNNING)
    if pod.node:
        return _starting(pod)
    return _unscheduled(pod)


def failure_of(reason: str, message: str) -> tuple[Reason, str]:
    """Return distflow's reason, and the end of a sentence about the pod, for Kubernetes' reason of a failed pod."""
    ours, text = FAILURES.get(reason, (Reason.START_ERROR, f"failed ({plain(reason)[:60]})" if reason else "failed"))
    return ours, f"{text}: {plain(message)[:_LONGEST]}" if message else text


def vanished(last: PodState | None, events: Sequence[Mapping[str, Any]]) -> tuple[Reason, str]:
    """Return why a pod no longer exists, and the end of a sentence about it.

    ``last``: its last known state; ``events``: the events of the namespace about it.
    """
    if last is not None and last.reason is not None:
        return last.reason, last.message
    for event in reversed(events):
        if (word := _text(event.get("reason"))) in FAILURES:
            return failure_of(word, "")
    return Reason.CANCELED, "was deleted, for example with `kubectl delete`"


def _ended(pod: Pod) -> PodState:
    found = pod.container("terminated") or {}
    word, code = _text(found.get("reason")), found.get("exitCode")
    disruption, why = _why_deleted(pod)
    if pod.reason in FAILURES:
        reason, text = failure_of(pod.reason, pod.message)
        return PodState(phase=PodPhase.FAILED, message=text, reason=reason)
    if disruption is not None or (pod.is_deleted and word != "OOMKilled"):
        return PodState(phase=PodPhase.ENDING, message=why, reason=disruption)
    if not found:
        reason, text = failure_of(pod.reason, pod.message)
        return PodState(phase=PodPhase.FAILED, message=text, reason=reason)
    if code == 0 and word in ("Completed", ""):
        return PodState(phase=PodPhase.DONE, message="has ended")
    reason, text = TERMINATIONS.get(word, TERMINATIONS["Error"])
    detail = plain(_text(found.get("message")))[:_LONGEST]
    if reason is Reason.START_ERROR and _NO_PROGRAM.search(detail):
        text = f"could not be started: the image `{pod.image}` does not have the pool's `python`: {detail}"
    elif reason is not Reason.OOM_KILLED:
        text += f" with exit code {code}" if isinstance(code, int) else ""
        text += f": {detail}" if detail else ""
    return PodState(phase=PodPhase.FAILED, message=text, reason=reason, is_final=reason is Reason.START_ERROR)


def _why_deleted(pod: Pod) -> tuple[Reason | None, str]:
    """Return why a pod is deleted or disrupted, and the end of a sentence about the pod.

    The reason is ``None`` if the conditions of the pod have none.
    """
    target = pod.condition("DisruptionTarget")
    if target.get("status") == "True":
        word = _text(target.get("reason"))
        return FAILURES.get(word, (Reason.PREEMPTED, f"was preempted or evicted ({plain(word)[:60]})"))
    # If a node no longer responds, the node controller sets `Ready` of its pods to False, while their containers seem to run.
    if pod.is_deleted and pod.condition("Ready").get("status") == "False" and pod.container("running") is not None:
        return FAILURES["NodeNotReady"]
    return None, "is being deleted"


def _starting(pod: Pod) -> PodState:
    found = pod.container("waiting") or {}
    word, detail = _text(found.get("reason")), plain(_text(found.get("message")))[:_LONGEST]
    reason, text, is_final = WAITING.get(word, WAITING["ContainerCreating"])
    if reason is None:
        return PodState(phase=PodPhase.STARTING, message=f"{text} on {pod.node}")
    if reason is Reason.START_ERROR and _NO_PROGRAM.search(detail):
        text = f"its image `{pod.image}` does not have the pool's `python`"
    elif reason is Reason.IMAGE_PULL:
        text += f": `{pod.image}`"
        is_final = is_final or _PERMANENT_PULL_ERROR.search(detail) is not None
    message = f"cannot start: {text} ({word}: {detail})" if detail else f"cannot start: {text} ({word})"
    return PodState(phase=PodPhase.FAILED if is_final else PodPhase.STARTING, message=message, reason=reason, is_final=is_final)


def _unscheduled(pod: Pod) -> PodState:
    found = pod.condition("PodScheduled")
    word, detail = _text(found.get("reason")), plain(_text(found.get("message")))[:_LONGEST]
    if word == "SchedulingGated":
        return PodState(phase=PodPhase.QUEUED, message="waits for its queue to admit it (SchedulingGated)")
    return PodState(phase=PodPhase.QUEUED, message=f"waits for a node: {detail}" if detail else "waits to be scheduled")


def queue_text(states: Mapping[str, PodState]) -> str:
    """Return why the pods of an allocation are not all running; ``states``: pod → state."""
    waiting = {name: one for name, one in states.items() if one.phase is not PodPhase.RUNNING}
    by_message: dict[str, list[str]] = {}
    for name, one in waiting.items():
        by_message.setdefault(one.message, []).append(name)
    if len(by_message) == 1 and len(waiting) == len(states):
        return next(iter(by_message))
    return "; ".join(f"{few(names)}: {message}" for message, names in by_message.items())


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return value[:5000] if isinstance(value, str) else ""


def _time(value: object) -> float | None:
    try:
        return datetime.fromisoformat(_text(value).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None
