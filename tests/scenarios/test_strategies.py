"""The sample of docs/strategies.md trains under every strategy: only the kind in the spec changes.

Its ranks have different samples, and its optimizer is SGD. The loss over all samples would therefore differ if gradients were
summed instead of averaged, or not reduced at all.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scenarios.conftest import Cli
from scenarios.lab import json_lines

PAGE = Path(__file__).resolve().parents[2] / "docs" / "strategies.md"
KINDS = {"ddp": 2, "fsdp": 2, "tp": 2, "pipeline": 2, "hybrid, tp_size: 2": 4}
"""The text after ``kind:`` in the spec → the number of ranks."""

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def test_the_sample_of_the_page_has_the_same_loss_under_every_strategy(cli: Cli, forking_site: str) -> None:
    found = re.search(r"<!-- file: sharded.yaml -->\n```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    spec = found[1]
    cli.configure(environment={"PYTHONPATH": forking_site})
    losses = {}
    for kind, ranks in KINDS.items():
        changed = spec.replace("kind: fsdp", f"kind: {kind}").replace("ranks: {size: 2}", f"ranks: {{size: {ranks}}}")
        assert changed.count(f"kind: {kind}}}") == changed.count(f"{{size: {ranks}}}") == 1
        done = cli.run("workflow", "submit", cli.spec(changed), "--wait", timeout=200)
        assert done.code == 0, done.err
        reported = [one for one in json_lines(done.out) if "loss" in one]
        assert {one["rank"] for one in reported} == set(range(ranks))
        losses[kind] = {one["loss"] for one in reported}
    (first, *_) = losses["ddp"]
    for kind, values in losses.items():
        assert all(value == pytest.approx(first, rel=1e-4) for value in values), (kind, values)
