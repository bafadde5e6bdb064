"""Place tasks on nodes. The result depends only on the arguments.

At submission, the client proposes a placement with this module. Later, the supervisor decides with it. Each task, in the order
of node ranks, goes to the first node that fits. If that fails and the tasks request different resources, an exact matching
(augmenting paths) is computed for tasks of one world, which need different nodes. For other gangs, a backtracking search with a
limit tries other nodes.

``place_near`` also satisfies OSMO's ``topology``: tasks of one gang with the same ``key`` and ``group`` go to nodes with the
same value of the label ``key``, for example to one rack. If no placement satisfies all requests, the preferred ones are dropped
one by one, beginning with the last in the order of ranks. Required ones are never dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from types import MappingProxyType

from msgspec import Struct, field

from distflow.pools.model import Node
from distflow.spec.model import TopologyRequest
from distflow.structs import replace

__all__ = ["Demand", "Free", "Placement", "Unplaced", "place", "place_near"]


_STEPS = 20_000
"""Steps after which a search gives up, as if there were no placement."""
_Request = tuple[object, ...]
"""The request of a task without its name. Tasks with equal requests fit on the same nodes."""
_UNITS = ((1024**4, "Ti"), (1024**3, "Gi"), (1024**2, "Mi"), (1024, "Ki"))


class Demand(Struct, frozen=True, kw_only=True):
    """The resources and properties that one task requests of its node."""

    task: str
    gpus: int = 0
    cpus: int = 0
    """Cores."""
    memory: int = 0
    """Bytes."""
    platform: str | None = None
    """``None`` for any platform."""
    nodes_excluded: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Labels that the node must have."""
    near: tuple[TopologyRequest, ...] = ()
    """The topology requests of the task. ``place_near`` satisfies them, and ``place`` ignores them."""
    spread: str | None = None
    """Tasks with the same value (those of one world) need different nodes; ``None`` lets a task share a node with any task."""


class Free(Struct, frozen=True, kw_only=True):
    """The free resources of a node; ``None`` means not known, and is not checked."""

    node: str
    gpus: int | None = None
    cpus: int | None = None
    memory: int | None = None
    """Bytes."""
    platform: str | None = None
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    all_gpus: int | None = None
    """The resources of the idle node; ``None`` if they are not known or not given."""
    all_cpus: int | None = None
    all_memory: int | None = None
    closed: str = ""
    """The reason why no task may be placed there now."""
    note: str = ""
    """The reason why less than expected is free."""

    @classmethod
    def whole(cls, node: Node) -> Free:
        """Return all resources of a node of a pool as free."""
        return cls(
            node=node.name, gpus=node.gpus, cpus=node.cpus, memory=node.memory, platform=node.platform, labels=node.labels
        )  # fmt: skip


class Placement(Struct, frozen=True, kw_only=True):
    """A node for every task."""

    nodes: Mapping[str, str]
    """The node of each task, in the order of the tasks."""


class Unplaced(Struct, frozen=True, kw_only=True):
    """A task for which no node has room together with the rest of its gang."""

    task: str
    reasons: tuple[str, ...]
    """Usually one reason for each node, such as ``gpu1: 4 of 8 GPUs free, 8 requested``."""


def place(demands: Sequence[Demand], nodes: Sequence[Free], *, shared: bool) -> Placement | tuple[Unplaced, ...]:
    """Return a node for every task. If none is found for some tasks, return these tasks and the reasons.

    ``shared`` lets tasks of one world share a node (``backend: local``, which has only this machine).
    """
    if shared:
        demands = [replace(demand, spread=None) for demand in demands]
    requests = [_request_of(demand) for demand in demands]
    chosen, left = _greedy(demands, requests, nodes)
    # If all tasks request the same, the greedy placement is the best one already.
    if left and len(set(requests)) > 1:
        chosen = _matched(demands, nodes) or _searched(demands, nodes) or chosen
    if len(chosen) == len(demands):
        names = {demands[task].task: nodes[at].node for task, at in sorted(chosen.items())}
        return Placement(nodes=MappingProxyType(names))
    placed: dict[int, list[int]] = {}
    for task, at in chosen.items():
        placed.setdefault(at, []).append(task)
    unplaced = [task for task in range(len(demands)) if task not in chosen]
    examples = {requests[task]: demands[task] for task in unplaced}
    reasons = {request: _reasons(demand, demands, nodes, placed) for request, demand in examples.items()}
    return tuple(Unplaced(task=demands[task].task, reasons=reasons[requests[task]]) for task in unplaced)


