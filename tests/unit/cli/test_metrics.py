"""``metrics``: the latest values, JSON and CSV with all values, plots and TensorBoard; and metrics in ``query``."""

from __future__ import annotations

import csv
import io
import json
import sys
import types
from pathlib import Path

import pytest

from distflow.lifecycle.states import WorkflowState
from distflow.state.record import WorkflowRecord
from distflow.structs import replace
from unit.cli.screen import Screen, assert_golden
from unit.state.stored import T0, completed_group, running_group, submit, supervised, task_log, workflow, write_log


def metric(**values: object) -> bytes:
    """Return a line with metrics."""
    return f"{json.dumps(values)}\n".encode()


RANK_PACE = {"step_s": 0.05, "samples_per_s": 160.25, "memory_bytes": 1000}
PACE = {**RANK_PACE, "slowest_step_s": 0.2, "total_samples_per_s": 320.5, "imbalance": 1.9, "stragglers": "9"}
SLOW_RANK_PACE = {"step_s": 0.2, "samples_per_s": 160.25, "memory_bytes": 3000}


def store_metrics(screen: Screen, record: WorkflowRecord) -> None:
    """Store output of two tasks with metrics among other lines."""
    lines = [metric(step=step, loss=8.0 / step, rank=0) for step in (1, 2, 4, 8)]
    task_log(screen.directory, record, "master", [(T0 + 20, b"begins\n"), *((T0 + 30, line) for line in lines)])
    task_log(screen.directory, record, "master", [(T0 + 31, metric(step=8, rank=0, **PACE) + b"{not a metric}\n")])
    task_log(
        screen.directory,
        record,
        "worker",
        [(T0 + 29.5, metric(step=7, loss=float("nan"), rank=9) + metric(step=8, rank=9, **SLOW_RANK_PACE))],
    )


@pytest.fixture
def trained(screen: Screen) -> WorkflowRecord:
    """Store a workflow that completed, with metrics in its logs."""
    record = submit(screen.store, workflow([completed_group()]))
    store_metrics(screen, record)
    return record


def test_the_latest_values_are_listed_by_task_and_rank(screen: Screen, trained: WorkflowRecord) -> None:
    assert screen.run("metrics", trained.id) == 0
    assert screen.err == ""
    assert_golden("metrics.txt", screen.out)
    assert "slow: rank 9 (worker on worker-node)" in screen.out
    assert screen.run("metrics", trained.id, "-k", "step_s", "-k", "imbalance") == 0
    assert [line.split() for line in screen.out.splitlines()[2:4]] == [
        ["master", "0", "8", "0.05", "1.9"], ["worker", "9", "8", "0.2", "-"]
    ]  # fmt: skip


def test_json_and_csv_contain_every_metric(screen: Screen, trained: WorkflowRecord) -> None:
    assert screen.run("metrics", trained.id, "-t", "json") == 0
    assert_golden("metrics.json", screen.out)
    assert [one["step"] for one in json.loads(screen.out)["metrics"]] == [1, 2, 4, 8, 8, 7, 8]
    assert screen.run("metrics", trained.id, "-t", "csv", "-k", "loss") == 0
    rows = list(csv.reader(io.StringIO(screen.out)))
    assert rows[0] == ["task", "retry_id", "rank", "step", "time", "loss"]
    assert [row[3:] for row in rows[1:]][-2:] == [
        ["8", "2025-04-11T21:31:37.000", "1.0"],
        ["7", "2025-04-11T21:31:36.500", "nan"],
    ]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (("--rank", "9"), [7, 8]), (("--task", "master"), [1, 2, 4, 8, 8]), (("-k", "step_s"), [8, 8]), (("-r", "1"), []),
        (("-k", "loss", "-k", "step_s", "--rank", "0"), [1, 2, 4, 8, 8]),
    ],
)  # fmt: skip
def test_metrics_are_selected_by_task_rank_name_and_attempt(
    screen: Screen, trained: WorkflowRecord, options: tuple[str, ...], steps: list[int]
) -> None:
    assert screen.run("metrics", trained.id, *options, "-t", "json") == 0
    assert [one["step"] for one in json.loads(screen.out)["metrics"]] == steps


def test_a_plot_shows_the_loss_by_default(screen: Screen, trained: WorkflowRecord) -> None:
    assert screen.run("metrics", trained.id, "--plot") == 0
    assert_golden("metrics_plot.txt", screen.out)
    assert screen.run("metrics", trained.id, "--plot", "-k", "step_s", "-k", "stragglers") == 0
    assert screen.out.splitlines()[0].strip() == "step_s"
    assert screen.err == "stragglers has no numbers to plot\n"


