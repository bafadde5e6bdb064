"""Plots for terminals."""

from __future__ import annotations

import math
import re

import pytest

from distflow.cli.render.plots import plot
from distflow.cli.render.tables import visible_width
from unit.cli.screen import assert_golden

FALLING = [(step, 4 * math.exp(-step / 50) + 0.1) for step in range(200)]


def test_one_series_is_drawn_with_braille_dots_and_axes() -> None:
    assert_golden("plot_one.txt", plot("loss", {"master rank 0": FALLING}, axis="step", width=60))


def test_several_series_have_marks_and_a_legend() -> None:
    slower = [(step, value * 1.3) for step, value in FALLING]
    assert_golden("plot_two.txt", plot("loss", {"master rank 0": FALLING, "worker rank 1": slower}, width=60, is_log=True))


def test_series_have_colors_on_a_terminal() -> None:
    found = plot("loss", {"a": FALLING, "b": [(0, 1.0)]}, has_colors=True)
    assert "\x1b[38;5;6m⣿\x1b[0m a, \x1b[38;5;3m⣿\x1b[0m b" in found
    assert "*" not in found


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize(
    "points",
    [
        [(5, 2.0)],
        [(0, 3.0), (1, 3.0)],
        [(0, -1.7e308), (1, 1.7e308)],
        [(0, 1e-300), (1, 1e300)],
        [(0, math.nan), (1, math.inf), (2, 1.0)],
        [(0, 0.0), (1, -1.0), (2, 5.0)],
        [(10**15, 1.0), (10**16, 2.0)],
    ],
)
def test_unusual_numbers_do_not_break_the_frame(points: list[tuple[float, float]], is_log: bool) -> None:
    found = plot("odd", {"a": points}, width=40, height=10, is_log=is_log).splitlines()
    assert len(found) == 10
    assert max(visible_width(line) for line in found) <= 40
    assert re.search("[⠁-⣿]", "".join(found))


def test_a_plot_without_numbers_is_reported() -> None:
    assert plot("none", {}) == "none: no numbers to plot\n"
    assert plot("low", {"a": [(0, -1.0)]}, is_log=True) == "low: no numbers to plot on a logarithmic axis\n"


def test_names_of_tasks_and_metrics_cannot_control_the_terminal() -> None:
    found = plot("lo\x1b[2Jss", {"a\x1b]0;x\x07": FALLING, "b": FALLING})
    assert "\x1b" not in found
    assert "\x07" not in found


def test_a_long_legend_is_cut() -> None:
    found = plot("many", {f"rank {number}": [(number, float(number)), (20, 1.0)] for number in range(64)})
    assert found.splitlines()[-1].endswith("@ rank 11, and 52 more")
