"""``distflow workflow list``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from distflow.cli.completion import complete_tag, complete_workflow_status
from distflow.cli.context import open_client, until_closed
from distflow.cli.options import Format, FormatOption, command_app
from distflow.cli.render.tables import Paint
from distflow.cli.render.workflow_text import list_table
from distflow.cli.search_options import (
    AllUsersOption,
    CountOption,
    OffsetOption,
    Order,
    OrderOption,
    PoolsOption,
    PrioritiesOption,
    UsersOption,
    choose_users,
    days,
    label_key,
    label_selectors,
    priorities,
)
from distflow.client.client import now
from distflow.client.workflows import list_workflows, parse_statuses
from distflow.state.search import Search

__all__ = ["app"]

app = command_app()


@app.command(
    "list", epilog="Examples: distflow workflow list  ·  distflow workflow list -s RUNNING PENDING --label team=vision"
)
def list_command(
    count: CountOption = 20,
    offset: OffsetOption = 0,
    name: Annotated[str | None, typer.Option("--name", "-n", help="Only workflows whose id contains this text.")] = None,
    status: Annotated[
        list[str] | None,
        typer.Option(
            "--status",
            "-s",
            help="Only with one of these statuses: `-s RUNNING PENDING`, or repeat the option.",
            autocompletion=complete_workflow_status,
        ),
    ] = None,
    user: UsersOption = None,
    all_users: AllUsersOption = False,
    pool: PoolsOption = None,
    priority: PrioritiesOption = None,
    submitted_after: Annotated[
        str | None, typer.Option(metavar="YYYY-MM-DD", help="Only submitted on this day or later.")
    ] = None,
    submitted_before: Annotated[str | None, typer.Option(metavar="YYYY-MM-DD", help="Only submitted before this day.")] = None,
    tags: Annotated[
        list[str] | None,
        typer.Option("--tags", metavar="TAG", help="Only with any of these tags.", autocompletion=complete_tag),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            metavar="KEY=SELECTOR",
            help="Only with this label. In a selector, * matches any text, and (a|b) either text.",
        ),
    ] = None,
    no_label: Annotated[list[str] | None, typer.Option("--no-label", metavar="KEY", help="Only without this label.")] = None,
    order: OrderOption = Order.ASC,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """List the newest workflows that match all filters, at most `--count`. By default, the newest is last.

    A workflow must match each `--label`, and none of the labels of `--no-label`. If another filter has several values, one of
    them must match.
    """
    after, before = days(submitted_after, submitted_before, "submitted")
    search = Search(
        statuses=None if status is None else parse_statuses(status),
        name=name,
        users=choose_users(user, all_users),
        pools=pool or (),
        priorities=priorities(priority),
        tags=tags or (),
        labels=label_selectors(label),
        without_labels=tuple(label_key(key, "--no-label") for key in no_label or ()),
        submitted_after=after,
        submitted_before=before,
    )
    with open_client() as client:
        records = list_workflows(client, search, count=min(count, sys.maxsize), offset=min(offset, sys.maxsize))
    if order is Order.ASC:
        records.reverse()
    with until_closed():
        if format_type is Format.JSON:
            import json

            from distflow.cli.render.workflow_json import list_json

            print(json.dumps(list_json(records, now=now()), indent=2))
        elif records:
            print(list_table(records, now=now(), paint=Paint.of(sys.stdout)), end="")
        else:
            print("No workflow matches." if offset or search != Search() else "There are no workflows yet.")
