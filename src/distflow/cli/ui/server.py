"""The server of ``distflow ui``: a page and its JSON documents, for one user on this machine.

Every request must contain the token, and must name a loopback host, so pages of other sites cannot use this server. The first
request has the token in its URL and gets a cookie with it. Most documents are those of ``--format-type json``.
"""

from __future__ import annotations

import asyncio
import glob
import hmac
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distflow.cli.render.tables import print_notice
from distflow.cli.ui import documents
from distflow.cli.ui.log_pages import Followers
from distflow.client.client import Client
from distflow.client.outputs import fetch_output_files
from distflow.client.workflows import cancel, find_workflow, list_workflows
from distflow.errors import DistflowError, InputError, NodeError, NotFound, SecretsMissing
from distflow.state.record import WorkflowRecord
from distflow.state.search import Search

__all__ = ["STATIC", "make_app", "make_token"]

STATIC = Path(__file__).with_name("static")

_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_TYPES = {".css": "text/css", ".js": "text/javascript", ".html": "text/html"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_WELCOME = '<!doctype html><title>distflow</title><link rel="icon" href="data:,"><meta http-equiv="refresh" content="0; url=/">'
_POLL_S = 0.5
_BEAT_POLLS = 30
"""The number of polls without a change after which a comment is sent, to detect a broken connection."""
_MOST_LISTED = 500
_INTERNAL_ERROR = 500
"""The HTTP status of errors that neither the request nor a node caused."""


def make_token() -> str:
    """Return the token of ``DISTFLOW_UI_TOKEN``, or a new random one. Raises ``InputError`` if the variable is not valid."""
    token = os.environ.get("DISTFLOW_UI_TOKEN")
    if token is None:
        return secrets.token_urlsafe(32)
    if not re.fullmatch(r"[\w-]{32,}", token, re.ASCII):
        message = "DISTFLOW_UI_TOKEN must have at least 32 characters, only letters, digits, `-` and `_`"
        raise InputError(message, hint="use: openssl rand -hex 32")
    return token


class _Guard:
    """Refuses requests without the token, to a host that is not loopback, or from another origin, and adds security headers."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()
        self._cookie = f"distflow-{secrets.token_hex(4)}"  # servers on all ports of a host share its cookies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        response = self._refusal(scope)
        await (response or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the response to a request that is refused or has the token in its URL, or ``None`` for an accepted request."""
        request, headers = Request(scope), Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not _HOST.fullmatch(host):
            return _refused("this server accepts only requests to a loopback address, such as 127.0.0.1")
        is_foreign = origin is not None and origin.lower() != f"http://{host}".lower()
        is_link = request.method == "GET" and scope["path"] == "/"  # a person may follow a link to the page
        site = headers.get("sec-fetch-site", "none")
        if is_foreign or (site not in ("same-origin", "none") and not is_link):
            return _refused("the request comes from another site")
        if request.method not in ("GET", "HEAD") and origin is None:
            return _refused(f"the request has no Origin header: add `Origin: http://{host}`")
        if scope["path"] == "/" and self._is_token(request.query_params.get("token", "")):
            # Not an HTTP redirect: if another site has the link, browsers follow the redirect without the new cookie.
            response = HTMLResponse(_WELCOME)
            response.set_cookie(self._cookie, self._token.decode(), httponly=True, samesite="strict", path="/")
            return response
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if self._is_token(request.cookies.get(self._cookie, "")) or (scheme.lower() == "bearer" and self._is_token(bearer)):
            return None
        return _refused("the token is missing or wrong: open the URL that `distflow ui` printed")

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token)


def _refused(why: str) -> Response:
    return PlainTextResponse(f"403: {why}\n", status_code=403)


