"""Outputs of ended workflows that are fetched for a new one."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import NoReturn

import pytest

from distflow.client.previous_outputs import OutputSource, fetch_outputs
from distflow.errors import StateError
from distflow.pools.model import Node, Pool


def test_a_full_disk_is_an_error_of_the_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "no room for 5 GiB", str(tmp_path))

    monkeypatch.setattr("distflow.backends.machines.connection.transfers.fetch_output", fail)
    pool = Pool(
        name="local", backend="local", nodes=(Node(name="local", host="localhost", root=str(tmp_path), python="python3"),)
    )
    source = OutputSource(shown="prepare of train-7", attempt="w/g/prepare/0", pool=pool, node="local")
    with pytest.raises(StateError, match=rf"{tmp_path}: no room for 5 GiB\nfree space there"):
        fetch_outputs([source], tmp_path / "blobs", lambda _: None)
    assert list((tmp_path / "blobs").parent.glob("incoming-*")) == []
