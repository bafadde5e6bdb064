"""Removing from a node what is over: it takes the time that it takes, and what is in the way of one is in nobody else's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distflow.backends.machines.cleaning import clean_node
from distflow.backends.machines.link import AgentLink
from distflow.pools.model import Node, Pool

OBSTACLES = """\
import os, time
walk, rename = os.walk, os.rename
def slow(top):
    time.sleep(0.5)
    return walk(top)
def broken(source, target, **fields):
    if str(source).endswith("w2"):
        raise PermissionError(13, "Permission denied", source)
    rename(source, target, **fields)
os.walk, os.rename = slow, broken
"""


def test_a_node_is_waited_for_and_one_workflow_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper, root = tmp_path / "python", tmp_path / "node"
    (tmp_path / "prefix.py").write_text(OBSTACLES)
    words = f'shift 3\nstub=$1\nshift\nexec {sys.executable} -I -S -c "$(cat {tmp_path}/prefix.py)\n$stub" "$@"\n'
    wrapper.write_text("#!/bin/sh\n" + words)
    wrapper.chmod(0o755)
    for workflow in ("w1", "w2", "w3"):
        (root / workflow / "g/t/0/work").mkdir(parents=True)
    node = Node(name="local", host="localhost", root=str(root), python=str(wrapper))
    # Other questions are answered at once, or never: half a minute is shortened here.
    monkeypatch.setattr(AgentLink.request, "__kwdefaults__", {"timeout_s": 0.2, "then": None})
    pool = Pool(name="p", backend="local", nodes=(node,))
    done = clean_node(pool, node, older_than_s=0, unfinished=(), now=4e9, is_dry_run=False)
    assert (done.removed, done.kept) == (("w1", "w3"), 1)
    assert done.error.startswith("w2: it failed: Permission denied")
    assert sorted(path.name for path in root.iterdir() if path.name.startswith("w")) == ["w2"]
