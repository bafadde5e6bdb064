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

from preloaded import Preloaded, start_preloaded

__all__ = ["Done", "run_command", "start_command"]


@dataclass(frozen=True, slots=True)
class Done:
    """The exit code and output of a command that has ended."""

    code: int
    out: str
    err: str


def run_command(
    base: Path, arguments: tuple[str, ...], environment: dict[str, str], folder: Path, timeout: float, stdin: str = ""
) -> Done:
    """Run ``distflow ARGUMENTS`` until it ends. ``base`` is pytest's base directory. Raises ``subprocess.TimeoutExpired``."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        process = start_command(base, arguments, environment, folder, out.fileno(), err.fileno(), given.fileno())
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)
            raise subprocess.TimeoutExpired(["distflow", *arguments], timeout, _read(out), _read(err)) from None
        return Done(code, _read(out).decode(), _read(err).decode())


def start_command(
    base: Path, arguments: tuple[str, ...], environment: dict[str, str], folder: Path, stdout: int, stderr: int, stdin: int = -1
) -> Preloaded:
    """Start ``distflow ARGUMENTS``, by default without input."""
    with open(os.devnull, "rb") as empty:
        streams = empty.fileno() if stdin == -1 else stdin, stdout, stderr
        return start_preloaded(base, ["-m", "distflow", *arguments], folder, environment, *streams, kind="distflow")


def _read(file: Any) -> bytes:
    file.seek(0)
    content: bytes = file.read()
    return content
