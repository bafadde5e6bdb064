"""``launcher``, ``framework``, ``strategy`` and ``elastic``: what starts the ranks of a task, and what they do together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from distflow.documents.document import Text, View
from distflow.documents.quantities import parse_duration
from distflow.spec.model import Elastic, Launcher, Ranks, StrategyBlock, TaskSpec

__all__ = ["parse_elastic", "parse_framework", "parse_launcher", "parse_strategy_block", "with_launchers"]

_WITHOUT_RANKS = ("custom",)
"""Frameworks that say nothing of how many processes a task starts."""


def parse_framework(group: View) -> Text | None:
    """Return the group's framework."""
    return group.text("framework")


def parse_strategy_block(group: View) -> StrategyBlock | None:
    """Return the group's strategy as it is written, with the place of each of its keys."""
    path, document = (*group.path, "strategy"), group.document
    value = document.value_at(path)
    if not isinstance(value, dict):
        return None
    below = (place for place in document.places if place[: len(path)] == path)
    marks = MappingProxyType({place: document.key_mark_at(place) for place in below})
    return StrategyBlock(value=MappingProxyType(value), path=path, marks=marks)


def parse_elastic(group: View) -> Elastic | None:
    """Return with how few of its tasks the group may run; ``None``: with all or none."""
    given = group.view("elastic")
    least = given.whole("min")
    if least is None:
        return None
    wait_s = given.parsed("wait", parse_duration)
    mark = given.key_mark("min")
    return Elastic(least=least, mark=mark) if wait_s is None else Elastic(least=least, wait_s=wait_s, mark=mark)


def parse_launcher(owner: View) -> Launcher | None:
    """Return the launcher of a group or a task; ``None`` when it names none."""
    if not owner.has("launcher"):
        return None
    mark = owner.key_mark("launcher")
    name = owner.string("launcher")
    if name is not None:
        return Launcher(kind=name, mark=mark)
    given = owner.view("launcher")
    kind, restarts = given.string("kind"), given.whole("max_restarts") or 0
    if restarts and kind == "command":
        message = "`max_restarts` has no effect: `launcher: command` starts nothing"
        given.add(message, "choose torchrun or spawn; for the whole gang use `exitActions` and `retry`", key="max_restarts")
    numa = given.flag("numa") or False
    if numa and kind in ("torchrun", "command"):
        hint = "choose `kind: spawn`"
        if kind == "torchrun":
            hint += ", or start torchrun in the command, with its own `--numa-binding=node`"
        given.add(f"`numa` has no effect with `{kind}`: it is a key of `spawn`", hint, key="numa")
    return Launcher(kind=kind or "command", max_restarts=restarts, numa=numa, mark=mark)


def with_launchers(group: View | None, tasks: Sequence[View], specs: Sequence[TaskSpec]) -> tuple[TaskSpec, ...]:
    """Return the tasks of a group with their launchers, and with ranks where a launcher or a framework starts some.

    ``tasks`` are the entries of the spec, ``specs`` what they stand for (replicas are several). A task that does not say how
    many ranks it has gets one for each GPU that it asks for, else one.
    """
    framework = parse_framework(group) if group is not None else None
    general = parse_launcher(group) if group is not None else None
    own = {task.string("name") or "": parse_launcher(task) for task in tasks}
    if general is None and framework is not None and framework.value == "pytorch":
        general = Launcher(kind="torchrun", mark=framework.mark)
    return tuple(_with_launcher(spec, own.get(spec.written_name) or general or Launcher(), framework) for spec in specs)


def _with_launcher(spec: TaskSpec, launcher: Launcher, framework: Text | None) -> TaskSpec:
    named = framework is not None and framework.value not in (*_WITHOUT_RANKS, "pytorch")
    if spec.ranks is not None or not (launcher.starts_ranks or named):
        return replace(spec, launcher=launcher)
    where = launcher.mark if launcher.starts_ranks or framework is None else framework.mark
    return replace(spec, launcher=launcher, ranks=Ranks(mark=where))
