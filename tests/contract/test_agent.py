"""The agent protocol (docs/agent-protocol.md) over every transport."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import io
import json
import os
import queue
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest

from contract.conftest import EVERY_TRANSPORT, LOCAL_TRANSPORT, launch_of, processes_with, try_clean
from distflow.backends.machines.connection.bootstrap import RUNTIME, SourceArchive, connect
from distflow.errors import AgentError, BootstrapFailed, NodeError, NodeUnreachable
from distflow.protocol.names import Operation
from distflow.runtime.probes.facts import user_name
from distflow.runtime.processes import name_of
from distflow.testing.daemons import free_port
from distflow.testing.waiting import is_alive, wait_until

if TYPE_CHECKING:
    from contract.conftest import NodeUnderTest
    from distflow.backends.machines.connection.link import AgentLink, Event

pytestmark = LOCAL_TRANSPORT

PYTHON = sys.executable


def write_python_wrapper(tmp_path: Path, *lines: str) -> str:
    """Write an interpreter that runs shell commands before it executes the real one, and return its path."""
    path = tmp_path / "python-wrapper"
    path.write_text("\n".join(["#!/bin/sh", *lines, f'exec {PYTHON} "$@"', ""]))
    path.chmod(0o755)
    return str(path)


def refused(link: AgentLink, kind: str, op: Operation, **fields: Any) -> str:
    """Check that a request fails with an error of this kind, and return the message."""
    with pytest.raises(AgentError) as caught:
        link.request(op, **fields)
    assert caught.value.kind == kind, caught.value
    return caught.value.message


def parse_signal_mask(line: str) -> int:
    """Return a mask of `/proc/PID/status`, without the two signals that the C library reserves and that cannot be reset."""
    return int(line.split()[1], 16) & ~(1 << 31 | 1 << 32)


# -- connecting


@EVERY_TRANSPORT
def test_hello_reports_the_facts_of_the_node(node: NodeUnderTest) -> None:
    link = node.connect()
    answer = link.request("hello", watch=[f"{node.workflow}/g/t/0"])
    facts = answer["facts"]
    assert facts["python"] == PYTHON or Path(facts["python"]).samefile(PYTHON)
    assert facts["cpus"] >= 1
    assert facts["memory"] > 10_000_000
    assert facts["free_bytes"] > 0
    assert facts["root"] == str(node.root)
    assert {"interface": "lo", "address": "127.0.0.1", "family": "inet"} in facts["addresses"]
    # The address of the sshd of these tests, and not that of the login which started the tests.
    assert facts["ssh_server"] == (node.transport.reached_address or "")
    assert abs(facts["now"] - link.request("ping")["now"]) < 5
    attempt = f"{node.workflow}/g/t/0"
    absent = {"phase": "absent", "pid": None, "started_at": None, "end": None, "directory": str(node.directory(attempt))}
    assert answer["attempts"] == {attempt: absent}


@EVERY_TRANSPORT
def test_output_of_a_login_script_is_kept_and_skipped(node: NodeUnderTest, tmp_path: Path) -> None:
    # Like real login scripts: the last line has no end, and one line looks like output of the bootstrap.
    python = write_python_wrapper(tmp_path, "echo Welcome to the lab", 'echo "+ exec $7 $8"', "printf 'no newline> '")
    link = node.connect(python=python)
    assert "Welcome to the lab" in link.noise
    assert link.noise.endswith("no newline> ")
    assert link.request("ping")["now"] > 0


@EVERY_TRANSPORT
def test_the_runtime_is_sent_once_and_found_afterwards(fresh_node: NodeUnderTest) -> None:
    for _ in range(2):
        fresh_node.connect().request("ping")
    assert [path.name for path in (fresh_node.root / "runtime").iterdir()] == [RUNTIME.digest]
    assert stat.S_IMODE(fresh_node.root.stat().st_mode) == 0o700


def test_agents_that_unpack_the_runtime_at_the_same_time_all_start(fresh_node: NodeUnderTest) -> None:
    results: list[object] = []

    def connect() -> None:
        try:
            results.append(fresh_node.connect().request("ping")["now"] > 0)
        except NodeError as error:
            results.append(error)

    threads = [threading.Thread(target=connect) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    assert [path.name for path in (fresh_node.root / "runtime").iterdir()] == [RUNTIME.digest]


def test_the_runtime_archive_is_reproducible() -> None:
    assert SourceArchive(package=RUNTIME.package).archive == RUNTIME.archive


@EVERY_TRANSPORT
def test_a_failing_interpreter_is_reported_with_its_message(node: NodeUnderTest, tmp_path: Path) -> None:
    with pytest.raises(BootstrapFailed, match="no license for python"):
        node.connect(python=write_python_wrapper(tmp_path, "echo no license for python >&2; exit 3"))


@EVERY_TRANSPORT
def test_a_missing_interpreter_is_named(node: NodeUnderTest) -> None:
    with pytest.raises(BootstrapFailed, match="/no/such/python"):
        node.connect(python="/no/such/python")


@EVERY_TRANSPORT
def test_a_root_that_cannot_be_created_is_named(node: NodeUnderTest) -> None:
    shutil.rmtree(node.top)
    node.top.write_text("a file")
    try:
        with pytest.raises(BootstrapFailed, match="root"):
            node.connect()
    finally:
        node.top.unlink()


@EVERY_TRANSPORT
def test_a_node_that_does_not_answer_is_unreachable_after_the_timeout(node: NodeUnderTest, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(NodeUnreachable, match="within"):
        node.connect(python=write_python_wrapper(tmp_path, "cat >/dev/null"), timeout_s=0.3)  # until the connection is closed
    assert time.monotonic() - started < 30


@EVERY_TRANSPORT
@pytest.mark.slow
def test_a_suspended_agent_is_detected_and_blocks_no_sender(node: NodeUnderTest) -> None:
    link = node.connect(ping_s=1.0)
    agent = link.request("hello", watch=[])["facts"]["agent_pid"]
    answers: list[object] = []
    os.kill(agent, signal.SIGSTOP)
    try:
        for _ in range(40):  # more than a pipe holds
            link.send("ping", answers.append, ballast="A" * 100_000)
        assert not node.closed  # so no sender was blocked until the agent counted as silent
        wait_until(lambda: node.closed, 15, "on_close")
        assert len(answers) == 40
        assert all(isinstance(answer, NodeUnreachable) for answer in answers)
        with pytest.raises(NodeUnreachable):
            link.request("ping")
        # It does not increase further: if the submitter sleeps for an hour, this hour does not count as silence of the node.
        wait_until(lambda: link.silent_s == pytest.approx(4 * 1.0), 15, "the silence until the detection")
    finally:
        os.kill(agent, signal.SIGCONT)
    link.close()
    assert len(node.closed) == 1


@EVERY_TRANSPORT
def test_the_agent_ends_after_its_idle_timeout_and_at_the_end_of_its_input(node: NodeUnderTest) -> None:
    idle = node.connect(ping_s=60)
    agent = idle.request("hello", watch=[], idle_timeout_s=0.3)["facts"]["agent_pid"]
    wait_until(lambda: node.closed, 15, "the connection closed")
    wait_until(lambda: not is_alive(agent), 15, "the agent ended by itself")
    other = node.connect()
    agent = other.request("hello", watch=[])["facts"]["agent_pid"]
    other.close()
    wait_until(lambda: not is_alive(agent), 15, "the agent ended at EOF")


def test_every_operation_is_served(node: NodeUnderTest) -> None:
    link = node.connect()
    for op in get_args(Operation):
        if op not in ("credit", "reap", "uninstall"):  # not answered without an `id`; these change the node
            try:
                link.request(op)
            except AgentError as error:
                assert error.kind != "internal" and "unknown operation" not in error.message, op  # noqa: PT017, PT018


def test_invalid_requests_are_refused(node: NodeUnderTest) -> None:
    link = node.connect()
    refused(link, "bad_request", "dance")  # type: ignore[arg-type]
    refused(link, "bad_request", "lease")
    for name in ("../x/y/0", "a/b/c", "a/b/c/d/e", "a//c/0", "blobs/a/b/0", "runtime/a/b/0", "a/b/c/.."):
        refused(link, "bad_request", "stop", attempt=name, grace_s=0, why="")
    refused(link, "bad_request", "clean", workflow="../..", keep_output=False)
    refused(link, "not_found", "start", attempt=f"{node.workflow}/g/t/0")
    refused(link, "not_found", "stop", attempt=f"{node.workflow}/g/t/0", grace_s=0, why="")
    attempt = node.lease(link)
    refused(link, "not_prepared", "start", attempt=attempt)
    refused(link, "bad_request", "prepare", attempt=attempt, launch=launch_of([]))
    refused(link, "bad_request", "prepare", attempt=attempt, launch=launch_of(["true"], env={"A=B": "x"}))


# -- one attempt


def test_an_unexpected_error_of_an_operation_is_reported_and_the_agent_continues(node: NodeUnderTest) -> None:
    link = node.connect()
    node.lease(link, wanted={"cpus": [1, 2]})
    lease = {"attempt": node.attempt(), "gpus": 0, "gpu_ids": [], "lease_dir": str(node.lease_dir), "port": None}
    # A number that is too large for a float.
    assert "OverflowError" in refused(link, "internal", "lease", **lease, wanted={"cpus": ["9" * 400, 2]})
    assert link.request("ping")["now"]


@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 400, '{"keeper": 3}', '{"command": {"pid": []}}', '{"phase": 1e999}'])
def test_agents_survive_a_record_that_a_task_has_overwritten(node: NodeUnderTest, content: str) -> None:
    link = node.connect()
    attempt = node.start(link, ["sleep", "60"])
    record = node.directory(attempt) / "runner.json"
    command = node.state(attempt)["command"]["pid"]
    record.write_text(content)
    other = node.connect()
    for one in (link, other):
        assert one.request("hello", watch=[attempt])["attempts"][attempt]["phase"] == "absent"
    # Other roots may have leftovers too, for example those of a test that runs at the same time.
    assert [found for found in other.request("reap", dry_run=True)["processes"] if found["is_ours"]] == []
    assert [one.request("ping")["now"] > 0 for one in (link, other)] == [True, True]
    refused(other, "not_found", "stop", attempt=attempt, grace_s=0, why="test")
    assert is_alive(command)
    # The agent whose connection to the runner and keeper is open can still stop the task.
    link.request("stop", attempt=attempt, grace_s=0, why="test")
    wait_until(lambda: not is_alive(command))


@EVERY_TRANSPORT
def test_a_command_runs_with_the_requested_arguments_and_environment(node: NodeUnderTest) -> None:
    link = node.connect()
    script = (
        "import os,json,sys; u=os.umask(0); os.umask(u); os.environ['TOKEN']=os.environ['TOKEN'][::-1]\n"
        "print(json.dumps({'env':dict(os.environ),'cwd':os.getcwd(),'umask':u,"
        "'argv':sys.argv[1:],'sid':os.getsid(0)==os.getpid(),'stdin':os.readlink('/proc/self/fd/0'),"
        "'fds':sorted(int(f) for f in os.listdir('/proc/self/fd'))[:4],"
        "'sig':[l for l in open('/proc/self/status') if l[:6] in ('SigBlk','SigIgn')]}))"
    )
    hostile = ["", "a b", "$HOME `id`", "a\nb", "ü→'\"", "--x=@@ATTEMPT_DIR@@/files/f"]
    argv = ["env", "-u", "NOTHING", PYTHON, "-c", script, *hostile]
    env = {"X": "1 2", "HERE": "@@ATTEMPT_DIR@@/output", "PYTHONPATH": "/mine"}
    end, output = node.run(
        link, argv, env=env, secret_env={"TOKEN": "hunter2-secret"}, path_prepend=["/opt/first"],
        python_path=["@@ATTEMPT_DIR@@/lib"],
    )  # fmt: skip
    assert end["exit_code"] == 0, output
    found = json.loads(output)
    attempt = found["env"]["DISTFLOW_ATTEMPT"]
    directory = str(node.directory(attempt))
    assert found["argv"] == [*hostile[:-1], f"--x={directory}/files/f"]
    assert found["cwd"] == f"{directory}/work"
    assert found["env"]["X"] == "1 2"
    assert found["env"]["HERE"] == f"{directory}/output"
    assert found["env"]["TOKEN"] == "terces-2retnuh"  # backwards, because it would be masked
    assert found["env"]["PATH"].startswith("/opt/first:")
    assert found["env"]["PYTHONPATH"] == f"/mine:{directory}/lib"
    home = node.transport.run(["sh", "-c", 'printf %s "$HOME"'], timeout_s=60).stdout.decode()
    assert found["env"]["HOME"] == home
    assert found["env"]["DISTFLOW_ATTEMPT_DIR"] == directory
    assert found["env"]["TORCHELASTIC_ERROR_FILE"] == f"{directory}/error.json"
    umask = os.umask(0o22)
    os.umask(umask)
    assert found["umask"] == umask
    assert found["sid"]
    assert found["stdin"] == "/dev/null"
    assert found["fds"] == [0, 1, 2, 3]  # 3 is the listing itself
    # Python itself ignores SIGPIPE and SIGXFSZ. Nothing else may be inherited, and other programs ignore nothing.
    assert [parse_signal_mask(line) for line in found["sig"]] == [0, 0x1001000]
    _, output = node.run(link, ["grep", "-E", "Sig(Ign|Blk)", "/proc/self/status"])
    assert [parse_signal_mask(line) for line in output.splitlines()] == [0, 0]


@EVERY_TRANSPORT
def test_a_secret_reaches_neither_disk_nor_arguments(node: NodeUnderTest, marker: str) -> None:
    link = node.connect()
    secret = f"{marker}-" + "x" * 9000  # longer than a pipe writes at once
    argv = ["sh", "-c", f'test ${{#TOKEN}} = {len(secret)} || exit 9; echo up; read wait < "$0"', "@@ATTEMPT_DIR@@/work/fifo"]
    attempt = node.lease(link)
    link.request("prepare", attempt=attempt, launch=launch_of(argv, secret_env={"TOKEN": secret}))
    link.close()
    # The agent that starts the attempt is not the one that received the secret.
    link = node.connect()
    os.mkfifo(node.directory(attempt) / "work/fifo")
    node.watch(link, attempt)
    link.request("start", attempt=attempt)
    wait_until(lambda: node.output(attempt) == "up\n")
    for path in node.root.rglob("*"):
        if path.is_file():
            assert marker.encode() not in path.read_bytes(), path
    assert not processes_with(marker)
    (node.directory(attempt) / "work/fifo").write_text("go\n")
    assert node.await_end(attempt)["exit_code"] == 0


def test_files_of_attempts_are_private(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.start(
        link, ["true"], files=[{"path": "files/a/run.sh", "text": "#!/bin/sh\necho @@ATTEMPT_DIR@@", "mode": 0o755}]
    )
    node.await_end(attempt)
    directory = node.directory(attempt)
    assert (directory / "files/a/run.sh").read_text() == f"#!/bin/sh\necho {directory}"
    assert stat.S_IMODE((directory / "files/a/run.sh").stat().st_mode) == 0o755
    for name in ("launch.json", "runner.json", "exit.json", "output.log", "output.idx", "control"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600, name
    for path in (directory, directory / "work", directory / "output"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


UNUSABLE_PROGRAMS = [
    ("no-such-program", 127, "program `no-such-program` not found on this node in PATH"),
    ("./absent", 127, "does not exist"),
    ("@@ATTEMPT_DIR@@/files/plain", 126, "chmod"),
    ("@@ATTEMPT_DIR@@/files", 126, "/files` is a directory"),
    ("@@ATTEMPT_DIR@@/files/garbage", 126, "#!"),
    ("@@ATTEMPT_DIR@@/files/closed", 126, "the interpreter in its first line (`#!`) is not executable"),
    ("@@ATTEMPT_DIR@@/files/lost", 127, "#!"),
]


def test_a_program_that_cannot_start_is_named_with_a_remedy(node: NodeUnderTest) -> None:
    link = node.connect()
    files = [
        {"path": "files/plain", "text": "echo", "mode": 0o600},
        {"path": "files/garbage", "text": "echo hi", "mode": 0o755},
        {"path": "files/closed", "text": "#!/etc/passwd\n", "mode": 0o755},
        {"path": "files/lost", "text": "#!/no/such/interpreter\n", "mode": 0o755},
    ]
    for file, code, message in UNUSABLE_PROGRAMS:
        end, _ = node.run(link, [file], files=files)
        assert (end["reason"], end["exit_code"], end["signal"]) == ("start_error", code, None), file
        assert message in end["message"]
        assert file.rsplit("/", maxsplit=1)[-1] in end["message"]


def test_a_prelude_runs_before_the_command_without_touching_its_arguments(node: NodeUnderTest) -> None:
    end, output = node.run(
        node.connect(), ["sh", "-c", 'echo "$A|$1|$2"', "sh", "a b", "$A"], shell_prelude="export A='from the prelude'"
    )
    assert (end["exit_code"], output) == (0, "from the prelude|a b|$A\n")


@EVERY_TRANSPORT
def test_the_exit_code_or_signal_of_a_command_is_recorded(node: NodeUnderTest) -> None:
    link = node.connect()
    before = time.time()  # noqa: TID251 - the node's clock is this machine's
    end, output = node.run(link, ["sh", "-c", "echo out; echo err >&2; exit 7"])
    assert (end["exit_code"], end["signal"], end["reason"], end["output_bytes"]) == (7, None, "exited", 8)
    assert output == "out\nerr\n"
    assert before - 1 < end["started_at"] <= end["ended_at"] < before + 20
    end, _ = node.run(link, ["sh", "-c", "kill -SEGV $$"])
    assert (end["exit_code"], end["signal"]) == (None, signal.SIGSEGV)


HOARD = "import os, time; kept = bytearray(256 << 20); kept[::4096] = b'x' * (len(kept) // 4096); "


def test_a_task_that_exceeds_its_memory_is_ended(node: NodeUnderTest) -> None:
    link = node.connect()
    end, output = node.run(
        link, ["sh", "-c", 'python3 -c "$1"; echo not reached', "sh", HOARD + "time.sleep(600)"], memory=200 << 20
    )
    assert (end["reason"], end["signal"]) == ("evicted", signal.SIGKILL)
    assert "not reached" not in output
    assert end["message"].startswith("its 2 processes use 2"), end["message"]  # 260 MiB or so
    assert "more than the 200 MiB that it requested; the largest is python3 (pid " in end["message"]


def test_memory_that_processes_share_counts_once(node: NodeUnderTest) -> None:
    both = HOARD + "pid = os.fork(); time.sleep(3); pid and os.wait()"
    end, _ = node.run(node.connect(), [PYTHON, "-c", both], memory=400 << 20)
    assert (end["reason"], end["exit_code"]) == ("exited", 0), end


def test_the_error_file_of_a_process_is_reported_with_the_end(node: NodeUnderTest) -> None:
    script = 'echo \'{"message": {"message": "boom", "extraInfo": {}}}\' > "$TORCHELASTIC_ERROR_FILE"; exit 1'
    end, _ = node.run(node.connect(), ["sh", "-c", script])
    assert end["error"] == {"message": {"message": "boom", "extraInfo": {}}}
    huge = "import os,json; json.dump({'message': 'x' * 3_000_000}, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))"
    end, _ = node.run(node.connect(), [PYTHON, "-c", huge])
    assert end["error"]["truncated"]
    assert end["error"]["message"].startswith("xxx")


def test_each_step_of_an_attempt_can_be_requested_twice(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.attempt()
    fields: dict[str, Any] = {
        "gpus": 1,
        "gpu_ids": [3, 4],
        "lease_dir": str(node.lease_dir),
        "port": "any",
        "start_timeout_s": 60,
    }
    answers: list[object] = []
    for _ in range(2):  # the second request is sent before the first is answered
        link.send("lease", answers.append, attempt=attempt, **fields)
    wait_until(lambda: len(answers) == 2)
    assert answers[0] == answers[1] == link.request("lease", attempt=attempt, **fields)
    for _ in range(2):
        assert link.request("prepare", attempt=attempt, launch=launch_of(["sleep", "60"])) == {"prepared": True}
    assert link.request("start", attempt=attempt) == link.request("start", attempt=attempt)
    assert link.request("lease", attempt=attempt, **fields) == answers[0]
    for _ in range(2):
        link.request("stop", attempt=attempt, grace_s=5, why="enough")
    end = node.await_end(attempt)
    assert (end["reason"], end["all_ended"]) == ("stopped", True)
    link.request("stop", attempt=attempt, grace_s=5, why="again")
    assert link.request("start", attempt=attempt)["pid"] > 0
    refused(link, "conflict", "lease", attempt=attempt, **fields)


# -- stopping


def jobs_of(agent: int) -> list[int]:
    """Return the processes that an agent has forked for slow operations."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [int(pid) for pid in children if name_of(int(pid)) == "df-job"]


