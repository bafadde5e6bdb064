"""Specs for the tests of the rank layout, built without YAML. Each word is on a separate line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from types import MappingProxyType

from distflow.documents.problems import Mark
from distflow.spec.model import FileSpec, GroupSpec, Ranks, ResourceSpec, TaskSpec, Text, WorkflowSpec

_LINES = count(1)


def text(value: str) -> Text:
    """Return a text whose line numbers continue after those of the previous text."""
    lines = tuple(Mark("spec.yaml", next(_LINES)) for _ in range(value.count("\n") + 1))
    return Text(value, lines[0], lines)


def task(
    name: str,
    *words: str,
    lead: bool = False,
    files: dict[str, str] | None = None,
    environment: dict[str, str] | None = None,
    ranks: Ranks | None = None,
) -> TaskSpec:
    """Return a task that runs ``words``."""
    return TaskSpec(
        name=name,
        lead=lead,
        command=tuple(text(word) for word in words),
        files=tuple(FileSpec(path=text(path), contents=text(body)) for path, body in (files or {}).items()),
        environment=MappingProxyType({key: text(value) for key, value in (environment or {}).items()}),
        ranks=ranks,
        mark=Mark("spec.yaml", next(_LINES)),
    )


def spec(tasks: Sequence[TaskSpec], gpus: int | None = None) -> WorkflowSpec:
    """Return a workflow with one group."""
    return WorkflowSpec(
        name="w",
        groups=(GroupSpec(name="g", tasks=tuple(tasks)),),
        resources={"default": ResourceSpec(gpu=gpus)},
    )


def flags(offset: object, size: object, world_size: object) -> tuple[str, ...]:
    """Return the words of a program with rank flags."""
    words = f"python3 train.py --offset {offset} --size {size} --world_size {world_size}"
    return tuple(words.split())
