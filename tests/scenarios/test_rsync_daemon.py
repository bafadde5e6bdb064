"""`workflow rsync upload --daemon`: changed files are copied to a running task in the background."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli

pytestmark = [
    pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync"),
    pytest.mark.usefixtures("forking_rsync"),
]

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
      command: [sh, -c, 'echo up; while [ ! -e GO ]; do sleep 0.2; done']
"""
QUICK = ("--poll-interval", "0.1", "--debounce-delay", "0.2")


def write_spec(cli: Cli) -> str:
    return cli.spec(SPEC.replace("GO", str(cli.folder / "go")))


def end_tasks(cli: Cli) -> None:
    (cli.folder / "go").touch()


def make_source(cli: Cli) -> Path:
    made = cli.folder / "src"
    made.mkdir()
    (made / "train.py").write_text("first")
    return made


def work_directory(cli: Cli, task: str, attempt: int = 0) -> Path:
    return next(iter(cli.folder.glob(f"**/both/{task}/{attempt}/work")))


def list_copies(cli: Cli) -> list[dict[str, Any]]:
    done = cli.run("workflow", "rsync", "status", "-t", "json")
    assert done.code == 0, done.err
    daemons: list[dict[str, Any]] = json.loads(done.out)["daemons"]
    return daemons


def await_text(path: Path, text: str) -> None:
    wait_until(lambda: path.exists() and path.read_text() == text, 60, f"{text!r} in {path}")


@pytest.mark.ssh
@pytest.mark.usefixtures("lab")
def test_changing_files_are_copied_until_the_task_has_ended(cli: Cli) -> None:
    src = make_source(cli)
    workflow = cli.submit(write_spec(cli))
    cli.await_log(workflow, "up")
    done = cli.run("workflow", "rsync", "upload", workflow, "src:.", "--daemon", *QUICK, "--max-log-size", "1024", "-v")
    assert (done.code, done.out) == (0, ""), done.err
    assert f"{src} is copied to main until the task's group has ended. Log: {cli.state}/rsync/" in done.err
    remote = work_directory(cli, "main") / "src"
    await_text(remote / "train.py", "first")
    (src / "train.py").write_text("second")
    await_text(remote / "train.py", "second")
    (src / "more").mkdir()
    (src / "more" / "file").write_text("new")
    await_text(remote / "more" / "file", "new")
    # A task has at most one background copy. Another task can have its own.
    done = cli.run("workflow", "rsync", "upload", workflow, "src:.", "--daemon")
    assert done.code == 2
    message, hint = f"a background copy to `{workflow}/main` is already running", "stop it first: distflow workflow rsync stop"
    assert f"{message}\n{hint} {workflow} --task main\n" in done.err
    assert cli.run("workflow", "rsync", "upload", workflow, "helper", "src/:own", "--daemon", *QUICK).code == 0
    await_text(work_directory(cli, "helper") / "own" / "train.py", "second")
    wait_until(lambda: sum(one["last_synced"] is not None for one in list_copies(cli)) == 2, 60)
    helper, main = list_copies(cli)
    assert (helper["task_name"], helper["status"], helper["local_path"], helper["remote_path"]) == (
        "helper", "RUNNING", f"{src}/", "own",
    )  # fmt: skip
    assert (main["workflow_id"], main["task_name"], main["status"], main["error"]) == (workflow, "main", "RUNNING", None)
    os.kill(main["pid"], 0)
    assert {path.stat().st_mode & 0o777 for path in (cli.state / "rsync").iterdir()} == {0o600}
    # A copy that is stopped leaves its files on the node, and copies no later changes.
    done = cli.run("workflow", "rsync", "stop", "-", "--task", "helper")
    assert (done.code, done.out) == (0, f"{workflow} helper: stopped\n"), done.err
    done = cli.run("workflow", "rsync", "stop", workflow, "--task", "helper")
    assert (done.code, done.out) == (2, "")
    assert f"no background copy to helper of {workflow} is running" in done.err
    (src / "train.py").write_text("third")
    await_text(remote / "train.py", "third")
    assert (work_directory(cli, "helper") / "own" / "train.py").read_text() == "second"
    # The other copy ends with its task, and logs the reason.
    end_tasks(cli)
    cli.await_status(workflow, "COMPLETED")
    wait_until(lambda: [one["status"] for one in list_copies(cli)] == ["STOPPED", "STOPPED"], 30)
    log = Path(list_copies(cli)[1]["log_file"])
    log_text = (
        log.with_suffix(".log.1").read_text() + log.read_text() if log.with_suffix(".log.1").exists() else log.read_text()
    )
    assert "train.py" in log_text
    assert log_text.endswith("exiting: main has ended: COMPLETED\n")
    done = cli.run("workflow", "rsync", "status")
    assert done.out.splitlines()[0].split("  ")[0] == "Workflow ID"
    assert done.out.count("STOPPED") == 2


