"""Writing and reading torch's error file (``distflow.protocol.error_file`` has the format)."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distflow.protocol.error_file import VARIABLE, ErrorReport, error_file, parse_error_file

__all__ = ["Failure", "read_failure", "write_exception", "write_failure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error file of a rank."""

    report: ErrorReport
    written_ns: int
    """When the file was written, by the clock of the file system, in nanoseconds."""


def write_exception(error: BaseException, *, rank: int) -> None:
    """Write the exception of this process, unless the file is there already (torch's ``@record`` may have written it)."""
    path = os.environ.get(VARIABLE)
    if path:
        text = "".join(traceback.format_exception(error))
        write_failure(Path(path), f"{type(error).__name__}: {error}", text, {"rank": rank, "pid": os.getpid()}, mode="x")


def write_failure(path: Path, message: str, callstack: str, more: Mapping[str, Any], *, mode: str = "w") -> None:
    """Write an error file. Errors of writing are ignored, because the failure itself matters more."""
    text = json.dumps(error_file(message, callstack, time.time_ns() // 10**9, more))
    with contextlib.suppress(OSError), path.open(mode, encoding="utf-8") as file:
        file.write(text)


def read_failure(path: Path) -> Failure | None:
    """Return the content of the file; ``None`` if it does not exist or is not an error file."""
    try:
        written_ns = path.stat().st_mtime_ns
        report = parse_error_file(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except (OSError, ValueError, RecursionError):
        return None
    return None if report is None else Failure(report=report, written_ns=written_ns)
