"""One spec file, unchanged, on this machine, over SSH, and on every cluster engine that can be started here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from scenarios.cluster import Cluster
from scenarios.conftest import Cli
from scenarios.kubernetes_pool import KubernetesPool
from scenarios.lab import Lab, checkout, json_lines, train
from scenarios.raypool import RayPool

EPOCHS = 4
Configure = Callable[[Cli, pytest.FixtureRequest, Mapping[str, str]], None]


def _local(cli: Cli, _: pytest.FixtureRequest, environment: Mapping[str, str]) -> None:
    cli.configure(environment=dict(environment))


def _ssh(_: Cli, request: pytest.FixtureRequest, environment: Mapping[str, str]) -> None:
    lab: Lab = request.getfixturevalue("lab")
    lab.configure(environment=environment)


def _slurm(_: Cli, request: pytest.FixtureRequest, environment: Mapping[str, str]) -> None:
    cluster: Cluster = request.getfixturevalue("cluster")
    cluster.configure(environment=environment)


def _ray(cli: Cli, request: pytest.FixtureRequest, environment: Mapping[str, str]) -> None:
    RayPool(cli, request.getfixturevalue("ray")).configure(environment=environment)


def _kubernetes(cli: Cli, request: pytest.FixtureRequest, _: Mapping[str, str]) -> None:
    made = KubernetesPool(cli, request.getfixturevalue("kubernetes"))
    request.addfinalizer(made.close)


POOLS: Mapping[str, Configure] = {"local": _local, "lab": _ssh, "cluster": _slurm, "ray": _ray, "pods": _kubernetes}
"""The name of the pool of each backend."""


@pytest.mark.torch
@pytest.mark.ssh
@pytest.mark.timeout(900)
def test_the_same_file_gives_the_same_loss_on_every_backend(
    cli: Cli, repository: Path, forking_site: str, request: pytest.FixtureRequest
) -> None:
    spec = checkout(cli, repository) / "pytorch_dist.yaml"
    digest = hashlib.sha256(spec.read_bytes()).hexdigest()
    losses: dict[str, float] = {}
    for name, configure in POOLS.items():
        try:
            configure(cli, request, {"PYTHONPATH": forking_site})
        except pytest.skip.Exception as missing:
            print(f"{name}: {missing}")
            continue
        tasks, finished = train(cli, spec, epochs=EPOCHS)
        assert (len(tasks), finished["world_size"], finished["epoch"]) == (2, 2, EPOCHS)
        workflow = f"pytorch-dist-{len(losses) + 1}"
        assert cli.query(workflow)["pool"] == name
        losses[name] = next(row["loss"] for row in json_lines(cli.logs(workflow)) if row.get("epoch") == EPOCHS)
    print(losses)
    assert hashlib.sha256(spec.read_bytes()).hexdigest() == digest
    assert len(losses) > 1
    assert len(set(losses.values())) == 1, losses