def test_late_files_of_a_broken_connection_do_not_reach_a_running_task(node: NodeUnderTest) -> None:
    """The supervisor reconnects and repeats its request, while the first connection still prepares files."""
    first, second = node.connect(), node.connect()
    agents = [link.request("hello", watch=[])["facts"]["agent_pid"] for link in (first, second)]
    attempt, blob = node.lease(first), node.stage(b"as it was given")
    launch = launch_of(
        ["sh", "-c", "echo mine > 1999/file; echo changed; sleep 60"],
        files=[{"path": f"work/{number}/file", "blob": blob, "mode": 0o600} for number in range(2000)],
    )
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    first.send("prepare", lambda _answer: None, attempt=attempt, launch=launch)
    job = wait_until(lambda: jobs_of(agents[0]), 20, "the first one has begun")[0]
    os.kill(job, signal.SIGSTOP)
    try:
        second.send("prepare", answers.put, attempt=attempt, launch=launch)
        second.request("ping")
        wait_until(lambda: not answers.empty() or not jobs_of(agents[1]), 20, "the second one is done, or waits for the first")
        if answers.empty():
            os.kill(job, signal.SIGCONT)
        assert answers.get(timeout=60) == {"prepared": True}
        second.request("start", attempt=attempt)
        wait_until(lambda: node.output(attempt) == "changed\n", 20, "the task runs")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job, signal.SIGCONT)
    wait_until(lambda: not jobs_of(agents[0]), 60, "the first one is done")
    assert (node.directory(attempt) / "work/1999/file").read_text() == "mine\n"


