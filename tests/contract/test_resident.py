"""The resident program and its relays in jobs of a real Slurm cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from contract.conftest import NodeUnderTest, processes_with, submit
from distflow.backends.allocated.relay import RelayTransport
from distflow.backends.allocated.script import resident_script
from distflow.backends.allocated.slurm.commands import is_transient_error, step_prefix
from distflow.errors import NodeUnreachable
from distflow.testing.nodes import install_runtime
from distflow.testing.slurm import Slurm
from distflow.testing.sshd import Sshd, missing_sshd
from distflow.testing.waiting import is_alive, wait_until
from distflow.transports.base import REASON_MARK, Transport
from distflow.transports.local import LocalTransport
from distflow.transports.ssh.config import SshDestination
from distflow.transports.ssh.transport import SshTransport

Reach = Callable[..., RelayTransport]


@pytest.fixture
def reach(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reach]:
    """A function that returns a transport to a node of a job, with this machine as the login node."""
    monkeypatch.setenv("PATH", f"{slurm.commands}:{os.environ['PATH']}")
    made: list[RelayTransport] = []

    def to(job: str, host: str, het_group: int | None = None) -> RelayTransport:
        made.append(relay_transport(LocalTransport("login"), job, host, het_group))
        return made[-1]

    yield to
    for transport in made:
        transport.close()


def relay_transport(login: Transport, job: str, host: str, het_group: int | None = None) -> RelayTransport:
    """Return a transport to a node of a job through its login node."""
    prefix = partial(step_prefix, job, host, het_group)
    return RelayTransport(login, job, host, sys.executable, prefix=prefix, is_transient=is_transient_error)


def start(cluster: Slurm, *options: str, idle_s: float = 600, components: int = 1) -> str:
    """Submit a job with resident programs, wait until it runs, and return its id."""
    return submit(cluster, resident_script(sys.executable, idle_s, components), *options)


def relays(cluster: Slurm) -> list[int]:
    return [pid for pid in cluster.processes("n2") if "\0run\0distflow-" in cmdline(pid)]


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def state(cluster: Slurm, job: str) -> str:
    return cluster.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()


def test_an_agent_and_its_task_use_the_job(slurm: Slurm, reach: Reach, tmp_path: Path, marker: str) -> None:
    job = start(slurm, "--nodes=2", "--gres=gpu:2")
    transport = reach(job, "n2")
    node = NodeUnderTest(transport, tmp_path)
    install_runtime(node.top)
    link = node.connect()
    script = 'echo "$CUDA_VISIBLE_DEVICES:$SLURM_JOB_ID:$SLURM_NTASKS:$SLURM_PROCID"; exec sleep 300'
    attempt = node.start(link, ["sh", "-c", script, marker])
    wait_until(lambda: node.output(attempt) == f"0,1:{job}::\n", what="the task has printed its variables")
    task = wait_until(lambda: [pid for pid in slurm.processes("n2") if cmdline(pid).startswith("sleep\0")])[0]
    # The relay is killed: the connection breaks, the task continues, and a new connection finds it.
    for pid in relays(slurm):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: node.closed, what="the connection broke")
    assert is_alive(task)
    link = node.connect()
    assert node.watch(link, attempt)["phase"] == "running"
    slurm.run("scancel", job)
    wait_until(lambda: not is_alive(task), what="the task ended with the job")
    wait_until(lambda: not slurm.processes(), what="no process is left")
    with pytest.raises(NodeUnreachable):
        transport.run(["true"], timeout_s=60)


@pytest.mark.slow
def test_an_unused_job_ends(slurm: Slurm, reach: Reach, tmp_path: Path, marker: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    job = start(slurm, "--nodes=2", idle_s=4)
    # A process of one node keeps the programs of both nodes.
    channel = reach(job, "n1").open(["sh", "-c", f"setsid sh -c 'read word < {tmp_path}/fifo' {marker} >&- 2>&- & echo up"])
    assert channel.read() == b"up\n"
    assert channel.read() == b""
    channel.close()
    threading.Event().wait(5)  # longer than a job without users lasts
    assert reach(job, "n2").run(["echo", "still"], timeout_s=60).stdout == b"still\n"
    assert state(slurm, job) == "RUNNING"
    (tmp_path / "fifo").write_text("enough\n")
    wait_until(lambda: state(slurm, job) == "COMPLETED", 90, what="the job ended by itself")


def test_a_command_past_its_timeout_is_killed(slurm: Slurm, reach: Reach, marker: str) -> None:
    transport = reach(start(slurm, "--nodes=1"), "n1")
    assert transport.run(["true"], timeout_s=60).exit_code == 0
    with pytest.raises(NodeUnreachable, match="`sh` did not finish within 2 s"):
        transport.run(["sh", "-c", "sleep 300; :", marker], timeout_s=2)
    wait_until(lambda: not processes_with(marker), what="the command is gone")


def test_a_command_ends_although_a_background_process_has_its_pipes(slurm: Slurm, reach: Reach, marker: str) -> None:
    transport = reach(start(slurm, "--nodes=1"), "n1")
    done = transport.run(["sh", "-c", f"sh -c 'sleep 300; :' {marker} & echo done"], timeout_s=60)
    assert (done.exit_code, done.stdout) == (0, b"done\n")
    assert processes_with(marker)


def test_each_component_of_a_heterogeneous_job_is_reached(slurm: Slurm, reach: Reach) -> None:
    job = start(slurm, "--nodes=1", "--gres=gpu:2", ":", "--nodes=1", "--ntasks-per-node=1", "--gres=gpu:1", components=2)
    for host, group, gpus in (("n1", 0, b"0,1\n"), ("n2", 1, b"0\n")):
        transport = reach(job, host, group)
        assert transport.run(["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"], timeout_s=60).stdout == gpus


def test_the_end_of_a_resident_program_ends_the_job(slurm: Slurm, reach: Reach, marker: str) -> None:
    job = start(slurm, "--nodes=2")
    channel = reach(job, "n2").open(["sh", "-c", "echo $PPID; sleep 300; :", marker])
    os.kill(int(channel.read()), signal.SIGKILL)
    assert channel.read() == b""
    assert channel.exit_code is None
    assert REASON_MARK in channel.stderr_tail()
    channel.close()
    wait_until(lambda: state(slurm, job) == "FAILED", 90, what="the job ended")
    wait_until(lambda: not slurm.processes(), what="no process is left")


_OTHER_USER = """
import array, os, socket, sys
os.setgid(65534)
os.setuid(65534)
names = [line.split()[-1] for line in open("/proc/net/unix") if sys.argv[1] in line]
peer = socket.socket(socket.AF_UNIX)
peer.connect("\\0" + names[0][1:])
try:
    peer.sendmsg([b"\\0\\0\\0\\x20" + b'{"argv":["true"],"limit_s":null}'], [(1, 1, array.array("i", [0, 1, 2]))])
    print("answer", peer.recv(64))
