"""A container registry for tests, with one image and a password. It implements version 2 of the registry protocol."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import platform
import tarfile
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from types import TracebackType

__all__ = ["Registry"]

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Registry:
    """A context manager that serves ``<address>/given/image:1`` on loopback, to clients with the password."""

    def __init__(self, user: str, password: str, skeleton: bytes) -> None:
        """Create the image from ``skeleton``, a tar archive."""
        self._wanted = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        self.served: list[str] = []
        self.refused: list[str] = []
        self._contents = _image(skeleton)
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                registry.answer(self)

            def do_HEAD(self) -> None:
                registry.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Registry:
        """Start the server."""
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    @property
    def image(self) -> str:
        """The full name of the image."""
        return f"{self.address}/given/image:1"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        kind, body = _MANIFEST, b"{}"
        if request.headers.get("Authorization") != self._wanted:
            self.refused.append(request.path)
            status, kind = 401, "application/json"
        elif request.path.rstrip("/") == "/v2":
            status, kind = 200, "application/json"
        else:
            name = request.path.rpartition("/")[2]
            status = 200 if name in self._contents else 404
            body = self._contents.get(name, b"{}")
            kind = _MANIFEST if "/manifests/" in request.path else "application/octet-stream"
            self.served.append(request.path)
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        request.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        if status == 401:
            request.send_header("WWW-Authenticate", 'Basic realm="here"')
        elif status == 200 and "/v2/" in request.path[:-1]:
            request.send_header("Docker-Content-Digest", _digest(body))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)


def _image(skeleton: bytes) -> Mapping[str, bytes]:
    with tarfile.open(fileobj=BytesIO(skeleton)):
        layer = gzip.compress(skeleton, mtime=0)
    settings = json.dumps(
        {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()), "os": "linux", "config": {},
            "rootfs": {"type": "layers", "diff_ids": [_digest(skeleton)]},
        }
    ).encode()  # fmt: skip
    parts = (("application/vnd.oci.image.config.v1+json", settings), ("application/vnd.oci.image.layer.v1.tar+gzip", layer))
    config, packed = ({"mediaType": kind, "size": len(data), "digest": _digest(data)} for kind, data in parts)
    manifest = json.dumps({"schemaVersion": 2, "mediaType": _MANIFEST, "config": config, "layers": [packed]}).encode()
    return {"1": manifest, _digest(manifest): manifest, _digest(settings): settings, _digest(layer): layer}


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
