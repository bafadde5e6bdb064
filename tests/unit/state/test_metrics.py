"""Metrics in the lines of a log, and the latest metrics of each rank."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from distflow.state.logs import LogLine
from distflow.state.metrics import latest, number, parse_metric, read_metrics


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"step": 3, "loss": 0.5, "rank": 1}', (3, 1, {"loss": 0.5})),
        ('  {"loss": 2, "step": 0}\r', (0, None, {"loss": 2})),
        (
            '{"step": 1, "note": "bad \\u00e9", "done": true, "none": null}',
            (1, None, {"note": "bad é", "done": True, "none": None}),
        ),
        ('[default0]:{"step": 1, "rank": 0}', (1, 0, {})),
        ('[rank 3] {"step": 1}', (1, None, {})),
        ('{"step": 4, "loss": NaN, "norm": -Infinity}', (4, None, {"loss": "nan", "norm": "-inf"})),
        ('{"step": 5, "shape": [1, 2], "more": {"a": 1}, "loss": 1}', (5, None, {"loss": 1})),
        ('{"step": 6, "rank": "first", "loss": 1}', (6, None, {"loss": 1})),
        ('{"step": 7, "seen": 123456789012345678901234567890}', (7, None, {"seen": "123456789012345678901234567890"})),
    ],
)
def test_json_objects_with_a_step_are_metrics(line: str, found: object) -> None:
    assert parse_metric(line) == found


@pytest.mark.parametrize(
    "line",
    [
        "", "{", "}", "step 3, loss 0.5", '{"loss": 0.5}', '{"step": "3"}', '{"step": 3.5}', '{"step": true}', '{"step": -1}',
        '{"step": null}', '{"step": 99999999999999999999}', '["step", {"step": 3}]', '{"step": 3, "loss": }',
        '{"step": 3} done', 'loss {"step": 3}', '{"step": ' + "9" * 5000 + "}",
        '{"step": 1, "a": ' + "[" * 5000 + "]" * 5000 + "}",
    ],
)  # fmt: skip
def test_other_lines_are_ignored(line: str) -> None:
    assert parse_metric(line) is None


def test_the_size_of_one_metric_is_limited() -> None:
    many = parse_metric(json.dumps({"step": 1, **{f"m{number}": number for number in range(500)}}))
    assert many is not None
    assert len(many[2]) == 64
    long = parse_metric(json.dumps({"step": 1, "text": "x" * 10_000}))
    assert long is not None
    assert long[2] == {"text": "x" * 200}
    assert parse_metric(json.dumps({"step": 1, "text": "x" * 20_000})) is None


def lines(*metrics: tuple[str, int, Mapping[str, object]]) -> list[LogLine]:
    """Return log lines from the task, the attempt and the metrics of each."""
    return [LogLine(task, attempt, 7.0, json.dumps(values)) for task, attempt, values in metrics]


def test_latest_has_the_newest_value_of_each_metric_for_each_rank() -> None:
    found = latest(
        read_metrics(
            lines(
                ("master", 0, {"step": 1, "loss": 3.0, "rank": 1}),
                ("master", 0, {"step": 5, "step_s": 0.1, "rank": 0}),
                ("worker", 0, {"step": 2, "loss": 9.0}),
                ("master", 0, {"step": 6, "loss": 2.0, "rank": 0}),
            )
        )
    )
    assert [(one.task, one.rank, one.step, one.values) for one in found] == [
        ("master", 0, 6, {"step_s": 0.1, "loss": 2.0}),
        ("master", 1, 1, {"loss": 3.0}),
        ("worker", None, 2, {"loss": 9.0}),
    ]


def test_a_later_attempt_replaces_all_ranks_of_an_earlier_one() -> None:
    log = lines(
        ("master", 0, {"step": 8, "loss": 1.0, "rank": 0}),
        ("master", 0, {"step": 8, "loss": 1.0, "rank": 1}),
        ("master", 1, {"step": 5, "loss": 2.0, "rank": 0}),
    )
    assert [(one.attempt, one.rank, one.step) for one in latest(read_metrics(log))] == [(1, 0, 5)]


def test_the_number_of_latest_values_is_limited() -> None:
    log = lines(*(("one", 0, {"step": step, f"m{step}": step, "loss": step}) for step in range(2000)))
    (found,) = latest(read_metrics(log))
    assert len(found.values) < 500
    assert found.values["loss"] == 1999


def test_metrics_of_one_rank_can_be_requested() -> None:
    log = lines(("a", 0, {"step": 1, "rank": 0}), ("a", 0, {"step": 1, "rank": 1}), ("a", 0, {"step": 1}))
    assert [metric.rank for metric in read_metrics(log, rank=1)] == [1]


def test_texts_are_not_numbers() -> None:
    assert [number(value) for value in (1, 0.5, True, "nan", None)] == [1.0, 0.5, 1.0, None, None]
