"""The Slurm cluster of the tests itself."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest

from distflow.testing.slurm import Slurm, missing_slurm
from distflow.testing.waiting import is_alive, wait_until

_DAEMONS = """#!/bin/sh
srun sh -c 'setsid sleep 300 & wait'
"""


def _submit(cluster: Slurm, *options: str) -> str:
    return cluster.run("sbatch", "--parsable", "--nodes=2", "--output=/dev/null", *options, stdin=_DAEMONS).strip()


def _processes(cluster: Slurm, node: str) -> list[int]:
    found = []
    for pid in cluster.processes(node):
        with contextlib.suppress(FileNotFoundError):
            found += [pid] if Path(f"/proc/{pid}/comm").read_text() == "sleep\n" else []
    return found


def _pairs(cluster: Slurm) -> list[int]:
    """Return the processes of both nodes; empty until both have one."""
    first, second = (_processes(cluster, node) for node in ("n1", "n2"))
    return first + second if first and second else []


def test_steps_get_their_gpus_on_each_node(slurm: Slurm) -> None:
    printed = slurm.run("srun", "--nodes=2", "--gres=gpu:2", "sh", "-c", "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES")
    assert sorted(printed.splitlines()) == ["n1 0,1", "n2 0,1"]


def test_a_job_ends_with_all_of_its_processes(slurm: Slurm) -> None:
    job = _submit(slurm)
    pids = wait_until(lambda: _pairs(slurm), what="the job runs on both nodes")
    slurm.run("scancel", job)
    wait_until(lambda: not any(map(is_alive, pids)), what="the job's processes have ended")


def test_a_cluster_preempts_jobs_loses_nodes_and_leaves_no_process(tmp_path: Path) -> None:
    if why := missing_slurm():
        pytest.skip(why)
    with Slurm(tmp_path / "cluster", options={"KillWait": "1"}) as cluster:
        cluster.add_partition("urgent", PriorityTier="10")
        job = _submit(cluster, "--exclusive")
        preempted = wait_until(lambda: _pairs(cluster), what="the job runs on both nodes")
        _submit(cluster, "--exclusive", "--partition=urgent")
        wait_until(lambda: "JobState=PREEMPTED" in cluster.run("scontrol", "show", "job", job), what="the job was preempted")
        wait_until(lambda: not any(map(is_alive, preempted)), what="the processes of the preempted job have ended")
        pids = wait_until(lambda: _pairs(cluster), what="the urgent job runs")
        cluster.stop_controller()
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run([cluster.commands / "squeue"], timeout=0.2, check=True)
        cluster.start_controller()
        cluster.kill_node("n2", with_jobs=False)
        assert _processes(cluster, "n2")
        cluster.start_node("n2")
        cluster.kill_node("n2")
        assert not cluster.processes("n2")
    assert not cluster.processes()
    assert not any(map(is_alive, pids))
