"""Check that launchers and frameworks can start the commands of tasks, and that checkpoints fit the restarts of a group."""

from __future__ import annotations

import re
from collections.abc import Sequence
from posixpath import normpath

from msgspec import Struct

from distflow.documents.problems import Problem, Severity
from distflow.layout.checks.members import and_list
from distflow.layout.claims.task_claims import TaskClaims
from distflow.layout.ranks import WorldLayout
from distflow.spec.model import GroupSpec, TaskSpec

__all__ = ["PythonCommand", "launcher_problems", "python_command", "restart_problems", "uneven_problems"]


_NEEDS_PYTHON = ("deepspeed", "accelerate")
"""Frameworks whose own launcher starts a Python script. For pytorch, the field ``launcher`` of the spec does that."""

_RUNS_COMMAND = ("tensorflow", "jax", "custom")
"""Frameworks that start nothing themselves: each task runs its command once."""

_NEEDS_EVEN = ("accelerate",)
_INTERPRETER = re.compile(r"(?:.*/)?(?:python|pypy)[0-9.]*")


class PythonCommand(Struct, frozen=True, kw_only=True):
    """The parts of a command such as ``python3 -m package.module --lr 0.1``."""

    interpreter: str = "python3"
    target: str
    """The path of the script, or the name of the module."""
    is_module: bool = False
    arguments: tuple[str, ...] = ()


def python_command(words: Sequence[str]) -> PythonCommand | str:
    """Return the parts of a command that runs Python, or the reason why a launcher cannot start it."""
    program = words[0] if words else ""
    if program.endswith(".py"):
        return PythonCommand(target=program, arguments=tuple(words[1:]))
    if not _INTERPRETER.fullmatch(program):
        return f"`{program}` is not a Python interpreter"
    rest = list(words[1:])
    while rest and rest[0] == "-u":  # ranks do not need it, because distflow sets PYTHONUNBUFFERED
        rest.pop(0)
    if not rest:
        return "the command has no script"
    if rest[0] == "-c":
        return "`-c` runs code that is not in a file"
    if rest[0] == "-m" and len(rest) > 1:
        return PythonCommand(interpreter=program, target=rest[1], is_module=True, arguments=tuple(rest[2:]))
    if rest == ["-m"]:
        return "`-m` has no module"
    if rest[0].startswith("-"):
        return f"the option `{rest[0]}` of the interpreter would not be passed to the ranks"
    return PythonCommand(interpreter=program, target=rest[0], arguments=tuple(rest[1:]))


def launcher_problems(group: GroupSpec, claims: Sequence[TaskClaims]) -> list[Problem]:
    """Return the problems with the start of a group's ranks.

    They are about a launcher next to a framework, or else the first task that cannot be started, or else restarts of ranks.
    """
    problems = _launcher_and_framework(group)
    for item in claims:
        starter = _starter(group, item.task)
        if not problems and starter is not None:
            problems += _started_twice(item, starter) or _no_python(item.task, starter)
    return problems or _restarts(group)


def uneven_problems(group: GroupSpec, world: WorldLayout) -> list[Problem]:
    """Return a problem if a framework that divides the ranks evenly gets tasks of different sizes."""
    if group.framework is None or group.framework.value not in _NEEDS_EVEN or len({item.size for item in world.tasks}) == 1:
        return []
    sizes = and_list(f"{item.task} has {item.size}" for item in world.tasks)
    message = f"`framework: {group.framework.value}` needs the same number of ranks in all tasks, but {sizes}"
    hint = "give all tasks the same size, or replace `framework` with `launcher: torchrun`"
    return [Problem(where=group.framework.mark, message=message, hint=hint)]


def _launcher_and_framework(group: GroupSpec) -> list[Problem]:
    framework = group.framework
    if framework is None or framework.value == "pytorch":
        return []
    for task in group.tasks:
        if task.launcher.starts_ranks:
            message = f"`launcher: {task.launcher.kind}` cannot be combined with `framework: {framework.value}`"
            hint = "remove one of them"
            if framework.value in _RUNS_COMMAND:
                hint += f"; without `launcher`, `framework: {framework.value}` runs the command once for each task, unchanged"
            return [Problem(where=task.launcher.mark, message=message, hint=hint)]
    return []


