"""Resource samples: columns of ``query``, ``metrics --system``, plots and exports."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from distflow.client.completion import metric_names
from distflow.lifecycle.states import WorkflowState
from distflow.state.record import WorkflowRecord
from unit.cli.screen import Screen, hold_against
from unit.cli.test_metrics import metric
from unit.state.stored import T0, running_group, submit, supervised, task_log, workflow

HEADER = {
    "columns": ["time", "system/cpu/usage", "system/memory/usage", *(
        f"system/gpu{gpu}/{name}" for gpu in (2, 10) for name in ("utilization", "memory", "power")
    )],
    "limits": {"system/cpu/limit": 8, "system/memory/limit": 64 << 30},
}  # fmt: skip


def record_samples(screen: Screen, record: WorkflowRecord, task: str, count: int = 5) -> None:
    rows = [
        [T0 + 20 + 5 * n, n / 2, (n + 1) << 30, 10 * n, n << 30, 300, 90, 7 << 30, 690 if n < 4 else None] for n in range(count)
    ]
    folder = screen.directory.logs / record.uuid / "training" / task / "0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "output.samples").write_text("".join(f"{json.dumps(row)}\n" for row in [HEADER, *rows]))


@pytest.fixture
def sampled(screen: Screen) -> Iterator[WorkflowRecord]:
    """A running workflow of two tasks; one of them has samples."""
    record = submit(screen.store, workflow([running_group()], state=WorkflowState.RUNNING))
    task_log(screen.directory, record, "master", [(T0 + 30, metric(step=step, loss=4 / step, rank=0)) for step in (1, 2, 4)])
    record_samples(screen, record, "master")
    with supervised(screen.directory):
        yield record


def test_query_shows_the_use_of_running_tasks(screen: Screen, sampled: WorkflowRecord) -> None:
    assert screen.run("query", sampled.id) == 0
    header, _, master, worker = screen.out.splitlines()[-4:]
    assert header.split()[7:] == ["CPU", "Memory", "GPU", "use", "GPU", "memory", "Last", "log", "line"]
    assert master.split()[8:14] == ["2.0", "5.0", "GiB", "65%", "11", "GiB"]
    assert worker.split()[-5:] == ["-"] * 5
    assert screen.run("query", sampled.id, "-t", "json") == 0
    tasks = {task["name"]: task for task in json.loads(screen.out)["groups"][0]["tasks"]}
    assert tasks["master"]["usage"] | {"time": "", "at": ""} == {
        "time": "", "at": "", "cpu": 2, "memory": 5 << 30, "gpu_utilization": 65, "gpu_memory": 11 << 30
    }  # fmt: skip
    assert tasks["worker"]["usage"] is None


def test_metrics_lists_the_series(screen: Screen, sampled: WorkflowRecord) -> None:
    assert screen.run("metrics", sampled.id, "--system") == 0
    hold_against("metrics_system.txt", screen.out)
    assert screen.run("metrics", sampled.id, "-k", "system/gpu*/power", "-k", "loss") == 0
    assert [line.split()[:3] for line in screen.out.splitlines() if line.startswith("master")] == [
        ["master", "0", "4"], ["master", "system/gpu2/power", "300"], ["master", "system/gpu10/power", "690"]
    ]  # fmt: skip
    assert screen.run("metrics", sampled.id, "--task", "worker", "--system") == 0
    assert screen.out == ""
    assert screen.err.endswith(f"{sampled.id} has no samples of system/*\n")


def test_programs_get_every_sample(screen: Screen, sampled: WorkflowRecord) -> None:
    assert screen.run("metrics", sampled.id, "-t", "json") == 0
    found = json.loads(screen.out)
    assert len(found["metrics"]) == 3
    (system,) = found["system"]
    assert (system["task_name"], system["retry_id"], len(system["times"])) == ("master", 0, 5)
    assert system["series"]["system/gpu10/power"] == [690, 690, 690, 690, None]
    assert system["limits"]["system/cpu/limit"] == 8
    assert screen.run("metrics", sampled.id, "-t", "json", "-k", "loss") == 0
    assert json.loads(screen.out)["system"] == []
    assert screen.run("metrics", sampled.id, "-t", "csv", "-k", "system/gpu10/*") == 0
    rows = list(csv.reader(io.StringIO(screen.out)))
    assert rows[0] == ["task", "retry_id", "time", *(f"system/gpu10/{name}" for name in ("memory", "power", "utilization"))]
    assert rows[5][3:] == [str(7 << 30) + ".0", "", "90.0"]
    assert screen.run("metrics", sampled.id, "-t", "csv", "-k", "system/gpu10/*", "-k", "loss") == 2


def test_python_programs_and_completions_know_the_series(screen: Screen, sampled: WorkflowRecord) -> None:
    import distflow

    (found,) = distflow.get(sampled.id).samples(task="master", most=2)
    assert (found.task, len(found.times), found.series["system/gpu2/utilization"]) == ("master", 2, [5, 30])
    assert {"loss", "system/gpu10/power"} <= set(metric_names(screen.client, sampled.id))


def test_plots_have_seconds_on_their_axis(screen: Screen, sampled: WorkflowRecord) -> None:
    assert screen.run("metrics", sampled.id, "--system", "--plot") == 0
    assert "system/gpu*/utilization" in screen.out
    assert screen.out.splitlines()[-1] == "* master gpu2, + master gpu10"
    assert screen.out.splitlines()[-2].strip() == "seconds"
    assert screen.run("metrics", sampled.id, "-k", "system/cpu/usage", "-k", "loss", "--plot", "--log") == 0
    assert [line.strip() for line in screen.out.splitlines() if line.strip() in ("loss", "system/cpu/usage")] == [
        "loss", "system/cpu/usage"
    ]  # fmt: skip
    assert screen.run("metrics", sampled.id, "--log") == 2


def test_tensorboard_gets_samples_too(screen: Screen, sampled: WorkflowRecord, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert screen.run("metrics", sampled.id, "--tensorboard", str(tmp_path / "runs")) == 0
    assert screen.out.startswith("42 values written to ")
    events = EventAccumulator(str(tmp_path / "runs" / "master-system"))
    events.Reload()
    assert [event.step for event in events.Tensors("system/gpu2/memory")] == [0, 5, 10, 15, 20]
