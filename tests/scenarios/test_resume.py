"""A rank is killed in the middle of an epoch, and the final weights are equal to those of an undisturbed run."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from distflow.layout.strategy.model import parse_strategy
from distflow.testing.waiting import wait_until
from preloaded import TRANSFORMERS, start_preloaded
from scenarios.conftest import Cli
from scenarios.lab import copy_specs, json_lines

REPOSITORY = Path(__file__).resolve().parents[2]
HYBRID = {"kind": "hybrid", "tp_size": 2}
"""FSDP and tensor parallelism."""

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]


def run_undisturbed(
    folder: Path, script: str, arguments: list[str], strategy: dict[str, Any], ranks: int, temporary: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Run a script to its end, without a workflow, and return the JSON lines that it prints."""
    folder.mkdir()
    parsed, _ = parse_strategy(strategy, (ranks,))
    assert parsed is not None
    environment = os.environ | {
        "DISTFLOW_STRATEGY": json.dumps(parsed.normalized()),
        "DISTFLOW_CHECKPOINT": str(folder / "checkpoints"),
        "OMP_NUM_THREADS": "1",
    }
    path = REPOSITORY / "workflow_specs" / script
    command = ["-m", "distflow.train.launch", "--size", str(ranks), str(path), *arguments]
    output = run_preloaded(folder, command, environment, temporary)
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def run_preloaded(
    folder: Path, arguments: list[str], environment: dict[str, str], temporary: pytest.TempPathFactory
) -> str:  # fmt: skip
    """Run a Python forked from one that has imported torch, in a folder, to its end. Return its output."""
    output = folder / "output"
    with output.open("wb") as file, open(os.devnull) as stdin:
        process = start_preloaded(
            temporary.getbasetemp(), arguments, folder, environment, stdin.fileno(), file.fileno(), file.fileno()
        )
    assert process.wait(200) == 0, output.read_text()
    return output.read_text()


def kill_the_last_rank(cli: Cli, workflow: str, ranks: int) -> None:
    """Kill the last rank between two checkpoints, which are saved at every third step. Wait for the end of the workflow.

    All ranks must have continued from the last checkpoint.
    """
    wait_until(lambda: any(one.get("step", 0) >= 4 and "loss" in one for one in json_lines(cli.logs(workflow))), 120)
    (victim,) = {one["pid"] for one in json_lines(cli.logs(workflow)) if one.get("begins") and one["rank"] == ranks - 1}
    os.kill(victim, signal.SIGKILL)
    cli.await_status(workflow, "COMPLETED", "FAILED", timeout=240)
    assert cli.tasks(workflow)["worker"]["retry_id"] == 1
    assert "worker retry-1" in cli.run("workflow", "events", workflow).out
    starts = {(one["rank"], one["step"]) for one in json_lines(cli.logs(workflow)) if one.get("begins")}
    resumed_at = {step for _, step in starts} - {0}
    assert len(resumed_at) == 1, "every rank continued from the same step"
    assert resumed_at.pop() % 3 == 0
    assert len(starts) == 2 * ranks


def test_a_run_with_a_killed_rank_ends_with_the_same_weights(
    cli: Cli, forking_site: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spec = copy_specs(cli, REPOSITORY) / "resume.yaml"
    cli.configure(environment={"PYTHONPATH": forking_site})
    workflow = cli.submit(str(spec), "--set", "epochs=3", "pause=0.4", f"store=file://{cli.folder}/store")
    kill_the_last_rank(cli, workflow, 2)
    undisturbed = run_undisturbed(cli.folder / "alone", "resume.py", ["--epochs", "3"], {"kind": "ddp"}, 2, tmp_path_factory)
    digests = [one["weights"] for one in [*undisturbed, *json_lines(cli.logs(workflow))] if "weights" in one]
    assert len(digests) == 2
    assert len(set(digests)) == 1


# Few different shapes, because the optimizer's operations on DTensors take longest for the first tensor of each shape.
MAKE_BASE_MODEL = """
import sys, torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    pad_token_id=None, bos_token_id=1, eos_token_id=2,
)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1], max_shard_size="30KB")
"""


def test_a_fine_tune_with_a_killed_rank_ends_with_the_same_model(
    cli: Cli, forking_site: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    base = cli.folder / "base"
    monkeypatch.setenv("PRELOAD", TRANSFORMERS)
    run_preloaded(cli.folder, ["-c", MAKE_BASE_MODEL, str(base)], dict(os.environ), tmp_path_factory)
    assert len(list(base.glob("*.safetensors"))) > 1
    spec = copy_specs(cli, REPOSITORY) / "fine_tune.yaml"
    cli.configure(environment={"PYTHONPATH": forking_site, "PRELOAD": TRANSFORMERS})
    values = [f"base=file://{base}", "epochs=1", "pause=1.5", f"store=file://{cli.folder}/store"]
    workflow = cli.submit(str(spec), "--set", *values)
    kill_the_last_rank(cli, workflow, 4)
    arguments = ["--base", str(base), "--output", str(cli.folder / "alone" / "model"), "--epochs", "1"]
    run_undisturbed(cli.folder / "alone", "fine_tune.py", arguments, HYBRID, 4, tmp_path_factory)
    assert cli.run("workflow", "fetch", workflow, "--to", str(cli.folder / "fetched")).code == 0
    digests = {
        hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in ("alone", "fetched")
        for path in (cli.folder / folder).rglob("model.safetensors")
    }
    (tuned,) = (cli.folder / "fetched").rglob("model.safetensors")
    assert len(digests) == 1
    assert tuned.stat().st_size >= sum(path.stat().st_size for path in base.glob("*.safetensors")) * 0.9
