"""`pool check` and hostfiles on hosts behind real OpenSSH servers: a good pool passes, and each fault is reported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from distflow.testing.kernel import Network, missing_netns
from distflow.testing.sshd import Sshd, make_key, missing_sshd
from distflow.testing.waiting import wait_until
from preloaded import write_program
from scenarios.conftest import Cli

pytestmark = pytest.mark.ssh

BARE_PYTHON = str(getattr(sys, "_base_executable", sys.executable))
"""The base Python of this virtual environment. It has no torch, whose import by a check takes seconds."""

TWO = """
workflow:
  name: two
  groups:
  - name: train
    tasks:
    - {name: master, lead: true, ranks: {size: 1}, command: [sh, -c, 'echo "$MASTER_ADDR $NODE_RANK"']}
    - {name: worker, ranks: {size: 1}, command: [sh, -c, 'echo "$MASTER_ADDR $NODE_RANK"']}
"""


class Hosts:
    """Three hosts behind SSH, gpu1 to gpu3, and ways to write a configuration for them."""

    def __init__(self, cli: Cli, servers: dict[str, Sshd]) -> None:
        self.cli = cli
        self.servers = servers
        for name in servers:
            cli.add_node(cli.folder / name)
        (cli.folder / "ssh_config").write_text("".join(server.client_stanza() for server in servers.values()))
        self.configure()

    def configure(self, *nodes: str, python: str = BARE_PYTHON, **more: str) -> None:
        """Write the pool `lab`. `more` has further settings of nodes, as YAML, by the name of the node."""
        lines = ["default_pool: lab", "pools:", "  lab:", "    backend: ssh", f"    ssh_config: {self.cli.folder}/ssh_config"]
        lines += [f"    python: {python}", "    connect_timeout: 5s", "    nodes:"]
        for name in nodes or tuple(self.servers):
            root = self.cli.folder / name
            lines.append(f"    - {{name: {name}, root: {root}, lease_dir: {root}-leases{more.get(name, '')}}}")
        (self.cli.folder / "distflow.yaml").write_text("\n".join(lines) + "\n")

    def check(self, *arguments: str, code: int) -> dict[str, Any]:
        """Run `pool check`, and return its JSON report. The report must agree with the exit code."""
        done = self.cli.run("pool", "check", "-t", "json", *arguments)
        assert done.code == code, done.out + done.err
        assert done.err == ""
        report: dict[str, Any] = json.loads(done.out)
        assert report["can_run"] is (code == 0)
        return report


def start_servers(cli: Cli, stack: ExitStack, folders: pytest.TempPathFactory) -> dict[str, Sshd]:
    key = make_key(folders.mktemp("key") / "id")
    return {
        f"gpu{i}": stack.enter_context(Sshd(folders.mktemp(f"gpu{i}"), f"127.0.1.{i}", alias=f"gpu{i}", user_key=key))
        for i in (1, 2, 3)
    }


@pytest.fixture
def hosts(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts on loopback addresses."""
    if why := missing_sshd():
        pytest.skip(why)
    with ExitStack() as stack:
        yield Hosts(cli, start_servers(cli, stack, tmp_path_factory))
        wait_until(lambda: not cli.processes(), 30)


def errors(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in report["findings"] if finding["grade"] == "error"]


def states(report: dict[str, Any]) -> dict[str, str]:
    return {node["name"]: node["state"] for node in report["nodes"]}


@pytest.mark.parametrize("has_runtime", [False])
def test_three_good_nodes_can_run_a_gang(hosts: Hosts) -> None:
    report = hosts.check(code=0)
    assert report["verdict"].startswith("3 nodes can run a gang")
    assert (report["pool"], report["backend"]) == ("lab", "ssh")
    assert not errors(report)
    assert [(node["name"], node["address"], node["interface"]) for node in report["nodes"]] == [
        ("gpu1", "127.0.1.1", "lo"),
        ("gpu2", "127.0.1.2", "lo"),
        ("gpu3", "127.0.1.3", "lo"),
    ]
    for node in report["nodes"]:
        assert node["error"] is None
        assert abs(node["clock_offset_s"]) < 1, "one machine has one clock"
        assert node["root"]["error"] is None
        assert node["lease_dir"]["error"] is None
        assert node["python"]["version"] == ".".join(str(part) for part in sys.version_info[:3])
    assert len(report["pairs"]) == 6
    assert {(pair["source"], pair["target"]) for pair in report["pairs"]} == {
        (a, b) for a in hosts.servers for b in hosts.servers if a != b
    }
    assert {pair["kind"] for pair in report["pairs"]} == {"ok"}


