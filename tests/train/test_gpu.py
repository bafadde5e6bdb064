"""Tests that need a GPU: NCCL, the bf16 hook, a lack of GPU memory, and the GPUs in ``pool check``."""

from __future__ import annotations

import json
import os

import pytest

from preloaded import start_preloaded
from train.conftest import DEADLINE_S, Start


@pytest.fixture(autouse=True, scope="module")
def _skip_without_gpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip these tests if torch does not find a GPU. Another process, which has imported torch, counts the GPUs."""
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() and torch.cuda.device_count() else 3)"
    with open(os.devnull, "r+") as null:
        files = (null.fileno(), null.fileno(), null.fileno())
        base = tmp_path_factory.getbasetemp()
        process = start_preloaded(base, ["-c", code], base, os.environ, *files)
    if process.wait(DEADLINE_S) != 0:
        pytest.skip("torch does not find a GPU")


pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

STEPS = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distflow import train

world = train.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(1024, 1024, device=world.device), device_ids=[world.local_rank])
train.compress_gradients(model, "bf16")
with torch.profiler.profile() as profile:
    for step in range(3):
        model(torch.randn(8, 1024, device=world.device)).square().mean().backward()
count = sum(one.name == "nccl:all_reduce" for one in profile.events())
train.report(step=step, device=str(world.device), backend=world.backend, count=count)
"""

MEMORY = """
import torch

from distflow import train

world = train.init()
guard = train.MemoryGuard()
for step in range(3):
    with guard:
        size = 1 << 50 if step == 1 else 1 << 10
        torch.empty(size, dtype=torch.uint8, device=world.device)
    train.report(step=step, skipped=guard.skipped, mine=guard.mine)
"""


def test_nccl_sums_compressed_gradients_and_the_profiler_shows_it(start: Start) -> None:
    run = start(STEPS, "--size", "1")
    assert run.wait() == 0, run.stderr
    (record,) = run.records
    assert record["device"] == "cuda:0"
    assert "nccl" in record["backend"]
    assert record["count"] >= 3


def test_a_step_that_runs_out_of_memory_is_skipped_and_the_next_one_runs(start: Start) -> None:
    run = start(MEMORY, "--size", "1")
    assert run.wait() == 0, run.stderr
    assert [(one["step"], one["skipped"], one["mine"]) for one in run.records] == [(0, False, 0), (1, True, 1), (2, False, 1)]


def test_pool_check_reports_the_gpus_and_nccl(start: Start) -> None:
    arguments = "[sys.executable, '-m', 'distflow', 'pool', 'check', '-t', 'json']"
    script = f"import os, sys; os.execv(sys.executable, {arguments})"
    run = start(script, plain=True, DISTFLOW_STATE="state", HOME=".")
    run.wait()
    (node,) = json.loads(run.stdout)["nodes"]
    assert node["gpus"]
    assert all(gpu["name"] and gpu["memory_mib"] for gpu in node["gpus"])
    assert node["torch"]["is_available"]
    assert node["torch"]["nccl"]
