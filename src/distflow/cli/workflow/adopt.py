"""``distflow workflow adopt``."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from distflow.cli.context import open_client
from distflow.cli.options import Format, FormatOption, HostfileOption, PoolOption, command_app
from distflow.client.adoption import Adoption, adopt
from distflow.documents.text import plain
from distflow.errors import NodeError

__all__ = ["app"]

app = command_app()


@app.command("adopt", epilog="Examples: distflow workflow adopt --dry-run  ·  distflow workflow adopt --pool lab")
def adopt_workflows(
    pool: PoolOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be adopted, change nothing.")] = False,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust-records",
            help="Also take in unsigned records whose outputs go to files of this machine or over SFTP.",
        ),
    ] = False,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Take in workflows that lie on the nodes and that the store does not know: from another machine, or of a lost store.

    They are watched from then on, and can be looked at and canceled; nothing of them is started from here. A record that this
    machine did not sign is not taken in when its outputs are files of this machine or go over SFTP. A store that is damaged is
    kept aside first.
    """
    with open_client() as client:
        found = adopt(client, pool, hosts=client.hosts(hostfile), trust_records=trust, is_dry_run=dry_run)
    if format_type is Format.JSON:
        print(json.dumps(_json(found, dry_run), indent=2))
    else:
        _show(found, dry_run)
    failed = [one for one in found.nodes if one.error]
    if failed and format_type is Format.JSON:
        # The JSON document already contains the error.
        raise typer.Exit(NodeError.exit_code)
    if failed:
        raise NodeError(failed[0].node, failed[0].error.removeprefix(f"{failed[0].node}: "))


def _show(found: Adoption, dry_run: bool) -> None:
    if (aside := found.kept_aside) is not None:
        text = f"{aside} is damaged and would be kept aside" if dry_run else f"the damaged store is kept as {aside}"
        print(text, file=sys.stderr)
    for one in found.workflows:
        if one.skipped:
            print(f"{plain(one.name)}: not adopted: {plain(one.skipped)}")
            continue
        print(f"{plain(one.name)}: {'would be adopted' if dry_run else 'adopted'}")
        for note in one.notes:
            print(f"  {plain(note)}")
    if not found.workflows:
        print("the nodes hold nothing that the store does not know")


def _json(found: Adoption, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "kept_aside": None if found.kept_aside is None else str(found.kept_aside),
        "workflows": [
            {
                "name": one.name,
                "uuid": one.uuid,
                "adopted": not one.skipped,
                "why": one.skipped or None,
                "notes": list(one.notes),
            }
            for one in found.workflows
        ],
        "nodes": [{"node": one.node, "error": one.error or None} for one in found.nodes],
    }
