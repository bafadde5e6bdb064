"""Replace ``$(NAME)`` in ``command``, ``args`` and ``environment`` by the value of that variable, as Kubernetes does for OSMO.

The variables are in the task's ``environment``. A value in ``environment`` can refer to the variables above it. An unknown name
is not replaced, so a shell can still run a command: ``$(date)``. ``$$(NAME)`` becomes the text ``$(NAME)``. In other places,
Kubernetes replaces ``$$`` by ``$``; distflow does not, because ``$$`` is the process id in a shell script.

Source: ``third_party/forked/golang/expansion`` of Kubernetes 1.30.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType

from distflow.documents.document import Text
from distflow.documents.problems import Problem
from distflow.spec.model import GroupSpec, TaskSpec
from distflow.structs import replace

__all__ = ["expand", "replace_references"]

_REFERENCE = re.compile(r"(\$+)\(([^)]*)\)")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return ``text`` with each ``$(NAME)`` of a known variable replaced by its value."""

    def value(match: re.Match[str]) -> str:
        dollars, name = len(match.group(1)), match.group(2)
        if dollars % 2 == 0:
            return "$" * (dollars // 2) + "(" + expand(name + ")", variables)
        known = variables.get(name)
        return "$" * (dollars // 2) + (f"$({name})" if known is None else known)

    return _REFERENCE.sub(value, text)


def replace_references(
    groups: Sequence[GroupSpec], set_names: Sequence[str]
) -> tuple[tuple[GroupSpec, ...], tuple[Problem, ...]]:
    """Replace references to known variables in the groups.

    Returns the new groups, and a finding for each reference to a secret.

    ``set_names`` are the variables of ``--set-env``. Their values and those of credentials are secrets, which a command never
    contains.
    """
    problems: list[Problem] = []
    found = []
    for group in groups:
        tasks = []
        for task in group.tasks:
            secret = {*set_names, *(name for one in task.credentials for name in one.variables)}
            if not task.replica:
                problems += _secret_references(task, secret)
            tasks.append(_expanded(task, secret))
        found.append(replace(group, tasks=tuple(tasks)))
    return tuple(found), tuple(problems)


def _expanded(task: TaskSpec, secret: Container[str]) -> TaskSpec:
    variables: dict[str, str] = {}
    environment: dict[str, Text] = {}
    for name, text in task.environment.items():
        environment[name] = _text(text, variables)
        if name not in secret:
            variables[name] = environment[name].value
    return replace(
        task,
        command=tuple(_text(text, variables) for text in task.command),
        args=tuple(_text(text, variables) for text in task.args),
        environment=MappingProxyType(environment),
    )


def _text(text: Text, variables: Mapping[str, str]) -> Text:
    value = expand(text.value, variables)
    # A value of several lines moves the lines below it, so only the beginning of the text has a known line.
    keeps_lines = value.count("\n") == text.value.count("\n")
    return text if value == text.value else Text(value, text.mark, text.lines if keeps_lines else ())


def _secret_references(task: TaskSpec, secret: Container[str]) -> list[Problem]:
    return [
        Problem(
            where=text.mark_at(match.start()),
            message=f"`$({match.group(2)})` cannot be replaced: the value of `{match.group(2)}` is a secret",
            hint=f"let a shell in the command read it on the node: `sh -c '... ${match.group(2)} ...'`",
        )
        for text in (*task.command, *task.args, *task.environment.values())
        for match in _REFERENCE.finditer(text.value)
        if len(match.group(1)) % 2 and match.group(2) in secret
    ]
