"""``distflow resource``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from distflow.cli.context import open_client
from distflow.cli.options import Format, FormatOption, HostfileOption
from distflow.cli.render.amounts import WHAT_USED_MEANS, Mode, amount_cells, total_of
from distflow.cli.render.tables import table
from distflow.client.pools import NodeUsage, find_node, list_nodes
from distflow.client.workflows import workflow_ids
from distflow.errors import InputError, NodeError

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)


@app.callback()
def _resource() -> None:
    """Look at the nodes of the pools, and at what is in use of them."""


@app.command(
    "list",
    epilog="Examples: distflow resource list  ·  distflow resource list --all --mode free  ·  distflow resource list --live",
)
def list_resources(
    pool: Annotated[
        list[str] | None, typer.Option("--pool", "-p", help="This pool, may be repeated; else the default one.")
    ] = None,
    platform: Annotated[
        list[str] | None, typer.Option("--platform", help="Only nodes of this platform; may be repeated.")
    ] = None,
    all_pools: Annotated[bool, typer.Option("--all", "-a", help="All pools of the configuration.")] = False,
    mode: Annotated[Mode, typer.Option("--mode", "-m", help="used/total, or what is free.")] = Mode.USED,
    live: Annotated[bool, typer.Option("--live", help="Ask the nodes who holds what of them, whoever that is.")] = False,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """List nodes with what they have, and what distflow's own unfinished workflows use of it.

    Nothing is reached: capacities are those of the configuration (`distflow pool check` asks the nodes), use is that of this
    user's workflows in the state directory. With `--live` the nodes are asked, too: which attempts of all users of distflow
    hold GPUs, CPUs, memory and ports there, and who else computes on a GPU.
    """
    if pool and all_pools:
        raise InputError("--pool and --all exclude each other")
    with open_client() as client:
        rows = list_nodes(client, pool or (), all_pools=all_pools, platforms=platform or (), hosts=client.hosts(hostfile))
        ids = workflow_ids(client) if live else {}
    held = []
    if live:
        # Without --live, this module is not needed.
        from distflow.client.nodes import ask_resource_holders

        held = ask_resource_holders([(row.pool, row.node) for row in rows])
    if format_type is Format.JSON:
        shown = [_json(row) for row in rows]
        if live:
            from distflow.cli.render.resource_holders import holders_json

            shown = [one | holders_json(some, ids) for one, some in zip(shown, held, strict=True)]
        print(json.dumps({"resources": shown}, indent=2))
    else:
        print(_text(rows, mode), end="")
        if live:
            from distflow.cli.render.resource_holders import holders_text

            print("\n" + holders_text(list(zip(rows, held, strict=True)), ids), end="")
        else:
            print(WHAT_USED_MEANS, file=sys.stderr)
    if any(one.error for one in held):
        raise typer.Exit(NodeError.exit_code)


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
    with open_client() as client:
        rows = find_node(client, node, pool=pool, platform=platform, hosts=client.hosts(hostfile))
    if format_type is Format.JSON:
        print(json.dumps({"resources": [_json(row) | {"config_fields": _settings(row)} for row in rows]}, indent=2))
        return
    print("\n".join(_info(row) for row in rows), end="")
    print(WHAT_USED_MEANS, file=sys.stderr)


def _settings(row: NodeUsage) -> dict[str, object]:
    node = row.node
    return {
        "host": node.host, "port": node.port, "user": node.user, "address": node.address, "root": node.root,
        "python": node.python, "setup": node.setup, "environment": sorted(node.environment),
    }  # fmt: skip


def _info(row: NodeUsage) -> str:
    """Return the settings and usage of a node, one per line, without the values of environment variables (possibly secret)."""
    cpu, memory, gpu = amount_cells(row.amounts, Mode.USED)
    shown: dict[str, object] = {
        "Node": row.node.name, "Pool": row.pool.name, "Platform": row.node.platform, "Backend": row.pool.backend,
        "CPU [#]": cpu, "Memory [Gi]": memory, "GPU [#]": gpu,
        "Labels": " ".join(f"{key}={value}" for key, value in row.node.labels.items()),
    }  # fmt: skip
    shown |= {name.capitalize(): value for name, value in _settings(row).items()}
    shown["Environment"] = " ".join(sorted(row.node.environment))
    shown["Tasks"] = " ".join(name for name, _ in row.held)
    return "".join(f"{name + ':':13}{value or '-'}\n" for name, value in shown.items())


def _text(rows: Sequence[NodeUsage], mode: Mode) -> str:
    cells = [
        (row.node.name, row.pool.name, row.node.platform or "", *amount_cells(row.amounts, mode), str(len(row.held)))
        for row in rows
    ]
    total = [
        (sum(row.amounts[column][0] for row in rows), total_of([row.amounts[column][1] for row in rows])) for column in range(3)
    ]
    cells.append(("Sum", "", "", *amount_cells(total, mode), str(sum(len(row.held) for row in rows))))
    return table(("Node", "Pool", "Platform", "CPU [#]", "Memory [Gi]", "GPU [#]", "Tasks"), cells)


def _json(row: NodeUsage) -> dict[str, object]:
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
