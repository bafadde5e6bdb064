"""Gangs on a real Slurm cluster, from its login node. Faults are real."""

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
from scenarios.cluster import SHORT, SPIN, SPIN_ON_BOTH_NODES, Cluster
from scenarios.conftest import Cli
from scenarios.lab import copy_specs


def test_a_gang_runs_in_a_job_with_its_gpus_until_scancel_and_reap_ends_its_other_jobs(cluster: Cluster) -> None:
    cli = cluster.cli
    workflow, job = cluster.start()
    tasks = cli.tasks(workflow)
    assert {name: task["node_name"] for name, task in tasks.items()} == {"master": f"n1@{job}", "worker": f"n2@{job}"}
    assert re.search(r"\[master\] \d,\d on ", cli.await_log(workflow, " on "))
    assert cli.run("workflow", "exec", workflow, "worker", "--entry", "echo there").out == "there\n"
    cluster.command("scancel", job)
    answer = cli.await_status(workflow, "FAILED_CANCELED", "FAILED")
    assert answer["status"] == "FAILED_CANCELED", answer
    assert "scancel" in answer["groups"][0]["message"]

    def submit_job(marker: str) -> str:
        return cluster.command("sbatch", "--parsable", f"--comment={marker}", "--output=/dev/null", "--wrap=sleep 600").strip()

    ours, foreign = submit_job(f"distflow:{answer['uuid']}/train/0"), submit_job(f"distflow:{'a' * 32}/train/0")
    assert "would stop" in cli.run("node", "reap", "--dry-run").out
    shown = cli.run("node", "reap").out
    assert f"job {ours}" in shown
    assert f"job {foreign}" in shown
    assert "skipped" in shown
    wait_until(lambda: cluster.jobs() == [foreign], 30, "only the job of another submitter is left")
    cluster.command("scancel", foreign)


@pytest.mark.parametrize("option", ["gpus-per-node", "gpus-per-task"])
def test_a_heterogeneous_job_has_the_gpus_of_other_options_and_the_exit_code_of_its_gang(cluster: Cluster, option: str) -> None:
    cli, go = cluster.cli, cluster.cli.folder / "go"
    cluster.configure(slurm={"gpu_option": option, "gres": "gpu:h100"})
    text = SPIN.replace("name: worker,", "name: worker, resource: small,").replace(
        'echo "rank', 'echo "$CUDA_VISIBLE_DEVICES for rank'
    )
    text = text.replace("sleep 600", f"while [ ! -e {go} ]; do sleep 0.2; done; exit 7", 1)
    text = text.replace("{default: {gpu: 2, cpu: 1}}", "{default: {gpu: 2, cpu: 1}, small: {gpu: 3, cpu: 2}}")
    workflow, _ = cluster.start(text)
    assert re.search(r"\[master\] \d,\d on ", cli.await_log(workflow, " on "))
    assert re.search(r"\[worker\] \d,\d,\d for rank 1", cli.await_log(workflow, " for rank "))
    assert cli.run("workflow", "exec", workflow, "worker", "--entry", "echo there").out == "there\n"
    go.touch()
    assert _states_of_jobs(cluster, workflow) == ["FAILED 7:0"] * 2


def test_the_state_of_the_job_shows_how_the_gang_ended(cluster: Cluster, repository: Path) -> None:
    cli = cluster.cli
    done = cli.run("workflow", "submit", str(copy_specs(cli, repository) / "hello_world.yaml"), "--wait")
    assert done.code == 0, done.err + done.out
    assert "rank 0 of 2" in done.out
    assert "rank 1 of 2" in done.out
    assert _states_of_jobs(cluster, "hello-world-1") == ["COMPLETED 0:0"]
    cli.run("workflow", "submit", cli.spec(SPIN.replace("sleep 600", "kill -KILL $$", 1)), "--wait")
    assert _states_of_jobs(cluster, "spin-1") == ["FAILED 137:0"]
    assert not list(cli.top.glob("distflow-job-*")), "no log is left"


def _states_of_jobs(cluster: Cluster, workflow: str) -> list[str]:
    """Wait for the end of all jobs, and return the state and exit code of each component of a workflow's job."""
    cluster.await_no_jobs()
    shown = cluster.command("scontrol", "show", "job", "--oneliner", cluster.job_of(workflow))
    return [f"{state} {code}" for state, code in re.findall(r"JobState=(\S+) .* ExitCode=(\S+)", shown)]


def test_a_waiting_gang_shows_slurms_reason_and_ends_by_cancel_or_its_queue_timeout(cluster: Cluster) -> None:
    cli = cluster.cli
    blocker = cluster.command("sbatch", "--parsable", "-N2", "-c16", "--output=/dev/null", "--wrap=sleep 600").strip()
    patient = cli.submit(cli.spec(SPIN_ON_BOTH_NODES))
    cli.await_group_message(patient, "Resources")
    short = SPIN_ON_BOTH_NODES.replace("  name: spin\n", "  name: spin\n  timeout: {queue_timeout: 3s}\n", 1)
    impatient = cli.submit(cli.spec(short, "second.yaml"))
    answer = cli.await_status(impatient, "FAILED_QUEUE_TIMEOUT")
    assert "queue_timeout" in answer["groups"][0]["message"]
    wait_until(lambda: len(cluster.jobs()) == 1, 30, "the job of the impatient gang is gone")
    listed = cluster.command("squeue", "-h", "-t", "all", "-o", "%k %T")
    assert f"{answer['uuid']}/train/0 CANCELLED" in listed  # codespell:ignore
    assert cli.run("workflow", "cancel", patient, "--wait", "60").code == 0
    assert cli.query(patient)["status"] == "FAILED_CANCELED"
    cluster.await_no_jobs()
    cluster.command("scancel", blocker)


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


@pytest.fixture
def lone_cluster(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm for this test alone: after a restart of its controller, Slurm 22.05 may count free GPUs as used."""
    if why := missing_slurm():
        pytest.skip(why)
    # Without a controller, commands fail after `MessageTimeout`.
    with Slurm(tmp_path_factory.mktemp("lone"), options={"MessageTimeout": "4"}) as slurm:
        made = Cluster(cli, slurm)
        yield made
        made.await_no_jobs()


@pytest.mark.timeout(400)
def test_a_controller_that_is_away_for_a_while_loses_nothing(lone_cluster: Cluster) -> None:
    cluster, cli = lone_cluster, lone_cluster.cli
    go = cli.folder / "go"
    workflow, job = cluster.start(SPIN.replace("sleep 600", f"while [ ! -e {go} ]; do sleep 0.2; done; exit 3"))
    cluster.slurm.stop_controller()
    try:
        go.touch()
        answer = cli.await_status(workflow, "FAILED")
        assert answer["groups"][0]["first_cause"]["exit_code"] == 3
        later = cli.submit(cli.spec(SHORT, "second.yaml"))
        wait_until(lambda: cli.query(later)["groups"][0]["message"], 120, "the second workflow waits")
        # The supervisor cannot end the first job yet, so the same supervisor accepted the second workflow.
        assert "all workflows have ended" not in (cli.state / "supervisor.log").read_text()
    finally:
        processes = cluster.slurm.processes()
        cluster.slurm.start_controller()
    wait_until(
        lambda: "RUNNING" not in cluster.command("squeue", "-h", "-t", "all", "-j", job, "-o", "%T"), 60, "the job has ended"
    )
    _kill(processes)  # otherwise, the job is COMPLETING for a minute
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
    _kill(cluster.slurm.processes())


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return []
