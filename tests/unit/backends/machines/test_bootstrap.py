"""The archives that distflow sends to nodes, and the messages if their programs do not start."""

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

PYENV_PYTHONS = Path("~/.pyenv/versions").expanduser()
"""pyenv's interpreters, in the real home directory. Tests have another ``HOME``."""


@pytest.mark.parametrize("bundle", [RUNTIME, STORAGE])
def test_an_archive_is_reproducible(bundle: SourceArchive) -> None:
    second = SourceArchive(package=bundle.package, modules=bundle.modules)
    assert (second.archive, second.digest) == (bundle.archive, bundle.digest)


def _unpack(folder: Path) -> list[str]:
    """Unpack the storage bundle, and return the modules in it."""
    path = folder / "bundle.zip"
    path.write_bytes(STORAGE.archive)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "home")
        return sorted(name.removesuffix(".py").replace("/", ".") for name in archive.namelist())


def test_the_storage_bundle_is_complete(tmp_path: Path) -> None:
    """An interpreter with only the standard library imports every module of the bundle."""
    names = _unpack(tmp_path)
    assert "distflow.storage.objects" in names
    assert not [name for name in names if name.startswith(("distflow.transports", "distflow.supervisor"))]
    path = str(tmp_path / "home")
    script = f"import sys, importlib; sys.path.insert(0, {path!r})\nfor one in {names!r}: importlib.import_module(one)"
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True)


@pytest.mark.parametrize("version", ["3.8", "3.9"])
def test_an_old_python_reports_its_version(version: str, tmp_path: Path) -> None:
    found = shutil.which(f"python{version}", path=os.pathsep.join(str(path) for path in PYENV_PYTHONS.glob(f"{version}.*/bin")))
    found = found or shutil.which(f"python{version}")
    # A version manager may have put scripts into PATH that do not work.
    probe = subprocess.run(
        [found or "false", "-c", "import sys; print(sys.executable)"], capture_output=True, check=False, text=True
    )
    if probe.returncode:
        pytest.skip(f"Python {version} is not installed")
    found = probe.stdout.strip()
    _unpack(tmp_path)
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
def test_a_full_disk_or_quota_is_explained(number: int, why: str) -> None:
    message, remedy = explain(errno=number)
    assert message == f"distflow's runtime has no room in /home/ada/.distflow: {why}"
    assert (
        remedy == "free some space (`df -h /home/ada/.distflow`), or set `root:` of the node or its pool to another directory"
    )


def test_a_read_only_file_system_is_explained() -> None:
    assert explain(errno=errno.EROFS)[0] == "distflow's directory /home/ada/.distflow is on a read-only file system"


def test_a_directory_of_another_user_names_the_owner_and_both_remedies() -> None:
    message, remedy = explain(errno=errno.EACCES, owner="bob")
    assert message == (
        "distflow's directory /home/ada/.distflow cannot be used by ada: /home/ada/.distflow belongs to bob (mode 700)"
    )
    assert "`root:`" in remedy
    assert "ask an administrator to run `chown -R ada /home/ada/.distflow`" in remedy


def test_the_remedy_never_changes_the_owner_of_a_parent_directory() -> None:
    message, remedy = explain(errno=errno.EACCES, root="/data/ada", at="/data", owner="root", mode="755")
    assert message.endswith("/data belongs to root (mode 755)")
    assert "chown" not in remedy


def test_the_remedy_for_an_unwritable_directory_of_the_user_is_chmod() -> None:
    message, remedy = explain(errno=errno.EACCES, mode="500")
    assert message.endswith("/home/ada/.distflow is not writable (mode 500)")
    assert remedy.startswith("run `chmod u+rwx /home/ada/.distflow` on the node, or")


def test_a_missing_home_directory_is_explained() -> None:
    message, _ = explain(errno=errno.EACCES, has_home=False, at="/", owner="root")
    assert message == "ada has no home directory on this node: /home/ada does not exist"
    # The missing home does not matter for a root elsewhere.
    assert "home" not in explain(errno=errno.EACCES, has_home=False, root="/data/x", at="/data", owner="root")[0]


def test_a_file_or_directory_in_place_of_the_other_is_explained() -> None:
    assert explain(errno=errno.ENOTDIR)[0].startswith("/home/ada/.distflow/runtime is not a directory")
    assert explain(errno=errno.EISDIR)[0].startswith("/home/ada/.distflow/runtime is a directory, but")


def test_a_root_that_cannot_be_created_is_explained() -> None:
    message, remedy = explain(errno=errno.ENOENT, root="/proc/x", text="FileNotFoundError: /proc/x")
    assert message == "distflow's directory /proc/x cannot be created on this node: FileNotFoundError: /proc/x"
    assert remedy.startswith("set `root:` of the node or its pool to another directory")


def test_an_incomplete_standard_library_is_explained() -> None:
    message, remedy = explain(text="ModuleNotFoundError: No module named 'zipfile'")
    assert "lacks a part of the standard library" in message
    assert "`python:`" in remedy


def test_other_errors_are_quoted() -> None:
    assert explain(text="RuntimeError: broken") == ("distflow's runtime does not start: RuntimeError: broken", "")
    assert explain_report({})[0] == "distflow's runtime does not start: "


def test_the_exit_code_of_a_login_without_an_answer_is_explained() -> None:
    assert explain_exit(127, "python3.9", "")[0].startswith("`python3.9` is not on this node")
    assert explain_exit(126, "/x", "")[0] == "`/x` cannot be executed on this node"
    assert explain_exit(1, "python3", "")[0] == "the connection ended with exit code 1 before `python3` answered"
    assert explain_exit(None, "python3", "")[0] == "the connection ended before `python3` answered"


def test_the_hint_after_exit_code_0_is_to_check_the_interpreter() -> None:
    assert explain_exit(0, "/bin/true", "")[1].startswith("check that `/bin/true` is a Python interpreter,")