except OSError:
    print("answer", b"")
servers = [socket.socket(socket.AF_UNIX) for _ in range(30)]
for number, server in enumerate(servers):
    server.bind("\\0%s%016x" % (sys.argv[1], number))
    server.listen()
print("up", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")
def test_another_user_can_neither_use_nor_replace_a_resident_program(slurm: Slurm, reach: Reach) -> None:
    job = start(slurm, "--nodes=1")
    transport = reach(job, "n1")
    assert transport.run(["true"], timeout_s=60).exit_code == 0
    prefix = f"distflow-{os.getuid()}-{job}-n1-"
    command = [sys.executable, "-I", "-S", "-c", _OTHER_USER, prefix]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other_user:
        assert other_user.stdout is not None
        assert [other_user.stdout.readline(), other_user.stdout.readline()] == ["answer b''\n", "up\n"]
        assert [transport.run(["echo", "own"], timeout_s=60).stdout for _ in range(3)] == [b"own\n"] * 3
        other_user.communicate("")


@pytest.mark.ssh
def test_a_node_is_reached_through_a_login_node(slurm: Slurm, tmp_path: Path) -> None:
    if why := missing_sshd():
        pytest.skip(why)
    job = start(slurm, "--nodes=2")
    path = f"{slurm.commands}:{os.environ['PATH']}"
    with Sshd(tmp_path / "sshd", alias="login", options={"SetEnv": f"HOME={tmp_path} PATH={path}"}) as server:
        login = SshTransport("login", SshDestination(host="login", config_file=str(server.client_config)))
        transport = relay_transport(login, job, "n2")
        words = ["a b", "a'b", 'a"b', "$HOME", "a\nb", "", "ü→", "\\", "!x"]
        code = "import sys; sys.stdout.write('\\0'.join(sys.argv[1:])); sys.exit(3)"
        done = transport.run([sys.executable, "-c", code, *words], timeout_s=60)
        assert (done.exit_code, done.stdout.decode().split("\0"), done.stderr) == (3, words, b"")
        data = os.urandom(1_000_000)
        channel = transport.open(["sh", "-c", "head -c 1000000; exit 4"])
        channel.write(data)
        assert b"".join(iter(channel.read, b"")) == data
        assert channel.exit_code == 4
        # The login node is gone: the error names the node, and later calls connect again.
        server.stop()
        with pytest.raises(NodeUnreachable, match=f"n2@{job}: its login node"):
            transport.run(["true"], timeout_s=60)
        server.start()
        transport.hang_up()
        assert wait_until(lambda: can_run(transport), what="the node is reached again")
        login.close()


def can_run(transport: RelayTransport) -> bool:
    try:
        return transport.run(["true"], timeout_s=60).exit_code == 0
    except NodeUnreachable:
        return False


@pytest.mark.slow
def test_a_step_that_slurm_cannot_create_for_the_moment_is_tried_again(slurm: Slurm, reach: Reach, tmp_path: Path) -> None:
    transport = reach(start(slurm), "n1")
    commands, failures = tmp_path / "bin", tmp_path / "failures"
    commands.mkdir()
    message = "srun: error: Unable to create step for job 1: Unable to contact slurm controller (connect failure)"
    (commands / "srun").write_text(
        f'#!/bin/sh\nif read -r line <"{failures}" && sed -i 1d "{failures}"; then echo "{message}" >&2; exit 1; fi\n'
        f'exec {slurm.commands}/srun "$@"\n'
    )
    (commands / "srun").chmod(0o755)
    os.environ["PATH"] = f"{commands}:{os.environ['PATH']}"  # the fixture restores it
    failures.write_text("1\n2\n")
    assert transport.run(["cat"], input=b"sent", timeout_s=60).stdout == b"sent"
    assert failures.read_text() == ""
    failures.write_text("1\n2\n")
    channel = transport.open(["sh", "-c", "echo there; cat"])
    assert channel.read() == b"there\n"
    channel.write(b"sent")
    assert channel.read() == b"sent"
    channel.close()
    failures.write_text("1\n")
    channel = transport.open(["cat"])
    with suppress(NodeUnreachable):
        channel.write(b"lost, perhaps")  # input was sent, so the command cannot be repeated
    assert channel.read() == b""
    assert "Unable to create step" in channel.stderr_tail()
    channel.close()
