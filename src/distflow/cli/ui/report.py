"""``distflow workflow report``: the web page of one workflow in a single file, which needs no server and no network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from distflow.cli.context import WorkflowArgument, open_workflow
from distflow.cli.options import command_app
from distflow.cli.ui import documents
from distflow.cli.ui.log_pages import LogPages
from distflow.client.client import Client, now
from distflow.client.logs import stream_logs
from distflow.client.workflows import choose_tasks
from distflow.documents.json_keys import name_keys
from distflow.documents.quantities import bytes_text, local_minute
from distflow.errors import DistflowError, InputError
from distflow.state.record import WorkflowRecord

__all__ = ["app", "write_error_page", "write_report"]

_STATIC = Path(__file__).with_name("static")
_MODULES = ("dom.js", "source.js", "logs.js", "charts.js", "shapes.js", "workflow.js", "lists.js", "main.js")
"""The scripts in the order of their imports. Their top-level names must differ, because they are joined to one script."""
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
_MOST_LOG_BYTES = 1_400_000
_MOST_POINTS = 30_000
_LINES_AT_ONCE = 1000

app = command_app()


@app.command(epilog="Examples: distflow workflow report pytorch-dist-3  ·  distflow workflow report pytorch-dist-3 -o why.html")
def report(
    workflow: WorkflowArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The file to write. Default: ID.html.", show_default=False),
    ] = None,
) -> None:
    """Write a report on a workflow to one HTML file.

    The file has the page that `distflow ui` shows: the first cause, timeline, logs, metrics and events. It needs no network, so
    you can attach it to an issue or a CI run. The middle of a long log is left out, and if it has more than 1 million
    lines, also its beginning. distflow contacts the nodes only for their lists of output files.
    """
    with open_workflow(workflow, report_age=False) as (client, record):
        path = output or Path(f"{record.id}.html")
        size = write_report(client, record, path)
    print(f"wrote {path} ({bytes_text(size)})")


def write_report(client: Client, record: WorkflowRecord, path: Path) -> int:
    """Write the page of a workflow to a file.

    Args:
        client: The client whose store has the workflow.
        record: The workflow.
        path: The file, which is replaced if it exists.

    Returns:
        The size of the file in bytes.

    Raises:
        InputError: if the file cannot be written.

    """
    tasks = choose_tasks(record, ())
    with closing(LogPages()) as log:
        log.use_ranks_of(tasks)
        stream = stream_logs(client, record, tasks)
        for line in stream:
            log.add(line)
        logs = _lines(log, record.id, list(stream.remarks()))
    parts: dict[str, dict[str, object]] = {}
    for name, part in documents.STORED_PARTS.items() | {("outputs", documents.LIVE_PARTS["outputs"])}:
        try:
            parts[name] = part(client, record)
        except DistflowError as error:
            parts[name] = documents.error_document(error)
    parts["metrics"] = {"workflow_id": record.id, **log.series()}
    for name in ("metrics", "samples"):
        parts[name] = _with_fewer_points(parts[name])
    return _write(path, {"workflow": record.id, "parts": parts, "logs": logs})


def write_error_page(error: DistflowError, path: Path) -> None:
    """Write a page about an error instead of a workflow. Raises ``InputError`` if the file cannot be written."""
    problems: Sequence[Mapping[str, Any]] = [problem.as_json() for problem in getattr(error, "problems", ())]
    _write(path, {"problems": problems or [{"message": error.message, "hint": error.hint}]})


def _lines(log: LogPages, workflow: str, remarks: list[str]) -> dict[str, object]:
    """Return a log without the middle if it is long.

    A line consists of the index of its source (task, rank and attempt), its time and its text.
    """
    sources: dict[tuple[str, int | None, int], int] = {}

    def read(position: int) -> tuple[list[tuple[int, float | None, str]], int]:
        found = [
            (sources.setdefault((line.task, line.rank, line.attempt), len(sources)), line.time, line.text)
            for line in log.lines(position, _LINES_AT_ONCE)
        ]
        return found, sum(len(text) + 24 for _, _, text in found)

    head: list[tuple[int, float | None, str]] = []
    tail: list[tuple[int, float | None, str]] = []
    first, last, size = 0, len(log), 0
    while first < last and size < _MOST_LOG_BYTES // 2:
        found, more = read(first)
        found = found[: last - first]
        head, first, size = head + found, first + len(found), size + more
    while first < last and size < _MOST_LOG_BYTES:
        begin = max(first, last - _LINES_AT_ONCE)
        found, more = read(begin)
        tail, last, size = found[: last - begin] + tail, begin, size + more
    if first < last:
        removed = f"The first {log.removed:,} lines and " if log.removed else ""
        left_out = f"{removed}{last - first:,} lines in the middle are left out"
        remarks.insert(0, f"{left_out}. All lines: distflow workflow logs {workflow}")
        head.append((head[-1][0], None, f"… {last - first:,} lines are left out …"))
        if log.removed:
            head.insert(0, (head[0][0], None, f"… the first {log.removed:,} lines are left out …"))
    named = [{**name_keys(task=task), "rank": rank, "retry_id": attempt} for task, rank, attempt in sources]
    return {"sources": named, "lines": head + tail, "remarks": remarks}


def _with_fewer_points(document: Any) -> dict[str, object]:
    """Reduce the series of a document to at most about 30 000 points in total."""
    series = document.get("series", [])
    every = 1 + sum(len(one["points"]) for one in series) // _MOST_POINTS
    return {**document, "series": [{**one, "points": one["points"][::-every][::-1]} for one in series]}


def _write(path: Path, data: dict[str, object]) -> int:
    text = _page({"made": local_minute(now()), "made_at": now(), "about": documents.about(has_actions=False), **data})
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}", hint="choose another file") from error
    return len(text.encode())


def _page(data: dict[str, object]) -> str:
    def read(name: str) -> str:
        return (_STATIC / name).read_text(encoding="utf-8")

    scripts = [read("uPlot.iife.min.js"), "".join(_EXPORT.sub("", _IMPORT.sub("", read(name))) for name in _MODULES)]
    styles = [read("uPlot.min.css"), read("page.css")]
    policy = f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data:; base-uri 'none'"
    title = str(data.get("workflow", "failed"))
    embedded = json.dumps(data, separators=(",", ":")).replace(
        "<", "\\u003c"
    )  # otherwise, output of tasks could end the script
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}; form-action \'none\'">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title} · distflow</title>\n'
        + "".join(f"<style>{style}</style>\n" for style in styles)
        + f'</head>\n<body>\n<script type="application/json" id="report">{embedded}</script>\n'
        f'<script>{scripts[0]}</script>\n<script type="module">{scripts[1]}</script>\n</body>\n</html>\n'
    )


def _hashes(texts: Sequence[str]) -> str:
    """Return the sources of a Content-Security-Policy that allow only these texts."""
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
