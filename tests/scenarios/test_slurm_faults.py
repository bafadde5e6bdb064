"""Faults of Slurm, of the link to its login node and of the supervisor: each gang ends as it should, and no job is left."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distflow.testing.kernel import Network
from distflow.testing.slurm import Slurm, missing_slurm
from distflow.testing.sshd import make_key
from distflow.testing.waiting import wait_until
from scenarios.cluster import SPIN, Cluster
from scenarios.conftest import Cli

COUNT = "i=0; while [ ! -e GO ]; do echo line $i; i=$((i+1)); sleep 0.2; done; echo late"
"""Shell commands of a task: print numbered lines until the file GO exists."""
PHASES = ("requesting", "submitted", "queued", "granted", "preparing", "running", "stopping", "collecting")


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
def test_a_login_node_that_is_cut_off_for_a_while_loses_nothing(
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
    cluster.cli.await_log(first, "line 3")
    login.cut()
    cut_at = time.monotonic()
    try:
        # One gang ends meanwhile, and another one is submitted.
        second = cli.submit(cli.spec(SPIN.replace("sleep 600", "true"), "second.yaml"))
        wait_until(lambda: "unreachable" in cli.run("workflow", "events", first).out, 90, "the nodes are unreachable")
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
def test_a_command_needs_one_connection_to_the_login_node_also_after_the_end_of_the_job(far_cluster: Cluster) -> None:
    cli, login = far_cluster.cli, far_cluster.login
    assert login is not None

    def logins() -> int:
        return login.log.read_text().count("Accepted publickey")

    workflow, _ = far_cluster.start(
        counting_spec(cli.folder / "go").replace("echo late", "echo late >{{output}}/word; echo late")
    )
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


class InterruptedGang:
    """A gang whose supervisor is killed in one phase."""

    def __init__(self, cluster: Cluster, phase: str) -> None:
        self.cluster = cluster
        self.cli = cluster.cli
        self.phase = phase
        self.go = self.cli.folder / "go"
        self.starts = self.cli.folder / "starts"
        self.workflow = ""
        self._blocker = ""

    def begin(self) -> None:
        """Submit the gang, and return when it is in the phase."""
        if self.phase in ("requesting", "submitted"):
            self._delay_sbatch()
        if self.phase == "queued":
            command = ("sbatch", "--parsable", "-N2", "-c16", "--output=/dev/null", "--wrap=sleep 600")
            self._blocker = self.cluster.command(*command).strip()
        task = f"echo $DISTFLOW_TASK >>{self.starts}; trap : TERM; " + COUNT.replace("GO", str(self.go))
        if self.phase == "collecting":
            task = task.replace("echo late", "head -c 80000000 /dev/urandom >{{output}}/data; echo late")
        spec = SPIN.replace("sleep 600", task)
        if self.phase == "collecting":
            spec = spec.replace("lead: true,", f"lead: true, outputs: [{{url: 'file://{self.cli.folder}/wanted'}}],")
        if self.phase == "preparing":
            (self.cli.folder / "large").write_bytes(os.urandom(30_000_000))
            spec = spec.replace("lead: true,", f"lead: true, files: [{{path: /large, localpath: {self.cli.folder}/large}}],")
        self.workflow = self.cli.submit(self.cli.spec(spec))
        conditions: dict[str, Callable[[], object]] = {
            "requesting": (self.cli.folder / "sbatch-before").exists,
            "submitted": (self.cli.folder / "sbatch-after").exists,
            "queued": self.cluster.jobs,
            "granted": lambda: "RUNNING" in self.cluster.command("squeue", "-h", "-o", "%T"),
        }
        if self.phase in conditions:
            wait_until(conditions[self.phase], 60, f"the gang is {self.phase}")
            return
        if self.phase == "preparing":  # commands would be too slow to see this phase
            self.cli.await_record(self.workflow, lambda record: record.groups[0].tasks[0].status == "INITIALIZING", 60)
            return
        self.cli.await_running(self.workflow)
        self.cli.await_log(self.workflow, "line 2")
        if self.phase == "stopping":
            self.cli.run("workflow", "cancel", self.workflow)
            wait_until(lambda: "STOPPING" in str(self.cli.query(self.workflow)), 30, "the gang is stopping")
        if self.phase == "collecting":
            self.go.touch()
            blobs = self.cli.state / "blobs"
            wait_until(lambda: any(path.name.startswith(".") or path.suffix for path in blobs.rglob("*")), 60, "collecting")

    def remove_obstacle(self) -> None:
        """Remove the obstacle that keeps the gang in its phase."""
        (self.cli.folder / "sbatch-go").touch()
        if self._blocker:
            self.cluster.command("scancel", self._blocker)

    def _delay_sbatch(self) -> None:
        """Let ``sbatch`` wait, before or after it submits the job."""
        folder, commands = self.cli.folder, self.cli.folder / "bin"
        commands.mkdir()
        wait = f"while [ ! -e {folder}/sbatch-go ]; do sleep 0.1; done"
        before, after = (f"touch {folder}/sbatch-{when}; {wait}" for when in ("before", "after"))
        script = f'{self.cluster.slurm.commands}/sbatch "$@"; code=$?'
        text = f"{before}; {script}" if self.phase == "requesting" else f"{script}; {after}"
        (commands / "sbatch").write_text(f"#!/bin/sh\n{text}; exit $code\n")
        (commands / "sbatch").chmod(0o755)
        self.cli.environment["PATH"] = f"{commands}:{self.cli.environment['PATH']}"


@pytest.mark.parametrize("phase", PHASES)
def test_another_supervisor_continues_in_every_phase(cluster: Cluster, phase: str) -> None:
    cluster.configure(stop_grace="1s")
    cli, gang = cluster.cli, InterruptedGang(cluster, phase)
    gang.begin()
    cli.kill_supervisor()
    gang.remove_obstacle()
    if phase == "stopping":
        assert cli.await_status(gang.workflow, "FAILED_CANCELED", timeout=90)
    else:
        if phase != "collecting":
            cli.await_running(gang.workflow)
            cli.await_log(gang.workflow, "line 2")
            gang.go.touch()
        assert cli.await_status(gang.workflow, "COMPLETED", "FAILED", timeout=90)["status"] == "COMPLETED"
        for task in ("master", "worker"):
            assert_complete(lines_of(cluster, gang.workflow, task))
    assert sorted(gang.starts.read_text().split()) == ["master", "worker"], "each task started once"
    if phase == "collecting":
        wait_until((cli.folder / "wanted" / "data").exists, 60, "the output has arrived")
        assert (cli.folder / "wanted" / "data").stat().st_size == 80_000_000
    cluster.await_no_jobs()


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in ("running", "collecting")])
def test_a_job_without_a_supervisor_ends_before_the_start_and_while_stopping(cluster: Cluster, phase: str) -> None:
    cluster.configure(slurm={"idle_release": "2s"}, start_barrier="10s", stop_grace="1s")
    gang = InterruptedGang(cluster, phase)
    gang.begin()
    cluster.cli.kill_supervisor()
    gang.remove_obstacle()
    if phase in ("requesting", "submitted"):
        wait_until(cluster.jobs, 30, "the job was submitted")
    cluster.await_no_jobs()
    assert not gang.starts.exists() or phase == "stopping"
    cluster.cli.run("workflow", "cancel", gang.workflow, "--wait", "60")
    cluster.await_no_jobs()


def test_a_lost_state_directory_is_rebuilt_from_the_jobs(any_cluster: Cluster) -> None:
    cli, go = any_cluster.cli, any_cluster.cli.folder / "go"
    workflow, job = any_cluster.start(counting_spec(go))
    tasks = cli.await_running(workflow)
    second = cli.submit(cli.spec(counting_spec(go).replace("name: spin", "name: other"), "second.yaml"))
    others = cli.await_running(second)
    cli.await_log(second, "line 2")
    cli.kill_supervisor()
    shutil.rmtree(cli.state)
    done = cli.run("workflow", "adopt")
    assert (done.code, sorted(done.out.splitlines()[::2])) == (0, ["other-1: adopted", "spin-1: adopted"]), done.out + done.err
    for name, before in ((workflow, tasks), (second, others)):
        adopted = cli.await_running(name)
        assert {task: (one["node_name"], one["pid"]) for task, one in adopted.items()} == {
            task: (one["node_name"], one["pid"]) for task, one in before.items()
        }
    assert len(any_cluster.jobs()) == 2
    assert cli.run("workflow", "adopt").out == "Nothing to adopt: the store has every workflow that the nodes reported.\n"
    go.touch()
    for name in (workflow, second):
        assert cli.await_status(name, "COMPLETED", "FAILED", timeout=90)["status"] == "COMPLETED"
        for task in ("master", "worker"):
            assert_complete(lines_of(any_cluster, name, task))
    assert any_cluster.job_of(workflow) == job
    any_cluster.await_no_jobs()
