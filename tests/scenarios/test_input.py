"""Invalid specs and arguments, damaged state directories and full disks: clear errors and the right exit codes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import distflow.runtime
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli

GOOD = """
workflow:
  name: good
  tasks:
  - {name: only, command: [sh, -c, 'echo hello; exit 0']}
"""


def _directory(path: Path) -> None:
    path.mkdir()


def _binary(path: Path) -> None:
    path.write_bytes(b"\x7fELF\0\0\0")


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100 << 20)


def _not_utf8(path: Path) -> None:
    path.write_bytes(b"workflow:\n  name: caf\xe9\n")


def _aliases(path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    path.write_text("\n".join(lines))


def _nested(path: Path) -> None:
    path.write_text("workflow: " + "[" * 20000)


def _empty(path: Path) -> None:
    path.write_text("")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _missing(path: Path) -> None:
    pass


@pytest.mark.parametrize(
    "make", [_directory, _binary, _huge, _not_utf8, _aliases, _nested, _empty, _fifo, _missing], ids=lambda make: make.__name__
)
def test_a_file_that_is_not_a_spec_is_one_error(cli: Cli, make: Callable[[Path], None]) -> None:
    make(cli.folder / "spec.yaml")
    for command in (["submit"], ["validate"], ["submit", "--dry-run"]):
        done = cli.run("workflow", *command, "spec.yaml", timeout=30)
        assert done.code == 2, done.err
        assert "spec.yaml" in done.err
        assert "Traceback" not in done.err
        assert done.out == ""
    assert cli.run("workflow", "list", "-t", "json").out == '{\n  "workflows": []\n}\n'


def test_every_problem_is_reported_at_once_with_its_line(cli: Cli) -> None:
    spec = cli.spec(
        """workflow:
  name: bad name
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      comand: [sh, -c, 'python3 train.py --offset 0 --size 8 --world_size 16']
      command: [sh, -c, 'python3 train.py --offset 0 --size 8 --world_size 16']
    - name: worker
      command: [sh, -c, 'python3 train.py --offset 9 --size 8 --world_size 16']
