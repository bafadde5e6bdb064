"""Measurements, as for ``pool check``: directories, tools, limits, free memory, checksums of paths, and results of commands.

The submitter parses the output of tools (``nvidia-smi``, ``busctl``). Only the last 16 KiB of an output are returned. Measuring
may take long, so the functions return jobs for a child of the agent.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time

from distflow.protocol.light_typing import Callable, Dict, List, NamedTuple, Optional
from distflow.runtime import processes
from distflow.runtime.files import venvs
from distflow.runtime.guard import command, kernel_log
from distflow.runtime.leases import node_leases
from distflow.runtime.leases.lease_files import foreign_owner
from distflow.runtime.probes.facts import user_name
from distflow.runtime.wire import Json, OpError

__all__ = ["probe", "run"]


_TOOL_S = 30.0  # without persistence mode, nvidia-smi wakes every GPU first
_MAX_TIME_S = 600.0
_MAX_OUTPUT = 16384
_GPU_FIELDS = "index,uuid,name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
_APP_FIELDS = "gpu_uuid,pid,process_name,used_memory"
_LOGIND = ("KillUserProcesses", "KillExcludeUsers", "KillOnlyUsers")


def probe(root: str, request: Json) -> Callable[[], Json]:
    """Return a job that measures the node."""
    lease_dir, paths = str(request["lease_dir"]), [str(path) for path in request.get("paths") or []]

    def work() -> Json:
        apps = _tool("nvidia-smi", "--query-compute-apps=" + _APP_FIELDS, "--format=csv,noheader,nounits")
        return {
            "root": dict(_file_system_of(root), error=_write_error(root)),
            "leases": _leases(lease_dir),
            "names": _names(socket.gethostname()),
            "gpus": _tool("nvidia-smi", "--query-gpu=" + _GPU_FIELDS, "--format=csv,noheader,nounits"),
            "gpu_apps": apps,
            "gpu_owners": _owners((apps or {}).get("stdout", "")),
            "logind": _logind(),
            "venv_tools": venvs.tools(os.environ.get("PATH", "")) if request.get("venv_tools") else None,
            "paths": _checksums(paths),
            **_conditions(),
        }

    return work


def run(root: str, request: Json, umask: int) -> Callable[[], Json]:
    """Return a job that runs a command in the environment of tasks, at most for ``limit_s``.

    Raises ``OpError`` (``no_venv``).
    """
    argv = [str(word) for word in request["argv"]]
    launch = {"env": request.get("env") or {}, "path_prepend": request.get("path_prepend") or [], "venv": request.get("venv")}
    launch = venvs.activated(root, launch)
    prelude, timeout_s = request.get("shell_prelude"), min(float(request.get("limit_s") or 30.0), _MAX_TIME_S)

    def work() -> Json:
        env = command.environment(launch, "", root)
        for name in ("DISTFLOW_ATTEMPT", "DISTFLOW_ATTEMPT_DIR", "DISTFLOW_HEARTBEAT", "TORCHELASTIC_ERROR_FILE"):
            env.pop(name, None)
        return _run(command.with_prelude(argv, prelude, env), timeout_s, env=env, cwd=root, umask=umask)

    return work


class _Mount(NamedTuple):
    point: str
    kind: str
    options: List[str]


def _file_system_of(path: str) -> Json:
    """Describe the file system of a directory. If the directory does not exist, its nearest existing parent is measured."""
    existing = path
    while not os.path.exists(existing) and existing != os.path.dirname(existing):
        existing = os.path.dirname(existing)
    mount = _mount_of(os.path.realpath(existing))
    disk = shutil.disk_usage(existing)
    return {
        "path": path,
        "file_system": mount.kind if mount else "",
        "is_noexec": bool(mount and "noexec" in mount.options),
        "free_bytes": disk.free,
        "total_bytes": disk.total,
    }


def _mount_of(path: str) -> Optional[_Mount]:
    found: Optional[_Mount] = None
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().split("\n")
    except OSError:
        return None
    for line in lines:
        before, dash, after = line.partition(" - ")
        words = before.split(" ")
        if not dash or len(words) < 6:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), words[4])
        if (path + "/").startswith(point.rstrip("/") + "/") and (found is None or len(point) >= len(found.point)):
            found = _Mount(point, after.split(" ")[0], words[5].split(","))
    return found


def _write_error(directory: str) -> Optional[str]:
    """Return why no file can be written to a directory, which is created if necessary; ``None`` if a file can be written."""
    path = os.path.join(directory, ".probe-{}".format(os.getpid()))
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"x" * 4096)
            os.fsync(fd)
        finally:
            os.close(fd)
            os.unlink(path)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _leases(lease_dir: str) -> Json:
    """Try to lease any port, and release it."""
    error = None
    try:
        node_leases.take(lease_dir, 0, (), "any", {"user": user_name(), "attempt": "pool check", "pid": os.getpid()}).close()
    except OpError as refusal:
        error = refusal.message
    found = _file_system_of(os.path.abspath(os.path.expanduser(lease_dir)))
    owner = foreign_owner(lease_dir)
    return {"path": found["path"], "file_system": found["file_system"], "error": error, "owner": owner}


def _names(hostname: str) -> Json:
    try:
        found = socket.getaddrinfo(hostname, None, 0, socket.SOCK_STREAM)
    except OSError as error:
        return {"hostname": hostname, "addresses": [], "error": error.strerror or str(error)}
    return {"hostname": hostname, "addresses": sorted({str(entry[4][0]) for entry in found}), "error": None}


def _owners(apps: str) -> Dict[str, Json]:
    """Return user and attempt of each visible process in the output of ``nvidia-smi`` (``_APP_FIELDS``), by process id."""
    owners: Dict[str, Json] = {}
    for line in apps.split("\n"):
        pid = (line.split(",") + [""])[1].strip()
        if not pid.isdigit():
            continue
        try:
            uid = os.stat("/proc/" + pid).st_uid
        except OSError:
            continue  # in another container, or gone
        owners[pid] = {"user": user_name(uid), "attempt": processes.attempt_of(int(pid))}
    return owners


def _logind() -> Json:
    """Return systemd's settings for processes that remain after the end of this login."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            in_session = re.search(r"/session-[^/\n]*\.scope", file.read()) is not None
    except OSError:
        in_session = False
    name = "org.freedesktop.login1"
    bus = ["get-property", name, "/org/freedesktop/login1", name + ".Manager"]
    answer = _tool("busctl", *bus, *_LOGIND) if in_session else None
    return {
        "in_session": in_session,
        "properties": answer["stdout"].split("\n")[: len(_LOGIND)] if answer and answer["exit_code"] == 0 else [],
    }


