"""Tasks in containers, through the command line of docker, podman or apptainer: nothing else is needed on the node.

A task's container shares with its node the network, the memory for messages between processes (``/dev/shm``) and the process
ids, so that addresses, ports, signals, exit codes and the search for what is left are those of a task without one. The
attempt's directory stands in it under its own path. What is said here of making and removing containers is for docker and
podman; ``apptainer`` has none. Loaded only when a launch has a ``container``.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from typing import Dict, List, Optional, Tuple

from distflow.protocol.ends import EndReason
from distflow.runtime import processes
from distflow.runtime.files.safe_paths import check_mounts
from distflow.runtime.guard import apptainer
from distflow.runtime.guard.memory_limit import size_text
from distflow.runtime.wire import Json, OpError

__all__ = ["CREATED", "engines", "enter", "identify", "labelled", "pull", "remove", "why_ended", "wrap"]

CREATED = "container.id"
"""Written by the container's program once the container is made."""

_ENGINES = ("docker", "podman")
_KNOWN = (*_ENGINES, "apptainer")
_REMOVE_S = 30.0
_INSPECT_S = 60.0
_PULL_S = 3600.0
_SECRET_WORDS = ("AUTH", "KEY", "PASS", "SECRET", "TOKEN")
"""What a variable is called that may hold one, such as ``DOCKER_AUTH_CONFIG``; removing a container needs none."""
_OF_CLIENT = ("CONTAINER", "DOCKER", "PODMAN", "STORAGE", "XDG_", "HOME", "TMPDIR")
"""Beginnings of the variables by which the program finds its daemon, its images and its settings."""


def pull(container: Json, env: Dict[str, str], root: str, login: Optional[Json] = None) -> Json:
    """Have the image on the node, by ``login`` (``registry``, ``auth``) where one is given.

    Answers ``program`` and whether it ``was_there``. Raises ``image_pull``, ``no_container``.
    """
    program, image = _program(container, env), str(container["image"])
    check_mounts([mount.partition(":")[0] for mount in container.get("mounts") or []])
    if apptainer.is_it(program):
        return apptainer.pull(program, image, root, env, login)
    looked = _run([program, "image", "inspect", image], env, _INSPECT_S)
    if looked.returncode == 0:
        return {"program": program, "was_there": True}
    if login is None:
        pulled = _run([program, "pull", "--quiet", image], env, _PULL_S)
    else:
        from distflow.runtime.guard import registry_logins

        with registry_logins.written(login, env) as folder:
            config = os.path.join(folder, "config.json")
            words = ["--config", folder, "pull"] if _is_docker(program) else ["pull", "--authfile", config]
            pulled = _run([program, *words, "--quiet", image], env, _PULL_S)
    if pulled.returncode != 0:
        raise OpError("image_pull", "the image {} cannot be pulled: {}".format(image, _last_words(pulled.stderr)))
    return {"program": program, "was_there": False}


def identify(launch: Json, attempt: str, env: Dict[str, str]) -> Optional[Json]:
    """What must be known to end the attempt's container, whoever ends it; None where there is none. Holds no secret."""
    secret = launch.get("secret_env") or {}
    program = _program(launch["container"], env)
    if apptainer.is_it(program):
        return None
    return {
        "program": program,
        "name": _name(attempt),
        "memory": launch["container"].get("memory"),
        "env": {
            name: value
            for name, value in env.items()
            if name.startswith(_OF_CLIENT) and name not in secret and not any(word in name for word in _SECRET_WORDS)
        },
    }


def wrap(launch: Json, attempt: str, directory: str, env: Dict[str, str]) -> List[str]:
    """The command line that runs the launch in its container.

    Values of variables are never in it, PATH aside: the program takes them from its own environment, ``env``, which gets what
    it wants under another name.
    """
    container = launch["container"]
    program = _program(container, env)
    if apptainer.is_it(program):
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(directory))))
        return apptainer.wrap(program, dict(launch, argv=_argv(launch)), _names(launch, env), root, directory, env)
    cwd = os.path.join(directory, launch.get("cwd") or "work")
    words = [program, "run", "--name", _name(attempt), "--label", "distflow.attempt=" + attempt, *_limits(container)]
    words += ["--cidfile", os.path.join(directory, CREATED), "--network", "host", "--ipc", "host", "--pid", "host"]
    words += ["--volume", "{0}:{0}".format(directory), "--workdir", cwd]
    for mount in container.get("mounts") or []:
        words += ["--volume", mount]
    if container.get("privileged"):
        words.append("--privileged")
    words += _user(program, launch, cwd)
    if (launch.get("env") or {}).get("CUDA_VISIBLE_DEVICES"):
        words += ["--gpus", "all"] if _is_docker(program) else ["--device", "nvidia.com/gpu=all"]
    words += _variables(launch, env)
    program_inside, *arguments = _argv(launch)
    return [*words, "--entrypoint", program_inside, str(container["image"]), *arguments]


def enter(launch: Json, attempt: str, directory: str, env: Dict[str, str], terminal: bool) -> List[str]:
    """The command line that runs ``launch["argv"]`` beside the attempt's command, in its container."""
    cwd = os.path.join(directory, launch.get("cwd") or "work")
    program = _program(launch["container"], env)
    if apptainer.is_it(program):
        return wrap(launch, attempt, directory, env)
    words = [program, "exec", "--interactive", "--workdir", cwd]
    if terminal:
        words += ["--tty", "--env", "TERM"]
    words += _variables(launch, env)
    return [*words, _name(attempt), *_argv(launch)]


