"""The worlds that an elastic group may run as: its first 2, 3, … tasks, each held to the rules that hold for all of them. Pure.

A smaller world is a beginning of the whole one: the tasks keep their offsets and sizes, and rank 0 stays where it is. What a
spec says of the others, or of how many there are, must therefore be a token, or follow the ranks by itself.

After torchrun's ``--nnodes MIN:MAX`` (https://docs.pytorch.org/docs/stable/elastic/run.html), with sizes that are known before.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace

from distflow.documents.document import Text
from distflow.documents.problems import Problem, errors_of
from distflow.layout.ranks import TaskRanks, World
from distflow.spec.model import Elastic, GroupSpec, TaskSpec, WorkflowSpec
from distflow.spec.tokens import find_tokens

__all__ = ["smaller_worlds", "staying"]

_MOST_SIZES = 32
"""Each size is a plan of its own."""

Check = Callable[[GroupSpec], tuple[World | None, list[Problem]]]


def smaller_worlds(
    spec: WorkflowSpec, group: GroupSpec, world: World | None, check: Check
) -> tuple[tuple[World, ...], list[Problem]]:
    """Return the worlds that a group may run as beside its whole one, the largest first, and what is wrong with them.

    ``world`` is the whole one, and ``check`` what it was found right by.
    """
    elastic = group.elastic
    if elastic is None:
        return (), []
    problems = _bounds(elastic, world)
    if problems or world is None:
        return (), problems
    uncertain = {item.task for item in world.tasks[elastic.least :]}
    problems = [*_named(group, uncertain), *_taken(spec, group, uncertain, world.tasks[: elastic.least])]
    found: list[World] = []
    for size in reversed(range(elastic.least, len(world.tasks))):
        smaller = replace(group, tasks=staying(group, world, size))
        one, wrong = check(smaller)
        if errors_of(wrong):
            first = errors_of(wrong)[0]
            message = f"with {size} of its {len(world.tasks)} tasks, as `elastic` allows, {group.name} has no right ranks: "
            hint = "what follows from the number of tasks must be left to distflow, or be a token such as {{world_size}}"
            problems.append(Problem(where=first.where, message=message + first.message, hint=hint))
            break
        if one is not None:
            found.append(one)
    return tuple(found), problems


def staying(group: GroupSpec, world: World, size: int) -> tuple[TaskSpec, ...]:
    """Return the tasks of a group that runs with ``size`` of its world: those, and the helpers, which hold no ranks."""
    left_out = {item.task for item in world.tasks[size:]}
    return tuple(task for task in group.tasks if task.name not in left_out)


def _bounds(elastic: Elastic, world: World | None) -> list[Problem]:
    if world is None:
        message, hint = "`elastic` needs a world, and no task of the group has ranks", "give its tasks `ranks: {size: N}`"
    elif not 1 <= elastic.least < len(world.tasks):
        message = f"`elastic.min` is {elastic.least}, and the world has {len(world.tasks)} task" + "s" * (len(world.tasks) > 1)
        hint = f"write a number from 1 to {len(world.tasks) - 1}" if len(world.tasks) > 1 else "remove `elastic`"
    elif len(world.tasks) - elastic.least > _MOST_SIZES:
        message = f"from {elastic.least} to {len(world.tasks)} tasks are more than {_MOST_SIZES} sizes below the whole"
        hint = f"write `min: {len(world.tasks) - _MOST_SIZES}` or more"
    else:
        return []
    return [Problem(where=elastic.mark, message=message, hint=hint)]


def _named(group: GroupSpec, uncertain: Container[str]) -> Iterator[Problem]:
    """Yield a problem for each task that needs the address of another one that may be left out."""
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
            hint = "a world that may be smaller finds its members through the master: {{master_addr}}"
            yield Problem(where=found[0].mark, message=message, hint=hint)


def _taken(spec: WorkflowSpec, group: GroupSpec, uncertain: Container[str], sure: Sequence[TaskRanks]) -> Iterator[Problem]:
    """Yield a problem for each output that another group takes and that may never be."""
    for other in spec.groups:
        for task in other.tasks if other is not group else ():
            for one in task.inputs:
                if one.task in uncertain:
                    message = f"{task.name} takes what {one.task} writes, which `elastic` may leave out"
                    hint = f"take it from {sure[0].task}"
                    hint += f", or from another of the first {len(sure)} tasks" if len(sure) > 1 else ""
                    yield Problem(where=task.mark, message=message, hint=hint)


def _texts(task: TaskSpec) -> Iterator[Text]:
    yield from task.command
    yield from task.args
    yield from task.environment.values()
    yield from (file.contents for file in task.files if file.contents is not None)
