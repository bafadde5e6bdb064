"""What is shipped to nodes: the same for the same sources, and enough for its services."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from distflow.backends.machines.connection.bootstrap import RUNTIME, STORAGE, Bundle, after_exit, after_report

INSTALLED = Path("~/.pyenv/versions").expanduser()
"""Where a version manager has them; tests have a home of their own."""


@pytest.mark.parametrize("bundle", [RUNTIME, STORAGE])
def test_an_archive_is_the_same_whenever_it_is_made(bundle: Bundle) -> None:
    again = Bundle(package=bundle.package, modules=bundle.modules)
    assert (again.archive, again.digest) == (bundle.archive, bundle.digest)


def _bring(folder: Path) -> list[str]:
    """Unpack the storage bundle, and return the modules in it."""
    path = folder / "bundle.zip"
    path.write_bytes(STORAGE.archive)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "home")
        return sorted(name.removesuffix(".py").replace("/", ".") for name in archive.namelist())


def test_the_storage_bundle_needs_nothing_but_itself(tmp_path: Path) -> None:
    """Every module of it is imported by an interpreter that has only the standard library."""
    names = _bring(tmp_path)
    assert "distflow.storage.objects" in names
    assert not [name for name in names if name.startswith(("distflow.transports", "distflow.supervisor"))]
    path = str(tmp_path / "home")
    script = f"import sys, importlib; sys.path.insert(0, {path!r})\nfor one in {names!r}: importlib.import_module(one)"
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True)


@pytest.mark.parametrize("version", ["3.8", "3.9"])
def test_an_old_python_says_that_it_is_old(version: str, tmp_path: Path) -> None:
    found = shutil.which(f"python{version}", path=os.pathsep.join(str(path) for path in INSTALLED.glob(f"{version}.*/bin")))
    found = found or shutil.which(f"python{version}")
    # What a version manager has put into the PATH may lead nowhere.
    asked = subprocess.run(
        [found or "false", "-c", "import sys; print(sys.executable)"], capture_output=True, check=False, text=True
    )
    if asked.returncode:
        pytest.skip(f"no Python {version} here")
    found = asked.stdout.strip()
    _bring(tmp_path)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'home')!r})\n"
        f"from distflow.storage.node_service import serve; serve({str(tmp_path)!r}, 0o77)"
    )
    # The request's end would be the connection's.
    with subprocess.Popen([found, "-I", "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b'{"attempt": "a"}\n')
        process.stdin.flush()
        said = json.loads(process.stdout.readline())
    assert said["relay"].startswith(f"{found} is Python {version}.")


REPORT = {
    "text": "OSError: x", "root": "/home/ada/.distflow", "path": "/home/ada/.distflow/runtime", "at": "/home/ada/.distflow",
    "owner": "ada", "mode": "700", "user": "ada", "home": "/home/ada", "has_home": True, "python": "/usr/bin/python3",
    "version": "3.11.2",
}  # fmt: skip


def words(**given: Any) -> tuple[str, str]:
    return after_report({**REPORT, **given})


def test_an_old_python_is_named_with_its_version() -> None:
    assert words(version="3.6.9", errno=None) == (
        "Python 3.8 or newer is needed; /usr/bin/python3 is 3.6.9",
        "name the interpreter with `--python`, `python=` of the hostfile, or `python:` of the node or its pool",
    )
    assert after_exit(2, "python", "It printed:\nUnknown option: -I")[0] == (
        "Python 3.8 or newer is needed; `python` is older than 3.4"
    )


@pytest.mark.parametrize(("number", "why"), [(errno.ENOSPC, "its disk is full"), (errno.EDQUOT, "the quota there is used up")])
def test_no_room(number: int, why: str) -> None:
    what, remedy = words(errno=number)
    assert what == f"distflow's runtime has no room in /home/ada/.distflow: {why}"
    assert (
        remedy == "free some space (`df -h /home/ada/.distflow`), or set `root:` of the node or its pool to another directory"
    )


def test_a_read_only_file_system() -> None:
    assert words(errno=errno.EROFS)[0] == "distflow's directory /home/ada/.distflow is on a read-only file system"


def test_what_belongs_to_somebody_else_names_them_and_both_remedies() -> None:
    what, remedy = words(errno=errno.EACCES, owner="bob")
    assert what == (
        "distflow's directory /home/ada/.distflow cannot be used by ada: /home/ada/.distflow belongs to bob (mode 700)"
    )
    assert "`root:`" in remedy
    assert "let bob or root change its owner (`chown -R ada /home/ada/.distflow`)" in remedy


def test_a_directory_above_ours_is_not_to_be_given_away() -> None:
    what, remedy = words(errno=errno.EACCES, root="/data/ada", at="/data", owner="root", mode="755")
    assert what.endswith("/data belongs to root (mode 755)")
    assert "chown" not in remedy


def test_a_directory_of_ours_that_may_not_be_written_to() -> None:
    what, remedy = words(errno=errno.EACCES, mode="500")
    assert what.endswith("/home/ada/.distflow is not writable (mode 500)")
    assert remedy.startswith("`chmod u+rwx /home/ada/.distflow` there, or")


def test_a_home_that_does_not_exist() -> None:
    what, _ = words(errno=errno.EACCES, has_home=False, at="/", owner="root")
    assert what == "ada has no home directory there: /home/ada does not exist"
    # A root elsewhere has nothing to do with it.
    assert "home" not in words(errno=errno.EACCES, has_home=False, root="/data/x", at="/data", owner="root")[0]


def test_a_file_in_the_way() -> None:
    assert words(errno=errno.ENOTDIR)[0].startswith("/home/ada/.distflow/runtime is not a directory")


def test_a_place_where_no_directory_can_be_made() -> None:
    what, remedy = words(errno=errno.ENOENT, root="/proc/x", text="FileNotFoundError: /proc/x")
    assert what == "distflow's directory /proc/x cannot be created on this node: FileNotFoundError: /proc/x"
    assert remedy.startswith("set `root:` of the node or its pool to another directory")


def test_a_python_without_its_library() -> None:
    what, remedy = words(text="ModuleNotFoundError: No module named 'zipfile'")
    assert "lacks a part of the standard library" in what
    assert "`python:`" in remedy


def test_anything_else_is_told_as_it_was_said() -> None:
    assert words(text="RuntimeError: the runtime arrived damaged") == (
        "distflow's runtime does not start: RuntimeError: the runtime arrived damaged", ""
    )  # fmt: skip
    assert after_report({})[0] == "distflow's runtime does not start: "


def test_a_login_that_ended_without_a_word() -> None:
    assert after_exit(127, "python3.9", "")[0].startswith("`python3.9` is not on this node")
    assert after_exit(126, "/x", "")[0] == "`/x` cannot be executed on this node"
    assert after_exit(1, "python3", "")[0] == "the login ended with exit code 1 before `python3` answered"
    assert after_exit(None, "python3", "")[0] == "the login ended before `python3` answered"


def test_a_program_that_is_not_python_is_asked_about_first() -> None:
    assert after_exit(0, "/bin/true", "")[1].startswith("is `/bin/true` a Python interpreter?")
