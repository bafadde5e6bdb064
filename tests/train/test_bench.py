"""The measurements as people call them, and the sample as a launcher starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def bench(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "distflow", "train", "bench", *arguments, "--format-type", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_bandwidth_of_all_reduce_is_measured_by_size() -> None:
    found = bench("allreduce", "--ranks", "2")
    rows = found["results"]
    assert (found["measured"], found["ranks"], found["backend"]) == ("allreduce", 2, "gloo")
    assert [row["bytes"] for row in rows] == sorted({row["bytes"] for row in rows})
    for row in rows:
        assert row["algorithm_bandwidth"] == pytest.approx(row["bytes"] / row["seconds"])
        assert row["bus_bandwidth"] == pytest.approx(row["algorithm_bandwidth"])


def test_scaling_is_measured_against_one_rank() -> None:
    first, second = bench("scaling", "--ranks", "2")["results"]
    assert (first["ranks"], first["efficiency"]) == (1, 1.0)
    assert second["efficiency"] == pytest.approx(first["seconds"] / 2 / second["seconds"])


STRATEGY = {"kind": "fsdp", "mesh": {"shape": [2], "names": ["fsdp"]}, "options": {}}


@pytest.mark.parametrize(
    ("flags", "environment"),
    [(("--accumulate", "2"), {"DISTFLOW_STRATEGY": json.dumps(STRATEGY)}), (("--strategy", "pipeline"), {})],
    ids=["the spec's strategy", "a strategy of its own"],
)
def test_the_small_gpt_learns(flags: tuple[str, ...], environment: dict[str, str], repository: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["distflow.train.samples.gpt", "--steps", "12", *flags, str(repository / "docs")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["step"] for one in steps] == list(range(12))
    assert steps[-1]["loss"] < steps[0]["loss"] - 1.5
