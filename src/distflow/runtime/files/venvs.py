"""Python environments that tasks share: ``<root>/venvs/<key>/env``, built by ``services.venv_builder``.

The key identifies the requested packages, this node's interpreter and its system, so each environment is built once. A virtual
environment cannot be moved. It is therefore built at its final path, and the file ``complete`` is written last. A directory
without that file is not used, and the next builder starts again. A process that builds or removes an
environment locks ``<root>/venvs/<key>.lock``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys

from distflow.protocol.light_typing import Iterator, Optional, Tuple
from distflow.runtime.files.root_directory import is_marked, is_own_directory
from distflow.runtime.hashing import sha256_hex
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import Json, OpError

__all__ = [
    "COMPLETE",
    "ENV",
    "REMEDY",
    "VENVS",
    "activated",
    "directory_of",
    "is_complete",
    "list_venvs",
    "lock_of",
    "read_record",
    "require",
    "tools",
    "touch",
]

VENVS = "venvs"
ENV = "env"
"""Directory of the environment itself."""
COMPLETE = "complete"
"""File with a record of the build. Its modification time is the last use."""
_KEY = r"[0-9a-f]{40}"
_MAX_RECORD = 4096


def directory_of(root: str, digest: object) -> str:
    """Return the directory of the environment for ``digest`` (``Requirements.digest``) and this interpreter.

    Raises ``bad_request`` for a malformed digest.
    """
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise OpError("bad_request", "`venv` must be a SHA-256 in hexadecimal")
    system = os.uname()
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        library = ""
    parts = [digest, sys.version.split()[0], os.path.realpath(sys.executable), system.sysname, system.machine, library]
    return os.path.join(root, VENVS, sha256_hex(json.dumps(parts).encode())[:40])


def lock_of(directory: str) -> str:
    """Return the path of an environment's lock file."""
    return directory + ".lock"


def is_complete(directory: str) -> bool:
    """Return whether an environment is complete, belongs to this user, and was built by distflow."""
    path = os.path.join(directory, COMPLETE)
    is_ours = is_own_directory(directory) and is_marked(directory)
    return (
        is_ours
        and os.path.isfile(path)
        and not os.path.islink(path)
        and os.access(os.path.join(directory, ENV, "bin/python"), os.X_OK)
    )


def require(root: str, digest: object) -> str:
    """Return the directory of a complete environment, and note its use. Raises ``no_venv`` if it must be built first."""
    directory = directory_of(root, digest)
    if not is_complete(directory):
        raise OpError(
            "no_venv",
            "this node does not have the task's Python environment, which may have been removed; submit the workflow again",
        )
    touch(directory)
    return directory


def touch(directory: str) -> None:
    """Note that an environment is used now."""
    with contextlib.suppress(OSError):
        os.utime(os.path.join(directory, COMPLETE))


def activated(root: str, launch: Json) -> Json:
    """Return the launch with its Python environment, if any, on PATH, as after ``activate``. Raises as ``require`` does."""
    if not launch.get("venv"):
        return launch
    env = os.path.join(require(root, launch["venv"]), ENV)
    variables = dict(launch.get("env") or {}, VIRTUAL_ENV=env)
    return dict(launch, env=variables, path_prepend=[os.path.join(env, "bin"), *(launch.get("path_prepend") or [])])


def list_venvs(root: str) -> Iterator[Tuple[str, str]]:
    """Yield the key and the directory of every environment of distflow, including half-built environments."""
    top = os.path.join(root, VENVS)
    if not is_own_directory(top):
        return
    for name in sorted(os.listdir(top)):
        directory = os.path.join(top, name)
        if re.fullmatch(_KEY, name) and is_own_directory(directory) and is_marked(directory):
            yield name, directory


def read_record(directory: str) -> Optional[Json]:
    """Return the record of a build; None if the environment is not complete or the record cannot be read."""
    if not is_complete(directory):
        return None
    try:
        with open(os.path.join(directory, COMPLETE), "rb") as file:
            return dict(decode_object(file.read(_MAX_RECORD)))
    except (OSError, ValueError):
        return None


REMEDY = "install uv, or the package python3-venv of the node's system"
"""The remedy for a node without the ``tools`` to build environments."""


def tools(path: str) -> Json:
    """Return the tools that can build environments: ``uv`` is the path of uv or None, and ``pip`` whether pip can be used.

    uv is searched for in ``path`` (a PATH), and then in ``~/.local/bin`` and ``~/.cargo/bin``.
    """
    from importlib.util import find_spec

    from distflow.runtime.processes import find_program

    home = os.path.expanduser("~")
    places = [path, os.path.join(home, ".local/bin"), os.path.join(home, ".cargo/bin")]
    return {
        "uv": find_program("uv", ":".join(places)),
        # Debian and Ubuntu leave out `ensurepip` unless python3-venv is installed.
        "pip": find_spec("venv") is not None and find_spec("ensurepip") is not None,
    }
