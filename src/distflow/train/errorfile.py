"""torch's error file: how a process that fails leaves its exception for whoever started it.

Format and variable are torch's (``torch.distributed.elastic.multiprocessing.errors.ErrorHandler``); ``rank``, ``pid`` and
``signal`` are additions that distflow's verdict reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["VARIABLE", "Failure", "read_failure", "write_exception", "write_failure"]

VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""The variable that names the file."""
_SYMPTOM = re.compile(
    r"Connection (?:closed|reset) by peer|Broken pipe|Connection refused|Timed out waiting \d+ms for (?:recv|send)"
    r"|wait timeout after \d+ms|Socket Timeout|remote process exited|ncclRemoteError|Failed to recv|recvValue failed"
)
"""What torch's backends say when it was another process that went away (gloo, TCPStore, NCCL; texts of torch 2.13)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What an error file says."""

    message: str
    """``ValueError: shapes differ``"""
    callstack: str
    """Python's traceback, or empty."""
    written_ns: int
    """When the file was written, by the clock of the file system, in nanoseconds."""

    @property
    def is_symptom(self) -> bool:
        """Tell whether it only says that another process was gone."""
        return _SYMPTOM.search(self.message) is not None


def write_exception(error: BaseException, *, rank: int) -> None:
    """Write the exception of this process, unless the file is there already (torch's ``@record`` may have written it)."""
    path = os.environ.get(VARIABLE)
    if path:
        text = "".join(traceback.format_exception(error))
        write_failure(Path(path), f"{type(error).__name__}: {error}", text, {"rank": rank, "pid": os.getpid()}, mode="x")


def write_failure(path: Path, message: str, callstack: str, more: Mapping[str, Any], *, mode: str = "w") -> None:
    """Write an error file. A file that cannot be written is let go: the failure itself matters more."""
    extra = {"py_callstack": callstack, "timestamp": str(time.time_ns() // 10**9)}
    text = json.dumps({"message": {"message": message, "extraInfo": extra}, **more})
    with contextlib.suppress(OSError), path.open(mode, encoding="utf-8") as file:
        file.write(text)


def read_failure(path: Path) -> Failure | None:
    """Return what the file says; ``None`` when there is none, or it is no error file."""
    try:
        written_ns = path.stat().st_mtime_ns
        record = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        message = record["message"]
        if isinstance(message, str):  # as torch writes a process that was killed
            return Failure(message=message, callstack="", written_ns=written_ns)
        extra = message.get("extraInfo") or {}
        return Failure(
            message=str(message.get("message", "")), callstack=str(extra.get("py_callstack", "")), written_ns=written_ns
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
