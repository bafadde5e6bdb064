"""The current state of an attempt's processes: the kernel's information on each, and Python stacks.

Python stacks are read from outside by ``py-spy``, if the node has it. It neither stops the process nor needs its cooperation,
so it also works for one that hangs in a driver or holds its interpreter's lock. Where py-spy cannot be used, ranks of
``distflow.train`` write their own stacks (``tracebacks``).
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from typing import Any, Callable, Dict, List, Optional

from distflow.runtime import processes
from distflow.runtime.clock import now
from distflow.runtime.files import attempts, records
from distflow.runtime.guard import command
from distflow.runtime.probes import collectives, tracebacks
from distflow.runtime.untrusted import decode_json
from distflow.runtime.wire import Json, OpError

__all__ = ["collect"]

_PYTHON = re.compile(r"python[0-9.]*|pypy[0-9.]*")
_AT_ONCE = 16
_MOST = 256
_FRAMES = 64
_MOST_BYTES = 64 * 1024 * 1024
_TOOL_S = 20.0
_RANK = {b"RANK", b"LOCAL_RANK"}


def collect(root: str, request: Json) -> Callable[[], Json]:
    """Return the work that inspects every process of the attempt.

    Its result has ``processes``, ``collectives`` and ``tool``, which is null without py-spy. Raises ``not_running`` for an
    attempt that does not run.
    """
    attempt = str(request["attempt"])
    directory = attempts.directory_of(root, attempt)
    launch = {"env": request.get("env") or {}, "path_prepend": request.get("path_prepend") or []}

    def work() -> Json:
        state = records.read_state(directory)
        if state is None or records.read_end(directory) is not None or not state.get("command"):
            raise OpError("not_running", "it does not run")
        env = command.environment(launch, "", root)
        tool = processes.find_program("py-spy", env.get("PATH") or os.defpath)
        found = [_inspect(process) for process in _processes_of(attempt, state)[:_MOST]]
        if tool is not None:
            _add_python(tool, [one for one in found if one["is_python"]], env)
        tracebacks.add_tracebacks(found, directory)
        return {
            "tool": tool,
            "processes": found,
            "collectives": collectives.ask(directory),
            "host_rule": _host_rule(),
            "heartbeat_age_s": _heartbeat_age(directory),
        }

    return work


def _processes_of(attempt: str, state: Json) -> List[processes.Process]:
    """Return the command, its descendants, and processes with the attempt's mark.

    The mark is needed for containers, whose processes are not the keeper's descendants.
    """
    everything = list(processes.list_processes())
    keeper = int((state.get("keeper") or {}).get("pid") or 0)
    below = {one.pid for one in processes.only_descendants(everything, keeper)} if keeper else set()
    ours = {int((state.get(name) or {}).get("pid") or 0) for name in ("keeper", "runner")}
    mark = "DISTFLOW_ATTEMPT=" + attempt
    return [
        one
        for one in everything
        if one.is_alive and one.pid not in ours and (one.pid in below or processes.carries(one.pid, mark))
    ]


def _inspect(process: processes.Process) -> Json:
    name = _read(process.pid, "comm").strip()
    try:
        program = os.path.basename(os.readlink("/proc/{}/exe".format(process.pid)))
    except OSError:
        program = ""
    return {
        "pid": process.pid,
        "parent": process.ppid,
        "name": name,
        "state": process.state,
        "waits_in": _read(process.pid, "wchan").strip("0\n") or None,
        "is_python": bool(_PYTHON.fullmatch(program)),
        "ranks": _ranks(process.pid),
        "threads": None,
        "error": None,
    }


def _read(pid: int, name: str) -> str:
    try:
        with open("/proc/{}/{}".format(pid, name), encoding="utf-8", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return ""


def _ranks(pid: int) -> Dict[str, int]:
    """Return RANK and LOCAL_RANK from the initial environment. Values that the process sets later are not visible."""
    try:
        with open("/proc/{}/environ".format(pid), "rb") as file:
            pairs = [one.partition(b"=") for one in file.read().split(b"\0")]
    except OSError:
        return {}
    return {name.decode(): int(value) for name, _, value in pairs if name in _RANK and value.isdigit()}


def _add_python(tool: str, found: List[Json], env: Dict[str, str]) -> None:
    for at in range(0, len(found), _AT_ONCE):
        asked = [(one, _ask(tool, int(one["pid"]), env)) for one in found[at : at + _AT_ONCE]]
        until = time.monotonic() + _TOOL_S
        for one, process in asked:
            one["threads"], one["error"] = _answer(process, until)


def _ask(tool: str, pid: int, env: Dict[str, str]) -> Optional[subprocess.Popen[bytes]]:
    words = [tool, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    except OSError:
        return None


def _answer(process: Optional[subprocess.Popen[bytes]], until: float) -> Any:
    if process is None:
        return None, "py-spy cannot be started"
    try:
        out, err = process.communicate(timeout=max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None, "py-spy did not answer"
    if process.returncode != 0:
        said = [line.strip() for line in err.decode("utf-8", "replace").split("\n") if line.strip()]
        return None, (said[-1] if said else "py-spy failed")[:500]
    try:
        return [_thread(one) for one in decode_json(out.decode("utf-8", "replace"), max_bytes=_MOST_BYTES)], None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, "py-spy said something that is not understood"


def _thread(said: Json) -> Json:
    """Return the needed part of py-spy's data on a thread, without values of variables."""
    frames = [
        {"function": one["name"], "file": one.get("short_filename") or one["filename"], "line": one["line"]}
        for one in (said.get("frames") or [])[:_FRAMES]
    ]
    return {"name": str(said.get("thread_name") or ""), "is_active": bool(said.get("active")), "frames": frames}


def _heartbeat_age(directory: str) -> Optional[float]:
    """Return the age of the attempt's heartbeat in seconds; None if there was none."""
    try:
        at = os.stat(os.path.join(directory, command.HEARTBEAT), follow_symlinks=False).st_mtime
    except OSError:
        return None
    return max(0.0, now() - at)


def _host_rule() -> Optional[int]:
    """Return Yama's rule (kernel.yama.ptrace_scope). From 1 upward, only root may inspect processes other than its children."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
