"""A web server that receives notifications."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["SECRET", "Receiver", "running_receiver"]

SECRET = "T0S3CR3T"
"""A part of the URL that must not appear in any message."""


class Receiver(ThreadingHTTPServer):
    """A web server that stores the received documents, and answers with the status codes in ``answers``, or else with 200."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/{SECRET}?key={SECRET}"
        self.received: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        """The header ``Authorization`` of each request."""
        self.answers: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.is_silent = threading.Event()
        """While it is set, requests wait for ``may_answer``."""
        self.may_answer = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append(json.loads(body))
        self.server.authorizations.append(self.headers["Authorization"])
        if self.server.is_silent.is_set():
            self.server.may_answer.wait(60)
        self.send_response(200 if self.server.answers.empty() else self.server.answers.get())
        self.send_header("Location", self.server.url)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def running_receiver() -> Iterator[Receiver]:
    """Yield a server that answers requests until the end of the block."""
    with Receiver() as made:
        threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
        yield made
        made.may_answer.set()
        made.shutdown()
