"""What is shipped to nodes: the same for the same sources, and enough for its services."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from distflow.backends.machines.connection.bundles import RUNTIME, STORAGE, Bundle

INSTALLED = Path("~/.pyenv/versions").expanduser()
"""Where a version manager has them; tests have a home of their own."""


@pytest.mark.parametrize("bundle", [RUNTIME, STORAGE])
def test_an_archive_is_the_same_whenever_it_is_made(bundle: Bundle) -> None:
    again = Bundle(package=bundle.package, modules=bundle.modules)
    assert (again.archive, again.digest) == (bundle.archive, bundle.digest)


def _bring(folder: Path) -> list[str]:
    """Unpack the storage bundle, and return the modules in it."""
    path = folder / "bundle.zip"
    path.write_bytes(STORAGE.archive)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "home")
        return sorted(name.removesuffix(".py").replace("/", ".") for name in archive.namelist())


def test_the_storage_bundle_needs_nothing_but_itself(tmp_path: Path) -> None:
    """Every module of it is imported by an interpreter that has only the standard library."""
    names = _bring(tmp_path)
    assert "distflow.storage.objects" in names
    assert not [name for name in names if name.startswith(("distflow.transports", "distflow.supervisor"))]
    path = str(tmp_path / "home")
    script = f"import sys, importlib; sys.path.insert(0, {path!r})\nfor one in {names!r}: importlib.import_module(one)"
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True)


@pytest.mark.parametrize("version", ["3.8", "3.9"])
def test_an_old_python_says_that_it_is_old(version: str, tmp_path: Path) -> None:
    found = shutil.which(f"python{version}", path=os.pathsep.join(str(path) for path in INSTALLED.glob(f"{version}.*/bin")))
    found = found or shutil.which(f"python{version}")
    # What a version manager has put into the PATH may lead nowhere.
    asked = subprocess.run(
        [found or "false", "-c", "import sys; print(sys.executable)"], capture_output=True, check=False, text=True
    )
    if asked.returncode:
        pytest.skip(f"no Python {version} here")
    found = asked.stdout.strip()
    _bring(tmp_path)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'home')!r})\n"
        f"from distflow.storage.node_service import serve; serve({str(tmp_path)!r}, 0o77)"
    )
    # The request's end would be the connection's.
    with subprocess.Popen([found, "-I", "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b'{"attempt": "a"}\n')
        process.stdin.flush()
        said = json.loads(process.stdout.readline())
    assert said["relay"].startswith(f"{found} is Python {version}.")
