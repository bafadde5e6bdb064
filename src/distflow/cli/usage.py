"""What this user's unfinished workflows use of the nodes, as distflow's own record has it; no node is asked."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from distflow.errors import RecordUnreadable
from distflow.layout.placement.node_placement import Demand
from distflow.lifecycle.states import State
from distflow.plan.compile import demands
from distflow.pools.model import Node, Pool
from distflow.state.store import Store

__all__ = ["WHAT_USED_MEANS", "Held", "Mode", "Usage", "amount_cells", "held_by_tasks", "total_of"]

WHAT_USED_MEANS = "used is what this user's unfinished workflows hold, as distflow's own record has it; no node was asked"


Held = Mapping[tuple[str, str], Sequence[tuple[str, Demand]]]
"""Names of tasks and what they hold, by pool and node."""


class Mode(str, Enum):
    """Which amounts are shown."""

    USED = "used"
    FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A node with what it has and what of it is in use; ``None``: not configured, so not known before it is reached."""

    pool: Pool
    node: Node
    held: Sequence[tuple[str, Demand]]
    """Names of tasks, and what they hold."""

    @property
    def amounts(self) -> tuple[tuple[int, int | None], ...]:
        """Used and total CPUs, memory (bytes) and GPUs."""
        held = [demand for _, demand in self.held]
        return (
            (sum(one.cpus for one in held), self.node.cpus),
            (sum(one.memory for one in held), self.node.memory),
            (sum(one.gpus for one in held), self.node.gpus),
        )


def held_by_tasks(store: Store) -> Held:
    """Return what tasks hold, by pool and node; warn of those whose records cannot be read."""
    found: dict[tuple[str, str], list[tuple[str, Demand]]] = {}
    unknown = store.uuids(are_unfinished=True)
    for record in store.unfinished():
        groups = [one for one in record.groups if one.state in (State.INITIALIZING, State.RUNNING, State.STOPPING)]
        try:
            plan = store.plan(record.uuid) if groups else None
        except RecordUnreadable:
            continue
        unknown -= {record.uuid}
        for group in groups:
            asked = {demand.task: demand for demand in demands(plan.group(group.name))} if plan else {}
            for task in group.tasks:
                if task.node is not None and not task.state.is_final:
                    found.setdefault((record.pool, task.node), []).append((f"{record.id}/{task.name}", asked[task.name]))
    for uuid in sorted(unknown & store.uuids(are_unfinished=True)):  # none that has just ended
        print(f"warning: what workflow {uuid} holds is not counted: another version of distflow wrote it", file=sys.stderr)
    return found


def total_of(values: Sequence[int | None]) -> int | None:
    """Return the sum, which is not known when a part of it is not."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def amount_cells(amounts: Sequence[tuple[int, int | None]], mode: Mode) -> tuple[str, ...]:
    """Return the amounts as text: what is used rounded up, what there is rounded down."""
    found = []
    for (used, total), unit in zip(amounts, (1, 2**30, 1), strict=True):
        if mode is Mode.FREE:
            found.append("-" if total is None else str(max(0, total - used) // unit))
        else:
            found.append(f"{math.ceil(used / unit)}/{'-' if total is None else total // unit}")
    return tuple(found)
