"""The removal of workflows, Python environments, leases and distflow itself from a node."""

from __future__ import annotations

import hashlib  # noqa: F401  a process that is no longer root may be unable to import it
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distflow.runtime.cleanup import cleaning
from distflow.runtime.files import attempts, venvs
from distflow.runtime.files.root_directory import MARKER, mark
from distflow.runtime.files.safe_files import open_locked
from distflow.runtime.leases import node_leases
from distflow.runtime.wire import OpError
from distflow.testing.daemons import free_port

NOBODY = 65534
W1, W2 = "1" * 32, "2" * 32


def make_workflow(root: str | Path, workflow: str, below: str = "work") -> Path:
    """Create the marked directory of a workflow, with one attempt."""
    attempt = Path(root, workflow, "g/t/0")
    (attempt / below).mkdir(parents=True, exist_ok=True)
    mark(os.path.join(root, workflow))
    return attempt


def run_as_user(folder: Path, work: Callable[[], None]) -> None:
    """Run ``work`` in a directory as a user other than root, because modes of files do not restrict root."""
    if os.getuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other tests may have started threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.chdir(folder)
            if os.getuid() == 0:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_directories_that_a_task_made_read_only_are_removed(tmp_path: Path) -> None:
    def work() -> None:
        attempt = make_workflow(".", W1, "work/closed/deeper")
        (attempt / "work/closed/deeper").chmod(0)
        (attempt / "work/closed").chmod(0o555)
        (attempt / "work").chmod(0o555)
        cleaning.clean(".", W1, keep_output=True)
        assert list(attempt.iterdir()) == []
        make_workflow(".", W1, "output/closed/deeper")
        (attempt / "output/closed").chmod(0o555)
        cleaning.clean(".", W1, keep_output=False)
        assert os.listdir(".trash") == []

    run_as_user(tmp_path, work)


@pytest.mark.skipif(os.getuid() != 0, reason="needs files of two users")
def test_files_that_cannot_be_removed_do_not_prevent_the_removal_of_another_workflow(tmp_path: Path) -> None:
    """Root in a container leaves such files."""
    file = make_workflow(tmp_path, W1, "work/of-root") / "work/of-root/file"
    file.touch()
    for folder in [*list(file.parents)[1:6], tmp_path / W1 / MARKER]:
        os.chown(folder, NOBODY, NOBODY)

    def work() -> None:
        make_workflow(".", W2)
        with pytest.raises(PermissionError):
            cleaning.clean(".", W1, keep_output=False)
        (kept,) = os.listdir(".trash")
        cleaning.clean(".", W2, keep_output=False)
        assert os.listdir(".trash") == [kept]

    run_as_user(tmp_path, work)


def test_an_attempt_that_may_run_on_another_machine_with_the_same_root_is_kept(tmp_path: Path) -> None:
    attempt = make_workflow(tmp_path, W1)
    (attempt / "runner.json").write_text(json.dumps({"phase": "running", "host": "another", "boot_id": "its own"}))
    assert cleaning.survey(str(tmp_path))["workflows"][0]["alive"] == [f"{W1}/g/t/0"]
    with pytest.raises(OpError, match=f"still running: {W1}/g/t/0"):
        cleaning.clean(str(tmp_path), W1, keep_output=False)
    (attempt / "exit.json").write_text("{}")
    cleaning.clean(str(tmp_path), W1, keep_output=False)
    assert not (tmp_path / W1).exists()


def test_a_survey_continues_if_a_workflow_is_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (W1, W2):
        make_workflow(tmp_path, name)
    found = attempts.workflows

    def list_before_a_removal(root: str) -> list[str]:
        names = found(root)
        attempts.remove(os.path.join(root, W1, "g/t/0"))  # as for a released lease
        return names

    monkeypatch.setattr(attempts, "workflows", list_before_a_removal)
    assert [one["uuid"] for one in cleaning.survey(str(tmp_path))["workflows"]] == [W2]