RETRIED = """
workflow:
  name: copy
  tasks:
  - name: main
    exitActions: {RESCHEDULE: "7"}
    command: [sh, -c, 'until [ -e given/train.py ]; do sleep 0.2; done; test -e GO && exit 0; touch GO; exit 7']
"""


def test_submit_with_rsync_copies_to_the_lead_and_to_its_next_attempt(cli: Cli) -> None:
    src = make_source(cli)
    path = cli.spec(RETRIED.replace("GO", str(cli.folder / "go")))
    done = cli.run("workflow", "submit", path, "--rsync", "nothing:src")
    assert (done.code, done.out) == (2, "")
    assert "`nothing` does not exist on this machine" in done.err
    # Both attempts wait for the file, each in a directory of its own.
    done = cli.run("workflow", "submit", path, "--rsync", "src/:/osmo/run/workspace/given", "--wait")
    assert done.code == 0, done.err
    assert f"{src}/ is copied to main until the task's group has ended" in done.err
    assert cli.tasks("copy-1")["main"]["retry_id"] == 1
    assert list_copies(cli)[0]["remote_path"] == "../work/given"


def test_a_failed_copy_is_reported_and_retried(cli: Cli) -> None:
    src = make_source(cli)
    workflow = cli.submit(write_spec(cli))
    cli.await_log(workflow, "up")
    for options, message in (
        (("--poll-interval", "2"), "--poll-interval needs --daemon"),
        (("--daemon", "--poll-interval", "0"), "0.1"),
    ):
        done = cli.run("workflow", "rsync", "upload", workflow, "src:.", *options)
        assert done.code == 2
        assert message in done.err
    blocked = work_directory(cli, "main") / "there"
    blocked.write_text("a file where a directory is to be")
    arguments = ("src/:there", "--daemon", *QUICK, "--reconcile-interval", "1")
    assert cli.run("workflow", "rsync", "upload", workflow, *arguments).code == 0
    one = wait_until(lambda: next((one for one in list_copies(cli) if one["error"]), None), 60)
    assert one["error"].startswith("rsync ended with code ")
    assert (one["status"], one["last_synced"]) == ("RUNNING", None)
    assert "the last copy failed: rsync ended with code" in cli.run("workflow", "rsync", "status").out
    blocked.unlink()
    await_text(blocked / "train.py", "first")
    wait_until(lambda: list_copies(cli)[0]["error"] is None, 60)
    # A copy whose process was killed is shown as stopped, and can be started again.
    os.kill(one["pid"], signal.SIGKILL)
    wait_until(lambda: list_copies(cli)[0]["status"] == "STOPPED", 30)
    assert cli.run("workflow", "rsync", "upload", workflow, *arguments).code == 0
    (src / "train.py").write_text("second")
    await_text(blocked / "train.py", "second")
    done = cli.run("workflow", "rsync", "stop", "-t", "json")
    assert [(one["task_name"], one["status"]) for one in json.loads(done.out)["daemons"]] == [("main", "STOPPED")]
    assert cli.run("workflow", "rsync", "stop").out == "No background copy is running.\n"
    end_tasks(cli)
    cli.await_status(workflow, "COMPLETED")
