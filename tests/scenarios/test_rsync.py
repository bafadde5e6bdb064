"""Files to and from a running task, by rsync through distflow's own connection."""

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
HOSTILE = ("plain.txt", "with space", "-dash", "a:b", "quote'\"s", "$HOME `id`", "new\nline", "ünïcode", "*?[x]", "back\\slash")


@contextmanager
def running(cli: Cli) -> Iterator[str]:
    """A workflow that runs, until the end of the block."""
    go = cli.folder / "go"
    workflow = cli.submit(cli.spec(SPEC.replace("GO", str(go))))
    cli.await_running(workflow)
    cli.await_log(workflow, "up")
    yield workflow
    go.touch()
    cli.await_status(workflow, "COMPLETED")


def work_of(cli: Cli, task: str) -> Path:
    """The working directory of a task."""
    (found,) = cli.folder.glob(f"**/both/{task}/0/work")
    return found


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_trees_with_any_file_names_are_copied_in_both_directions(place: Cli) -> None:
    tree = place.folder / "tree it's"
    (tree / "sub dir").mkdir(parents=True)
    for name in HOSTILE:
        (tree / "sub dir" / name).write_text(f"this is {name}")
    (tree / "run.sh").write_text("#!/bin/sh\n")
    (tree / "run.sh").chmod(0o755)
    with running(place) as workflow:
        # To the lead of the first group; a directory keeps its name, its contents go with a slash.
        done = place.run("workflow", "rsync", "upload", workflow, "tree it's:.")
        assert (done.code, done.out, done.err) == (0, "", "")
        done = place.run("workflow", "rsync", "upload", workflow, "helper", f"{tree}/:deep - er", "--verbose")
        assert done.code == 0, done.err
        assert "run.sh" in done.out
        assert contents(work_of(place, "main") / "tree it's") == contents(tree)
        assert contents(work_of(place, "helper") / "deep - er") == contents(tree)
        assert os.access(work_of(place, "helper") / "deep - er" / "run.sh", os.X_OK)
        # Nothing is deleted there, and only what differs is sent.
        (work_of(place, "helper") / "deep - er" / "theirs").write_text("stays")
        (tree / "run.sh").write_text("#!/bin/sh\necho\n")
        done = place.run("workflow", "rsync", "upload", workflow, "helper", f"{tree}/:deep - er", "-v")
        assert (work_of(place, "helper") / "deep - er" / "theirs").read_text() == "stays"
        assert ("run.sh" in done.out, "plain.txt" in done.out) == (True, False)
        back = place.run("workflow", "rsync", "download", workflow, "helper", "deep - er/sub dir:back")
        assert back.code == 0, back.err
        assert contents(place.folder / "back" / "sub dir") == contents(tree / "sub dir")
        # Absolute paths there, a colon here, and the output.
        other = place.folder / "other"
        other.mkdir()
        for words in (
            ("upload", workflow, f"{tree}/sub dir/a\\:b:{other}"),
            ("download", workflow, "main", f"{work_of(place, 'main')}/made.txt:{other}"),
            ("download", workflow, "{{output}}/:other"),
        ):
            done = place.run("workflow", "rsync", *words)
            assert done.code == 0, done.err
        assert contents(other) == {"a:b": "this is a:b", "made.txt": "made\n", "out.txt": "out\n"}


def test_files_in_the_working_directory_are_not_imported(cli: Cli) -> None:
    here = cli.folder / "here"
    here.mkdir()
    (here / "json.py").write_text("raise SystemExit('taken for a module')")
    with running(cli) as workflow:
        command = [str(Path(sys.executable).with_name("distflow")), "workflow", "rsync", "upload", workflow, ".:theirs"]
        environment = cli.environment | {"DISTFLOW_STATE": "../state"}
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert list(contents(work_of(cli, "main") / "theirs")) == ["json.py"]


def test_a_setup_that_prints_does_no_harm(cli: Cli) -> None:
    cli.configure(setup="echo loaded some modules")
    with running(cli) as workflow:
        done = cli.run("workflow", "rsync", "download", workflow, "made.txt:.")
        assert (done.code, done.out, done.err) == (0, "", "")
    assert (cli.folder / "made.txt").read_text() == "made\n"


def test_failed_copies_are_reported(place: Cli) -> None:
    def refused(*words: str, code: int = 2) -> str:
        done = place.run("workflow", "rsync", *words)
        assert done.code == code, done.err
        return done.err

    (place.folder / "file").write_text("x")
    with running(place) as workflow:
        assert "`nothing` does not exist on this machine" in refused("upload", workflow, "nothing:x")
        assert "`file` is not of the form LOCAL:REMOTE" in refused("upload", workflow, "file")
        assert "`:x` is not of the form REMOTE:LOCAL" in refused("download", workflow, ":x")
        assert "did you mean `helper`?" in refused("upload", workflow, "helpre", "file:x")
        assert "only a task and one pair of paths are possible" in refused("upload", workflow, "main", "file:x", "file:y")
        assert "`file` is not a directory" in refused("download", workflow, "made.txt:file")
        said = refused("download", workflow, "no-such-file:.", code=3)
        assert "no-such-file" in said
        assert "rsync ended with code 23 (some files could not be copied)\nsee the messages of rsync above" in said
    ended = refused("upload", workflow, "file:x")
    assert f"main has ended: COMPLETED\nits log: distflow workflow logs {workflow} --task main\n" in ended
    assert f"its files: distflow workflow fetch {workflow} --task main" in ended


def test_a_missing_local_rsync_is_reported(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(cli) as workflow:
        cli.environment["PATH"] = str(_programs_without_rsync(tmp_path_factory.mktemp("bin")))
        done = cli.run("workflow", "rsync", "download", workflow, "made.txt:.")
        assert (done.code, done.out) == (2, "")
        assert "rsync is not installed on this machine\ninstall it" in done.err
        cli.environment["PATH"] = os.environ["PATH"]


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
        assert "gpu1: rsync is not in the node's PATH; the task's container" in done.err
        assert "\ninstall it on the node" in done.err
        go.touch()
        cli.await_status(workflow, "COMPLETED")
        lab.await_nothing_left()


def _programs_without_rsync(folder: Path) -> Path:
    for directory in ("/usr/bin", "/bin"):
        for program in Path(directory).iterdir():
            if program.name != "rsync" and not os.path.lexists(folder / program.name):
                (folder / program.name).symlink_to(program)
    return folder


def test_ctrl_c_ends_all_of_it(place: Cli) -> None:
    with (place.folder / "large").open("wb") as file:
        file.truncate(1 << 30)
    with running(place) as workflow:
        process = place.start("workflow", "rsync", "upload", workflow, "large:.", "--rate-limit", "100000")
        wait_until(lambda: any("--server" in words for _, words in place.processes() if "rsync.shell" not in words), 30)
        # As a terminal does it: to everyone.
        for pid, words in place.processes():
            if "rsync.shell" in words or ("--bwlimit" in words and "--server" not in words):
                with suppress(ProcessLookupError):  # each may end because another one has
                    os.kill(pid, signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode in (130, 3)
        wait_until(lambda: not any("rsync" in words for _, words in place.processes()), 30)
