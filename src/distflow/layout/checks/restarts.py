"""Checkpoints of a world after a restart: warnings about files that only some of its tasks get back. Pure."""

from __future__ import annotations

from posixpath import normpath

from distflow.documents.problems import Problem, Severity
from distflow.layout.checks.members import and_list
from distflow.layout.ranks import World
from distflow.spec.model import GroupSpec

__all__ = ["restart_problems"]


def restart_problems(group: GroupSpec, world: World | None) -> list[Problem]:
    """Return warnings about a ``shared`` directory without effect, and about checkpoints of only some tasks of a world."""
    can_restart = group.retry.limit > 0 and any(task.exit_actions.reschedule for task in group.tasks)
    declared = {normpath(one.path.value): one for task in group.tasks for one in task.checkpoints}
    shared = next((one for one in declared.values() if one.is_shared), None)
    if shared is not None:
        if can_restart:
            return []
        message = f"`shared` has no effect: {group.name} is never tried again"
        hint = "say which ends begin another attempt, such as `exitActions: {RESCHEDULE: 1-255}`"
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
            message = f"`checkpoint` of `{path}` stands in {and_list(having)} only: after a restart, {and_list(lacking)} "
            message += "begins without these files" if len(lacking) == 1 else "begin without these files"
            hint = f"write `shared: {path}` in the group, which gives all tasks the same files; ranks that resume at different "
            hint += "steps train wrongly"
            problems.append(Problem(where=one.path.mark_at(0), severity=Severity.WARNING, message=message, hint=hint))
    return problems
