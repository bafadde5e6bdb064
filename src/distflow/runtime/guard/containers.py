"""Tasks in containers, through the command line of docker, podman or apptainer. The node needs nothing else.

A task's container shares the node's network, shared memory (``/dev/shm``) and process ids. So addresses, ports, signals, exit
codes and the search for remaining processes work as for a task without a container. The attempt's directory has the same path
inside and outside. Only docker and podman have containers that must be created and removed. Apptainer has no daemon: a task's
processes are descendants of the keeper. Starting a task without a container does not import this module.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from contextlib import contextmanager

from distflow.protocol.ends import EndReason
from distflow.protocol.light_typing import Any, Dict, Iterator, List, Optional, Tuple
from distflow.runtime import processes
from distflow.runtime.files import attempt_files
from distflow.runtime.files.safe_files import check_mounts
from distflow.runtime.guard.process_tree import size_text
from distflow.runtime.hashing import sha256_hex
from distflow.runtime.untrusted import MAX_BYTES, decode_object
from distflow.runtime.wire import Json, OpError

__all__ = ["engines", "enter", "identify", "labeled", "login_folder", "pull", "remove", "why_ended", "wrap"]


_CREATED = "container.id"
"""File that the container program writes after it has created the container."""

_ENGINES = ("docker", "podman")
_KNOWN = (*_ENGINES, "apptainer")
_REMOVE_S = 30.0
_INSPECT_S = 60.0
_PULL_S = 3600.0
_SECRET_WORDS = ("AUTH", "KEY", "PASS", "SECRET", "TOKEN")
"""Words in the names of variables that may hold a secret, such as ``DOCKER_AUTH_CONFIG``.

