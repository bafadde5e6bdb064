"""Removing finished workflows from a node: it may be slow, and an error of one workflow does not stop the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distflow.backends.machines.cleanup import clean_node
from distflow.backends.machines.connection.link import AgentLink
from distflow.pools.model import Node, Pool
from distflow.runtime.files.root_directory import PRIVATE, mark

OBSTACLES = """\
import os, time
walk, rename = os.walk, os.rename
def slow(top):
    time.sleep(0.5)
    return walk(top)
def broken(source, target, **fields):
    if str(source).endswith("2" * 32):
        raise PermissionError(13, "Permission denied", source)
    rename(source, target, **fields)
os.walk, os.rename = slow, broken
"""


@pytest.mark.slow
def test_cleaning_waits_for_a_slow_node_and_continues_after_a_failed_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper, root = tmp_path / "python", tmp_path / "node"
    (tmp_path / "prefix.py").write_text(OBSTACLES)
    command = f'shift 3\nstub=$1\nshift\nexec {sys.executable} -I -S -c "$(cat {tmp_path}/prefix.py)\n$stub" "$@"\n'
    wrapper.write_text("#!/bin/sh\n" + command)
    wrapper.chmod(0o755)
    workflows = [digit * 32 for digit in "123"]
    for workflow in workflows:
        (root / PRIVATE / workflow / "g/t/0/work").mkdir(parents=True)
        mark(str(root / PRIVATE / workflow))
    (root / PRIVATE).chmod(0o700)
    mark(str(root / PRIVATE))
    node = Node(name="local", host="localhost", root=str(root), python=str(wrapper))
    # Shorten the timeout of requests. Cleaning must wait for longer than that.
    monkeypatch.setattr(AgentLink.request, "__kwdefaults__", {"timeout_s": 0.2, "then": None})
    pool = Pool(name="p", backend="local", nodes=(node,))
    done = clean_node(pool, node, older_than_s=0, unfinished=(), is_dry_run=False)
    assert (done.removed, done.kept) == ((workflows[0], workflows[2]), 1)
    assert done.error.startswith(f"{workflows[1]}: the operation failed: Permission denied")
    assert [name for name in workflows if (root / PRIVATE / name).exists()] == [workflows[1]]
