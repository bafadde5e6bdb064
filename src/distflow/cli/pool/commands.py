"""``distflow pool``."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from distflow.cli.context import open_client
from distflow.cli.options import Format, FormatOption, HostfileOption
from distflow.cli.render.amounts import Mode, amount_cells
from distflow.cli.render.tables import Paint, table
from distflow.client.pools import NodeUsage, UsageByNode, check_pool, list_pools, usage_by_node
from distflow.errors import NodeError
from distflow.pools.model import Configuration, Node, Pool

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)


@app.callback()
def _pool() -> None:
    """Show the pools that workflows can run in, and check their nodes."""


@app.command(
    "list", epilog="Examples: distflow pool list  ·  distflow pool list -p lab  ·  distflow pool list --hostfile hosts.txt"
)
def list_command(
    pool: Annotated[list[str] | None, typer.Option("--pool", "-p", help="Only this pool; may be repeated.")] = None,
    mode: Annotated[Mode, typer.Option("--mode", "-m", help="used/total, or what is free.")] = Mode.USED,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """List the pools of the configuration and their nodes, with what they have and what this user's workflows use of it.

    No node is asked; `distflow resource list --live` does, and says who holds what.
    """
    with open_client() as client:
        configuration = list_pools(client, pool or (), hosts=client.hosts(hostfile))
        held = usage_by_node(client)
    if format_type is Format.JSON:
        print(json.dumps(_as_json(configuration, held), indent=2))
        return
    rows = []
    for one in configuration.pools.values():
        for node in one.nodes:
            cpus, memory, gpus = amount_cells(_usage(one, node, held).amounts, mode)
            default = " (default)" if one.name == configuration.default_pool else ""
            rows.append((f"{one.name}{default}", one.backend, node.name, gpus, cpus, memory, node.platform or "-"))
    print(table(("Pool", "Backend", "Node", "GPUs", "CPUs", "Memory [Gi]", "Platform"), rows), end="")


@app.command(
    epilog="Examples: distflow pool check  ·  distflow pool check --hostfile hosts.txt  ·  distflow pool check --all-reduce"
    "  ·  distflow pool check --path /data/train"
)
def check(
    pool: Annotated[str | None, typer.Option("--pool", "-p", help="This pool; else the default one.")] = None,
    node: Annotated[list[str] | None, typer.Option("--node", "-n", help="Only this node; may be repeated.")] = None,
    all_reduce: Annotated[
        bool, typer.Option("--all-reduce", help="Sum over all nodes with torch, and show the bandwidth (some 10 s more).")
    ] = False,
    path: Annotated[
        list[str] | None,
        typer.Option("--path", help="Look whether this path of the nodes is there and holds the same; may be repeated."),
    ] = None,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Find out whether a gang can run on the nodes of a pool, and what to do where it cannot.

    Logs in to each node, looks at its Python, disks, clock and GPUs, and lets every node connect to every other one. Starts no
    task and holds no GPU. Exit code 3 when a gang cannot run on all of them.
    """
    # These modules are imported here, because other commands do not need them.
    from distflow.cli.render.pool_check import check_json, check_text
    from distflow.cli.render.terminal_line import BottomLine

    bottom = BottomLine(sys.stderr)
    with open_client() as client:
        try:
            found = check_pool(
                client, pool, node or (), hosts=client.hosts(hostfile), all_reduce=all_reduce, paths=path or (),
                on_progress=lambda text: bottom.show(f"checking: {text} …"),
            )  # fmt: skip
        finally:
            bottom.clear()
    if format_type is Format.JSON:
        print(json.dumps(check_json(found.pool, found.checked, found.verdict), indent=2))
    else:
        print(check_text(found.checked, found.verdict, Paint.of(sys.stdout)), end="")
    if not found.verdict.can_run:
        raise typer.Exit(NodeError.exit_code)


def _usage(pool: Pool, node: Node, held: UsageByNode) -> NodeUsage:
    return NodeUsage(pool=pool, node=node, held=held.get((pool.name, node.name), ()))


def _as_json(configuration: Configuration, held: UsageByNode) -> dict[str, object]:
    return {
        "file": configuration.file,
        "default_pool": configuration.default_pool,
        "pools": [
            {"name": pool.name, "backend": pool.backend, "nodes": [_node_json(_usage(pool, node, held)) for node in pool.nodes]}
            for pool in configuration.pools.values()
        ],
    }


def _node_json(usage: NodeUsage) -> dict[str, object]:
    node, (cpu, memory, gpu) = usage.node, (used for used, _ in usage.amounts)
    return {
        "name": node.name,
        "host": node.host,
        "port": node.port,
        "user": node.user,
        "address": node.address,
        "root": node.root,
        "python": node.python,
        "gpus": node.gpus,
        "cpus": node.cpus,
        "memory": node.memory,
        "platform": node.platform,
        "labels": dict(node.labels),
        "usage_fields": {"cpu": cpu, "memory": memory, "gpu": gpu},
    }
