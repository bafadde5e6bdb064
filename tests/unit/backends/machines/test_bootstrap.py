"""The archives for nodes, which are reproducible and complete, and the messages if they do not start."""

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

from distflow.backends.machines.connection.bootstrap import RUNTIME, STORAGE, SourceArchive, explain_exit, explain_report

INSTALLED = Path("~/.pyenv/versions").expanduser()
"""Interpreters of the version manager. It is in the real home, which tests replace."""


@pytest.mark.parametrize("bundle", [RUNTIME, STORAGE])
def test_an_archive_is_reproducible(bundle: SourceArchive) -> None:
    again = SourceArchive(package=bundle.package, modules=bundle.modules)
    assert (again.archive, again.digest) == (bundle.archive, bundle.digest)


def _bring(folder: Path) -> list[str]:
    """Unpack the storage bundle, and return the modules in it."""
    path = folder / "bundle.zip"
    path.write_bytes(STORAGE.archive)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "home")
        return sorted(name.removesuffix(".py").replace("/", ".") for name in archive.namelist())


def test_the_storage_bundle_is_complete(tmp_path: Path) -> None:
    """An interpreter with only the standard library imports every module of it."""
    names = _bring(tmp_path)
    assert "distflow.storage.objects" in names
    assert not [name for name in names if name.startswith(("distflow.transports", "distflow.supervisor"))]
    path = str(tmp_path / "home")
    script = f"import sys, importlib; sys.path.insert(0, {path!r})\nfor one in {names!r}: importlib.import_module(one)"
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True)


@pytest.mark.parametrize("version", ["3.8", "3.9"])
def test_an_old_python_reports_its_version(version: str, tmp_path: Path) -> None:
    found = shutil.which(f"python{version}", path=os.pathsep.join(str(path) for path in INSTALLED.glob(f"{version}.*/bin")))
    found = found or shutil.which(f"python{version}")
    # A version manager may have put scripts into PATH that do not work.
    probe = subprocess.run(
        [found or "false", "-c", "import sys; print(sys.executable)"], capture_output=True, check=False, text=True
    )
    if probe.returncode:
        pytest.skip(f"no Python {version} here")
    found = probe.stdout.strip()
    _bring(tmp_path)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'home')!r})\n"
        f"from distflow.storage.node_service import serve; serve({str(tmp_path)!r}, 0o77)"
    )
    # The end of standard input would end the connection.
    with subprocess.Popen([found, "-I", "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b'{"attempt": "a"}\n')
        process.stdin.flush()
        reply = json.loads(process.stdout.readline())
    assert reply["relay"].startswith(f"{found} is Python {version}.")


REPORT = {
    "text": "OSError: x", "root": "/home/ada/.distflow", "path": "/home/ada/.distflow/runtime", "at": "/home/ada/.distflow",
    "owner": "ada", "mode": "700", "user": "ada", "home": "/home/ada", "has_home": True, "python": "/usr/bin/python3",
    "version": "3.11.2",
}  # fmt: skip


def explain(**given: Any) -> tuple[str, str]:
    return explain_report({**REPORT, **given})


def test_an_old_python_is_named_with_its_version() -> None:
    assert explain(version="3.6.9", errno=None) == (
        "Python 3.8 or newer is needed; /usr/bin/python3 is 3.6.9",
        "name the interpreter with `--python`, `python=` of the hostfile, or `python:` of the node or its pool",
    )
    assert explain_exit(2, "python", "The node printed:\nUnknown option: -I")[0] == (
        "Python 3.8 or newer is needed; `python` is older than 3.4"
    )


@pytest.mark.parametrize(("number", "why"), [(errno.ENOSPC, "its disk is full"), (errno.EDQUOT, "the disk quota is used up")])
def test_a_full_disk_or_quota(number: int, why: str) -> None:
    what, remedy = explain(errno=number)
    assert what == f"distflow's runtime has no room in /home/ada/.distflow: {why}"
    assert (
        remedy == "free some space (`df -h /home/ada/.distflow`), or set `root:` of the node or its pool to another directory"
    )


def test_a_read_only_file_system() -> None:
    assert explain(errno=errno.EROFS)[0] == "distflow's directory /home/ada/.distflow is on a read-only file system"


def test_a_directory_of_another_user_names_the_owner_and_both_remedies() -> None:
    what, remedy = explain(errno=errno.EACCES, owner="bob")
    assert what == (
        "distflow's directory /home/ada/.distflow cannot be used by ada: /home/ada/.distflow belongs to bob (mode 700)"
    )
    assert "`root:`" in remedy
    assert "let root change its owner (`chown -R ada /home/ada/.distflow`)" in remedy


def test_the_remedy_never_changes_the_owner_of_a_parent_directory() -> None:
    what, remedy = explain(errno=errno.EACCES, root="/data/ada", at="/data", owner="root", mode="755")
    assert what.endswith("/data belongs to root (mode 755)")
    assert "chown" not in remedy


def test_an_own_directory_that_is_not_writable() -> None:
    what, remedy = explain(errno=errno.EACCES, mode="500")
    assert what.endswith("/home/ada/.distflow is not writable (mode 500)")
    assert remedy.startswith("`chmod u+rwx /home/ada/.distflow` there, or")


def test_a_home_that_does_not_exist() -> None:
    what, _ = explain(errno=errno.EACCES, has_home=False, at="/", owner="root")
    assert what == "ada has no home directory on this node: /home/ada does not exist"
    # The missing home does not matter for a root elsewhere.
    assert "home" not in explain(errno=errno.EACCES, has_home=False, root="/data/x", at="/data", owner="root")[0]


def test_a_file_instead_of_a_directory() -> None:
    assert explain(errno=errno.ENOTDIR)[0].startswith("/home/ada/.distflow/runtime is not a directory")
    assert explain(errno=errno.EISDIR)[0].startswith("/home/ada/.distflow/runtime is a directory, but")


def test_a_root_that_cannot_be_created() -> None:
    what, remedy = explain(errno=errno.ENOENT, root="/proc/x", text="FileNotFoundError: /proc/x")
    assert what == "distflow's directory /proc/x cannot be created on this node: FileNotFoundError: /proc/x"
    assert remedy.startswith("set `root:` of the node or its pool to another directory")


def test_a_python_without_its_standard_library() -> None:
    what, remedy = explain(text="ModuleNotFoundError: No module named 'zipfile'")
    assert "lacks a part of the standard library" in what
    assert "`python:`" in remedy


def test_other_errors_are_quoted() -> None:
    assert explain(text="RuntimeError: the runtime arrived damaged") == (
        "distflow's runtime does not start: RuntimeError: the runtime arrived damaged", ""
    )  # fmt: skip
    assert explain_report({})[0] == "distflow's runtime does not start: "


def test_a_login_that_ended_without_an_answer() -> None:
    assert explain_exit(127, "python3.9", "")[0].startswith("`python3.9` is not on this node")
    assert explain_exit(126, "/x", "")[0] == "`/x` cannot be executed on this node"
    assert explain_exit(1, "python3", "")[0] == "the connection ended with exit code 1 before `python3` answered"
    assert explain_exit(None, "python3", "")[0] == "the connection ended before `python3` answered"


def test_a_program_that_is_not_python_is_the_first_suspect() -> None:
    assert explain_exit(0, "/bin/true", "")[1].startswith("check that `/bin/true` is a Python interpreter,")