Such variables are not stored, because removing a container needs no secret.
"""
_CLIENT_PREFIXES = ("CONTAINER", "DOCKER", "PODMAN", "STORAGE", "XDG_", "HOME", "TMPDIR")
"""Prefixes of the variables by which docker and podman find their daemons, images and settings."""


def pull(container: Json, env: Dict[str, str], root: str, login: Optional[Json] = None) -> Json:
    """Check the mounts, and pull the image unless the node has it, with ``login`` (``registry``, ``auth``) if one is given.

    Returns ``program``, and ``was_there``: whether the node already had the image. Raises ``OpError``, for example of the kind
    ``image_pull``, ``no_container``, ``no_mount`` or ``timeout``.
    """
    program, image = _program(container, env), str(container["image"])
    check_mounts([mount.partition(":")[0] for mount in container.get("mounts") or []])
    if _is_apptainer(program):
        return _pull_with_apptainer(program, image, root, env, login)
    inspected = _run([program, "image", "inspect", image], env, _INSPECT_S)
    if inspected.returncode == 0:
        return {"program": program, "was_there": True}
    if login is None:
        pulled = _pull([program, "pull", "--quiet"], image, env)
    else:
        with login_folder(login, env) as folder:
            config = os.path.join(folder, "config.json")
            words = ["--config", folder, "pull"] if _is_docker(program) else ["pull", "--authfile", config]
            pulled = _pull([program, *words, "--quiet"], image, env)
    if pulled.returncode != 0:
        raise OpError("image_pull", "cannot pull the image `{}`: {}".format(image, _last_lines(pulled.stderr)))
    return {"program": program, "was_there": False}


def identify(launch: Json, attempt: str, env: Dict[str, str]) -> Optional[Json]:
    """Return the data that any process needs to end the attempt's container; None with Apptainer, which has no daemon.

    The data contain neither secrets of the task nor variables whose names suggest a secret.
    """
    secret = launch.get("secret_env") or {}
    program = _program(launch["container"], env)
    if _is_apptainer(program):
        return None
    return {
        "program": program,
        "name": _name(attempt),
        "memory": launch["container"].get("memory"),
        "env": {
            name: value
            for name, value in env.items()
            if name.startswith(_CLIENT_PREFIXES) and name not in secret and not any(word in name for word in _SECRET_WORDS)
        },
    }


def wrap(launch: Json, attempt: str, directory: str, env: Dict[str, str]) -> List[str]:
    """Return the command line that runs the launch in its container.

    Except for PATH and HOME, the command line contains no values of variables: the container program reads them from its own
    environment ``env``. Variables that the program expects under another name are added to ``env``.
    """
    container = launch["container"]
    program = _program(container, env)
    if _is_apptainer(program):
        # The directory is <root>/<workflow uuid>/<group>/<task>/<attempt>.
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(directory))))
        return _run_with_apptainer(program, dict(launch, argv=_argv(launch)), _names(launch, env), root, directory, env)
    cwd = os.path.join(directory, launch.get("cwd") or "work")
    words = [program, "run", "--name", _name(attempt), "--label", "distflow.attempt=" + attempt, *_limits(container)]
    words += ["--cidfile", os.path.join(directory, _CREATED), "--network", "host", "--ipc", "host", "--pid", "host"]
    words += ["--volume", "{0}:{0}".format(directory), "--workdir", cwd]
    for mount in container.get("mounts") or []:
        words += ["--volume", mount]
    if container.get("privileged"):
        words.append("--privileged")
    words += _user_options(program, launch, cwd)
    if (launch.get("env") or {}).get("CUDA_VISIBLE_DEVICES"):
        words += ["--gpus", "all"] if _is_docker(program) else ["--device", "nvidia.com/gpu=all"]
    words += _variables(launch, env)
    program_inside, *arguments = _argv(launch)
    return [*words, "--entrypoint", program_inside, str(container["image"]), *arguments]


def enter(launch: Json, attempt: str, directory: str, env: Dict[str, str], terminal: bool) -> List[str]:
    """Return the command line that runs ``launch["argv"]`` in the container of the attempt's running command.

    Apptainer runs it in a new container of the same image.
    """
    cwd = os.path.join(directory, launch.get("cwd") or "work")
    program = _program(launch["container"], env)
    if _is_apptainer(program):
        return wrap(launch, attempt, directory, env)
    words = [program, "exec", "--interactive", "--workdir", cwd]
    if terminal:
        words += ["--tty", "--env", "TERM"]
    words += _variables(launch, env)
    return [*words, _name(attempt), *_argv(launch)]


def _argv(launch: Json) -> List[str]:
    """Return the command to run inside the container.

    If the task adds directories to PATH, a shell in the container adds them, because only it knows the image's PATH.
    """
    if not launch.get("path"):
        return list(launch["argv"])
    return ["/bin/sh", "-c", 'PATH="$0:$PATH"; export PATH; exec "$@"', ":".join(launch["path"]), *launch["argv"]]


def remove(identity: Optional[Json]) -> Optional[str]:
    """Remove the container that ``identify`` described, with all its processes. Does nothing if it is gone.

    Returns an error message, or None.
    """
    if not identity:
        return None
    env = dict(os.environ, **identity["env"])
    try:
        # podman's `rm --force` alone would first wait ten seconds for processes that ignore TERM.
        _run([identity["program"], "kill", identity["name"]], env, _REMOVE_S)
        done = _run([identity["program"], "rm", "--force", identity["name"]], env, _REMOVE_S)
    except OpError as error:
        return "its container `{}` could not be removed: {}".format(identity["name"], error.message)
    if done.returncode == 0 or "no such container" in done.stderr.lower() or "no container with" in done.stderr.lower():
        return None
    return "its container `{}` could not be removed: {}".format(identity["name"], _last_lines(done.stderr))


def engines() -> List[Tuple[str, Dict[str, str]]]:
    """Return the paths of docker and podman, if installed, each with an empty mapping of variables for ``labeled``."""
    found = (processes.find_program(name, os.environ.get("PATH") or os.defpath) for name in _ENGINES)
    return [(program, {}) for program in found if program is not None]


def labeled(program: str, env: Dict[str, str]) -> List[Dict[str, str]]:
    """Return all containers of attempts, including ended containers: ``id``, ``name``, ``state``, ``cwd``, ``attempt``.

    The list is empty if the program cannot list containers.
    """
    env = dict(os.environ, **env)
    fields = (
        "{{.Id}}",
        "{{.Name}}",
        "{{.State.Status}}",
        "{{.Config.WorkingDir}}",
        '{{index .Config.Labels "distflow.attempt"}}',
    )
    try:
        listed = _run([program, "ps", "--all", "--quiet", "--no-trunc", "--filter", "label=distflow.attempt"], env, _REMOVE_S)
        ids = listed.stdout.split() if listed.returncode == 0 else []
        if not ids:
            return []
        # If a container is removed meanwhile, this fails, but prints the other containers.
        inspected = _run([program, "container", "inspect", "--format", "\t".join(fields), *ids], env, _INSPECT_S)
    except OpError:
        return []
    rows = [line.split("\t") for line in inspected.stdout.splitlines()]
    return [
        {"id": row[0], "name": row[1].lstrip("/"), "state": row[2], "cwd": row[3], "attempt": row[4]}
        for row in rows
        if len(row) == len(fields)
    ]


def why_ended(identity: Json, directory: str, exit_code: Optional[int]) -> Tuple[Optional[EndReason], Optional[str]]:
    """Return reason and message if the container was not created, or exceeded its memory limit; else two Nones.

    ``identity`` is the result of ``identify``. Call this function before ``remove``.
    """
    if exit_code == 125 and not os.path.exists(os.path.join(directory, _CREATED)):
        return EndReason.START_ERROR, "the container could not be created; the last lines of the output show the error"
    if exit_code == 137 and identity.get("memory"):
        why = _memory_message(identity)
        return (EndReason.EVICTED, why) if why else (None, None)
    return None, None


def _memory_message(identity: Json) -> Optional[str]:
    try:
        words = [identity["program"], "inspect", "--format", "{{.State.OOMKilled}}", identity["name"]]
        done = _run(words, dict(os.environ, **identity["env"]), _INSPECT_S)
    except OpError:
        return None
    if done.stdout.strip() != "true":
        return None
    return "it used more memory than the {} that it requested (`memory`), so the kernel killed it".format(
        size_text(identity["memory"])
    )


def _limits(container: Json) -> List[str]:
    """Return the options for memory and CPUs.

    With a memory limit, the ended container is kept, so that ``why_ended`` can find out whether the limit was the cause.
    """
    words = []
    if container.get("memory"):
        words += ["--memory", str(container["memory"]), "--memory-swap", str(container["memory"])]
    else:
        words.append("--rm")
    if container.get("cpus"):
        words += ["--cpus", str(min(int(container["cpus"]), os.cpu_count() or 1))]
    return words


def _program(container: Json, env: Dict[str, str]) -> str:
    wanted = str(container["runtime"])
    for name in _KNOWN if wanted == "auto" else (wanted,):
        program = processes.find_program(name, env.get("PATH") or os.defpath)
        if program is not None:
            return program
    text = (
        "none of {} is in PATH on this node; install one, or link it into a directory of PATH"
        if wanted == "auto"
        else "{} is not in PATH on this node; install it, or link it into a directory of PATH"
    )
    hint = ", or set `container: none` for the node, so that tasks run without their image"
    raise OpError("no_container", text.format(", ".join(_KNOWN) if wanted == "auto" else wanted) + hint)


def _name(attempt: str) -> str:
    """Return the container's name, which is unique to the attempt. Container names must be short and contain no slashes."""
    return "distflow-" + sha256_hex(attempt.encode())[:24]


