"""Gangs on a real Slurm cluster: from the login node itself, and through it over SSH. Faults are real."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from distflow.testing.slurm import Slurm
from distflow.testing.sshd import Sshd, make_key, missing_sshd
from distflow.testing.waiting import wait_until
from scenarios.cluster import Cluster
from scenarios.conftest import Cli
from scenarios.lab import TRAINING, checkout, train

SPIN = """
workflow:
  name: spin
  groups:
  - name: train
    tasks:
    - {name: master, lead: true, ranks: {size: 1}, command: [sh, -c, 'echo "$CUDA_VISIBLE_DEVICES on $MASTER_ADDR"; sleep 600']}
    - {name: worker, ranks: {size: 1}, command: [sh, -c, 'echo "rank $DISTFLOW_RANK_OFFSET"; sleep 600']}
  resources: {default: {gpu: 2, cpu: 1}}
"""
FOREVER = SPIN.replace("gpu: 2, cpu: 1", "cpu: 16")
"""A gang that needs both nodes of the cluster, so that another one has to wait."""


@pytest.fixture
def cluster(cli: Cli, slurm: Slurm) -> Iterator[Cluster]:
    made = Cluster(cli, slurm)
    yield made
    made.await_no_jobs()


@pytest.fixture
def far_cluster(cli: Cli, slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Through a login node: an OpenSSH server in whose PATH the commands of Slurm are."""
    if why := missing_sshd():
        pytest.skip(why)
    key = make_key(tmp_path_factory.mktemp("key") / "id")
    folder = tmp_path_factory.mktemp("login")
    path = f"HOME={folder / 'home'} PATH={slurm.commands}:{os.environ['PATH']}"
    with Sshd(folder, "127.0.1.9", alias="login", user_key=key, options={"SetEnv": path}) as server:
        made = Cluster(cli, slurm, server)
        yield made
        made.await_no_jobs()


def _runs(cluster: Cluster, spec: str = SPIN) -> tuple[str, str]:
    """Submit a gang, wait until it runs, and return the workflow and its job."""
    workflow = cluster.cli.submit(cluster.cli.spec(spec))
    cluster.cli.await_running(workflow)
    return workflow, cluster.job_of(workflow)


@pytest.fixture(params=["cluster", pytest.param("far_cluster", marks=pytest.mark.ssh)])
def any_cluster(request: pytest.FixtureRequest) -> Cluster:
    made: Cluster = request.getfixturevalue(request.param)
    return made


def test_a_gang_runs_in_a_job_with_its_gpus_and_gives_it_back(any_cluster: Cluster, repository: Path) -> None:
    cli = any_cluster.cli
    workflow, job = _runs(any_cluster)
    tasks = cli.tasks(workflow)
    assert {name: task["node_name"] for name, task in tasks.items()} == {"master": f"n1@{job}", "worker": f"n2@{job}"}
    assert "0,1 on " in cli.await_log(workflow, " on ")
    assert cli.run("workflow", "exec", workflow, "worker", "--entry", "echo there").out == "there\n"
    assert cli.run("workflow", "cancel", workflow, "--wait", "60").code == 0
    any_cluster.await_no_jobs()
    done = cli.run("workflow", "submit", str(checkout(cli, repository) / "hello_world.yaml"), "--wait")
    assert done.code == 0, done.err + done.out
    assert "rank 0 of 2" in done.out
    assert "rank 1 of 2" in done.out


@pytest.mark.torch
@pytest.mark.parametrize("name", TRAINING[:1])
def test_a_training_spec_completes(cluster: Cluster, repository: Path, name: str, forking_site: str) -> None:
    cluster.configure(environment={"PYTHONPATH": forking_site})
    tasks, finished = train(cluster.cli, checkout(cluster.cli, repository) / f"{name}.yaml", epochs=6)
    assert finished["accuracy"] > 0.95
    assert len({task["node_name"] for task in tasks.values()}) == len(tasks)


