"""Pools and their nodes: ``distflow pool``, ``resource`` and ``profile``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from distflow.cli.completion import complete_credential, complete_node, complete_pool
from distflow.cli.context import open_client
from distflow.cli.node_options import EnvOption, PythonOption, SetupOption, VenvOption, parse_node_settings
from distflow.cli.options import Format, FormatOption, HostfileOption, NodesOption, command_app
from distflow.cli.render.nodes import USAGE_NOTE, Mode, amount_cells, total_of
from distflow.cli.render.tables import Paint, table
from distflow.client.client import user_name
from distflow.client.pools import (
    NodeUsage,
    UsageByNode,
    check_pool,
    find_node,
    list_nodes,
    list_pools,
    prefer_pool,
    usage_by_node,
)
from distflow.client.workflows import workflow_ids
from distflow.documents.text import did_you_mean
from distflow.errors import InputError, NodeError
from distflow.pools.model import Configuration, Node, Pool

if TYPE_CHECKING:
    from distflow.client.nodes import Holders

__all__ = ["pool_app", "pools_document", "profile_app", "resource_app", "resources_document"]


pool_app = command_app(no_args_is_help=True)


@pool_app.callback()
def _pool() -> None:
    """List pools, and check their nodes."""


@pool_app.command(
    "list", epilog="Examples: distflow pool list  ·  distflow pool list -p lab  ·  distflow pool list --hostfile hosts.txt"
)
def list_command(
    pool: Annotated[
        list[str] | None,
        typer.Option("--pool", "-p", help="Only this pool; may be repeated.", autocompletion=complete_pool),
    ] = None,
    mode: Annotated[Mode, typer.Option("--mode", "-m", help="Show used/total amounts, or free amounts.")] = Mode.USED,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """List pools and nodes with their resources.

    The amounts come from the configuration, and usage from this user's workflows. No node is contacted: for the actual holders
    of resources, use `distflow resource list --live`.
    """
    with open_client() as client:
        configuration = list_pools(client, pool or (), hosts=client.hosts(hostfile))
        held = usage_by_node(client)
    if format_type is Format.JSON:
        print(json.dumps(pools_document(configuration, held), indent=2))
        return
    rows = []
    for one in configuration.pools.values():
        name = f"{one.name}{' (default)' if one.name == configuration.default_pool else ''}"
        if one.is_allocated:
            rows.append((name, one.backend, f"(chosen by {one.backend})", "-", "-", "-", "-"))
        for node in one.nodes:
            cpus, memory, gpus = amount_cells(_usage(one, node, held).amounts, mode)
            rows.append((name, one.backend, node.name, gpus, cpus, memory, node.platform or "-"))
    print(table(("Pool", "Backend", "Node", "GPUs", "CPUs", "Memory [Gi]", "Platform"), rows), end="")


@pool_app.command(
    epilog="Examples: distflow pool check  ·  distflow pool check --hostfile hosts.txt  ·  distflow pool check --all-reduce"
    "  ·  distflow pool check --path /data/train"
)
def check(
    pool: Annotated[
        str | None,
        typer.Option("--pool", "-p", help="The pool to check. Default: the default pool.", autocompletion=complete_pool),
    ] = None,
    node: NodesOption = None,
    all_reduce: Annotated[
        bool, typer.Option("--all-reduce", help="Also run an all-reduce with torch, and show its bandwidth (about 10 s more).")
    ] = False,
    path: Annotated[
        list[str] | None,
        typer.Option("--path", help="Check that this path has the same file names and sizes on all nodes; may be repeated."),
    ] = None,
    hostfile: HostfileOption = None,
    python: PythonOption = None,
    setup: SetupOption = None,
    env: EnvOption = None,
    venv: VenvOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Check whether a gang can run on the nodes of a pool.

    The check logs in to each node, inspects its Python, disks, clock and GPUs, and tests connections between all pairs of
    nodes. It starts no task and reserves no GPU. If Slurm, Kubernetes or Ray chooses the nodes of a pool, the command
    checks the pool's settings with that system instead. The exit code is 3 unless a gang can run on all checked nodes
    together.
    """
    # These modules are imported here, because other commands do not need them.
    from distflow.cli.render.nodes import check_json, check_text
    from distflow.cli.render.terminal import BottomLine

    settings = parse_node_settings(python, setup, env, venv)
    bottom = BottomLine(sys.stderr)
    with open_client() as client:
        try:
            found = check_pool(
                client, pool, node or (), hosts=client.hosts(hostfile), settings=settings, all_reduce=all_reduce,
                paths=path or (), on_progress=lambda text: bottom.show(f"{text} …"),
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


def pools_document(configuration: Configuration, held: UsageByNode) -> dict[str, object]:
    """Return the JSON document of ``pool list``."""
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
        "node_name": node.name,
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


resource_app = command_app(no_args_is_help=True)


@resource_app.callback()
def _resource() -> None:
    """Show the total and used resources of nodes."""


@resource_app.command(
    "list",
    epilog="Examples: distflow resource list  ·  distflow resource list --all --mode free  ·  distflow resource list --live",
)
def list_resources(
    pool: Annotated[
        list[str] | None,
        typer.Option(
            "--pool",
            "-p",
            help="Only this pool; may be repeated. Default: the default pool.",
            autocompletion=complete_pool,
        ),
    ] = None,
    platform: Annotated[
        list[str] | None, typer.Option("--platform", help="Only nodes of this platform; may be repeated.")
    ] = None,
    all_pools: Annotated[bool, typer.Option("--all", "-a", help="List the nodes of all pools.")] = False,
    mode: Annotated[Mode, typer.Option("--mode", "-m", help="Show used/total amounts, or free amounts.")] = Mode.USED,
    live: Annotated[bool, typer.Option("--live", help="Also show users and processes that hold resources now.")] = False,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """List nodes with their total and used resources.

    Totals come from the configuration, and usage from this user's unfinished workflows. With `--live`, the nodes also report
    the attempts of all users that hold GPUs, CPUs, memory or ports, and other processes that use a GPU.
    """
    if pool and all_pools:
        raise InputError("--pool and --all cannot be combined")
    with open_client() as client:
        rows = list_nodes(client, pool or (), all_pools=all_pools, platforms=platform or (), hosts=client.hosts(hostfile))
        ids = workflow_ids(client) if live else {}
    held = []
    if live:
        # Without --live, this module is not needed.
        from distflow.client.nodes import ask_resource_holders

        held = ask_resource_holders([(row.pool, row.node) for row in rows])
    if format_type is Format.JSON:
        print(json.dumps(resources_document(rows, held, ids), indent=2))
    else:
        print(_resources_text(rows, mode), end="")
        if live:
            from distflow.cli.render.nodes import holders_text

            print("\n" + holders_text(list(zip(rows, held, strict=True)), ids), end="")
        else:
            print(USAGE_NOTE, file=sys.stderr)
    if any(one.error for one in held):
        raise typer.Exit(NodeError.exit_code)


@resource_app.command("info", epilog="Examples: distflow resource info gpu1  ·  distflow resource info gpu1 --pool lab -t json")
def resource_info(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The name of the node.", autocompletion=complete_node)],
    pool: Annotated[str | None, typer.Option("--pool", "-p", help="Only this pool.", autocompletion=complete_pool)] = None,
    platform: Annotated[str | None, typer.Option("--platform", "-pl", help="Only nodes of this platform.")] = None,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Show the configuration of a node and its usage by this user.

    A node that is in several pools is shown once for each. The node is not contacted: for that, use `distflow pool check`.
    """
    with open_client() as client:
        rows = find_node(client, node, pool=pool, platform=platform, hosts=client.hosts(hostfile))
    if format_type is Format.JSON:
        print(json.dumps({"resources": [_resource_json(row) | {"config_fields": _settings(row)} for row in rows]}, indent=2))
        return
    print("\n".join(_resource_text(row) for row in rows), end="")
    print(USAGE_NOTE, file=sys.stderr)


def _settings(row: NodeUsage) -> dict[str, object]:
    node = row.node
    return {
        "host": node.host, "port": node.port, "user": node.user, "address": node.address, "root": node.root,
        "python": node.python, "setup": node.setup, "environment": sorted(node.environment),
    }  # fmt: skip


def _resource_text(row: NodeUsage) -> str:
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


def _resources_text(rows: Sequence[NodeUsage], mode: Mode) -> str:
    cells = [
        (row.node.name, row.pool.name, row.node.platform or "", *amount_cells(row.amounts, mode), str(len(row.held)))
        for row in rows
    ]
    total = [
        (sum(row.amounts[column][0] for row in rows), total_of([row.amounts[column][1] for row in rows])) for column in range(3)
    ]
    cells.append(("Sum", "", "", *amount_cells(total, mode), str(sum(len(row.held) for row in rows))))
    return table(("Node", "Pool", "Platform", "CPU [#]", "Memory [Gi]", "GPU [#]", "Tasks"), cells)


def _resource_json(row: NodeUsage) -> dict[str, object]:
    (cpu, cpus), (memory, memories), (gpu, gpus) = row.amounts
    return {
        "hostname": row.node.name,
        "node_name": row.node.name,
        "backend": row.pool.backend,
        "resource_type": "SHARED",
        "pool_platform_labels": {row.pool.name: [row.node.platform] if row.node.platform else []},
        "allocatable_fields": {"cpu": cpus, "memory": memories, "gpu": gpus},
        "usage_fields": {"cpu": cpu, "memory": memory, "gpu": gpu},
        "label_fields": dict(row.node.labels),
        "tasks": [name for name, _ in row.held],
    }


def resources_document(rows: Sequence[NodeUsage], held: Sequence[Holders], ids: Mapping[str, str]) -> dict[str, object]:
    """Return the JSON document of ``resource list``.

    Args:
        rows: The nodes.
        held: The holders of each node's resources, or an empty sequence if the nodes were not contacted.
        ids: The id of each workflow in the store, by its uuid.

    """
    shown = [_resource_json(row) for row in rows]
    if held:
        from distflow.cli.render.nodes import holders_json

        shown = [one | holders_json(some, ids) for one, some in zip(shown, held, strict=True)]
    return {"resources": shown}


profile_app = command_app(no_args_is_help=True)

_KEYS = ("pool", "notify")
_OSMO_NOTIFICATIONS = (
    "the setting is `notify`. Name the credential that has the webhook or the address: distflow profile set notify NAME. "
    "To remove it: distflow profile unset notify"
)
_KeyArgument = Annotated[
    str, typer.Argument(metavar="KEY", help="The setting: pool or notify.", autocompletion=lambda: list(_KEYS))
]


def _complete_value(ctx: typer.Context, incomplete: str) -> list[str]:
    complete = complete_credential if ctx.params.get("key") == "notify" else complete_pool
    return complete(ctx, incomplete)


@profile_app.callback()
def _profile() -> None:
    """Set your default pool and notifications."""


@profile_app.command(
    "set",
    epilog="Examples: distflow profile set pool lab  ·  distflow profile set notify team-slack"
    "  ·  distflow profile set notify '{credential: team-slack, on: [failed, waiting], after: 1h}'",
)
def set_preference(
    key: _KeyArgument,
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="VALUE", help="A pool, or targets of notifications.", autocompletion=_complete_value),
    ] = None,
) -> None:
    """Set this user's default pool or notifications on this machine.

    The default pool is used if neither --pool nor the spec names a pool. It takes precedence over `default_pool` in the
    configuration, if the configuration has a pool of this name.

    `notify` replaces the targets in your profile. distflow notifies them of each workflow that you submit. It also notifies the
    targets in the configuration and the spec. A target is the name of a credential whose value is a URL, or an entry of
    `notify` in YAML, as in the configuration.
    """
    _check_key(key)
    if key == "notify":
        if not values:
            hint = "`distflow credential list` shows the credentials; `distflow profile unset notify` removes all targets"
            raise InputError("`distflow profile set notify` needs at least one target", hint=hint)
        from distflow.client.notifications.targets import set_profile_notify

        with open_client() as client:
            targets = set_profile_notify(client, values)
        print(f"Set notify to {', '.join(target.label for target in targets)}. To test it: distflow notify test")
        return
    if values is None or len(values) != 1:
        raise InputError("`distflow profile set pool` needs the name of one pool", hint="`distflow pool list` shows the pools")
    with open_client() as client:
        prefer_pool(client, values[0])
    print(f"Set pool to {values[0]}.")


@profile_app.command("unset", epilog="Examples: distflow profile unset pool  ·  distflow profile unset notify")
def unset_preference(key: _KeyArgument) -> None:
    """Remove a setting from the profile.

    After `unset pool`, commands use the default pool of the configuration again. After `unset notify`, distflow notifies only
    the targets of the configuration and of specs.
    """
    _check_key(key)
    with open_client() as client:
        if key == "notify":
            from distflow.client.notifications.targets import set_profile_notify

            set_profile_notify(client, ())
        else:
            prefer_pool(client, None)
    print(f"Unset {key}.")


@profile_app.command("list", epilog="Example: distflow profile list -t json")
def list_preferences(format_type: FormatOption = Format.TEXT) -> None:
    """Show the default pool, all pools, and the targets of your notifications."""
    with open_client() as client:
        preferred, configuration = client.preferred_pool(), client.configuration()
        notify = [target.label for target in client.profile_notify()]
    pools = list(configuration.pools)
    if format_type is Format.JSON:
        profile = {
            "username": user_name(),
            "email_notification": False,
            "slack_notification": False,
            "pool": configuration.default_pool,
            "notify": notify,
        }
        print(json.dumps({"profile": profile, "pools": pools, "roles": []}, indent=2))
        return
    source = "your profile" if preferred == configuration.default_pool else configuration.file or "built in"
    print(f"User:  {user_name()}\nPool:  {configuration.default_pool} ({source})\nPools: {', '.join(pools)}")
    if notify:
        print(f"Notify: {', '.join(notify)}")


def _check_key(key: str) -> None:
    if key == "notifications":
        raise InputError("`notifications` is not a setting of the profile", hint=_OSMO_NOTIFICATIONS)
    if key not in _KEYS:
        raise InputError(f"`{key}` is not a setting of the profile", hint=did_you_mean(key, _KEYS, what="settings"))
