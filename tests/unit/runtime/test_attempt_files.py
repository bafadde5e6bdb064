"""Files of an attempt: files with secrets, in memory or on disk, and the link to the output directory."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from distflow.runtime.files import attempt_files
from distflow.runtime.wire import OpError

SECRETS: list[dict[str, Any]] = [
    {"path": "files/run/a", "files": {"key": "one"}},
    {"path": "work/b", "files": {"key": "two", "user": "three"}},
]


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    made = tmp_path / "attempt"
    for name in ("work", "files"):
        (made / name).mkdir(parents=True)
    return made


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm."""
    made = tmp_path / "shm"
    made.mkdir()
    monkeypatch.setattr(attempt_files, "_MEMORY", str(made))
    monkeypatch.setattr(attempt_files, "_has_memory", lambda: True)
    return made


def has_secrets(attempt: Path) -> bool:
    return (attempt / "files/run/a/key").read_text() == "one" and (attempt / "work/b/user").read_text() == "three"


def test_secrets_are_placed_in_memory_and_removed(attempt: Path, memory: Path) -> None:
    attempt_files.place_secrets(str(attempt), SECRETS)
    assert has_secrets(attempt)
    (folder,) = memory.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not (attempt / attempt_files.SECRETS_ON_DISK).exists()
    attempt_files.remove_secrets(str(attempt))
    assert not list(memory.iterdir())


def test_secrets_of_ended_attempts_are_removed_by_the_next_attempt(attempt: Path, memory: Path, tmp_path: Path) -> None:
    others = {name: tmp_path / name for name in ("gone", "ended", "alive")}
    for other in others.values():
        (other / "work").mkdir(parents=True)
        attempt_files.place_secrets(str(other), [SECRETS[1]])
    homes = {name: (other / "work" / "b").resolve().parent for name, other in others.items()}
    (others["ended"] / "exit.json").touch()
    shutil.rmtree(others["gone"])
    attempt_files.place_secrets(str(attempt), SECRETS)
    assert {name: home.exists() for name, home in homes.items()} == {"gone": False, "ended": False, "alive": True}
    assert has_secrets(attempt)


def test_without_memory_the_secrets_are_in_the_attempts_directory(
    attempt: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_files, "_has_memory", lambda: False)
    attempt_files.place_secrets(str(attempt), SECRETS)
    assert has_secrets(attempt)
    assert stat.S_IMODE((attempt / attempt_files.SECRETS_ON_DISK / "1" / "user").stat().st_mode) == 0o600
    attempt_files.remove_secrets(str(attempt))
    assert not (attempt / attempt_files.SECRETS_ON_DISK).exists()
    assert not list(memory.iterdir())


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_a_folder_that_other_users_could_have_created_is_not_used(
    attempt: Path, memory: Path, tmp_path: Path, kind: str
) -> None:
    folder = memory / f"distflow-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir()
    if kind == "open":
        folder.mkdir()
        folder.chmod(0o777)
        (folder / "of another").touch()
    elif kind == "link":
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.write_text("")
    attempt_files.place_secrets(str(attempt), SECRETS)
    assert has_secrets(attempt)
    assert (attempt / "files/run/a").resolve() == attempt / attempt_files.SECRETS_ON_DISK / "0"
    assert not list((tmp_path / "elsewhere").iterdir())
    attempt_files.remove_secrets(str(attempt))
    assert not (attempt / attempt_files.SECRETS_ON_DISK).exists()


def test_a_directory_can_be_a_link_to_the_output(attempt: Path) -> None:
    sent = [{"path": "work/outputs/old/a", "text": "1"}, {"path": "work/train.py", "text": ""}]
    launch = {"argv": ["true"], "files": sent, "output_link": "work/outputs"}
    for _ in range(2):  # a second time, as after an interruption
        attempt_files.place("", str(attempt), launch)
        (attempt / "work/outputs/new").write_text("2")
    assert os.readlink(attempt / "work/outputs") == "../output"
    assert {path.name: path.read_text() for path in (attempt / "output").rglob("*") if path.is_file()} == {"a": "1", "new": "2"}
    attempt_files.place("", str(attempt), {"argv": ["true"], "output_link": "work/deep/er"})
    assert (attempt / "work/deep/er/new").read_text() == "2"
    with pytest.raises(OpError, match="must be relative"):
        attempt_files.place("", str(attempt), {"argv": ["true"], "output_link": "../outputs"})
