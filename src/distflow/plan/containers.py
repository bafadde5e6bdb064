"""The container or Python environment of a task on its node, and warnings about keys without effect and shared paths.

In OSMO each task has its own ``/tmp``. Without containers ``/tmp`` belongs to the node, so a task can read the files of another
task, even of one that ended long ago. distflow therefore warns if two tasks of one node use the same temporary path.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from distflow.documents.problems import Mark, Problem, Severity
from distflow.documents.quantities import count_text
from distflow.plan.model import Container, GroupPlan, Launch
from distflow.pools.model import Node
from distflow.spec.files import Bundle
from distflow.spec.model import TaskSpec, Text, WorkflowSpec

__all__ = ["container_notices", "container_of", "sharing_notices", "venv_notices", "venv_of"]


_DEFAULT_MOUNTS = ("/dev/shm:/dev/shm", "/proc:/proc", "/sys:/sys")  # noqa: S108  each container already has these directories


def container_of(launch: Launch, node: Node, fill: Callable[[str], str]) -> Container | None:
    """Return the container that distflow starts for a task on a node, or ``None`` for no container.

    ``fill`` replaces the placeholders in its strings.

    If the node's ``container`` is ``engine``, Slurm or Kubernetes starts the task in its image, and distflow does not.
    """
    if launch.image is None or node.container in ("none", "engine"):
        return None
    mounts = (mount if ":" in mount else f"{mount}:{mount}" for mount in map(fill, launch.mounts))
    return Container(
        runtime=node.container,
        image=fill(launch.image),
        mounts=tuple(mount for mount in mounts if mount not in _DEFAULT_MOUNTS),
        privileged=launch.privileged,
        cpus=launch.resource.cpu if node.enforce_limits else None,
        memory=launch.resource.memory if node.enforce_limits else None,
    )


def venv_of(group: GroupPlan, launch: Launch, node: Node) -> str | None:
    """Return the digest of a task's Python environment on a node; ``None`` if it has none or runs in a container."""
    if group.venv is None or (launch.image is not None and node.container != "none"):
        return None
    return group.venv.digest(node.environment)


def _has_own_tmp(runtime: str) -> bool:
    """Return whether a container of this runtime has its own ``/tmp`` (with ``auto``: usually). Apptainer uses the node's."""
    return runtime not in ("none", "apptainer")


def container_notices(spec: WorkflowSpec, nodes: Sequence[Node]) -> tuple[Problem, ...]:
    """Return a warning for each key of the spec that needs a container, if a node runs tasks without containers.

    The warning is at the first task that has the key.
    """
    if all(node.container != "none" for node in nodes):
        return ()
    found: dict[str, Problem] = {}
    for group in spec.groups:
        for task in group.tasks:
            for kind, problem in _ignored_keys(task):
                found.setdefault(kind, problem)
    return tuple(found.values())


def _ignored_keys(task: TaskSpec) -> Iterator[tuple[str, Problem]]:
    if task.image is not None:
        message = "`image` is ignored on nodes with `container: none`: tasks run directly on the node"
        hint = "install the software of the image on the nodes, or set `container` to auto, docker, podman or apptainer"
        yield "image", Problem(where=task.image.mark_at(0), severity=Severity.WARNING, message=message, hint=hint)
    moved = next((text for text in task.mounts if _changes_path(text.value)), None)
    if moved is not None:
        source, _, target = moved.value.partition(":")
        message = f"`volumeMounts` is ignored on nodes with `container: none`: nothing is mounted at `{target}`"
        hint = f"use the path `{source}`: without containers, a task sees the directories of the node"
        yield "mounts", Problem(where=moved.mark_at(0), severity=Severity.WARNING, message=message, hint=hint)
    if task.privileged:
        message = "`privileged` is ignored on nodes with `container: none`: tasks run with the user's rights"
        yield "privileged", Problem(where=task.mark, severity=Severity.WARNING, message=message)