def make_app(
    token: str, *, has_actions: bool, has_metrics: bool = False, is_stopping: Callable[[], bool] = lambda: False
) -> ASGIApp:
    """Return the ASGI application.

    Args:
        token: The token that requests must have.
        has_actions: Whether requests may cancel and restart workflows.
        has_metrics: Whether ``/metrics`` serves metrics for Prometheus.
        is_stopping: A function that returns whether the server is stopping. Streams of changes then end.

    """
    logs = _Logs()
    parts = {name: _answer_of(part) for name, part in {**documents.STORED_PARTS, **documents.LIVE_PARTS}.items()}
    parts |= {"logs": logs.page, "search": logs.search, "metrics": logs.metrics}
    base = "/api/workflows/{workflow}"
    routes = [
        Route("/", lambda _: _file("index.html")),
        Route("/static/{name}", lambda request: _file(request.path_params["name"])),
        Route("/api/about", lambda _: JSONResponse(documents.about(has_actions=has_actions))),
        Route("/api/workflows", lambda request: _respond(lambda client: _workflows(client, request))),
        Route("/api/pools", lambda _: _respond(documents.pools)),
        Route("/api/pools/{pool}", _nodes),
        Route("/api/changes", lambda request: _stream(request.query_params.get("workflow"), logs.marker, is_stopping)),
        *(Route(f"{base}/{name}", _about_workflow(part)) for name, part in parts.items()),
        Route(f"{base}/file", _output_file),
    ]
    if has_actions:
        for name, action in (("cancel", _cancel), ("restart", _restart)):
            routes.append(Route(f"{base}/{name}", _about_workflow(action), methods=["POST"]))
    if has_metrics:
        routes.append(Route("/metrics", _metrics))
    return _Guard(Starlette(routes=routes), token)


_Answer = Callable[[Client, WorkflowRecord, Request], dict[str, object]]
"""A function that returns the document for a request about a workflow."""


def _answer_of(part: documents.Part) -> _Answer:
    return lambda client, record, _: part(client, record)


def _about_workflow(answer: _Answer) -> Callable[[Request], Response]:
    """Return an endpoint that finds the workflow of a URL and returns a document about it."""

    def respond(request: Request) -> Response:
        def found(client: Client) -> dict[str, object]:
            return answer(client, find_workflow(client, request.path_params["workflow"], report_age=False), request)

        return _respond(found)

    return respond


class _Logs:
    """Endpoints for the output of workflows."""

    def __init__(self) -> None:
        self._followers = Followers()

    def page(self, _: Client, record: WorkflowRecord, request: Request) -> dict[str, object]:
        """Return a page of lines."""
        log = self._followers.follow(record.uuid)
        page = log.pages.page(_number(request, "first"), _number(request, "count", 200), *_chosen(request))
        return {**page, "is_complete": log.has_ended, "remarks": log.remarks}

    def search(self, _: Client, record: WorkflowRecord, request: Request) -> dict[str, object]:
        """Return the positions of the lines that contain a text."""
        log = self._followers.follow(record.uuid, wait_s=5)
        return log.pages.search(request.query_params.get("text", ""), *_chosen(request))

    def metrics(self, _: Client, record: WorkflowRecord, __: Request) -> dict[str, object]:
        """Return the metrics as series."""
        return {"workflow_id": record.id, **self._followers.follow(record.uuid, wait_s=5).pages.series()}

    def marker(self, workflow: str | None) -> object:
        """Return a value that changes when the page of a workflow, or the list of workflows, has something new to show."""
        with Client() as client:
            if workflow is None:
                found = list_workflows(client, Search(), count=_MOST_LISTED)
                return [(one.uuid, one.status, one.tags) for one in found]
            record = find_workflow(client, workflow, report_age=False)
            log = self._followers.follow(record.uuid, wait_s=0)
            return record, len(log.pages) + log.pages.removed, log.has_ended


def _cancel(client: Client, record: WorkflowRecord, _: Request) -> dict[str, object]:
    (result,) = cancel(client, [record.uuid], message="canceled on the web page")
    if result.error is not None:
        raise result.error
    return {"workflow_id": record.id}


def _restart(client: Client, record: WorkflowRecord, _: Request) -> dict[str, object]:
    from distflow.client.specs import Overrides
    from distflow.client.submission import plan_restart, restart

    try:
        planned = plan_restart(client, record.uuid, Overrides(secrets={}))
    except SecretsMissing as error:
        hint = f"use a terminal: `distflow workflow restart {record.id} {error.options}`"
        raise InputError(error.message, hint=hint) from None
    return {"workflow_id": restart(client, planned).id}


def _respond(answer: Callable[[Client], dict[str, object]]) -> Response:
    """Return a document, or the error as a document."""
    try:
        with Client() as client:
            return _Document(answer(client))
    except DistflowError as error:
        status = _status_of(error)
        if status >= _INTERNAL_ERROR:
            print_notice(f"error: {error}")
        return _Document(documents.error_document(error), status_code=status)