def test_stop_sends_sigterm_first(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.start(link, ["sh", "-c", "trap 'echo bye; exit 4' TERM; echo up; while :; do sleep 0.2; done"])
    wait_until(lambda: node.output(attempt))
    link.request("stop", attempt=attempt, grace_s=20, why="a peer failed")
    end = node.await_end(attempt)
    assert (end["reason"], end["why"], end["exit_code"]) == ("stopped", "a peer failed", 4)
    assert end["stopped_at"] <= end["ended_at"]
    assert node.output(attempt).endswith("bye\n")


def test_stop_kills_processes_that_ignore_sigterm(node: NodeUnderTest, marker: str) -> None:
    link = node.connect()
    attempt = node.start(
        link, ["sh", "-c", "trap '' TERM; setsid sh -c 'sleep 60; :' $0 & echo up; sleep 60; sleep 60", marker]
    )
    wait_until(lambda: node.output(attempt) and len(processes_with(marker)) >= 2)
    started = time.monotonic()
    link.request("stop", attempt=attempt, grace_s=0.4, why="")
    end = node.await_end(attempt)
    assert time.monotonic() - started >= 0.4
    assert (end["reason"], end["signal"]) == ("stopped", signal.SIGKILL)
    assert not processes_with(marker)


def test_a_later_stop_can_shorten_the_grace_period_but_not_extend_it(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.start(link, ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.2; done"])
    wait_until(lambda: node.output(attempt))
    for grace_s in (60, 0.1, 60):
        link.request("stop", attempt=attempt, grace_s=grace_s, why=f"grace {grace_s}")
    assert node.await_end(attempt, 10)["why"] == "grace 60"


def test_stop_reaches_a_command_that_is_suspended(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.start(link, ["sh", "-c", "echo up; kill -STOP $$; sleep 60"])
    wait_until(lambda: node.output(attempt))
    link.request("stop", attempt=attempt, grace_s=20, why="")
    assert node.await_end(attempt, 10)["signal"] == signal.SIGTERM


def test_a_stop_before_the_start_ends_the_attempt_without_running_it(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.lease(link)
    link.request("stop", attempt=attempt, grace_s=1, why="changed my mind")
    end = node.await_end(attempt)
    assert (end["reason"], end["why"], end["started_at"], end["exit_code"]) == ("stopped", "changed my mind", None, None)
    refused(link, "conflict", "start", attempt=attempt)


def test_survivors_of_the_command_get_sigterm_and_then_sigkill(node: NodeUnderTest, marker: str) -> None:
    link = node.connect()
    obeying = "trap 'echo asked; exit' TERM; touch one; while :; do sleep 0.2; done"
    ignoring = "trap '' TERM; touch two; while :; do sleep 0.2; done"
    both = 'setsid sh -c "$1" $0 & setsid sh -c "$2" $0 & until [ -e one ] && [ -e two ]; do sleep 0.2; done; exit 5'
    argv = ["sh", "-c", both, marker, obeying, ignoring]
    end, output = node.run(link, argv)
    assert (end["reason"], end["exit_code"]) == ("exited", 5)
    assert "asked" in output
    assert not processes_with(marker)


def test_a_lease_expires_only_while_no_agent_is_connected(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.lease(link, start_timeout_s=1.0)
    # After the end of a longer lease without an agent, the timeout of this one has passed several times.
    other = node.connect()
    unattended = node.lease(other, start_timeout_s=3.0)
    other.close()
    end = wait_until(lambda: node.record(unattended), 20)
    assert end["reason"] == "start_timeout"
    refused(link, "conflict", "prepare", attempt=unattended, launch=launch_of(["true"]))
    link.request("prepare", attempt=attempt, launch=launch_of(["true"]))
    link.request("start", attempt=attempt)
    assert node.await_end(attempt)["exit_code"] == 0


def test_release_removes_the_processes_and_the_directory_of_an_attempt(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.lease(link, gpus=1, gpu_ids=[0], port="any")
    pids = [node.state(attempt)[role]["pid"] for role in ("runner", "keeper")]
    link.request("release", attempt=attempt)
    assert not node.directory(attempt).exists()
    assert not (node.root / node.workflow).exists()
    assert not any(is_alive(pid) for pid in pids)
    link.request("release", attempt=attempt)
    running = node.start(link, ["sleep", "60"])
    refused(link, "conflict", "release", attempt=running)
    node.lease(link, attempt, gpus=1, gpu_ids=[0])


# -- leases


def test_a_lease_can_be_requested_again_before_its_release_is_answered(node: NodeUnderTest) -> None:
    """A gang does this when its other node has refused: it requests a third node, and this one again."""
    link, answers = node.connect(), queue.SimpleQueue[Any]()
    lease: dict[str, Any] = {"gpus": 1, "gpu_ids": [0], "lease_dir": str(node.lease_dir), "port": None, "start_timeout_s": 60}
    attempt = node.attempt()
    link.request("lease", attempt=attempt, **lease)
    link.send("release", answers.put, attempt=attempt)
    link.request("lease", attempt=attempt, **lease)
    assert answers.get(timeout=20) == {}
    assert node.watch(link, attempt)["phase"] == "leased"


def test_a_gpu_has_one_holder_at_a_time_and_a_refusal_names_it(node: NodeUnderTest) -> None:
    link = node.connect()
    first = node.attempt()
    lease: dict[str, Any] = {"gpu_ids": [0, 1, 2, 3], "lease_dir": str(node.lease_dir), "port": None, "start_timeout_s": 60}
    assert link.request("lease", attempt=first, gpus=3, **lease)["gpu_ids"] == [0, 1, 2]
    message = refused(link, "busy", "lease", attempt=node.attempt(), gpus=2, **lease)
    assert message.endswith("1 of 4 GPUs are free and this task needs 2. In use: GPUs 0-2 by this group's own task t1")
    other = node.attempt().replace("/g/", "/other/")
    message = refused(link, "busy", "lease", attempt=other, gpus=2, **lease)
    assert message.endswith(f"this task needs 2. In use: GPUs 0-2 by {user_name()}")
    # The refused attempt has not leased the free GPU.
    for ticket in node.lease_dir.glob("ticket-*"):
        ticket.unlink()  # no refused attempt repeats its request
    assert link.request("lease", attempt=other, gpus=1, **lease)["gpu_ids"] == [3]
    link.request("prepare", attempt=first, launch=launch_of(["true"]))
    link.request("start", attempt=first)
    node.await_end(first)
    assert link.request("lease", attempt=node.attempt(), gpus=3, **lease)["gpu_ids"] == [0, 1, 2]
    assert stat.S_IMODE(node.lease_dir.stat().st_mode) == 0o1777
    assert stat.S_IMODE((node.lease_dir / "gpu-0.lock").stat().st_mode) == 0o666


def test_cpus_and_memory_are_not_leased_twice(node: NodeUnderTest) -> None:
    link = node.connect()
    first, gib = node.attempt(), 1 << 30
    lease: dict[str, Any] = {"gpus": 0, "lease_dir": str(node.lease_dir), "port": None, "start_timeout_s": 60}
    link.request("lease", attempt=first, wanted={"cpus": [6, 8], "memory": [10 * gib, 16 * gib]}, **lease)
    second = node.attempt()
    message = refused(link, "busy", "lease", attempt=second, wanted={"cpus": [3, 8]}, **lease)
    assert "2 of 8 CPUs are free and this task needs 3. In use: 6 by " in message
    assert first not in message
    message = refused(link, "busy", "lease", attempt=second, wanted={"cpus": [1, 8], "memory": [7 * gib, 16 * gib]}, **lease)
    assert "6 of 16 GiB of memory are free and this task needs 7. In use: 10 by " in message
    link.request("lease", attempt=second, wanted={"cpus": [2, 8], "memory": [6 * gib, 16 * gib]}, **lease)
    # A lease without CPUs and memory is not refused, and a claim ends with its processes.
    link.request("lease", attempt=node.attempt(), wanted={}, **lease)
    for role in ("runner", "keeper"):
        with contextlib.suppress(ProcessLookupError):  # a keeper without a task ends when its runner is gone
            os.kill(node.state(first)[role]["pid"], signal.SIGKILL)
    third = node.attempt()

    def leased() -> bool:
        try:
            link.request("lease", attempt=third, wanted={"cpus": [6, 8]}, **lease)
        except AgentError as error:
            if error.kind != "busy":
                raise
            return False
        return True

    wait_until(leased, 20)
    # A request for more CPUs than the node has is only granted when no other claim exists.
    refused(link, "busy", "lease", attempt=node.attempt(), wanted={"cpus": [99, 8]}, **lease)
    assert len(list(node.lease_dir.glob("claim-*.lock"))) == 2


def test_invalid_claim_files_do_not_block_a_lease(node: NodeUnderTest, tmp_path: Path) -> None:
    node.lease_dir.mkdir()
    holder = os.open(node.lease_dir / "claim-12345-0.lock", os.O_RDWR | os.O_CREAT)
    other = os.open(node.lease_dir / "claim-12345-1.lock", os.O_RDWR | os.O_CREAT)
    os.mkfifo(node.lease_dir / "claim-12345-2.lock")
    (node.lease_dir / "claim-12345-3.lock").symlink_to(tmp_path / "elsewhere")
    try:
        os.write(holder, b'{"cpus": "all", "memory": -5, "user": [1]}')
        os.write(other, b"\xff not json")
        for fd in (holder, other):
            fcntl.flock(fd, fcntl.LOCK_EX)
        lease: dict[str, Any] = {"gpus": 0, "lease_dir": str(node.lease_dir), "port": None, "start_timeout_s": 60}
        node.connect().request("lease", attempt=node.attempt(), wanted={"cpus": [8, 8], "memory": [1, 2]}, **lease)
    finally:
        os.close(holder)
        os.close(other)


def test_a_gpu_that_another_program_uses_is_not_leased(node: NodeUnderTest, tmp_path: Path) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    apps = tmp_path / "apps"
    smi.write_text(
        f'#!/bin/sh\ncase "$1" in *apps*) cat {apps};; -L) printf "GPU 0: A\\nGPU 1: A\\n";; '
        '*) printf "0, GPU-a, 00000000:17:00.0\\n1, GPU-b, 00000000:3B:00.0\\n";; esac\n'
    )
    smi.chmod(0o755)
    ended = subprocess.Popen(["true"])
    ended.wait()
    apps.write_text(f"GPU-a, {os.getpid()}, /usr/bin/py,thon, 512\nGPU-b, {ended.pid}, ended, 1\nrubbish\n")
    link = node.connect(python=write_python_wrapper(tmp_path, f"export PATH={smi.parent}:$PATH"))
    lease: dict[str, Any] = {"gpu_ids": [0, 1], "lease_dir": str(node.lease_dir), "port": None, "start_timeout_s": 60}
    message = refused(link, "busy", "lease", attempt=node.attempt(), gpus=2, **lease)
    assert f"1 of 2 GPUs are free and this task needs 2. In use: GPU 0 by pid {os.getpid()} (" in message
    assert "py, thon, 512 MiB), which is not known to be a task of distflow" in message
    attempt = node.attempt()
    assert link.request("lease", attempt=attempt, gpus=1, **lease)["gpu_ids"] == [1]
    assert link.request("lease", attempt=attempt, gpus=1, **lease)["gpu_ids"] == [1]
    assert link.request("lease", attempt=node.attempt(), gpus=1, share_gpus=True, **lease)["gpu_ids"] == [0]


def test_a_gpu_lease_without_room_for_its_directory_is_refused_and_the_agent_continues(
    node: NodeUnderTest, tmp_path: Path
) -> None:
    """A file in place of the workflow's directory acts like a full disk. A child process runs `nvidia-smi` before."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 0, GPU-a, 00000000:17:00.0\n")
    smi.chmod(0o755)
    link = node.connect(python=write_python_wrapper(tmp_path, f"export PATH={smi.parent}:$PATH"))
    (node.root / node.workflow).write_text("in place of its directory")
    lease: dict[str, Any] = {"gpu_ids": [0], "lease_dir": str(node.lease_dir), "port": None, "start_timeout_s": 60}
    assert "cannot create the attempt in `" in refused(link, "internal", "lease", attempt=node.attempt(), gpus=1, **lease)
    link.request("ping")


NO_KERNEL_BUFFER = """\
import ctypes
class NoBuffer(ctypes.CDLL):
    klogctl = staticmethod(lambda *_: -1)
ctypes.CDLL = NoBuffer
"""


@pytest.mark.parametrize(
    ("smi_answers", "reported"),
    [("0, GPU-a, 00000000:17:00.0\n1, GPU-b, 00000000:3B:00.0\n", ["3b", "ca"]), ("", ["17", "3b", "ca"])],
    ids=["nvidia-smi", "nvidia-smi fails"],
)
@pytest.mark.parametrize("share_gpus", [False, True])
def test_errors_of_a_neighbors_gpu_are_not_reported_with_the_end_of_a_task(
    node: NodeUnderTest, tmp_path: Path, smi_answers: str, reported: list[str], share_gpus: bool
) -> None:
    """Of three GPUs with errors, one is leased, one is not, and nvidia-smi never listed one. A journal contains the errors."""
    tools, journal, listed = tmp_path / "bin", tmp_path / "journal", tmp_path / "listed"
    tools.mkdir()
    listed.write_text(smi_answers)
    for name, script in {"nvidia-smi": f"test -s {listed} && cat {listed}", "journalctl": f"cat {journal}"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    (tmp_path / "prefix.py").write_text(NO_KERNEL_BUFFER)
    start = [f"export PATH={tools}:$PATH", "shift 3", "stub=$1", "shift"]
    wrapper = write_python_wrapper(tmp_path, *start, f'exec {PYTHON} -I -S -c "$(cat {tmp_path}/prefix.py)\n$stub" "$@"')
    link = node.connect(python=wrapper)
    lease: dict[str, Any] = {"gpu_ids": [1], "lease_dir": str(node.lease_dir), "port": None, "start_timeout_s": 60}
    attempt = node.attempt()
    link.request("lease", attempt=attempt, gpus=1, share_gpus=share_gpus, **lease)
    listed.write_text("")  # nvidia-smi fails from now on, as it does when a GPU has fallen off the bus
    fail = (
        "import sys, time; file = open(sys.argv[1], 'w'); at = f'[{time.monotonic():.6f}] here kernel: NVRM: Xid '; "
        "[file.write(f'{at}(PCI:0000:{bus}:00): 79, GPU has fallen off the bus.\\n') for bus in ('17', '3b', 'ca')]; "
        "file.close(); sys.exit(3)"
    )
    link.request("prepare", attempt=attempt, launch=launch_of([PYTHON, "-c", fail, str(journal)]))
    link.request("start", attempt=attempt)
    end = node.await_end(attempt)
    assert end["exit_code"] == 3
    assert [line.removeprefix("NVRM: Xid (PCI:0000:")[:2] for line in end["kernel"]["lines"]] == reported


@pytest.mark.slow
@pytest.mark.skipif(
    os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC, reason="a container has other process ids than the driver"
)
@pytest.mark.parametrize("is_permanent", [False, True])
def test_the_end_of_a_task_waits_for_the_processes_on_its_gpu(node: NodeUnderTest, tmp_path: Path, is_permanent: bool) -> None:
    smi, calls = tmp_path / "bin" / "nvidia-smi", tmp_path / "asked"
    smi.parent.mkdir()
    ended = subprocess.Popen(["true"])
    ended.wait()
    # A process that has ended is still on the GPU at the first checks, or at all of them.
    condition = f"test $(wc -l < {calls}) -gt 2 ||" if not is_permanent else ""
    smi.write_text(
        f'#!/bin/sh\ncase "$1" in *apps*) echo >> {calls}; {condition} echo "GPU-a, {ended.pid}, python, 512";; '
        '-L) echo "GPU 0: A";; *) echo "0, GPU-a, 00000000:17:00.0";; esac\n'
    )
    smi.chmod(0o755)
    link = node.connect(python=write_python_wrapper(tmp_path, f"export PATH={smi.parent}:$PATH"))
    attempt = node.attempt()
    lease: dict[str, Any] = {"gpu_ids": [0], "lease_dir": str(node.lease_dir), "port": None, "start_timeout_s": 60}
    link.request("lease", attempt=attempt, gpus=1, **lease)
    link.request("prepare", attempt=attempt, launch=launch_of(["true"]))
    link.request("start", attempt=attempt)
    end = node.await_end(attempt)
    assert end["exit_code"] == 0
    if is_permanent:
        assert end["message"].startswith(f"processes left on its GPUs: GPU 0: pid {ended.pid} (python, 512 MiB)")
    else:
        assert end["message"] is None
        assert len(calls.read_text().splitlines()) >= 3


@pytest.mark.slow
def test_a_stop_while_nvidia_smi_is_slow_does_not_lose_the_exit_code(node: NodeUnderTest, tmp_path: Path) -> None:
    smi, calls = tmp_path / "bin" / "nvidia-smi", tmp_path / "asked"
    smi.parent.mkdir()
    # The second call lists the processes on the GPU of the ended task. It takes longer than a keeper has to confirm a stop.
    slow = f"echo >> {calls}; test $(wc -l < {calls}) -ne 2 || sleep 7"
    smi.write_text(
        f'#!/bin/sh\ncase "$1" in *apps*) {slow};; -L) echo "GPU 0: A";; *) echo "0, GPU-a, 00000000:17:00.0";; esac\n'
    )
    smi.chmod(0o755)
    link = node.connect(python=write_python_wrapper(tmp_path, f"export PATH={smi.parent}:$PATH"))
    attempt = node.start(link, ["sh", "-c", "exit 3"], lease={"gpus": 1, "gpu_ids": [0]})
    wait_until(lambda: len(calls.read_text().splitlines()) > 1, 20, "nvidia-smi is called again")
    link.send("stop", lambda _answer: None, attempt=attempt, grace_s=0, why="a peer failed")
    end = node.await_end(attempt)
    assert (end["reason"], end["exit_code"]) == ("exited", 3), end


def test_a_port_is_reserved_for_the_task_which_can_listen_on_it(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.attempt()
    lease: dict[str, Any] = {"gpus": 0, "gpu_ids": [], "lease_dir": str(node.lease_dir), "start_timeout_s": 60}
    port = link.request("lease", attempt=attempt, port="any", **lease)["port"]
    message = refused(link, "port_taken", "lease", attempt=node.attempt(), port=port, **lease)
    assert message.endswith(f"port {port} is in use by this group's own task t1")
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("0.0.0.0", port))
    server = (
        "import socket,sys; s=socket.socket(socket.AF_INET6); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); "
        "s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0); s.bind(('::', int(sys.argv[1]))); s.listen(); "
        "c=socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.accept(); print('joined')"
    )
    link.request("prepare", attempt=attempt, launch=launch_of([PYTHON, "-c", server, str(port)]))
    link.request("start", attempt=attempt)
    node.await_end(attempt)
    assert node.output(attempt) == "joined\n"
    # The port can be leased again at once, although connections of the last attempt are in TIME_WAIT.
    assert link.request("lease", attempt=node.attempt(), port=port, **lease)["port"] == port


def test_a_port_in_use_is_refused_and_never_replaced(node: NodeUnderTest) -> None:
    link = node.connect()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port := free_port("")))
        taken.listen()
        fields: dict[str, Any] = {"gpus": 1, "gpu_ids": [0], "lease_dir": str(node.lease_dir), "start_timeout_s": 60}
        assert str(port) in refused(link, "port_taken", "lease", attempt=node.attempt(), port=port, **fields)
    assert link.request("lease", attempt=node.attempt(), port=port, **fields) == {
        "gpu_ids": [0],
        "port": port,
        "link_port": None,
    }


def test_a_process_that_locks_the_claims_does_not_block_the_agent(node: NodeUnderTest) -> None:
    node.lease_dir.mkdir()
    lock = os.open(node.lease_dir / "claims.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    lease: dict[str, Any] = {"gpus": 0, "lease_dir": str(node.lease_dir), "port": None, "start_timeout_s": 60}
    lease |= {"wanted": {"cpus": [1, 2]}}
    link = node.connect()
    try:
        assert "claims.lock" in str(refused(link, "busy", "lease", attempt=node.attempt(), **lease))
    finally:
        os.close(lock)
    link.request("lease", attempt=node.attempt(), **lease)


def test_lock_files_name_the_runner_after_the_agent_has_ended(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.lease(link, gpus=1, gpu_ids=[0], port=0, wanted={"cpus": [1, 8]})
    link.close()
    contents = {path.name.split("-")[0]: json.loads(path.read_text()) for path in node.lease_dir.glob("*-*.lock")}
    runner = node.state(attempt)["runner"]["pid"]
    assert {name: (content["attempt"], content["pid"]) for name, content in contents.items()} == dict.fromkeys(
        ("claim", "gpu", "port"), (attempt, runner)
    )
    assert contents["claim"]["cpus"] == 1
    node.connect().request("release", attempt=attempt)


def test_links_pipes_and_directories_in_place_of_lock_files_are_not_used(node: NodeUnderTest, tmp_path: Path) -> None:
    link = node.connect()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    node.lease_dir.mkdir()
    (node.lease_dir / "gpu-0.lock").symlink_to(victim)
    os.mkfifo(node.lease_dir / "gpu-1.lock")
    (node.lease_dir / "gpu-2.lock").mkdir()
    fields: dict[str, Any] = {"gpu_ids": [0, 1, 2, 3], "lease_dir": str(node.lease_dir), "port": None, "start_timeout_s": 60}
    assert link.request("lease", attempt=node.attempt(), gpus=1, **fields)["gpu_ids"] == [3]
    refused(link, "busy", "lease", attempt=node.attempt(), gpus=1, **fields)
    assert victim.read_text() == "precious"


# -- files


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def member(name: str, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def test_an_archive_is_unpacked_with_its_modes_and_inner_links(node: NodeUnderTest) -> None:
    link = node.connect()
    data = tar_of(
        (member("./d", type=tarfile.DIRTYPE, mode=0o755), b""),
        (member("./d/run.sh", mode=0o4755), b"#!/bin/sh\necho hi\n"),
        (member("link", type=tarfile.SYMTYPE, linkname="d/run.sh"), b""),
        (member("hard", type=tarfile.LNKTYPE, linkname="d/run.sh"), b""),
    )
    attempt = node.start(link, ["./link"], files=[{"path": "work", "blob": node.stage(data), "is_tar": True}])
    assert node.await_end(attempt)["exit_code"] == 0
    assert node.output(attempt) == "hi\n"
    assert stat.S_IMODE((node.directory(attempt) / "work/d/run.sh").stat().st_mode) == 0o755


def test_an_attempt_reuses_the_unchanged_files_of_an_ended_one(node: NodeUnderTest) -> None:
    link = node.connect()
    folders = [(member(f"d{number}", type=tarfile.DIRTYPE, mode=0o755), b"") for number in range(3)]
    blob = node.stage(tar_of(*folders, *((member(f"d{number % 3}/{number}.py"), b"text") for number in range(120))))
    files = [{"path": "work/code", "blob": blob, "is_tar": True, "reusable": True}]
    first = node.start(link, ["sh", "-c", "echo more >> code/d1/1.py"], files=files)
    assert node.await_end(first)["exit_code"] == 0
    before = {path.name: path.stat().st_ino for path in (node.directory(first) / "work").rglob("*.py")}
    second = node.start(link, ["sleep", "60"], files=files)
    found = {path.name: path.stat().st_ino for path in (node.directory(second) / "work").rglob("*.py")}
    assert len(found) == 120
    assert before.keys() - {name for name, inode in found.items() if before[name] == inode} == {"1.py"}
    assert (node.directory(first) / "work/code/d1/1.py").read_text() == "textmore\n"
    link.request("stop", attempt=second, grace_s=0, why="test")


UNSAFE_ARCHIVES = [
    [(member("../evil"), b"x")],
    [(member("/tmp/evil"), b"x")],
    [(member("a/../../evil"), b"x")],
    [(member("out", type=tarfile.SYMTYPE, linkname="/etc"), b""), (member("out/evil"), b"x")],
    [(member("out", type=tarfile.SYMTYPE, linkname="../../../.."), b"")],
    [
        (member("a/b/c", type=tarfile.SYMTYPE, linkname="../.."), b""),
        (member("z", type=tarfile.SYMTYPE, linkname="a/b/c/.."), b""),
        (member("z/evil"), b"x"),
    ],
    [(member("hard", type=tarfile.LNKTYPE, linkname="../runner.json"), b"")],
    [(member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3), b"")],
    [(member("fifo", type=tarfile.FIFOTYPE), b"")],
]


def test_an_archive_that_could_write_outside_its_directory_is_refused(node: NodeUnderTest) -> None:
    link = node.connect()
    for number, members in enumerate(UNSAFE_ARCHIVES):
        attempt = node.lease(link)
        launch = launch_of(["true"], files=[{"path": "work", "blob": node.stage(tar_of(*members)), "is_tar": True}])
        assert refused(link, "bad_request", "prepare", attempt=attempt, launch=launch), number
        link.request("release", attempt=attempt)
    assert not list(node.root.rglob("evil"))


def test_a_file_cannot_be_placed_outside_the_attempt_or_over_its_records(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.lease(link)
    for path in ("../x", "/tmp/x", "runner.json", "./exit.json", "work/../../x", "control", ""):
        launch = launch_of(["true"], files=[{"path": path, "text": "x"}])
        assert refused(link, "bad_request", "prepare", attempt=attempt, launch=launch), path


SLOW_DISK = """\
import os, time
real = os.open
def slow(path, *flags, **fields):
    while str(path).endswith("/work/f0") and not os.path.exists({released!r}):
        time.sleep(0.01)
    return real(path, *flags, **fields)
os.open = slow
"""


def test_preparing_does_not_delay_a_ping(node: NodeUnderTest, tmp_path: Path) -> None:
    released = tmp_path / "released"
    (tmp_path / "prefix.py").write_text(SLOW_DISK.format(released=str(released)))
    start = ["shift 3", "stub=$1", "shift", f'exec {PYTHON} -I -S -c "$(cat {tmp_path}/prefix.py)\n$stub" "$@"']
    link = node.connect(python=write_python_wrapper(tmp_path, *start))
    attempt, data = node.lease(link), tar_of((member("f0"), b"x" * 100))
    launch = launch_of(["true"], files=[{"path": "work", "blob": node.stage(data), "is_tar": True}])
    answers: list[object] = []
    link.send("prepare", answers.append, attempt=attempt, launch=launch)
    for _ in range(3):
        link.request("ping")
    assert not answers
    released.touch()
    wait_until(lambda: answers, 20, "it is prepared")
    assert answers == [{"prepared": True}]
    assert (node.directory(attempt) / "work/f0").exists()


# -- output


class Tail:
    """The data that a stream has sent."""

    def __init__(self, node: NodeUnderTest, stream: int) -> None:
        self._node, self._stream = node, stream

    def _events(self, kind: str) -> list[Event]:
        return [event for event in list(self._node.events) if event["event"] == kind and event["stream"] == self._stream]

    @property
    def data(self) -> bytes:
        data = b""
        for event in self._events("data"):
            assert event["offset"] == len(data)
            data += base64.b64decode(event["data"])
        return data

    @property
    def size(self) -> int | None:
        return next((event["size"] for event in self._events("eof")), None)


@EVERY_TRANSPORT
def test_a_stream_without_credit_pauses_and_pings_are_answered(node: NodeUnderTest) -> None:
    link = node.connect()
    total = 3_000_000
    attempt = node.start(link, [PYTHON, "-c", f"import sys; sys.stdout.buffer.write(bytes(range(250)) * {total // 250})"])
    link.request("tail", stream=1, attempt=attempt, file="output.log", offset=0)
    tail = Tail(node, 1)
    node.await_end(attempt)
    wait_until(lambda: len(tail.data) == 256 * 1024)
    link.request("ping")
    assert len(tail.data) == 256 * 1024
    returned = 0

    def has_ended() -> bool:
        nonlocal returned
        received = len(tail.data)
        link.credit(1, received - returned)
        returned = received
        return tail.size is not None

    assert not has_ended()
    wait_until(has_ended)
    assert tail.data == bytes(range(250)) * (total // 250)
    assert tail.size == total


@EVERY_TRANSPORT
def test_output_is_sent_as_it_is_written_with_the_time_of_each_read(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.lease(link)
    link.request("tail", stream=1, attempt=attempt, file="output.log", offset=0)
    link.request("tail", stream=2, attempt=attempt, file="output.idx", offset=0)
    script = 'echo one; read x < "$0"; echo two >&2; read x < "$1"'
    # Each `read` has its own FIFO: the second `read` could otherwise find the writer of the first one.
    fifos = [node.directory(attempt) / "work" / name for name in ("first", "second")]
    for fifo in fifos:
        os.mkfifo(fifo)
    link.request("prepare", attempt=attempt, launch=launch_of(["sh", "-c", script, *map(str, fifos)]))
    link.request("start", attempt=attempt)
    log, index = Tail(node, 1), Tail(node, 2)
    wait_until(lambda: log.data == b"one\n")
    fifos[0].write_text("x\n")
    wait_until(lambda: log.data == b"one\ntwo\n")
    fifos[1].write_text("x\n")
    end = node.await_end(attempt)
    wait_until(lambda: (log.size, index.size) == (8, 32))
    (first, start), (second, after) = struct.iter_unpack("<dQ", index.data)
    assert (start, after) == (0, 4)
    assert end["started_at"] <= first < second <= end["ended_at"] + 1


def test_a_tail_begins_at_its_offset_and_ends_with_the_attempt(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.start(link, ["printf", "0123456789"])
    node.await_end(attempt)
    link.close()
    link = node.connect()
    link.request("tail", stream=5, attempt=attempt, file="output.log", offset=7)
    wait_until(lambda: Tail(node, 5).size == 10)
    assert [(e["offset"], base64.b64decode(e["data"])) for e in node.events if e["event"] == "data"] == [(7, b"789")]
    refused(link, "bad_request", "tail", stream=6, attempt=attempt, file="launch.json", offset=0)
    refused(link, "not_found", "tail", stream=6, attempt=node.attempt(), file="output.log", offset=0)


def test_no_output_is_sent_after_untail(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.lease(link)
    link.request("tail", stream=1, attempt=attempt, file="output.log", offset=0)
    link.request("untail", stream=1)
    link.request("prepare", attempt=attempt, launch=launch_of(["echo", "hi"]))
    link.request("start", attempt=attempt)
    node.await_end(attempt)
    link.request("ping")
    assert Tail(node, 1).data == b""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_loses_output_and_nothing_else(node: NodeUnderTest, tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", str(node.root)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("cannot mount here")
    try:
        link = node.connect()
        attempt = node.start(link, [PYTHON, "-c", "import sys; sys.stdout.buffer.write(b'x' * 5_000_000); sys.exit(6)"])
        end = node.await_end(attempt)
        assert end["exit_code"] == 6
        assert end["output_bytes"] < 2_000_000
        assert end["output_bytes"] + end["lost_output_bytes"] == 5_000_000
        assert node.record(attempt) == end
        refused(link, "no_space", "lease", attempt=node.attempt(), gpus=0, port=None, lease_dir=str(node.lease_dir))
        refused(link, "no_space", "stage", blobs=[{"hash": "0" * 64, "size": 10_000_000}])
        # The runner outlives the record of the end for a moment.
        wait_until(lambda: try_clean(link, node.workflow), 20)
        node.lease(link)
    finally:
        node.close()
        subprocess.run(["umount", "-l", str(node.root)], check=True)


# -- several agents


@EVERY_TRANSPORT
def test_a_later_agent_finds_attempts_of_an_earlier_one(node: NodeUnderTest) -> None:
    link = node.connect()
    os.mkfifo(node.root / "fifo")
    attempt = node.start(link, ["sh", "-c", 'read x < "$0"; exit 3', str(node.root / "fifo")])
    link.close()
    events: list[Event] = []
    link = node.connect(events=events)
    status = node.watch(link, attempt, events)
    assert (status["phase"], status["pid"]) == ("running", node.state(attempt)["command"]["pid"])
    (node.root / "fifo").write_text("x\n")
    # The agent reports the end without a request.
    assert node.await_end(attempt, events=events)["exit_code"] == 3


def test_two_agents_report_the_same_events(node: NodeUnderTest) -> None:
    first: list[Event] = []
    second: list[Event] = []
    one = node.connect(events=first)
    attempt = node.lease(one)
    two = node.connect(events=second)
    node.watch(two, attempt, second)
    os.mkfifo(node.root / "fifo")
    argv = ["sh", "-c", 'echo hi; read x < "$0"', str(node.root / "fifo")]
    for link in (one, two):
        link.request("tail", stream=1, attempt=attempt, file="output.log", offset=0)
    one.request("prepare", attempt=attempt, launch=launch_of(argv))
    two.request("start", attempt=attempt)
    for events in (first, second):  # before the end of the task, which would be reported in any case
        wait_until(lambda e=events: [one for one in e if one["event"] == "data"])  # type: ignore[misc]
        phases = [e["status"]["phase"] for e in events if e["event"] == "status"]
        assert list(dict.fromkeys(phases)) == ["leased", "prepared", "running"]
    (node.root / "fifo").write_text("x\n")
    assert node.await_end(attempt, events=first) == node.await_end(attempt, events=second)


@EVERY_TRANSPORT
def test_an_end_without_a_connected_agent_is_reported_by_the_next_one(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.start(link, ["sh", "-c", "sleep 0.2; exit 9"])
    link.close()
    wait_until(lambda: node.record(attempt))
    answer = node.connect().request("hello", watch=[attempt])["attempts"][attempt]
    assert (answer["phase"], answer["end"]["exit_code"]) == ("ended", 9)


def test_survey_lists_a_workflow_and_clean_removes_it(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.start(link, ["sh", "-c", "echo result > @@ATTEMPT_DIR@@/output/r; head -c 100000 /dev/zero > big"])
    node.await_end(attempt)
    running = node.start(link, ["sleep", "60"])
    (found,) = link.request("survey")["workflows"]
    assert (found["uuid"], found["alive"]) == (node.workflow, [running])
    assert found["bytes"] > 100_000
    assert running in refused(link, "conflict", "clean", workflow=node.workflow, keep_output=False)
    link.request("stop", attempt=running, grace_s=0, why="")
    node.await_end(running)
    wait_until(lambda: not link.request("survey")["workflows"][0]["alive"])
    assert link.request("clean", workflow=node.workflow, keep_output=True)["freed_bytes"] >= 100_000
    assert (node.directory(attempt) / "output/r").read_text() == "result\n"
    assert not (node.directory(attempt) / "work").exists()
    assert link.request("hello", watch=[attempt])["attempts"][attempt]["phase"] == "ended"
    link.request("clean", workflow=node.workflow, keep_output=False)
    assert not (node.root / node.workflow).exists()
    assert link.request("hello", watch=[attempt])["attempts"][attempt]["phase"] == "absent"
    assert link.request("clean", workflow=node.workflow, keep_output=False) == {"freed_bytes": 0}


def count_wakeups(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)


def test_an_idle_agent_runner_and_keeper_do_not_wake_up(node: NodeUnderTest) -> None:
    link = node.connect(ping_s=60)
    agent = link.request("hello", watch=[])["facts"]["agent_pid"]
    attempt = node.start(link, ["sleep", "60"], lease={"gpus": 1, "gpu_ids": [0], "port": "any"})
    link.request("tail", stream=1, attempt=attempt, file="output.log", offset=0)
    state = node.state(attempt)
    pids = [agent, state["runner"]["pid"], state["keeper"]["pid"]]
    # Wait until the requests above are done. Then no thread may wake up for a second.
    counts: list[list[int]] = [[]]

    def is_idle() -> bool:
        threading.Event().wait(0.3)
        counts.append([count_wakeups(pid) for pid in pids])
        return counts[-1] == counts[-2]

    wait_until(is_idle, 20, "all are idle")
    before = [count_wakeups(pid) for pid in pids]
    threading.Event().wait(1.0)
    assert [later - earlier for later, earlier in zip((count_wakeups(pid) for pid in pids), before, strict=True)] == [0, 0, 0]


def find_python_3_8() -> str | None:
    for candidate in ("python3.8", os.path.expanduser("~/.pyenv/versions/3.8.18/bin/python3.8")):
        program = shutil.which(candidate)
        if program is not None:
            with contextlib.suppress(OSError):
                environment = {**os.environ, "PYENV_VERSION": os.environ.get("PYENV_VERSION", "3.8.18")}
                argv = [program, "-c", "import sys; print(sys.executable) if sys.version_info[:2] == (3, 8) else sys.exit(1)"]
                done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
                if done.returncode == 0:
                    return done.stdout.strip()  # the interpreter itself: a version manager's shim needs its variable
    return None


def test_the_runtime_works_on_the_oldest_python(node: NodeUnderTest) -> None:
    python = find_python_3_8()
    if python is None:
        pytest.skip("no Python 3.8 here")
    link = node.connect(python=python)
    assert link.request("hello", watch=[])["facts"]["python_version"].startswith("3.8")
    attempt = node.start(
        link,
        ["sh", "-c", "echo hi; (setsid sleep 60 &); exit 3"],
        lease={"gpus": 1, "gpu_ids": [0], "port": "any"},
        files=[{"path": "work", "blob": node.stage(tar_of((member("a/b"), b"x"))), "is_tar": True}],
    )
    link.request("tail", stream=1, attempt=attempt, file="output.log", offset=0)
    assert node.await_end(attempt)["exit_code"] == 3
    wait_until(lambda: Tail(node, 1).size == 3)
    failed, _ = node.run(link, ["no-such-program"])
    assert failed["exit_code"] == 127
    stopped = node.start(link, ["sleep", "60"])
    link.request("stop", attempt=stopped, grace_s=5, why="")
    assert node.await_end(stopped)["signal"] == signal.SIGTERM
    link.request("survey")
    link.request("clean", workflow=node.workflow, keep_output=False)


@EVERY_TRANSPORT
def test_a_tilde_in_the_root_is_the_home_on_the_node(node: NodeUnderTest, tmp_path: Path) -> None:
    python = write_python_wrapper(tmp_path, f"export HOME={tmp_path}/home")
    link = connect(node.transport, "~/distflow root", python)
    assert link.request("hello", watch=[])["facts"]["root"] == f"{tmp_path}/home/distflow root/distflow-node"
    link.close()


def test_a_task_with_a_self_stop_ends_after_its_agent_has_ended(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.start(link, ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.2; done"], self_stop_after_s=1.0)
    other = node.start(link, ["sleep", "600"])
    # While the agent is connected, the time does not count.
    until = time.monotonic() + 2.0
    wait_until(lambda: link.request("ping") and time.monotonic() > until)
    assert node.record(attempt) is None
    link.close()
    end = wait_until(lambda: node.record(attempt), 20)
    assert (end["reason"], end["why"], end["exit_code"]) == ("unattended", "NODE_LOST", 0)
    assert node.record(other) is None


@EVERY_TRANSPORT
@pytest.mark.slow
def test_the_time_until_a_self_stop_begins_when_the_connection_ends(
    node: NodeUnderTest,
) -> None:
    link, self_stop_s = node.connect(), 6.0
    agent = link.request("hello", watch=[])["facts"]["agent_pid"]
    attempt = node.start(link, ["sleep", "600"], self_stop_after_s=self_stop_s)
    quiet_since = time.monotonic()
    wait_until(lambda: time.monotonic() > quiet_since + self_stop_s + 0.5, 20, "the task was quiet for longer than that")
    link.close()
    wait_until(lambda: not is_alive(agent), 20, "the agent has ended")
    assert node.watch(node.connect(), attempt)["phase"] == "running"


def test_output_of_many_attempts_is_complete_despite_a_low_limit_of_open_files(node: NodeUnderTest, tmp_path: Path) -> None:
    """Each attempt takes up to three of the agent's descriptors: a connection to its runner or keeper, and two open files."""
    link = node.connect(python=write_python_wrapper(tmp_path, "ulimit -S -n 24"))
    attempts = [node.start(link, ["sh", "-c", "ulimit -S -n; sleep 600"]) for _ in range(12)]
    for number, attempt in enumerate(attempts):
        link.request("tail", stream=number, attempt=attempt, file="output.log", offset=0)
    expected = [base64.b64encode(b"24\n").decode()] * len(attempts)
    wait_until(
        lambda: [event["data"] for event in list(node.events) if event["event"] == "data"] == expected, 20, "all output arrives"
    )


def test_heartbeats_are_reported_once_each_after_pings(node: NodeUnderTest) -> None:
    link = node.connect()
    shell = 'trap "touch $DISTFLOW_HEARTBEAT; echo beaten" USR1; echo there; while :; do sleep 0.2; done'
    attempt = node.start(link, ["bash", "-c", shell])
    silent = node.start(link, ["sleep", "600"])
    wait_until(lambda: "there" in node.output(attempt), 20)

    def beats() -> list[Event]:
        # Events that follow the answer to one ping arrive before the answer to the next one.
        link.request("ping")
        link.request("ping")
        return [event for event in node.events if event["event"] == "beat"]

    assert beats() == []
    for count in (1, 2):
        os.kill(node.state(attempt)["command"]["pid"], signal.SIGUSR1)
        wait_until(lambda count=count: node.output(attempt).count("beaten") == count, 20)  # type: ignore[misc]
        events = beats()
        assert len(events) == count
        assert events[-1]["attempt"] == attempt
        assert 0 <= events[-1]["age_s"] < 20
        assert beats() == events
    assert not (node.directory(silent) / "heartbeat").exists()
