"""The packing of outputs and directories while other processes change or pack them."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from distflow.runtime.files import packing
from distflow.runtime.files.blobs import path_of


def test_files_that_disappear_during_packing_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = "9fa5f05d-aba9-4541-877d-458661c7bcf0/g/t1/0"
    models = tmp_path / attempt / "models"
    (models / "step-2.tmp").mkdir(parents=True)
    (models / "a.tmp").write_bytes(b"half")
    (models / "step-1.pt").write_bytes(b"whole")

    def scandir(path: str) -> Any:
        if os.path.basename(path) == "step-2.tmp":
            (models / "step-2.tmp").rename(models / "step-2")  # after its size and before its contents were read
        with real(path) as entries:
            listed = list(entries)
        if os.path.basename(path) == "models" and (models / "a.tmp").exists():
            (models / "a.tmp").unlink()  # after its name and before its size was read
        return listed

    real = os.scandir
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scandir)
        packed = packing.pack_place(str(tmp_path), attempt, "models", lambda done, of: None)
    with tarfile.open(path_of(str(tmp_path), packed["hash"])) as tar:
        assert sorted(tar.getnames()) == ["models", "models/step-1.pt", "models/step-2"]


def test_a_sender_with_the_same_process_id_on_another_machine_does_not_interfere(tmp_path: Path) -> None:
    """Machines may share a root, and process ids in containers start at 1."""
    attempt = "9fa5f05d-aba9-4541-877d-458661c7bcf0/g/t1/0"
    models = tmp_path / attempt / "models"
    models.mkdir(parents=True)
    (models / "step-1.pt").write_bytes(b"whole")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / f"clock-{os.getpid()}").touch()
    assert packing.pack_place(str(tmp_path), attempt, "models", lambda done, of: None)["files"] == 2


def test_two_senders_can_pack_the_same_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens if the first sender has not yet noticed that its connection broke."""
    attempt = "9fa5f05d-aba9-4541-877d-458661c7bcf0/g/t1/0"
    output = tmp_path / attempt / "output"
    output.mkdir(parents=True)
    (output / "model.pt").write_bytes(b"whole")
    dump = json.dump

    def dump_and_pack_again(*given: Any) -> None:
        dump(*given)
        monkeypatch.setattr(json, "dump", dump)
        others.append(pack())

    def pack() -> dict[str, Any]:
        return packing.pack_output(str(tmp_path), attempt, lambda done, of: None)

    others: list[dict[str, Any]] = []
    monkeypatch.setattr(json, "dump", dump_and_pack_again)
    assert [pack()] == others
    assert sorted(path.name for path in output.parent.iterdir()) == ["output", "packed.json"]