def _tool(name: str, *arguments: str) -> Optional[Json]:
    """Return a tool's result; ``None`` if the tool is missing."""
    path = shutil.which(name)
    return _run([path, *arguments], _TOOL_S) if path is not None else None


def _run(
    argv: List[str], timeout_s: float, env: Optional[Dict[str, str]] = None, cwd: Optional[str] = None, umask: int = 0o77
) -> Json:
    code: Optional[int] = None
    begin, parent, pipe = time.monotonic(), os.getpid(), subprocess.PIPE

    def prepare() -> None:
        processes.die_with_parent(signal.SIGKILL, parent)
        os.umask(umask)

    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            env=env,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509  a child of the agent has one thread
        )
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        return {
            "exit_code": 127 if missing else 126,
            "stdout": "",
            "stderr": "{}: {}".format(argv[0], error.strerror),
            "seconds": 0.0,
        }
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        try:
            stdout, stderr = process.communicate(timeout=2.0)
        except subprocess.TimeoutExpired:
            stdout, stderr = b"", b""  # its children in other sessions keep the pipes open
    return {
        "exit_code": code if code is None or code >= 0 else 128 - code,
        "stdout": stdout[-_MAX_OUTPUT:].decode("utf-8", "replace"),
        "stderr": stderr[-_MAX_OUTPUT:].decode("utf-8", "replace"),
        "seconds": round(time.monotonic() - begin, 3),
    }


_SHM = "/dev/shm"
_RDMA = "/sys/class/infiniband"
_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}


def _conditions() -> Json:
    """Return memory, limits and devices as this login has them.

    ``None`` means unlimited for a limit, and unknown for another value.
    """
    return {
        "memory": _memory(),
        "shm": _shm(),
        "limits": {name: _soft_limit(limit) for name, limit in _LIMITS.items()},
        "has_rdma": _has_rdma(),
        "xids": kernel_log.gpu_errors(),
    }


def _memory() -> Optional[Json]:
    found: Dict[str, int] = {}
    try:
        with open("/proc/meminfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    found[name] = int(value.split()[0]) << 10
        return {"available_bytes": found["MemAvailable"], "total_bytes": found["MemTotal"]}
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _shm() -> Optional[Json]:
    try:
        found = os.statvfs(_SHM)
    except OSError:
        return None
    return {"free_bytes": found.f_bavail * found.f_frsize, "total_bytes": found.f_blocks * found.f_frsize}


def _soft_limit(limit: int) -> Optional[int]:
    soft = resource.getrlimit(limit)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _has_rdma() -> bool:
    names: List[str] = []
    try:
        names = os.listdir(_RDMA)
    except OSError:
        pass
    return bool(names)


_CHECKSUM_S = 30.0
_MAX_FILES = 1000000


def _checksums(paths: List[str]) -> Dict[str, Json]:
    """Return for each path ``error`` (null if it can be read), ``files``, ``bytes``, ``digest`` and ``is_complete``.

    The digest covers the names and sizes of the files below the path, but not the contents, which may be large. Links to
    directories below the path are not followed. The search below a path ends after half a minute or a million files. Then the
    numbers cover only a part, and there is no digest. There is only ``error`` if the path cannot be read, a directory below it
    cannot be listed, or the size of a file below it cannot be read. Files below the path are not opened.
    """
    return {path: _checksum(os.path.expanduser(path), time.monotonic() + _CHECKSUM_S) for path in paths}


def _checksum(path: str, until: float) -> Json:
    entries: List[str] = []
    total = 0
    is_complete = True
    try:
        if not os.path.isdir(path):
            with open(path, "rb"):
                total = os.stat(path).st_size
            entries.append("/{}".format(total))
        else:
            for folder, folders, files in os.walk(path, onerror=_raise):
                folders.sort()
                for name in files:
                    full = os.path.join(folder, name)
                    size = os.stat(full).st_size
                    total += size
                    entries.append("{}/{}".format(os.path.relpath(full, path), size))
                if time.monotonic() > until or len(entries) > _MAX_FILES:
                    is_complete = False
                    break
    except OSError as error:
        place = "" if error.filename in (None, path) else "{}: ".format(error.filename)
        return {"error": "{}{}".format(place, error.strerror)}
    digest = hashlib.sha256("\n".join(sorted(entries)).encode("utf-8", "surrogateescape")).hexdigest() if is_complete else None
    return {"error": None, "files": len(entries), "bytes": total, "digest": digest, "is_complete": is_complete}


def _raise(error: OSError) -> None:
    raise error
