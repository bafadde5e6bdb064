"""``distflow.train`` travels to nodes that have no distflow, and finds there what is installed."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

from distflow import __version__
from distflow.spec.bundles import library_archive

BARE = str(Path(sys.base_prefix) / "bin" / "python3")
"""An interpreter that knows nothing of distflow."""


def unpacked(folder: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(library_archive())) as archive:
        for entry in archive:  # Python before 3.11.4 cannot be asked for a filter in `extractall`
            content = archive.extractfile(entry)
            assert content is not None
            (folder / entry.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / entry.name).write_bytes(content.read())
    return folder


def python(interpreter: str, folder: Path, text: str, *, path: str = "") -> str:
    done = subprocess.run(
        [interpreter, "-S", "-c", text], capture_output=True, text=True, check=False, timeout=60, cwd=folder,
        env={"PYTHONPATH": f"{folder}:{path}" if path else str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_is_the_same_each_time_and_holds_sources_only() -> None:
    assert library_archive() == library_archive()
    with tarfile.open(fileobj=io.BytesIO(library_archive())) as archive:
        names = archive.getnames()
    assert "distflow/train/distributed.py" in names
    assert all(name.endswith(".py") for name in names)


def test_a_bare_interpreter_can_import_it(tmp_path: Path) -> None:
    text = "import distflow; from distflow import distributed; print(distflow.__version__, distributed.is_distributed_task())"
    assert python(BARE, unpacked(tmp_path), text) == f"{__version__} False"


def test_a_distflow_that_is_installed_is_found_behind_it(tmp_path: Path) -> None:
    installed = Path(__file__).parents[3] / "src"
    folder = unpacked(tmp_path / "lib")
    text = "import distflow.errors, distflow.train.distributed as d; print(distflow.errors.__file__); print(d.__file__)"
    errors, train = python(BARE, folder, text, path=str(installed)).splitlines()
    assert Path(errors) == installed / "distflow" / "errors.py"
    assert Path(train) == folder / "distflow" / "train" / "distributed.py"
