"""Find remaining allocations of an engine: release those of ended workflows, and query those of unknown workflows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import MappingProxyType

from distflow.backends.allocated.engine import Allocation, Granted, node_name
from distflow.backends.allocated.engines import open_engine
from distflow.backends.machines.cleanup import Leftover, Reaped, UnknownWorkflows, unknown_workflows_of_node
from distflow.errors import DistflowError, NodeError
from distflow.pools.model import Pool
from distflow.structs import replace

__all__ = ["reap_allocations", "unknown_workflows_of_allocations"]

_ALLOCATION_TERMS: Mapping[str, str] = MappingProxyType(
    {"slurm": "job", "ray": "placement group", "kubernetes": "pods of ConfigMap"}
)
"""Backend → the engine's term for an allocation."""

_AT_ONCE = 32
"""The maximum number of nodes that are queried in parallel."""


def reap_allocations(pool: Pool, *, ended: Collection[str], unfinished: Collection[str], is_dry_run: bool) -> Reaped:
    """Release the allocations of workflows that have ended, and report those of other submitters.

    ``ended`` and ``unfinished`` are uuids of workflows. Allocations of unfinished workflows are ignored. With ``is_dry_run``,
    nothing is released. ``node`` of the result is the name of the pool. An error of the engine is in the result, not raised.
    """
    found: list[Leftover] = []
    try:
        with closing(open_engine(pool)) as engine:
            for name, one in engine.allocations().items():
                if one.workflow in unfinished:
                    continue
                is_ours = one.workflow in ended
                why = (
                    "its workflow has ended"
                    if is_ours
                    else "submitted with another state directory, perhaps on another machine"
                )
                attempt = f"{one.workflow}/{one.group}/{one.attempt}"
                found.append(
                    Leftover(
                        pid=None,
                        name=f"{_ALLOCATION_TERMS.get(pool.backend, 'allocation')} {name}",
                        attempt=attempt,
                        why=why,
                        is_ours=is_ours,
                    )
                )
                if is_ours and not is_dry_run:
                    try:
                        engine.release([name])
                    except DistflowError as error:
                        found[-1] = replace(found[-1], error=_without_name(error, pool.name))
                        raise
    except DistflowError as error:
        return Reaped(node=pool.name, found=tuple(found), error=_without_name(error, pool.name))
    return Reaped(node=pool.name, found=tuple(found))


def _without_name(error: DistflowError, pool: str) -> str:
    """Return the message. It keeps the name of the login node, but not that of the pool, because the result names the pool."""
    return error.detail if isinstance(error, NodeError) and error.node == pool else error.message


def unknown_workflows_of_allocations(pool: Pool, *, known: Collection[str]) -> list[UnknownWorkflows]:
    """Query each node in allocations of unknown workflows for its workflows, and return one result for each node.

    ``known`` are the uuids of known workflows. Errors are in the results and are not raised.
    """
    try:
        with closing(open_engine(pool)) as engine:
            found = {name: one for name, one in engine.allocations().items() if one.workflow not in known}
            states = engine.states(dict.fromkeys(found, ())) if found else {}
    except DistflowError as error:
        return [UnknownWorkflows(pool=pool, node=pool.name, error=_without_name(error, pool.name))]
    nodes = {
        node_name(host, name): found[name]
        for name, state in states.items()
        if isinstance(state, Granted)
        for host in state.hosts.values()
    }
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as workers:
        answers = list(workers.map(lambda name: unknown_workflows_of_node(pool, pool.node(name), known=known), nodes))
    return [_filter_by_allocation(answer, nodes[answer.node]) for answer in answers]


def _filter_by_allocation(answer: UnknownWorkflows, allocation: Allocation) -> UnknownWorkflows:
    """Remove workflows and attempts of other allocations. Nodes that share ``root`` report them too."""
    prefix, suffix = f"{allocation.workflow}/{allocation.group}/", f"/{allocation.attempt}"
    return replace(
        answer,
        workflows=tuple(
            replace(one, attempts=tuple(at for at in one.attempts if at.name.startswith(prefix) and at.name.endswith(suffix)))
            for one in answer.workflows
            if one.uuid == allocation.workflow
        ),
    )
