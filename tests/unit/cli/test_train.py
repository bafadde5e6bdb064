"""``distflow train``: advice as text and JSON, and wrong numbers."""

from __future__ import annotations

import json

import pytest

from distflow.cli.app import run


def test_advice_shows_the_strategy_and_its_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["train", "advise", "--params", "7b", "--layers", "32", "--hidden", "4096", "--gpus", "16", "--gpu-memory", "80Gi"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "strategy: {kind: fsdp, mixed_precision: bf16}" in printed
    assert "adamw states     3.26 GiB   7B × 8 B / 16" in printed
    assert "ddp                                 16    125.8 GiB  no" in printed
    assert "autocast" not in printed


@pytest.mark.parametrize(("precision", "count"), [("bf16", 1), ("fp32", 0)])
def test_autocast_is_recommended_if_the_strategy_cannot_set_the_precision(
    precision: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--params", "350m", "--gpus", "2", "--gpu-memory", "24Gi", "--precision", precision]
    assert run(["train", "advise", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "    strategy: {kind: ddp}\n" in printed
    assert printed.count('\n    with torch.autocast("cuda", torch.bfloat16):  # in your program, ') == count
    assert run(["train", "advise", *arguments, "-t", "json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert (chosen["precision"], chosen["autocast"]) == (precision, bool(count))


def test_advice_as_json_contains_the_strategy_and_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--params", "70b", "--gpus", "16", "--gpu-memory", "80Gi", "--format-type", "json"]
    assert run(["train", "advise", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"]["strategy"]["mesh"] == {"shape": [8, 2], "names": ["fsdp", "tp"]}
    assert found["chosen"]["bytes"] == sum(line["bytes"] for line in found["chosen"]["lines"]) <= found["usable_bytes"]
    assert [choice["fits"] for choice in found["choices"]][:4] == [False] * 4


def test_a_model_that_does_not_fit_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "advise", "--params", "1t", "--gpus", "2", "--gpu-memory", "1Gi", "--precision", "fp32"]) == 0
    assert "No strategy fits: use more GPUs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("params", "memory", "message"),
    [("7x", "80Gi", "`7x` is not a number of parameters"), ("7b", "80Xi", "Xi"), ("7b", "lots", "lots")],
)
def test_wrong_numbers_are_errors(params: str, memory: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "advise", "--params", params, "--gpus", "2", "--gpu-memory", memory]) == 2
    assert message in capsys.readouterr().err
