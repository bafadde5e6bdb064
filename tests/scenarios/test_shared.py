"""Outputs for later tasks stay in storage that all nodes share. Without it, they are copied through this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import Lab

SPEC = """
workflow:
  name: shared
  groups:
  - name: making
    tasks:
    - {name: make, lead: true, command: [sh, -c, 'head -c 3000000 /dev/zero > {{output}}/data']}
  - name: gating
    tasks:
    - {name: gate, lead: true, command: [sh, -c, 'while [ ! -e GATE ]; do sleep 0.2; done']}
  - name: taking
    tasks:
"""
READER = """
    - name: NAME
      lead: LEAD
      ranks: {size: 1}
      command: [sh, -c, 'wc -c < {{input:make}}/data; echo has it; while [ ! -e GO ]; do sleep 0.2; done']
      inputs: [{task: make}, {task: gate}]
"""


def _submit(cli: Cli, *readers: str) -> str:
    text = SPEC + "".join(READER.replace("NAME", name).replace("LEAD", str(name == readers[0]).lower()) for name in readers)
    return cli.submit(cli.spec(text.replace("GATE", str(cli.folder / "gate")).replace("GO", str(cli.folder / "go"))))


def _large_files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.stat().st_size > 100_000] if folder.is_dir() else []


def _events(cli: Cli, ident: str) -> str:
    return cli.run("workflow", "events", ident).out


@pytest.mark.ssh
@pytest.mark.parametrize("where", ["one root for all", "a root for each", "one root, and a node is away"])
def test_an_output_is_copied_to_this_machine_unless_all_nodes_share_a_root(lab: Lab, where: str) -> None:
    cli = lab.cli
    root = {} if where == "a root for each" else {"root": str(cli.folder / "shared")}
    lab.configure(names=("gpu1", "gpu2"), nodes={"gpu1": root, "gpu2": root}, connect_timeout="2s")
    is_shared = where == "one root for all"
    if where == "one root, and a node is away":
        lab.servers["gpu2"].stop()
    (cli.folder / "gate").touch()
    readers = ("one",) if where == "one root, and a node is away" else ("one", "two")
    ident = _submit(cli, *readers)
    for name in readers:
        wait_until(lambda name=name: cli.logs(ident, "--task", name).endswith("has it\n"), 60)  # type: ignore[misc]
    assert cli.logs(ident, "--task", "one") == "[one] 3000000\n[one] has it\n"
    assert len({task["node_name"] for name, task in cli.tasks(ident).items() if name in readers}) == len(readers)
    # A copy on this machine is kept until the workflow has ended.
    assert len(_large_files(cli.state / "blobs")) == (0 if is_shared else 1)
    event = (
        "[make] its output is available on every node: 2.9 MiB"
        if is_shared
        else "[make] its output was copied to this machine: 2.9 MiB"
    )
    assert event in _events(cli, ident)
    (cli.folder / "go").touch()
    cli.await_status(ident, "COMPLETED")


def test_an_output_that_disappeared_from_the_node_is_reported(cli: Cli) -> None:
    ident = _submit(cli, "one")
    wait_until(lambda: "[make] its output is available on every node: 2.9 MiB" in _events(cli, ident), 60)
    (archive,) = _large_files(cli.root / "blobs")
    archive.unlink()
    (cli.folder / "gate").touch()
    cli.await_status(ident, "FAILED_START_ERROR")
    message = cli.query(ident)["groups"][-1]["message"]
    assert "it does not have the output of make, and neither does the machine of the supervisor" in message


def test_an_output_with_a_file_url_is_copied_to_this_machine(cli: Cli, tmp_path: Path) -> None:
    for name in ("gate", "go"):
        (cli.folder / name).touch()
    text = SPEC.replace("> {{output}}/data']}", f"> {{{{output}}}}/data'], outputs: [{{url: 'file://{tmp_path}/out'}}]}}")
    text += READER.replace("NAME", "one").replace("LEAD", "true")
    spec = cli.spec(text.replace("GATE", str(cli.folder / "gate")).replace("GO", str(cli.folder / "go")))
    done = cli.run("workflow", "submit", spec, "--wait")
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "data").stat().st_size == 3_000_000
    assert "[make] its output was copied to this machine: 2.9 MiB" in _events(cli, "shared-1")
