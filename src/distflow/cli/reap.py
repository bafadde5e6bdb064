"""``distflow node reap``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from distflow.cli.command import Format, FormatOption, HostfileOption
from distflow.cli.opening import open_client
from distflow.cli.tables import table, terminal_width
from distflow.client.nodes import Leftover, Reaped, choose_nodes, reap_nodes, replace_uuids
from distflow.client.workflows import workflow_ids
from distflow.documents.printable import plain
from distflow.documents.times import duration
from distflow.errors import DistflowError, NodeError

__all__ = ["NodesOption", "PoolOption", "reap"]

PoolOption = Annotated[str | None, typer.Option("--pool", "-p", help="Only this pool; else all of the configuration.")]
NodesOption = Annotated[
    list[str] | None, typer.Option("--node", "-n", help="Only this node; may be given several times.", show_default=False)
]


def reap(
    pool: PoolOption = None,
    nodes: NodesOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Name what is left, stop nothing.")] = False,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Find and stop what earlier attempts left on the nodes: processes and containers that nobody watches any more.

    A task that runs is never touched, whoever submitted it; what belongs to another root or user is named, and left alone.
    """
    with open_client() as client:
        chosen = choose_nodes(client, pool, hosts=client.hosts(hostfile), names=nodes)
        ids = workflow_ids(client)
    results = reap_nodes(chosen, is_dry_run=dry_run)
    if format_type is Format.JSON:
        print(json.dumps({"dry_run": dry_run, "nodes": [_json(one) for one in results]}, indent=2))
    else:
        _show(results, dry_run, ids)
    error = _worst(results, ids)
    if error is None:
        return
    if format_type is Format.JSON:
        # The document has said it all.
        raise typer.Exit(error.exit_code)
    raise error


def _worst(results: Sequence[Reaped], ids: Mapping[str, str]) -> DistflowError | None:
    for one in results:
        if one.error:
            return NodeError(one.node, replace_uuids(one.error.removeprefix(f"{one.node}: "), ids))
    for one in results:
        for left in one.found:
            if left.error:
                what = left.name if left.pid is None else f"{left.name} (pid {left.pid})"
                return NodeError(one.node, f"{what} is still there: {replace_uuids(left.error, ids)}")
    return None


def _show(results: Sequence[Reaped], dry_run: bool, ids: Mapping[str, str]) -> None:
    rows = [_row(one.node, left, dry_run, ids) for one in results for left in one.found]
    if rows:
        header = ("Node", "Pid", "Name", "Age", "GPUs", "Task", "Done", "Why")
        print(table(header, rows, width=terminal_width(sys.stdout)), end="")
    for one in results:
        if one.settled:
            verb = "would be recorded" if dry_run else "is recorded now"
            names = plain(replace_uuids(", ".join(one.settled), ids))
            print(f"{one.node}: the end of {len(one.settled)} that nobody watched {verb}: {names}")
    reached = sum(1 for one in results if not one.error)
    if not rows and reached:
        print(f"nothing is left on {reached} node{'s' if reached > 1 else ''}")
    elif dry_run and reached:
        print("nothing was stopped: this was a dry run", file=sys.stderr)


def _row(node: str, left: Leftover, dry_run: bool, ids: Mapping[str, str]) -> tuple[str, ...]:
    done = "left alone" if not left.is_ours else "would stop" if dry_run else "still there" if left.error else "stopped"
    return (
        node,
        "-" if left.pid is None else str(left.pid),
        plain(left.name),
        "-" if left.age_s is None else duration(left.age_s),
        ",".join(str(gpu) for gpu in left.gpus),
        plain(replace_uuids(left.attempt, ids)),
        done,
        plain(replace_uuids(left.error or left.why, ids)),
    )


def _json(one: Reaped) -> dict[str, object]:
    return {
        "node": one.node,
        "found": [
            {"pid": left.pid, "name": left.name, "user": left.user or None, "attempt": left.attempt, "age_s": left.age_s,
             "gpus": list(left.gpus), "why": left.why, "is_ours": left.is_ours, "error": left.error or None}
            for left in one.found
        ],
        "settled": list(one.settled),
        "error": one.error or None,
    }  # fmt: skip
