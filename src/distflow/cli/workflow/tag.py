"""``distflow workflow tag``."""

from __future__ import annotations

from typing import Annotated

import typer

from distflow.cli.context import complete_workflow, open_client
from distflow.cli.options import Format, FormatOption, command_app
from distflow.cli.render.tables import table
from distflow.client.workflows import change_tags, list_tags
from distflow.errors import InputError

__all__ = ["app"]

app = command_app()


@app.command(epilog="Examples: distflow workflow tag -w pytorch-dist-3 -a baseline  ·  distflow workflow list --tags baseline")
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
