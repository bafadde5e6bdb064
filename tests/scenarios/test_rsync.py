"""`workflow rsync upload` and `download`: files to and from a running task, through distflow's own connection."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from distflow.testing.sshd import Sshd, make_key
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import Lab

pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync")

SPEC = """
workflow:
  name: copy
  groups:
  - name: both
    tasks:
    - name: helper
      command: [sh, -c, 'while [ ! -e GO ]; do sleep 0.2; done']
    - name: main
      lead: true
      command: [sh, -c, 'echo made > made.txt; echo out > {{output}}/out.txt; echo up; while [ ! -e GO ]; do sleep 0.2; done']
"""
HOSTILE_NAMES = (
    "plain.txt",
    "with space",
    "-dash",
    "a:b",
    "quote'\"s",
    "$HOME `id`",
    "new\nline",
    "ünïcode",
    "*?[x]",
    "back\\slash",
)


@contextmanager
def running(cli: Cli) -> Iterator[str]:
    """Run a workflow until the end of the block."""
    go = cli.folder / "go"
    workflow = cli.submit(cli.spec(SPEC.replace("GO", str(go))))
    cli.await_running(workflow)
    cli.await_log(workflow, "up")
    yield workflow
    go.touch()
    cli.await_status(workflow, "COMPLETED")


def work_directory(cli: Cli, task: str) -> Path:
    """The working directory of a task."""
    (found,) = cli.folder.glob(f"**/both/{task}/0/work")
    return found


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("forking_rsync")
def test_trees_with_any_file_names_are_copied_in_both_directions(any_cli: Cli) -> None:
    tree = any_cli.folder / "tree it's"
    (tree / "sub dir").mkdir(parents=True)
    for name in HOSTILE_NAMES:
        (tree / "sub dir" / name).write_text(f"this is {name}")
    (tree / "run.sh").write_text("#!/bin/sh\n")
    (tree / "run.sh").chmod(0o755)
    with running(any_cli) as workflow:
        # Without a task, the lead of the first group gets the files. A slash after a directory copies only its contents.
        done = any_cli.run("workflow", "rsync", "upload", workflow, "tree it's:.")
        assert (done.code, done.out, done.err) == (0, "", "")
        done = any_cli.run("workflow", "rsync", "upload", workflow, "helper", f"{tree}/:deep - er", "--verbose")
        assert done.code == 0, done.err
        assert "run.sh" in done.out
        assert contents(work_directory(any_cli, "main") / "tree it's") == contents(tree)
        assert contents(work_directory(any_cli, "helper") / "deep - er") == contents(tree)
        assert os.access(work_directory(any_cli, "helper") / "deep - er" / "run.sh", os.X_OK)
        # Files of the task are not deleted, and only changed files are sent.
        (work_directory(any_cli, "helper") / "deep - er" / "theirs").write_text("stays")
        (tree / "run.sh").write_text("#!/bin/sh\necho\n")
        done = any_cli.run("workflow", "rsync", "upload", workflow, "helper", f"{tree}/:deep - er", "-v")
        assert (work_directory(any_cli, "helper") / "deep - er" / "theirs").read_text() == "stays"
        assert ("run.sh" in done.out, "plain.txt" in done.out) == (True, False)
        back = any_cli.run("workflow", "rsync", "download", workflow, "helper", "deep - er/sub dir:back")
        assert back.code == 0, back.err
        assert contents(any_cli.folder / "back" / "sub dir") == contents(tree / "sub dir")
        # An absolute remote path, a colon in a local name, and the output directory.
        other = any_cli.folder / "other"
        other.mkdir()
        for arguments in (
            ("upload", workflow, f"{tree}/sub dir/a\\:b:{other}"),
            ("download", workflow, "main", f"{work_directory(any_cli, 'main')}/made.txt:{other}"),
            ("download", workflow, "{{output}}/:other"),
        ):
            done = any_cli.run("workflow", "rsync", *arguments)
            assert done.code == 0, done.err
        assert contents(other) == {"a:b": "this is a:b", "made.txt": "made\n", "out.txt": "out\n"}


def test_output_of_the_setup_and_files_in_the_working_directory_do_not_break_rsync(cli: Cli) -> None:
    cli.configure(setup="echo loaded some modules")
    here = cli.folder / "here"
    here.mkdir()
    (here / "json.py").write_text("raise SystemExit('taken for a module')")
    with running(cli) as workflow:
        command = [str(Path(sys.executable).with_name("distflow")), "workflow", "rsync", "upload", workflow, ".:theirs"]
        environment = cli.environment | {"DISTFLOW_STATE": "../state"}
        ran = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert list(contents(work_directory(cli, "main") / "theirs")) == ["json.py"]
        done = cli.run("workflow", "rsync", "download", workflow, "made.txt:.")
        assert (done.code, done.out, done.err) == (0, "", "")
    assert (cli.folder / "made.txt").read_text() == "made\n"


@pytest.mark.usefixtures("forking_rsync")
def test_failed_copies_and_a_missing_local_rsync_are_reported(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> None:
    def refused(*arguments: str, code: int = 2) -> str:
        done = cli.run("workflow", "rsync", *arguments)
        assert (done.code, done.out) == (code, ""), done.err
        return done.err

    (cli.folder / "file").write_text("x")
    with running(cli) as workflow:
        assert "`nothing` does not exist on this machine" in refused("upload", workflow, "nothing:x")
        assert "`file` is not of the form LOCAL:REMOTE" in refused("upload", workflow, "file")
        assert "`:x` is not of the form REMOTE:LOCAL" in refused("download", workflow, ":x")
        assert "did you mean `helper`?" in refused("upload", workflow, "helpre", "file:x")
        assert "only a task and one pair of paths are possible" in refused("upload", workflow, "main", "file:x", "file:y")
        assert "`file` is not a directory" in refused("download", workflow, "made.txt:file")
        message = refused("download", workflow, "no-such-file:.", code=3)
        assert "no-such-file" in message
        assert "rsync ended with code 23 (some files could not be copied)\nsee the messages of rsync above" in message
        cli.environment["PATH"] = str(_programs_without_rsync(tmp_path_factory.mktemp("bin")))
        assert "rsync is not installed on this machine\ninstall it" in refused("download", workflow, "made.txt:.")
        cli.environment["PATH"] = os.environ["PATH"]
    ended = refused("upload", workflow, "file:x")
    assert f"main has ended: COMPLETED\nits log: distflow workflow logs {workflow} --task main\n" in ended
    assert f"its files: distflow workflow fetch {workflow} --task main" in ended


@pytest.mark.ssh
def test_a_missing_rsync_on_the_node_is_reported(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = _programs_without_rsync(tmp_path_factory.mktemp("bin"))
    key = make_key(tmp_path_factory.mktemp("key") / "id")
    with Sshd(
        tmp_path_factory.mktemp("gpu1"), "127.0.1.1", alias="gpu1", user_key=key, options={"SetEnv": f"PATH={path}"}
    ) as one:
        lab = Lab(cli, {"gpu1": one})
        lab.configure(start_barrier="60s", nodes={"gpu1": {"gpus": 2}})
        first, _, main = SPEC.partition("    - name: helper")
        text = f"{first}    - name: main{main.partition('- name: main')[2]}"
        go = cli.folder / "go"
        workflow = cli.submit(cli.spec(text.replace("GO", str(go))))
        cli.await_log(workflow, "up")
        done = cli.run("workflow", "rsync", "download", workflow, "made.txt:.")
        assert (done.code, done.out) == (3, "")
        assert "gpu1: rsync is not in the node's PATH (rsync runs outside the task's container" in done.err
        assert "\ninstall it on the node" in done.err
        go.touch()
        cli.await_status(workflow, "COMPLETED")
        lab.await_no_processes()


def _programs_without_rsync(folder: Path) -> Path:
    for directory in ("/usr/bin", "/bin"):
        for program in Path(directory).iterdir():
            if program.name != "rsync" and not os.path.lexists(folder / program.name):
                (folder / program.name).symlink_to(program)
    return folder


def test_ctrl_c_ends_all_processes_of_an_upload(any_cli: Cli) -> None:
    with (any_cli.folder / "large").open("wb") as file:
        file.truncate(1 << 30)
    with running(any_cli) as workflow:
        process = any_cli.start("workflow", "rsync", "upload", workflow, "large:.", "--rate-limit", "100000")
        wait_until(lambda: any("--server" in command for _, command in any_cli.processes() if "rsync.shell" not in command), 30)
        # A terminal sends SIGINT to all local processes of the command.
        for pid, command in any_cli.processes():
            if "rsync.shell" in command or ("--bwlimit" in command and "--server" not in command):
                with suppress(ProcessLookupError):  # a process may already have ended because another one did
                    os.kill(pid, signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode in (130, 3)
        wait_until(lambda: not any("rsync" in command for _, command in any_cli.processes()), 30)
