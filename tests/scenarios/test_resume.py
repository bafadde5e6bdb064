"""A rank is killed in the middle of an epoch, and the weights in the end are those of a run that nothing happened to."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import checkout, json_lines

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]


def submit(cli: Cli, folder: Path, strategy: str, size: int, pause: float) -> str:
    values = [f"strategy={strategy}", f"size={size}", "epochs=3", f"pause={pause}", f"store=file://{cli.folder}/store"]
    return cli.submit(str(folder / "resume.yaml"), "--set", *values)


def weights(cli: Cli, workflow: str) -> str:
    cli.await_status(workflow, "COMPLETED", "FAILED", timeout=240)
    (digest,) = [record["weights"] for record in json_lines(cli.logs(workflow)) if "weights" in record]
    return str(digest)


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        pytest.param("{kind: ddp}", 1, id="ddp"),
        pytest.param("{kind: fsdp}", 1, id="fsdp"),
        pytest.param("{kind: hybrid, tp_size: 2}", 2, id="hybrid"),
    ],
)
def test_a_killed_rank_changes_nothing_in_the_end(cli: Cli, strategy: str, size: int) -> None:
    folder = checkout(cli, REPOSITORY)
    undisturbed = weights(cli, submit(cli, folder, strategy, size, 0))

    workflow = submit(cli, folder, strategy, size, 0.4)
    # An epoch has six steps, of which every third is saved.
    wait_until(lambda: any(one.get("step", 0) >= 4 and "loss" in one for one in json_lines(cli.logs(workflow))), 120)
    (victim,) = {one["pid"] for one in json_lines(cli.logs(workflow)) if one.get("begins") and one["rank"] == 2 * size - 1}
    os.kill(victim, signal.SIGKILL)
    assert weights(cli, workflow) == undisturbed

    records = json_lines(cli.logs(workflow))
    begun = {(record["rank"], record["step"]) for record in records if record.get("begins")}
    again = {step for _, step in begun} - {0}
    assert len(again) == 1, "every rank went on from the same step"
    assert again.pop() % 3 == 0
    assert len(begun) == 2 * 2 * size
    assert cli.tasks(workflow)["worker"]["retry_id"] == 1
    assert "worker retry-1" in cli.run("workflow", "events", workflow).out