def test_the_text_has_a_table_the_findings_and_the_verdict(hosts: Hosts) -> None:
    hosts.servers["gpu2"].stop()
    done = hosts.cli.run("pool", "check")
    assert done.code == 3
    assert done.err == "", "progress is only shown on terminals"
    lines = done.out.splitlines()
    assert lines[0].split() == ["Node", "State", "Address", "Python", "Torch", "Free", "Clock", "GPUs"]
    assert [line.split()[:2] for line in lines[2:5]] == [["gpu1", "ok"], ["gpu2", "error"], ["gpu3", "ok"]]
    assert "error: gpu2: " in done.out
    assert lines[-1] == "a gang cannot run on all 3 nodes: gpu2 cannot take part"


def test_a_stopped_server_is_one_error_with_its_remedy(hosts: Hosts) -> None:
    hosts.servers["gpu2"].stop()
    report = hosts.check(code=3)
    (error,) = errors(report)
    assert (error["about"], error["nodes"]) == ("ssh", ["gpu2"])
    assert "connection refused" in error["message"]
    assert "check that sshd is running there" in error["hint"]
    assert states(report)["gpu2"] == "error"
    # The connections between the other nodes are checked nevertheless.
    assert [pair["kind"] for pair in report["pairs"]] == ["ok", "ok"]


