"""``distflow data``: upload, download, list and delete data at URLs, without a workflow."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distflow.cli.context import open_client
from distflow.cli.options import Format, FormatOption, RegexOption, ResumeOption, command_app
from distflow.cli.render.tables import print_notice
from distflow.cli.render.terminal import ProgressLine
from distflow.client.data import check_data_access, delete_data, download_data, list_data, parse_data_url, upload_data
from distflow.documents.quantities import bytes_text, count_text, times
from distflow.documents.text import plain
from distflow.errors import DistflowError, InputError

if TYPE_CHECKING:
    from distflow.client.data import SelectedObject, TransferResult
    from distflow.documents.urls import StorageUrl

__all__ = ["app"]

app = command_app(no_args_is_help=True)

UrlArgument = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="A URL such as s3://bucket/path. Schemes: s3, gs, az, azure, sftp, file, and http(s) for reading."
    ),
]
ThreadsOption = Annotated[int, typer.Option("--threads", "-T", min=1, max=256, help="The number of parallel transfers.")]
ProcessesOption = Annotated[int | None, typer.Option("--processes", "-p", min=1, help="Ignored; accepted because OSMO has it.")]
BenchmarkOption = Annotated[
    Path | None,
    typer.Option("--benchmark-out", "-b", metavar="DIR", help="Write the measured times as JSON into this directory."),
]


class _Access(str, Enum):
    """An access that ``data check`` can test."""

    READ = "READ"
    WRITE = "WRITE"
    DELETE = "DELETE"


@app.callback()
def _data() -> None:
    """Upload, download, list and delete data at URLs."""


@app.command(
    epilog="Examples: distflow data upload s3://bucket/run7 results  ·  distflow data upload s3://bucket/run7 results/*"
)
def upload(
    url: UrlArgument,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", help="Files and directories of this machine.")],
    regex: RegexOption = "",
    processes: ProcessesOption = None,  # noqa: ARG001  accepted because OSMO has it
    threads: ThreadsOption = 8,
    benchmark_out: BenchmarkOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Upload files below a URL.

    A directory keeps its name. Files that exist there with the same checksum are skipped, and each uploaded file is verified.
    Repeat the command to continue an interrupted upload.
    """
    with open_client() as client, ProgressLine(sys.stderr, "sent") as line:
        moved = upload_data(client, url, paths, regex=regex, threads=threads, on_progress=line.update)
        seconds = line.seconds
    _report("upload", parse_data_url(url), moved, seconds, benchmark_out, format_type)


