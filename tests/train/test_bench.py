"""``distflow train bench``, and the sample GPT under the launcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distflow.train.bench import scaling
from train.conftest import Start

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def bench(start: Start, *arguments: str) -> dict[str, Any]:
    command = "from distflow.cli.entry import main\nmain()"
    run = start(command, plain=True, arguments=("train", "bench", *arguments, "--format-type", "json"))
    assert run.wait() == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_the_bandwidth_of_all_reduce_is_measured_by_size(start_with_torch: Start) -> None:
    found = bench(start_with_torch, "allreduce", "--ranks", "2")
    rows = found["results"]
    assert (found["measured"], found["ranks"], found["backend"]) == ("allreduce", 2, "gloo")
    assert [row["bytes"] for row in rows] == sorted({row["bytes"] for row in rows})
    for row in rows:
        assert row["algorithm_bandwidth"] == pytest.approx(row["bytes"] / row["seconds"])
        assert row["bus_bandwidth"] == pytest.approx(row["algorithm_bandwidth"])


def test_scaling_is_measured_against_one_rank(start_with_torch: Start) -> None:
    first, second = bench(start_with_torch, "scaling", "--ranks", "2")["results"]
    assert (first["ranks"], first["efficiency"]) == (1, 1.0)
    assert second["efficiency"] == pytest.approx(first["seconds"] / 2 / second["seconds"])


@pytest.mark.parametrize(("gpus", "backend"), [(2, "gloo"), (4, "auto")])
def test_scaling_measures_all_numbers_of_ranks_with_one_backend(
    gpus: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []

    def start(ranks: int, _measure: object, backend: str) -> float:
        used.append((ranks, backend))
        return 1.0

    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("distflow.train.bench._start", start)
    scaling(4)
    assert used == [(1, backend), (2, backend), (4, backend)]


STRATEGY = {"kind": "fsdp", "mesh": {"shape": [2], "names": ["fsdp"]}, "options": {}}


@pytest.mark.parametrize(
    ("flags", "strategy"),
    [(("--accumulate", "2"), json.dumps(STRATEGY)), (("--strategy", "pipeline"), "")],
    ids=["the spec's strategy", "a strategy of its own"],
)
def test_the_small_gpt_learns(flags: tuple[str, ...], strategy: str, repository: Path, start_with_torch: Start) -> None:
    script = "from distflow.samples.gpt import main\nmain()"
    arguments = ("--steps", "12", *flags, str(repository / "docs"))
    run = start_with_torch(script, "--size", "2", arguments=arguments, DISTFLOW_STRATEGY=strategy)
    assert run.wait() == 0, run.stderr
    assert [one["step"] for one in run.records] == list(range(12))
    assert run.records[-1]["loss"] < run.records[0]["loss"] - 1.5


def test_the_small_gpt_refuses_a_size_without_a_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    from distflow.samples.gpt import main

    with pytest.raises(SystemExit):
        main(["--tp-size", "2"])
    assert "--tp-size needs --strategy" in capsys.readouterr().err