def _greedy(demands: Sequence[Demand], requests: Sequence[_Request], nodes: Sequence[Free]) -> tuple[dict[int, int], list[int]]:
    """Place each task on the first node that fits. Return the index of each task's node, and the tasks without a node."""
    chosen: dict[int, int] = {}
    left: list[int] = []
    state = list(nodes)
    held: set[tuple[int, str]] = set()
    start = 0
    for task, demand in enumerate(demands):
        # Nodes that did not fit the previous task do not fit an equal one.
        if task and requests[task] != requests[task - 1]:
            start = 0
        for at in range(start, len(state)):
            if (at, demand.spread) not in held and not _lacks(demand, state[at]):
                chosen[task] = start = at
                state[at] = _remaining(state[at], demand)
                if demand.spread is not None:
                    held.add((at, demand.spread))
                break
        else:
            start = len(state)
            left.append(task)
    return chosen, left


def _matched(demands: Sequence[Demand], nodes: Sequence[Free]) -> dict[int, int]:
    """Return the node of each task in the largest matching; empty unless all tasks need different nodes.

    The algorithm is Kuhn's (augmenting paths). A loop replaces recursion, because a path may be as long as the number of tasks.
    """
    if len({demand.spread for demand in demands}) != 1 or demands[0].spread is None:
        return {}
    fitting = [[at for at, node in enumerate(nodes) if not _lacks(demand, node)] for demand in demands]
    taken: dict[int, int] = {}
    for start in range(len(demands)):
        reached_from: dict[int, int] = {}
        queue = [start]
        end = None
        while queue and end is None:
            task = queue.pop(0)
            for at in fitting[task]:
                if at in reached_from:
                    continue
                reached_from[at] = task
                if at not in taken:
                    end = at
                    break
                queue.append(taken[at])
        while end is not None:
            task = reached_from[end]
            before = next((at for at, holder in taken.items() if holder == task), None)
            taken[end] = task
            end = before
            if task == start:
                break
    return {task: at for at, task in taken.items()}


def _searched(demands: Sequence[Demand], nodes: Sequence[Free]) -> dict[int, int]:
    """Search for a complete placement, beginning with the tasks that fit on the fewest nodes; empty if none was found.

    If all tasks need different nodes, the result is also empty.
    """
    if len({demand.spread for demand in demands}) == 1 and demands[0].spread is not None:
        return {}  # `_matched` is exact
    fitting = [[at for at, node in enumerate(nodes) if not _lacks(demand, node)] for demand in demands]
    order = sorted(range(len(demands)), key=lambda task: (len(fitting[task]), -demands[task].gpus, task))
    state = list(nodes)
    held: set[tuple[int, str]] = set()
    path: list[tuple[int, int, Free]] = []
    tries = [iter(fitting[order[0]])]
    for _ in range(_STEPS):
        task = order[len(path)]
        demand = demands[task]
        for at in tries[-1]:
            if (at, demand.spread) not in held and not _lacks(demand, state[at]):
                path.append((task, at, state[at]))
                state[at] = _remaining(state[at], demand)
                if demand.spread is not None:
                    held.add((at, demand.spread))
                break
        else:
            tries.pop()
            if not path:
                return {}
            back, at, before = path.pop()
            state[at] = before
            held.discard((at, demands[back].spread or ""))
            continue
        if len(path) == len(order):
            return {task: at for task, at, _ in path}
        tries.append(iter(fitting[order[len(path)]]))
    return {}


def _request_of(demand: Demand) -> _Request:
    """Return the request of a task without its name."""
    labels = tuple(sorted(demand.labels.items()))
    return (demand.gpus, demand.cpus, demand.memory, demand.platform, demand.nodes_excluded, labels, demand.spread)


def _remaining(node: Free, demand: Demand) -> Free:
    return replace(
        node,
        gpus=None if node.gpus is None else node.gpus - demand.gpus,
        cpus=None if node.cpus is None else node.cpus - demand.cpus,
        memory=None if node.memory is None else node.memory - demand.memory,
    )


def _lacks(demand: Demand, node: Free) -> str:
    """Return why the node does not fit the task; empty if it does."""
    if node.closed:
        return node.closed
    if node.node in demand.nodes_excluded:
        return "excluded by nodesExcluded"
    if demand.platform is not None and node.platform is not None and demand.platform != node.platform:
        return f"platform {node.platform}, {demand.platform} requested"
    for key, value in demand.labels.items():
        if node.labels.get(key) != value:
            return (
                f"{key} {node.labels[key]}, {value} requested" if key in node.labels else f"no label {key}, {value} requested"
            )
    note = f" ({node.note})" if node.note else ""
    if node.gpus is not None and demand.gpus > node.gpus:
        return f"{_of(node.gpus, node.all_gpus, 'GPU')} free, {demand.gpus} requested{note}"
    if node.cpus is not None and demand.cpus > node.cpus:
        return f"{_of(node.cpus, node.all_cpus, 'CPU')} free, {demand.cpus} requested{note}"
    if node.memory is not None and demand.memory > node.memory:
        free = _bytes(node.memory)
        free += f" of {_bytes(node.all_memory)}" if node.all_memory is not None else ""
        return f"{free} memory free, {_bytes(demand.memory)} requested{note}"
    return ""


