"""The container that a task runs in on its node, and warnings about container keys that have no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from distflow.documents.problems import Problem, Severity
from distflow.plan.model import Container, Launch
from distflow.pools.model import Node
from distflow.spec.model import TaskSpec, WorkflowSpec

__all__ = ["container_notices", "container_of", "has_own_tmp"]

_SHARED = ("/dev/shm:/dev/shm", "/proc:/proc", "/sys:/sys")  # noqa: S108  of the node's own, in every container


def container_of(launch: Launch, node: Node, fill: Callable[[str], str]) -> Container | None:
    """Return the container of a task on a node, its strings filled in; ``None`` where it runs without one."""
    if launch.image is None or node.container == "none":
        return None
    mounts = (mount if ":" in mount else f"{mount}:{mount}" for mount in map(fill, launch.mounts))
    return Container(
        runtime=node.container,
        image=fill(launch.image),
        mounts=tuple(mount for mount in mounts if mount not in _SHARED),
        privileged=launch.privileged,
        cpus=launch.resource.cpu if node.enforce_limits else None,
        memory=launch.resource.memory if node.enforce_limits else None,
    )


def has_own_tmp(runtime: str) -> bool:
    """Return whether a container of this runtime has a ``/tmp`` of its own; Apptainer's is the node's."""
    return runtime not in ("none", "apptainer")


def container_notices(spec: WorkflowSpec, nodes: Sequence[Node]) -> tuple[Problem, ...]:
    """Return warnings for what has no meaning without containers; each kind once, at the first task that asks for it."""
    if all(node.container != "none" for node in nodes):
        return ()
    found: dict[str, Problem] = {}
    for group in spec.groups:
        for task in group.tasks:
            for kind, problem in _of_task(task):
                found.setdefault(kind, problem)
    return tuple(found.values())


def _of_task(task: TaskSpec) -> Iterator[tuple[str, Problem]]:
    if task.image is not None:
        message = "`image` is ignored: tasks run on the node's own python"
        hint = "install there what the image holds, or give the pool a `container` runtime (docker, podman, apptainer)"
        yield "image", Problem(where=task.image.mark_at(0), severity=Severity.WARNING, message=message, hint=hint)
    moved = next((text for text in task.mounts if _moves(text.value)), None)
    if moved is not None:
        source, _, target = moved.value.partition(":")
        message = f"`volumeMounts` is ignored: nothing is mounted at {target}"
        hint = f"without containers a task sees the node's own directories under their own paths: this one as {source}"
        yield "mounts", Problem(where=moved.mark_at(0), severity=Severity.WARNING, message=message, hint=hint)
    if task.privileged:
        message = "`privileged` is ignored: tasks run with the rights of the user on the node"
        yield "privileged", Problem(where=task.mark, severity=Severity.WARNING, message=message)


def _moves(mount: str) -> bool:
    source, colon, target = mount.partition(":")
    return bool(colon) and source != target
