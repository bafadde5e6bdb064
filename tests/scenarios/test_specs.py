"""The first sample, and a spec of OSMO's users, run to their end on this machine.

`test_ssh` and `test_engines` run the samples that train.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from distflow.testing.daemons import free_port
from scenarios.conftest import Cli
from scenarios.lab import copy_specs


@pytest.fixture
def specs(cli: Cli, repository: Path) -> Path:
    """The folder of the specs in a checkout."""
    return copy_specs(cli, repository)


def test_hello_world_prints_its_ranks(cli: Cli, specs: Path) -> None:
    done = cli.run("workflow", "submit", str(specs / "hello_world.yaml"), "--wait")
    assert done.code == 0, done.err
    assert "rank 0 of 2" in done.out
    assert "rank 1 of 2" in done.out


def test_a_spec_of_osmo_users_runs_unchanged(cli: Cli, repository: Path) -> None:
    shutil.copytree(repository / "tests" / "goldens" / "osmo", cli.folder / "osmo")
    text = (cli.folder / "distflow.yaml").read_text()
    (cli.folder / "distflow.yaml").write_text(text.replace("{name: local,", "{name: local, platform: local-cpu,"))
    done = cli.run("workflow", "submit", "osmo/tutorial.yaml", "--wait", "--set", f"port={free_port('')}")
    assert done.code == 0, done.err + done.out
    assert "sum of ranks 1" in done.out
    assert "Finished training" in done.out
    # A warning reports that the image is not used. At the end, `query` shows the directory of the output.
    assert "image" in done.err
    (dataset,) = json.loads(cli.run("dataset", "list", "-t", "json").out)["datasets"]
    assert (dataset["name"], dataset["versions"], dataset["latest"]["file_count"]) == ("pytorch-dist-models", [1], 1)
    workflow = json.loads(cli.run("workflow", "list", "-t", "json").out)["workflows"][0]["name"]
    folder = Path(cli.tasks(workflow)["master"]["output_dir"])
    assert (folder / "models" / "model.txt").read_text() == "world of 2\n"
    assert str(folder) in cli.run("workflow", "query", workflow).out


def test_the_scripts_of_a_dry_run_start_the_same_ranks(cli: Cli, specs: Path) -> None:
    done = cli.run("workflow", "submit", str(specs / "hello_world.yaml"), "--dry-run", "--scripts", str(cli.folder / "by-hand"))
    assert done.code == 0, done.err
    for task, rank in (("master", 0), ("worker", 1)):
        ran = subprocess.run(
            ["sh", str(cli.folder / "by-hand" / f"{task}.sh")], capture_output=True, text=True, check=True, timeout=60,
            env={"PATH": cli.environment["PATH"], "HOME": str(cli.folder), "TMPDIR": str(cli.folder)},
        )  # fmt: skip
        assert f"rank {rank} of 2" in ran.stdout
    assert json.loads(cli.run("workflow", "list", "-t", "json").out) == {"workflows": []}