def _of(free: int, everything: int | None, unit: str) -> str:
    return f"{free} of {everything} {unit}s" if everything is not None else f"{free} {unit}{'s' * (free != 1)}"


def _bytes(count: int) -> str:
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f}{name}".replace(".0", "")
    return f"{count}B"


def _reasons(
    demand: Demand, demands: Sequence[Demand], nodes: Sequence[Free], placed: Mapping[int, Sequence[int]]
) -> tuple[str, ...]:
    """Return for each node the reason why it does not take the task. ``placed`` has the indexes of the tasks on each node."""
    reasons = []
    for at, node in enumerate(nodes):
        others = placed.get(at, ())
        left = node
        for other in others:
            left = _remaining(left, demands[other])
        lacks = _lacks(demand, node)
        world = [demands[other].task for other in others if demand.spread and demands[other].spread == demand.spread]
        if not lacks and world:
            lacks = f"used by {world[0]} of the same world"
        elif not lacks and (lacks_then := _lacks(demand, left)):
            names = ", ".join(demands[other].task for other in others)
            lacks = f"{lacks_then}, after placing {names}"
        reasons.append(f"{node.node}: {lacks or 'has room for this task, but not for the rest of its gang'}")
    return tuple(reasons) or ("the pool has no nodes",)


# -- topology ---------------------------------------------------------------------------------------------------------

_TRIES = 2_000
"""The maximum number of combinations of label values to try for one set of topology requests."""

_Wish = tuple[str, str]
"""The key and the group of a topology request."""


def place_near(demands: Sequence[Demand], nodes: Sequence[Free], *, shared: bool) -> Placement | tuple[Unplaced, ...]:
    """Place tasks like ``place``, and satisfy their topology requests; preferred ones only if possible.

    If there is only one node, it satisfies all requests.
    """
    wishes = _wishes(demands)
    if not wishes or len(nodes) == 1:
        return place(demands, nodes, shared=shared)
    kept = list(wishes)
    while True:
        found = _place_on_labels(demands, nodes, kept, shared=shared)
        preferred = [wish for wish in kept if not wishes[wish]]
        if isinstance(found, Placement) or not preferred:
            return found
        kept.remove(preferred[-1])


def _wishes(demands: Sequence[Demand]) -> dict[_Wish, bool]:
    """Return every topology request of a gang and whether it is required, in the order of the demands."""
    wishes: dict[_Wish, bool] = {}
    for demand in demands:
        for near in demand.near:
            wishes[near.key, near.group] = wishes.get((near.key, near.group), False) or near.required
    return wishes


def _place_on_labels(
    demands: Sequence[Demand], nodes: Sequence[Free], wishes: Sequence[_Wish], *, shared: bool
) -> Placement | tuple[Unplaced, ...]:
    """Place tasks so that nodes satisfy all topology requests in ``wishes``: try each combination of label values."""
    missing = [key for key, _ in wishes if not any(key in node.labels for node in nodes)]
    if missing:
        first = next(demand for demand in demands if any(near.key == missing[0] for near in demand.near))
        reason = f"no node has the label `{missing[0]}`, which the task's `topology` requests"
        return (Unplaced(task=first.task, reasons=(reason,)),)
    best: tuple[Unplaced, ...] | None = None
    for values in islice(_choices(nodes, wishes), _TRIES):
        labeled = [replace(demand, labels={**demand.labels, **_labels(demand, values)}) for demand in demands]
        found = place(labeled, nodes, shared=shared)
        if isinstance(found, Placement):
            return found
        if best is None or len(found) < len(best):
            best = found
    if best is None:
        raise AssertionError("a requested topology key has no value on any node")
    return best


def _choices(nodes: Sequence[Free], wishes: Sequence[_Wish]) -> Iterator[Mapping[_Wish, str]]:
    """Yield every combination of label values for the requests."""
    values = [list(dict.fromkeys(node.labels[key] for node in nodes if key in node.labels)) for key, _ in wishes]
    for chosen in product(*values):
        yield dict(zip(wishes, chosen, strict=True))


def _labels(demand: Demand, values: Mapping[_Wish, str]) -> dict[str, str]:
    return {near.key: values[near.key, near.group] for near in demand.near if (near.key, near.group) in values}
