"""Run commands of distflow as processes that are forked from one that has imported everything (see ``preloaded``).

The supervisors that they start are forked, too. A test of the start itself (signals, terminals, start-up time) runs
``python -m distflow`` instead.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preloaded import start_preloaded

__all__ = ["Done", "run_command"]


@dataclass(frozen=True, slots=True)
class Done:
    """A command that ended."""

    code: int
    out: str
    err: str


def run_command(base: Path, arguments: tuple[str, ...], environment: dict[str, str], folder: Path, timeout: float) -> Done:
    """Run ``distflow ARGUMENTS`` to its end. ``base`` is the base directory of pytest. Raises ``subprocess.TimeoutExpired``."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as stdin:
        files = stdin.fileno(), out.fileno(), err.fileno()
        process = start_preloaded(base, ["-m", "distflow", *arguments], folder, environment, *files, kind="distflow")
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)
            raise subprocess.TimeoutExpired(["distflow", *arguments], timeout, _read(out), _read(err)) from None
        return Done(code, _read(out).decode(), _read(err).decode())


def _read(file: Any) -> bytes:
    file.seek(0)
    content: bytes = file.read()
    return content
