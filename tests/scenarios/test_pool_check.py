"""`pool check` and hostfiles on hosts behind real OpenSSH servers: what is well, and each thing that is not, in words."""

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
from scenarios.conftest import Cli

pytestmark = pytest.mark.ssh

BARE_PYTHON = str(getattr(sys, "_base_executable", sys.executable))
"""The Python without torch that this one's virtual environment is made from: a check imports torch, which takes seconds."""

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
        """Write the pool `lab`; `more`: what else is said of a node by its name."""
        lines = ["default_pool: lab", "pools:", "  lab:", "    backend: ssh", f"    ssh_config: {self.cli.folder}/ssh_config"]
        lines += [f"    python: {python}", "    connect_timeout: 5s", "    nodes:"]
        for name in nodes or tuple(self.servers):
            place = self.cli.folder / name
            lines.append(f"    - {{name: {name}, root: {place}, lease_dir: {place}-leases{more.get(name, '')}}}")
        (self.cli.folder / "distflow.yaml").write_text("\n".join(lines) + "\n")

    def check(self, *arguments: str, code: int) -> dict[str, Any]:
        """Check the pool and return the document; the text must agree with it."""
        done = self.cli.run("pool", "check", "-t", "json", *arguments)
        assert done.code == code, done.out + done.err
        assert done.err == ""
        answer: dict[str, Any] = json.loads(done.out)
        assert answer["can_run"] is (code == 0)
        return answer


def hosts_of(cli: Cli, stack: ExitStack, folders: pytest.TempPathFactory) -> dict[str, Sshd]:
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
        yield Hosts(cli, hosts_of(cli, stack, tmp_path_factory))
        wait_until(lambda: not cli.processes(), 30)


def errors(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in answer["findings"] if finding["grade"] == "error"]


def states(answer: dict[str, Any]) -> dict[str, str]:
    return {node["name"]: node["state"] for node in answer["nodes"]}


@pytest.mark.parametrize("has_runtime", [False])
def test_three_good_nodes_can_run_a_gang(hosts: Hosts) -> None:
    answer = hosts.check(code=0)
    assert answer["verdict"].startswith("3 nodes can run a gang")
    assert (answer["pool"], answer["backend"]) == ("lab", "ssh")
    assert not errors(answer)
    assert [(node["name"], node["address"], node["interface"]) for node in answer["nodes"]] == [
        ("gpu1", "127.0.1.1", "lo"),
        ("gpu2", "127.0.1.2", "lo"),
        ("gpu3", "127.0.1.3", "lo"),
    ]
    for node in answer["nodes"]:
        assert node["error"] is None
        assert abs(node["clock_offset_s"]) < 1, "one machine has one clock"
        assert node["root"]["error"] is None
        assert node["lease_dir"]["error"] is None
        assert node["python"]["version"] == ".".join(str(part) for part in sys.version_info[:3])
    assert len(answer["pairs"]) == 6
    assert {(pair["source"], pair["target"]) for pair in answer["pairs"]} == {
        (a, b) for a in hosts.servers for b in hosts.servers if a != b
    }
    assert {pair["kind"] for pair in answer["pairs"]} == {"ok"}


def test_the_text_is_a_table_findings_and_a_sentence(hosts: Hosts) -> None:
    hosts.servers["gpu2"].stop()
    done = hosts.cli.run("pool", "check")
    assert done.code == 3
    assert done.err == "", "progress is for terminals"
    lines = done.out.splitlines()
    assert lines[0].split() == ["Node", "State", "Address", "Python", "Torch", "Free", "Clock", "GPUs"]
    assert [line.split()[:2] for line in lines[2:5]] == [["gpu1", "ok"], ["gpu2", "error"], ["gpu3", "ok"]]
    assert "error: gpu2: " in done.out
    assert lines[-1] == "a gang cannot run on all 3 nodes: gpu2 cannot take part"


def test_a_stopped_server_is_one_error_with_its_remedy(hosts: Hosts) -> None:
    hosts.servers["gpu2"].stop()
    answer = hosts.check(code=3)
    (error,) = errors(answer)
    assert (error["about"], error["nodes"]) == ("ssh", ["gpu2"])
    assert "connection refused" in error["message"]
    assert "check that sshd is running there" in error["hint"]
    assert states(answer)["gpu2"] == "error"
    # The others are measured all the same.
    assert [pair["kind"] for pair in answer["pairs"]] == ["ok", "ok"]


