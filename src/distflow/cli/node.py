"""``distflow node``: clean up the files and processes of distflow on nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from distflow.cli.context import open_client
from distflow.cli.options import Format, FormatOption, HostfileOption, NodesOption, PoolOption, command_app, pool_check_command
from distflow.cli.render.tables import print_further_errors, table, terminal_width
from distflow.client.nodes import (
    Cleaned,
    Leftover,
    PoolNode,
    Reaped,
    Uninstalled,
    choose_nodes,
    clean_nodes,
    reap_jobs,
    reap_nodes,
    replace_uuids,
    uninstall_nodes,
)
from distflow.client.workflows import workflow_ids
from distflow.documents.json_keys import name_keys
from distflow.documents.quantities import bytes_text, count_text, duration_hms, parse_duration
from distflow.documents.text import few, plain
from distflow.errors import DistflowError, InputError, InvalidValue, NodeError

__all__ = [
    "app",
    "clean",
    "reap",
    "uninstall",
]

app = command_app(no_args_is_help=True)


@app.callback()
def _node() -> None:
    """Remove leftover processes and files from nodes."""


def clean(
    pool: PoolOption = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            metavar="DURATION",
            help="Only workflows whose files did not change for at least this long. Default: the pool's `retention`.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, without removing it.")] = False,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Remove logs, outputs and files of ended workflows from nodes.

    A workflow is kept if it is unfinished in your state directory, or if it runs on the node. Copies of logs on this machine
    stay. Python environments that were unused for at least --older-than are removed, too.
    """
    age_s = _seconds(older_than) if older_than is not None else None
    with open_client() as client:
        nodes = choose_nodes(client, pool, hosts=client.hosts(hostfile), must_exist=True)
        results = clean_nodes(client, nodes, older_than_s=age_s, is_dry_run=dry_run)
    _show_cleaned(results, dry_run, format_type)
    _raise_first(nodes, [result.error for result in results], hostfile, format_type)


def _raise_first(
    nodes: Sequence[PoolNode],
    errors: Sequence[str],
    hostfile: str | None,
    format_type: Format,
    *,
    remedy: str = "to check the node",
) -> None:
    """Raise the first error of some nodes, with a hint of ``remedy`` and the command that checks the node.

    With JSON, only exit, because the document already contains the error.
    """
    failed = next(((pool, node, error) for (pool, node), error in zip(nodes, errors, strict=True) if error), None)
    if failed is None:
        return
    if format_type is Format.JSON:
        raise typer.Exit(NodeError.exit_code)
    pool, node, error = failed
    hint = f"{remedy}: {pool_check_command(pool.name, node.name, hostfile=hostfile)}"
    raise NodeError(node.name, error, hint=hint)


def _seconds(text: str) -> float:
    try:
        return float(parse_duration(text))
    except InvalidValue as error:
        hint = "write a whole number and one unit, such as `12h` or `14d`"
        raise InputError(f"--older-than: {error.message}", hint=hint) from None


