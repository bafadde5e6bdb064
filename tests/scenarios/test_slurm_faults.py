"""Faults of Slurm, of the link to its login node and of the supervisor: each gang ends as it should, and no job is left."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from distflow.testing.kernel import Network
from distflow.testing.slurm import Slurm, missing_slurm
from distflow.testing.sshd import make_key
from distflow.testing.waiting import wait_until
from scenarios.cluster import SHORT, SPIN, SPIN_ON_BOTH_NODES, Cluster
from scenarios.conftest import Cli

COUNT = "i=0; while [ ! -e GO ]; do echo line $i; i=$((i+1)); sleep $((i > 9)).2; done; echo late"
"""Shell commands of a task: print numbered lines until the file GO exists, first five and later one in a second."""
GATED = ("requesting", "submitted", "preparing", "collecting")
"""Phases of a gang in which it waits at a gate. The others are queued, granted, running and stopping."""
SIZE = 2_000_000
"""Bytes of each transferred file."""
WAIT = """#!/bin/sh
wait_at() {
  [ ! -e FOLDER/$1.closed ] || touch FOLDER/$1.reached
  while [ -e FOLDER/$1.closed ]; do sleep 0.1; done
}
"""
SBATCH = """wait_at requesting
REAL/sbatch "$@"
code=$?
wait_at submitted
exit $code
"""
SRUN = """case "$*" in
*.receiver) { dd bs=64k count=8 status=none; wait_at preparing; cat; } | REAL/srun "$@" ;;
*.sender) REAL/srun "$@" | { dd bs=64k count=8 status=none; wait_at collecting; cat; } ;;
*) exec REAL/srun "$@" ;;
esac
"""
"""Transfers of files wait after their first blocks."""


def counting_spec(go: Path) -> str:
    return SPIN.replace("sleep 600", COUNT.replace("GO", str(go)))


def lines_of(cluster: Cluster, workflow: str, task: str) -> list[str]:
    """The output of one task, without its first line."""
    lines = cluster.cli.logs(workflow, "--task", task).splitlines()
    return [text for line in lines if (text := line.rpartition("] ")[2]).startswith(("line ", "late"))]


def assert_complete(lines: list[str]) -> None:
    """Check that each line was printed once, in order."""
    assert lines == [*(f"line {number}" for number in range(len(lines) - 1)), "late"]


# -- Slurm ends the job -----------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_a_job_that_reaches_its_time_limit_ends_the_gang_as_exec_timeout(cluster: Cluster) -> None:
    workflow, job = cluster.start(counting_spec(cluster.cli.folder / "go"))
    cluster.cli.await_log(workflow, "line 3")
    cluster.command("scontrol", "update", f"JobId={job}", "TimeLimit=5")
    cluster.command("scontrol", "update", f"JobId={job}", "EndTime=now")  # Slurm checks the limits every 30 s
    answer = cluster.cli.await_status(workflow, "FAILED_EXEC_TIMEOUT", "FAILED", "FAILED_BACKEND_ERROR", timeout=200)
    cause = answer["groups"][0]["first_cause"]
    assert (answer["status"], cause["reason"]) == ("FAILED_EXEC_TIMEOUT", "EXEC_TIMEOUT")
    assert f"Slurm job {job} reached its time limit" in answer["groups"][0]["message"]
    for task in ("master", "worker"):
        lines = lines_of(cluster, workflow, task)
        assert len(lines) > 3
        assert lines == [f"line {number}" for number in range(len(lines))]
    cluster.await_no_jobs()


@pytest.fixture
def strict_cluster(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm that measures the memory of processes, and kills steps that use more than their job requested."""
    if why := missing_slurm():
        pytest.skip(why)
    options = {
        "JobAcctGatherType": "jobacct_gather/linux", "JobAcctGatherParams": "OverMemoryKill",
        "JobAcctGatherFrequency": "task=1", "SelectTypeParameters": "CR_CPU_Memory",
    }  # fmt: skip
    with Slurm(tmp_path_factory.mktemp("strict"), options=options) as slurm:
        made = Cluster(cli, slurm)
        yield made
        made.await_no_jobs()