def test_a_changed_host_key_is_refused_with_the_command_to_type(hosts: Hosts, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other").with_name("other.pub").read_text().split()
    server = hosts.servers["gpu3"]
    server.known_hosts.write_text(f"{server.known_name} {other[0]} {other[1]}\n")
    (error,) = errors(hosts.check(code=3))
    assert (error["about"], error["nodes"]) == ("ssh", ["gpu3"])
    assert "ssh-keygen -R" in error["message"] + error["hint"]


def test_a_python_that_is_not_there_is_named_with_the_one_that_is(hosts: Hosts) -> None:
    hosts.configure(gpu1=", python: /opt/none/bin/python")
    (error,) = errors(hosts.check(code=3))
    assert (error["about"], error["nodes"]) == ("python", ["gpu1"])
    assert error["message"] == "its python /opt/none/bin/python does not exist"
    assert error["hint"].startswith("set `python` of the node; /")
    assert error["hint"].endswith("python3 exists")


def test_a_python_that_is_too_old_says_so(hosts: Hosts) -> None:
    old = hosts.cli.folder / "python-3.6"
    # As 3.6 itself would answer: the stub is real, only its version is not.
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
    assert error["hint"].endswith("python3 exists")


@pytest.mark.parametrize("has_runtime", [False])
def test_a_root_that_cannot_be_made_is_an_error(hosts: Hosts) -> None:
    (hosts.cli.folder / "gpu2").write_text("a file in its place")
    (error,) = errors(hosts.check(code=3))
    assert (error["about"], error["nodes"]) == ("root", ["gpu2"])
    assert "is not a directory" in error["message"]
    assert "`root:` of the node" in error["hint"]


def test_a_training_address_of_no_machine_is_an_unreachable_node(hosts: Hosts) -> None:
    hosts.configure(gpu1=", address: 198.51.100.1")
    answer = hosts.check(code=3)
    assert {(pair["source"], pair["target"]) for pair in answer["pairs"] if pair["kind"] != "ok"} == {
        ("gpu2", "gpu1"), ("gpu3", "gpu1"),
    }  # fmt: skip
    assert {error["about"] for error in errors(answer)} == {"reach"}
    assert all(error["nodes"] == ["gpu1"] and "198.51.100.1" in error["message"] for error in errors(answer))
    (warning,) = [finding for finding in answer["findings"] if finding["about"] == "address"]
    assert "198.51.100.1 is not on any of its interfaces" in warning["message"]


def test_a_preflight_starts_nothing_on_a_node_that_cannot_run_it(hosts: Hosts) -> None:
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


def test_settings_that_tasks_would_see_are_used_and_checked(hosts: Hosts) -> None:
    folder = hosts.cli.folder
    (folder / "lib").mkdir()
    (folder / "lib" / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')\n")
    hosts.configure(gpu1=f", environment: {{PYTHONPATH: {folder}/lib}}", gpu2=", setup: exit 7", python=sys.executable)
    answer = hosts.check(code=0)
    said = {finding["nodes"][0]: finding for finding in answer["findings"] if finding["grade"] == "warning"}
    assert "torch cannot be imported: OSError('libcudart.so.12" in said["gpu1"]["message"]
    assert "does not answer in the environment of tasks: exit code 7" in said["gpu2"]["message"]


def test_cleaning_says_in_one_document_which_node_could_not_be_reached(hosts: Hosts) -> None:
    hosts.servers["gpu2"].stop()
    done = hosts.cli.run("node", "clean", "-t", "json")
    assert done.code == 3
    nodes = {node["node"]: node["error"] for node in json.loads(done.out)["nodes"]}
    assert (nodes["gpu1"], nodes["gpu3"]) == (None, None)
    assert "connection refused" in str(nodes["gpu2"])


def test_only_the_named_nodes_are_asked(hosts: Hosts) -> None:
    hosts.servers["gpu2"].stop()
    answer = hosts.check("--node", "gpu1", "--node", "gpu3", code=0)
    assert [node["name"] for node in answer["nodes"]] == ["gpu1", "gpu3"]
    done = hosts.cli.run("pool", "check", "--node", "gpu4")
    assert done.code == 2
    assert "pool `lab` has no node `gpu4`" in done.err


def test_a_path_that_is_not_on_a_node_keeps_a_gang_from_running(hosts: Hosts) -> None:
    there = hosts.cli.folder / "data"
    there.mkdir()
    (there / "one").write_text("1234")
    answer = hosts.check("--path", str(there), "--node", "gpu1", "--node", "gpu2", code=0)
    assert [node["paths"][str(there)]["bytes"] for node in answer["nodes"]] == [4, 4]
    missing = f"{there}/two"
    answer = hosts.check("--path", str(there), "--path", missing, "--node", "gpu1", code=3)
    (found,) = [one for one in answer["findings"] if one["about"] == "path"]
    assert (found["grade"], found["nodes"]) == ("error", ["gpu1"])
    assert found["message"] == f"{missing} cannot be read: No such file or directory"


def test_a_hostfile_is_checked_and_run_with_the_settings_of_the_pool(hosts: Hosts) -> None:
    cli = hosts.cli
    (cli.folder / "hosts.txt").write_text("gpu3 slots=0\ngpu1 slots=0\n")
    answer = hosts.check("--hostfile", "hosts.txt", code=0)
    assert [node["name"] for node in answer["nodes"]] == ["gpu3", "gpu1"]
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


def test_a_bare_hostfile_is_a_pool_of_its_own(hosts: Hosts) -> None:
    # Nothing but the hostfile and ~/.ssh/config, as on a machine that never saw distflow.
    cli = hosts.cli
    (cli.folder / "distflow.yaml").write_text("pools: {local: {backend: local}}\n")
    python = cli.folder / "gpu2-environment" / "python3"
    python.parent.mkdir()
    python.symlink_to(BARE_PYTHON)
    (cli.folder / "hosts.txt").write_text(f"gpu1 slots=0\ngpu2 slots=0 python={python}\n")
    (cli.folder / ".ssh").mkdir(mode=0o700)
    shutil.copy(cli.folder / "ssh_config", cli.folder / ".ssh" / "config")
    cli.environment["DISTFLOW_HOSTFILE"] = "hosts.txt"
    answer = hosts.check(code=0)
    assert (answer["pool"], [node["name"] for node in answer["nodes"]]) == ("hostfile", ["gpu1", "gpu2"])
    assert answer["nodes"][1]["python"]["executable"] == str(python)
    workflow = cli.submit(cli.spec(TWO))
    assert cli.await_status(workflow, "COMPLETED")["pool"] == "hostfile"
    cleaned = cli.run("node", "clean", "--older-than", "0s", "-t", "json")
    assert [node["error"] for node in json.loads(cleaned.out)["nodes"]] == [None, None]


@pytest.mark.skipif(bool(missing_netns()), reason=missing_netns() or "-")
def test_nodes_that_do_not_reach_each_other_are_named(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> None:
    key = make_key(tmp_path_factory.mktemp("key") / "id")
    with Network() as network:
        made = {
            name: network.host(tmp_path_factory.mktemp(name), alias=name, user_key=key) for name in ("gpu1", "gpu2", "gpu3")
        }
        hosts = Hosts(cli, {name: host.sshd for name, host in made.items()})
        assert hosts.check(code=0)["verdict"].startswith("3 nodes can run a gang")
        # gpu1 no longer reaches gpu3, as behind a firewall; this machine still reaches both.
        command = ["ip", "-n", made["gpu1"].namespace, "route", "add", "blackhole", f"{made['gpu3'].address}/32"]
        subprocess.run(command, check=True)
        answer = hosts.check(code=3)
        failed = {(pair["source"], pair["target"]) for pair in answer["pairs"] if pair["kind"] != "ok"}
        assert failed == {("gpu1", "gpu3"), ("gpu3", "gpu1")}
        assert {error["about"] for error in errors(answer)} == {"reach"}
        words = {error["nodes"][0]: error["message"] for error in errors(answer)}
        assert words["gpu3"].startswith(f"gpu1 cannot reach it at {made['gpu3'].address}: ")
        assert words["gpu1"].startswith(f"gpu3 cannot reach it at {made['gpu1'].address}: no answer within 5 s")
        assert "set the node's `address`" in errors(answer)[1]["hint"]
        assert answer["verdict"] == "a gang cannot run on all 3 nodes: gpu1, gpu3 do not all reach each other"


def test_torch_sums_over_the_nodes_and_says_how_fast(hosts: Hosts) -> None:
    hosts.configure(python=sys.executable)
    answer = hosts.check("--all-reduce", "--node", "gpu1", "--node", "gpu2", code=0)
    assert all(node["torch"]["version"] for node in answer["nodes"])
    found = answer["all_reduce"]
    assert (found["nodes"], found["skipped"], found["failed"]) == (["gpu1", "gpu2"], None, None)
    assert [one["bytes"] for one in found["sizes"]] == [1 << 10, 1 << 20, 1 << 24]
    assert all(one["bus_bandwidth"] == pytest.approx(one["bytes"] / one["seconds"]) for one in found["sizes"])
    hosts.configure()
    alone = hosts.check("--all-reduce", "--node", "gpu1", code=0)
    assert alone["all_reduce"]["skipped"] == "at least two nodes must answer"


def test_a_sum_that_fails_names_the_node_that_failed_first(hosts: Hosts) -> None:
    hosts.configure("gpu1", "gpu2", python=sys.executable, gpu2=", environment: {GLOO_DEVICE_TRANSPORT: nonsense}")
    answer = hosts.check("--all-reduce", code=3)
    assert answer["all_reduce"]["failed"]["node"] == "gpu2"
    assert errors(answer)[0]["about"] == "all-reduce"
    assert answer["verdict"] == "a gang cannot run on both nodes: an all-reduce between them failed"