def test_a_changed_host_key_is_refused_with_the_command_to_type(hosts: Hosts, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other").with_name("other.pub").read_text().split()
    server = hosts.servers["gpu3"]
    server.known_hosts.write_text(f"{server.known_name} {other[0]} {other[1]}\n")
    (error,) = errors(hosts.check(code=3))
    assert (error["about"], error["nodes"]) == ("ssh", ["gpu3"])
    assert "ssh-keygen -R" in error["message"] + error["hint"]


def test_a_missing_python_is_reported_with_one_that_exists(hosts: Hosts) -> None:
    hosts.configure(gpu1=", python: /opt/none/bin/python")
    (error,) = errors(hosts.check(code=3))
    assert (error["about"], error["nodes"]) == ("python", ["gpu1"])
    assert error["message"] == "its python /opt/none/bin/python does not exist"
    assert error["hint"].startswith("set `python` of the node to Python 3.8 or newer, such as `/")


def test_a_python_that_is_too_old_is_reported(hosts: Hosts) -> None:
    old = hosts.cli.folder / "python-3.6"
    # A current Python that runs the real stub, but reports version 3.6.9.
    old.write_text(
        f'#!/bin/sh\nwhile [ "$1" != -c ]; do shift; done; shift; stub=$1; shift\n'
        f"exec {sys.executable} -I -S -c \"import sys; sys.version_info = (3, 6, 9); sys.version = '3.6.9 (old)'\n"
        f'exec(sys.argv.pop(1))" "$stub" "$@"\n'
    )
    old.chmod(0o755)
    hosts.configure(gpu1=f", python: {old}")
    (error,) = errors(hosts.check(code=3))
    assert (error["about"], error["nodes"]) == ("python", ["gpu1"])
    assert error["message"] == f"its python {old} is Python 3.6.9; 3.8 or newer is needed"
    assert error["hint"].startswith("set `python` of the node to Python 3.8 or newer, such as `/")


@pytest.mark.parametrize("has_runtime", [False])
def test_a_root_that_cannot_be_created_is_an_error(hosts: Hosts) -> None:
    (hosts.cli.folder / "gpu2").write_text("a file in its place")
    (error,) = errors(hosts.check(code=3))
    assert (error["about"], error["nodes"]) == ("root", ["gpu2"])
    assert "is not a directory" in error["message"]
    assert "`root:` of the node" in error["hint"]


def test_a_node_with_an_address_that_no_machine_has_is_unreachable(hosts: Hosts) -> None:
    hosts.configure(gpu1=", address: 198.51.100.1")
    report = hosts.check(code=3)
    assert {(pair["source"], pair["target"]) for pair in report["pairs"] if pair["kind"] != "ok"} == {
        ("gpu2", "gpu1"), ("gpu3", "gpu1"),
    }  # fmt: skip
    assert {error["about"] for error in errors(report)} == {"reach"}
    assert all(error["nodes"] == ["gpu1"] and "198.51.100.1" in error["message"] for error in errors(report))
    (warning,) = [finding for finding in report["findings"] if finding["about"] == "address"]
    assert "198.51.100.1 is not on any of its interfaces" in warning["message"]


def test_preflight_starts_nothing_if_one_node_cannot_be_reached(hosts: Hosts) -> None:
    spec = hosts.cli.spec(TWO)
    hosts.servers["gpu2"].stop()
    done = hosts.cli.run("workflow", "submit", spec, "--preflight")
    assert (done.code, done.out) == (3, "")
    assert "gpu2" in done.err
    assert done.err.splitlines()[-1] == "Nothing was started. Details: distflow pool check --pool lab"
    assert json.loads(hosts.cli.run("workflow", "list", "-t", "json").out) == {"workflows": []}
    hosts.servers["gpu2"].start()
    done = hosts.cli.run("workflow", "submit", spec, "--preflight", "--wait")
    assert done.code == 0, done.err
    assert done.out.splitlines()[0] == "two-1"


def test_the_check_uses_the_environment_and_setup_of_tasks(hosts: Hosts) -> None:
    folder = hosts.cli.folder
    (folder / "lib").mkdir()
    (folder / "lib" / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')\n")
    hosts.configure(gpu1=f", environment: {{PYTHONPATH: {folder}/lib}}", gpu2=", setup: exit 7")
    report = hosts.check(code=0)
    warnings = {finding["nodes"][0]: finding for finding in report["findings"] if finding["grade"] == "warning"}
    assert "torch cannot be imported: OSError('libcudart.so.12" in warnings["gpu1"]["message"]
    assert "does not answer in the environment of tasks: exit code 7" in warnings["gpu2"]["message"]


def test_node_clean_reports_an_unreachable_node_in_its_json(hosts: Hosts) -> None:
    hosts.servers["gpu2"].stop()
    done = hosts.cli.run("node", "clean", "-t", "json")
    assert done.code == 3
    nodes = {node["node"]: node["error"] for node in json.loads(done.out)["nodes"]}
    assert (nodes["gpu1"], nodes["gpu3"]) == (None, None)
    assert "connection refused" in str(nodes["gpu2"])


def test_option_node_selects_the_nodes_to_check(hosts: Hosts) -> None:
    hosts.servers["gpu2"].stop()
    report = hosts.check("--node", "gpu1", "--node", "gpu3", code=0)
    assert [node["name"] for node in report["nodes"]] == ["gpu1", "gpu3"]
    done = hosts.cli.run("pool", "check", "--node", "gpu4")
    assert done.code == 2
    assert "pool `lab` has no node `gpu4`" in done.err


def test_a_path_that_does_not_exist_on_a_node_is_an_error(hosts: Hosts) -> None:
    data = hosts.cli.folder / "data"
    data.mkdir()
    (data / "one").write_text("1234")
    report = hosts.check("--path", str(data), "--node", "gpu1", "--node", "gpu2", code=0)
    assert [node["paths"][str(data)]["bytes"] for node in report["nodes"]] == [4, 4]
    missing = f"{data}/two"
    report = hosts.check("--path", str(data), "--path", missing, "--node", "gpu1", code=3)
    (finding,) = [one for one in report["findings"] if one["about"] == "path"]
    assert (finding["grade"], finding["nodes"]) == ("error", ["gpu1"])
    assert finding["message"] == f"{missing} cannot be read: No such file or directory"


def test_a_hostfile_is_checked_and_run_with_the_settings_of_the_pool(hosts: Hosts) -> None:
    cli = hosts.cli
    (cli.folder / "hosts.txt").write_text("gpu3 slots=0\ngpu1 slots=0\n")
    report = hosts.check("--hostfile", "hosts.txt", code=0)
    assert [node["name"] for node in report["nodes"]] == ["gpu3", "gpu1"]
    workflow = cli.submit(cli.spec(TWO), "--hostfile", "hosts.txt")
    cli.await_status(workflow, "COMPLETED")
    assert {task["node_name"] for task in cli.tasks(workflow).values()} == {"gpu1", "gpu3"}
    (cli.folder / "hosts.txt").write_text("gpu1 slots=x\n")
    assert cli.run("workflow", "validate", "spec.yaml").code == 0
    for command in (
        ["workflow", "submit", "spec.yaml"],
        ["workflow", "validate", "spec.yaml"],
        ["pool", "check"],
        ["pool", "list"],
        ["node", "clean"],
    ):
        done = cli.run(*command, "--hostfile", "hosts.txt")
        assert done.code == 2, command
        assert "hosts.txt:1: error: `slots=x`" in done.err


def test_a_hostfile_defines_a_pool_without_other_configuration(hosts: Hosts) -> None:
    # Only the hostfile and ~/.ssh/config describe the hosts, as on a machine where distflow was never used.
    cli = hosts.cli
    (cli.folder / "distflow.yaml").write_text("pools: {local: {backend: local}}\n")
    python = cli.folder / "gpu2-environment" / "python3"
    python.parent.mkdir()
    python.symlink_to(BARE_PYTHON)
    (cli.folder / "hosts.txt").write_text(f"gpu1 slots=0\ngpu2 slots=0 python={python}\n")
    (cli.folder / ".ssh").mkdir(mode=0o700)
    shutil.copy(cli.folder / "ssh_config", cli.folder / ".ssh" / "config")
    cli.environment["DISTFLOW_HOSTFILE"] = "hosts.txt"
    report = hosts.check(code=0)
    assert (report["pool"], [node["name"] for node in report["nodes"]]) == ("hostfile", ["gpu1", "gpu2"])
    assert report["nodes"][1]["python"]["executable"] == str(python)
    workflow = cli.submit(cli.spec(TWO))
    assert cli.await_status(workflow, "COMPLETED")["pool"] == "hostfile"
    cleaned = cli.run("node", "clean", "--older-than", "0s", "-t", "json")
    assert [node["error"] for node in json.loads(cleaned.out)["nodes"]] == [None, None]


@pytest.mark.skipif(bool(missing_netns()), reason=missing_netns() or "-")
def test_nodes_that_cannot_reach_each_other_are_named(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> None:
    key = make_key(tmp_path_factory.mktemp("key") / "id")
    with Network() as network:
        machines = {
            name: network.host(tmp_path_factory.mktemp(name), alias=name, user_key=key) for name in ("gpu1", "gpu2", "gpu3")
        }
        hosts = Hosts(cli, {name: host.sshd for name, host in machines.items()})
        assert hosts.check(code=0)["verdict"].startswith("3 nodes can run a gang")
        # gpu1 no longer reaches gpu3, as behind a firewall; this machine still reaches both.
        command = ["ip", "-n", machines["gpu1"].namespace, "route", "add", "blackhole", f"{machines['gpu3'].address}/32"]
        subprocess.run(command, check=True)
        report = hosts.check(code=3)
        failed = {(pair["source"], pair["target"]) for pair in report["pairs"] if pair["kind"] != "ok"}
        assert failed == {("gpu1", "gpu3"), ("gpu3", "gpu1")}
        assert {error["about"] for error in errors(report)} == {"reach"}
        messages = {error["nodes"][0]: error["message"] for error in errors(report)}
        assert messages["gpu3"].startswith(f"gpu1 cannot reach it at {machines['gpu3'].address}: ")
        assert messages["gpu1"].startswith(f"gpu3 cannot reach it at {machines['gpu1'].address}: no answer within 5 s")
        assert "set the node's `address`" in errors(report)[1]["hint"]
        assert report["verdict"] == "a gang cannot run on all 3 nodes: gpu1, gpu3 do not all reach each other"


@pytest.fixture
def forking_python(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python for nodes. The check's programs are then forked from a process that has imported torch."""
    return str(write_program(tmp_path, tmp_path_factory.getbasetemp(), "torch"))


@pytest.mark.torch
def test_all_reduce_measures_the_bandwidth_between_nodes(hosts: Hosts, forking_python: str) -> None:
    hosts.configure(python=forking_python)
    report = hosts.check("--all-reduce", "--node", "gpu1", "--node", "gpu2", code=0)
    assert all(node["torch"]["version"] for node in report["nodes"])
    all_reduce = report["all_reduce"]
    assert (all_reduce["nodes"], all_reduce["skipped"], all_reduce["failed"]) == (["gpu1", "gpu2"], None, None)
    assert [one["bytes"] for one in all_reduce["sizes"]] == [1 << 10, 1 << 20, 1 << 24]
    assert all(one["bus_bandwidth"] == pytest.approx(one["bytes"] / one["seconds"]) for one in all_reduce["sizes"])
    hosts.configure()
    alone = hosts.check("--all-reduce", "--node", "gpu1", code=0)
    assert alone["all_reduce"]["skipped"] == "at least two nodes must answer"


@pytest.mark.torch
def test_a_failed_all_reduce_names_the_node_that_failed_first(hosts: Hosts, forking_python: str) -> None:
    hosts.configure("gpu1", "gpu2", python=forking_python, gpu2=", environment: {GLOO_DEVICE_TRANSPORT: nonsense}")
    report = hosts.check("--all-reduce", code=3)
    assert report["all_reduce"]["failed"]["node"] == "gpu2"
    assert errors(report)[0]["about"] == "all-reduce"
    assert report["verdict"] == "a gang cannot run on both nodes: an all-reduce between them failed"
