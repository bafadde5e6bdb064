"""Errors of ``distflow node`` and ``workflow adopt``: the failed node, and the command that shows details."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from distflow.backends.machines.cleanup import Leftover, UnknownWorkflows
from distflow.cli.app import run
from distflow.client.adoption import Adoption
from distflow.client.nodes import Cleaned, PoolNode, Reaped, Uninstalled
from distflow.pools.model import Pool
from distflow.structs import replace
from unit.cli.screen import Screen

CONFIGURATION = """
default_pool: idle
pools:
  idle: {backend: local, nodes: [{name: here}]}
  lab: {backend: ssh, nodes: [{name: gpu1, host: gpu1}]}
"""


@pytest.fixture
def folder(screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, which has the configuration."""
    (tmp_path / "distflow.yaml").write_text(CONFIGURATION)
    (tmp_path / "distflow.yaml").chmod(0o600)
    monkeypatch.setenv("DISTFLOW_CONFIG", str(tmp_path / "distflow.yaml"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _clean_nodes(client: object, nodes: Sequence[PoolNode], **_: object) -> list[Cleaned]:
    return [Cleaned(node=node.name, error="" if node.name == "here" else "refused") for _, node in nodes]


def test_an_error_of_a_node_is_followed_by_a_command_that_checks_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("distflow.cli.node.clean_nodes", _clean_nodes)
    assert run(["node", "clean"]) == 3
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].split() == ["gpu1", "0", "0", "0.0", "MiB", "refused"]
    assert err == "error: gpu1: refused\nto check the node: distflow pool check --pool lab --node gpu1\n"
    (folder / "hosts").write_text("gpu7\n")
    assert run(["node", "clean", "--hostfile", "hosts"]) == 3
    command = "distflow pool check --pool hostfile --hostfile hosts --node gpu7"
    assert capsys.readouterr().err == f"error: gpu7: refused\nto check the node: {command}\n"


@pytest.mark.parametrize("command", [["clean"], ["clean", "--dry-run", "-t", "json"], ["uninstall", "--yes"], ["uninstall"]])
def test_pools_without_nodes_of_their_own_are_refused(
    command: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "distflow.yaml").write_text(f"{CONFIGURATION}  hpc: {{backend: slurm}}\n")
    assert run(["node", *command, "--pool", "hpc"]) == 2
    out, err = capsys.readouterr()
    message = "pool `hpc` has no nodes of its own, because slurm chooses them for each job"
    if "json" in command:
        assert json.loads(out)["error"]["message"] == message
    else:
        hint = "to end leftover jobs: distflow node reap --pool hpc"
        assert (out, err) == ("", f"error: {message}\n{hint}\n")


def test_all_pools_without_nodes_of_their_own_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "distflow.yaml").write_text("default_pool: hpc\npools:\n  hpc: {backend: slurm}\n  pods: {backend: kubernetes}\n")
    assert run(["node", "clean"]) == 2
    message = "the pools `hpc` and `pods` have no nodes of their own, because clusters choose them for each job"
    assert capsys.readouterr().err == f"error: {message}\nto end leftover jobs: distflow node reap\n"


@pytest.mark.usefixtures("folder")
def test_reap_counts_a_pool_without_nodes_as_a_pool(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("distflow.cli.node.reap_nodes", lambda nodes, **_: [Reaped(node=node.name) for _, node in nodes])
    monkeypatch.setattr("distflow.cli.node.reap_jobs", lambda *_, **__: [Reaped(node="cluster")])
    assert run(["node", "reap"]) == 0
    assert capsys.readouterr().out == "no leftovers on 2 nodes and 1 pool\n"
    failed = [Reaped(node="cluster", error="squeue failed"), Reaped(node="pods", error="no answer")]
    monkeypatch.setattr("distflow.cli.node.reap_jobs", lambda *_, **__: failed)
    assert run(["node", "reap"]) == 3
    out, err = capsys.readouterr()
    assert out == "pods: failed: no answer\nno leftovers on 2 nodes\n"
    assert err == "error: cluster: squeue failed\ndetails: distflow pool check --pool cluster\n"


@pytest.mark.usefixtures("folder")
def test_uninstall_shows_the_result_of_each_node(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        Uninstalled(node="n1", removed=("/r",)),
        Uninstalled(node="n2", removed=("/r/x",), left=("/r: busy",)),
        Uninstalled(node="n3", left=("/r: busy",)),
        Uninstalled(node="n4", error="refused"),
        Uninstalled(node="n5", error="no answer"),
    ]
    monkeypatch.setattr("distflow.cli.node.uninstall_nodes", lambda *_: results)
    nodes = ", ".join(f"{{name: {one.node}, host: {one.node}}}" for one in results)
    Path("distflow.yaml").write_text(f"pools:\n  lab: {{backend: ssh, nodes: [{nodes}]}}\n")
    assert run(["node", "uninstall", "--yes", "--pool", "lab"]) == 3
    out, err = capsys.readouterr()
    assert out == (
        "n1: removed\nn2: removed, except:\n  /r: busy\nn3: nothing could be removed:\n  /r: busy\nn5: failed: no answer\n"
    )
    assert err.startswith("error: n4: refused\n")


@pytest.mark.usefixtures("folder")
def test_the_confirmation_of_uninstall_names_only_some_nodes_of_a_large_pool(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = ", ".join(f"{{name: n{number}, host: n}}" for number in range(1000))
    Path("distflow.yaml").write_text(f"pools:\n  lab: {{backend: ssh, nodes: [{nodes}]}}\n")
    assert run(["node", "uninstall", "--pool", "lab"]) == 2
    assert "from n0 (~/.distflow), n1 (~/.distflow), n2 (~/.distflow), n3 (~/.distflow), and 996 more needs" in (
        capsys.readouterr().err
    )


@pytest.mark.usefixtures("folder")
def test_leftovers_that_remain_are_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    remaining = Leftover(pid=None, name="docker x", attempt="w/g/t/0", why="ended", is_ours=True, error="permission denied")
    monkeypatch.setattr("distflow.cli.node.reap_nodes", lambda nodes, **_: [Reaped(node=nodes[0][1].name, found=(remaining,))])
    monkeypatch.setattr("distflow.cli.node.reap_jobs", lambda *_, **__: [])
    assert run(["node", "reap", "--pool", "idle"]) == 3
    assert capsys.readouterr().err == "error: here: docker x remains: permission denied\n"


@pytest.mark.usefixtures("screen")
def test_adopt_does_not_report_that_there_is_nothing_to_adopt_if_a_node_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = UnknownWorkflows(pool=Pool(name="lab", backend="ssh", nodes=()), node="gpu1", error="refused")

    def adoption(*nodes: UnknownWorkflows) -> Adoption:
        return Adoption(workflows=(), nodes=nodes, kept_aside=None)

    monkeypatch.setattr("distflow.client.adoption.adopt", lambda *_, **__: adoption(failed))
    assert run(["workflow", "adopt"]) == 3
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: gpu1: refused\ndetails: distflow pool check --pool lab --node gpu1\n")
    monkeypatch.setattr("distflow.client.adoption.adopt", lambda *_, **__: adoption(failed, replace(failed, node="gpu2")))
    assert run(["workflow", "adopt"]) == 3
    assert capsys.readouterr().out == "gpu2: failed: refused\n"
    monkeypatch.setattr("distflow.client.adoption.adopt", lambda *_, **__: adoption())
    assert run(["workflow", "adopt"]) == 0
    assert capsys.readouterr().out.startswith("Nothing to adopt: ")