def test_two_agents_can_remove_the_same_workflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens if `node clean` runs on two machines at the same time."""
    make_workflow(tmp_path, W1)
    rename = os.rename

    def rename_after_another_removal(*given: Any) -> None:
        monkeypatch.setattr(os, "rename", rename)
        cleaning.clean(str(tmp_path), W1, keep_output=False)
        rename(*given)

    monkeypatch.setattr(os, "rename", rename_after_another_removal)
    assert cleaning.clean(str(tmp_path), W1, keep_output=False) == {"freed_bytes": 0}
    assert not (tmp_path / W1).exists()
    assert os.listdir(tmp_path / ".trash") == []


def test_files_are_renamed_before_their_removal_so_that_no_attempt_takes_them_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = make_workflow(tmp_path, W1, "work/code")
    for name in ("output", ".removed-1-work"):
        (attempt / name / "deeper").mkdir(parents=True)
    rmtree = shutil.rmtree
    removed = []

    def check_and_remove(path: str) -> None:
        removed.append(os.path.basename(path).startswith(".removed-"))
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", check_and_remove)
    cleaning.clean(str(tmp_path), W1, keep_output=True)
    assert (os.listdir(attempt), removed) == (["output"], [True, True])


def test_a_failed_write_of_the_marker_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / MARKER).mkdir()
    with pytest.raises(IsADirectoryError):
        mark(str(tmp_path))
    assert os.listdir(tmp_path) == [MARKER]


def make_venv(root: Path) -> Path:
    """A complete Python environment."""
    directory = root / venvs.VENVS / ("a" * 40)
    (directory / "env/bin").mkdir(parents=True)
    (directory / "env/bin/python").touch(0o700)
    mark(str(directory))
    (directory / venvs.COMPLETE).write_text("{}")
    return directory


def test_an_environment_that_a_task_starts_to_use_during_its_removal_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_venv(tmp_path)
    uses: list[set[str]] = [set(), {directory.name}]
    monkeypatch.setattr(cleaning, "_used_venvs", lambda _root: uses.pop(0))
    with pytest.raises(OpError, match="in use"):
        cleaning.remove_venv(str(tmp_path), directory.name)
    assert venvs.is_complete(str(directory))


def test_distflow_is_not_removed_while_an_environment_is_built(tmp_path: Path) -> None:
    directory = make_venv(tmp_path)
    lock = open_locked(venvs.lock_of(str(directory)))
    assert lock is not None
    with pytest.raises(OpError, match="being built"):
        cleaning.uninstall(str(tmp_path), {})
    assert venvs.is_complete(str(directory))
    os.close(lock)
    mark(str(tmp_path))
    assert cleaning.uninstall(str(tmp_path), {})["left"] == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs files of two users")
def test_a_workflow_that_uninstall_cannot_remove_is_reported_once_and_removed_later(tmp_path: Path) -> None:
    root = tmp_path / "root"
    file = make_workflow(root, W1, "work/of-root") / "work/of-root/file"
    file.touch()
    mark(str(root))
    for path in [*list(file.parents)[1:7], root / W1 / MARKER, root / MARKER]:
        os.chown(path, NOBODY, NOBODY)

    def work() -> None:
        assert [line.rpartition(": ")[2] for line in cleaning.uninstall("root", {})["left"]] == ["Permission denied"]
        assert [name.partition("-")[0] for name in os.listdir("root/.trash")] == [W1]

    run_as_user(tmp_path, work)
    shutil.rmtree(next((root / ".trash").rglob("of-root")))

    def work_again() -> None:
        assert cleaning.uninstall("root", {})["left"] == []

    run_as_user(tmp_path, work_again)
    assert not root.exists()


def test_uninstall_removes_the_lease_directory(tmp_path: Path) -> None:
    root, leases = tmp_path / "root", tmp_path / "leases"
    root.mkdir()
    mark(str(root))
    wanted = {"cpus": (1, 4), "memory": (1 << 30, 4 << 30)}
    node_leases.take(str(leases), 1, [0], free_port(), {"user": "me"}, wanted).close()
    assert (leases / "claims.lock").exists()
    assert cleaning.uninstall(str(root), {"lease_dir": str(leases)})["left"] == []
    assert not leases.exists()


def test_uninstall_reports_remaining_locks_with_their_holder_or_the_error(tmp_path: Path) -> None:
    root, leases = tmp_path / "root", tmp_path / "leases"
    root.mkdir()
    mark(str(root))
    held = node_leases.take(str(leases), 1, [0], None, {"user": "ada"})
    os.mkfifo(leases / "gpu-1.lock")
    left = cleaning.uninstall(str(root), {"lease_dir": str(leases)})["left"]
    held.close()
    assert f"{leases}/gpu-0.lock: it is in use by ada" in left
    assert f"{leases}/gpu-1.lock: it cannot be locked: gpu-1.lock is not a regular file" in left