"""
    )
    done = cli.run("workflow", "validate", spec)
    assert done.code == 2
    assert "spec.yaml:2:" in done.err
    assert "spec.yaml:8:" in done.err
    assert "command" in done.err
    assert "did you mean" in done.err


def test_a_missing_localpath_is_reported_before_anything_starts(cli: Cli) -> None:
    spec = cli.spec(GOOD.replace("command:", "files: [{path: /x.py, localpath: nowhere/x.py}], command:"))
    done = cli.run("workflow", "submit", spec)
    assert done.code == 2
    assert "nowhere/x.py" in done.err


def test_a_state_directory_that_cannot_be_written_exits_with_5(cli: Cli) -> None:
    blocked = cli.folder / "blocked"
    blocked.write_text("a file, not a directory")
    cli.environment["DISTFLOW_STATE"] = str(blocked / "state")
    for command in (["submit", cli.spec(GOOD)], ["list"], ["query", "x-1"]):
        done = cli.run("workflow", *command)
        assert done.code == 5, done.err
        assert str(blocked) in done.err
        assert "Traceback" not in done.err


def test_a_damaged_store_exits_with_5(cli: Cli) -> None:
    cli.state.mkdir()
    (cli.state / "distflow.sqlite3").write_bytes(b"this is not a database" * 100)
    done = cli.run("workflow", "list")
    assert done.code == 5
    assert "distflow.sqlite3 is damaged" in done.err
    assert "distflow workflow adopt" in done.err


def _mount(folder: Path, size: str) -> bool:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, check=False)
    return done.returncode == 0


def test_a_full_disk_on_the_node_is_named(cli: Cli) -> None:
    # The disk has room for the runtime, but hardly for a workflow.
    sources = Path(distflow.runtime.__file__).parent.rglob("*.py")
    pages = sum(-(-path.stat().st_size // 4096) for path in sources)
    if os.getuid() != 0 or not _mount(cli.top, f"{4 * pages + 80}k"):
        pytest.skip("mounting a small disk needs root")
    try:
        workflow = cli.submit(cli.spec(GOOD))
        answer = cli.await_status(workflow, "FAILED", "FAILED_START_ERROR", "COMPLETED")
        if answer["status"] != "COMPLETED":
            assert "space" in str(answer["groups"][0])
    finally:
        subprocess.run(["umount", "-l", cli.top], check=True)


def test_the_exit_code_is_kept_when_the_disk_fills_up_while_a_task_writes(cli: Cli) -> None:
    if os.getuid() != 0 or not _mount(cli.top, "3m"):
        pytest.skip("mounting a small disk needs root")
    try:
        spec = cli.spec(GOOD.replace("echo hello; exit 0", "head -c 8000000 /dev/zero; exit 7"))
        workflow = cli.submit(spec)
        cli.await_status(workflow, "FAILED")
        task = cli.tasks(workflow)["only"]
        assert task["exit_code"] == 7
        assert "disk was full" in str(task["failure_message"])
    finally:
        subprocess.run(["umount", "-l", cli.top], check=True)


def test_records_are_read_from_a_disk_that_became_read_only(cli: Cli) -> None:
    if os.getuid() != 0 or not _mount(cli.state, "20m"):
        pytest.skip("mounting a small disk needs root")
    try:
        workflow = cli.submit(cli.spec(GOOD))
        cli.await_status(workflow, "COMPLETED")
        # A supervisor that has released its lock still has its log open for writing until it ends.
        wait_until(lambda: not cli.processes(), 30)
        subprocess.run(["mount", "-o", "remount,ro", cli.state], check=True)
        note = f"note: {cli.state}/distflow.sqlite3 is not writable"
        for words, shown in (
            (["query", workflow], "COMPLETED"), (["list"], workflow), (["logs", workflow], "hello"),
            (["events", workflow], "COMPLETED"), (["query", workflow, "-t", "json"], '"COMPLETED"'),
        ):  # fmt: skip
            done = cli.run("workflow", *words)
            assert (done.code, shown in done.out, done.err.count("\n")) == (0, True, 1), (words, done)
            assert done.err.startswith(note)
        for words in (
            ["submit", cli.spec(GOOD)],
            ["cancel", workflow],
            ["tag", "-w", workflow, "-a", "x"],
            ["restart", workflow],
        ):
            done = cli.run("workflow", *words)
            assert (done.code, "Traceback" in done.err) == (5, False), (words, done)
            assert str(cli.state) in done.err
    finally:
        subprocess.run(["umount", "-l", cli.state], check=True)


def test_wrong_arguments_exit_with_2(cli: Cli) -> None:
    for words in (
        ["workflow", "submit"],
        ["workflow", "query", "nope-1"],
        ["workflow", "quary", "x"],
        ["workflow", "list", "-s", "RUNING"],
    ):
        done = cli.run(*words)
        assert done.code == 2, (words, done.err)
        assert "Traceback" not in done.err


def test_a_secret_of_the_command_line_is_in_no_log_and_no_error_message(cli: Cli) -> None:
    spec = cli.spec(GOOD.replace("echo hello", 'test \\"$TOKEN\\" = canary-5ecret && echo it arrived').replace("'", '"'))
    workflow = cli.submit(spec, "--set-env", "TOKEN=canary-5ecret")
    cli.await_status(workflow, "COMPLETED")
    assert "it arrived" in cli.logs(workflow)
    holders = [path for path in cli.folder.rglob("*") if path.is_file() and b"canary-5ecret" in path.read_bytes()]
    # The command of the spec contains the value, so copies of the spec do, too.
    allowed = {"spec.yaml", "distflow.sqlite3", "distflow.sqlite3-wal", "launch.json", "workflow.json"}
    assert {path.name for path in holders} <= allowed, holders
    bad = cli.run("workflow", "submit", spec, "--set-env", "canary-5ecret")
    assert bad.code == 2
    assert "canary-5ecret" not in bad.err
