"""``distflow pool``."""

from __future__ import annotations

import json
from dataclasses import replace

import typer

from distflow.cli import wiring
from distflow.cli.command import Format, FormatOption, HostfileOption
from distflow.cli.tables import table
from distflow.pools.choose import choose_pool
from distflow.pools.model import Configuration, Node

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)


@app.callback()
def _pool() -> None:
    """Show the pools that workflows can run in."""


@app.command("list", epilog="Examples: distflow pool list  ·  distflow pool list --hostfile hosts.txt")
def list_pools(hostfile: HostfileOption = None, format_type: FormatOption = Format.TEXT) -> None:
    """List the pools of the configuration and their nodes."""
    configuration, hosts = wiring.configuration(), wiring.hosts(hostfile)
    if hosts is not None:
        chosen = choose_pool(configuration, hosts=hosts)
        pools = {**configuration.pools, chosen.name: chosen}
        configuration = replace(configuration, pools=pools, default_pool=chosen.name)
    if format_type is Format.JSON:
        print(json.dumps(_as_json(configuration), indent=2))
        return
    rows = [
        (
            pool.name + (" (default)" if pool.name == configuration.default_pool else ""),
            pool.backend,
            node.name,
            _count(node.gpus),
            _count(node.cpus),
            "-" if node.memory is None else f"{node.memory / 2**30:.0f} GiB",
            node.platform or "-",
        )
        for pool in configuration.pools.values()
        for node in pool.nodes
    ]
    print(table(("Pool", "Backend", "Node", "GPUs", "CPUs", "Memory", "Platform"), rows), end="")


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _as_json(configuration: Configuration) -> dict[str, object]:
    return {
        "file": configuration.file,
        "default_pool": configuration.default_pool,
        "pools": [
            {"name": pool.name, "backend": pool.backend, "nodes": [_node_json(node) for node in pool.nodes]}
            for pool in configuration.pools.values()
        ],
    }


def _node_json(node: Node) -> dict[str, object]:
    return {
        "name": node.name,
        "host": node.host,
        "address": node.address,
        "root": node.root,
        "python": node.python,
        "gpus": node.gpus,
        "cpus": node.cpus,
        "memory": node.memory,
        "platform": node.platform,
        "labels": dict(node.labels),
    }