def test_a_job_that_exceeds_its_memory_ends_the_gang_as_evicted(strict_cluster: Cluster) -> None:
    program = "import time; print(1); kept = bytes([1]) * (600 << 20); time.sleep(600)"
    # distflow itself knows nothing of the limit, because the spec has none.
    strict_cluster.configure(slurm={"extra": ["--mem=300M"]})
    first, second = SPIN.split("- {name: worker")
    second = second.replace("sleep 600", f'exec {shlex.quote(sys.executable)} -c "{program}"')
    workflow = strict_cluster.cli.submit(strict_cluster.cli.spec(f"{first}- {{name: worker{second}"))
    answer = strict_cluster.cli.await_status(
        workflow, "FAILED_EVICTED", "FAILED", "FAILED_BACKEND_ERROR", "FAILED_SERVER_ERROR", timeout=90
    )
    cause = answer["groups"][0]["first_cause"]
    assert (answer["status"], cause["reason"], cause["task"]) == ("FAILED_EVICTED", "OOM_KILLED", "worker")
    assert "used more memory than it requested on n2" in cause["message"]
    strict_cluster.await_no_jobs()


# -- the link to the login node ---------------------------------------------------------------------------------------


@pytest.mark.ssh
@pytest.mark.timeout(400)
def test_a_login_node_that_restarts_or_is_cut_off_for_a_while_loses_nothing(
    cli: Cli, slurm: Slurm, network: Network, tmp_path_factory: pytest.TempPathFactory
) -> None:
    commands = tmp_path_factory.mktemp("commands")
    for program in slurm.commands.iterdir():
        # The daemons listen in the network of this process.
        words = ["nsenter", f"--net=/proc/{os.getpid()}/ns/net", str(program)]
        (commands / program.name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (commands / program.name).chmod(0o755)
    folder, key = tmp_path_factory.mktemp("login"), make_key(tmp_path_factory.mktemp("key") / "id")
    path = f"HOME={folder / 'home'} PATH={commands}:{os.environ['PATH']}"
    login = network.host(folder, alias="login", user_key=key, options={"SetEnv": path})
    cluster, go = Cluster(cli, slurm, login.sshd), cli.folder / "go"
    cluster.configure(ping="1s", connect_timeout="5s", node_lost_after="20s")
    first, job = cluster.start(counting_spec(go))
    login.sshd.restart()

    def changes(word: str) -> int:
        return cli.run("workflow", "events", first).out.count(word)

    wait_until(lambda: changes("reachable again") >= 2, 60, "both nodes are reachable again")
    cli.await_log(first, f"line {len(lines_of(cluster, first, 'master')) + 2}\n")
    assert login.sshd.connections() <= 4
    before = changes("unreachable:")
    login.cut()
    cut_at = time.monotonic()
    try:
        # One gang ends meanwhile, and another one is submitted.
        second = cli.submit(cli.spec(SHORT, "second.yaml"))
        wait_until(lambda: changes("unreachable:") > before, 90, "the nodes are unreachable")
        go.touch()
        wait_until(lambda: cli.query(second)["groups"][0]["message"], 60, "the reason for waiting is shown")
        wait_until(lambda: time.monotonic() > cut_at + 25, 30, "the cut is longer than node_lost_after")
    finally:
        login.heal()
    assert cli.await_status(first, "COMPLETED", "FAILED", "FAILED_BACKEND_ERROR", timeout=120)["status"] == "COMPLETED"
    assert cluster.job_of(first) == job
    for task in ("master", "worker"):
        assert_complete(lines_of(cluster, first, task))
    assert cli.await_status(second, "COMPLETED", "FAILED", "FAILED_BACKEND_ERROR", timeout=120)["status"] == "COMPLETED"
    cluster.await_no_jobs()


@pytest.mark.ssh
def test_a_gang_behind_a_login_node_needs_one_connection_for_a_command_also_after_its_end(far_cluster: Cluster) -> None:
    cli, login = far_cluster.cli, far_cluster.login
    assert login is not None

    def logins() -> int:
        return login.log.read_text().count("Accepted publickey")

    workflow, job = far_cluster.start(
        counting_spec(cli.folder / "go").replace("echo late", "echo late >{{output}}/word; echo late")
    )
    nodes = {name: task["node_name"] for name, task in cli.tasks(workflow).items()}
    assert nodes == {"master": f"n1@{job}", "worker": f"n2@{job}"}
    assert re.search(r"\[master\] \d,\d on ", cli.await_log(workflow, " on "))
    waiting = cli.submit(cli.spec(SPIN_ON_BOTH_NODES, "second.yaml"))
    wait_until(lambda: len(far_cluster.jobs()) == 2, 30, "the second gang has a job")
    assert cli.run("workflow", "cancel", waiting, "--wait", "60").code == 0
    wait_until(lambda: far_cluster.jobs() == [job], 30, "only the job of the first gang is left")
    before = logins()
    done = cli.run("workflow", "exec", workflow, "--group", "train", "--entry", "echo there")
    assert (done.code, done.out.count("there"), logins() - before) == (0, 2, 1), done.err
    (cli.folder / "go").touch()
    cli.await_status(workflow, "COMPLETED", "FAILED")
    far_cluster.await_no_jobs()
    wait_until(lambda: cli.supervisor() is None, 30, "the supervisor has no work")
    before = logins()
    done = cli.run("workflow", "fetch", workflow, "--to", str(cli.folder / "fetched"))
    assert (done.code, logins() - before) == (0, 1), done.err
    assert [path.read_text() for path in sorted((cli.folder / "fetched").rglob("word"))] == ["late\n"] * 2


# -- the supervisor ---------------------------------------------------------------------------------------------------


class Gates:
    """Commands of Slurm that wait in a phase of a gang while the phase's gate is closed."""

    def __init__(self, cluster: Cluster) -> None:
        """Put ``sbatch`` and ``srun`` into PATH. All gates are open."""
        self._folder = cluster.cli.folder / "gates"
        self._folder.mkdir()
        for name, script in (("sbatch", SBATCH), ("srun", SRUN)):
            program = self._folder / name
            text = (WAIT + script).replace("FOLDER", str(self._folder)).replace("REAL", str(cluster.slurm.commands))
            program.write_text(text)
            program.chmod(0o755)
        cluster.cli.environment["PATH"] = f"{self._folder}:{cluster.cli.environment['PATH']}"

    def close(self, phase: str) -> None:
        (self._folder / f"{phase}.closed").touch()

    def open(self, phase: str) -> None:
        (self._folder / f"{phase}.closed").unlink()

    def is_reached(self, phase: str) -> bool:
        """Return whether a command waits or has waited at the closed gate."""
        return (self._folder / f"{phase}.reached").exists()


class InterruptedGang:
    """A gang that reaches one phase after another, and stays in each until ``leave``."""

    def __init__(self, cluster: Cluster, gates: Gates, *phases: str) -> None:
        """Submit it. It is ready for these phases."""
        self.cluster = cluster
        self.cli = cluster.cli
        self.name = phases[0]
        self.go = self.cli.folder / f"{self.name}-go"
        self.starts = self.cli.folder / f"{self.name}-starts"
        self._gates = gates
        self._blocker = ""
        if "queued" in phases:
            command = ("sbatch", "--parsable", "-N2", "-c16", "--output=/dev/null", "--wrap=sleep 600")
            self._blocker = cluster.command(*command).strip()
        for phase in phases:
            if phase in GATED:
                gates.close(phase)
        self.workflow = self.cli.submit(self.cli.spec(self._spec(phases), f"{self.name}.yaml"))

    def _spec(self, phases: Sequence[str]) -> str:
        task = f"echo $DISTFLOW_TASK >>{self.starts}; trap : TERM; " + COUNT.replace("GO", str(self.go))
        lead = "lead: true,"
        if "preparing" in phases:
            (self.cli.folder / "large").write_bytes(os.urandom(SIZE))
            lead += f" files: [{{path: /large, localpath: {self.cli.folder}/large}}],"
        if "collecting" in phases:
            task = task.replace("echo late", f"head -c {SIZE} /dev/urandom >{{{{output}}}}/data; echo late")
            lead += f" outputs: [{{url: 'file://{self.cli.folder}/wanted'}}],"
        return SPIN.replace("name: spin", f"name: {self.name}").replace("sleep 600", task).replace("lead: true,", lead)

    def reach(self, phase: str) -> None:
        """Return when the gang is in the phase."""
        if phase == "queued":
            wait_until(self._waits, 60, "the gang waits, with one job")
        elif phase == "granted":
            self.cli.await_record(self.workflow, lambda record: all(task.node for task in record.groups[0].tasks), 60)
        elif phase == "running":
            self.cli.await_running(self.workflow)
            self.cli.await_log(self.workflow, "line 2")
        elif phase == "stopping":
            self.cli.await_log(self.workflow, f"line {len(lines_of(self.cluster, self.workflow, 'master')) + 2}\n")
            self.cli.run("workflow", "cancel", self.workflow)
            wait_until(lambda: "STOPPING" in str(self.cli.query(self.workflow)), 30, "the gang is stopping")
        else:
            if phase == "collecting":
                self.cli.await_running(self.workflow)
                self.go.touch()
            self.cli.await_record(self.workflow, lambda _: self._gates.is_reached(phase), 60)

    def _waits(self) -> bool:
        message = self.cli.query(self.workflow)["groups"][0]["message"]
        return "Resources" in message and len(self.cluster.jobs()) == 1

    def leave(self, phase: str) -> None:
        """Remove the obstacle that keeps the gang in the phase."""
        if phase in GATED:
            self._gates.open(phase)
        if phase == "queued":
            self.cluster.command("scancel", self._blocker)


@pytest.mark.parametrize(
    "phases",
    [("requesting", "queued", "preparing", "running", "stopping"), ("submitted", "granted", "collecting")],
    ids=["until-cancel", "until-completion"],
)
def test_another_supervisor_continues_in_every_phase(cluster: Cluster, phases: tuple[str, ...]) -> None:
    cluster.configure(stop_grace="1s")
    cli, gang, jobs = cluster.cli, InterruptedGang(cluster, Gates(cluster), *phases), set()
    for phase in phases:
        gang.reach(phase)
        cli.kill_supervisor()
        if phase != "requesting":
            jobs |= set(cluster.jobs())
        gang.leave(phase)
    answer = cli.await_status(gang.workflow, "COMPLETED", "FAILED", "FAILED_CANCELED", timeout=90)
    assert answer["status"] == ("FAILED_CANCELED" if "stopping" in phases else "COMPLETED")
    assert {cluster.job_of(gang.workflow)} == jobs, "the gang has one job"
    for task in ("master", "worker"):
        lines = lines_of(cluster, gang.workflow, task)
        assert_complete(lines if "collecting" in phases else [*lines, "late"])
    assert sorted(gang.starts.read_text().split()) == ["master", "worker"], "each task started once"
    if "collecting" in phases:
        wait_until((cli.folder / "wanted" / "data").exists, 60, "the output has arrived")
        assert (cli.folder / "wanted" / "data").stat().st_size == SIZE
    cluster.await_no_jobs()


def test_jobs_without_a_supervisor_end_in_every_phase(cluster: Cluster) -> None:
    cluster.configure(slurm={"idle_release": "10s"}, start_barrier="10s", stop_grace="1s")
    cli, gates = cluster.cli, Gates(cluster)
    running, stopping, preparing = (InterruptedGang(cluster, gates, phase) for phase in ("running", "stopping", "preparing"))
    running.reach("running")
    stopping.reach("running")
    preparing.reach("preparing")
    requesting = InterruptedGang(cluster, gates, "requesting")
    requesting.reach("requesting")
    marker = f"distflow:{cli.query(requesting.workflow)['uuid']}/"
    stopping.reach("stopping")
    cli.kill_supervisor()
    preparing.leave("preparing")
    requesting.leave("requesting")
    running.go.touch()
    wait_until(lambda: marker in cluster.command("squeue", "-h", "-t", "all", "-o", "%k"), 30, "the last job was submitted")
    cluster.await_no_jobs()
    assert not preparing.starts.exists()
    assert not requesting.starts.exists()
    # The next command starts a supervisor, which finds the exit codes and the output on the login node.
    cli.run("workflow", "cancel", *(gang.workflow for gang in (stopping, preparing, requesting)), "--wait", "60")
    assert cli.await_status(running.workflow, "COMPLETED", "FAILED", "FAILED_BACKEND_ERROR")["status"] == "COMPLETED"
    for task in ("master", "worker"):
        assert_complete(lines_of(cluster, running.workflow, task))
    cluster.await_no_jobs()


@pytest.mark.ssh
def test_a_lost_state_directory_is_rebuilt_from_the_jobs(far_cluster: Cluster) -> None:
    cli, go = far_cluster.cli, far_cluster.cli.folder / "go"
    workflow, job = far_cluster.start(counting_spec(go))
    short = SHORT.replace('["true"]', f"[sh, -c, '{COUNT.replace('GO', str(go))}']")
    second = cli.submit(cli.spec(short, "second.yaml"))
    before = {name: cli.await_running(name) for name in (workflow, second)}
    cli.await_log(second, "line 2")
    cli.kill_supervisor()
    shutil.rmtree(cli.state)
    done = cli.run("workflow", "adopt")
    assert (done.code, sorted(done.out.splitlines()[::2])) == (0, ["short-1: adopted", "spin-1: adopted"]), done.out + done.err
    for name, tasks in before.items():
        adopted = cli.await_running(name)
        assert {task: (one["node_name"], one["pid"]) for task, one in adopted.items()} == {
            task: (one["node_name"], one["pid"]) for task, one in tasks.items()
        }
    assert len(far_cluster.jobs()) == 2
    assert cli.run("workflow", "adopt").out == "Nothing to adopt: the store has every workflow that the nodes reported.\n"
    go.touch()
    for name, tasks in before.items():
        assert cli.await_status(name, "COMPLETED", "FAILED", timeout=90)["status"] == "COMPLETED"
        for task in tasks:
            assert_complete(lines_of(far_cluster, name, task))
    assert far_cluster.job_of(workflow) == job
    far_cluster.await_no_jobs()