def venv_notices(spec: WorkflowSpec, nodes: Sequence[Node]) -> tuple[Problem, ...]:
    """Return a warning if the spec has a Python environment and a task that may run in a container.

    In a container, a task does not use the environment.
    """
    if spec.venv is None or all(node.container == "none" for node in nodes):
        return ()
    effect = "runs in a container and does not use the packages of `venv`"
    if any(node.container == "none" for node in nodes):
        effect = "does not use the packages of `venv` on nodes where it runs in a container"
    images = [(task.name, task.image) for group in spec.groups for task in group.tasks if task.image is not None]
    return tuple(
        Problem(
            where=image.mark_at(0),
            severity=Severity.WARNING,
            message=f"`{name}` {effect}",
            hint="install them in the image, or remove `image`",
        )
        for name, image in images[:1]
    )


def _changes_path(mount: str) -> bool:
    """Return whether the path in the container differs from the path on the node."""
    source, colon, target = mount.partition(":")
    return bool(colon) and source != target


# -- paths that tasks share -------------------------------------------------------------------------------------------

# Exclude paths with a variable or a pattern, which may differ between tasks: /tmp/$NAME, /tmp/x-{i}, /tmp/*.txt
_PATH = re.compile(r"(?<![\w./})~*\]-])/(?:tmp|var/tmp|dev/shm)/[\w./+@-]*[\w+@-](?![\w./+@-]*[$%{*?[<])")
_SHOWN = 3


def sharing_notices(
    spec: WorkflowSpec, bundles: Mapping[str, Bundle], placement: Mapping[str, str], nodes: Sequence[Node]
) -> tuple[Problem, ...]:
    """Return a warning for each set of tasks that use the same paths, if ``placement`` puts them on one node."""
    runtimes = {node.name: node.container for node in nodes}
    users: dict[tuple[str, str], dict[str, Mark]] = {}
    for task in (task for group in spec.groups for task in group.tasks):
        node = placement.get(task.name)
        if node is None or (task.image is not None and _has_own_tmp(runtimes[node])):
            continue
        for path, mark in _paths(task, bundles):
            users.setdefault((node, path), {}).setdefault(task.name, mark)
    shared: dict[tuple[str, ...], tuple[Mark, list[str]]] = {}
    for (_, path), marks in users.items():
        if len(marks) > 1:
            shared.setdefault(tuple(marks), (list(marks.values())[-1], []))[1].append(path)
    return tuple(_notice(tasks, mark, paths) for tasks, (mark, paths) in shared.items())


def _notice(tasks: tuple[str, ...], mark: Mark, paths: list[str]) -> Problem:
    who, what = _first(tasks, "task"), _first(sorted(set(paths)), "path")
    return Problem(
        where=mark,
        severity=Severity.WARNING,
        message=f"{who} share {what} if they run on one node; in OSMO each task has its own temporary directories",
        hint="use a relative path such as `tmp/x`, which only this task sees; to share files, use {{output}} and `inputs`",
    )


def _first(names: Sequence[str], noun: str) -> str:
    more = len(names) - _SHOWN
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    return f"{shown} and {count_text(more, f'more {noun}')}" if more > 0 else shown


def _paths(task: TaskSpec, bundles: Mapping[str, Bundle]) -> Iterator[tuple[str, Mark]]:
    """Yield the temporary paths that a task uses outside of its own directories, with their positions in the spec."""
    own = [file.path.value for file in task.files] + [one.path.value for one in task.checkpoints]
    own += [one.directory.value for one in task.credentials if one.directory is not None]
    # Mounted directories are shared on purpose.
    own += [part for mount in task.mounts for part in mount.value.split(":")]
    places = [posixpath.normpath(path) for path in own]
    texts = [*task.command, *task.args, *task.environment.values()]
    for file in task.files:
        sent = bundles[file.bundle].text or "" if file.contents is None else ""
        texts.append(file.contents or Text(sent, file.path.mark))
    for text in texts:
        for match in _PATH.finditer(text.value):
            path = posixpath.normpath(match.group())
            # `mktemp` replaces XXX by random characters, so such a path differs between tasks.
            if not any(path == place or path.startswith(f"{place}/") for place in places) and "XXX" not in path:
                yield path, text.mark_at(match.start())
