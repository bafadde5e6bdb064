"""Worlds of real processes that talk gloo: started once, running many checks, because importing torch takes seconds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
"""Where scripts find each other, as tests do."""
DEADLINE_S = 270.0
"""For a whole world, on a machine that is busy with other things."""


def run_world(script: Path, ranks: int, folder: Path) -> dict[str, Any]:
    """Run a script on so many ranks, and return the JSON object that rank 0 wrote to ``RESULTS``: check → what it found."""
    results = folder / "results.json"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "MEETING": str(folder / "meeting"),
        "RESULTS": str(results),
    }
    processes = []
    for rank in range(ranks):
        with (folder / f"{rank}.log").open("wb") as log:
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen([sys.executable, str(script)], env=own, stdout=log, stderr=log))
    codes: list[int | None] = []
    try:
        until = time.monotonic() + DEADLINE_S
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # said below, with what the ranks printed
                process.wait(max(0.0, until - time.monotonic()))
            codes.append(process.poll())
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = "\n".join(f"-- rank {rank} --\n{(folder / f'{rank}.log').read_text()[-4000:]}" for rank in range(ranks))
    assert set(codes) == {0}, f"{codes}; None: not within {DEADLINE_S:.0f} s\n{logs}"
    found: dict[str, Any] = json.loads(results.read_text())
    return found
