"""Clean up nodes and list the users of their resources. Functions that query nodes query them in parallel.

An error of one node is part of that node's result and does not affect the other nodes.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from msgspec import Struct

from distflow.backends.machines.cleanup import (
    Cleaned,
    Leftover,
    Reaped,
    Uninstalled,
    UnknownWorkflows,
    clean_node,
    reap_node,
    uninstall_node,
    unknown_workflows_of_node,
)
from distflow.backends.machines.inspection import Holder, Holders, ask_holders
from distflow.client.client import Client
from distflow.documents.text import did_you_mean, listed
from distflow.errors import InputError, NotFound
from distflow.pools.hostfile import Host, choose_pool
from distflow.pools.model import Node, Pool
from distflow.structs import replace

__all__ = [
    "Cleaned",
    "GpuUse",
    "Holder",
    "Holders",
    "Leftover",
    "PoolNode",
    "Reaped",
    "Uninstalled",
    "ask_nodes",
    "ask_resource_holders",
    "choose_nodes",
    "clean_nodes",
    "gpu_uses",
    "reap_jobs",
    "reap_nodes",
    "replace_uuids",
    "uninstall_nodes",
    "unknown_workflows_of_nodes",
]

PoolNode = tuple[Pool, Node]
"""A node and its pool."""
T = TypeVar("T")

_MOST_GPUS = 1024
"""GPUs whose index is this number or higher are not shown."""
_AT_ONCE = 32
"""The maximum number of nodes that are queried in parallel."""
# The pattern does not match inside a path, because paths must not be changed.
_UUID_OR_ATTEMPT = re.compile(
    r"(?<![\w/.-])([0-9a-f]{8}(-?)[0-9a-f]{4}(?:\2[0-9a-f]{4}){2}\2[0-9a-f]{12})(?:/[A-Za-z0-9_-]+/([A-Za-z0-9_-]+)/([0-9]+))?(?![\w/-])"
)


def choose_nodes(
    client: Client,
    pool: str | None = None,
    *,
    hosts: Sequence[Host] | None = None,
    names: Sequence[str] | None = None,
    must_exist: bool = False,
) -> list[PoolNode]:
    """Return nodes of the configuration, each with its pool.

    Args:
        client: The client whose configuration has the pools.
        pool: The name of a pool. Default: all pools.
        hosts: Machines to use instead of the configured nodes.
        names: Names of nodes. Default: all nodes of the chosen pools.
        must_exist: Whether an empty result is an error.

    Raises:
        InputError: if the pool cannot use ``hosts``, or with ``must_exist``, if Slurm, Kubernetes or Ray choose the nodes.
        NotFound: if a pool or a node does not exist.
        ProblemsFound: if the configuration is wrong.

    """
    configuration = client.configuration()
    is_one_pool = pool is not None or hosts is not None
    pools = [choose_pool(configuration, given=pool, hosts=hosts)] if is_one_pool else list(configuration.pools.values())
    nodes = [(one, node) for one in pools for node in one.nodes]
    for name in names or ():
        if all(node.name != name for _, node in nodes):
            known = [node.name for _, node in nodes]
            missing = f"there is no node `{name}`" if pool is None else f"pool `{pool}` has no node `{name}`"
            raise NotFound(missing, hint=did_you_mean(name, known, what="nodes"))
    if must_exist and not nodes:
        message = f"pool `{pools[0].name}` has no nodes of its own, because {pools[0].backend} chooses them for each job"
        command = f"distflow node reap --pool {pools[0].name}"
        if len(pools) > 1:
            listing = listed([one.name for one in pools])
            message = f"the pools {listing} have no nodes of their own, because clusters choose them for each job"
            command = "distflow node reap"
        raise InputError(message, hint=f"to end leftover jobs: {command}")
    return [one for one in nodes if not names or one[1].name in names]


def ask_nodes(nodes: Sequence[PoolNode], ask: Callable[[Pool, Node], T]) -> list[T]:
    """Call ``ask`` for every node in parallel threads, and return the results in the order of the nodes."""
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as workers:
        return list(workers.map(lambda one: ask(*one), nodes))


def reap_nodes(nodes: Sequence[PoolNode], *, is_dry_run: bool = False) -> list[Reaped]:
    """Find orphan processes and containers of attempts on nodes, and stop them.

    Those of another root directory or user are only reported.

    Args:
        nodes: The nodes (see ``choose_nodes``).
        is_dry_run: Whether to only find the processes and containers.

    Returns:
        One result for each node, in order. It names workflows by uuid (see ``replace_uuids``). It contains the node's error, if
        any, which is not raised.

    """
    return ask_nodes(nodes, lambda pool, node: reap_node(pool, node, is_dry_run=is_dry_run))


def reap_jobs(
    client: Client, *, pool: str | None = None, hosts: Sequence[Host] | None = None, is_dry_run: bool = False
) -> list[Reaped]:
    """Find and end jobs of cluster engines that belong to ended workflows. Jobs of other submitters are only reported.

    Args:
        client: The client whose configuration has the pools and whose store has the workflows.
        pool: The name of a pool. Default: all pools whose nodes an engine chooses.
        hosts: Machines to use instead of the configured nodes. They have no jobs, so the result is empty.
        is_dry_run: Whether to only find the jobs.

    Returns:
        One result for each of these pools whose nodes an engine chooses, with the name of the pool as its node.

    Raises:
        NotFound: if the pool does not exist.
        ProblemsFound: if the configuration is wrong.

    """
    chosen = _allocated_pools(client, pool, hosts)
    if not chosen:
        return []
    from distflow.backends.allocated.leftovers import reap_allocations

    unfinished = client.store.uuids(are_unfinished=True)
    ended = client.store.uuids() - unfinished
    return [reap_allocations(one, ended=ended, unfinished=unfinished, is_dry_run=is_dry_run) for one in chosen]


def unknown_workflows_of_nodes(
    client: Client, pool: str | None = None, *, hosts: Sequence[Host] | None = None, known: Collection[str]
) -> list[UnknownWorkflows]:
    """Return the workflows on nodes and in allocations whose uuids are not ``known``. Errors are in the results.

    Args:
        client: The client whose configuration has the pools.
        pool: The name of a pool. Default: all pools.
        hosts: Machines to use instead of the configured nodes.
        known: Uuids of workflows to leave out.

    Raises:
        InputError: if the pool cannot use ``hosts``.
        NotFound: if the pool does not exist.
        ProblemsFound: if the configuration is wrong.

    """
    answers = ask_nodes(
        choose_nodes(client, pool, hosts=hosts), lambda one, node: unknown_workflows_of_node(one, node, known=known)
    )
    for one in _allocated_pools(client, pool, hosts):
        from distflow.backends.allocated.leftovers import unknown_workflows_of_allocations

        answers += unknown_workflows_of_allocations(one, known=known)
    return answers


def _allocated_pools(client: Client, pool: str | None, hosts: Sequence[Host] | None) -> list[Pool]:
    """Return the chosen pools whose nodes an engine chooses."""
    if hosts is not None:
        return []
    configuration = client.configuration()
    pools = configuration.pools.values() if pool is None else [choose_pool(configuration, given=pool)]
    return [one for one in pools if one.is_allocated]


def clean_nodes(
    client: Client, nodes: Sequence[PoolNode], *, older_than_s: float | None = None, is_dry_run: bool = False
) -> list[Cleaned]:
    """Delete files of workflows, such as logs and outputs, and unused Python environments from nodes.

    Files of workflows that run on the node are kept.

    Args:
        client: The client whose store has the workflows. Files of its unfinished workflows are kept, too.
        nodes: The nodes (see ``choose_nodes``).
        older_than_s: Delete only files of workflows that were not modified, and environments that were not used, for this many
            seconds. Default: the retention of the pool.
        is_dry_run: Whether to delete nothing and only report what would be deleted.

    Returns:
        One result for each node, in order. It contains the node's error, if any, which is not raised.

    Raises:
        StateError: if the state directory is not writable.

    """
    client.writable_directory()
    unfinished, ids = client.store.uuids(are_unfinished=True), client.store.ids()
    results = ask_nodes(
        nodes,
        lambda pool, node: clean_node(
            pool,
            node,
            older_than_s=pool.retention_s if older_than_s is None else older_than_s,
            unfinished=unfinished,
            is_dry_run=is_dry_run,
        ),
    )
    return [replace(one, error=replace_uuids(one.error, ids)) for one in results]


def uninstall_nodes(client: Client, nodes: Sequence[PoolNode]) -> list[Uninstalled]:
    """Remove distflow and all files of its tasks from nodes. A node with a running task refuses.

    Args:
        client: The client whose store has the workflows, to show their ids in errors.
        nodes: The nodes (see ``choose_nodes``).

    Returns:
        One result for each node, in order. It contains the node's error, if any, which is not raised.

    Raises:
        StateError: if the store cannot be read.

    """
    ids = client.store.ids()
    return [replace(one, error=replace_uuids(one.error, ids)) for one in ask_nodes(nodes, uninstall_node)]


def ask_resource_holders(nodes: Sequence[PoolNode], *, within_s: float | None = None) -> list[Holders]:
    """Return which attempts hold GPUs, CPUs, memory and ports of nodes, and which other processes use a GPU.

    Args:
        nodes: The nodes (see ``choose_nodes``).
        within_s: Seconds after which nodes without an answer get an error. Default: each node has its own limits, which are the
            connect timeout of its pool, and 60 s for the answer.

    Returns:
        The attempts of all users, one entry for each node, in order. Errors of nodes are in the entries.

    """
    if within_s is None:
        return ask_nodes(nodes, ask_holders)
    answers = [Holders(error=f"no answer within {within_s:g} s")] * len(nodes)
    slots = threading.Semaphore(_AT_ONCE)

    def ask(index: int) -> None:
        with slots:
            answers[index] = ask_holders(*nodes[index])

    # A `ThreadPoolExecutor` would keep the process from exiting until all nodes have answered.
    threads = [threading.Thread(target=ask, args=(index,), daemon=True) for index in range(len(nodes))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(answers)


class GpuUse(Struct, frozen=True):
    """The use of a GPU by a task or another process."""

    state: Literal["mine", "other", "foreign"]
    """In this order: a task of this user, a task of another user, or a process on a GPU that no task has reserved."""
    by: str
    """The task, with the name of its user for ``other``, or a description of the process."""


def gpu_uses(report: Holders, ids: Mapping[str, str], user: str) -> dict[int, GpuUse]:
    """Return the use of each GPU in use on a node, by its index.

    Args:
        report: The answer of the node.
        ids: The id of each workflow in the store, by its uuid.
        user: The name of this user.

    """
    found = {gpu: GpuUse("foreign", text) for gpu, text in report.foreign}
    for one in report.holders:
        uuid, task = one.attempt.partition("/")[0], one.label or "an unknown task"
        is_mine = uuid in ids or one.user == user
        found |= dict.fromkeys(one.gpus, GpuUse("mine", task) if is_mine else GpuUse("other", f"{one.user}: {task}"))
    # Any user of the node can create and lock a file for a GPU that does not exist, with any number.
    return {gpu: use for gpu, use in found.items() if 0 <= gpu < _MOST_GPUS}


def replace_uuids(text: str, ids: Mapping[str, str]) -> str:
    """Return a node's text with workflow ids instead of uuids, and task names instead of attempt names.

    Args:
        text: The text.
        ids: The id of each known workflow, by uuid.

    >>> replace_uuids("7278eb5c7278eb5c7278eb5c7278eb5c/g/w1/2 runs", {"7278eb5c7278eb5c7278eb5c7278eb5c": "spin-1"})
    'spin-1/w1 retry-2 runs'
    """

    def name(match: re.Match[str]) -> str:
        uuid, _, task, attempt = match.groups()
        if task is None:
            return ids.get(uuid, "an unknown workflow")
        retry = f" retry-{attempt}" if int(attempt) else ""
        return f"{ids[uuid]}/{task}{retry}" if uuid in ids else f"{task}{retry} of an unknown workflow"

    return _UUID_OR_ATTEMPT.sub(name, text)
