"""``distflow credential``."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from distflow.cli.completion import complete_credential
from distflow.cli.context import open_client
from distflow.cli.options import Format, command_app
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

app = command_app(no_args_is_help=True)

_FormatOption = Annotated[
    Format | None, typer.Option("--format-type", "-t", help="Print text for people, or one JSON document for programs.")
]


@app.callback()
def _credential(context: typer.Context, format_type: _FormatOption = None) -> None:
    """Store secrets that tasks use by name."""
    context.obj = format_type  # OSMO accepts this option before the subcommand


@app.command(
    "set",
    epilog="Examples: distflow credential set wandb --payload-file api_key=-  ·  "
    "distflow credential set deploy --payload-file key=$HOME/.ssh/deploy  ·  "
    "distflow credential set bucket --type DATA --payload endpoint=s3://bucket access_key_id=ID access_key=KEY",
)
def set_command(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The name of the credential in specs.", autocompletion=complete_credential),
    ],
    kind: Annotated[
        CredentialType,
        typer.Option("--type", case_sensitive=False, help="GENERIC for tasks, REGISTRY for images, DATA for storage URLs."),
    ] = CredentialType.GENERIC,
    payload: Annotated[
        list[str] | None,
        typer.Option(
            "--payload",
            metavar="KEY=VALUE",
            help="A value; may be repeated. It is visible in `ps` and in the shell's history.",
        ),
    ] = None,
    payload_file: Annotated[
        list[str] | None,
        typer.Option(
            "--payload-file",
            metavar="KEY=FILE",
            help="A file with the value; may be repeated. `-` reads standard input, or prompts for the value in a terminal.",
        ),
    ] = None,
    format_type: _FormatOption = None,
) -> None:
    """Store a credential: a name with one or more values.

    The values are never shown again. To keep a value off the command line, use `--payload-file KEY=-`, which reads it from
    standard input. Line breaks at the end of a file are not part of the value.

    The keys of REGISTRY are auth, registry and username. The keys of DATA are access_key_id, access_key, endpoint (such as
    s3://bucket), region, override_url and addressing_style. A new DATA or REGISTRY credential for the same endpoint or registry
    replaces the old one. If another credential has the name, the command fails.
    """
    if bool(payload) == bool(payload_file):
        raise InputError(
            "--payload and --payload-file cannot be combined" if payload else "the payload is missing",
            hint="use --payload KEY=VALUE or --payload-file KEY=FILE",
        )
    values = _values(payload) if payload else _files(payload_file or [])
    with open_client() as client:
        made = set_credential(client, name, kind, values)
    if _is_json(context, format_type):
        print(json.dumps(_json(made), indent=2))
    else:
        print(f"Set {made.type.value} credential {made.name}.")


@app.command("list", epilog="Example: distflow credential list -t json")
def list_command(context: typer.Context, format_type: _FormatOption = None) -> None:
    """List credentials, without their values."""
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
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The name of the credential.", autocompletion=complete_credential)
    ],
    format_type: _FormatOption = None,
) -> None:
    """Delete a credential.

    Workflows that were submitted earlier keep their copies of a GENERIC or REGISTRY credential until they end, but not of a
    DATA credential.
    """
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
            raise InputError(f"value {position} of --payload is not of the form KEY=VALUE")
        _add(found, key, value)
    return found


def _files(items: Sequence[str]) -> dict[str, Secret]:
    found: dict[str, Secret] = {}
    if sum(item.partition("=")[2] == "-" for item in items) > 1 and not sys.stdin.isatty():
        raise InputError(
            "--payload-file: only one key can have the value `-` (standard input)", hint="use files for the other keys"
        )
    for position, item in enumerate(items, 1):
        key, equals, path = item.partition("=")
        if not equals or not path:
            raise InputError(f"value {position} of --payload-file is not of the form KEY=FILE")
        _add(found, key, _read(key, path).rstrip("\r\n"))
    return found


def _add(found: dict[str, Secret], key: str, value: str) -> None:
    if key in found:
        raise InputError(f"the key `{key}` is given twice")
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
        # A longer value, which is refused later, may end within a character.
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) <= LONGEST_VALUE)
    except OSError as error:
        # Do not print the path, because it can be the secret value itself, given by mistake.
        hint = "use KEY=FILE, or KEY=- to read the value from standard input"
        raise InputError(f"--payload-file {key}: the file cannot be read: {error.strerror}", hint=hint) from None
    except RuntimeError:
        hint = "write the whole path"
        raise InputError(f"--payload-file {key}: the home directory in the path is unknown", hint=hint) from None
    except UnicodeDecodeError:
        hint = "encode it with base64, and decode it in the task"
        raise InputError(f"--payload-file {key}: the value is not valid UTF-8 text", hint=hint) from None
