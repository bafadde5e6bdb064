"""A rank is killed in the middle of an epoch, and the weights in the end are those of a run that nothing happened to."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from distflow.layout.strategy.model import parse_strategy
from distflow.testing.waiting import wait_until
from preloaded import start_preloaded
from scenarios.conftest import Cli
from scenarios.lab import checkout, json_lines

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]


def undisturbed(folder: Path, strategy: dict[str, Any], ranks: int, temporary: pytest.TempPathFactory) -> str:
    """The weights that the script ends with outside of distflow."""
    folder.mkdir()
    parsed, _ = parse_strategy(strategy, (ranks,))
    assert parsed is not None
    environment = os.environ | {
        "DISTFLOW_STRATEGY": json.dumps(parsed.normalized()),
        "DISTFLOW_CHECKPOINT": str(folder / "checkpoints"),
        "OMP_NUM_THREADS": "1",
    }
    script = REPOSITORY / "workflow_specs" / "resume.py"
    command = ["-m", "distflow.train.launch", "--size", str(ranks), str(script), "--epochs", "3"]
    output = folder / "output"
    with output.open("wb") as file, open(os.devnull) as stdin:
        process = start_preloaded(temporary, command, folder, environment, stdin.fileno(), file.fileno(), file.fileno())
    assert process.wait(200) == 0, output.read_text()
    lines = [json.loads(line) for line in output.read_text().splitlines() if line.startswith("{")]
    (digest,) = [line["weights"] for line in lines if "weights" in line]
    return str(digest)


def weights(cli: Cli, workflow: str) -> str:
    cli.await_status(workflow, "COMPLETED", "FAILED", timeout=240)
    (digest,) = [record["weights"] for record in json_lines(cli.logs(workflow)) if "weights" in record]
    return str(digest)


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        pytest.param({"kind": "ddp"}, 1, id="ddp"),
        pytest.param({"kind": "hybrid", "tp_size": 2}, 2, id="hybrid"),  # FSDP and tensor parallelism
    ],
)
def test_a_killed_rank_changes_nothing_in_the_end(
    cli: Cli, strategy: dict[str, Any], size: int, forking_site: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spec = checkout(cli, REPOSITORY) / "resume.yaml"
    cli.configure(environment={"PYTHONPATH": forking_site})
    values = [f"strategy={json.dumps(strategy)}", f"size={size}", "epochs=3", "pause=0.4", f"store=file://{cli.folder}/store"]
    workflow = cli.submit(str(spec), "--set", *values)
    # An epoch has six steps, of which every third is saved.
    wait_until(lambda: any(one.get("step", 0) >= 4 and "loss" in one for one in json_lines(cli.logs(workflow))), 120)
    (victim,) = {one["pid"] for one in json_lines(cli.logs(workflow)) if one.get("begins") and one["rank"] == 2 * size - 1}
    os.kill(victim, signal.SIGKILL)
    assert weights(cli, workflow) == undisturbed(cli.folder / "alone", strategy, 2 * size, tmp_path_factory)

    records = json_lines(cli.logs(workflow))
    begun = {(record["rank"], record["step"]) for record in records if record.get("begins")}
    again = {step for _, step in begun} - {0}
    assert len(again) == 1, "every rank continued from the same step"
    assert again.pop() % 3 == 0
    assert len(begun) == 2 * 2 * size
    assert cli.tasks(workflow)["worker"]["retry_id"] == 1
    assert "worker retry-1" in cli.run("workflow", "events", workflow).out
