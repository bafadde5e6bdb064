"""Runs worlds of real ranks with gloo, each once for a test session. The ranks are forks of a process with torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from preloaded import start_preloaded

TESTS = Path(__file__).resolve().parents[1]
"""The directory from which the scripts import each other, as tests do."""
DEADLINE_S = 270.0
"""The limit for a whole world on a busy machine."""
_PRELOAD = "torch.distributed.optim torch.distributed.tensor.debug torch.export._trace"
"""The modules that local SGD, context parallelism and traced pipelines import. Otherwise, this takes 0.6 s in each rank."""


def run_world(script: Path, ranks: int, temporary: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the JSON object that rank 0 of ``script`` wrote to ``RESULTS``: name of a check → its results.

    The first worker of pytest-xdist that asks for a world runs it; the others wait for the result.
    """
    top = temporary.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        top = top.parent
    folder = top / f"{script.stem}-{ranks}"
    folder.mkdir(exist_ok=True)
    results = folder / "results.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not results.exists():
            _run(script, ranks, folder, results, temporary)
    found: dict[str, Any] = json.loads(results.read_text())
    return found


def _run(script: Path, ranks: int, folder: Path, results: Path, temporary: pytest.TempPathFactory) -> None:
    rendezvous = folder / "rendezvous"
    rendezvous.unlink(missing_ok=True)  # left by a worker of pytest-xdist that failed
    environment = {
        **os.environ,
        "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent / 'src'}",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "PRELOAD": _PRELOAD,
        "RENDEZVOUS_FILE": str(rendezvous),
        "RESULTS": str(results),
    }
    code: int | None = None
    with (folder / "main.log").open("wb") as log, open(os.devnull) as stdin:
        files = (stdin.fileno(), log.fileno(), log.fileno())
        main = start_preloaded(temporary.getbasetemp(), [str(script)], folder, environment, *files)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):  # reported below, with the output of the ranks
            code = main.wait(DEADLINE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(main.pid, signal.SIGKILL)
        main.wait(DEADLINE_S)
    logs = "\n".join(f"-- {log.stem} --\n{log.read_text()[-4000:]}" for log in sorted(folder.glob("*.log")))
    assert code == 0, f"exit code {code}; None: not within {DEADLINE_S:.0f} s\n{logs}"
