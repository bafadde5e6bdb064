"""Format the stacks of many processes: equal stacks together, and the processes that differ from most. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distflow.cli.render.collectives import collective_lines
from distflow.cli.render.tables import Paint
from distflow.documents.quantities import duration
from distflow.documents.text import few, plain

if TYPE_CHECKING:
    from distflow.client.running_tasks import TaskStacks

__all__ = ["stacks_json", "stacks_text"]

_FRAMES = 16
"""The maximum number of innermost calls that are shown of a stack."""
_NAMED = 12
_STATES = {"R": "runs", "S": "sleeps", "D": "waits for a device or a disk", "T": "is stopped", "t": "is being debugged"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProcessStack:
    """The stack of one process."""

    who: str
    frames: tuple[str, ...]


def stacks_text(workflow: str, tasks: Sequence[TaskStacks], paint: Paint) -> str:
    """Return each distinct stack with its processes, the most common first, then problems and their remedies."""
    stacks = [stack for task in tasks for stack in _process_stacks(task)]
    groups: dict[tuple[str, ...], list[str]] = {}
    for stack in stacks:
        groups.setdefault(stack.frames, []).append(stack.who)
    by_count = sorted(groups.items(), key=lambda one: -len(one[1]))
    lines: list[str] = []
    for frames, who in by_count:
        lines += [paint.strong(f"{_count(len(who))} here: {_few(who)}"), *(f"    {frame}" for frame in frames), ""]
    if len(by_count) > 1 and len(by_count[0][1]) > len(stacks) / 2:
        others = [one for _, who in by_count[1:] for one in who]
        lines += [f"elsewhere than most: {_few(others)}", ""]
    lines += collective_lines(tasks, paint)
    lines += _heartbeats(tasks)
    lines += _problems(tasks)
    if not stacks and not any(task.error for task in tasks):
        lines.append(f"{workflow} has no process that could be inspected")
    return "\n".join(lines).rstrip("\n") + "\n"


def stacks_json(workflow: str, tasks: Sequence[TaskStacks]) -> dict[str, Any]:
    """Return the JSON document of ``stacks --format-type json`` (docs/hangs.md)."""
    return {
        "name": workflow,
        "tasks": [
            {
                "task": task.asked.task,
                "node": task.asked.node.name,
                "error": task.error or None,
                "heartbeat_age_s": (task.seen or {}).get("heartbeat_age_s"),
                "tool": (task.seen or {}).get("tool"),
                "processes": (task.seen or {}).get("processes") or [],
                "collectives": (task.seen or {}).get("collectives") or [],
            }
            for task in tasks
        ],
    }


def _process_stacks(task: TaskStacks) -> Iterator[_ProcessStack]:
    processes: Sequence[Mapping[str, Any]] = (task.seen or {}).get("processes") or []
    pythons = [one for one in processes if one["threads"]]
    # If there are Python processes, leave out their shells and launchers, whose stacks add no information.
    for one in pythons or processes:
        rank = one["ranks"].get("RANK")
        known = f", rank {rank}" if rank is not None else ""
        who = plain(f"{task.asked.task} on {task.asked.node.name} (pid {one['pid']}{known})")
        yield _ProcessStack(who=who, frames=_python(one["threads"]) if one["threads"] else (_kernel(one),))


def _python(threads: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    main = next((one for one in threads if one["name"] == "MainThread"), threads[0])
    frames = [plain(f"{one['function']} ({one['file']}:{one['line']})") for one in main["frames"]]
    more = [f"… {len(frames) - _FRAMES} calls more"] if len(frames) > _FRAMES else []
    return (*frames[:_FRAMES], *more) or ("in no Python function",)


def _kernel(one: Mapping[str, Any]) -> str:
    where = f" in {one['waits_in']}" if one["waits_in"] else ""
    return plain(f"{one['name']} {_STATES.get(one['state'], one['state'])}{where}")


def _heartbeats(tasks: Sequence[TaskStacks]) -> Iterator[str]:
    for task in tasks:
        age_s = (task.seen or {}).get("heartbeat_age_s")
        if age_s is not None:
            yield f"{task.asked.task}: its last heartbeat was {duration(age_s)} ago"


def _problems(tasks: Sequence[TaskStacks]) -> Iterator[str]:
    for task in tasks:
        if task.error:
            yield f"{task.asked.task}: not seen: {task.error}"
    lacking = {task.asked.node.name: task.asked.node.python for task in tasks if _lacks_tool(task)}
    if lacking:
        yield f"no Python stacks of {_few(list(lacking))}: py-spy is not there"
        yield f"  install it into the node's python: {next(iter(lacking.values()))} -m pip install py-spy"
    refused: dict[str, set[str]] = {}
    rules: dict[str, int] = {}
    for task in tasks:
        for one in (task.seen or {}).get("processes") or []:
            if one["error"]:
                refused.setdefault(plain(one["error"]), set()).add(task.asked.node.name)
                rules[task.asked.node.name] = (task.seen or {}).get("host_rule") or 0
    for words, nodes in refused.items():
        yield f"{', '.join(sorted(nodes))}: {words}"
        if any(rules[node] for node in nodes) and "ermi" in words:
            yield "  only root may look into processes there: sudo sysctl kernel.yama.ptrace_scope=0"


def _lacks_tool(task: TaskStacks) -> bool:
    """Return whether the node has no py-spy and a process of the task has not reported its own stack."""
    if task.seen is None or task.seen["tool"]:
        return False
    pythons = [one for one in task.seen["processes"] if one["is_python"]]
    return not pythons or any(one["threads"] is None for one in pythons)


def _few(words: Sequence[str]) -> str:
    return few(words, most=_NAMED, spare=0)


def _count(number: int) -> str:
    return f"{number} process{'es' if number != 1 else ''}"