def _metrics(_: Request) -> Response:
    from distflow.cli.ui.prometheus import prometheus_text

    try:
        with Client() as client:
            return PlainTextResponse(prometheus_text(client), media_type="text/plain; version=0.0.4")
    except DistflowError as error:
        return PlainTextResponse(f"{error}\n", status_code=_INTERNAL_ERROR)


class _Document(JSONResponse):
    def render(self, content: object) -> bytes:
        """Return compact JSON in ASCII, because names from hostile nodes may contain lone surrogates."""
        return json.dumps(content, separators=(",", ":")).encode()


def _status_of(error: DistflowError) -> int:
    if isinstance(error, NotFound):
        return 404
    return 400 if isinstance(error, InputError) else 424 if isinstance(error, NodeError) else _INTERNAL_ERROR


def _file(name: str) -> Response:
    path = STATIC / name
    if path.parent != STATIC or not path.is_file():
        return PlainTextResponse("404: not found\n", status_code=404)
    return FileResponse(path, media_type=_TYPES.get(path.suffix, "text/plain"))


def _number(request: Request, name: str, default: int = 0) -> int:
    text = request.query_params.get(name, "")
    return int(text) if re.fullmatch(r"-?\d{1,12}", text) else default


def _chosen(request: Request) -> tuple[str | None, int | None]:
    """Return the task and the rank to which the request restricts a log."""
    rank = request.query_params.get("rank", "")
    return request.query_params.get("task") or None, int(rank) if re.fullmatch(r"\d{1,9}", rank) else None


def _workflows(client: Client, request: Request) -> dict[str, object]:
    query = request.query_params
    count, offset = min(_number(request, "count", 100), _MOST_LISTED), max(0, _number(request, "offset"))
    return documents.workflows(client, query.get("text", ""), query.get("state", ""), count=max(0, count), offset=offset)


def _nodes(request: Request) -> Response:
    is_live = request.query_params.get("live") == "1"
    return _respond(lambda client: documents.resources(client, request.path_params["pool"], is_live=is_live))


def _output_file(request: Request) -> Response:
    """Copy an output file from its node to a temporary directory, and send it."""
    task, path = request.query_params.get("task", ""), request.query_params.get("path", "")
    folder = Path(tempfile.mkdtemp(prefix="distflow-ui-"))
    clean = BackgroundTask(shutil.rmtree, folder, ignore_errors=True)
    try:
        with Client() as client:
            if not path.strip("./"):
                raise InputError(
                    "the request does not name an output file", hint="set `path` in the URL to the path of the file"
                )
            record = find_workflow(client, request.path_params["workflow"], report_age=False)
            fetched = fetch_output_files(client, record, folder, tasks=[task], paths=[glob.escape(path)])
            for error in fetched.errors:
                raise error
            copy = (fetched.folders[task] / path).resolve()
            if not copy.is_relative_to(folder.resolve()) or not copy.is_file():
                raise NotFound(f"`{path}` is not a file in the output of {task}")
    except DistflowError as error:
        return _Document(documents.error_document(error), status_code=_status_of(error), background=clean)
    attachment = f"attachment; filename*=UTF-8''{quote(copy.name, safe='')}"
    headers = {"Content-Disposition": attachment, "Content-Security-Policy": "default-src 'none'; sandbox"}
    return FileResponse(copy, media_type="application/octet-stream", headers=headers, background=clean)


def _stream(workflow: str | None, marker: Callable[[str | None], object], is_stopping: Callable[[], bool]) -> Response:
    """Send an event for each change until the page is closed or the server stops (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

    async def events() -> AsyncIterator[str]:
        last, number, quiet = object(), 0, 0
        while not is_stopping():
            try:
                found = await run_in_threadpool(marker, workflow)
            except DistflowError:
                found = None  # the page shows the same error at its next request
            quiet += 1
            if found != last:
                last, number, quiet = found, number + 1, 0
                yield f"data: {number}\n\n"
            elif quiet % _BEAT_POLLS == 0:
                yield ": no change\n\n"
            await asyncio.sleep(_POLL_S)

    return StreamingResponse(events(), media_type="text/event-stream")
