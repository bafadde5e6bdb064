"""The cgroup of an attempt, if this user may create cgroups."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from distflow.runtime.guard import process_tree


@pytest.fixture
def pid() -> Iterator[int]:
    """A process that can be moved into a cgroup."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        if process.poll() is None:
            process.kill()


@pytest.mark.parametrize("moment", ["before it is opened", "before it is entered"])
def test_a_cgroup_that_is_removed_before_its_process_is_in_it_is_created_again(
    moment: str, pid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that removes unused cgroups at this moment removes the empty one."""
    without = process_tree.enclose(pid, str(tmp_path / "without"))
    if without is None:
        pytest.skip("this user cannot create a cgroup (v2)")
    sweeps: list[str] = []

    def sweep_once() -> None:
        if not sweeps:
            sweeps.append(moment)
            process_tree.sweep_cgroups()

    mkdir, open_ = os.mkdir, open

    def made(path: str, mode: int = 0o777) -> None:
        mkdir(path, mode)
        if moment == "before it is opened":
            sweep_once()

    def opened(path: str, mode: str = "r") -> object:
        file = open_(path, mode)
        if moment == "before it is entered" and path.endswith("cgroup.procs"):
            sweep_once()
        return file

    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", made)
        patched.setattr(process_tree, "open", opened, raising=False)
        path = process_tree.enclose(pid, str(tmp_path / "attempt"))
    assert sweeps == [moment]
    assert path is not None
    try:
        assert str(pid) in Path(path, "cgroup.procs").read_text().split()
        assert process_tree.cgroup_of(pid) == Path(path).name
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for one in (path, without):
            process_tree.remove_cgroup({"cgroup": one})
