"""The login for one pull: what docker and podman read, and what is left of it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from distflow.runtime.files import attempt_files
from distflow.runtime.guard import containers

LOGIN = {"registry": "registry.example", "auth": "dXNlcjpwYXNz"}


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm."""
    made = tmp_path / "shm"
    made.mkdir()
    monkeypatch.setattr(attempt_files, "_MEMORY", str(made))
    monkeypatch.setattr(attempt_files, "_has_memory", lambda: True)
    return made / f"distflow-{os.getuid()}"


def test_the_users_own_settings_hold_but_for_the_logins(tmp_path: Path, memory: Path) -> None:
    own = tmp_path / ".docker"
    (own / "contexts").mkdir(parents=True)
    settings = {"currentContext": "lab", "credsStore": "desktop", "auths": {"registry.example": {"auth": "b3RoZXI="}}}
    (own / "config.json").write_text(json.dumps(settings))
    with containers.login_folder(LOGIN, {"HOME": str(tmp_path)}) as folder:
        assert Path(folder).parent == memory
        assert [stat.S_IMODE(os.stat(path).st_mode) for path in (folder, f"{folder}/config.json")] == [0o700, 0o600]
        found = json.loads(Path(folder, "config.json").read_text())
        assert found == {"currentContext": "lab", "auths": {"registry.example": {"auth": "dXNlcjpwYXNz"}}}
        assert Path(folder, "contexts").samefile(own / "contexts")
    assert not os.path.exists(folder)
    assert (own / "contexts").is_dir()
    assert json.loads((own / "config.json").read_text()) == settings


def test_what_a_killed_pull_left_goes_with_the_next(memory: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    for name in (f"login-{process.pid}-abc", f"login-{os.getpid()}-abc"):
        (memory / name).mkdir(parents=True)
    memory.chmod(0o700)
    with containers.login_folder(LOGIN, {"HOME": str(tmp_path)}):
        assert not (memory / f"login-{process.pid}-abc").exists()
    assert (memory / f"login-{os.getpid()}-abc").exists()


def test_without_memory_it_is_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_files, "_has_memory", lambda: False)
    with containers.login_folder(LOGIN, {"DOCKER_CONFIG": str(tmp_path / "nothing")}) as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert json.loads(Path(folder, "config.json").read_text())["auths"]["registry.example"] == {"auth": "dXNlcjpwYXNz"}
    assert not os.path.exists(folder)