def test_a_repeated_step_is_plotted_once(screen: Screen) -> None:
    group = completed_group()
    again = replace(group, attempt=1, tasks=tuple(replace(one, attempt=1) for one in group.tasks))
    record = submit(screen.store, workflow([again]))
    task_log(screen.directory, record, "master", [(T0, metric(step=1, loss=1.0) + metric(step=2, loss=900.0))])
    folder = screen.directory.logs / record.uuid / "training" / "master" / "1"
    write_log(folder, [(T0, metric(step=2, loss=2.0) + metric(step=3, loss=3.0))])
    assert screen.run("metrics", record.id, "--plot") == 0
    assert "900" not in screen.out
    assert screen.run("metrics", record.id) == 0
    assert screen.out.splitlines()[2].split() == ["master", "1", "-", "3", "3"]


def test_missing_metrics_are_reported(screen: Screen) -> None:
    record = submit(screen.store, workflow([completed_group()]))
    for options, shown in (((), ""), (("--plot",), ""), (("-t", "csv"), "task,retry_id,rank,step,time\n")):
        assert screen.run("metrics", record.id, *options) == 0
        assert screen.out == shown
        assert screen.err == f'{record.id} has no metrics. Tasks print them as lines such as {{"step": 1, "loss": 0.5}}\n'


def test_an_unknown_metric_is_an_error_that_lists_the_metrics(screen: Screen, trained: WorkflowRecord) -> None:
    assert screen.run("metrics", trained.id, "-k", "los") == 2
    assert "has no metric `los`" in screen.err
    assert "loss" in screen.err.split("`los`")[1]
    assert screen.run("metrics", trained.id, "--plot", "-t", "csv") == 2
    assert "cannot be combined" in screen.err


def test_query_shows_the_latest_step_and_its_pace(screen: Screen) -> None:
    record = submit(screen.store, workflow([running_group()], state=WorkflowState.RUNNING))
    with supervised(screen.directory):
        assert screen.run("query", record.id, "-t", "json") == 0
        assert json.loads(screen.out)["groups"][0]["metrics"] is None
        store_metrics(screen, record)
        assert screen.run("query", record.id) == 0
        lines = screen.out.splitlines()
        place = lines.index("Group training: RUNNING")
        assert lines[place + 1] == "  step 8: loss 1 (rank 0)"
        pace = "0.2 s per step, 320.5 samples/s, the slowest rank takes 1.9 × the mean, slow: rank 9 (worker on worker-node)"
        assert lines[place + 2] == f"  {pace}"
        assert screen.run("query", record.id, "-t", "json") == 0
    found = json.loads(screen.out)["groups"][0]["metrics"]
    assert found == {
        "task": "master",
        "task_name": "master",
        "retry_id": 0,
        "rank": 0,
        "step": 8,
        "values": {"loss": 1.0, **PACE},
    }


def test_missing_tensorboard_is_an_error_with_a_remedy(
    screen: Screen, trained: WorkflowRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    assert screen.run("metrics", trained.id, "--tensorboard", str(tmp_path / "runs")) == 2
    assert "pip install tensorboard" in screen.err
    assert not (tmp_path / "runs").exists()


def test_tensorboard_gets_a_run_for_each_rank(
    screen: Screen, trained: WorkflowRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, str, float, int, float | None]] = []
    closed: list[str] = []

    class Writer:
        """A replacement for ``tensorboard.summary.Writer`` that keeps the values in a list."""

        def __init__(self, place: str) -> None:
            self.run = Path(place).name

        def add_scalar(self, tag: str, data: float, step: int, *, wall_time: float | None = None) -> None:
            written.append((self.run, tag, data, step, wall_time))

        def close(self) -> None:
            closed.append(self.run)

    fake = types.ModuleType("tensorboard.summary")
    vars(fake).update(Writer=Writer, DirectoryOutput=str)
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", fake)
    folder = tmp_path / "a" / "runs"
    assert screen.run("metrics", trained.id, "--tensorboard", str(folder)) == 0
    assert [row for row in written if row[1] == "loss"] == [
        ("master-rank-0", "loss", 8.0 / step, step, T0 + 30) for step in (1, 2, 4, 8)
    ]
    assert closed == ["master-rank-0", "worker-rank-9"]
    assert ("worker-rank-9", "loss") not in {row[:2] for row in written}  # NaN
    assert screen.out.startswith("13 values written to ")
    assert screen.run("metrics", trained.id, "--tensorboard", str(folder)) == 2
    assert "exists already" in screen.err
    assert screen.run("metrics", trained.id, "--tensorboard", "a" * 300) == 2
    assert "cannot be written: File name too long" in screen.err


def test_tensorboard_reads_the_written_values(screen: Screen, trained: WorkflowRecord, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert screen.run("metrics", trained.id, "--tensorboard", str(tmp_path / "runs")) == 0
    events = EventAccumulator(str(tmp_path / "runs" / "master-rank-0"))
    events.Reload()
    assert [event.step for event in events.Tensors("loss")] == [1, 2, 4, 8]
