"""Check the smaller worlds that an elastic group may run as. Each must satisfy the same rules as the whole world.

A smaller world consists of the first tasks of the whole world. They keep their offsets and sizes, so rank 0 stays in its task.
Other tasks must not use the address of a task that may be left out, and other groups must not use its output. Numbers in
the spec that depend on the number of tasks must be tokens, or be omitted.

Modeled on torchrun's ``--nnodes MIN:MAX`` (https://docs.pytorch.org/docs/stable/elastic/run.html), with sizes known in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

from distflow.documents.document import Text
from distflow.documents.problems import Problem, errors_of
from distflow.layout.ranks import TaskRanks, WorldLayout
from distflow.spec.model import Elastic, GroupSpec, TaskSpec, WorkflowSpec
from distflow.spec.tokens import find_tokens
from distflow.structs import replace

__all__ = ["remaining_tasks", "smaller_worlds"]

_MOST_SIZES = 32
"""The maximum number of smaller worlds of a group: each one needs a separate plan."""

Check = Callable[[GroupSpec], tuple[WorldLayout | None, list[Problem]]]


def smaller_worlds(
    spec: WorkflowSpec, group: GroupSpec, world: WorldLayout | None, check: Check
) -> tuple[tuple[WorldLayout, ...], list[Problem]]:
    """Return the smaller worlds that a group may run as, the largest first, and the problems with them.

    ``world`` is the whole world, and ``check`` is the function that checked it.
    """
    elastic = group.elastic
    if elastic is None:
        return (), []
    problems = _limit_problems(elastic, world)
    if problems or world is None:
        return (), problems
    uncertain = {item.task for item in world.tasks[elastic.least :]}
    problems = [*_host_problems(group, uncertain), *_output_problems(spec, group, uncertain, world.tasks[: elastic.least])]
    found: list[WorldLayout] = []
    for size in reversed(range(elastic.least, len(world.tasks))):
        smaller = replace(group, tasks=remaining_tasks(group, world, size))
        one, wrong = check(smaller)
        if errors_of(wrong):
            first = errors_of(wrong)[0]
            message = (
                f"`elastic` allows {group.name} to run with {size} of its {len(world.tasks)} tasks that have ranks, but that "
                "is not possible: "
            )
            hint = "replace values that depend on the number of tasks by tokens such as {{world_size}}, or remove them"
            problems.append(Problem(where=first.where, message=message + first.message, hint=hint))
            break
        if one is not None:
            found.append(one)
    return tuple(found), problems


def remaining_tasks(group: GroupSpec, world: WorldLayout, size: int) -> tuple[TaskSpec, ...]:
    """Return the first ``size`` tasks of a group's world, and all helpers, which hold no ranks."""
    left_out = {item.task for item in world.tasks[size:]}
    return tuple(task for task in group.tasks if task.name not in left_out)


def _limit_problems(elastic: Elastic, world: WorldLayout | None) -> list[Problem]:
    if world is None:
        message = "`elastic` needs ranks, but the spec does not define how many ranks this group has"
        hint = "add `ranks: {size: N}` to its tasks"
    elif not 1 <= elastic.least < len(world.tasks):
        most = len(world.tasks) - 1
        message = f"`elastic.min` is {elastic.least}, but it must be at least 1 and less than the number of tasks with ranks"
        message += f", which is {len(world.tasks)}"
        hint = f"write a number from 1 to {most}" if most > 1 else "write 1" if most else "remove `elastic`"
    elif len(world.tasks) - elastic.least > _MOST_SIZES:
        message = f"`elastic` allows {len(world.tasks) - elastic.least} smaller worlds, but the maximum is {_MOST_SIZES}"
        hint = f"write `min: {len(world.tasks) - _MOST_SIZES}` or more"
    else:
        return []
    return [Problem(where=elastic.mark, message=message, hint=hint)]


def _host_problems(group: GroupSpec, uncertain: Container[str]) -> Iterator[Problem]:
    """Yield a problem for each task that uses the address of another task that may be left out."""
    for task in group.tasks:
        hosts = (
            (text, (token.argument or "").strip())
            for text in _texts(task)
            for token in find_tokens(text.value)
            if token.name == "host"
        )
        found = next(((text, host) for text, host in hosts if host in uncertain and host != task.name), None)
        if found is not None:
            message = f"{task.name}: {{{{host:{found[1]}}}}} names a task that `elastic` may leave out"
            hint = "use the address of the master: {{master_addr}}"
            yield Problem(where=found[0].mark, message=message, hint=hint)


def _output_problems(
    spec: WorkflowSpec, group: GroupSpec, uncertain: Container[str], sure: Sequence[TaskRanks]
) -> Iterator[Problem]:
    """Yield a problem for each output that another group uses and that may never exist."""
    for other in spec.groups:
        for task in other.tasks if other is not group else ():
            for one in task.inputs:
                if one.task in uncertain:
                    message = f"{task.name} uses the output of {one.task}, which `elastic` may leave out"
                    hint = f"use the output of {sure[0].task}"
                    hint += f", or of another of the first {len(sure)} tasks" if len(sure) > 1 else ""
                    yield Problem(where=task.mark, message=message, hint=hint)


def _texts(task: TaskSpec) -> Iterator[Text]:
    yield from task.command
    yield from task.args
    yield from task.environment.values()
    yield from (file.contents for file in task.files if file.contents is not None)