def test_a_gang_in_the_queue_shows_slurms_reason_and_cancel_leaves_nothing(cluster: Cluster) -> None:
    cli = cluster.cli
    first, _ = _runs(cluster, FOREVER)
    second = cli.submit(cli.spec(FOREVER, "second.yaml"))
    wait_until(lambda: "Resources" in cli.query(second)["groups"][0]["message"], 60, "the reason is shown")
    assert len(cluster.jobs()) == 2
    assert cli.run("workflow", "cancel", second, "--wait", "60").code == 0
    assert cli.query(second)["status"] == "FAILED_CANCELED"
    wait_until(lambda: len(cluster.jobs()) == 1, 30, "the waiting job is gone")
    cli.run("workflow", "cancel", first, "--wait", "60")


def test_a_gang_that_never_gets_nodes_ends_by_its_queue_timeout(cluster: Cluster) -> None:
    cli = cluster.cli
    impossible = SPIN.replace("  name: spin\n", "  name: spin\n  timeout: {queue_timeout: 3s}\n", 1)
    workflow = cli.submit(cli.spec(impossible.replace("gpu: 2, cpu: 1", "gpu: 8, cpu: 16, memory: 7Gi")))
    cli.await_running(workflow)
    second = cli.submit(cli.spec(impossible.replace("gpu: 2, cpu: 1", "gpu: 1"), "second.yaml"))
    answer = cli.await_status(second, "FAILED_QUEUE_TIMEOUT")
    assert "queue_timeout" in answer["groups"][0]["message"]
    wait_until(lambda: len(cluster.jobs()) == 1, 30, "the waiting job is gone")
    cli.run("workflow", "cancel", workflow, "--wait", "60")


@pytest.mark.ssh
def test_a_restarted_login_node_loses_nothing(far_cluster: Cluster) -> None:
    cli, go = far_cluster.cli, far_cluster.cli.folder / "go"
    workflow, job = _runs(far_cluster, SPIN.replace("sleep 600", f"while [ ! -e {go} ]; do sleep 0.2; done; echo late"))
    assert far_cluster.login is not None
    far_cluster.login.restart()
    wait_until(lambda: "reachable again" in cli.run("workflow", "events", workflow).out, 60, "the nodes are reached again")
    go.touch()
    assert cli.await_status(workflow, "COMPLETED", "FAILED")["status"] == "COMPLETED"
    assert (cli.logs(workflow).count("late"), far_cluster.job_of(workflow)) == (2, job)
    assert far_cluster.login.connections() <= 4


def test_reap_ends_jobs_of_ended_workflows_and_names_those_of_others(cluster: Cluster) -> None:
    cli = cluster.cli
    done = cli.run("workflow", "submit", cli.spec(SPIN.replace("sleep 600", "true")), "--wait")
    assert done.code == 0, done.err
    uuid = cli.query("spin-1")["uuid"]

    def submitted(marker: str) -> str:
        return cluster.command("sbatch", "--parsable", f"--comment={marker}", "--output=/dev/null", "--wrap=sleep 600").strip()

    ours, foreign = submitted(f"distflow:{uuid}/train/0"), submitted(f"distflow:{'a' * 32}/train/0")
    assert "would stop" in cli.run("node", "reap", "--dry-run").out
    shown = cli.run("node", "reap").out
    assert f"job {ours}" in shown
    assert f"job {foreign}" in shown
    assert "skipped" in shown
    wait_until(lambda: cluster.jobs() == [foreign], 30, "only the job of another submitter is left")
    cluster.command("scancel", foreign)


@pytest.mark.timeout(400)
def test_a_preempted_gang_and_one_on_a_lost_node_name_the_cause(cluster: Cluster) -> None:
    cli = cluster.cli
    cluster.slurm.add_partition("urgent", PriorityTier="10", PreemptMode="OFF")
    workflow, _ = _runs(cluster, FOREVER)
    urgent = cluster.command(
        "sbatch", "--parsable", "-p", "urgent", "-N2", "-c16", "--output=/dev/null", "--wrap=sleep 600"
    ).strip()
    answer = cli.await_status(workflow, "FAILED_PREEMPTED", "FAILED", "FAILED_SERVER_ERROR")
    assert answer["status"] == "FAILED_PREEMPTED", answer
    cluster.command("scancel", urgent)
    workflow, _ = _runs(cluster)
    cluster.slurm.kill_node("n2")
    try:
        answer = cli.await_status(workflow, "FAILED_BACKEND_ERROR", "FAILED", "FAILED_SERVER_ERROR", timeout=90)
        assert answer["status"] == "FAILED_BACKEND_ERROR", answer
        assert answer["groups"][0]["first_cause"]["reason"] == "NODE_LOST"
    finally:
        cluster.slurm.start_node("n2")
        cluster.slurm.wait_for_nodes("n2")


