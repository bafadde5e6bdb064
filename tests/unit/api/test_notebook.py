"""Workflows as HTML for notebooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from distflow.api.notebook import workflow_html
from distflow.state.metrics import Metric


def metric(task: str, attempt: int, step: int, loss: float) -> Metric:
    return Metric(task=task, attempt=attempt, rank=0, step=step, values={"loss": loss}, time=None)


def test_the_curve_shows_the_latest_attempt_of_the_first_task() -> None:
    metrics = [metric("prepare", attempt, step, step + 10.0 * attempt) for attempt in (0, 1) for step in (1, 2)]
    metrics.append(metric("train", 2, 1, 5.0))
    workflow: Any = SimpleNamespace(id="w-1", status="RUNNING", groups=(), metrics=lambda: metrics)
    page = workflow_html(workflow)
    assert "<title>loss at 2 steps</title>" in page
    assert ">loss: 12<" in page


def test_a_long_curve_is_thinned_and_keeps_its_last_value() -> None:
    metrics = [metric("train", 0, step, float(step)) for step in range(2003)]
    workflow: Any = SimpleNamespace(id="w-1", status="RUNNING", groups=(), metrics=lambda: metrics)
    page = workflow_html(workflow)
    assert "<title>loss at 668 steps</title>" in page
    assert ">loss: 2002<" in page
    assert ">step 2002<" in page
