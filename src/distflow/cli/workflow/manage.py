"""Change stored workflows: ``distflow workflow cancel``, ``tag`` and ``adopt``."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from distflow.cli.context import complete_workflow, open_client
from distflow.cli.options import Format, FormatOption, HostfileOption, PoolOption, command_app
from distflow.cli.render.tables import table
from distflow.cli.render.workflow_text import cancel_json, cancel_words, left_behind
from distflow.client.client import Client
from distflow.client.workflows import Cancellation, cancel, change_tags, list_tags, pool_of, wait
from distflow.documents.text import plain, plain_lines
from distflow.errors import InputError, NodeError
from distflow.state.record import WorkflowRecord

if TYPE_CHECKING:
    from distflow.client.adoption import Adoption

__all__ = ["adopt_app", "cancel_app", "tag_app"]


cancel_app = command_app()


@cancel_app.command(
    "cancel", epilog="Examples: distflow workflow cancel pytorch-dist-3  ·  distflow workflow cancel a-1 b-2 -m 'wrong data'"
)
def cancel_workflows(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Workflows to end.")],
    message: Annotated[str, typer.Option("--message", "-m", help="Why; kept with the workflow.")] = "",
    force: Annotated[bool, typer.Option("--force", "-f", help="Kill at once, without the grace after TERM.")] = False,
    wait_s: Annotated[
        float | None, typer.Option("--wait", metavar="SECONDS", help="Return when nothing of it is left, or after this time.")
    ] = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """End workflows: TERM to every task, KILL after the pool's grace, and proof that nothing is left.

    Every id is tried; if one of them cannot be canceled, the exit code says so. A task whose node is unreachable is stopped as
    soon as the node answers.
    """
    with open_client() as client:
        results = cancel(client, ids, message=message, force=force)
        records = [one.record for one in results if one.record is not None]
        try:
            if format_type is Format.TEXT:
                lines = [line for one in records for line in (f"{one.id}: asked to stop", *_unreachable_words(client, one))]
                print("".join(f"{line}\n" for line in lines), end="", flush=True)
        finally:
            # Wait even if printing fails because the reader has closed the output.
            if wait_s is not None:
                ended = wait(
                    client,
                    [one.id for one in records],
                    timeout_s=wait_s,
                    on_timeout=lambda one: _unreachable_words(client, one),
                )
                for words in (words for one in ended for words in left_behind(one)):
                    print(f"warning: {plain(words)}", file=sys.stderr)
    if format_type is Format.JSON:
        print(json.dumps({"workflows": [_cancellation_json(one) for one in results]}, indent=2))
    failures = [one.error for one in results if one.error is not None]
    for failure in failures:
        print(f"error: {plain_lines(str(failure))}", file=sys.stderr)
    if failures:
        # The JSON document already contains the errors. Raising one would print a second document.
        raise typer.Exit(failures[-1].exit_code)


def _cancellation_json(one: Cancellation) -> dict[str, object]:
    if one.record is not None:
        return {"name": one.record.id, "out_of_reach": cancel_json(one.record)}
    return {"name": one.key, "error": one.error.message if one.error else None}


def _unreachable_words(client: Client, record: WorkflowRecord) -> list[str]:
    return [f"{record.id}: {line}" for line in cancel_words(record, pool_of(client, record).node_lost_after_s)]


tag_app = command_app()


@tag_app.command(
    epilog="Examples: distflow workflow tag -w pytorch-dist-3 -a baseline  ·  distflow workflow list --tags baseline"
)
def tag(
    workflow: Annotated[
        list[str] | None,
        typer.Option("--workflow", "-w", metavar="ID", help="The workflow; may be repeated.", autocompletion=complete_workflow),
    ] = None,
    add: Annotated[
        list[str] | None, typer.Option("--add", "-a", metavar="TAG", help="Put this tag on; may be repeated.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", "-r", metavar="TAG", help="Take this tag off; may be repeated.")
    ] = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Put tags on workflows and take them off, first off, then on. Without options: list the tags that there are."""
    if workflow and not (add or remove):
        raise InputError(
            "nothing is said to do with the workflow's tags", hint="put one on with --add TAG, or take it off with --remove TAG"
        )
    if not workflow and (add or remove):
        raise InputError("no workflow is named", hint="name it with --workflow ID")
    with open_client() as client:
        if not workflow:
            _show_tags(list_tags(client), format_type)
            return
        tagged = change_tags(client, workflow, add=add or (), remove=remove or ())
    if format_type is Format.JSON:
        import json

        print(json.dumps({"workflows": [{"name": name, "tags": list(tags)} for name, tags in tagged.items()]}, indent=2))
    else:
        print("".join(f"{name}: {' '.join(tags) or 'no tags'}\n" for name, tags in tagged.items()), end="")


def _show_tags(tags: dict[str, int], format_type: Format) -> None:
    if format_type is Format.JSON:
        import json

        print(json.dumps({"tags": [{"name": name, "workflows": count} for name, count in tags.items()]}, indent=2))
    elif tags:
        print(table(("Tag", "Workflows"), [(name, str(count)) for name, count in tags.items()]), end="")
    else:
        print("There are no tags yet.")


adopt_app = command_app()


@adopt_app.command("adopt", epilog="Examples: distflow workflow adopt --dry-run  ·  distflow workflow adopt --pool lab")
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
    from distflow.client.adoption import adopt  # `cancel` and `tag` do not need it

    with open_client() as client:
        found = adopt(client, pool, hosts=client.hosts(hostfile), trust_records=trust, is_dry_run=dry_run)
    if format_type is Format.JSON:
        print(json.dumps(_adoption_json(found, dry_run), indent=2))
    else:
        _show_adoption(found, dry_run)
    failed = [one for one in found.nodes if one.error]
    if failed and format_type is Format.JSON:
        # The JSON document already contains the error.
        raise typer.Exit(NodeError.exit_code)
    if failed:
        raise NodeError(failed[0].node, failed[0].error.removeprefix(f"{failed[0].node}: "))


def _show_adoption(found: Adoption, dry_run: bool) -> None:
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


def _adoption_json(found: Adoption, dry_run: bool) -> dict[str, object]:
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
