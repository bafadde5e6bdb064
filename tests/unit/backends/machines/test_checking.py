"""The error for a node whose Python cannot run distflow, and the Python that it proposes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from distflow.backends.machines.checks.checking import _explained
from distflow.errors import BootstrapFailed
from distflow.pools.model import Node
from distflow.transports.local import LocalTransport

OLD = '#!/bin/sh\ncase "$2" in *version_info*) exit 1;; *) printf 3.6.8;; esac\n'


def explained(python: str) -> tuple[str, str]:
    node = Node(name="n", host="n", root="/r", python=python)
    error = _explained(node, LocalTransport("n"), BootstrapFailed("n", "the connection ended"))
    return error.detail, error.hint


def test_only_a_python_that_is_new_enough_is_proposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sh").symlink_to(str(shutil.which("sh")))
    (tmp_path / "python3").write_text(OLD)
    (tmp_path / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    none = "install Python 3.8 or newer there if necessary, and set `python` of the node to its path"
    assert explained("python3") == ("its python python3 is Python 3.6.8; 3.8 or newer is needed", none)
    assert explained("/opt/none/python") == ("its python /opt/none/python does not exist", none)
    (tmp_path / "python3.11").symlink_to(sys.executable)
    new = f"set `python` of the node to Python 3.8 or newer, such as `{tmp_path}/python3.11`"
    assert explained("python3") == ("its python python3 is Python 3.6.8; 3.8 or newer is needed", new)
    assert explained("/opt/none/python")[1] == new
