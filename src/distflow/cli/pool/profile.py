"""``distflow profile``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from distflow.cli.context import open_client
from distflow.cli.options import Format, FormatOption
from distflow.client.client import user_name
from distflow.client.pools import prefer_pool
from distflow.errors import InputError

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)

_NO_NOTIFICATIONS = "distflow sends no notifications: `distflow workflow submit --wait` returns when a workflow has ended"
_KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="What: pool.")]


@app.callback()
def _profile() -> None:
    """Say which pool you mean when you name none."""


@app.command("set", epilog="Example: distflow profile set pool lab")
def set_preference(
    key: _KeyArgument,
    values: Annotated[list[str] | None, typer.Argument(metavar="VALUE", help="The name of a pool.")] = None,
) -> None:
    """Prefer a pool, on this machine and for this user.

    It is taken where neither --pool nor the spec names one, and stands before the configuration's default_pool. Where the
    configuration has no such pool, its default_pool is taken.
    """
    _check(key)
    if values is None or len(values) != 1:
        raise InputError("`distflow profile set pool` takes the name of one pool", hint="distflow pool list shows the pools")
    with open_client() as client:
        prefer_pool(client, values[0])
    print(f"Set pool to {values[0]}.")


@app.command("unset", epilog="Example: distflow profile unset pool")
def unset_preference(key: _KeyArgument) -> None:
    """Prefer no pool any more: the configuration's default_pool is meant again."""
    _check(key)
    with open_client() as client:
        prefer_pool(client, None)
    print("No pool is preferred.")


@app.command("list", epilog="Example: distflow profile list -t json")
def list_preferences(format_type: FormatOption = Format.TEXT) -> None:
    """Show which pool is meant when none is named, and which there are."""
    with open_client() as client:
        preferred, configuration = client.preferred_pool(), client.configuration()
    pools = list(configuration.pools)
    if format_type is Format.JSON:
        profile = {
            "username": user_name(),
            "email_notification": False,
            "slack_notification": False,
            "pool": configuration.default_pool,
        }
        print(json.dumps({"profile": profile, "pools": pools, "roles": []}, indent=2))
        return
    source = "your profile" if preferred == configuration.default_pool else configuration.file or "built in"
    print(f"User:  {user_name()}\nPool:  {configuration.default_pool} ({source})\nPools: {', '.join(pools)}")


def _check(key: str) -> None:
    if key == "notifications":
        raise InputError(_NO_NOTIFICATIONS)
    if key != "pool":
        raise InputError(
            f"there is nothing to set that is called {key!r}", hint="pool: the pool that is meant when none is named"
        )
