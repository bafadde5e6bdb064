"""Change stored workflows: ``distflow workflow cancel``, ``tag`` and ``adopt``."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from distflow.cli.completion import complete_tag, complete_workflow
from distflow.cli.context import WorkflowsArgument, open_client
from distflow.cli.options import Format, FormatOption, HostfileOption, PoolOption, command_app, pool_check_command
from distflow.cli.render.tables import print_further_errors, print_notice, table
from distflow.cli.render.workflow_json import workflow_key
from distflow.cli.render.workflow_text import cancel_json, cancel_words, left_behind
from distflow.client.client import Client
from distflow.client.workflows import Cancellation, cancel, change_tags, list_tags, pool_of, wait
from distflow.documents.json_keys import name_keys
from distflow.documents.text import plain
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
    ids: WorkflowsArgument,
    message: Annotated[str, typer.Option("--message", "-m", help="A reason, which is stored with the workflow.")] = "",
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Kill tasks immediately, without a grace period after SIGTERM.")
    ] = False,
    wait_s: Annotated[
        float | None,
        typer.Option(
            "--wait",
            metavar="SECONDS",
            help="Wait until the workflows have ended. Exit with 3 if one has not ended after this time.",
        ),
    ] = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Cancel workflows.

    Each task gets SIGTERM, and SIGKILL after the pool's grace period. distflow then checks that no process is left. A task on
    an unreachable node is stopped as soon as the node responds. If one workflow cannot be canceled, the others are canceled
    anyway, and the exit code is not 0.
    """
    with open_client() as client:
        results = cancel(client, ids, message=message, force=force)
        records = [one.record for one in results if one.record is not None]
        failures = [one.error for one in results if one.error is not None]
        try:
            if format_type is Format.TEXT:
                lines = [line for one in records for line in (f"{one.id}: canceling", *_unreachable_words(client, one))]
                print("".join(f"{line}\n" for line in lines), end="", flush=True)
        finally:
            for failure in failures:
                print_notice(f"error: {failure}")
            # Wait even if printing fails because the reader has closed the output.
            if wait_s is not None:
                ended = wait(
                    client,
                    [one.id for one in records],
                    timeout_s=wait_s,
                    on_timeout=lambda one: _unreachable_words(client, one),
                )
                for words in (words for one in ended for words in left_behind(one)):
                    print_notice(f"warning: {words}")
    if format_type is Format.JSON:
        print(json.dumps({"workflows": [_cancellation_json(one) for one in results]}, indent=2))
    if failures:
        # The JSON document already contains the errors. Raising an error would print a second document.
        raise typer.Exit(failures[-1].exit_code)


def _cancellation_json(one: Cancellation) -> dict[str, object]:
    if one.record is not None:
        return {"name": one.record.id, **workflow_key(one.record), "out_of_reach": cancel_json(one.record)}
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
        typer.Option(
            "--workflow", "-w", metavar="ID", help="The id of a workflow; may be repeated.", autocompletion=complete_workflow
        ),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option("--add", "-a", metavar="TAG", help="Add this tag; may be repeated.", autocompletion=complete_tag),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", "-r", metavar="TAG", help="Remove this tag; may be repeated.", autocompletion=complete_tag),
    ] = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Add and remove tags of workflows, or list all tags.

    Tags are removed first, then added. Without options, the command lists all tags.
    """
    if workflow and not (add or remove):
        raise InputError("no tag is given", hint="use --add TAG or --remove TAG")
    if not workflow and (add or remove):
        raise InputError("no workflow is given", hint="use --workflow ID")
    with open_client() as client:
        if not workflow:
            _show_tags(list_tags(client), format_type)
            return
        tagged = change_tags(client, workflow, add=add or (), remove=remove or ())
    if format_type is Format.JSON:
        import json

        print(
            json.dumps(
                {"workflows": [{"name": name, "workflow_id": name, "tags": list(tags)} for name, tags in tagged.items()]},
                indent=2,
            )
        )
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be adopted, without changing anything.")] = False,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust-records",
            help="Also adopt records of other machines whose outputs go to local files or over SFTP.",
        ),
    ] = False,
    hostfile: HostfileOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Store workflows of which only the nodes have a record.

    Another machine submitted these workflows, or the store was lost. distflow then watches them, and you can query and cancel
    them, but their waiting tasks are not started. A record that this machine did not sign is refused if its outputs would go to
    local files or over SFTP. A damaged store is renamed first.
    """
    from distflow.client.adoption import adopt  # imported here because `cancel` and `tag` do not need it

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
        first = failed[0]
        node = None if first.pool.is_allocated else first.node
        hint = f"details: {pool_check_command(first.pool.name, node, hostfile=hostfile)}"
        raise NodeError(first.node, first.error, hint=hint)


def _show_adoption(found: Adoption, dry_run: bool) -> None:
    if (aside := found.kept_aside) is not None:
        text = f"{aside} is damaged and would be renamed" if dry_run else f"the damaged store was renamed to {aside}"
        print(text, file=sys.stderr)
    for one in found.workflows:
        if one.skipped:
            print(f"{plain(one.name)}: not adopted: {plain(one.skipped)}")
            continue
        print(f"{plain(one.name)}: {'would be adopted' if dry_run else 'adopted'}")
        for note in one.notes:
            print(f"  {plain(note)}")
    print_further_errors((one.node, one.error) for one in found.nodes)
    if not found.workflows and (not found.nodes or any(not one.error for one in found.nodes)):
        print("Nothing to adopt: the store has every workflow that the nodes reported.")


def _adoption_json(found: Adoption, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "kept_aside": None if found.kept_aside is None else str(found.kept_aside),
        "workflows": [
            {
                "name": one.name,
                "uuid": one.uuid,
                "workflow_id": one.name,
                "workflow_uuid": one.uuid,
                "adopted": not one.skipped,
                "why": one.skipped or None,
                "notes": list(one.notes),
            }
            for one in found.workflows
        ],
        "nodes": [{**name_keys(node=one.node), "error": one.error or None} for one in found.nodes],
    }
