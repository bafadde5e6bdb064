from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from distflow.runtime.files import packing
from distflow.runtime.files.blobs import path_of


def test_what_goes_while_a_directory_is_looked_at_takes_nothing_else_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = "9fa5f05d-aba9-4541-877d-458661c7bcf0/g/t1/0"
    models = tmp_path / attempt / "models"
    (models / "step-2.tmp").mkdir(parents=True)
    (models / "a.tmp").write_bytes(b"half")
    (models / "step-1.pt").write_bytes(b"whole")

    def scandir(path: str) -> Any:
        if os.path.basename(path) == "step-2.tmp":
            (models / "step-2.tmp").rename(models / "step-2")  # between its size and what it holds
        with real(path) as entries:
            listed = list(entries)
        if os.path.basename(path) == "models" and (models / "a.tmp").exists():
            (models / "a.tmp").unlink()  # between its name and its size
        return listed

    real = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    packed = packing.pack_place(str(tmp_path), attempt, "models", lambda done, of: None)
    with tarfile.open(path_of(str(tmp_path), packed["hash"])) as tar:
        assert sorted(tar.getnames()) == ["models", "models/step-1.pt", "models/step-2"]


def test_a_sender_of_another_machine_that_has_the_same_id_is_in_nobodys_way(tmp_path: Path) -> None:
    """A root may be shared, and containers count from 1."""
    attempt = "9fa5f05d-aba9-4541-877d-458661c7bcf0/g/t1/0"
    models = tmp_path / attempt / "models"
    models.mkdir(parents=True)
    (models / "step-1.pt").write_bytes(b"whole")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / f"clock-{os.getpid()}").touch()
    assert packing.pack_place(str(tmp_path), attempt, "models", lambda done, of: None)["files"] == 2


def test_two_that_pack_the_same_output_both_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection of the first one broke, and it does not know that yet."""
    attempt = "9fa5f05d-aba9-4541-877d-458661c7bcf0/g/t1/0"
    output = tmp_path / attempt / "output"
    output.mkdir(parents=True)
    (output / "model.pt").write_bytes(b"whole")
    dump = json.dump

    def after_another(*given: Any) -> None:
        dump(*given)
        monkeypatch.setattr(json, "dump", dump)
        others.append(pack())

    def pack() -> dict[str, Any]:
        return packing.pack_output(str(tmp_path), attempt, lambda done, of: None)

    others: list[dict[str, Any]] = []
    monkeypatch.setattr(json, "dump", after_another)
    assert [pack()] == others
    assert sorted(path.name for path in output.parent.iterdir()) == ["output", "packed.json"]
