"""Format the stacks and collectives of many processes, and name the processes and ranks that differ. The functions are pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from distflow.cli.render.tables import Paint
from distflow.documents.json_keys import name_keys
from distflow.documents.quantities import duration_hms
from distflow.documents.text import few, plain, ranges

if TYPE_CHECKING:
    from distflow.client.running_tasks import TaskStacks

__all__ = ["collective_lines", "stacks_json", "stacks_text"]


_FRAMES = 16
"""The maximum number of innermost calls to show of a stack."""
_MOST_NAMES = 12
"""The maximum number of processes or nodes that a line names."""
_STATES = {"R": "runs", "S": "sleeps", "D": "waits for a device or a disk", "T": "is stopped", "t": "is being debugged"}


class _ProcessStack(Struct, frozen=True, kw_only=True):
    """The stack of one process."""

    who: str
    frames: tuple[str, ...]


def stacks_text(workflow: str, tasks: Sequence[TaskStacks], paint: Paint) -> str:
    """Return each distinct stack with its processes, the most common first.

    Below them are the positions of ranks in collectives, the last heartbeats, and problems with their remedies.
    """
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
        lines += [f"different from most: {_few(others)}", ""]
    lines += collective_lines(tasks, paint)
    lines += _heartbeats(tasks)
    lines += _problems(tasks)
    if not stacks and not any(task.error for task in tasks):
        lines.append(f"{workflow} has no process that can be inspected")
    return "\n".join(lines).rstrip("\n") + "\n"


def stacks_json(workflow: str, tasks: Sequence[TaskStacks]) -> dict[str, Any]:
    """Return the JSON document of ``stacks --format-type json`` (docs/hangs.md)."""
    return {
        "name": workflow,
        "workflow_id": workflow,
        "tasks": [
            {
                **name_keys(task=task.task.name, node=task.task.node.name),
                "error": task.error or None,
                "heartbeat_age_s": (task.report or {}).get("heartbeat_age_s"),
                "tool": (task.report or {}).get("tool"),
                "processes": (task.report or {}).get("processes") or [],
                "collectives": (task.report or {}).get("collectives") or [],
            }
            for task in tasks
        ],
    }


def _process_stacks(task: TaskStacks) -> Iterator[_ProcessStack]:
    processes: Sequence[Mapping[str, Any]] = (task.report or {}).get("processes") or []
    pythons = [one for one in processes if one["threads"]]
    # If some processes have Python threads, leave out all others, such as shells. If some are ranks, leave out their launchers.
    launchers = _ancestors(processes, [one for one in pythons if "RANK" in one["ranks"]])
    pythons = [one for one in pythons if "RANK" in one["ranks"] or one["pid"] not in launchers]
    for one in pythons or processes:
        rank = one["ranks"].get("RANK")
        known = f", rank {rank}" if rank is not None else ""
        who = plain(f"{task.task.name} on {task.task.node.name} (pid {one['pid']}{known})")
        yield _ProcessStack(who=who, frames=_python(one["threads"]) if one["threads"] else (_kernel(one),))


def _ancestors(processes: Sequence[Mapping[str, Any]], some: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the process ids of the ancestors of some processes."""
    parents = {one["pid"]: one["parent"] for one in processes}
    found: set[int] = set()
    for one in some:
        pid = parents.get(one["pid"])
        while pid is not None and pid not in found:
            found.add(pid)
            pid = parents.get(pid)
    return found


