"""``distflow credential``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from distflow.cli.context import open_client
from distflow.cli.options import Format
from distflow.cli.render.tables import table
from distflow.client.credentials import (
    LONGEST_VALUE,
    Credential,
    CredentialType,
    Secret,
    delete_credential,
    list_credentials,
    set_credential,
)
from distflow.errors import InputError

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)

_FormatOption = Annotated[
    Format | None, typer.Option("--format-type", "-t", help="text for people, json for programs (one document).")
]


@app.callback()
def _credential(context: typer.Context, format_type: _FormatOption = None) -> None:
    """Keep secrets on this machine, and give them to tasks by name."""
    context.obj = format_type  # OSMO accepts this option before the subcommand


@app.command(
    "set",
    epilog="Examples: distflow credential set wandb --payload-file api_key=-  ·  "
    "distflow credential set deploy --payload-file key=$HOME/.ssh/deploy  ·  "
    "distflow credential set bucket --type DATA --payload endpoint=s3://bucket access_key_id=ID access_key=KEY",
)
def set_command(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What specs call it.")],
    kind: Annotated[
        CredentialType,
        typer.Option("--type", case_sensitive=False, help="GENERIC for tasks, REGISTRY for images, DATA for storage URLs."),
    ] = CredentialType.GENERIC,
    payload: Annotated[
        list[str] | None,
        typer.Option(
            "--payload",
            metavar="KEY=VALUE",
            help="A value, in sight of `ps` and of the shell's history; may be repeated.",
        ),
    ] = None,
    payload_file: Annotated[
        list[str] | None,
        typer.Option(
            "--payload-file",
            metavar="KEY=FILE",
            help="A file that holds the value, or `-`: standard input; in a terminal you are asked for it. May be repeated.",
        ),
    ] = None,
    format_type: _FormatOption = None,
) -> None:
    """Keep a credential: one value or more under a name. It is never shown again.

    A value need not stand on the command line: `--payload-file KEY=-` reads it from standard input. Line breaks at the end of a
    file are not part of the value. Keys of REGISTRY: auth, registry, username; of DATA: access_key_id, access_key, endpoint
    (such as s3://bucket), region, override_url, addressing_style. A second DATA or REGISTRY credential for the same endpoint or
    registry takes the place of the first.
    """
    if bool(payload) == bool(payload_file):
        raise InputError("give the payload with --payload, or with --payload-file", hint="not with both, and not with none")
    values = _values(payload) if payload else _files(payload_file or [])
    with open_client() as client:
        made = set_credential(client, name, kind, values)
    if _is_json(context, format_type):
        print(json.dumps(_json(made), indent=2))
    else:
        print(f"Set {made.type.value} credential {made.name}.")


@app.command("list", epilog="Example: distflow credential list -t json")
def list_command(context: typer.Context, format_type: _FormatOption = None) -> None:
    """List the credentials, without their values."""
    with open_client() as client:
        found = list_credentials(client)
    if _is_json(context, format_type):
        print(json.dumps({"credentials": [_json(one) for one in found]}, indent=2))
    elif found:
        rows = [(one.name, one.type.value, one.profile or "", " ".join(one.payload)) for one in found]
        print(table(("Name", "Type", "Profile", "Keys"), rows), end="")
    else:
        print("There are no credentials yet.")


@app.command("delete", epilog="Example: distflow credential delete wandb")
def delete_command(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which one.")],
    format_type: _FormatOption = None,
) -> None:
    """Forget a credential. Workflows that were submitted before keep what they were given until they end."""
    with open_client() as client:
        delete_credential(client, name)
    if _is_json(context, format_type):
        print(json.dumps({"cred_name": name}, indent=2))
    else:
        print(f"Deleted credential {name}.")


def _is_json(context: typer.Context, format_type: Format | None) -> bool:
    return (format_type or context.obj) is Format.JSON


def _json(one: Credential) -> dict[str, object]:
    return {"cred_name": one.name, "cred_type": one.type.value, "profile": one.profile, "keys": list(one.payload)}


def _values(items: Sequence[str]) -> dict[str, Secret]:
    found: dict[str, Secret] = {}
    for position, item in enumerate(items, 1):
        key, equals, value = item.partition("=")
        if not equals:
            raise InputError(f"--payload number {position} is not of the form KEY=VALUE")
        _add(found, key, value)
    return found


def _files(items: Sequence[str]) -> dict[str, Secret]:
    found: dict[str, Secret] = {}
    if sum(item.partition("=")[2] == "-" for item in items) > 1 and not sys.stdin.isatty():
        raise InputError("standard input can be the value of one key only", hint="name files for the others")
    for position, item in enumerate(items, 1):
        key, equals, path = item.partition("=")
        if not equals or not path:
            raise InputError(f"--payload-file number {position} is not of the form KEY=FILE")
        _add(found, key, _read(key, path).rstrip("\r\n"))
    return found


def _add(found: dict[str, Secret], key: str, value: str) -> None:
    if key in found:
        raise InputError(f"the key {key} is given twice")
    found[key] = Secret(value)


def _read(key: str, path: str) -> str:
    if path == "-" and sys.stdin.isatty():
        import getpass

        try:
            return getpass.getpass(f"{key}: ")
        except EOFError:
            raise InputError(f"--payload-file {key}: no value was given") from None
    try:
        if path == "-":
            data = sys.stdin.buffer.read(LONGEST_VALUE + 3)
        else:
            with Path(path).expanduser().open("rb") as file:
                data = file.read(LONGEST_VALUE + 3)
        return data.decode()
    except OSError as error:
        # Do not print the path, because it can be the secret value itself, given by mistake.
        hint = "write KEY=FILE, or KEY=- to give the value on standard input"
        raise InputError(f"--payload-file {key}: the file cannot be read: {error.strerror}", hint=hint) from None
    except UnicodeDecodeError:
        hint = "store it as base64, and decode it in the task"
        raise InputError(f"--payload-file {key}: it is no text", hint=hint) from None