@app.command(epilog="Example: distflow data download s3://bucket/run7 results --regex '.*\\.pt$'")
def download(
    url: UrlArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="An existing directory.")],
    regex: RegexOption = "",
    resume: ResumeOption = False,
    processes: ProcessesOption = None,  # noqa: ARG001  accepted because OSMO has it
    threads: ThreadsOption = 8,
    benchmark_out: BenchmarkOption = None,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Download the data at a URL into a directory.

    Paths are relative to the URL, and a single object keeps its name. A file appears when it is complete and, if the store has
    a checksum of it, verified. Repeat the command with --resume to continue an interrupted download.
    """
    with open_client() as client, ProgressLine(sys.stderr, "fetched") as line:
        moved = download_data(client, url, directory, regex=regex, resume=resume, threads=threads, on_progress=line.update)
        seconds = line.seconds
    _report("download", parse_data_url(url), moved, seconds, benchmark_out, format_type)


@app.command("list", epilog="Examples: distflow data list s3://bucket/run7  ·  distflow data list -r s3://bucket files.txt")
def list_command(
    url: UrlArgument,
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Write the list to this new file.")] = None,
    regex: RegexOption = "",
    prefix: Annotated[str, typer.Option("--prefix", "-p", help="Only paths that begin with this text.")] = "",
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="List every object instead of one line per folder.")
    ] = False,
    no_pager: Annotated[bool, typer.Option("--no-pager", help="Ignored; accepted because OSMO has it.")] = False,  # noqa: ARG001
    format_type: FormatOption = Format.TEXT,
) -> None:
    """List the objects at a URL.

    Each line has one relative path. The path of a folder ends with a slash.
    """
    source = parse_data_url(url)
    if file is not None and os.path.exists(file):  # ``Path.exists`` raises an error in a directory that is not readable
        raise InputError(f"`{file}` already exists", hint="name a new file")
    with open_client() as client:
        found = list_data(client, url, regex=regex, prefix=prefix)
    rows = _rows(source, found, recursive)
    if format_type is Format.JSON:
        body = {"url": str(source), "objects": rows, "count": len(rows), "bytes": sum(one.entry.size for one in found)}
        text = json.dumps(body, indent=2) + "\n"
    else:
        text = "".join(f"{plain(str(row['name']))}\n" for row in rows)
    if file is not None:
        try:
            # File names can contain bytes that are not UTF-8. Write these bytes unchanged.
            file.write_text(text, encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            hint = "name a file in a directory that you can write to"
            raise InputError(f"`{file}` cannot be written: {error.strerror}", hint=hint) from error
    else:
        print(text, end="")
    if format_type is Format.TEXT:
        print(f"{count_text(len(found), 'object')}, {bytes_text(sum(one.entry.size for one in found))}", file=sys.stderr)


@app.command(epilog="Example: distflow data delete s3://bucket/run7 --regex 'checkpoints/'")
def delete(url: UrlArgument, regex: RegexOption = "", format_type: FormatOption = Format.TEXT) -> None:
    """Delete the objects at a URL, without confirmation.

    List them first with `distflow data list -r`. For a symbolic link, the link is deleted and not its target.
    """
    target = parse_data_url(url, writes=True)
    with open_client() as client:
        count = delete_data(client, url, regex=regex)
    if format_type is Format.JSON:
        print(json.dumps({"url": str(target), "deleted": count}, indent=2))
    else:
        print(f"deleted {count_text(count, 'object')} at {target}")


@app.command(epilog="Example: distflow data check s3://bucket/run7 --access-type WRITE")
def check(
    url: UrlArgument,
    access_type: Annotated[
        _Access, typer.Option("--access-type", "-a", case_sensitive=False, help="The access to check.")
    ] = _Access.READ,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Check that you can read, write or delete at a URL.

    distflow performs the access: to check writing or deleting, it writes and deletes an empty object. The exit code is not 0 if
    this fails.
    """
    target = parse_data_url(url, writes=access_type is not _Access.READ)
    try:
        with open_client() as client:
            check_data_access(client, url, access_type.value)
    except DistflowError as error:
        if format_type is Format.JSON:
            print(json.dumps({"status": "fail", "error": error.message, "hint": error.hint}, indent=2))
            print_notice(f"error: {error}")
            raise typer.Exit(error.exit_code) from None
        raise
    if format_type is Format.JSON:
        print(json.dumps({"status": "pass"}, indent=2))
    else:
        print(f"{target}: {access_type.value}: pass")


def _report(
    verb: str, url: StorageUrl, moved: TransferResult, seconds: float, benchmark_out: Path | None, format_type: Format
) -> None:
    transferred = moved.size - moved.skipped_size
    body = {"url": str(url), "files": moved.files, "bytes": moved.size, "already_there": moved.skipped}
    if benchmark_out is not None:
        measured = {
            "verb": verb,
            **body,
            "seconds": round(seconds, 3),
            "transferred_bytes": transferred,
            "bytes_per_second": round(transferred / max(seconds, 0.001)),
        }
        _write_benchmark(benchmark_out, verb, measured)
    if format_type is Format.JSON:
        print(json.dumps(body, indent=2))
        return
    skipped = ""
    if moved.skipped:
        skipped = f"; {count_text(moved.skipped, 'file')} {'was' if moved.skipped == 1 else 'were'} already there"
    print(f"{verb}ed {count_text(moved.files - moved.skipped, 'file')}, {bytes_text(transferred)}{skipped}")


def _write_benchmark(directory: Path, verb: str, measured: dict[str, object]) -> None:
    path = directory / f"{verb}-{time.strftime('%Y%m%dT%H%M%S')}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measured, indent=2) + "\n")
    except OSError as error:
        message = f"--benchmark-out: `{error.filename or path}` cannot be written: {error.strerror}"
        raise InputError(message, hint="name a directory that you can write to") from error


def _rows(url: StorageUrl, found: Sequence[SelectedObject], recursive: bool) -> list[dict[str, object]]:
    rows: dict[str, dict[str, object]] = {}
    for one in found:
        first, slash, _ = one.name.partition("/")
        if slash and not recursive:
            row = rows.setdefault(
                f"{first}/", {"name": f"{first}/", "url": f"{url.below(first)}/", "bytes": 0, **times(modified=None)}
            )
            row["bytes"] = int(str(row["bytes"])) + one.entry.size
        else:
            rows[one.name] = {
                "name": one.name, "url": url.shown(one.entry.key), "bytes": one.entry.size,
                **times(modified=one.entry.modified),
            }  # fmt: skip
    return list(rows.values())
