"""The current state of an attempt's processes: the kernel's information about each process, Python stacks, and collectives.

Python stacks are read from outside by ``py-spy``, if the node has it. It neither stops the process nor needs its cooperation,
so it also works for a process that hangs in a driver or holds its interpreter's lock.

Where py-spy cannot be used, ranks of ``distflow.train`` write their own stacks: on SIGUSR1, Python's faulthandler writes the
stacks of all threads to ``stacks-<pid>`` in the attempt's directory. The handler is written in C, so it also runs while the
interpreter's lock is held. The signal would kill a process without a handler. So it is sent only to processes that have
that file open and catch the signal.

Each of these ranks also listens on a socket ``collectives-<pid>`` in that directory, and sends one JSON document with its
current collectives to each connection. These documents are untrusted: invalid ones are ignored, and unknown fields left out.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time

from distflow.protocol.light_typing import Any, Callable, Dict, List, Optional, Tuple
from distflow.runtime import processes
from distflow.runtime.clock import now
from distflow.runtime.files import attempts, records
from distflow.runtime.guard import command
from distflow.runtime.untrusted import decode_json
from distflow.runtime.wire import Json, OpError

__all__ = ["collect", "collect_collectives", "validated_collectives"]


_PYTHON = re.compile(r"python[0-9.]*|pypy[0-9.]*")
_AT_ONCE = 16
_MAX_PROCESSES = 256
_MAX_FRAMES = 64
_MAX_OUTPUT_BYTES = 64 * 1024 * 1024
_TOOL_S = 20.0
_RANK = {b"RANK", b"LOCAL_RANK"}


def collect(root: str, request: Json) -> Callable[[], Json]:
    """Return a job that inspects the processes of the attempt, at most ``_MAX_PROCESSES``.

    Its result has ``processes``, ``collectives``, ``host_rule`` (Yama's ``ptrace_scope``), ``heartbeat_age_s`` and ``tool``
    (null without py-spy). The job raises ``not_running`` for an attempt that does not run.
    """
    attempt = str(request["attempt"])
    directory = attempts.directory_of(root, attempt)
    launch = {"env": request.get("env") or {}, "path_prepend": request.get("path_prepend") or []}

    def work() -> Json:
        state = records.read_state(directory)
        if state is None or records.read_end(directory) is not None or not state.get("command"):
            raise OpError("not_running", "the attempt is not running")
        env = command.environment(launch, "", root)
        tool = processes.find_program("py-spy", env.get("PATH") or os.defpath)
        found = [_inspect(process) for process in _processes_of(attempt, state)[:_MAX_PROCESSES]]
        if tool is not None:
            _add_python_threads(tool, [one for one in found if one["is_python"]], env)
        _add_tracebacks(found, directory)
        return {
            "tool": tool,
            "processes": found,
            "collectives": collect_collectives(directory),
            "host_rule": _ptrace_scope(),
            "heartbeat_age_s": _heartbeat_age(directory),
        }

    return work


def _processes_of(attempt: str, state: Json) -> List[processes.Process]:
    """Return the keeper's descendants, such as the command, and all processes whose environment names the attempt.

    Processes in containers may not be the keeper's descendants.
    """
    everything = list(processes.list_processes())
    keeper = int((state.get("keeper") or {}).get("pid") or 0)
    below = {one.pid for one in processes.only_descendants(everything, keeper)} if keeper else set()
    pair = {int((state.get(name) or {}).get("pid") or 0) for name in ("keeper", "runner")}
    mark = "DISTFLOW_ATTEMPT=" + attempt
    return [
        one
        for one in everything
        if one.is_alive and one.pid not in pair and (one.pid in below or processes.has_variable(one.pid, mark))
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


def _add_python_threads(tool: str, found: List[Json], env: Dict[str, str]) -> None:
    for at in range(0, len(found), _AT_ONCE):
        started = [(one, _start_py_spy(tool, int(one["pid"]), env)) for one in found[at : at + _AT_ONCE]]
        until = time.monotonic() + _TOOL_S
        for one, process in started:
            one["threads"], one["error"] = _py_spy_threads(process, until)


def _start_py_spy(tool: str, pid: int, env: Dict[str, str]) -> Optional[subprocess.Popen[bytes]]:
    words = [tool, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    except OSError:
        return None


def _py_spy_threads(process: Optional[subprocess.Popen[bytes]], until: float) -> Any:
    if process is None:
        return None, "py-spy cannot be started"
    try:
        out, err = process.communicate(timeout=max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None, "py-spy did not respond"
    if process.returncode != 0:
        lines = [line.strip() for line in err.decode("utf-8", "replace").split("\n") if line.strip()]
        return None, (lines[-1] if lines else "py-spy failed")[:500]
    try:
        return [_thread(one) for one in decode_json(out.decode("utf-8", "replace"), max_bytes=_MAX_OUTPUT_BYTES)], None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, "py-spy's output cannot be parsed"


def _thread(thread: Json) -> Json:
    """Return the needed part of py-spy's data on a thread, without values of variables."""
    frames = [
        {"function": one["name"], "file": one.get("short_filename") or one["filename"], "line": one["line"]}
        for one in (thread.get("frames") or [])[:_MAX_FRAMES]
    ]
    return {"name": str(thread.get("thread_name") or ""), "is_active": bool(thread.get("active")), "frames": frames}


def _heartbeat_age(directory: str) -> Optional[float]:
    """Return the age of the attempt's heartbeat in seconds; None if there was none."""
    try:
        at = os.stat(os.path.join(directory, command.HEARTBEAT), follow_symlinks=False).st_mtime
    except OSError:
        return None
    return max(0.0, now() - at)


def _ptrace_scope() -> Optional[int]:
    """Return the node's ``kernel.yama.ptrace_scope``; None without Yama.

    With 1, processes of users other than root may inspect only their descendants. With 2, only root may inspect processes.
    With 3, no user may.
    """
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope", encoding="utf-8") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


_DUMP_S = 3.0
_QUIET_S = 0.1
"""A dump has no end mark, so it counts as complete after this time without another line."""
_POLL_S = 0.02
_MAX_DUMP_BYTES = 256 * 1024
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARY = re.compile(r".*/(?:site-packages|dist-packages|lib/python[0-9.]+)/")


def _add_tracebacks(found: List[Json], directory: str) -> None:
    """Let Python processes without known stacks write them, all at the same time. Skip processes that cannot do this."""
    requested: List[Tuple[Json, str, int]] = []
    for one in found:
        path = os.path.join(directory, "stacks-{}".format(one["pid"]))
        if one["is_python"] and one["threads"] is None:
            begin = _request_dump(int(one["pid"]), path)
            if begin is not None:
                requested.append((one, path, begin))
    until = time.monotonic() + _DUMP_S
    for one, path, begin in requested:
        text = _await_dump(path, begin, until)
        one["threads"] = _parse_tracebacks(text, directory) or None
        one["error"] = None if one["threads"] else "the process did not write its stacks after SIGUSR1"


def _parse_tracebacks(text: str, directory: str) -> List[Json]:
    """Return the threads of a faulthandler dump. Its last thread is the main thread, and gets the name ``MainThread``."""
    threads: List[Json] = []
    for line in text.split("\n"):
        head, frame = _THREAD.match(line), _FRAME.fullmatch(line)
        if head:
            threads.append({"name": head.group(1) or "", "is_active": False, "frames": []})
        elif frame and threads and len(threads[-1]["frames"]) < _MAX_FRAMES:
            path, number, function = frame.groups()
            threads[-1]["frames"].append({"function": function, "file": _shorten(path, directory), "line": int(number)})
    if threads:
        threads[-1]["name"] = "MainThread"
    return threads


def _request_dump(pid: int, path: str) -> Optional[int]:
    """Send SIGUSR1 to a process if its handler writes stacks to ``path``.

    Returns the offset at which the stacks will begin, or None if the signal was not sent.
    """
    send, close = _signal_handle(pid)
    try:
        if not _has_open(pid, path) or not _catches(pid):
            return None
        begin = os.stat(path, follow_symlinks=False).st_size
        send()
        return begin
    except OSError:
        return None
    finally:
        close()


def _signal_handle(pid: int) -> Tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions: one sends SIGUSR1 to the process, the other closes the handle.

    Where the kernel and Python (3.9 or newer) support it, the signal never reaches a later process with the same id.
    """
    opener: Any = getattr(os, "pidfd_open", None)
    sender: Any = getattr(signal, "pidfd_send_signal", None)
    if opener is not None and sender is not None:
        try:
            fd = opener(pid)
        except OSError:
            pass  # an old kernel; or the process is gone, so that `_has_open` fails
        else:
            return (lambda: sender(fd, signal.SIGUSR1)), (lambda: os.close(fd))
    return (lambda: os.kill(pid, signal.SIGUSR1)), (lambda: None)


def _has_open(pid: int, path: str) -> bool:
    wanted = os.stat(path, follow_symlinks=False)
    folder = "/proc/{}/fd".format(pid)
    for name in os.listdir(folder):
        try:
            held = os.stat(os.path.join(folder, name))
        except OSError:
            continue
        if (held.st_dev, held.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False


def _catches(pid: int) -> bool:
    with open("/proc/{}/status".format(pid), encoding="utf-8", errors="replace") as file:
        lines: Dict[str, str] = dict(line.split(":", 1) for line in file if ":" in line)
    return bool(int(lines.get("SigCgt", "0").strip(), 16) & 1 << (signal.SIGUSR1 - 1))


def _await_dump(path: str, begin: int, until: float) -> str:
    size, changed = begin, time.monotonic()
    while time.monotonic() < until:
        time.sleep(_POLL_S)  # noqa: TID251  runs in its own child; the standard library has no inotify
        now = os.stat(path).st_size
        if now != size:
            size, changed = now, time.monotonic()
        elif size > begin and time.monotonic() - changed >= _QUIET_S:
            break
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read(_MAX_DUMP_BYTES).decode("utf-8", "replace")


def _shorten(path: str, directory: str) -> str:
    """Shorten a path as py-spy does: remove the directory of packages, or the attempt's own directory."""
    for name in ("work", "files", "lib"):
        inside = os.path.join(directory, name, "")
        if path.startswith(inside):
            return path[len(inside) :]
    return _LIBRARY.sub("", path)


_SOCKET_PREFIX = "collectives-"
_ANSWER_S = 3.0
_MIN_ANSWER_S = 0.05
"""Minimum time for ranks that are read after the deadline, because their answers may have arrived before it."""
_MAX_ANSWER_BYTES = 256 * 1024
_MAX_GROUPS = 64
_MAX_NAME = 100


def collect_collectives(directory: str) -> List[Json]:
    """Return the collectives of all ranks that answer in time, sorted by rank."""
    try:
        names = sorted(name for name in os.listdir(directory) if name.startswith(_SOCKET_PREFIX))
        # Socket addresses must be short; a path through a descriptor always is.
        at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return []
    try:
        callers = [_connect_to("/proc/self/fd/{}/{}".format(at, name)) for name in names]
    finally:
        os.close(at)
    until = time.monotonic() + _ANSWER_S
    answers = [validated_collectives(_read_answer(caller, until)) for caller in callers if caller is not None]
    return sorted((one for one in answers if one is not None), key=lambda one: int(one["rank"]))


def validated_collectives(answer: Any) -> Optional[Json]:
    """Return a rank's answer with only the expected fields; None if it is invalid.

    The fields of each group are those of ``train.communication.collectives.current_collective``.
    """
    try:
        groups = [
            {
                "name": str(one["name"])[:_MAX_NAME],
                "ranks": [int(rank) for rank in one["ranks"]],
                "number": int(one["number"]),
                "operation": str(one["operation"])[:_MAX_NAME],
                "is_over": bool(one["is_over"]),
                "entered": int(one["entered"]),
            }
            for one in answer["groups"][:_MAX_GROUPS]
        ]
        return {"rank": int(answer["rank"]), "groups": groups}
    except (KeyError, TypeError, ValueError):
        return None


def _connect_to(address: str) -> Optional[socket.socket]:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        caller.connect(address)
        return caller
    except OSError:  # its process is gone, or accepts no connections now
        caller.close()
        return None


def _read_answer(caller: socket.socket, until: float) -> Any:
    received = b""
    with caller:
        try:
            while len(received) <= _MAX_ANSWER_BYTES:
                caller.settimeout(max(_MIN_ANSWER_S, until - time.monotonic()))
                more = caller.recv(65536)
                if not more:
                    return decode_json(received.decode("utf-8", "replace"))
                received += more
        except (OSError, ValueError):  # the rank does not release the interpreter's lock, or it is exiting
            pass
    return None
