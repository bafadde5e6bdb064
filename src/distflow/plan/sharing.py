"""Files that two tasks share without a word: paths in ``/tmp`` that both name, when one node runs both without containers.

In OSMO each task has its own ``/tmp``. Here ``/tmp`` is the node's, so a task may read another task's files, also when that
ended long ago.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence

from distflow.documents.problems import Mark, Problem, Severity
from distflow.plan.containers import has_own_tmp
from distflow.pools.model import Node
from distflow.spec.bundles import Bundle
from distflow.spec.model import TaskSpec, Text, WorkflowSpec

__all__ = ["sharing_notices"]

# Not a path with a variable or a pattern in it, which each task may fill differently: /tmp/$NAME, /tmp/x-{i}, /tmp/*.txt
_PATH = re.compile(r"(?<![\w./})~*\]-])/(?:tmp|var/tmp|dev/shm)/[\w./+@-]*[\w+@-](?![\w./+@-]*[$%{*?[<])")
_SHOWN = 3


def sharing_notices(
    spec: WorkflowSpec, bundles: Mapping[str, Bundle], placement: Mapping[str, str], nodes: Sequence[Node]
) -> tuple[Problem, ...]:
    """Return a warning for each set of tasks that name the same paths, when ``placement`` puts them on one node."""
    runtimes = {node.name: node.container for node in nodes}
    users: dict[tuple[str, str], dict[str, Mark]] = {}
    for task in (task for group in spec.groups for task in group.tasks):
        node = placement.get(task.name)
        if node is None or (task.image is not None and has_own_tmp(runtimes[node])):
            continue
        for path, mark in _paths(task, bundles):
            users.setdefault((node, path), {}).setdefault(task.name, mark)
    shared: dict[tuple[str, ...], tuple[Mark, list[str]]] = {}
    for (_, path), marks in users.items():
        if len(marks) > 1:
            shared.setdefault(tuple(marks), (list(marks.values())[-1], []))[1].append(path)
    return tuple(_notice(tasks, mark, paths) for tasks, (mark, paths) in shared.items())


def _notice(tasks: tuple[str, ...], mark: Mark, paths: list[str]) -> Problem:
    first, more = tasks[:_SHOWN], len(tasks) - _SHOWN
    who = ", ".join(f"`{task}`" for task in first) + (f" and {more} more tasks" if more > 0 else "")
    what = ", ".join(f"`{path}`" for path in sorted(set(paths))[:_SHOWN])
    return Problem(
        where=mark,
        severity=Severity.WARNING,
        message=f"{who} share {what} when they run on one node; in OSMO each task has its own",
        hint="use a relative path such as `tmp/x`, which is the task's own; hand files on with {{output}} and `inputs`",
    )


def _paths(task: TaskSpec, bundles: Mapping[str, Bundle]) -> Iterator[tuple[str, Mark]]:
    """Yield the paths that a task names and that are not its own, and where it does so."""
    own = [file.path.value for file in task.files] + [one.path.value for one in task.checkpoints]
    own += [one.directory.value for one in task.credentials if one.directory is not None]
    # What is mounted is shared on purpose.
    own += [part for mount in task.mounts for part in mount.value.split(":")]
    places = [posixpath.normpath(path) for path in own]
    texts = [*task.command, *task.args, *task.environment.values()]
    for file in task.files:
        sent = bundles[file.local_path or file.path.value].text or "" if file.contents is None else ""
        texts.append(file.contents or Text(sent, file.path.mark))
    for text in texts:
        for match in _PATH.finditer(text.value):
            path = posixpath.normpath(match.group())
            if not any(path == place or path.startswith(f"{place}/") for place in places) and "XXX" not in path:
                yield path, text.mark_at(match.start())
