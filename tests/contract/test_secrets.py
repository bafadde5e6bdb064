"""Secrets on a node: output and records do not contain them, and files of credentials are removed with the attempt."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from contract.conftest import EVERY_TRANSPORT, LOCAL_TRANSPORT, launch_of
from distflow.runtime.files import attempts
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from contract.conftest import NodeUnderTest

pytestmark = LOCAL_TRANSPORT

CANARY = "canary-5ecret-41"
FILES = [{"path": "files/run/deploy", "files": {"key": f"{CANARY}-file\nsecond-line-of-it\n", "user": "somebody-else"}}]


def print_and_wait(script: str) -> list[str]:
    """A command that runs a script, and then waits for the file GO."""
    return ["sh", "-c", f"{script}; while [ ! -e GO ]; do sleep 0.2; done"]


def go(node: NodeUnderTest, attempt: str) -> None:
    (node.directory(attempt) / "work/GO").touch()


def credentials_directory(node: NodeUnderTest, attempt: str) -> Path:
    return (node.directory(attempt) / "files/run/deploy").resolve()


def files_with_canary(node: NodeUnderTest) -> list[Path]:
    """Files of the node that contain the canary."""
    return [path for path in node.root.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]


def await_output(node: NodeUnderTest, attempt: str, text: str) -> None:
    wait_until(lambda: text in node.output(attempt), 20, text)


def test_credentials_are_files_for_their_owner_while_the_attempt_lives(node: NodeUnderTest) -> None:
    link = node.connect()
    script = 'cat "$0/files/run/deploy/key" | rev; ls "$0/files/run/deploy"; echo up'
    attempt = node.start(link, [*print_and_wait(script), "@@ATTEMPT_DIR@@"], secret_files=FILES)
    await_output(node, attempt, "up\n")
    folder = credentials_directory(node, attempt)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {"key": 0o600, "user": 0o600}
    for path in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    if Path("/dev/shm").is_mount():
        assert folder.is_relative_to("/dev/shm")
    assert (folder / "key").read_text() == f"{CANARY}-file\nsecond-line-of-it\n"
    launch = json.loads((node.directory(attempt) / "launch.json").read_text())
    assert launch["secret_file_names"] == {"files/run/deploy": ["key", "user"]}
    go(node, attempt)
    node.await_end(attempt)
    assert node.output(attempt).splitlines() == [f"{CANARY}-file"[::-1], "second-line-of-it"[::-1], "key", "user", "up"]
    assert not folder.parent.exists()
    assert not files_with_canary(node)


def _stop(node: NodeUnderTest, attempt: str) -> None:
    node.connect().request("stop", attempt=attempt, grace_s=0, why="test")


def _kill(*names: str) -> Callable[[NodeUnderTest, str], None]:
    def kill(node: NodeUnderTest, attempt: str) -> None:
        pids = [node.state(attempt)[name]["pid"] for name in names]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # so that none of them can react to the end of the other one
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    return kill


@pytest.mark.parametrize(
    "end", [_stop, _kill("keeper"), _kill("runner"), _kill("keeper", "runner")], ids=["stop", "keeper", "runner", "both"]
)
def test_files_of_credentials_are_removed_after_any_end(node: NodeUnderTest, end: Callable[[NodeUnderTest, str], None]) -> None:
    link = node.connect()
    script = f"echo '{{\"message\": \"'$TOKEN'\"}}' > $TORCHELASTIC_ERROR_FILE; echo $TOKEN; echo {CANARY[:6]}up"
    attempt = node.start(link, print_and_wait(script), secret_files=FILES, secret_env={"TOKEN": CANARY})
    await_output(node, attempt, "up\n")
    folder = credentials_directory(node, attempt)
    assert folder.is_dir()
    end(node, attempt)
    reported_end = node.await_end(attempt)
    assert not folder.parent.exists()
    assert CANARY not in json.dumps(reported_end)
    assert not files_with_canary(node)


def test_files_of_credentials_are_removed_when_a_lease_is_released(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.lease(link)
    link.request("prepare", attempt=attempt, launch=launch_of(["true"], secret_files=FILES))
    folder = credentials_directory(node, attempt)
    assert folder.is_dir()
    link.request("release", attempt=attempt)
    assert not folder.parent.exists()


def test_cleaning_removes_credentials_of_an_attempt_whose_pair_was_killed(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.start(link, print_and_wait("echo up"), secret_files=FILES)
    await_output(node, attempt, "up\n")
    folder = credentials_directory(node, attempt)
    link.close()
    _kill("keeper", "runner")(node, attempt)
    assert folder.is_dir()
    link = node.connect()
    wait_until(lambda: not attempts.is_reachable(str(node.directory(attempt))), 20, "both are gone")
    link.request("clean", workflow=node.workflow, keep_output=False)
    assert not folder.parent.exists()


def test_a_second_prepare_writes_the_files_of_credentials_again(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.lease(link)
    for _ in range(2):
        link.request("prepare", attempt=attempt, launch=launch_of(["true"], secret_files=FILES))
    assert (credentials_directory(node, attempt) / "user").read_text() == "somebody-else"
    link.request("release", attempt=attempt)


@pytest.mark.parametrize("pieces", [[CANARY], [CANARY[:5], CANARY[5:]], list(CANARY)], ids=["whole", "halves", "letters"])
def test_secrets_in_output_are_masked_wherever_the_output_is_split(node: NodeUnderTest, pieces: list[str]) -> None:
    link = node.connect()
    # The keeper reads each piece separately: the next one is written only after this one was read.
    script = (
        "import os,sys,fcntl,termios,struct\n"
        "for piece in sys.argv[1:]:\n"
        "    os.write(1, piece.encode())\n"
        "    while struct.unpack('i', fcntl.ioctl(1, termios.FIONREAD, b'    '))[0]: pass\n"
    )
    argv = ["python3", "-c", script, "begin ", *pieces, " end\n", "can"]
    end, output = node.run(link, argv, secret_env={"TOKEN": CANARY})
    assert end["exit_code"] == 0
    assert output == "begin ******** end\ncan"
    assert end["output_bytes"] == len(output)


def test_output_that_may_begin_a_secret_is_not_held_back_for_long(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.start(link, print_and_wait("printf 'loading canary'"), secret_env={"TOKEN": CANARY})
    await_output(node, attempt, "loading canary")
    assert node.record(attempt) is None
    go(node, attempt)
    assert node.await_end(attempt)["exit_code"] == 0


def test_the_runner_masks_output_that_a_killed_keeper_had_not_read(node: NodeUnderTest) -> None:
    link = node.connect()
    script = "trap '' TERM; echo up; while [ ! -e GO ]; do sleep 0.2; done; echo $TOKEN; echo printed >&2; exec sleep 600"
    attempt = node.start(link, ["sh", "-c", script], secret_env={"TOKEN": CANARY})
    await_output(node, attempt, "up\n")
    keeper = node.state(attempt)["keeper"]["pid"]
    os.kill(keeper, signal.SIGSTOP)
    go(node, attempt)
    pipe = Path("/proc", str(node.state(attempt)["command"]["pid"]), "comm")
    wait_until(lambda: pipe.read_text().strip() == "sleep" and not _below_is_sh(node, attempt), 20, "it has printed")
    os.kill(keeper, signal.SIGKILL)
    assert node.await_end(attempt)["reason"] == "keeper_died"
    assert node.output(attempt) == "up\n********\nprinted\n"


def _below_is_sh(node: NodeUnderTest, attempt: str) -> bool:
    pid = node.state(attempt)["command"]["pid"]
    return b"600" not in Path("/proc", str(pid), "cmdline").read_bytes()


def test_secrets_are_masked_in_an_error_file_and_in_its_record(node: NodeUnderTest) -> None:
    link = node.connect()
    error = {"message": {"message": f"RuntimeError: token {CANARY}", "extraInfo": {"py_callstack": f"at {CANARY}"}}}
    script = (
        "import json,os,sys; open(os.environ['TORCHELASTIC_ERROR_FILE'],'w').write(sys.argv[1].replace('CAN', os.environ['T']))"
    )
    argv = ["python3", "-c", script + "; sys.exit(3)", json.dumps(error).replace(CANARY, "CAN")]
    end, _ = node.run(link, argv, secret_env={"T": CANARY})
    reported_error: Any = end["error"]
    assert reported_error["message"] == {
        "message": "RuntimeError: token ********",
        "extraInfo": {"py_callstack": "at ********"},
    }
    assert not files_with_canary(node)


@pytest.mark.parametrize("message", ['"half of a pair: \\ud83d"', "[" * 700 + "]" * 700], ids=["no text", "too deep"])
def test_an_error_file_that_cannot_be_forwarded_does_not_lose_the_exit_code(node: NodeUnderTest, message: str) -> None:
    link = node.connect()
    argv = ["sh", "-c", 'printf %s "$0" > "$TORCHELASTIC_ERROR_FILE"; exit 3', f'{{"message": {message}}}']
    end, _ = node.run(link, argv, secret_env={"T": CANARY})
    assert (end["reason"], end["exit_code"]) == ("exited", 3)
    assert end["error"] in (None, {"message": "half of a pair: ?"})


def test_files_of_credentials_cannot_be_placed_outside_their_directory(node: NodeUnderTest) -> None:
    from distflow.errors import AgentError

    link = node.connect()
    entries: list[dict[str, Any]] = [
        {"path": "../x", "files": {"a": "b"}}, {"path": "files/x", "files": {"../a": "b"}}, {"path": "control", "files": {}}
    ]  # fmt: skip
    for entry in entries:
        attempt = node.lease(link)
        with pytest.raises(AgentError):
            link.request("prepare", attempt=attempt, launch=launch_of(["true"], secret_files=[entry]))
        link.request("release", attempt=attempt)


@pytest.fixture(autouse=True)
def _no_credentials_remain_in_memory(tmp_path: Path) -> Iterator[None]:
    before = set(_list_memory_directories())
    yield
    wait_until(
        lambda: not [path for path in set(_list_memory_directories()) - before if _belongs_to(path, tmp_path)],
        20,
        "all is removed",
    )


def _list_memory_directories() -> list[Path]:
    return list(Path("/dev/shm").glob(f"distflow-{os.getuid()}/*"))


def _belongs_to(path: Path, folder: Path) -> bool:
    import hashlib

    attempts = list(folder.glob("root/*/*/*/*"))
    return path.name in {hashlib.sha256(os.fsencode(os.path.realpath(one))).hexdigest()[:32] for one in attempts}


@EVERY_TRANSPORT
def test_a_process_that_knows_a_secret_leaves_no_core(node: NodeUnderTest, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -c unlimited\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    limit = subprocess.run(["sh", "-c", "ulimit -c unlimited; ulimit -c"], capture_output=True, text=True, check=False).stdout
    if Path("/proc/sys/kernel/core_pattern").read_text().strip() != "core" or limit != "unlimited\n":
        pytest.skip("no core files are written here")
    link = node.connect(python=str(python))
    # A process of the task may leave a core.
    with_core = node.start(link, ["sh", "-c", "sleep 600 & kill -ABRT $!; wait"], secret_env={"TOKEN": CANARY})
    node.await_end(with_core)
    assert [path.name for path in (node.directory(with_core) / "work").glob("core*")]
    attempt = node.start(link, print_and_wait("echo up"), secret_env={"TOKEN": CANARY}, secret_files=FILES)
    await_output(node, attempt, "up\n")
    pids = [node.state(attempt)[role]["pid"] for role in ("keeper", "runner")]
    pids.append(link.request("hello", watch=[])["facts"]["agent_pid"])
    directories = {Path(os.readlink(f"/proc/{pid}/cwd")) for pid in pids}

    def cores() -> set[Path]:
        return {path for directory in directories for path in directory.glob("core*")}

    before = cores()
    for pid in pids:
        os.kill(pid, signal.SIGABRT)
    wait_until(lambda: node.closed, 20, "the agent has ended")
    node.watch(node.connect(), attempt)
    assert node.await_end(attempt)["reason"] == "both_died"
    assert cores() == before
