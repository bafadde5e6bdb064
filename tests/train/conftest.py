"""Fixtures that run the launcher and scripts of distflow.train in real processes, and end these processes afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from distflow.testing.waiting import wait_until
from distflow.train.strategies.description import reset_current_strategy
from preloaded import Preloaded, start_preloaded

DEADLINE_S = 120.0
"""The limit for one run on a busy machine."""
SOURCES = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture(autouse=True)
def _reset_strategy() -> Iterator[None]:
    yield
    reset_current_strategy()


class Run:
    """A Python process in its own session, whose output goes to files. With ``temporary``, a process with torch forks it."""

    process: subprocess.Popen[bytes] | Preloaded

    def __init__(
        self, folder: Path, arguments: list[str], environment: dict[str, str], temporary: pytest.TempPathFactory | None
    ) -> None:
        self.folder = folder
        self.error_file = folder / "error.json"
        folder.mkdir(exist_ok=True)
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        variables = {**inherited, "PYTHONPATH": str(SOURCES), "TORCHELASTIC_ERROR_FILE": str(self.error_file), **environment}
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            if temporary is not None:
                with open(os.devnull) as stdin:
                    files = (stdin.fileno(), stdout.fileno(), stderr.fileno())
                    self.process = start_preloaded(temporary.getbasetemp(), arguments, folder, variables, *files)
                return
            self.process = subprocess.Popen(
                [sys.executable, *arguments], cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                start_new_session=True,
            )  # fmt: skip

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def records(self) -> list[dict[str, Any]]:
        """The JSON lines printed so far."""
        lines = self.stdout.splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n") and line.startswith("{")]

    @property
    def error(self) -> dict[str, Any]:
        content = json.loads(self.error_file.read_text())
        assert isinstance(content, dict)
        return content

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def wait_for_records(self, count: int) -> list[dict[str, Any]]:
        """Wait for ``count`` JSON lines. Fail if the command ends before it has printed them."""
        wait_until(lambda: len(self.records) >= count or self.process.poll() is not None, DEADLINE_S, "the JSON lines")
        assert len(self.records) >= count, self.stderr
        return self.records


class Start(Protocol):
    """Starts a script: under the launcher with these flags, or ``plain``, without it. ``env`` adds environment variables."""

    def __call__(self, script: str, *flags: str, arguments: tuple[str, ...] = (), plain: bool = False, **env: str) -> Run: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start each process as a new interpreter."""
    yield from _make_start(tmp_path, None)


@pytest.fixture
def start_with_torch(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start processes that have imported torch already (``preloaded``)."""
    yield from _make_start(tmp_path, tmp_path_factory)


def _make_start(tmp_path: Path, temporary: pytest.TempPathFactory | None) -> Iterator[Start]:
    runs: list[Run] = []

    def start_one(script: str, *flags: str, arguments: tuple[str, ...] = (), plain: bool = False, **env: str) -> Run:
        folder = tmp_path / f"run-{len(runs)}"
        folder.mkdir()
        (folder / "script.py").write_text(textwrap.dedent(script))
        launcher = [] if plain else ["-m", "distflow.train.launch", *flags]
        runs.append(Run(folder, [*launcher, "script.py", *arguments], env, temporary))
        return runs[-1]

    yield start_one
    for run in runs:
        run.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait(DEADLINE_S)
