"""Calls of the API of a Kubernetes cluster through the official client, and their errors."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from distflow.backends.allocated.engine import RequestRefused
from distflow.documents.text import plain
from distflow.errors import NodeUnreachable
from distflow.pools.model import KubernetesSettings

__all__ = ["ApiError", "KubernetesApi"]

_TIMEOUT_S = (10.0, 30.0)
"""Timeouts of connecting, and of each part of a response."""
_HANDSHAKE_S = 30.0
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_LARGEST = 256 << 20
_CONTENT = {"Content-Type": "application/json"}


class ApiError(Exception):
    """The API server refused a call."""

    def __init__(self, status: int, message: str) -> None:
        """Store the HTTP ``status`` and the server's ``message``."""
        super().__init__(message)
        self.status = status
        self.message = message


class KubernetesApi:
    """Calls of the API server, in one namespace. Safe to use from several threads.

    Calls raise ``NodeUnreachable`` if the API server does not answer, does not accept the credentials, or fails in a way that
    may pass (HTTP status 408, 429, or 500 and above). They raise ``ApiError`` for its other refusals, for which ``exec`` raises
    ``NodeUnreachable``, too. They raise ``RequestRefused`` if the kubeconfig or the package ``kubernetes`` cannot be used.
    Objects are mappings (their JSON).
    """

    def __init__(self, settings: KubernetesSettings, *, pool: str = "") -> None:
        """Use the cluster that ``settings`` name, without connecting. ``pool`` is the name of the pool with these settings."""
        self._settings = settings
        self.check_command = f"distflow pool check --pool {pool}" if pool else "distflow pool check"
        """The command that checks the pool, for hints."""
        self._lock = threading.Lock()
        self._client: Any = None
        self._namespace = settings.namespace or ""

    @property
    def name(self) -> str:
        """The name of the cluster in messages."""
        return self._settings.context or "Kubernetes"

    @property
    def namespace(self) -> str:
        """The namespace of all objects."""
        self._opened()
        return self._namespace

    def call(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Call the API, and return the object in the response. ``path`` is absolute."""
        client = self._opened()
        from kubernetes.client.exceptions import ApiException  # noqa: PLC0415  an optional package that takes long to import
        from urllib3.exceptions import HTTPError  # noqa: PLC0415  as above

        try:
            answer = client.rest_client.request(
                method, client.configuration.host.rstrip("/") + path, query_params=list((query or {}).items()) or None,
                headers={**client.default_headers, **_authorization(client), "Accept": "application/json", **_CONTENT},
                body=body, _preload_content=False, _request_timeout=_TIMEOUT_S,
            )  # fmt: skip
            with contextlib.closing(answer):
                data = json.loads(answer.read(_LARGEST))
        except ApiException as error:
            raise self._refused(int(error.status or 0), error.body or error.reason or "") from None
        except (HTTPError, OSError) as error:
            raise NodeUnreachable(self.name, f"the API server did not answer: {plain(str(error))[:300]}") from None
        except ValueError as error:
            raise NodeUnreachable(self.name, f"the response of the API server is not JSON: {plain(str(error))[:300]}") from None
        if not isinstance(data, dict):
            raise NodeUnreachable(self.name, "the response of the API server is not a JSON object")
        return data

    def objects(self, kind: str, *, labels: str = "", fields: str = "") -> list[dict[str, Any]]:
        """Return the objects of a kind of the core API, such as ``pods``, with these labels and fields."""
        query = {name: text for name, text in (("labelSelector", labels), ("fieldSelector", fields)) if text}
        items = self.call("GET", self.path(kind), query=query).get("items")
        return [one for one in items if isinstance(one, dict)] if isinstance(items, list) else []

    def create(self, kind: str, body: Mapping[str, Any], *, is_dry: bool = False) -> dict[str, Any]:
        """Create the object ``body``. ``is_dry``: only check whether the API server would accept it."""
        query = {"dryRun": "All"} if is_dry else None
        return self.call("POST", self.path(kind, api=body["apiVersion"]), query=query, body=body)

    def delete(self, kind: str, name: str) -> None:
        """Delete an object, and in the background all objects that it owns. Does nothing if it does not exist."""
        with contextlib.suppress(_NotFound):
            self.call("DELETE", self.path(kind, name), body={"propagationPolicy": "Background"})

    def path(self, kind: str, name: str = "", *, api: str = "v1") -> str:
        """Return the path of the objects of a kind in the namespace, or of the object ``name``."""
        start = f"/api/{api}" if "/" not in api else f"/apis/{api}"
        return f"{start}/namespaces/{quote(self.namespace, safe='')}/{kind}" + (f"/{quote(name, safe='')}" if name else "")

    def exec(self, node: str, pod: str, container: str, command: Sequence[str]) -> socket.socket:
        """Start a command in a container, and return the socket of its WebSocket.

        Raises ``NodeUnreachable`` for ``node``, also if the API server refuses.
        """
        client = self._opened()
        import websocket  # noqa: PLC0415  a dependency of the optional package
        from kubernetes.stream.ws_client import create_websocket  # noqa: PLC0415  as above

        try:
            headers = {**_authorization(client), "sec-websocket-protocol": "v4.channel.k8s.io"}
            words = [("command", word) for word in command]
            query = urlencode([*words, ("container", container), *((name, "true") for name in ("stdin", "stdout", "stderr"))])
            host = client.configuration.host.replace("http", "ws", 1).rstrip("/")
            websocket.setdefaulttimeout(_HANDSHAKE_S)
            made = create_websocket(client.configuration, f"{host}{self.path('pods', pod)}/exec?{query}", headers)
        except NodeUnreachable as error:
            raise NodeUnreachable(node, error.message, hint=error.hint) from None
        except websocket.WebSocketBadStatusException as error:
            try:
                refusal = self._refused(error.status_code, error.resp_body or b"").message
            except NodeUnreachable as refused:
                raise NodeUnreachable(node, refused.detail, hint=refused.hint) from None
            hint = f"run `{self.check_command}`, which names missing permissions" if error.status_code == 403 else ""
            raise NodeUnreachable(node, f"exec into the pod was refused: {refusal}", hint=hint) from None
        except (websocket.WebSocketException, OSError) as error:
            raise NodeUnreachable(node, f"exec into the pod failed: {plain(str(error))[:300]}") from None
        connection: socket.socket = made.sock
        made.sock = None
        return connection

    def close(self) -> None:
        """Close all connections, except those of ``exec``."""
        with self._lock:
            if self._client is not None:
                self._client.close()
            self._client = None

    def _refused(self, status: int, body: str | bytes) -> ApiError:
        """Return the error for a refused call. ``body`` is the body of the response.

        Raises ``NodeUnreachable`` if the same call may succeed later, perhaps after a new login.
        """
        message = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
        with contextlib.suppress(ValueError, AttributeError):
            message = str(json.loads(message).get("message") or message)
        message = plain(message)[:1000]
        if status == 401:
            raise NodeUnreachable(
                self.name, f"the API server does not accept the credentials: {message}", hint="log in again, or renew the token"
            )
        if status in (0, 408, 429) or status >= 500:
            # Without a status, the client itself has failed, which it does only for errors of TLS.
            what = (
                f"the API server failed with HTTP status {status}" if status else "the TLS connection to the API server failed"
            )
            raise NodeUnreachable(self.name, f"{what}{f': {message}' if message else ''}")
        return (_NotFound if status == 404 else ApiError)(status, message)

    def _opened(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._open()
            return self._client

    def _open(self) -> Any:
        """Return the client of the configured cluster. Raises ``RequestRefused`` if it is not usable."""
        try:
            import yaml  # noqa: PLC0415  a dependency of the next one
            from kubernetes import client, config  # noqa: PLC0415  an optional package that takes long to import
        except ImportError:
            raise RequestRefused(
                "the package `kubernetes` is not installed", hint="run: pip install 'distflow-cli[kubernetes]'"
            ) from None
        settings = self._settings
        files = settings.kubeconfig or os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
        has_file = any(map(os.path.exists, files.split(os.pathsep)))
        is_inside = not has_file and "KUBERNETES_SERVICE_HOST" in os.environ and settings.context is None
        configuration = client.Configuration()
        try:
            if is_inside:
                config.load_incluster_config(client_configuration=configuration)
                self._namespace = self._namespace or (_SERVICE_ACCOUNT / "namespace").read_text().strip()
            else:
                config.load_kube_config(files, settings.context, configuration, persist_config=False)
                self._namespace = self._namespace or _namespace_of(config.list_kube_config_contexts, files, settings.context)
        except (config.ConfigException, yaml.YAMLError, OSError, ValueError, KeyError, TypeError) as error:
            what = "there is no kubeconfig, and the service account of this pod" if is_inside else "the kubeconfig"
            hint = "check `kubernetes.context` and `kubernetes.kubeconfig` of the pool with `kubectl config get-contexts`"
            if is_inside:
                hint = "mount a token of the service account, or set `kubernetes.kubeconfig` of the pool"
            raise RequestRefused(f"{what} cannot be used: {plain(str(error))[:300]}", hint=hint) from None
        configuration.retries = False
        if not configuration.verify_ssl:
            warnings.filterwarnings("ignore", message="Unverified HTTPS request")  # the kubeconfig disables verification
        return client.ApiClient(configuration)


class _NotFound(ApiError):
    """The object does not exist."""


def _authorization(client: Any) -> dict[str, str]:
    headers: dict[str, str] = {}
    client.update_params_for_auth(headers, [], ["BearerToken"])
    return {name.lower(): value for name, value in headers.items()}


def _namespace_of(contexts: Callable[[str], tuple[Any, Any]], files: str, name: str | None) -> str:
    known, active = contexts(files)
    chosen = next((one for one in known if one["name"] == name), active)
    return str(chosen["context"].get("namespace") or "default")
