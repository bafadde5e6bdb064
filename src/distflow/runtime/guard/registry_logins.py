"""The login to a registry for one pull: a folder for docker and podman, in memory if the node has a memory file system."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from typing import Any, Dict, Iterator

from distflow.runtime import processes
from distflow.runtime.files import secret_files
from distflow.runtime.untrusted import MAX_BYTES, decode_object
from distflow.runtime.wire import Json

__all__ = ["written"]

_PREFIX = "login-"
_OF_LOGINS = ("auths", "credsStore", "credHelpers")


@contextmanager
def written(login: Json, env: Dict[str, str]) -> Iterator[str]:
    """Provide a folder with ``config.json``: the user's own settings, but only this login. It is removed at the end."""
    home = secret_files.memory_folder()
    if home is not None:
        _sweep(home)
    try:
        # The name contains this process's id, by which leftovers of a killed process are recognized.
        folder = tempfile.mkdtemp(prefix="{}{}-".format(_PREFIX, os.getpid()), dir=home)
    except FileNotFoundError:
        folder = tempfile.mkdtemp()  # another process has just removed the empty directory
    try:
        own = env.get("DOCKER_CONFIG") or os.path.join(env.get("HOME") or os.path.expanduser("~"), ".docker")
        settings = {key: value for key, value in _settings(own).items() if key not in _OF_LOGINS}
        settings["auths"] = {str(login["registry"]): {"auth": str(login["auth"])}}
        fd = os.open(os.path.join(folder, "config.json"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(settings, file)
        for name in os.listdir(own) if os.path.isdir(own) else []:
            if name != "config.json":  # contexts and certificates, by which docker finds its daemon
                os.symlink(os.path.join(os.path.abspath(own), name), os.path.join(folder, name))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _settings(folder: str) -> Dict[str, Any]:
    try:
        with open(os.path.join(folder, "config.json"), "rb") as file:
            return dict(decode_object(file.read(MAX_BYTES + 1)))
    except (OSError, ValueError):
        return {}


def _sweep(home: str) -> None:
    """Remove leftovers of killed pulls."""
    for name in os.listdir(home):
        pid = name[len(_PREFIX) :].partition("-")[0]
        if name.startswith(_PREFIX) and pid.isdigit() and processes.read_process(int(pid)) is None:
            shutil.rmtree(os.path.join(home, name), ignore_errors=True)
