"""The node's end of data: what a task wrote goes to its store from where it lies, what it takes comes to where it runs.

A service as those of ``runtime`` are, out of an archive of its own (``machines.connection.bundles``), run by the node's python.
That may be too old for anything but what this module imports at first, or lack the driver: then it says so, and the submitter
relays. Standard input: a line with the request; what it is told is kept in memory only. Standard output: lines ``{"done": n,
"total": m}`` every second, at last ``{"files", "size", "words"}``, ``{"relay": why}`` or ``{"error": {"kind", "message"}}``.
It ends with its connection, also when nothing comes over that for long. See docs/agent-protocol.md.
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
from distflow.runtime.files.safe_paths import inside
from distflow.runtime.services.peer import Peer
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import OpError, encode

if TYPE_CHECKING:
    from distflow.storage.identity import Identity

__all__ = ["serve"]

_NEEDED = (3, 10)
_LONGEST = 1 << 20
_TOLD_EVERY_S = 1.0


def serve(root: str, _umask: int) -> None:
    """Deliver the output of one attempt, or bring one of its inputs."""
    processes.rename_self("df-data")
    processes.hide_memory()
    peer = Peer(outgoing=-1)
    line = peer.line(_LONGEST)
    if not line:
        sys.exit(1)
    request = decode_object(line)
    telling = _Telling(os.dup(1))
    # What drivers print is for nobody: it might hold what is secret.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    threading.Thread(target=_end_with_connection, args=(peer,), daemon=True).start()
    threading.Thread(target=telling.run, daemon=True).start()
    telling.end(_outcome(root, request, telling))


def _outcome(root: str, request: dict[str, Any], telling: _Telling) -> dict[str, Any]:
    if sys.version_info < _NEEDED:
        version = sys.version.split(maxsplit=1)[0]
        return {"relay": f"{sys.executable} is Python {version} (to make it direct, let its `python` be 3.10 or newer)"}
    from distflow.errors import DistflowError, StorageRefused, StorageUnreachable  # noqa: PLC0415  as the first lines say
    from distflow.shell import mask  # noqa: PLC0415
    from distflow.storage.identity import Identity  # noqa: PLC0415

    identity = Identity.told(request["identity"])

    def masked(text: object) -> str:
        return mask(": ".join(str(text).split("\n")), identity.secrets)

    try:
        return _move(root, request, identity, telling)
    except OpError as error:
        return {"error": error.as_json()}
    except (StorageUnreachable, StorageRefused) as error:
        # It may be this node alone that cannot, or may not.
        return {"relay": masked(error)}
    except DistflowError as error:
        return {"error": {"kind": "data", "message": masked(error)}}
    except Exception as error:  # noqa: BLE001  a driver of another time may do what it likes; the submitter has its own
        return {"relay": masked(repr(error))}


def _move(root: str, request: dict[str, Any], identity: Identity, telling: _Telling) -> dict[str, Any]:
    from distflow.documents.urls import parse_url  # noqa: PLC0415
    from distflow.storage.objects import open_objects  # noqa: PLC0415
    from distflow.storage.options import package_of  # noqa: PLC0415
    from distflow.storage.trying import Patience  # noqa: PLC0415

    comes = "arrival" in request
    here = _place(root, request) if comes else check_output(root, str(request["attempt"]))
    url = parse_url((request["arrival"] if comes else request["delivery"])["url"], writes=not comes)
    lacking = _lacking("fsspec", package_of(url))
    if lacking:
        return {"relay": f"{sys.executable} has no {lacking} (to make it direct: {sys.executable} -m pip install {lacking})"}
    os.environ.update(request["environment"])  # the way out of its network, such as HTTPS_PROXY
    _become(identity)
    store, patience = open_objects(url, identity.credentials), Patience(pauses_s=request["pauses_s"])
    if comes:
        from distflow.storage.arrival import Arrival, arrive  # noqa: PLC0415

        arrival = Arrival(**request["arrival"])
        moved = arrive(store, arrival, Path(here), patience=patience, told=telling.told)
        return {"files": moved.files, "size": moved.size, "words": arrival.words}
    from distflow.storage.delivery import Delivery, deliver  # noqa: PLC0415

    done = deliver(store, Delivery(**request["delivery"]), Path(here), patience=patience, told=telling.told)
    return {"files": done.files, "size": done.size, "words": done.words}


def _place(root: str, request: dict[str, Any]) -> str:
    """Return where an input comes to, in the directory of an attempt that is there."""
    directory = attempts.directory_of(root, str(request["attempt"]))
    if not os.path.isdir(directory):
        raise OpError("not_found", f"{directory} is not there any more")
    return inside(directory, str(request["place"]))


def _lacking(*packages: str) -> str:
    """Return the last package that cannot be imported here; it brings the others along."""
    # The stub left out what is installed, so that every other service starts faster.
    site.main()
    if sys.prefix == sys.base_prefix and site.getusersitepackages() not in sys.path:
        site.addsitedir(site.getusersitepackages())
    found = ""
    for name in packages:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001  one that is broken is as good as none
            found = packages[-1]
    return found


def _become(identity: Identity) -> None:
    """Be to the store who the submitter is, and nobody whom this node may know."""
    from distflow.storage.identity import DRIVERS_VARIABLES  # noqa: PLC0415

    for name in [one for one in os.environ if one.startswith(DRIVERS_VARIABLES)]:
        del os.environ[name]
    os.environ.update({"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull})
    os.environ.update({name: value.reveal() for name, value in identity.environment.items()})


class _Telling:
    """Says how far it is, also when that is nowhere: what nobody hears any more ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._done = self._total = 0

    def told(self, done: int, total: int) -> None:
        self._done, self._total = done, total

    def run(self) -> None:
        while not self._over.wait(_TOLD_EVERY_S):
            with self._lock:
                if not self._over.is_set():
                    self._say({"done": self._done, "total": self._total})

    def end(self, outcome: dict[str, Any]) -> None:
        with self._lock:
            self._over.set()
            self._say(outcome)
        os._exit(0)  # threads of a driver may still wait for something

    def _say(self, message: dict[str, Any]) -> None:
        try:
            data = encode(message)
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            os._exit(1)


def _end_with_connection(peer: Peer) -> None:
    """End when the connection does, or the submitter sends nothing for long: it sends empty lines, and nothing else."""
    peer.line(_LONGEST)
    os._exit(1)
