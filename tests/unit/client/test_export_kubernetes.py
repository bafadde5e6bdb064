"""``workflow export --to kubernetes`` and ``trainjob``: manifests as in ``goldens/kubernetes``, valid in several releases."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.cli.app import run

GOLDENS = Path(__file__).parents[2] / "goldens" / "kubernetes"
SPECS = Path(__file__).parents[3] / "workflow_specs"
CONFIGURATION: dict[str, Any] = {
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


def spec_of(*tasks: dict[str, Any], workflow: Any = None, **group: Any) -> str:
    groups = [{"name": "g", "tasks": [{"command": ["true"], **one} for one in tasks], **group}]
    resources = {"default": {"gpu": 8, "cpu": 4, "memory": "16Gi", "platform": "h100"}, "small": {"cpu": 1}}
    top = {"name": "one", "groups": groups, "resources": resources, **(workflow or {})}
    Path("spec.yaml").write_text(json.dumps({"workflow": top}))
    return "spec.yaml"


TASKS_WITH_RETRY = (
    {"name": "a", "lead": True, "ranks": {"size": 8}, "volumeMounts": ["/data:/d"], "exitActions": {"RESCHEDULE": "3"}},
    {"name": "b", "ranks": {"size": 8}, "volumeMounts": ["/data:/d"]},
)


TASKS_WITHOUT_RETRY: tuple[dict[str, Any], ...] = (
    {key: value for key, value in TASKS_WITH_RETRY[0].items() if key != "exitActions"},
    TASKS_WITH_RETRY[1],
)
TORCHRUN_TASKS: tuple[dict[str, Any], ...] = tuple(
    {
        "command": ["python3", "train.py", "--epochs", "3"],
        "files": [{"path": "train.py", "contents": "print()\n"}],
        **one,
    }
    for one in TASKS_WITHOUT_RETRY
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in ("hello_world", "gpus") for kind in ("jobset", "job")),
        ("gpus", "trainjob"),
    ],
)
def test_manifests_match_their_goldens_and_are_valid(name: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    spec = str(SPECS / f"{name}.yaml")
    if name == "gpus":
        torchrun = {"launcher": "torchrun", "timeout": {"exec_timeout": "1h"}}
        tasks = {"jobset": TASKS_WITH_RETRY, "job": TASKS_WITHOUT_RETRY, "trainjob": TORCHRUN_TASKS}[kind]
        spec = spec_of(*tasks, **(torchrun if kind == "trainjob" else {}))
    options = {"jobset": ["kubernetes"], "job": ["kubernetes", "--indexed-job"], "trainjob": ["trainjob"]}[kind]
    assert run(["workflow", "export", spec, "--to", *options]) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    golden = GOLDENS / f"{name}-{kind}.yaml"
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
        if one["kind"] == "TrainJob":
            models = pytest.importorskip("kubeflow_trainer_api.models")
            assert models.TrainerV1alpha1TrainJob.from_dict(one).to_dict() == one
            checked = pod_of(one["spec"])
        for release in RELEASES:
            validate.validate(checked, release, strict=True)
        if one["kind"] == "ConfigMap":
            subprocess.run(["bash", "-n"], input=one["data"]["task.sh"], text=True, check=True)


@pytest.mark.parametrize("to", ["kubernetes", "trainjob"])
def test_platforms_without_settings_cause_a_warning(to: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_of({"name": "a", "image": "python:3.11", "launcher": "torchrun", "command": ["python3", "-m", "http"]})
    assert run(["workflow", "export", spec, "--to", to]) == 0
    assert capsys.readouterr().err == ""
    Path("spec.yaml").write_text(Path("spec.yaml").read_text().replace('"h100"', '"b200"'))
    warning = "spec.yaml:1: warning: the manifests do not select the platform `b200`, because the pool does not define it\n"
    assert run(["workflow", "export", spec, "--to", to]) == 0
    assert warning in capsys.readouterr().err
    (folder / "distflow.yaml").write_text("pools: {local: {backend: local, nodes: [{name: here}]}}")
    assert run(["workflow", "export", spec, "--to", to]) == 0
    assert warning in capsys.readouterr().err


def pod_of(train_job: dict[str, Any]) -> dict[str, Any]:
    """Return the pod that Kubeflow Trainer creates: the container of the trainer, with the patches of the runtime."""
    trainer = train_job["trainer"]
    (job,) = train_job["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert (job["name"], container["name"]) == ("node", "node")
    container |= {key: trainer[key] for key in ("image", "command", "env")} | {"resources": trainer.get("resourcesPerNode", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}


def test_the_lead_stops_other_tasks_only_if_their_status_is_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    independent = spec_of({"name": "a", "lead": True}, {"name": "b"}, ignoreNonleadStatus=False)
    assert run(["workflow", "export", independent, "--to", "kubernetes"]) == 0
    assert run(["workflow", "export", independent, "--to", "slurm"]) == 0
    assert ".ended" not in capsys.readouterr().out
    world = spec_of(*TASKS_WITHOUT_RETRY, ignoreNonleadStatus=True)
    assert run(["workflow", "export", world, "--to", "slurm"]) == 0
    assert '[ $task != a ] || { echo $status > "$run_dir/$task.ended"; exit 1; }' in capsys.readouterr().out
    assert run(["workflow", "export", world, "--to", "kubernetes"]) == 2
    assert "tasks that are stopped when the lead has completed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (({"name": "a", "lead": True}, {"name": "b"}), "tasks that are stopped when the lead has completed"),
        (({"name": "a", "inputs": [{"url": "https://example.com/x"}]},), "inputs or outputs at URLs"),
        (
            ({**TASKS_WITH_RETRY[0]}, {**TASKS_WITH_RETRY[1], "image": "other"}),
            "task b has other resources, another image or other mounts",
        ),
        (({"name": "a", "credentials": {"c": "/secret"}},), "credentials"),
        (
            ({"name": "a", "checkpoint": [{"path": "m", "url": "file:///tmp/m", "frequency": "1h"}]},),
            "`checkpoint` or `shared`",
        ),
        (({"name": "a", "privileged": True},), "`privileged`"),
    ],
)
def test_specs_that_manifests_cannot_express_are_errors(
    tasks: tuple[dict[str, Any], ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["workflow", "export", spec_of(*tasks), "--to", "kubernetes"]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "spec.yaml:1: error: " in shown


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        ({"notify": [{"url": "https://example.com/x"}]}, "cannot express this part of workflow one: `notify`"),
        ({"timeout": {"queue_timeout": "1h"}}, "cannot express this part of group g: `queue_timeout`"),
        ({"timeout": {"hang_timeout": "1h"}}, "cannot express this part of group g: `hang_timeout`"),
        ({"max_log": "1Gi"}, "cannot express this part of workflow one: `max_log`"),
        ({"resources": {"default": {"storage": "1Gi"}}}, "cannot express this part of task a: `storage`"),
        ({"resources": {"default": {"topology": [{"key": "rack"}]}}}, "cannot express this part of task a: `topology`"),
    ],
)
def test_parts_of_workflows_that_manifests_cannot_express_are_errors(
    workflow: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["workflow", "export", spec_of({"name": "a"}, workflow=workflow), "--to", "kubernetes"]) == 2
    assert f"spec.yaml:1: error: a manifest {message}" in capsys.readouterr().err


def test_a_label_key_that_kubernetes_does_not_allow_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_of({"name": "a"}, workflow={"labels": {"a..b/c": "d"}})
    assert run(["workflow", "export", spec, "--to", "kubernetes"]) == 2
    reason = "each part of its prefix between dots must begin and end with a letter or a digit"
    message = f"Kubernetes does not allow the label key `a..b/c`: {reason}"
    assert f"spec.yaml:1: error: {message}\n" in capsys.readouterr().err


def test_an_indexed_job_that_would_not_be_retried_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workflow", "export", spec_of(*TASKS_WITH_RETRY), "--to", "kubernetes", "--indexed-job"]) == 2
    what = "RESCHEDULE of `exitActions`, which a JobSet supports, but an Indexed Job does not"
    assert f"spec.yaml:1: error: a manifest cannot express this part of task a: {what}\n" in capsys.readouterr().err


def test_a_spec_cannot_set_a_variable_that_the_pods_use(capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_of({"name": "a", "environment": {"node_name": "x"}})
    assert run(["workflow", "export", spec, "--to", "kubernetes", "--pool", "pods"]) == 2
    assert "task `a` sets the variable `node_name`, which the script itself uses" in capsys.readouterr().err


def test_a_manifest_with_secrets_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workflow", "export", spec_of({"name": "a"}), "--to", "kubernetes", "--set-env", "TOKEN=x"]) == 2
    assert "cannot express this part of task a: the secrets of --set-env" in capsys.readouterr().err


def test_a_manifest_of_an_elastic_group_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workflow", "export", spec_of(*TASKS_WITHOUT_RETRY, elastic={"min": 1}), "--to", "kubernetes"]) == 2
    assert "cannot express this part of group g: `elastic`" in capsys.readouterr().err


def test_a_manifest_with_stop_on_missing_ranks_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workflow", "export", spec_of(*TASKS_WITH_RETRY, stop_on_missing_ranks=True), "--to", "kubernetes"]) == 2
    assert "cannot express this part of group g: `stop_on_missing_ranks`" in capsys.readouterr().err
    assert run(["workflow", "export", spec_of(*TASKS_WITH_RETRY, stop_on_missing_ranks=False), "--to", "kubernetes"]) == 0


@pytest.mark.parametrize("options", [["kubernetes"], ["kubernetes", "--indexed-job"], ["trainjob"]])
def test_all_objects_have_the_labels_of_the_spec(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    labels = {"team": "vision", "example.com/Stage": "b_2"}
    spec = spec_of(*TORCHRUN_TASKS, launcher="torchrun", workflow={"labels": labels})
    assert run(["workflow", "export", spec, "--to", *options]) == 0, capsys.readouterr().err
    *others, job = [one["metadata"]["labels"] for one in yaml.safe_load_all(capsys.readouterr().out)]
    assert job == {**labels, "kueue.x-k8s.io/queue-name": "team-a"}
    assert others
    assert all(one == labels for one in others)


@pytest.mark.parametrize(
    ("change", "group", "message"),
    [
        ({}, {"launcher": "command"}, "error: a TrainJob runs torchrun on each node, but task a does not"),
        (
            {"exitActions": {"RESCHEDULE": "3"}},
            {},
            "a TrainJob does not support RESCHEDULE of `exitActions`, which task b uses",
        ),
        (
            {"ranks": {"size": 4}},
            {},
            "all nodes of a TrainJob have the same number of ranks, but task b has another number than task a",
        ),
        (
            {"command": ["python3", "train.py", "--fast"]},
            {},
            "task b differs from task a in its command, environment, files or",
        ),
        ({"environment": {"X": "1"}}, {}, "task b differs from task a in its command, environment, files or"),
        ({"exitActions": {"COMPLETE": "3"}}, {}, "files or `exitActions`"),
        ({}, {"launcher": {"kind": "torchrun", "max_restarts": 2}}, "a TrainJob cannot restart ranks (`max_restarts`)"),
    ],
)
def test_specs_that_a_train_job_cannot_express_are_errors_with_their_lines(
    change: dict[str, Any], group: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of(TORCHRUN_TASKS[0], {**TORCHRUN_TASKS[1], **change}, **{"launcher": "torchrun", **group})
    assert run(["workflow", "export", spec, "--to", "trainjob"]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "spec.yaml:1: error: " in shown


def test_a_train_job_has_one_group_and_the_settings_of_its_runtime(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workflow", "export", str(SPECS / "pytorch_torchrun.yaml"), "--to", "trainjob"]) == 0
    train_job = list(yaml.safe_load_all(capsys.readouterr().out))[-1]
    assert (train_job["spec"]["trainer"]["numNodes"], train_job["spec"]["trainer"]["numProcPerNode"]) == (2, 1)
    assert run(["workflow", "export", str(SPECS / "pipeline.yaml"), "--to", "trainjob"]) == 2
    assert re.search(
        r"pipeline.yaml:\d+: error: a TrainJob has one group of tasks, but this workflow has 3", capsys.readouterr().err
    )
    (folder / "distflow.yaml").write_text(json.dumps(CONFIGURATION).replace('"queue"', '"scheduler": "volcano", "queue"'))
    assert run(["workflow", "export", spec_of(*TORCHRUN_TASKS, launcher="torchrun"), "--to", "trainjob"]) == 2
    assert "a TrainJob takes `scheduler` from its runtime, but the pool `pods` sets it" in capsys.readouterr().err


POD = {
    "metadata": {"annotations": {"site/owner": "vision"}},
    "spec": {
        "securityContext": {"runAsUser": 1000},
        "containers": [{"name": "x", "image": "own:1", "volumeMounts": [{"name": "files", "mountPath": "/data"}]}],
        "volumes": [{"name": "files", "persistentVolumeClaim": {"claimName": "data"}}],
    },
}


@pytest.mark.parametrize("options", [["kubernetes"], ["kubernetes", "--indexed-job"]])
def test_pods_have_the_template_and_the_priority_class_of_the_pool(
    options: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    (folder / "pod.yaml").write_text(json.dumps(POD))
    settings = {"pod_template": "pod.yaml", "priority_classes": {"NORMAL": "batch", "HIGH": "urgent"}}
    pool = {"backend": "kubernetes", "kubernetes": settings}
    (folder / "distflow.yaml").write_text(json.dumps({"pools": {"pods": pool}}))
    spec = spec_of({"name": "a", "resource": "small", "volumeMounts": ["/local"]})
    assert run(["workflow", "export", spec, "--to", *options]) == 0, capsys.readouterr().err
    job = list(yaml.safe_load_all(capsys.readouterr().out))[-1]
    job_spec = job["spec"] if job["kind"] == "Job" else job["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job_spec["template"]
    validate.validate({"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {"name": "p"}}, RELEASES[-1], strict=True)
    assert pod["metadata"] == POD["metadata"]
    assert (pod["spec"]["priorityClassName"], pod["spec"]["securityContext"]) == ("batch", {"runAsUser": 1000})
    (container,) = pod["spec"]["containers"]
    assert (container["name"], container["image"]) == ("task", "own:1")
    names = ["files", "distflow-run", "distflow-files", "distflow-shm", "distflow-mount-0"]
    assert [one["name"] for one in container["volumeMounts"]] == [one["name"] for one in pod["spec"]["volumes"]] == names


@pytest.mark.parametrize("key", ["pod_template", "priority_classes"])
def test_a_train_job_with_a_pod_template_or_a_priority_class_is_an_error(
    key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "pod.yaml").write_text(json.dumps(POD))
    value = {"pod_template": "pod.yaml", "priority_classes": {"NORMAL": "batch"}}[key]
    pool = CONFIGURATION["pools"]["pods"]
    (folder / "distflow.yaml").write_text(
        json.dumps({"pools": {"pods": {**pool, "kubernetes": {**pool["kubernetes"], key: value}}}})
    )
    assert run(["workflow", "export", spec_of(*TORCHRUN_TASKS, launcher="torchrun"), "--to", "trainjob"]) == 2
    assert f"a TrainJob takes `{key}` from its runtime, but the pool `pods` sets it" in capsys.readouterr().err


def test_large_files_and_options_of_other_targets_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "big.bin").write_bytes(os.urandom(1 << 20))
    big = spec_of({"name": "a", "files": [{"path": "big.bin", "localpath": "big.bin"}]})
    assert run(["workflow", "export", big, "--to", "kubernetes"]) == 2
    assert "distflow puts at most 900,000 into a ConfigMap" in capsys.readouterr().err
    assert run(["workflow", "export", big, "--to", "slurm", "--indexed-job"]) == 2
    assert "`--indexed-job` can only be used with `--to kubernetes`" in capsys.readouterr().err
    (folder / "small.bin").write_bytes(b"\0\1")
    small = spec_of({"name": "a", "files": [{"path": "small.bin", "localpath": "small.bin"}]})
    assert run(["workflow", "export", small, "--to", "kubernetes", "--output", "one.yaml"]) == 0
    settings = next(yaml.safe_load_all((folder / "one.yaml").read_text()))
    assert settings["binaryData"] == {"small.bin": "AAE="}