def _is_docker(program: str) -> bool:
    return os.path.basename(program) == "docker"


def _user_options(program: str, launch: Json, cwd: str) -> List[str]:
    """Return the options that make the node's user own the task's files.

    podman needs none: it maps the container's root to that user.
    """
    if not _is_docker(program) or os.getuid() == 0:
        return []
    home = [] if "HOME" in launch["env"] else ["--env", "HOME=" + cwd]
    return ["--user", "{}:{}".format(os.getuid(), os.getgid()), *home]


def _variables(launch: Json, env: Dict[str, str]) -> List[str]:
    """Return the options for the task's and distflow's variables. PATH is the image's unless the task sets it.

    HOME is also the image's, unless the task or ``_user_options`` sets it.
    The option for the task's PATH contains its value, because the container program itself must have the node's PATH.
    """
    path = ["--env", "PATH=" + launch["env"]["PATH"]] if "PATH" in launch["env"] else []
    return [*path, *(word for name in _names(launch, env) for word in ("--env", name))]


def _names(launch: Json, env: Dict[str, str]) -> List[str]:
    added = ["DISTFLOW_ATTEMPT", "DISTFLOW_ATTEMPT_DIR", "DISTFLOW_HEARTBEAT", "TORCHELASTIC_ERROR_FILE"]
    added += ["PYTHONPATH"] if launch.get("python_path") else []
    return sorted({*launch["env"], *(launch.get("secret_env") or {}), *(name for name in added if name in env)} - {"PATH"})


