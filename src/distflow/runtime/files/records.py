"""The two records of an attempt: ``runner.json`` (its current state) and ``exit.json`` (its end).

Both use space that was allocated at ``lease`` and are written in place. On most file systems, a full disk therefore does not
prevent writing them. They are the authoritative state of an attempt.
"""

from __future__ import annotations

import json
import os
import select

from distflow.protocol.ends import EndReason
from distflow.protocol.light_typing import TYPE_CHECKING, Any, Dict, Optional
from distflow.runtime import processes
from distflow.runtime.clock import now
from distflow.runtime.files.masking import Mask, clean_error
from distflow.runtime.untrusted import MAX_BYTES, decode_json, decode_object
from distflow.runtime.wire import Json

if TYPE_CHECKING:
    from distflow.runtime.guard.control import AttemptHandles

__all__ = [
    "END",
    "END_BYTES",
    "SPARE_END",
    "STATE",
    "STATE_BYTES",
    "allocate",
    "as_exit",
    "describe_exit",
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
"""Name of the space for ``exit.json`` before the end is written, so that an unwritten record is not read."""

STATE_BYTES = 8192
END_BYTES = 65536
_ERROR_BYTES = 24 * 1024
_ERROR_DEPTH = 32
_MAX_ERROR_FILE = 4 * 1024 * 1024
_TEXT = 2000
_TRIES = 100
_PAUSE_S = 0.002


def allocate(dir_fd: int, name: str, size: int) -> int:
    """Create ``name`` with ``size`` bytes allocated on the disk. Raises ``OSError`` (ENOSPC) if there is not enough space."""
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (22, 38, 95):  # EINVAL, ENOSYS, EOPNOTSUPP: without fallocate, the bytes are written
                raise
            os.pwrite(fd, b" " * size, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def first_state(handles: AttemptHandles, runner: int) -> Json:
    """Return the state of an attempt whose runner and keeper have just started. Only the keeper may call it."""

    def identity(pid: int) -> Json:
        process = processes.read_process(pid)
        return {"pid": pid, "start": process.start if process else 0}

    return {
        "attempt": handles.attempt,
        "phase": "leased",
        "boot_id": processes.boot_id(),
        "host": os.uname().nodename,
        "runner": identity(runner),
        "keeper": identity(os.getpid()),
        "command": None,
        "gpu_ids": handles.gpu_ids,
        "port": handles.port,
        "link_port": handles.link_port,
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
    """Rewrite the state in place with one ``pwrite`` that never shrinks the file, so that most readers see a whole state."""
    data = json.dumps(state).encode()
    if len(data) > STATE_BYTES:
        data = json.dumps(dict(state, why=None, message=None)).encode()
    try:
        # Only the variables of a container can need more than the allocated space: see ``containers.identify``.
        os.pwrite(fd, data.ljust(max(STATE_BYTES, os.fstat(fd).st_size)), 0)
    except OSError:
        return  # a full copy-on-write file system: the attempt continues, but readers of its state miss this change


def read_state(directory: str) -> Optional[Json]:
    """Return the state of the attempt in ``directory``; None if runner and keeper never started, or if it is unreadable."""
    # A read may overlap a write if the file system does not order them, and the writer may be interrupted halfway.
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
    """Return the state if nested records, process ids and start times have the right types; raise ``ValueError`` otherwise.

    The attempt's processes run as the same user and can write the file, so its content must not make readers fail.
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
    """Return a record's bytes, at most ``MAX_BYTES + 1``, so that the decoder rejects a record that is too large.

    Opening a FIFO does not block.
    """
    fd = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb", buffering=0) as file:
        return file.read(MAX_BYTES + 1) or b""  # None for a FIFO that a process has open for writing


def read_end(directory: str) -> Optional[Json]:
    """Return the recorded end of the attempt in ``directory``, or None."""
    try:
        end: Json = decode_object(_read(directory, END))
    except (OSError, ValueError):
        return None
    return end


def read_text(directory: str, name: str) -> str:
    """Return the beginning of a text file in an attempt's directory, at most 4096 characters; empty if it cannot be read."""
    try:
        with open(os.path.join(directory, name), encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return ""


def read_error(directory: str, mask: Optional[Mask] = None) -> Optional[Json]:
    """Return the attempt's error file (torch's format), shortened to fit into the record.

    ``mask`` masks secrets in the result and in the file itself. The result can always be encoded as UTF-8.
    Returns None if there is no readable error file, or if it is not a JSON object of at most 4 MiB and ``_ERROR_DEPTH`` levels.
    """
    clean_error(directory, mask)
    try:
        fd = os.open(os.path.join(directory, "error.json"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        try:
            text = (file.read(_MAX_ERROR_FILE) or b"").decode("utf-8", "replace")
            error = _without_surrogates(decode_json(text, max_bytes=2 * _MAX_ERROR_FILE), _ERROR_DEPTH)
        except (OSError, ValueError):
            return None
    if not isinstance(error, dict):
        return None
    masked: Json = error if mask is None else mask.tree(error)
    if len(json.dumps(masked)) <= _ERROR_BYTES:
        return masked
    message: Any = masked.get("message")
    if isinstance(message, dict):
        message = message.get("message")
    return {"message": str(message)[:_TEXT], "truncated": True}


def _without_surrogates(value: Any, depth: int) -> Any:
    """Return a JSON value without lone UTF-16 surrogates, which JSON can express but which cannot be encoded.

    Raises ``ValueError`` for more than ``depth`` levels, because code that handles the value later may have less stack left.
    """
    if depth < 0:
        raise ValueError("the value is nested too deeply")
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_without_surrogates(one, depth - 1) for one in value]
    if isinstance(value, dict):
        return {_without_surrogates(key, depth): _without_surrogates(one, depth - 1) for key, one in value.items()}
    return value


def as_exit(status: int) -> Json:
    """Return a wait status as ``exit_code`` and ``signal``."""
    if os.WIFSIGNALED(status):
        return {"exit_code": None, "signal": os.WTERMSIG(status)}
    return {"exit_code": os.WEXITSTATUS(status), "signal": None}


def describe_exit(end: Json) -> str:
    """Describe the end of a command."""
    return "signal {}".format(end["signal"]) if end.get("signal") else "exit code {}".format(end.get("exit_code"))


def make_end(state: Json, reason: EndReason, **fields: Any) -> Json:
    """Return the record of an end. ``fields`` sets fields, such as ``exit_code``, ``signal`` and ``ended_at``."""
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
    end.update(fields)
    if end["ended_at"] is None:
        end["ended_at"] = now()
    for name in ("why", "message"):
        if end[name] is not None:
            end[name] = str(end[name])[:_TEXT]
    return end


def stop_reason(state: Json) -> Optional[EndReason]:
    """Return the reason for which the keeper was stopping the command, or None if it was not stopping it.

    A process that writes the record for a dead keeper must prefer this reason to the keeper's death, because the stop was
    first.
    """
    # Keepers of earlier versions recorded only that they were stopping the command.
    return EndReason.of(state.get("stop_reason") or EndReason.STOPPED) if state.get("stopped_at") is not None else None


def write_end(dir_fd: int, record_fd: int, end: Json) -> int:
    """Write the record into its allocated space and give it its name. A negative ``record_fd`` finds or allocates space.

    Readers see the record at once. The caller must report the end first, and then sync the returned descriptor, so that a slow
    disk does not delay the report. If the power fails in between, the attempt counts as ended by the reboot.
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
    except FileNotFoundError:  # the allocated file was removed
        return write_end(dir_fd, -1, end)
    return record_fd
