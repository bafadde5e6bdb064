"""``distflow workflow export --to kubernetes``: manifests as in ``goldens/kubernetes``, valid in several releases."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.cli.app import run

GOLDENS = Path(__file__).parents[2] / "goldens" / "kubernetes"
SPECS = Path(__file__).parents[3] / "workflow_specs"
CONFIGURATION = {
    "pools": {
        "pods": {
            "backend": "kubernetes",
            "kubernetes": {"namespace": "ml", "image": "python:3.11", "queue": "team-a", "service_account": "train"},
            "platforms": {"h100": {"node_selector": {"kind": "h100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}},
        }
    }
}
RELEASES = ("1.25", "1.29", "1.33", "1.37")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "distflow.yaml").write_text(json.dumps(CONFIGURATION))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTFLOW_CONFIG", str(tmp_path / "distflow.yaml"))
    return tmp_path


def spec_of(*tasks: dict[str, Any], **group: Any) -> str:
    groups = [{"name": "g", "tasks": [{"command": ["true"], **one} for one in tasks], **group}]
    resources = {"default": {"gpu": 8, "cpu": 4, "memory": "16Gi", "platform": "h100"}, "small": {"cpu": 1}}
    Path("spec.yaml").write_text(json.dumps({"workflow": {"name": "one", "groups": groups, "resources": resources}}))
    return "spec.yaml"


RANKS = (
    {"name": "a", "lead": True, "ranks": {"size": 8}, "volumeMounts": ["/data:/d"], "exitActions": {"RESCHEDULE": "3"}},
    {"name": "b", "ranks": {"size": 8}, "volumeMounts": ["/data:/d"]},
)


@pytest.mark.parametrize("options", [(), ("--indexed-job",)], ids=["jobset", "job"])
@pytest.mark.parametrize("name", ["hello_world", "gpus"])
def test_manifests_are_as_the_goldens_show_and_valid(
    name: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    spec = spec_of(*RANKS) if name == "gpus" else str(SPECS / f"{name}.yaml")
    assert run(["workflow", "export", spec, "--to", "kubernetes", *options]) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    golden = GOLDENS / f"{name}-{'job' if options else 'jobset'}.yaml"
    if os.environ.get("DISTFLOW_RENEW_GOLDENS"):
        golden.write_text(text)
    assert text == golden.read_text()
    for one in yaml.safe_load_all(text):
        checked = one
        if one["kind"] == "JobSet":
            models = pytest.importorskip("kubeflow_trainer_api.models")
            assert models.JobsetV1alpha2JobSet.from_dict(one).to_dict() == one
            job = one["spec"]["replicatedJobs"][0]["template"]
            checked = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, **job}
        for release in RELEASES:
            validate.validate(checked, release, strict=True)
        if one["kind"] == "ConfigMap":
            subprocess.run(["bash", "-n"], input=one["data"]["task.sh"], text=True, check=True)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (({"name": "a", "lead": True}, {"name": "b"}), "tasks that are stopped when the lead has completed"),
        (({"name": "a", "inputs": [{"url": "https://example.com/x"}]},), "inputs or outputs at URLs"),
        (({**RANKS[0]}, {**RANKS[1], "image": "other"}), "different resources, images or mounts"),
        (({"name": "a", "credentials": {"c": "/secret"}},), "credentials"),
    ],
)
def test_what_manifests_cannot_express_is_an_error(
    tasks: tuple[dict[str, Any], ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["workflow", "export", spec_of(*tasks), "--to", "kubernetes"]) == 2
    assert message in capsys.readouterr().err


def test_files_and_options_have_limits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "big.bin").write_bytes(os.urandom(1 << 20))
    big = spec_of({"name": "a", "files": [{"path": "big.bin", "localpath": "big.bin"}]})
    assert run(["workflow", "export", big, "--to", "kubernetes"]) == 2
    assert "do not fit into a ConfigMap" in capsys.readouterr().err
    assert run(["workflow", "export", big, "--to", "slurm", "--indexed-job"]) == 2
    assert "--indexed-job is for --to kubernetes" in capsys.readouterr().err
    (folder / "small.bin").write_bytes(b"\0\1")
    small = spec_of({"name": "a", "files": [{"path": "small.bin", "localpath": "small.bin"}]})
    assert run(["workflow", "export", small, "--to", "kubernetes", "--output", "one.yaml"]) == 0
    settings = next(yaml.safe_load_all((folder / "one.yaml").read_text()))
    assert settings["binaryData"] == {"small.bin": "AAE="}
