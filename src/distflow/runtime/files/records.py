"""The two records of an attempt: ``runner.json`` (what it is doing) and ``exit.json`` (how it ended).

Both live in space that was allocated at ``lease`` and are written in place, so that a full disk cannot lose them. Which of them
exist, and what they say, is the truth about an attempt; no process keeps another one.
"""

from __future__ import annotations

import json
import os
import select
from typing import TYPE_CHECKING, Any, Dict, Optional

from distflow.protocol.ends import EndReason
from distflow.runtime import processes
from distflow.runtime.clock import now
from distflow.runtime.files.masking import Mask, clean_error
from distflow.runtime.untrusted import MAX_BYTES, decode_json, decode_object
from distflow.runtime.wire import Json

if TYPE_CHECKING:
    from distflow.runtime.guard.attempt_handles import AttemptHandles

__all__ = [
    "END",
    "END_BYTES",
    "SPARE_END",
    "STATE",
    "STATE_BYTES",
    "allocate",
    "first_state",
    "make_end",
    "read_end",
    "read_error",
    "read_state",
    "read_text",
    "stop_reason",
    "write_end",
    "write_state",
]

STATE = "runner.json"
END = "exit.json"
SPARE_END = ".exit.json"
"""The end's record before it is written: named so that it cannot be taken for one."""

STATE_BYTES = 8192
END_BYTES = 65536
_ERROR_BYTES = 24 * 1024
_ERROR_DEPTH = 32
_MAX_ERROR_FILE = 4 * 1024 * 1024
_TEXT = 2000
_TRIES = 100
_PAUSE_S = 0.002


