"""Resource samples: columns of ``query``, ``metrics --system``, plots and exports."""

from __future__ import annotations

import csv
import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distflow.client.completion import metric_names
from distflow.lifecycle.states import WorkflowState
from distflow.state.record import WorkflowRecord
from distflow.testing.waiting import wait_until
from unit.cli.screen import Screen, assert_golden
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
    """A running workflow of two tasks, one of which has samples."""
    record = submit(screen.store, workflow([running_group()], state=WorkflowState.RUNNING))
    task_log(screen.directory, record, "master", [(T0 + 30, metric(step=step, loss=4 / step, rank=0)) for step in (1, 2, 4)])
    record_samples(screen, record, "master")
    with supervised(screen.directory):
        yield record


def test_query_shows_the_resource_usage_of_running_tasks(screen: Screen, sampled: WorkflowRecord) -> None:
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


def test_metrics_lists_the_sampled_series(screen: Screen, sampled: WorkflowRecord) -> None:
    assert screen.run("metrics", sampled.id, "--system") == 0
    assert_golden("metrics_system.txt", screen.out)
    assert screen.run("metrics", sampled.id, "-k", "system/gpu*/power", "-k", "loss") == 0
    assert [line.split()[:3] for line in screen.out.splitlines() if line.startswith("master")] == [
        ["master", "0", "4"], ["master", "system/gpu2/power", "300"], ["master", "system/gpu10/power", "690"]
    ]  # fmt: skip
    assert screen.run("metrics", sampled.id, "--task", "worker", "--system") == 0
    assert screen.out == ""
    assert screen.err.endswith(f"{sampled.id} has no samples of system/* for the chosen task, rank or attempt\n")


def test_a_plot_shows_each_series_of_a_pattern(screen: Screen, sampled: WorkflowRecord) -> None:
    assert screen.run("metrics", sampled.id, "--plot", "-k", "system/gpu2/*") == 0
    assert all(f"master gpu2/{name}" in screen.out for name in ("utilization", "memory", "power")), screen.out
    assert screen.run("metrics", sampled.id, "-k", "loss", "--rank", "1") == 0
    assert screen.err == f"{sampled.id} has no values of loss for the chosen task, rank or attempt\n"


def test_json_and_csv_contain_every_sample(screen: Screen, sampled: WorkflowRecord) -> None:
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


def test_samples_are_in_the_python_api_and_in_completions(screen: Screen, sampled: WorkflowRecord) -> None:
    import distflow

    (found,) = distflow.get(sampled.id).samples(task="master", most=2)
    assert (found.task, len(found.times), found.series["system/gpu2/utilization"]) == ("master", 2, [5, 30])
    assert {"loss", "system/gpu10/power"} <= set(metric_names(screen.client, sampled.id))


def test_plots_of_samples_have_seconds_on_their_axis(screen: Screen, sampled: WorkflowRecord) -> None:
    assert screen.run("metrics", sampled.id, "--system", "--plot") == 0
    assert "system/gpu*/utilization" in screen.out
    assert screen.out.splitlines()[-1] == "* master gpu2, + master gpu10"
    assert screen.out.splitlines()[-2].strip() == "seconds"
    assert screen.run("metrics", sampled.id, "-k", "system/cpu/usage", "-k", "loss", "--plot", "--log") == 0
    assert [line.strip() for line in screen.out.splitlines() if line.strip() in ("loss", "system/cpu/usage")] == [
        "loss", "system/cpu/usage"
    ]  # fmt: skip
    assert screen.run("metrics", sampled.id, "--log") == 2
    assert screen.run("metrics", sampled.id, "--plot", "--wandb", "p") == 2


