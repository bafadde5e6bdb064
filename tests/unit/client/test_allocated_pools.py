"""Errors and warnings about keys of a spec that have no effect in a pool whose nodes an engine chooses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distflow.cli.app import run
from distflow.client import Client, SubmitRequest, plan
from distflow.client.submission import check_planned

SPEC = """
workflow:
  name: near
  resources:
    default:
      topology:
      - {key: rack, requirementType: KIND}
  groups:
  - name: train
    elastic: {min: 1}
    tasks:
    - {name: master, lead: true, ranks: {size: 1}, command: ["true"]}
    - {name: worker, ranks: {size: 1}, command: ["true"]}
"""


@pytest.mark.parametrize("command", [["workflow", "validate"], ["workflow", "submit", "--dry-run"]])
def test_required_topology_is_refused_and_other_keys_cause_warnings(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "distflow.yaml").write_text("pools: {hpc: {backend: slurm}}")
    monkeypatch.setenv("DISTFLOW_CONFIG", str(tmp_path / "distflow.yaml"))
    spec = tmp_path / "near.yaml"
    spec.write_text(SPEC.replace("KIND", "required"))
    assert (run([*command, str(spec), "--pool", "hpc"]) == 0) is ("validate" in command)
    severity = "warning" if "validate" in command else "error"
    shown = capsys.readouterr()
    assert (
        f"near.yaml:5: {severity}: pool `hpc` cannot place tasks by `topology`: slurm chooses its nodes\n"
        in shown.out + shown.err
    )
    assert "write `requirementType: preferred` to run anyway" in shown.out + shown.err
    spec.write_text(SPEC.replace("KIND", "preferred"))
    assert run([*command, str(spec), "--pool", "hpc"]) == 0
    shown = capsys.readouterr()
    assert "near.yaml:5: warning: `topology` is ignored: slurm chooses the nodes of pool `hpc`\n" in shown.out + shown.err
    assert "near.yaml:10: warning: `elastic` is ignored: the group waits until slurm has nodes for all" in shown.out + shown.err


@pytest.mark.parametrize("pool", ["{backend: kubernetes}", "{backend: slurm, slurm: {container: pyxis}}"])
def test_an_image_that_the_engine_starts_is_not_ignored(
    pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "distflow.yaml").write_text(f"pools: {{hpc: {pool}}}")
    monkeypatch.setenv("DISTFLOW_CONFIG", str(tmp_path / "distflow.yaml"))
    spec = tmp_path / "image.yaml"
    task = "{name: only, image: ubuntu, command: [ls], volumeMounts: ['/no/such:/data']}"
    spec.write_text(f"workflow: {{name: image, tasks: [{task}]}}")
    assert run(["workflow", "validate", str(spec), "--pool", "hpc"]) == 0
    assert capsys.readouterr().err == ""


def test_a_preflight_checks_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("scontrol", "squeue"):
        (tmp_path / name).write_text("#!/bin/sh\necho the controller is gone >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "distflow.yaml").write_text("pools: {hpc: {backend: slurm}}")
    monkeypatch.setenv("DISTFLOW_CONFIG", str(tmp_path / "distflow.yaml"))
    spec = tmp_path / "near.yaml"
    spec.write_text(SPEC.replace("KIND", "preferred"))
    with Client() as client:
        found = check_planned(plan(client, SubmitRequest(spec=str(spec)))).verdict
    assert not found.can_run
    assert found.text == "pool hpc may be unable to run gangs: `scontrol` failed: the controller is gone"
