"""The service with which a node transfers data itself: outputs of tasks to stores, and inputs from stores to tasks.

Like the services of ``runtime``, it runs with the node's Python, but from a separate archive
(``backends.machines.connection.bootstrap``). If that Python is too old or lacks the driver, the service reports this, and the
supervisor relays the data. An old Python (3.8 or 3.9) must be able to parse this file and to run ``serve``, ``_Reporter`` and
the version check. Modules that need a newer Python are therefore imported in functions, after that check.

Standard input: one line with the request, whose credentials stay in memory, then an empty line every few seconds. Standard
output: a line ``{"done": n, "total": m}`` every second, and finally ``{"files", "size", "label"}``, ``{"relay": why}`` or
``{"error": {"kind", "message"}}``.
The service ends with its connection, and when it receives nothing for 30 s. See docs/agent-protocol.md.
"""

from __future__ import annotations

import importlib
import os
import site
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.runtime import processes
from distflow.runtime.files import attempts
from distflow.runtime.files.packing import check_output
from distflow.runtime.files.safe_files import path_inside
from distflow.runtime.services.frames import Peer
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import OpError, encode

if TYPE_CHECKING:
    from distflow.storage.credentials import Identity

__all__ = ["serve"]

_OLDEST_PYTHON = (3, 10)
_MOST_LINE_BYTES = 1 << 20
_REPORT_EVERY_S = 1.0


def serve(root: str, _umask: int) -> None:
    """Deliver the output of one attempt, or fetch one of its inputs, as the request on standard input says.

    ``root`` is distflow's private directory on the node.
    """
    processes.rename_self("df-data")
    processes.hide_memory()
    peer = Peer(outgoing=-1)
    line = peer.line(_MOST_LINE_BYTES)
    if not line:
        sys.exit(1)
    request = decode_object(line)
    reporter = _Reporter(os.dup(1))
    # Drivers might print secrets.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    threading.Thread(target=_end_with_connection, args=(peer,), daemon=True).start()
    threading.Thread(target=reporter.run, daemon=True).start()
    reporter.end(_outcome(root, request, reporter))


def _outcome(root: str, request: dict[str, Any], reporter: _Reporter) -> dict[str, Any]:
    if sys.version_info < _OLDEST_PYTHON:
        version = sys.version.split(maxsplit=1)[0]
        remedy = "for direct transfers, set `python` to an interpreter of version 3.10 or newer"
        return {"relay": f"{sys.executable} is Python {version} ({remedy})"}
    from distflow.errors import DistflowError, StorageRefused, StorageUnreachable  # noqa: PLC0415  an old Python cannot import it
    from distflow.shell import mask  # noqa: PLC0415
    from distflow.storage.credentials import Identity  # noqa: PLC0415

    identity = Identity.from_wire(request["identity"])

    def masked(text: object) -> str:
        return mask(": ".join(str(text).split("\n")), identity.secrets)

    try:
        return _move(root, request, identity, reporter)
    except OpError as error:
        return {"error": error.as_json()}
    except (StorageUnreachable, StorageRefused) as error:
        # The supervisor may reach the store where this node cannot.
        return {"relay": masked(error)}
    except DistflowError as error:
        return {"error": {"kind": "data", "message": masked(error)}}
    except Exception as error:  # noqa: BLE001  another version of a driver may raise anything; the supervisor has its own
        return {"relay": masked(repr(error))}


def _move(root: str, request: dict[str, Any], identity: Identity, reporter: _Reporter) -> dict[str, Any]:
    from distflow.documents.urls import parse_url  # noqa: PLC0415
    from distflow.storage.credentials import package_of  # noqa: PLC0415
    from distflow.storage.failures import Retries  # noqa: PLC0415
    from distflow.storage.objects import open_objects  # noqa: PLC0415

    is_input = "input" in request
    path = _input_path(root, request) if is_input else check_output(root, str(request["attempt"]))
    url = parse_url((request["input"] if is_input else request["delivery"])["url"], writes=not is_input)
    missing = _missing_package("fsspec", package_of(url, identity.credentials))
    if missing:
        return {"relay": f"{sys.executable} has no {missing} (for direct transfers: {sys.executable} -m pip install {missing})"}
    os.environ.update(request["environment"])  # set in the pool and the node, for example HTTPS_PROXY
    _use_identity(identity)
    store, retries = open_objects(url, identity.credentials), Retries(pauses_s=request["pauses_s"])
    if is_input:
        from distflow.storage.task_data import InputRequest, fetch_input  # noqa: PLC0415

        requested = InputRequest(**request["input"])
        moved = fetch_input(store, requested, Path(path), retries=retries, on_progress=reporter.progress)
        return {"files": moved.files, "size": moved.size, "label": requested.label}
    from distflow.storage.task_data import Delivery, deliver  # noqa: PLC0415

    done = deliver(store, Delivery(**request["delivery"]), Path(path), retries=retries, on_progress=reporter.progress)
    return {"files": done.files, "size": done.size, "label": done.label}


def _input_path(root: str, request: dict[str, Any]) -> str:
    """Return the path of an input, in the directory of an existing attempt."""
    directory = attempts.directory_of(root, str(request["attempt"]))
    if not os.path.isdir(directory):
        raise OpError("not_found", f"`{directory}` no longer exists")
    return path_inside(directory, str(request["place"]))


def _missing_package(*packages: str) -> str:
    """Import all packages. If an import fails, return the last package, which depends on the others; else an empty text."""
    # The bootstrap stub starts Python without site-packages, so that other services start faster.
    site.main()
    if sys.prefix == sys.base_prefix and site.getusersitepackages() not in sys.path:
        site.addsitedir(site.getusersitepackages())
    found = ""
    for name in packages:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001  a broken package counts as missing
            found = packages[-1]
    return found


def _use_identity(identity: Identity) -> None:
    """Authenticate as the workflow's user. Ignore credentials in this node's variables and AWS files."""
    from distflow.storage.credentials import DRIVER_VARIABLES  # noqa: PLC0415

    for name in [one for one in os.environ if one.startswith(DRIVER_VARIABLES)]:
        del os.environ[name]
    os.environ.update({"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull})
    os.environ.update({name: value.reveal() for name, value in identity.environment.items()})


class _Reporter:
    """Reports progress every second, even if nothing changed, because a failed write shows that the connection has ended."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._done = self._total = 0

    def progress(self, done: int, total: int) -> None:
        self._done, self._total = done, total

    def run(self) -> None:
        while not self._over.wait(_REPORT_EVERY_S):
            with self._lock:
                if not self._over.is_set():
                    self._send({"done": self._done, "total": self._total})

    def end(self, outcome: dict[str, Any]) -> None:
        with self._lock:
            self._over.set()
            self._send(outcome)
        os._exit(0)  # threads of a driver may still be running

    def _send(self, message: dict[str, Any]) -> None:
        try:
            data = encode(message)
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            os._exit(1)


def _end_with_connection(peer: Peer) -> None:
    """End this process with the connection, or when the supervisor stops sending its empty lines."""
    peer.line(_MOST_LINE_BYTES)
    os._exit(1)
