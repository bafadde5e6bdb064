"""Python stacks that processes write themselves, for nodes on which no tool can read them from outside.

Ranks of ``distflow.train`` use Python's faulthandler: on SIGUSR1, it writes the stacks of all threads to ``stacks-<pid>`` in
the attempt's directory. The handler is written in C, so it also runs while the interpreter's lock is held. The signal would
kill any other process. So it is sent only to processes that have that file open and catch the signal.
"""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from distflow.runtime.wire import Json

__all__ = ["add_tracebacks", "parse_tracebacks"]

_WAIT_S = 3.0
_QUIET_S = 0.1
"""A dump has no end mark, so it counts as complete after this time without another line."""
_LOOK_S = 0.02
_MOST_BYTES = 256 * 1024
_FRAMES = 64
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARY = re.compile(r".*/(?:site-packages|dist-packages|lib/python[0-9.]+)/")


def add_tracebacks(found: List[Json], directory: str) -> None:
    """Ask Python processes without a known stack for theirs, all at once. Processes that cannot be asked are not changed."""
    asked: List[Tuple[Json, str, int]] = []
    for one in found:
        path = os.path.join(directory, "stacks-{}".format(one["pid"]))
        if one["is_python"] and one["threads"] is None:
            begin = _signal(int(one["pid"]), path)
            if begin is not None:
                asked.append((one, path, begin))
    until = time.monotonic() + _WAIT_S
    for one, path, begin in asked:
        text = _written(path, begin, until)
        one["threads"] = parse_tracebacks(text, directory) or None
        one["error"] = None if one["threads"] else "it did not answer SIGUSR1 with its stacks"


def parse_tracebacks(text: str, directory: str) -> List[Json]:
    """Return the threads of a faulthandler dump. The main thread is the last one in it, and is named so."""
    threads: List[Json] = []
    for line in text.split("\n"):
        head, frame = _THREAD.match(line), _FRAME.fullmatch(line)
        if head:
            threads.append({"name": head.group(1) or "", "is_active": False, "frames": []})
        elif frame and threads and len(threads[-1]["frames"]) < _FRAMES:
            path, number, function = frame.groups()
            threads[-1]["frames"].append({"function": function, "file": _short(path, directory), "line": int(number)})
    if threads:
        threads[-1]["name"] = "MainThread"
    return threads


def _signal(pid: int, path: str) -> Optional[int]:
    """Send SIGUSR1 to a process if it then writes its stacks to ``path``. Returns the offset at which they will begin."""
    send, close = _handle(pid)
    try:
        if not _holds(pid, path) or not _catches(pid):
            return None
        begin = os.stat(path, follow_symlinks=False).st_size
        send()
        return begin
    except OSError:
        return None
    finally:
        close()


def _handle(pid: int) -> Tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions: one sends SIGUSR1 to the process, the other closes the handle.

    Where the kernel supports it, the signal never reaches a later process with the same id.
    """
    opener: Any = getattr(os, "pidfd_open", None)
    sender: Any = getattr(signal, "pidfd_send_signal", None)
    if opener is not None and sender is not None:
        try:
            fd = opener(pid)
        except OSError:
            pass  # an old kernel, or the process is gone, and then it has no file open either
        else:
            return (lambda: sender(fd, signal.SIGUSR1)), (lambda: os.close(fd))
    return (lambda: os.kill(pid, signal.SIGUSR1)), (lambda: None)


def _holds(pid: int, path: str) -> bool:
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
    with open("/proc/{}/status".format(pid), encoding="ascii", errors="replace") as file:
        lines: Dict[str, str] = dict(line.split(":", 1) for line in file if ":" in line)
    return bool(int(lines.get("SigCgt", "0").strip(), 16) & 1 << (signal.SIGUSR1 - 1))


def _written(path: str, begin: int, until: float) -> str:
    size, changed = begin, time.monotonic()
    while time.monotonic() < until:
        time.sleep(_LOOK_S)  # noqa: TID251  runs in its own child; no event reports that a file grew
        now = os.stat(path).st_size
        if now != size:
            size, changed = now, time.monotonic()
        elif size > begin and time.monotonic() - changed >= _QUIET_S:
            break
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read(_MOST_BYTES).decode("utf-8", "replace")


def _short(path: str, directory: str) -> str:
    """Shorten a path like py-spy: without the directory of packages, or the attempt's own directories."""
    for name in ("work", "files", "lib"):
        inside = os.path.join(directory, name, "")
        if path.startswith(inside):
            return path[len(inside) :]
    return _LIBRARY.sub("", path)
