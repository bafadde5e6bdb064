"""The worlds that an elastic group may run as: its first 2, 3, … tasks, each held to the rules that hold for all of them. Pure.

A smaller world is a beginning of the whole one: the tasks keep their offsets and sizes, and rank 0 stays where it is. What a
spec says of the others, or of how many there are, must therefore be a token, or follow the ranks by itself.

After torchrun's ``--nnodes MIN:MAX`` (https://docs.pytorch.org/docs/stable/elastic/run.html), with sizes that are known before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from distflow.documents.document import Text
from distflow.documents.problems import Problem, errors_of
from distflow.layout.ranks import World
from distflow.layout.strategies import group_strategy
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
    problems = [*_named(group, world, elastic), *_taken(spec, group, world, elastic)]
    found: list[World] = []
    for size in reversed(range(elastic.least, len(world.tasks))):
        smaller = replace(group, tasks=staying(group, world, size))
        one, wrong = check(smaller)
        wrong += list(group_strategy(smaller, one)[1])
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


def _named(group: GroupSpec, world: World, elastic: Elastic) -> list[Problem]:
    """Return a problem for each task that needs the address of one that may be left out."""
    uncertain = {item.task for item in world.tasks[elastic.least :]}
    problems = []
    for task in group.tasks:
        named = [(text, token.argument) for text in _texts(task) for token in find_tokens(text.value) if token.name == "host"]
        for text, other in named:
            if other is not None and other.strip() in uncertain - {task.name}:
                message = f"{task.name}: {{{{host:{other.strip()}}}}} names a task that `elastic` may leave out"
                hint = "a world that may be smaller finds its members through the master: {{master_addr}}"
                problems.append(Problem(where=text.mark, message=message, hint=hint))
                break
    return problems


def _taken(spec: WorkflowSpec, group: GroupSpec, world: World, elastic: Elastic) -> Iterator[Problem]:
    """Yield a problem for each output that another group takes and that may never be."""
    uncertain = {item.task for item in world.tasks[elastic.least :]}
    for other in spec.groups:
        for task in other.tasks if other is not group else ():
            for one in task.inputs:
                if one.task in uncertain:
                    message = f"{task.name} takes what {one.task} writes, which `elastic` may leave out"
                    hint = f"take it from {world.master}"
                    hint += f", or from another of the first {elastic.least} tasks" if elastic.least > 1 else ""
                    yield Problem(where=task.mark, message=message, hint=hint)


def _texts(task: TaskSpec) -> Iterator[Text]:
    yield from task.command
    yield from task.args
    yield from task.environment.values()
    yield from (file.contents for file in task.files if file.contents is not None)