def test_a_job_without_a_supervisor_ends_by_itself(cluster: Cluster) -> None:
    cli = cluster.cli
    cluster.configure(slurm={"idle_release": "2s"})
    go = cli.folder / "go"
    _runs(cluster, SPIN.replace("sleep 600", f"while [ ! -e {go} ]; do sleep 0.2; done; echo late"))
    cli.kill_supervisor()
    go.touch()
    cluster.await_no_jobs()
    # The next command starts a supervisor, which finds the ends and the output on the login node.
    assert cli.await_status("spin-1", "COMPLETED", "FAILED", "FAILED_BACKEND_ERROR")["status"] == "COMPLETED"
    assert cli.logs("spin-1").count("late") == 2


def test_a_job_that_is_canceled_from_outside_names_who_did_it(cluster: Cluster) -> None:
    cli = cluster.cli
    workflow, job = _runs(cluster)
    cluster.command("scancel", job)
    answer = cli.await_status(workflow, "FAILED_CANCELED", "FAILED")
    assert answer["status"] == "FAILED_CANCELED", answer
    assert "scancel" in answer["groups"][0]["message"]


def test_a_killed_supervisor_loses_nothing(cluster: Cluster) -> None:
    cli = cluster.cli
    go = cli.folder / "go"
    workflow, job = _runs(cluster, SPIN.replace("sleep 600", f"while [ ! -e {go} ]; do sleep 0.2; done; echo late"))
    waiting = cli.submit(cli.spec(FOREVER, "second.yaml"))
    wait_until(lambda: len(cluster.jobs()) == 2, 30, "both have a job")
    cli.kill_supervisor()
    go.touch()
    assert cli.await_status(workflow, "COMPLETED", "FAILED")["status"] == "COMPLETED"
    assert cluster.job_of(workflow) == job
    assert cli.logs(workflow).count("late") == 2
    cli.await_running(waiting)
    assert len(cluster.jobs()) == 1, "no second job was made"
    cli.run("workflow", "cancel", waiting, "--wait", "60")


@pytest.mark.timeout(400)
def test_a_controller_that_is_away_for_a_while_loses_nothing(cluster: Cluster) -> None:
    cli = cluster.cli
    go = cli.folder / "go"
    workflow, _ = _runs(cluster, SPIN.replace("sleep 600", f"while [ ! -e {go} ]; do sleep 0.2; done; exit 3"))
    cluster.slurm.stop_controller()
    try:
        go.touch()
        answer = cli.await_status(workflow, "FAILED")
        assert answer["groups"][0]["first_cause"]["exit_code"] == 3
        later = cli.submit(cli.spec(SPIN.replace("sleep 600", "true"), "second.yaml"))
        wait_until(lambda: cli.query(later)["groups"][0]["message"], 120, "it waits")
    finally:
        cluster.slurm.start_controller()
    cli.await_status(later, "COMPLETED", timeout=120)


@pytest.mark.timeout(400)
def test_a_killed_resident_ends_the_job_and_the_gang(cluster: Cluster) -> None:
    cli = cluster.cli
    workflow, _ = _runs(cluster)
    for pid in cluster.slurm.processes("n2"):
        if _words(pid)[-2:-1] == [b"node"]:
            os.kill(pid, signal.SIGKILL)
    cli.await_status(workflow, "FAILED", "FAILED_BACKEND_ERROR", timeout=120)
    cluster.await_no_jobs()
    # Clusters with cgroups kill them with the job. This one finds only descendants of its own daemons.
    for pid in cluster.slurm.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return []
