"""Sent directories that later attempts on a node may reuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.layout.checks.group_checks import check_layout
from distflow.plan.compile import compile_plan
from distflow.spec.files import Bundle
from distflow.spec.parse import load_spec_text

SPEC = """
workflow:
  name: reuse
  tasks:
  - name: train
    command: [python3, train.py]
    files: [{path: PATH, localpath: code}]
"""


@pytest.mark.parametrize(
    ("path", "more", "is_reusable"),
    [
        ("code", "", True),
        ("outputs/code", "\n    output_dir: out", True),
        ("/osmo/data/output/code", "", False),
        ("/valohai/outputs", "", False),
        ("./out/code", "\n    output_dir: out", False),
        ("out", "\n    output_dir: out", False),
        ("code", "\n    checkpoint: [{path: saved, url: 'file:///x', frequency: 60}]", False),
    ],
)
def test_directories_outside_of_outputs_are_reusable_unless_a_task_has_checkpoints(
    tmp_path: Path, path: str, more: str, is_reusable: bool
) -> None:
    (tmp_path / "code").mkdir()
    spec, _ = load_spec_text(SPEC.replace("PATH", path) + more, "spec.yaml", tmp_path)
    worlds, _ = check_layout(spec)
    bundles = {file.bundle: Bundle(digest="0" * 64, size=1, mode=0o700, is_tar=True) for file in spec.groups[0].tasks[0].files}
    launch = compile_plan(spec, worlds, pool="lab", bundles=bundles).groups[0].launches[0]
    assert [file.reusable for file in launch.files if file.is_tar] == [is_reusable]
