"""``distflow resource``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import typer

from distflow.cli import wiring
from distflow.cli.command import Format, FormatOption, HostfileOption
from distflow.cli.reading import reading_directory
from distflow.cli.tables import table
from distflow.documents.words import did_you_mean
from distflow.errors import InputError, NotFound
from distflow.layout.placement import Demand
from distflow.lifecycle.states import State
from distflow.plan.compile import demands
from distflow.pools.choose import choose_pool, with_hosts
from distflow.pools.model import Configuration, Node, Pool
from distflow.state.store import Store

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)

_WHAT_USED_MEANS = "used is what this user's unfinished workflows hold, as distflow's own record has it; no node was asked"


class _Mode(str, Enum):
    """Which amounts are shown."""

    USED = "used"
    FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
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


@app.callback()
def _resource() -> None:
    """Look at the nodes of the pools, and at what is in use of them."""


@app.command("list", epilog="Examples: distflow resource list  ·  distflow resource list --all --mode free")
def list_resources(
    pool: Annotated[
        list[str] | None, typer.Option("--pool", "-p", help="This pool, may be repeated; else the default one.")
    ] = None,
    platform: Annotated[
        list[str] | None, typer.Option("--platform", help="Only nodes of this platform; may be repeated.")
    ] = None,
    all_pools: Annotated[bool, typer.Option("--all", "-a", help="All pools of the configuration.")] = False,
    mode: Annotated[_Mode, typer.Option("--mode", "-m", help="used/total, or what is free.")] = _Mode.USED,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """List nodes with what they have, and what distflow's own unfinished workflows use of it.

    Nothing is reached: capacities are those of the configuration (`distflow pool check` asks the nodes), use is that of this
    user's workflows in the state directory. What others run there is not seen.
    """
    if pool and all_pools:
        raise InputError("--pool and --all exclude each other")
    configuration = with_hosts(wiring.configuration(), wiring.hosts(hostfile))
    with wiring.open_store(reading_directory()) as store:
        held = _held(store)
    rows = [
        _Row(pool=one, node=node, held=held.get((one.name, node.name), ()))
        for one in _pools(configuration, pool or (), all_pools)
        for node in one.nodes
        if not platform or node.platform in platform
    ]
    if format_type is Format.JSON:
        print(json.dumps({"resources": [_json(row) for row in rows]}, indent=2))
        return
    print(_text(rows, mode), end="")
    print(_WHAT_USED_MEANS, file=sys.stderr)


@app.command("info", epilog="Examples: distflow resource info gpu1  ·  distflow resource info gpu1 --pool lab -t json")
def resource_info(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's name in its pool.")],
    pool: Annotated[str | None, typer.Option("--pool", "-p", help="As a node of this pool only.")] = None,
    platform: Annotated[str | None, typer.Option("--platform", "-pl", help="As a node of this platform only.")] = None,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Show all that is configured of a node, in every pool that has it, and what this user's workflows hold there.

    Nothing is reached: `distflow pool check` asks the node itself.
    """
    configuration = with_hosts(wiring.configuration(), wiring.hosts(hostfile), given=pool)
    pools = [choose_pool(configuration, given=pool)] if pool else list(configuration.pools.values())
    with wiring.open_store(reading_directory()) as store:
        held = _held(store)
    everywhere = [
        _Row(pool=one, node=member, held=held.get((one.name, member.name), ())) for one in pools for member in one.nodes
    ]
    rows = [row for row in everywhere if row.node.name == node and platform in (None, row.node.platform)]
    if not rows:
        where = (f" of pool {pool!r}" if pool else "") + (f" of platform {platform!r}" if platform else "")
        raise NotFound(
            f"there is no node {node!r}{where}", hint=did_you_mean(node, [row.node.name for row in everywhere], what="nodes")
        )
    if format_type is Format.JSON:
        print(json.dumps({"resources": [_json(row) | {"config_fields": _settings(row)} for row in rows]}, indent=2))
        return
    print("\n".join(_info(row) for row in rows), end="")
    print(_WHAT_USED_MEANS, file=sys.stderr)


