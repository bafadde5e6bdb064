"""The specs of ``workflow_specs/``, unchanged, on every cluster engine, and one of them also on this machine and over SSH."""

from __future__ import annotations

import hashlib
import itertools
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from distflow.testing.slurm import Slurm, missing_slurm
from distflow.testing.waiting import wait_until
from scenarios.cluster import Cluster
from scenarios.conftest import Cli
from scenarios.kubernetes_pool import KubernetesPool
from scenarios.lab import Lab, copy_specs, json_lines, train
from scenarios.raypool import RayPool

EPOCHS = 6
PRELOADED = {"PRELOAD": "sklearn.datasets"}
"""The module that ``pipeline`` imports for its data: see ``preloaded.py``."""
Configure = Callable[[Cli, pytest.FixtureRequest, Mapping[str, str]], None]


def _local(cli: Cli, _: pytest.FixtureRequest, environment: Mapping[str, str]) -> None:
    cli.configure(environment=dict(environment))


def _ssh(_: Cli, request: pytest.FixtureRequest, environment: Mapping[str, str]) -> None:
    lab: Lab = request.getfixturevalue("lab")
    lab.configure(environment=environment)


def _slurm(_: Cli, request: pytest.FixtureRequest, environment: Mapping[str, str]) -> None:
    cluster: Cluster = request.getfixturevalue("cluster")
    cluster.configure(environment=environment)


def _ray(_: Cli, request: pytest.FixtureRequest, environment: Mapping[str, str]) -> None:
    pool: RayPool = request.getfixturevalue("ray_pool")
    pool.configure(environment=environment, ray={"strategy": "SPREAD"})  # the largest spec has more tasks than nodes


def _kubernetes(_: Cli, request: pytest.FixtureRequest, environment: Mapping[str, str]) -> None:
    pool: KubernetesPool = request.getfixturevalue("kubernetes_pool")
    # Pods must see the directories of the fixture `forking_site`.
    site = (value for name, value in environment.items() if name == "PYTHONPATH")
    folders = (str(pool.cli.folder), str(Path(__file__).parents[1]), *site)
    pool.configure(folders=folders, environment=dict(environment))


WAITS = """
workflow:
  name: waits
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 1}
      command: &wait [sh, -c, 'echo up; while [ ! -e GO ]; do sleep 0.2; done; echo late']
    - {name: worker, ranks: {size: 1}, command: *wait}
"""
POOLS: Mapping[str, Configure] = {"local": _local, "lab": _ssh, "cluster": _slurm, "ray": _ray, "pods": _kubernetes}
"""A function for each backend, which configures its pool, by the name of the pool."""


@pytest.mark.torch
@pytest.mark.ssh
@pytest.mark.timeout(900)
def test_the_same_file_gives_the_same_loss_on_every_backend(
    cli: Cli, repository: Path, forking_site: str, request: pytest.FixtureRequest
) -> None:
    spec = copy_specs(cli, repository) / "pytorch_dist.yaml"
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
        assert finished["accuracy"] > 0.95
        assert len({task["node_name"] for task in tasks.values()}) == (1 if name == "local" else 2)
        workflow = f"pytorch-dist-{len(losses) + 1}"
        assert cli.query(workflow)["pool"] == name
        losses[name] = next(row["loss"] for row in json_lines(cli.logs(workflow)) if row.get("epoch") == EPOCHS)
    print(losses)
    assert hashlib.sha256(spec.read_bytes()).hexdigest() == digest
    assert len(losses) > 1
    assert len(set(losses.values())) == 1, losses


@dataclass(frozen=True, slots=True)
class Sample:
    """The expected ranks and results of a spec, and the values to set."""

    ranks: int
    values: tuple[str, ...] = ("epochs=6",)
    results: int = 1
    """The number of JSON documents in its output with the final accuracy or a digest of the weights."""


