"""Tasks in images through Apptainer.

Apptainer has no daemon, and a task's processes are children of the keeper, as without a container. So signals, exit codes,
limits and the search for remaining processes work as for a task without an image, and no container has to be removed. Options
and variables: Apptainer's user guide (``exec``, environment and metadata). This module is imported only when a task needs it.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
from typing import Dict, List, Optional

from distflow.runtime.wire import Json, OpError

__all__ = ["is_apptainer", "pull", "wrap"]

_PULL_S = 3600.0
_PREFIX = "APPTAINERENV_"


def is_apptainer(program: str) -> bool:
    """Whether a program is Apptainer."""
    return os.path.basename(program) == "apptainer"


def pull(program: str, image: str, root: str, env: Dict[str, str], login: Optional[Json]) -> Json:
    """Pull the image to a file below ``root``, or check that the file it names exists. Raises ``image_pull``."""
    path = _image(image, root)
    if os.path.exists(path):
        return {"program": program, "was_there": True}
    if _is_file(image):
        raise OpError("image_pull", "the image {} is not on this node".format(image))
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    part = "{}.{}.part".format(path, os.getpid())
    source = image if "://" in image else "docker://" + image
    try:
        pulled = subprocess.run(
            [program, "pull", "--force", part, source], env={**env, **_user(login)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=_PULL_S, check=False, encoding="utf-8", errors="replace",
        )  # fmt: skip
        if pulled.returncode != 0:
            lines = [line.strip() for line in pulled.stderr.splitlines() if line.strip()]
            why = " / ".join(lines[-2:])[:1000] or "it did not say why"
            raise OpError("image_pull", "the image {} cannot be pulled: {}".format(image, why))
        os.replace(part, path)
    except subprocess.TimeoutExpired:
        raise OpError("timeout", "the image {} did not come within {:g} s".format(image, _PULL_S)) from None
    except OSError as error:
        raise OpError.from_os(error, "the image {} cannot be kept at {}".format(image, path)) from error
    finally:
        try:
            os.unlink(part)
        except OSError:
            pass
    return {"program": program, "was_there": False}


def wrap(program: str, launch: Json, names: List[str], root: str, directory: str, env: Dict[str, str]) -> List[str]:
    """Return the command line that runs the launch in its image.

    ``names`` are the variables that the task sees. Their values are never in the command line: they are added to ``env`` under
    the names from which Apptainer passes them on.
    """
    container = launch["container"]
    if container.get("privileged"):
        raise OpError("no_container", "`privileged` needs docker or podman; this node has apptainer")
    cwd = os.path.join(directory, launch.get("cwd") or "work")
    words = [program, "exec", "--cleanenv", "--no-eval", "--writable-tmpfs", "--bind", directory, "--pwd", cwd]
    for mount in container.get("mounts") or []:
        words += ["--bind", mount]
    if (launch.get("env") or {}).get("CUDA_VISIBLE_DEVICES"):
        words.append("--nv")
    for name in names:
        if name in env:
            env[_PREFIX + name] = env[name]
    if "PATH" in launch["env"]:
        env[_PREFIX + "PATH"] = launch["env"]["PATH"]
    return [*words, _image(str(container["image"]), root), *launch["argv"]]


def _is_file(image: str) -> bool:
    return image.startswith("/") or image.endswith(".sif")


def _image(image: str, root: str) -> str:
    """Return the path of the image: the file that it names, or the pulled file, which is named by the image's digest."""
    if _is_file(image):
        return os.path.expanduser(image)
    return os.path.join(root, "images", hashlib.sha256(image.encode()).hexdigest()[:32] + ".sif")


def _user(login: Optional[Json]) -> Dict[str, str]:
    """Return the variables from which Apptainer reads the login to a registry."""
    if login is None:
        return {}
    user, _, password = base64.b64decode(str(login["auth"])).decode().partition(":")
    return {"APPTAINER_DOCKER_USERNAME": user, "APPTAINER_DOCKER_PASSWORD": password}