def _settings(row: _Row) -> dict[str, object]:
    node = row.node
    return {
        "host": node.host, "port": node.port, "user": node.user, "address": node.address, "root": node.root,
        "python": node.python, "setup": node.setup, "environment": sorted(node.environment),
    }  # fmt: skip


def _info(row: _Row) -> str:
    """Return what is known of a node, one thing a line; values of its environment may be secret, and are left out."""
    cpu, memory, gpu = _cells(row.amounts, _Mode.USED)
    shown: dict[str, object] = {
        "Node": row.node.name, "Pool": row.pool.name, "Platform": row.node.platform, "Backend": row.pool.backend,
        "CPU [#]": cpu, "Memory [Gi]": memory, "GPU [#]": gpu,
        "Labels": " ".join(f"{key}={value}" for key, value in row.node.labels.items()),
    }  # fmt: skip
    shown |= {name.capitalize(): value for name, value in _settings(row).items()}
    shown["Environment"] = " ".join(sorted(row.node.environment))
    shown["Tasks"] = " ".join(name for name, _ in row.held)
    return "".join(f"{name + ':':13}{value or '-'}\n" for name, value in shown.items())


def _pools(configuration: Configuration, names: Sequence[str], all_pools: bool) -> Iterator[Pool]:
    if all_pools:
        yield from configuration.pools.values()
    elif names:
        yield from (choose_pool(configuration, given=name) for name in names)
    else:
        yield choose_pool(configuration)


def _held(store: Store) -> Mapping[tuple[str, str], list[tuple[str, Demand]]]:
    """Return what tasks hold, by pool and node."""
    found: dict[tuple[str, str], list[tuple[str, Demand]]] = {}
    for record in store.unfinished():
        groups = [one for one in record.groups if one.state in (State.INITIALIZING, State.RUNNING, State.STOPPING)]
        plan = store.plan(record.uuid) if groups else None
        for group in groups:
            asked = {demand.task: demand for demand in demands(plan.group(group.name))} if plan else {}
            for task in group.tasks:
                if task.node is not None and not task.state.is_final:
                    found.setdefault((record.pool, task.node), []).append((f"{record.id}/{task.name}", asked[task.name]))
    return found


def _text(rows: Sequence[_Row], mode: _Mode) -> str:
    cells = [
        (row.node.name, row.pool.name, row.node.platform or "", *_cells(row.amounts, mode), str(len(row.held))) for row in rows
    ]
    total = [
        (sum(row.amounts[column][0] for row in rows), _sum([row.amounts[column][1] for row in rows])) for column in range(3)
    ]
    cells.append(("Sum", "", "", *_cells(total, mode), str(sum(len(row.held) for row in rows))))
    return table(("Node", "Pool", "Platform", "CPU [#]", "Memory [Gi]", "GPU [#]", "Tasks"), cells)


def _sum(values: Sequence[int | None]) -> int | None:
    """Return the sum, which is not known when a part of it is not."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _cells(amounts: Sequence[tuple[int, int | None]], mode: _Mode) -> tuple[str, ...]:
    """Return the amounts as text: what is used rounded up, what there is rounded down."""
    cells = []
    for (used, total), unit in zip(amounts, (1, 2**30, 1), strict=True):
        if mode is _Mode.FREE:
            cells.append("-" if total is None else str(max(0, total - used) // unit))
        else:
            cells.append(f"{math.ceil(used / unit)}/{'-' if total is None else total // unit}")
    return tuple(cells)


def _json(row: _Row) -> dict[str, object]:
    (cpu, cpus), (memory, memories), (gpu, gpus) = row.amounts
    return {
        "hostname": row.node.name,
        "backend": row.pool.backend,
        "resource_type": "SHARED",
        "pool_platform_labels": {row.pool.name: [row.node.platform] if row.node.platform else []},
        "allocatable_fields": {"cpu": cpus, "memory": memories, "gpu": gpus},
        "usage_fields": {"cpu": cpu, "memory": memory, "gpu": gpu},
        "label_fields": dict(row.node.labels),
        "tasks": [name for name, _ in row.held],
    }