def _starter(group: GroupSpec, task: TaskSpec) -> str | None:
    """Return the key that starts the task's command for each rank, as written in the spec; ``None`` if there is none."""
    if task.launcher.starts_ranks:
        return f"launcher: {task.launcher.kind}"
    name = group.framework.value if group.framework is not None else ""
    return f"framework: {name}" if name in _NEEDS_PYTHON else None


def _started_twice(item: TaskClaims, starter: str) -> list[Problem]:
    command = next((one for one in item.invocations if one.launcher == "torchrun"), None)
    words = item.task.command
    program = words[0].value.rpartition("/")[2] if words else ""
    if command is None and program not in _NEEDS_PYTHON:
        return []
    what = "torchrun" if command is not None else program
    message = f"{item.name}: the command runs {what}, but `{starter}` also starts the ranks"
    hint = f"write only the script, such as `command: [python3, train.py]`, or remove `{starter}`"
    return [Problem(where=command.where if command else words[0].mark, message=message, hint=hint)]


def _no_python(task: TaskSpec, starter: str) -> list[Problem]:
    words = (*task.command, *task.args)
    found = python_command([word.value for word in words])
    if isinstance(found, PythonCommand) or not words:  # a command that cannot be read has its own problem
        return []
    message = f"{task.name}: `{starter}` needs a command that runs a Python script, but {found}"
    hint = "write `command: [python3, train.py, …]`, or a module: `[python3, -m, package.train]`"
    return [Problem(where=words[0].mark, message=message, hint=hint)]


def _restarts(group: GroupSpec) -> list[Problem]:
    """Return a problem if a launcher restarts the ranks of a group of several tasks."""
    for task in group.tasks if len(group.tasks) > 1 else ():
        if task.launcher.kind == "spawn" and task.launcher.max_restarts:
            message = "`max_restarts` of `launcher: spawn` needs a group of one task, and this group has several"
            hint = "remove `max_restarts`, and use `exitActions` and `retry`, which restart the whole gang"
            return [Problem(where=task.launcher.mark, message=message, hint=hint)]
        if task.launcher.kind == "torchrun" and task.launcher.max_restarts:
            message = "with `max_restarts`, torchrun numbers the nodes itself, so any task may get rank 0"
            hint = "to keep the ranks of the spec, remove `max_restarts`, and use `exitActions` and `retry`"
            return [Problem(where=task.launcher.mark, severity=Severity.WARNING, message=message, hint=hint)]
    return []


# -- checkpoints and restarts -----------------------------------------------------------------------------------------


def restart_problems(group: GroupSpec, world: WorldLayout | None) -> list[Problem]:
    """Return warnings about a ``shared`` directory that is never restored, and checkpoints of only some tasks of a world."""
    has_exit_codes = any(task.exit_actions.reschedule for task in group.tasks)
    can_restart = group.retry.limit > 0 and has_exit_codes
    declared = {normpath(one.path.value): one for task in group.tasks for one in task.checkpoints}
    shared = next((one for one in declared.values() if one.is_shared), None)
    if shared is not None:
        if can_restart:
            return []
        message = f"`shared` restores nothing: the group `{group.name}` is never retried"
        exit_codes = "define the exit codes that cause a retry, such as `exitActions: {RESCHEDULE: 1-255}`"
        limit = "set `limit` of `retry` to at least 1"
        hint = exit_codes if group.retry.limit > 0 else limit if has_exit_codes else f"{limit}, and {exit_codes}"
        return [Problem(where=shared.path.mark_at(0), severity=Severity.WARNING, message=message, hint=hint)]
    if not can_restart or world is None:
        return []
    ranked = {item.task for item in world.tasks}
    tasks = [task for task in group.tasks if task.name in ranked]
    problems = []
    for path, one in declared.items():
        having = [task.name for task in tasks if any(normpath(own.path.value) == path for own in task.checkpoints)]
        lacking = [task.name for task in tasks if task.name not in having]
        if having and lacking:
            message = f"only {and_list(having)} has" if len(having) == 1 else f"only {and_list(having)} have"
            message += f" a `checkpoint` of `{path}`, so after a restart {and_list(lacking)} "
            message += "begins without these files" if len(lacking) == 1 else "begin without these files"
            hint = (
                f"write `shared: {path}` in the group, so that all tasks have the same files, because ranks must resume at the "
                "same step"
            )
            problems.append(Problem(where=one.path.mark_at(0), severity=Severity.WARNING, message=message, hint=hint))
    return problems
