"""Gangs on a real Slurm cluster, from its login node and through it over SSH. Faults are real."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from distflow.testing.slurm import Slurm, missing_slurm
from distflow.testing.waiting import wait_until
from scenarios.cluster import SPIN, SPIN_ON_BOTH_NODES, Cluster
from scenarios.conftest import Cli
from scenarios.lab import copy_specs


def test_a_gang_runs_in_a_job_with_its_gpus_and_cancel_ends_the_job(any_cluster: Cluster, repository: Path) -> None:
    cli = any_cluster.cli
    workflow, job = any_cluster.start()
    tasks = cli.tasks(workflow)
    assert {name: task["node_name"] for name, task in tasks.items()} == {"master": f"n1@{job}", "worker": f"n2@{job}"}
    assert re.search(r"\[master\] \d,\d on ", cli.await_log(workflow, " on "))
    assert cli.run("workflow", "exec", workflow, "worker", "--entry", "echo there").out == "there\n"
    assert cli.run("workflow", "cancel", workflow, "--wait", "60").code == 0
    any_cluster.await_no_jobs()
    done = cli.run("workflow", "submit", str(copy_specs(cli, repository) / "hello_world.yaml"), "--wait")
    assert done.code == 0, done.err + done.out
    assert "rank 0 of 2" in done.out
    assert "rank 1 of 2" in done.out


@pytest.mark.parametrize("option", ["gpus-per-node", "gpus-per-task"])
def test_gpus_can_be_requested_by_other_options_also_in_a_heterogeneous_job(cluster: Cluster, option: str) -> None:
    cluster.configure(slurm={"gpu_option": option, "gres": "gpu:h100"})
    text = SPIN.replace("name: worker,", "name: worker, resource: small,").replace(
        'echo "rank', 'echo "$CUDA_VISIBLE_DEVICES for rank'
    )
    text = text.replace("{default: {gpu: 2, cpu: 1}}", "{default: {gpu: 2, cpu: 1}, small: {gpu: 3, cpu: 2}}")
    workflow, _ = cluster.start(text)
    assert re.search(r"\[master\] \d,\d on ", cluster.cli.await_log(workflow, " on "))
    assert re.search(r"\[worker\] \d,\d,\d for rank 1", cluster.cli.await_log(workflow, " for rank "))
    assert cluster.cli.run("workflow", "exec", workflow, "worker", "--entry", "echo there").out == "there\n"
    assert cluster.cli.run("workflow", "cancel", workflow, "--wait", "60").code == 0


@pytest.mark.parametrize(
    ("spec", "states"),
    [
        (SPIN.replace("sleep 600", "true"), {"COMPLETED 0:0"}),
        (SPIN.replace("sleep 600", "exit 7", 1), {"FAILED 7:0"}),
        (SPIN.replace("sleep 600", "kill -KILL $$", 1), {"FAILED 137:0"}),
        # A lead of another shape makes a heterogeneous job.
        (
            SPIN.replace("lead: true,", "lead: true, resource: small,")
            .replace("sleep 600", "exit 7", 1)
            .replace("cpu: 1}", "cpu: 1}, small: {gpu: 1}"),
            {"FAILED 7:0"},
        ),
    ],
    ids=["completed", "exit", "signal", "het"],
)
def test_the_state_of_the_job_shows_how_the_gang_ended(cluster: Cluster, spec: str, states: set[str]) -> None:
    cli = cluster.cli
    cli.run("workflow", "submit", cli.spec(spec), "--wait")
    cluster.await_no_jobs()
    shown = cluster.command("scontrol", "show", "job", "--oneliner", cluster.job_of("spin-1"))
    found = {f"{state} {code}" for state, code in re.findall(r"JobState=(\S+) .* ExitCode=(\S+)", shown)}
    assert found == states, shown
    assert not list(cli.top.glob("distflow-job-*")), "no log is left"


def test_a_waiting_gang_shows_slurms_reason_and_cancel_removes_its_job(cluster: Cluster) -> None:
    cli = cluster.cli
    first, _ = cluster.start(SPIN_ON_BOTH_NODES)
    second = cli.submit(cli.spec(SPIN_ON_BOTH_NODES, "second.yaml"))
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
    workflow, job = far_cluster.start(SPIN.replace("sleep 600", f"while [ ! -e {go} ]; do sleep 0.2; done; echo late"))
    assert far_cluster.login is not None
    far_cluster.login.restart()
    wait_until(lambda: "reachable again" in cli.run("workflow", "events", workflow).out, 60, "the nodes are reachable again")
    go.touch()
    assert cli.await_status(workflow, "COMPLETED", "FAILED")["status"] == "COMPLETED"
    assert (cli.logs(workflow).count("late"), far_cluster.job_of(workflow)) == (2, job)
    assert far_cluster.login.connections() <= 4


def test_reap_ends_jobs_of_ended_workflows_and_names_those_of_others(cluster: Cluster) -> None:
    cli = cluster.cli
    done = cli.run("workflow", "submit", cli.spec(SPIN.replace("sleep 600", "true")), "--wait")
    assert done.code == 0, done.err
    uuid = cli.query("spin-1")["uuid"]

    def submit_job(marker: str) -> str:
        return cluster.command("sbatch", "--parsable", f"--comment={marker}", "--output=/dev/null", "--wrap=sleep 600").strip()

    ours, foreign = submit_job(f"distflow:{uuid}/train/0"), submit_job(f"distflow:{'a' * 32}/train/0")
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
    workflow, _ = cluster.start(SPIN_ON_BOTH_NODES)
    urgent = cluster.command(
        "sbatch", "--parsable", "-p", "urgent", "-N2", "-c16", "--output=/dev/null", "--wrap=sleep 600"
    ).strip()
    answer = cli.await_status(workflow, "FAILED_PREEMPTED", "FAILED", "FAILED_SERVER_ERROR")
    assert answer["status"] == "FAILED_PREEMPTED", answer
    cluster.command("scancel", urgent)
    workflow, _ = cluster.start()
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
    cluster.start(SPIN.replace("sleep 600", f"while [ ! -e {go} ]; do sleep 0.2; done; echo late"))
    cli.kill_supervisor()
    go.touch()
    cluster.await_no_jobs()
    # The next command starts a supervisor, which finds the exit codes and the output on the login node.
    assert cli.await_status("spin-1", "COMPLETED", "FAILED", "FAILED_BACKEND_ERROR")["status"] == "COMPLETED"
    assert cli.logs("spin-1").count("late") == 2


def test_a_job_that_is_canceled_with_scancel_is_reported(cluster: Cluster) -> None:
    cli = cluster.cli
    workflow, job = cluster.start()
    cluster.command("scancel", job)
    answer = cli.await_status(workflow, "FAILED_CANCELED", "FAILED")
    assert answer["status"] == "FAILED_CANCELED", answer
    assert "scancel" in answer["groups"][0]["message"]


def test_a_killed_supervisor_loses_nothing(cluster: Cluster) -> None:
    cli = cluster.cli
    go = cli.folder / "go"
    workflow, job = cluster.start(SPIN.replace("sleep 600", f"while [ ! -e {go} ]; do sleep 0.2; done; echo late"))
    waiting = cli.submit(cli.spec(SPIN_ON_BOTH_NODES, "second.yaml"))
    wait_until(lambda: len(cluster.jobs()) == 2, 30, "both have a job")
    cli.kill_supervisor()
    go.touch()
    assert cli.await_status(workflow, "COMPLETED", "FAILED")["status"] == "COMPLETED"
    assert cluster.job_of(workflow) == job
    assert cli.logs(workflow).count("late") == 2
    cli.await_running(waiting)
    assert len(cluster.jobs()) == 1, "no second job was made"
    cli.run("workflow", "cancel", waiting, "--wait", "60")


@pytest.fixture
def lone_cluster(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm for this test alone: after a restart of its controller, Slurm 22.05 may count free GPUs as used."""
    if why := missing_slurm():
        pytest.skip(why)
    with Slurm(tmp_path_factory.mktemp("lone")) as slurm:
        made = Cluster(cli, slurm)
        yield made
        made.await_no_jobs()


