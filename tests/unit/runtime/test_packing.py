from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from distflow.runtime import packing
from distflow.runtime.blobs import path_of


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