def _pull(argv: List[str], image: str, env: Dict[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return _run([*argv, image], env, _PULL_S)
    except OpError as error:
        raise _slow_pull(argv[0], image) if error.kind == "timeout" else error from None


def _slow_pull(program: str, image: str) -> OpError:
    message = "pulling the image `{}` with `{}` did not finish within {:g} h; check the registry and the node's network"
    return OpError("timeout", message.format(image, os.path.basename(program), _PULL_S / 3600))


def _run(argv: List[str], env: Dict[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout_s,
            check=False, encoding="utf-8", errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise OpError("timeout", "`{}` did not finish within {:g} s".format(" ".join(argv[:3]), timeout_s)) from None
    except OSError as error:
        raise OpError.from_os(error, "cannot run `{}`".format(argv[0])) from error


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-2:])[:1000] or "no error was printed"


_APPTAINER_PREFIX = "APPTAINERENV_"


def _is_apptainer(program: str) -> bool:
    return os.path.basename(program) == "apptainer"


def _pull_with_apptainer(program: str, image: str, root: str, env: Dict[str, str], login: Optional[Json]) -> Json:
    """Pull the image to a file below ``root``. If ``image`` is a path, check that it exists. Raises ``OpError``."""
    path = _image_path(image, root)
    if os.path.exists(path):
        return {"program": program, "was_there": True}
    if _is_image_file(image):
        raise OpError(
            "image_pull", "the image file `{}` does not exist on this node; copy it there, or correct `image`".format(image)
        )
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    part = "{}.{}.part".format(path, os.getpid())
    source = image if "://" in image else "docker://" + image
    try:
        pulled = subprocess.run(
            [program, "pull", "--force", part, source], env={**env, **_login_variables(login)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=_PULL_S, check=False, encoding="utf-8", errors="replace",
        )  # fmt: skip
        if pulled.returncode != 0:
            raise OpError("image_pull", "cannot pull the image `{}`: {}".format(image, _last_lines(pulled.stderr)))
        os.replace(part, path)
    except subprocess.TimeoutExpired:
        raise _slow_pull(program, image) from None
    except OSError as error:
        raise OpError.from_os(error, "cannot pull the image `{}` to `{}`".format(image, path)) from error
    finally:
        try:
            os.unlink(part)
        except OSError:
            pass
    return {"program": program, "was_there": False}


def _run_with_apptainer(
    program: str, launch: Json, names: List[str], root: str, directory: str, env: Dict[str, str]
) -> List[str]:
    """Return the command line that runs the launch in its image.

    ``names`` are the variables to pass on, in addition to PATH. Their values are never in the command line: they are added to
    ``env`` with the prefix that makes Apptainer pass them on. Raises ``no_container`` for ``privileged``.
    """
    container = launch["container"]
    if container.get("privileged"):
        raise OpError(
            "no_container",
            "`privileged` needs docker or podman; this node uses apptainer. Remove `privileged`, or use other nodes",
        )
    cwd = os.path.join(directory, launch.get("cwd") or "work")
    words = [program, "exec", "--cleanenv", "--no-eval", "--writable-tmpfs", "--bind", directory, "--pwd", cwd]
    for mount in container.get("mounts") or []:
        words += ["--bind", mount]
    if (launch.get("env") or {}).get("CUDA_VISIBLE_DEVICES"):
        words.append("--nv")
    for name in names:
        if name in env:
            env[_APPTAINER_PREFIX + name] = env[name]
    if "PATH" in launch["env"]:
        env[_APPTAINER_PREFIX + "PATH"] = launch["env"]["PATH"]
    return [*words, _image_path(str(container["image"]), root), *launch["argv"]]


def _is_image_file(image: str) -> bool:
    return image.startswith("/") or (image.endswith(".sif") and "://" not in image)


def _image_path(image: str, root: str) -> str:
    """Return the path of the image: ``image`` itself if it is a path, or the pulled file, named by a digest of ``image``."""
    if _is_image_file(image):
        return os.path.expanduser(image)
    return os.path.join(root, "images", sha256_hex(image.encode())[:32] + ".sif")


def _login_variables(login: Optional[Json]) -> Dict[str, str]:
    """Return the variables from which Apptainer reads the login to a registry."""
    if login is None:
        return {}
    user, _, password = base64.b64decode(str(login["auth"])).decode().partition(":")
    return {"APPTAINER_DOCKER_USERNAME": user, "APPTAINER_DOCKER_PASSWORD": password}


_LOGIN_PREFIX = "login-"
_LOGIN_KEYS = ("auths", "credsStore", "credHelpers")


@contextmanager
def login_folder(login: Json, env: Dict[str, str]) -> Iterator[str]:
    """Provide a folder with ``config.json``: the user's settings with only this login. The folder is removed at the end."""
    import shutil  # this and the next module are needed only for a login
    import tempfile

    memory_folder = attempt_files.memory_folder()
    if memory_folder is not None:
        _remove_old_logins(memory_folder)
    try:
        # The name contains this process's id, by which leftovers of a killed process are recognized.
        folder = tempfile.mkdtemp(prefix="{}{}-".format(_LOGIN_PREFIX, os.getpid()), dir=memory_folder)
    except FileNotFoundError:
        folder = tempfile.mkdtemp()  # another process has just removed the empty directory
    try:
        own = env.get("DOCKER_CONFIG") or os.path.join(env.get("HOME") or os.path.expanduser("~"), ".docker")
        settings = {key: value for key, value in _docker_settings(own).items() if key not in _LOGIN_KEYS}
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


def _docker_settings(folder: str) -> Dict[str, Any]:
    try:
        with open(os.path.join(folder, "config.json"), "rb") as file:
            return dict(decode_object(file.read(MAX_BYTES + 1)))
    except (OSError, ValueError):
        return {}


def _remove_old_logins(memory_folder: str) -> None:
    """Remove login folders whose process was killed during a pull."""
    import shutil

    for name in os.listdir(memory_folder):
        pid = name[len(_LOGIN_PREFIX) :].partition("-")[0]
        if name.startswith(_LOGIN_PREFIX) and pid.isdigit() and processes.read_process(int(pid)) is None:
            shutil.rmtree(os.path.join(memory_folder, name), ignore_errors=True)
