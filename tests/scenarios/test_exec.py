"""``workflow exec``: a command in the environment of a running task, with pipes or a terminal, and the end of both."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import Lab

SPEC = """
workflow:
  name: gang
  resources: {default: {gpu: 1}}
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 1}
      environment: {COLOR: "green {{output}}"}
      command: [sh, -c, 'while [ ! -e GO ]; do sleep 0.2; done']
    - name: worker
      ranks: {size: 1}
      command: [sh, -c, 'while [ ! -e GO ]; do sleep 0.2; done']
"""
SHOW_ENVIRONMENT = (
    "sh -c 'echo \"$PWD|$COLOR|$CUDA_VISIBLE_DEVICES|$NODE_RANK|$TOKEN|$TORCHELASTIC_ERROR_FILE\"; command -v python3'"
)


class Terminal:
    """distflow in a pseudo-terminal: the keys that are typed, and the output."""

    def __init__(self, cli: Cli, *arguments: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(33, 101)
        self.settings = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "distflow", *arguments], stdin=self.slave, stdout=self.slave, stderr=self.slave,
            env=cli.environment | {"TERM": "xterm-test"}, cwd=cli.folder, start_new_session=True,
        )  # fmt: skip
        self.output = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read(self) -> str:
        while select.select([self.master], [], [], 0)[0]:
            self.output += os.read(self.master, 65536).decode()
        return self.output

    def await_text(self, text: str) -> None:
        try:
            wait_until(lambda: text in self.read(), 40)
        except TimeoutError:
            raise AssertionError(f"{text!r} is not in {self.output!r}") from None

    def await_end(self) -> int:
        """Wait until distflow exits, check that the terminal has its former settings, and return the exit code."""
        wait_until(lambda: self.read() is not None and self.process.poll() is not None, 40)
        assert termios.tcgetattr(self.slave) == self.settings
        for fd in (self.master, self.slave):
            os.close(fd)
        return int(self.process.wait())


@pytest.fixture(params=["local", pytest.param("lab", marks=pytest.mark.ssh)])
def any_cli(request: pytest.FixtureRequest, cli: Cli) -> Cli:
    """Run the test with a local pool of two GPUs, and again with ``lab``."""
    if request.param == "lab":
        lab: Lab = request.getfixturevalue("lab")
        return lab.cli
    cli.configure(gpus=2)
    return cli


def _start(cli: Cli, *arguments: str) -> Path:
    go = cli.folder / "go"
    assert cli.submit(cli.spec(SPEC.replace("GO", str(go))), *arguments) == "gang-1"
    cli.await_running("gang-1")
    return go


def _end(cli: Cli, go: Path) -> None:
    go.touch()
    cli.await_status("gang-1", "COMPLETED")


def test_exec_with_pipes_passes_input_output_exit_code_and_the_tasks_environment(any_cli: Cli) -> None:
    go = _start(any_cli, "--set-env", "TOKEN=secret-1")
    shown = any_cli.run("workflow", "exec", "gang-1", "master", "--entry", SHOW_ENVIRONMENT)
    assert shown.code == 0, shown.err
    where, color, gpus, rank, token, error_file = shown.out.splitlines()[0].split("|")
    assert where.endswith("/train/master/0/work")
    assert color.startswith("green /")
    assert color.endswith("/train/master/0/output")
    assert (gpus in ("0", "1"), rank, token, error_file) == (True, "0", "secret-1", "")
    assert shown.out.splitlines()[1] == str(Path(sys.executable).with_name("python3"))
    sent = os.urandom(300_000).hex()
    command = [sys.executable, "-m", "distflow", "workflow", "exec", "gang-1", "worker", "--entry"]
    # More input than any buffer holds, then its end; output and errors are separate, and the exit code arrives.
    done = subprocess.run(
        [*command, "sh -c 'cat; echo oops >&2; exit 7'"], input=sent, capture_output=True, text=True, check=False,
        env=any_cli.environment, cwd=any_cli.folder, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr, done.stdout == sent) == (7, "oops\n", True)
    assert any_cli.run("workflow", "exec", "gang-1", "worker", "--entry", "no-such-program").code == 127
    assert any_cli.run("workflow", "exec", "gang-1", "worker", "--entry", "sh -c 'kill -9 $$'").code == 137
    # No `launch.json` contains the secret.
    assert not [path for path in any_cli.folder.rglob("launch.json") if b"secret-1" in path.read_bytes()]
    # With `--group`, every task of the group runs the command.
    entry = "sh -c 'echo rank $NODE_RANK; echo err >&2; printf end; exit $((NODE_RANK + 3))'"
    both = any_cli.run("workflow", "exec", "gang-1", "--group", "train", "--entry", entry)
    assert both.code == 4
    assert sorted(both.out.splitlines()) == ["[master] end", "[master] rank 0", "[worker] end", "[worker] rank 1"]
    assert sorted(both.err.splitlines()) == ["[master] err", "[worker] err"]
    _end(any_cli, go)


def test_exec_in_a_terminal_passes_its_size_ctrl_c_and_the_exit_code_and_ends_with_the_task(any_cli: Cli) -> None:
    go = _start(any_cli)
    screen = Terminal(any_cli, "workflow", "exec", "gang-1", "worker", "--entry", "/bin/sh")
    screen.type("PS1='> '; echo \"$TERM:$(stty size):$NODE_RANK\" | tr a-z A-Z\n")
    screen.await_text("XTERM-TEST:33 101:1")
    screen.resize(40, 90)
    os.killpg(screen.process.pid, signal.SIGWINCH)
    screen.type("until [ \"$(stty size)\" = '40 90' ]; do sleep 0.2; done; echo re''sized\n")
    screen.await_text("resized")
    # Ctrl-C must end the command, not distflow. A command that has printed `started` is in the foreground.
    screen.type("/bin/sh -c 'echo sta\"\"rted; exec sleep 600'\n")
    screen.await_text("started")
    screen.type("\x03")
    screen.type("echo af''ter\n")
    screen.await_text("after")
    screen.type("exit 9\n")
    assert screen.await_end() == 9
    # A command that still runs when its task ends is killed.
    other = Terminal(any_cli, "workflow", "exec", "gang-1", "master", "--entry", "sh -c 'echo up; sleep 600'")
    other.await_text("up")
    _end(any_cli, go)
    other.await_text("the task has ended, so the command was killed")
    assert other.await_end() == 129


def test_a_killed_exec_ends_the_command_and_its_daemons(any_cli: Cli) -> None:
    go = _start(any_cli)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL):
        _kill_exec(any_cli, number)
        assert {task["status"] for task in any_cli.tasks("gang-1").values()} == {"RUNNING"}, number
    _end(any_cli, go)


def _kill_exec(cli: Cli, number: signal.Signals) -> None:
    """Run a shell with a daemon in a terminal, end distflow with a signal, and wait until both have ended."""
    marker = f"4711.{number}"
    screen = Terminal(cli, "workflow", "exec", "gang-1", "worker", "--entry", "/bin/sh")
    screen.type(f"setsid nohup sleep {marker} >/dev/null 2>&1 & echo sta''rted; trap '' HUP TERM\n")
    screen.await_text("started")
    wait_until(lambda: any(f"sleep {marker}" in words for _, words in cli.processes()), 20)
    screen.process.send_signal(number)
    if number == signal.SIGKILL:
        screen.process.wait(20)
        os.close(screen.master)
        os.close(screen.slave)
    else:
        assert screen.await_end() == 128 + number
    wait_until(lambda: not [words for _, words in cli.processes() if marker in words or words.strip() == "/bin/sh"], 20)


def test_impossible_requests_are_reported(cli: Cli) -> None:
    cli.configure(gpus=2)
    go = _start(cli)
    assert cli.submit(cli.spec(SPEC.replace("GO", str(go)))) == "gang-2"

    def refused(*arguments: str) -> str:
        done = cli.run("workflow", "exec", *arguments)
        assert (done.code, done.out) == (2, "")
        return done.err

    assert "gang-1 has no task `wroker`\ndid you mean `worker`?" in refused("gang-1", "wroker")
    assert "gang-1 has no group `training`" in refused("gang-1", "--group", "training", "--entry", "true")
    assert "name either a task, or a group" in refused("gang-1")
    assert "name either a task, or a group" in refused("gang-1", "worker", "--group", "train", "--entry", "true")
    assert "has no terminal for a shell" in refused("gang-1", "--group", "train")
    assert "No closing quotation" in refused("gang-1", "worker", "--entry", "'")
    assert "master is not running yet: SCHEDULING" in refused("gang-2", "master")
    cli.run("workflow", "cancel", "gang-2", "--wait", "60")
    assert "master has ended: FAILED_CANCELED" in refused("gang-2", "master")
    _end(cli, go)


@pytest.mark.ssh
def test_keep_alive_restores_a_broken_connection(lab: Lab) -> None:
    go = _start(lab.cli)
    server = lab.servers[str(lab.cli.tasks("gang-1")["worker"]["node_name"])]
    screen = Terminal(lab.cli, "workflow", "exec", "gang-1", "worker", "--entry", "/bin/sh", "--keep-alive")
    screen.type("gone=1; echo fir''st\n")
    screen.await_text("first")
    server.stop()
    screen.await_text("connecting again (Ctrl-C to stop)")
    server.start()
    screen.type('echo "new${gone}-$NODE_RANK"\n')
    screen.await_text("new-1")
    # When the task has ended, there is nothing to connect to.
    server.stop()
    go.touch()
    wait_until(lambda: list(lab.cli.folder.glob("gpu*/*/*/train/worker/0/exit.json")), 60, "the worker has ended")
    server.start()
    assert screen.await_end() == 2
    assert "worker has ended" in screen.output or "worker is no longer running" in screen.output, screen.output
    lab.cli.await_status("gang-1", "COMPLETED")


@pytest.mark.ssh
def test_without_keep_alive_a_broken_connection_ends_exec_and_an_unreachable_node_is_reported(lab: Lab) -> None:
    go = _start(lab.cli)
    node = str(lab.cli.tasks("gang-1")["worker"]["node_name"])
    screen = Terminal(lab.cli, "workflow", "exec", "gang-1", "worker", "--entry", "sh -c 'echo up; sleep 600'")
    screen.await_text("up")
    lab.servers[node].stop()
    assert screen.await_end() == 3
    lab.servers[node].start()
    # This server accepts connections, but does not answer.
    lab.servers[node].freeze()
    done = lab.cli.run("workflow", "exec", "gang-1", "worker", "--entry", "true", "--connect-timeout", "2")
    assert done.code == 3
    assert f"{node}: " in done.err
    assert "2 s" in done.err
    lab.servers[node].thaw()
    _end(lab.cli, go)