@pytest.mark.timeout(400)
def test_a_controller_that_is_away_for_a_while_loses_nothing(lone_cluster: Cluster) -> None:
    cluster, cli = lone_cluster, lone_cluster.cli
    go = cli.folder / "go"
    workflow, _ = cluster.start(SPIN.replace("sleep 600", f"while [ ! -e {go} ]; do sleep 0.2; done; exit 3"))
    cluster.slurm.stop_controller()
    try:
        go.touch()
        answer = cli.await_status(workflow, "FAILED")
        assert answer["groups"][0]["first_cause"]["exit_code"] == 3
        later = cli.submit(cli.spec(SPIN.replace("sleep 600", "true"), "second.yaml"))
        wait_until(lambda: cli.query(later)["groups"][0]["message"], 120, "the second workflow waits")
        # The supervisor cannot end the first job yet, so the same supervisor accepted the second workflow.
        assert "all workflows have ended" not in (cli.state / "supervisor.log").read_text()
    finally:
        cluster.slurm.start_controller()
    cli.await_status(later, "COMPLETED", timeout=240)


@pytest.mark.timeout(400)
def test_a_killed_resident_program_ends_the_job_and_the_gang(cluster: Cluster) -> None:
    cli = cluster.cli
    workflow, _ = cluster.start()
    for pid in cluster.slurm.processes("n2"):
        if _arguments(pid)[-2:-1] == [b"node"]:
            os.kill(pid, signal.SIGKILL)
    cli.await_status(workflow, "FAILED", "FAILED_BACKEND_ERROR", timeout=120)
    cluster.await_no_jobs()
    # Clusters with cgroups kill these processes with the job. This cluster kills only descendants of its daemons.
    for pid in cluster.slurm.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return []