def _show_cleaned(results: Sequence[Cleaned], dry_run: bool, format_type: Format) -> None:
    if format_type is Format.JSON:
        rows = [
            {**name_keys(node=one.node), "removed": list(one.removed), "kept": one.kept, "freed_bytes": one.freed_bytes,
             "free_bytes": one.free_bytes, "kept_venvs": one.kept_venvs,
             "removed_venvs": [{"file": venv.file, "bytes": venv.size, "unused_s": venv.unused_s} for venv in one.venvs],
             "error": one.error or None}
            for one in results
        ]  # fmt: skip
        print(json.dumps({"dry_run": dry_run, "nodes": rows}, indent=2))
        return
    text = [
        (
            one.node,
            str(len(one.removed)),
            str(one.kept),
            f"{one.freed_bytes / 2**20:.1f} MiB",
            plain(one.error) or "-",
        )
        for one in results
    ]
    print(table(("Node", "Would remove" if dry_run else "Removed", "Kept", "Freed", "Error"), text), end="")
    verb = "would remove" if dry_run else "removed"
    for one in results:
        for venv in one.venvs:
            what = f"the Python environment of {plain(venv.file)}" if venv.file else "an incomplete Python environment"
            days = int(venv.unused_s // 86400)
            unused = count_text(days, "day") if days else duration_hms(venv.unused_s)
            print(f"{one.node}: {verb} {what} ({bytes_text(venv.size)}, unused for {unused})")
        if one.kept_venvs:
            print(f"{one.node}: kept {count_text(one.kept_venvs, 'Python environment')}")
    if dry_run and sys.stderr.isatty():
        print("Dry run: nothing was removed.", file=sys.stderr)


def reap(
    pool: PoolOption = None,
    nodes: NodesOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the leftovers, without stopping them.")] = False,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Stop orphan processes and containers of earlier attempts, and jobs of ended workflows on a cluster.

    Also record the end of attempts whose supervising processes were killed.

    Running tasks of any user are never touched. Leftovers of another root directory or user, and jobs that were submitted with
    another state directory, are listed, but not stopped. With --node, only processes and containers are stopped.
    """
    with open_client() as client:
        chosen = choose_nodes(client, pool, hosts=client.hosts(hostfile), names=nodes)
        ids = workflow_ids(client)
        jobs = reap_jobs(client, pool=pool, hosts=client.hosts(hostfile), is_dry_run=dry_run) if not nodes else []
    results = [*reap_nodes(chosen, is_dry_run=dry_run), *jobs]
    if format_type is Format.JSON:
        print(json.dumps({"dry_run": dry_run, "nodes": [_reaped_json(one) for one in results]}, indent=2))
    else:
        _show_reaped(results, len(chosen), dry_run, ids)
    commands = [pool_check_command(one.name, node.name, hostfile=hostfile) for one, node in chosen]
    commands += [pool_check_command(one.node) for one in jobs]
    error = _first_error(results, commands, ids)
    if error is None:
        return
    if format_type is Format.JSON:
        # The JSON document already contains the error.
        raise typer.Exit(error.exit_code)
    raise error


def _first_error(results: Sequence[Reaped], commands: Sequence[str], ids: Mapping[str, str]) -> DistflowError | None:
    """Return the first error of a node or pool, or else of a leftover, or ``None``.

    ``commands`` has the command that checks the node or pool of each result.
    """
    for one, command in zip(results, commands, strict=True):
        if one.error:
            return NodeError(one.node, replace_uuids(one.error, ids), hint=f"details: {command}")
    for one in results:
        for left in one.found:
            if left.error:
                what = left.name if left.pid is None else f"{left.name} (pid {left.pid})"
                return NodeError(one.node, f"{what} remains: {replace_uuids(left.error, ids)}")
    return None


def _show_reaped(results: Sequence[Reaped], node_count: int, dry_run: bool, ids: Mapping[str, str]) -> None:
    """Print the leftovers. The first ``node_count`` results are about nodes, and the others about the jobs of pools."""
    rows = [_reaped_row(one.node, left, dry_run, ids) for one in results for left in one.found]
    if rows:
        header = ("Node", "Pid", "Name", "Age", "GPUs", "Task", "Done", "Why")
        print(table(header, rows, width=terminal_width(sys.stdout)), end="")
    for one in results:
        if one.settled:
            verb = "would be recorded" if dry_run else "is now recorded"
            names = plain(replace_uuids(", ".join(one.settled), ids))
            print(f"{one.node}: the end of {len(one.settled)} attempt{'s' * (len(one.settled) > 1)} {verb}: {names}")
    print_further_errors((one.node, replace_uuids(one.error, ids)) for one in results)
    counts = (("node", results[:node_count]), ("pool", results[node_count:]))
    reached = [count_text(n, noun) for noun, some in counts if (n := sum(not one.error for one in some))]
    if not rows and reached:
        print(f"no leftovers on {' and '.join(reached)}")
    elif dry_run and reached:
        print("Dry run: nothing was stopped.", file=sys.stderr)


def _reaped_row(node: str, left: Leftover, dry_run: bool, ids: Mapping[str, str]) -> tuple[str, ...]:
    done = "skipped" if not left.is_ours else "would stop" if dry_run else "still running" if left.error else "stopped"
    return (
        node,
        "-" if left.pid is None else str(left.pid),
        plain(left.name),
        "-" if left.age_s is None else duration_hms(left.age_s),
        ",".join(str(gpu) for gpu in left.gpus),
        plain(replace_uuids(left.attempt, ids)),
        done,
        plain(replace_uuids(left.error or left.why, ids)),
    )


def _reaped_json(one: Reaped) -> dict[str, object]:
    return {
        **name_keys(node=one.node),
        "found": [
            {"pid": left.pid, "name": left.name, "user": left.user or None, "attempt": left.attempt, "age_s": left.age_s,
             "gpus": list(left.gpus), "why": left.why, "is_ours": left.is_ours, "error": left.error or None}
            for left in one.found
        ],
        "settled": list(one.settled),
        "error": one.error or None,
    }  # fmt: skip


def uninstall(
    pool: PoolOption = None,
    nodes: NodesOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Remove distflow and all its files from nodes.

    This includes outputs and logs of tasks. Nothing is removed from a node with a running task. Other files in
    `distflow-node` are listed and kept. Your own files next to that directory are kept, too.
    """
    with open_client() as client:
        chosen = choose_nodes(client, pool, hosts=client.hosts(hostfile), names=nodes, must_exist=True)
        if not yes:
            _confirm(chosen)
        results = uninstall_nodes(client, chosen)
    if format_type is Format.JSON:
        rows = [
            {**name_keys(node=one.node), "removed": list(one.removed), "left": list(one.left), "error": one.error or None}
            for one in results
        ]
        print(json.dumps({"nodes": rows}, indent=2))
    else:
        _show_uninstalled(results)
    remedy = "cancel the tasks that run there, or check the node"
    _raise_first(chosen, [one.error for one in results], hostfile, format_type, remedy=remedy)


def _confirm(nodes: Sequence[PoolNode]) -> None:
    names = few([f"{node.name} ({node.root})" for _, node in nodes])
    if not sys.stdin.isatty():
        raise InputError(
            f"removing distflow and all outputs of its tasks from {names} needs a confirmation", hint="add --yes to confirm"
        )
    print(f"This removes distflow and all outputs of its tasks from {names}.", file=sys.stderr)
    print("Continue? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        print("Nothing was removed.", file=sys.stderr)
        raise typer.Exit(0)


def _show_uninstalled(results: Sequence[Uninstalled]) -> None:
    for one in results:
        if one.error:
            continue
        incomplete = "removed, except:" if one.removed else "nothing could be removed:"
        print(f"{one.node}: {incomplete if one.left else 'removed'}")
        for left in one.left:
            print(f"  {plain(left)}")
    print_further_errors((one.node, one.error) for one in results)


app.command(epilog="Examples: distflow node reap --dry-run  ·  distflow node reap --pool lab --node gpu2")(reap)
app.command(epilog="Examples: distflow node uninstall --pool lab  ·  distflow node uninstall --node gpu2 --yes")(uninstall)
app.command(epilog="Examples: distflow node clean --dry-run  ·  distflow node clean --older-than 2d")(clean)