def _argv(launch: Json) -> List[str]:
    """The command inside: with directories of its own for PATH, through a shell, as only that knows the image's PATH."""
    if not launch.get("path"):
        return list(launch["argv"])
    return ["/bin/sh", "-c", 'PATH="$0:$PATH"; export PATH; exec "$@"', ":".join(launch["path"]), *launch["argv"]]


def remove(known: Optional[Json]) -> Optional[str]:
    """End what ``identify`` named, and all that runs in it; harmless when it is gone. Returns why that failed."""
    if not known:
        return None
    env = dict(os.environ, **known["env"])
    try:
        # podman's `rm --force` would first wait ten seconds for what ignores TERM; our own ladder has done that.
        _run([known["program"], "kill", known["name"]], env, _REMOVE_S)
        done = _run([known["program"], "rm", "--force", known["name"]], env, _REMOVE_S)
    except OpError as error:
        return "its container {} could not be removed: {}".format(known["name"], error.message)
    if done.returncode == 0 or "no such container" in done.stderr.lower() or "no container with" in done.stderr.lower():
        return None
    return "its container {} could not be removed: {}".format(known["name"], _last_words(done.stderr))


def engines() -> List[Tuple[str, Dict[str, str]]]:
    """The programs that are on the node, each with the variables that it needs beyond ours: none."""
    found = (processes.find_program(name, os.environ.get("PATH") or os.defpath) for name in _ENGINES)
    return [(program, {}) for program in found if program is not None]


def labelled(program: str, env: Dict[str, str]) -> List[Dict[str, str]]:
    """Every container that was made for an attempt, also one that has ended: ``id``, ``name``, ``state``, ``cwd``, ``attempt``.

    None when the program cannot say.
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
        # One that ends meanwhile makes this fail in part, and the others are told all the same.
        told = _run([program, "container", "inspect", "--format", "\t".join(fields), *ids], env, _INSPECT_S)
    except OpError:
        return []
    rows = [line.split("\t") for line in told.stdout.splitlines()]
    return [
        {"id": row[0], "name": row[1].lstrip("/"), "state": row[2], "cwd": row[3], "attempt": row[4]}
        for row in rows
        if len(row) == len(fields)
    ]


def why_ended(known: Json, directory: str, exit_code: Optional[int]) -> Tuple[Optional[EndReason], Optional[str]]:
    """The reason of an end that was not the command's own, and what to say; nothing when it was. Ask before ``remove``."""
    if exit_code == 125 and not os.path.exists(os.path.join(directory, CREATED)):
        return EndReason.START_ERROR, "the container could not be made; the last lines of its output say why"
    if exit_code == 137 and known.get("memory"):
        why = _ran_out(known)
        return (EndReason.EVICTED, why) if why else (None, None)
    return None, None


def _ran_out(known: Json) -> Optional[str]:
    try:
        words = [known["program"], "inspect", "--format", "{{.State.OOMKilled}}", known["name"]]
        done = _run(words, dict(os.environ, **known["env"]), _INSPECT_S)
    except OpError:
        return None
    if done.stdout.strip() != "true":
        return None
    return "it used more memory than the {} that it asked for (`memory`), so the kernel ended it".format(
        size_text(known["memory"])
    )


def _limits(container: Json) -> List[str]:
    """With a limit, the container stays when it has ended, until it was asked whether that was why."""
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
    what = ", ".join(_KNOWN[:-1]) + " or " + _KNOWN[-1] if wanted == "auto" else wanted
    hint = "install it, or let tasks run without their image: `container: none` in the node's configuration"
    raise OpError("no_container", "{} is not on this node; {}".format(what, hint))


def _name(attempt: str) -> str:
    """One container for each attempt, and one attempt for each container: names may not hold slashes, and must not be long."""
    return "distflow-" + hashlib.sha256(attempt.encode()).hexdigest()[:24]


def _is_docker(program: str) -> bool:
    return os.path.basename(program) == "docker"


def _user(program: str, launch: Json, cwd: str) -> List[str]:
    """Files that the task writes belong to the node's user: with podman that is who root is inside."""
    if not _is_docker(program) or os.getuid() == 0:
        return []
    home = [] if "HOME" in launch["env"] else ["--env", "HOME=" + cwd]
    return ["--user", "{}:{}".format(os.getuid(), os.getgid()), *home]


def _variables(launch: Json, env: Dict[str, str]) -> List[str]:
    """The variables that the task sees inside: its own, and the marks. PATH and HOME are the image's unless it has its own.

    The program's PATH is the node's, so that of the task is written out.
    """
    path = ["--env", "PATH=" + launch["env"]["PATH"]] if "PATH" in launch["env"] else []
    return [*path, *(word for name in _names(launch, env) for word in ("--env", name))]


def _names(launch: Json, env: Dict[str, str]) -> List[str]:
    ours = ["DISTFLOW_ATTEMPT", "DISTFLOW_ATTEMPT_DIR", "DISTFLOW_HEARTBEAT", "TORCHELASTIC_ERROR_FILE"]
    ours += ["PYTHONPATH"] if launch.get("python_path") else []
    return sorted({*launch["env"], *(launch.get("secret_env") or {}), *(name for name in ours if name in env)} - {"PATH"})


def _run(argv: List[str], env: Dict[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout_s,
            check=False, encoding="utf-8", errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise OpError("timeout", "`{}` did not end within {:g} s".format(" ".join(argv[:3]), timeout_s)) from None
    except OSError as error:
        raise OpError.from_os(error, "{} cannot be run".format(argv[0])) from error


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-2:])[:1000] or "it did not say why"
