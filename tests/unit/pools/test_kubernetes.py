"""Pools on Kubernetes in the configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distflow.documents.problems import ProblemsFound
from distflow.pools.load import Machine, parse_configuration
from distflow.pools.model import KubernetesPlatform, KubernetesSettings, Pool


def pool_of(text: str, folder: Path = Path("/nowhere")) -> Pool:
    machine = Machine(cpus=1, memory=1, gpus=0, python="python3")
    found = parse_configuration(text, str(folder / "distflow.yaml"), root="/r", machine=machine)
    return next(iter(found.pools.values()))


def refusal(text: str, folder: Path = Path("/nowhere")) -> str:
    with pytest.raises(ProblemsFound) as caught:
        pool_of(text, folder)
    return str(caught.value)


def test_all_settings_of_a_pool_are_read(tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text("kind: Pod\nspec: {containers: [{imagePullPolicy: Never}]}\n")
    pool = pool_of(
        "pools:\n  k:\n    backend: kubernetes\n    kubernetes:\n"
        "      {context: prod, kubeconfig: kube.conf, namespace: ml, queue: team-a, scheduler: volcano,\n"
        "       service_account: train, image: 'i:1', pod_template: pod.yaml,\n"
        "       priority_classes: {HIGH: urgent}, gpu_resource: amd.com/gpu,\n"
        "       host_network: true, idle_release: 1m}\n"
        "    platforms: {h: {node_selector: {kind: h}, tolerations: [{key: gpu, operator: Exists}], gpu_resource: g.io/x}}\n",
        tmp_path,
    )
    assert pool.kubernetes == KubernetesSettings(
        context="prod", kubeconfig=str(tmp_path / "kube.conf"), namespace="ml", queue="team-a", scheduler="volcano",
        service_account="train", image="i:1", pod_template=json.dumps({"spec": {"containers": [{"imagePullPolicy": "Never"}]}}),
        priority_classes={"HIGH": "urgent"}, gpu_resource="amd.com/gpu", host_network=True, idle_release_s=60.0,
        platforms={
            "h": KubernetesPlatform(
                node_selector={"kind": "h"}, tolerations=({"key": "gpu", "operator": "Exists"},), gpu_resource="g.io/x"
            )
        },
    )  # fmt: skip
    assert pool.is_allocated
    assert list(pool.platforms) == ["h"]
    assert pool.template is not None
    assert pool.template.root == "/distflow"


def test_paths_become_absolute_if_the_path_of_the_configuration_is_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pool = pool_of("pools:\n  k: {backend: kubernetes, kubernetes: {kubeconfig: kube}}\n", Path())
    assert pool.kubernetes is not None
    assert pool.kubernetes.kubeconfig == str(tmp_path / "kube")


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("kind: Job\nspec: {}\n")
    (tmp_path / "broken.yaml").write_text("spec: {\n")
    messages = refusal(
        "default_pool: a\npools:\n"
        "  a: {backend: kubernetes, nodes: [n1], kubernetes: {pod_template: job.yaml, idle_release: 0s}}\n"
        "  b: {backend: kubernetes, kubernetes: {pod_template: broken.yaml}}\n"
        "  c: {backend: kubernetes, kubernetes: {pod_template: missing.yaml}}\n"
        "  d: {backend: ssh, nodes: [n1], kubernetes: {}}\n"
        "  e: {backend: kubernetes, login: here}\n"
        "  f: {backend: kubernetes, platforms: {h: {constraint: h100}}}\n",
        tmp_path,
    )
    for part in (
        "job.yaml` is not a pod", "broken.yaml` is not a pod: ", "missing.yaml", "must be more than 0",
        "`backend: kubernetes` has no `nodes`", "`kubernetes` needs `backend: kubernetes`", "`login` needs `backend: slurm` or",
        "`constraint` of a platform needs `backend: slurm`\n    remove it; with `backend: kubernetes`, a platform has `node_",
    ):  # fmt: skip
        assert part in messages, messages
