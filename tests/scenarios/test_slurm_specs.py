"""Every spec of ``workflow_specs/`` on a real Slurm cluster, on the login node itself and through it over SSH."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from distflow.testing.slurm import Slurm, missing_slurm
from scenarios.cluster import Cluster
from scenarios.lab import TRAINING, checkout, json_lines, pipeline, train

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster of its own: each task needs a node, and the largest spec has three."""
    if why := missing_slurm():
        pytest.skip(why)
    with Slurm(tmp_path_factory.mktemp("slurm"), nodes=3) as made:
        yield made


@pytest.fixture
def slurm(three_nodes: Slurm) -> Iterator[Slurm]:
    """Replaces the cluster that other modules share."""
    yield three_nodes
    three_nodes.cancel_jobs()


def test_the_specs_are_all_here(repository: Path) -> None:
    assert {path.stem for path in (repository / "workflow_specs").glob("*.yaml")} == {
        "hello_world", "pipeline", "resume", *TRAINING,
    }  # fmt: skip


def test_hello_world(any_cluster: Cluster, repository: Path) -> None:
    done = any_cluster.cli.run("workflow", "submit", str(checkout(any_cluster.cli, repository) / "hello_world.yaml"), "--wait")
    assert done.code == 0, done.err + done.out
    assert [f"rank {rank} of 2" in done.out for rank in range(3)] == [True, True, False]
    assert len({task["node_name"] for task in any_cluster.cli.tasks("hello-world-1").values()}) == 2


@pytest.mark.torch
@pytest.mark.parametrize("name", TRAINING)
def test_training(any_cluster: Cluster, repository: Path, name: str, forking_site: str) -> None:
    any_cluster.configure(environment={"PYTHONPATH": forking_site})
    tasks, finished = train(any_cluster.cli, checkout(any_cluster.cli, repository) / f"{name}.yaml", epochs=6)
    assert finished["accuracy"] > 0.95
    assert len({task["node_name"] for task in tasks.values()}) == len(tasks)


@pytest.mark.torch
def test_the_pipeline_hands_its_data_on_from_job_to_job(any_cluster: Cluster, repository: Path, forking_site: str) -> None:
    any_cluster.configure(environment={"PYTHONPATH": forking_site})
    assert pipeline(any_cluster.cli, checkout(any_cluster.cli, repository), epochs=6) > 0.95
    rows, tasks = json_lines(any_cluster.cli.logs("pipeline-1")), any_cluster.cli.tasks("pipeline-1")
    assert sorted(row["rank"] for row in rows if row.get("event") == "started") == [0, 1]
    assert len({task["node_name"].partition("@")[2] for task in tasks.values()}) == 3, "one job for each stage"


@pytest.mark.torch
def test_training_that_resumes(any_cluster: Cluster, repository: Path, forking_site: str) -> None:
    cli = any_cluster.cli
    any_cluster.configure(environment={"PYTHONPATH": forking_site})
    values = ("epochs=1", "pause=0", f"store=file://{cli.folder}/store")
    spec = str(checkout(cli, repository) / "resume.yaml")
    done = cli.run("workflow", "submit", spec, "--wait", "--set", *values, timeout=170)
    assert done.code == 0, done.err + done.out
    rows = json_lines(cli.logs("resume-1"))
    assert {row["rank"] for row in rows if row.get("begins")} == {0, 1}
    assert len([row for row in rows if "weights" in row]) == 1
