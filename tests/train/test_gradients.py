"""Gradients equal those of one process for batches of any size, after several passes, and after a failed pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from train.worlds import run_world

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(Path(__file__).with_name("gradient_checks.py"), 2, tmp_path_factory)


@pytest.mark.parametrize("size", ["8", "5", "1", "8, interleaved", "5, interleaved", "1, interleaved"])
def test_a_pipeline_takes_batches_of_any_size(found: dict[str, Any], size: str) -> None:
    assert found["last batches"][size] < TOLERANCE


def test_gradients_of_several_batches_add_up_in_a_pipeline_too(found: dict[str, Any]) -> None:
    assert len(found["several batches"]) == 2
    assert max(found["several batches"].values()) < TOLERANCE


def test_ddp_with_a_static_graph_trains_in_several_passes(found: dict[str, Any]) -> None:
    assert found["static graph"]["difference"] < TOLERANCE


def test_a_failed_pass_leaves_no_gradients_for_the_next_step(found: dict[str, Any]) -> None:
    assert found["failed pass"]["difference"] < TOLERANCE