def test_diagnose_and_why_report_idle_gpus(screen: Screen, sampled: WorkflowRecord) -> None:
    folder = screen.directory.logs / sampled.uuid / "training" / "worker" / "0"
    folder.mkdir(parents=True)
    rows = [
        {"columns": ["time", "system/gpu0/utilization", "system/gpu1/utilization"]},
        *([T0 + 5 * n, 90, 0] for n in range(200)),
    ]
    (folder / "output.samples").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert screen.run("diagnose", sampled.id) == 0
    assert_golden("diagnose_idle.txt", screen.out)
    assert screen.run("diagnose", sampled.id, "-t", "json") == 0
    (group,) = json.loads(screen.out)["groups"]
    assert (group["message"], group["diagnoses"]) == (None, [])
    assert [(one["key"], one["task"]) for one in group["findings"]] == [("gpu-idle", "worker")]
    assert screen.run("why", sampled.id) == 0
    finding = "GPU 1 of worker on worker-node stayed below 5% utilization for the last 16 min, GPU 0 was 90% busy"
    assert f"\nFinding    GPUs are reserved but not used: {finding}\n" in screen.out
    assert screen.run("diagnose", sampled.id, "--task", "master") == 0
    assert "Finding" not in screen.out


def test_tensorboard_gets_samples_too(screen: Screen, sampled: WorkflowRecord, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert screen.run("metrics", sampled.id, "--tensorboard", str(tmp_path / "runs")) == 0
    assert screen.out.startswith("42 values written to ")
    events = EventAccumulator(str(tmp_path / "runs" / "master-system"))
    events.Reload()
    assert [event.step for event in events.Tensors("system/gpu2/memory")] == [0, 5, 10, 15, 20]


def test_mlflow_gets_metrics_and_samples(
    screen: Screen, sampled: WorkflowRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow: Any = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for count in (1, 2):
        assert screen.run("metrics", sampled.id, "--mlflow", "mine") == 0, screen.err
        assert screen.out == "42 values written to the MLflow experiment mine\n"
        client = mlflow.MlflowClient()
        runs = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
        assert len(runs) == 2 * count
    named = {run.data.tags["mlflow.runName"]: run for run in runs}
    own, system = named[f"{sampled.id} master-rank-0"], named[f"{sampled.id} master-system"]
    assert [(one.step, one.value) for one in client.get_metric_history(own.info.run_id, "loss")] == [(1, 4), (2, 2), (4, 1)]
    history = client.get_metric_history(system.info.run_id, "system/gpu2/utilization")
    assert [(one.step, one.value) for one in history] == [(5 * n, 10 * n) for n in range(5)]
    assert history[0].timestamp == round((T0 + 20) * 1000)
    assert {run.info.status for run in runs} == {"FINISHED"}


def test_wandb_gets_metrics_and_samples(
    screen: Screen, sampled: WorkflowRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    assert screen.run("metrics", sampled.id, "--wandb", "team/mine") == 0, screen.err
    assert screen.out.splitlines()[-1] == "42 values written to the project team/mine"

    def read() -> list[dict[str, Any]] | None:
        rows = [row for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")) for row in history_of(path)]
        return rows if len(rows) == 8 else None

    rows = wait_until(read, 30, "all rows: wandb writes the file in a separate process")
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(1, 4), (2, 2), (4, 1)]
    assert [(row["step"], row["system/gpu2/utilization"]) for row in rows if "system/gpu2/utilization" in row] == [
        (5 * n, 10 * n) for n in range(5)
    ]


def history_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a run from the file that wandb would upload."""
    from wandb.proto import wandb_internal_pb2

    record: Any = getattr(wandb_internal_pb2, "Record")  # noqa: B009  wandb creates this attribute at import

    data, at, parts, rows = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):  # blocks of a log of LevelDB, after a header of 7 bytes
        size, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        at += 32768 - at % 32768 if 32768 - at % 32768 < 7 else 0
        if kind in (1, 4):  # the last part of a record
            entry, parts = record.FromString(parts), b""
            if entry.HasField("history"):
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in entry.history.item})
    return rows


@pytest.mark.parametrize(("option", "package"), [("--wandb", "wandb"), ("--mlflow", "mlflow-skinny")])
def test_a_missing_package_is_named(
    screen: Screen, sampled: WorkflowRecord, monkeypatch: pytest.MonkeyPatch, option: str, package: str
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, option.strip("-"), None)
    assert screen.run("metrics", sampled.id, option, "mine") == 2
    assert f"pip install {package}" in screen.err
