"""Nodes that nobody gets through to: what is known of them, and what that means for a workflow that is to end. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distflow.documents.times import iso, local_second
from distflow.state.record import GroupRecord, WorkflowRecord

__all__ = ["NodeAway", "cancel_json", "cancel_words", "left_behind", "nodes_away"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAway:
    """An unreachable node, and the unfinished tasks of one group there."""

    node: str
    since: float
    error: str
    tasks: tuple[str, ...]

    @property
    def words(self) -> str:
        """One sentence."""
        return f"{self.node} has been unreachable since {local_second(self.since)}: {self.error}"


def nodes_away(group: GroupRecord) -> list[NodeAway]:
    """Return the unreachable nodes of a group, in the order of its tasks."""
    found: dict[str, NodeAway] = {}
    for task in group.tasks:
        if task.node is None or task.out_of_reach is None or task.state.is_final:
            continue
        others = found[task.node].tasks if task.node in found else ()
        found[task.node] = NodeAway(
            node=task.node, since=task.out_of_reach.since, error=task.out_of_reach.error, tasks=(*others, task.name)
        )
    return list(found.values())


def cancel_words(record: WorkflowRecord, node_lost_after_s: float) -> Iterator[str]:
    """Yield what a request to end the workflow means where a node is unreachable: what is known, and what will happen."""
    for group in record.groups:
        for away in nodes_away(group):
            yield away.words
            yield (
                f"  {' and '.join(away.tasks)} may run on there, and will be stopped as soon as {away.node} answers;"
                f" if that takes longer than node_lost_after ({node_lost_after_s:g} s), {record.id} ends without it"
            )


def left_behind(record: WorkflowRecord) -> Iterator[str]:
    """Yield a sentence for each task of an ended workflow whose end nobody has seen."""
    for group in record.groups:
        for task in group.tasks:
            if task.stray is not None:
                yield f"{task.name}: {task.message}; it may still run there, and is stopped as soon as {task.node} answers"


def cancel_json(record: WorkflowRecord) -> list[dict[str, object]]:
    """Return the unreachable nodes as ``cancel --format-type json`` prints them."""
    return [
        {"node": away.node, "since": iso(away.since), "error": away.error, "tasks": list(away.tasks)}
        for group in record.groups
        for away in nodes_away(group)
    ]