def _python(threads: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    main = next((one for one in threads if one["name"] == "MainThread"), threads[0])
    frames = [plain(f"{one['function']} ({one['file']}:{one['line']})") for one in main["frames"]]
    more = [f"… {len(frames) - _FRAMES} more calls"] if len(frames) > _FRAMES else []
    return (*frames[:_FRAMES], *more) or ("not in a Python function",)


def _kernel(one: Mapping[str, Any]) -> str:
    where = f" in {one['waits_in']}" if one["waits_in"] else ""
    return plain(f"{one['name']} {_STATES.get(one['state'], one['state'])}{where}")


def _heartbeats(tasks: Sequence[TaskStacks]) -> Iterator[str]:
    for task in tasks:
        age_s = (task.report or {}).get("heartbeat_age_s")
        if age_s is not None:
            yield f"{task.task.name}: last heartbeat {duration_hms(age_s)} ago"


def _problems(tasks: Sequence[TaskStacks]) -> Iterator[str]:
    for task in tasks:
        if task.error:
            yield f"{task.task.name}: no stacks: {task.error}"
    lacking: dict[str, dict[str, None]] = {}
    for task in tasks:
        if _lacks_tool(task):
            lacking.setdefault(task.task.node.python, {})[task.task.node.name] = None
    for python, names in lacking.items():
        yield f"no Python stacks of {_few(list(names))}: py-spy is not installed"
        yield f"  install it for the node's Python: {python} -m pip install py-spy"
    refused: dict[str, set[str]] = {}
    rules: dict[str, int] = {}
    for task in tasks:
        for one in (task.report or {}).get("processes") or []:
            if one["error"]:
                refused.setdefault(plain(one["error"]), set()).add(task.task.node.name)
                rules[task.task.node.name] = (task.report or {}).get("host_rule") or 0
    for words, nodes in refused.items():
        yield f"{', '.join(sorted(nodes))}: {words}"
        # "ermi" is in "Permission denied" and in "permission". If ``ptrace_scope`` is 3, only a reboot can change it.
        if "ermi" in words and any(rules[node] in (1, 2) for node in nodes):
            yield "  only root may inspect processes there; to change that: sudo sysctl kernel.yama.ptrace_scope=0"


def _lacks_tool(task: TaskStacks) -> bool:
    """Return whether a node lacks py-spy and needs it.

    It is needed if a Python process has not reported its own stack, or if no process is known to run Python.
    """
    if task.report is None or task.report["tool"]:
        return False
    pythons = [one for one in task.report["processes"] if one["is_python"]]
    return not pythons or any(one["threads"] is None for one in pythons)


def _few(words: Sequence[str]) -> str:
    return few(words, most=_MOST_NAMES, spare=0)


def _count(number: int) -> str:
    return f"{number} process{'es' if number != 1 else ''}"


_NAMED_RANKS = 8
"""The maximum number of ranks that are named with their tasks."""


class _Position(Struct, frozen=True, order=True, kw_only=True):
    """The position of a rank in the sequence of a process group's collectives. A smaller ``number`` is further behind."""

    number: int
    waits: bool
    operation: str

    @property
    def words(self) -> str:
        if not self.number:
            return "before the first collective"
        return f"{'in' if self.waits else 'after'} {self.operation}, collective {self.number}"


class _RankReport(Struct, frozen=True, kw_only=True):
    """The report of one rank about a process group."""

    rank: int
    who: str
    position: _Position
    entered: int
    """The number of the last collective that the rank has entered."""


def collective_lines(tasks: Sequence[TaskStacks], paint: Paint) -> Iterator[str]:
    """Yield the positions of all ranks and the missing ranks, for each process group in which a rank waits.

    If no rank waits, yield a line that says so. If no rank has reported its collectives, yield nothing.
    """
    groups: dict[tuple[str, str, tuple[int, ...]], list[_RankReport]] = {}
    for task in tasks:
        for one in (task.report or {}).get("collectives") or []:
            who = plain(f"rank {one['rank']} ({task.task.name} on {task.task.node.name})")
            for group in one["groups"]:
                key = (task.task.group, group["name"], tuple(group["ranks"]))
                groups.setdefault(key, []).append(_parse_report(one["rank"], who, group))
    waiting = {key: reports for key, reports in groups.items() if any(one.position.waits for one in reports)}
    for (_, name, ranks), reports in waiting.items():
        yield paint.strong(plain(f"process group {name}, {_ranks(ranks)}"))
        yield from _positions(ranks, reports)
        yield from _awaited_ranks(reports)
        yield ""
    if groups and not waiting:
        yield from ("No rank waits in a collective.", "")


def _parse_report(rank: int, who: str, group: Mapping[str, object]) -> _RankReport:
    number, entered = int(str(group["number"])), int(str(group["entered"]))
    position = _Position(number=number, waits=not group["is_over"], operation=plain(str(group["operation"])))
    return _RankReport(rank=rank, who=who, position=position, entered=entered)


def _positions(ranks: Sequence[int], reports: Sequence[_RankReport]) -> Iterator[str]:
    ordered = sorted(reports, key=lambda one: (one.position, one.rank), reverse=True)
    for position, equal in groupby(ordered, key=lambda one: one.position):
        yield f"    {position.words}: {_ranks([one.rank for one in equal])}"
    silent = set(ranks) - {one.rank for one in reports}
    if silent:
        yield f"    unknown: {_ranks(silent)}"


def _awaited_ranks(reports: Sequence[_RankReport]) -> Iterator[str]:
    """Yield a line about the ranks that have not entered the earliest collective in which a rank waits.

    If all ranks have entered it, but with different operations, yield a line about these operations.
    """
    first = min(one.position.number for one in reports if one.position.waits)
    waiting = [one for one in reports if one.position.waits and one.position.number == first]
    missing = [one for one in reports if one.entered < first]
    operations = sorted({one.position.operation for one in waiting})
    if missing:
        yield f"  {_ranks([one.rank for one in waiting])} {_verb(waiting)} in {operations[0]} for {_few_ranks(missing)}"
    elif len(operations) > 1:
        at = (f"{name} on {_ranks([one.rank for one in waiting if one.position.operation == name])}" for name in operations)
        yield f"  collective {first} differs between ranks: {', '.join(at)}"


def _verb(some: Sequence[_RankReport]) -> str:
    return "waits" if len(some) == 1 else "wait"


def _few_ranks(some: Sequence[_RankReport]) -> str:
    return few([one.who for one in sorted(some, key=lambda one: one.rank)], most=_NAMED_RANKS, spare=0)


def _ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, or ``ranks 0-2, 5``."""
    found = set(ranks)
    return f"rank{'' if len(found) == 1 else 's'} {ranges(found)}"