SAMPLES: Mapping[str, Sample] = {
    "hello_world": Sample(2, (), 0),
    "pipeline": Sample(2, results=2),
    "pytorch_dist_3": Sample(3),
    "pytorch_replicas": Sample(3, ("epochs=6", "workers=2")),
    "pytorch_torchrun": Sample(2),
    "resume": Sample(2, ("epochs=1", "pause=0", "store=file://FOLDER/store")),
}
RUNS: Mapping[str, Sequence[str]] = {
    "cluster": ("hello_world", "pytorch_dist_3"),
    "ray": ("pipeline", "pytorch_replicas"),
    "pods": ("pipeline", "pytorch_torchrun", "resume"),
}
"""The specs that run on each engine. ``pytorch_dist`` and ``pipeline`` run on all of them, because they use most of an engine:
the address of the master, and copies of outputs. On Slurm, ``pipeline`` runs through a login node. On Ray, ``pytorch_replicas``
has more tasks than there are nodes. Pods see only some directories of this machine, so ``resume`` stores its checkpoints there.
"""


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm cluster with three nodes: each task needs a node, and the largest spec has three tasks."""
    if why := missing_slurm():
        pytest.skip(why)
    with Slurm(tmp_path_factory.mktemp("slurm"), nodes=3) as made:
        yield made


@pytest.fixture
def slurm(three_nodes: Slurm) -> Iterator[Slurm]:
    """Replace the cluster of the other modules."""
    yield three_nodes
    three_nodes.cancel_jobs()


def test_every_spec_is_tested(repository: Path) -> None:
    # `fine_tune` needs initial weights, so `test_resume.py` runs it.
    tested = {"pytorch_dist", "fine_tune", *itertools.chain.from_iterable(RUNS.values())}
    assert {path.stem for path in (repository / "workflow_specs").glob("*.yaml")} == tested


@pytest.mark.torch
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", RUNS)
def test_each_spec_completes_with_exactly_its_ranks(
    backend: str, cli: Cli, repository: Path, forking_site: str, request: pytest.FixtureRequest
) -> None:
    POOLS[backend](cli, request, {"PYTHONPATH": forking_site} | PRELOADED)
    specs = copy_specs(cli, repository)
    for name in RUNS[backend]:
        run_sample(cli, specs, name)
    if backend == "pods":
        request.getfixturevalue("kubernetes_pool").await_no_objects()


@pytest.mark.torch
@pytest.mark.ssh
@pytest.mark.timeout(400)
def test_the_pipeline_passes_data_on_through_a_login_node(far_cluster: Cluster, repository: Path, forking_site: str) -> None:
    far_cluster.configure(environment={"PYTHONPATH": forking_site} | PRELOADED)
    run_sample(far_cluster.cli, copy_specs(far_cluster.cli, repository), "pipeline")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["ray", "pods"])
def test_a_lost_state_directory_is_rebuilt_from_the_cluster(backend: str, cli: Cli, request: pytest.FixtureRequest) -> None:
    """``test_slurm_faults`` has the same test for Slurm."""
    POOLS[backend](cli, request, {})
    go = cli.folder / "go"
    workflow = cli.submit(cli.spec(WAITS.replace("GO", str(go))))
    before = cli.await_running(workflow, 120)
    wait_until(lambda: cli.logs(workflow).count("] up") == 2, 60, "both tasks have printed")
    cli.kill_supervisor()
    shutil.rmtree(cli.state)
    reaped = cli.run("node", "reap")
    allocation = before["master"]["node_name"].partition("@")[2]
    assert (reaped.code, allocation in reaped.out) == (0, True), reaped.out + reaped.err
    done = cli.run("workflow", "adopt")
    assert (done.code, f"{workflow}: adopted" in done.out) == (0, True), done.out + done.err
    assert cli.run("workflow", "adopt").out == "Nothing to adopt: the store has every workflow that the nodes reported.\n"
    adopted = cli.await_running(workflow, 120)
    for task, one in before.items():
        assert (adopted[task]["node_name"], adopted[task]["pid"]) == (one["node_name"], one["pid"])
    go.touch()
    assert cli.await_status(workflow, "COMPLETED", "FAILED", timeout=120)["status"] == "COMPLETED"
    assert (cli.logs(workflow).count("] up"), cli.logs(workflow).count("] late")) == (2, 2)
    if backend == "pods":
        request.getfixturevalue("kubernetes_pool").await_no_objects()


def run_sample(cli: Cli, specs: Path, name: str) -> None:
    """Run a spec until it ends, and check that each task has its own node, and that each rank runs once."""
    sample, spec = SAMPLES[name], str(specs / f"{name}.yaml")
    values = ["--set", *(value.replace("FOLDER", str(cli.folder)) for value in sample.values)] if sample.values else []
    done = cli.run("workflow", "submit", spec, "--wait", *values, timeout=300)
    assert done.code == 0, done.err + done.out
    workflow = done.out.splitlines()[0]
    log, tasks = cli.logs(workflow), cli.tasks(workflow)
    rows = json_lines(log)
    begun = [row for row in rows if row.get("event") == "started" or row.get("begins")]
    ranks = [(row["rank"], row.get("world_size", sample.ranks)) for row in begun]
    ranks += [(int(rank), int(size)) for rank, size in re.findall(r"rank (\d+) of (\d+)$", log, re.MULTILINE)]
    assert sorted(ranks) == [(rank, sample.ranks) for rank in range(sample.ranks)]
    assert len({task["node_name"] for task in tasks.values()}) == len(tasks)
    results = [row for row in rows if row.get("event") in ("finished", "evaluated") or "weights" in row]
    assert len(results) == sample.results, rows
    assert all("weights" in row or row["accuracy"] > 0.95 for row in results), results
