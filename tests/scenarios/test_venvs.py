"""Nodes build Python environments with a real venv and a real pip, from a package that the test makes."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from scenarios.conftest import Cli
from scenarios.lab import TORCHRUN, Lab
from scenarios.test_pool_check import BARE_PYTHON

SPEC = """
workflow:
  name: greets
  tasks:
  - name: one
    command: [python3, -c, "import greeter, os, sys; print(greeter.hello(), sys.prefix == os.environ['VIRTUAL_ENV'])"]
"""


def make_wheel(folder: Path, name: str, code: str) -> None:
    """Make a package with one module."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    folder.mkdir()
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


@pytest.mark.ssh
def test_two_workflows_share_an_environment_that_one_of_them_builds(lab: Lab) -> None:
    cli = lab.cli
    make_wheel(cli.folder / "wheels", "greeter", "def hello(): return 'hello'\n")
    (cli.folder / "requirements.txt").write_text("greeter==1.0  # the only one\n")
    variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(cli.folder / "wheels")}
    lab.configure(names=("gpu1",), python=BARE_PYTHON, venv="requirements.txt", environment=variables)
    done = cli.run("pool", "check")
    assert "note: gpu1: the Python environment of requirements.txt is not built yet\n    the first workflow" in done.out

    spec = cli.spec(SPEC)
    ids = [cli.submit(spec), cli.submit(spec)]
    for one in ids:
        assert cli.await_status(one, "COMPLETED", "FAILED_START_ERROR", timeout=170)["status"] == "COMPLETED"
        assert cli.logs(one) == "[one] hello True\n"
    events = [cli.run("workflow", "events", one).out for one in ids]
    assert sum(text.count("gpu1 has built the Python environment of requirements.txt (pip, ") for text in events) == 1
    assert events[0].count("building the Python environment of requirements.txt on gpu1") == 1

    # A later workflow uses the same environment, and so does the check for torch.
    done = cli.run("workflow", "submit", cli.spec(TORCHRUN, "torchrun.yaml"), "--wait")
    assert cli.tasks("trains-1")["one"]["status"] == "FAILED_START_ERROR"
    assert "torch is not installed for" in done.err
    assert "/env/bin/python3; add `torch` to the requirements file of `venv`" in done.err
    assert "building" not in cli.run("workflow", "events", "trains-1").out
    done = cli.run("pool", "check")
    assert "not built yet" not in done.out

    # Another requirements file for one workflow. Its package does not exist, and the error shows pip's message.
    (cli.folder / "other.txt").write_text("greeter==2.0\n")
    done = cli.run("workflow", "submit", spec, "--venv", "other.txt", "--wait", timeout=170)
    assert done.code == 1
    assert "gpu1: cannot build the Python environment of other.txt: pip failed with exit code 1:\n" in done.err
    assert "No matching distribution found for greeter==2.0" in done.err
    assert cli.query("greets-3")["status"] == "FAILED_START_ERROR"

    done = cli.run("node", "clean", "--dry-run")
    assert "gpu1: kept 1 Python environment\n" in done.out
    done = cli.run("node", "clean", "--older-than", "0s")
    assert "gpu1: removed the Python environment of requirements.txt (" in done.out
    assert not [path for path in (cli.folder / "gpu1" / "distflow-node" / "venvs").iterdir() if path.is_dir()]


def test_wrong_requirements_are_refused_before_anything_is_stored(cli: Cli) -> None:
    spec = cli.spec(SPEC.replace("  name: greets\n", "  name: greets\n  venv: requirements.txt\n"))
    done = cli.run("workflow", "submit", spec)
    assert (done.code, done.out) == (2, "")
    assert "requirements.txt: error: the file does not exist" in done.err
    (cli.folder / "requirements.txt").write_text("greeter\n-e .\n")
    done = cli.run("workflow", "validate", spec)
    assert done.code == 2
    assert "requirements.txt:2: error: `.` is not an absolute path or a URL, so the nodes cannot find it" in done.out + done.err
    (cli.folder / "requirements.txt").write_text("greeter\n")
    done = cli.run("workflow", "submit", spec, "--dry-run")
    assert "Python environment of requirements.txt" in done.out
    cli.configure(container="podman")
    spec = cli.spec(Path(spec).read_text().replace("- name: one", "- name: one\n    image: torch"))
    done = cli.run("workflow", "validate", spec)
    assert done.code == 0
    assert "`one` runs in a container and does not use the packages of `venv`" in done.out + done.err
