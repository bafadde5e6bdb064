"""Render a workflow as HTML for a notebook: its status, its tasks with their ranks, and a curve of the loss."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distflow.documents.quantities import count_text

if TYPE_CHECKING:
    from distflow.api.workflow import TaskInfo, Workflow

__all__ = ["workflow_html"]

_COLORS: Mapping[str, str] = {"COMPLETED": "#1a7f37", "RUNNING": "#0969da"}
_FAILED, _OTHER = "#cf222e", "#6e7781"
_MOST_TASKS = 64
_WIDTH, _HEIGHT, _MARGIN = 480, 140, 36
"""The size and the margin of the curve, in CSS pixels."""
_MOST_POINTS = 1000


def workflow_html(workflow: Workflow) -> str:
    """Return a workflow as HTML without scripts. All texts are escaped. Raises ``DistflowError``."""
    groups = workflow.groups
    parts = [f"<p><b>{html.escape(workflow.id)}</b> {_status(workflow.status)}</p>"]
    parts += [f"<p>First cause: {html.escape(group.cause)}</p>" for group in groups if group.cause]
    tasks = [task for group in groups for task in group.tasks]
    rows = "".join(_row(task) for task in tasks[:_MOST_TASKS])
    head = "".join(f"<th style='text-align:left'>{title}</th>" for title in ("Task", "Ranks", "Node", "Status", "Exit"))
    parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>")
    if len(tasks) > _MOST_TASKS:
        parts.append(f"<p>and {count_text(len(tasks) - _MOST_TASKS, 'more task')}</p>")
    name, points = _loss(workflow)
    if len(points) > 1:
        parts.append(_curve(name, points))
    return f"<div>{''.join(parts)}</div>"


def _status(status: str) -> str:
    color = _COLORS.get(status, _FAILED if status.startswith("FAILED") else _OTHER)
    return f"<span style='color:{color}'>{html.escape(status)}</span>"


def _row(task: TaskInfo) -> str:
    ranks = f"{task.ranks[0]}–{task.ranks[-1]}" if len(task.ranks) > 1 else str(task.ranks[0]) if task.ranks else ""
    exit_code = "" if task.exit_code is None else str(task.exit_code)
    texts = [html.escape(task.name), ranks, html.escape(task.node or ""), _status(task.status), exit_code]
    cells = "".join(f"<td style='text-align:left'>{text}</td>" for text in texts)
    return f"<tr>{cells}</tr>"


def _loss(workflow: Workflow) -> tuple[str, list[tuple[int, float]]]:
    """Return the name and the points of the first rank's loss in its latest attempt; without a loss, of its first metric."""
    metrics = workflow.metrics()
    of_rank = [one for one in metrics if (one.task, one.rank) == (metrics[0].task, metrics[0].rank)]
    latest = [one for one in of_rank if one.attempt == of_rank[-1].attempt]
    numbers = [(one.step, key, value) for one in latest for key, value in one.values.items() if isinstance(value, int | float)]
    names = dict.fromkeys(key for _, key, _ in numbers)
    name = next((key for key in names if "loss" in key.lower()), next(iter(names), ""))
    points = [(step, float(value)) for step, key, value in numbers if key == name]
    stride = -(-len(points) // _MOST_POINTS) or 1
    return name, points[::-stride][::-1]  # always with the last point, whose value labels the curve


def _curve(name: str, points: Sequence[tuple[int, float]]) -> str:
    """Return an SVG line chart, labeled with the last value, and with the ranges of the steps and of the values."""
    steps, values = [step for step, _ in points], [value for _, value in points]
    (left, right), (low, high) = (min(steps), max(steps)), (min(values), max(values))
    x_scale, y_scale = (_WIDTH - 2 * _MARGIN) / max(right - left, 1), (_HEIGHT - 2 * _MARGIN) / ((high - low) or 1.0)
    line = " ".join(
        f"{_MARGIN + (step - left) * x_scale:.1f},{_HEIGHT - _MARGIN - (value - low) * y_scale:.1f}" for step, value in points
    )
    bottom = _HEIGHT - _MARGIN + 16
    labels = [
        (_MARGIN, 20, "start", f"{name}: {values[-1]:.4g}"),
        (_MARGIN - 4, _MARGIN + 4, "end", f"{high:.3g}"),
        (_MARGIN - 4, _HEIGHT - _MARGIN, "end", f"{low:.3g}"),
        (_MARGIN, bottom, "start", str(left)),
        (_WIDTH - _MARGIN, bottom, "end", f"step {right}"),
    ]
    texts = "".join(
        f"<text x='{x}' y='{y}' text-anchor='{anchor}' fill='currentColor'>{html.escape(text)}</text>"
        for x, y, anchor, text in labels
    )
    return (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' width='{_WIDTH}' role='img' style='font:11px sans-serif'>"
        f"<title>{html.escape(name)} at {len(points)} steps</title>"
        f"<polyline points='{line}' fill='none' stroke='#0969da' stroke-width='1.5'/>{texts}</svg>"
    )
