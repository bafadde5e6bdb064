"""``distflow dataset``: named collections of files, in versions that never change."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distflow.cli.context import open_client
from distflow.cli.options import Format, FormatOption, RegexOption, ResumeOption, command_app
from distflow.cli.render.tables import table
from distflow.cli.render.terminal import ProgressLine
from distflow.client.data import create_version, delete_versions, download_dataset, list_datasets, read_versions
from distflow.documents.quantities import bytes_text, count_text, local_minute, times
from distflow.documents.text import plain
from distflow.documents.urls import parse_dataset
from distflow.errors import InputError

if TYPE_CHECKING:
    from distflow.client.data import DatasetManifest

__all__ = ["app"]

app = command_app(no_args_is_help=True)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME[:VERSION]", help="The dataset, such as mnist, mnist:3 or mnist:latest.")
]


@app.callback()
def _dataset() -> None:
    """Manage named, versioned collections of files.

    A version never changes. Datasets are stored at the URL that `datasets` in the configuration names, or else in the state
    directory.
    """


@app.command("list", epilog="Example: distflow dataset list --format-type json")
def list_command(format_type: FormatOption = Format.TEXT) -> None:
    """List datasets with their latest versions."""
    with open_client() as client:
        found = list_datasets(client)
    if format_type is Format.JSON:
        rows = [{"name": one.name, "versions": versions, "latest": _json(one)} for one, versions in found]
        print(json.dumps({"datasets": rows}, indent=2))
        return
    if not found:
        print("There are no datasets yet.", file=sys.stderr)
        return
    cells = [
        (
            one.name,
            str(len(versions)),
            str(one.number),
            str(len(one.files)),
            bytes_text(one.size),
            local_minute(one.created),
        )
        for one, versions in found
    ]
    print(table(("Name", "Versions", "Latest", "Files", "Size", "Created"), cells), end="")


@app.command(epilog="Examples: distflow dataset info mnist  ·  distflow dataset info mnist:3")
def info(name: NameArgument, format_type: FormatOption = Format.TEXT) -> None:
    """Show the versions of a dataset, or the files of one version."""
    plain_name, _ = parse_dataset(name)
    with open_client() as client:
        found = read_versions(client, name)
    if format_type is Format.JSON:
        print(json.dumps({"name": plain_name, "versions": [{**_json(one), "files": _files(one)} for one in found]}, indent=2))
    elif ":" in name:
        rows = [(plain(one.path), str(one.size), one.sha256) for one in found[0].files]
        print(table(("Path", "Bytes", "SHA-256"), rows), end="")
    else:
        cells = [(str(one.number), str(len(one.files)), bytes_text(one.size), local_minute(one.created)) for one in found]
        print(table(("Version", "Files", "Size", "Created"), cells), end="")


@app.command(epilog="Example: distflow dataset upload mnist data/mnist/*")
def upload(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name of letters, digits, - and _.")],
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", help="Files and directories. A directory keeps its name.")],
    regex: RegexOption = "",
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Create a version of a dataset from local files.

    The version becomes visible only after all its files are uploaded.
    """
    _create_version(name, paths, regex, format_type, is_update=False)


@app.command(epilog="Example: distflow dataset update mnist labels.csv")
def update(
    name: NameArgument,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", help="Files and directories. A directory keeps its name.")],
    regex: RegexOption = "",
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Create a version of a dataset by adding files.

    The new version has the files of an existing version (the latest, or VERSION) and the local files. A local file replaces a
    file with the same path. Files that the existing version has are not uploaded again.
    """
    _create_version(name, paths, regex, format_type, is_update=True)


@app.command(epilog="Example: distflow dataset download mnist:3 data")
def download(
    name: NameArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="An existing directory. The files go to DIR/NAME.")],
    regex: RegexOption = "",
    resume: ResumeOption = False,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Download a version of a dataset.

    Each file is verified with its SHA-256 checksum.
    """
    with open_client() as client, ProgressLine(sys.stderr, "fetched") as line:
        manifest, moved = download_dataset(client, name, directory, regex=regex, resume=resume, on_progress=line.update)
    if format_type is Format.JSON:
        body = {"name": manifest.name, "version": manifest.number, "files": moved.files, "bytes": moved.size}
        print(json.dumps(body, indent=2))
    else:
        print(f"{manifest.name}:{manifest.number}: {count_text(moved.files, 'file')}, {bytes_text(moved.size)}")


@app.command(epilog="Examples: distflow dataset delete mnist:3  ·  distflow dataset delete mnist --all")
def delete(
    name: NameArgument,
    all_versions: Annotated[bool, typer.Option("--all", help="Delete all versions.")] = False,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Delete one version or all versions of a dataset, without confirmation.

    The number of a deleted version is not used again.
    """
    plain_name, _ = parse_dataset(name)
    if (":" in name) == all_versions:
        raise InputError("give either a version or --all", hint=f"`distflow dataset info {plain_name}` shows the versions")
    with open_client() as client:
        deleted = delete_versions(client, name, all_versions=all_versions)
    if format_type is Format.JSON:
        print(json.dumps({"name": plain_name, "deleted": deleted}, indent=2))
    else:
        print("".join(f"deleted {plain_name}:{one}\n" for one in deleted), end="")


def _create_version(name: str, paths: list[Path], regex: str, format_type: Format, *, is_update: bool) -> None:
    with open_client() as client, ProgressLine(sys.stderr, "sent") as line:
        made = create_version(client, name, paths, regex=regex, is_update=is_update, on_progress=line.update)
    if format_type is Format.JSON:
        print(json.dumps(_json(made), indent=2))
    else:
        print(f"{made.name}:{made.number}: {count_text(len(made.files), 'file')}, {bytes_text(made.size)}")


def _json(one: DatasetManifest) -> dict[str, object]:
    return {
        "name": one.name,
        "version": one.number,
        **times(created=one.created),
        "file_count": len(one.files),
        "bytes": one.size,
    }


def _files(one: DatasetManifest) -> list[dict[str, object]]:
    return [{"path": file.path, "bytes": file.size, "sha256": file.sha256} for file in one.files]