def allocate(dir_fd: int, name: str, size: int) -> int:
    """Create ``name`` with ``size`` bytes of its own on the disk. Raises ``OSError`` (ENOSPC) when there is no room."""
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (22, 38, 95):  # EINVAL, ENOSYS, EOPNOTSUPP: a file system without it gets real zeros
                raise
            os.pwrite(fd, b" " * size, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def first_state(grip: AttemptHandles, runner: int) -> Json:
    """The state of an attempt whose pair has just come up; to be asked by the keeper."""

    def identity(pid: int) -> Json:
        process = processes.read_process(pid)
        return {"pid": pid, "start": process.start if process else 0}

    return {
        "attempt": grip.attempt,
        "phase": "leased",
        "boot_id": processes.boot_id(),
        "host": os.uname().nodename,
        "runner": identity(runner),
        "keeper": identity(os.getpid()),
        "command": None,
        "gpu_ids": grip.gpu_ids,
        "port": grip.port,
        "link_port": grip.link_port,
        "leased_at": now(),
        "started_at": None,
        "stopped_at": None,
        "stop_reason": None,
        "why": None,
        "message": None,
        "lost_output_bytes": 0,
        "max_log": None,
        "container": None,
        "exit": None,
    }


def write_state(fd: int, state: Json) -> None:
    """Rewrite the state in place: one ``pwrite`` of never less than before, so that readers see the old one or the new one."""
    data = json.dumps(state).encode()
    if len(data) > STATE_BYTES:
        data = json.dumps(dict(state, why=None, message=None)).encode()
    try:
        # It takes more room than it was given only for the variables of a container: see ``containers.identify``.
        os.pwrite(fd, data.ljust(max(STATE_BYTES, os.fstat(fd).st_size)), 0)
    except OSError:
        return  # a copy-on-write file system that is full: the processes go on, and the end's record says the rest


def read_state(directory: str) -> Optional[Json]:
    """The state of the attempt in ``directory``, or None when its pair never came up."""
    # A reader may meet a write on file systems that do not order them, and the writer's CPU may be taken away in the middle.
    for number in range(_TRIES):
        if number:
            select.select([], [], [], _PAUSE_S)
        try:
            text = _read(directory, STATE)
        except OSError:
            return None
        try:
            return _checked_state(decode_object(text))
        except ValueError:
            if not text.strip(b"\0 "):
                return None
    return None


def _checked_state(state: Json) -> Json:
    """Return the state with every nested record and process id in its form; raise ``ValueError`` for any other.

    The attempt's processes run as the same user and can write the file: its readers must not fail over its content.
    """
    for name in ("runner", "keeper", "command", "exit", "container"):
        if not isinstance(state.get(name), (dict, type(None))):
            raise ValueError("`{}` is not an object".format(name))
    for name in ("runner", "keeper", "command"):
        for key in ("pid", "start"):
            if not isinstance((state.get(name) or {}).get(key, 0), int):
                raise ValueError("`{}` of `{}` is not a number".format(key, name))
    return state


def _read(directory: str, name: str) -> bytes:
    """Return a record's bytes, at most as many as can be decoded. Nothing that is not a regular file is opened for long."""
    fd = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb", buffering=0) as file:
        return file.read(MAX_BYTES + 1)


def read_end(directory: str) -> Optional[Json]:
    """The recorded end of the attempt in ``directory``, or None."""
    try:
        end: Json = decode_object(_read(directory, END))
    except (OSError, ValueError):
        return None
    return end


def read_text(directory: str, name: str) -> str:
    """A short text that lies in an attempt's directory; empty when it does not."""
    try:
        with open(os.path.join(directory, name), encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return ""


def read_error(directory: str, mask: Optional[Mask] = None) -> Optional[Json]:
    """What a process of the attempt wrote into its error file (torch's format), cut to a size that the record can hold.

    Secrets are masked in it and in the file itself. Whatever a process wrote, what is returned can be written down anywhere.
    """
    clean_error(directory, mask)
    try:
        fd = os.open(os.path.join(directory, "error.json"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        try:
            text = file.read(_MAX_ERROR_FILE).decode("utf-8", "replace")
            error = _sound(decode_json(text, max_bytes=2 * _MAX_ERROR_FILE), _ERROR_DEPTH)
        except (OSError, ValueError):
            return None
    if not isinstance(error, dict):
        return None
    known: Json = error if mask is None else mask.tree(error)
    if len(json.dumps(known)) <= _ERROR_BYTES:
        return known
    message: Any = known.get("message")
    if isinstance(message, dict):
        message = message.get("message")
    return {"message": str(message)[:_TEXT], "truncated": True}


def _sound(value: Any, depth: int) -> Any:
    """A JSON value without halves of UTF-16 pairs, which JSON can name and nobody can encode.

    Raises ``ValueError`` for one that is nested more than ``depth`` times: who passes it on has less of a stack left than we.
    """
    if depth < 0:
        raise ValueError("it is nested too deeply")
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_sound(one, depth - 1) for one in value]
    if isinstance(value, dict):
        return {_sound(key, depth): _sound(one, depth - 1) for key, one in value.items()}
    return value


def make_end(state: Json, reason: EndReason, **known: Any) -> Json:
    """Put an ``End`` together; ``known`` holds exit_code, signal, ended_at, message, output_bytes, error."""
    end: Dict[str, Any] = {
        "exit_code": None,
        "signal": None,
        "reason": reason,
        "why": state.get("why"),
        "stopped_at": state.get("stopped_at"),
        "started_at": state.get("started_at"),
        "ended_at": None,
        "message": state.get("message"),
        "output_bytes": 0,
        "lost_output_bytes": state.get("lost_output_bytes", 0),
        "error": None,
        "kernel": None,
    }
    end.update(known)
    if end["ended_at"] is None:
        end["ended_at"] = now()
    for name in ("why", "message"):
        if end[name] is not None:
            end[name] = str(end[name])[:_TEXT]
    return end


def stop_reason(state: Json) -> Optional[EndReason]:
    """Return the ``reason`` for which the keeper was stopping the command, or None when no stop came before the command's end.

    Whoever writes the end in the place of a dead keeper must prefer it to the keeper's death: the stop came first.
    """
    # Keepers of earlier versions recorded only that they were stopping the command.
    return EndReason.of(state.get("stop_reason") or EndReason.STOPPED) if state.get("stopped_at") is not None else None


def write_end(dir_fd: int, record_fd: int, end: Json) -> int:
    """Write the record into its allocated space and give it its name. ``record_fd`` below 0: allocate one now.

    Whoever reads it sees it now. The descriptor that is returned is to be synced once it has been told: a disk may take its
    time, and should the power fail in between, the attempt counts as ended by the reboot.
    """
    data = json.dumps(end).encode()
    if record_fd < 0:
        try:
            record_fd = os.open(SPARE_END, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=dir_fd)
        except FileNotFoundError:
            record_fd = allocate(dir_fd, SPARE_END, END_BYTES)
    written = 0
    while written < len(data):
        written += os.pwrite(record_fd, data[written:], written)
    os.ftruncate(record_fd, len(data))
    try:
        os.rename(SPARE_END, END, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except FileNotFoundError:  # somebody has swept away what was allocated
        return write_end(dir_fd, -1, end)
    return record_fd
