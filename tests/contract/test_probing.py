"""The operations of agents that `pool check` uses (`probe`, `run`, `listen`, `reach`), over every transport."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from contract.conftest import EVERY_TRANSPORT, LOCAL_TRANSPORT, processes_with
from distflow.errors import AgentError
from distflow.protocol.names import Operation
from distflow.testing.daemons import free_port
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from contract.conftest import NodeUnderTest
    from distflow.backends.machines.connection.link import AgentLink

pytestmark = LOCAL_TRANSPORT


def reached(link: AgentLink, *targets: tuple[str, int, str], limit_s: float = 5.0) -> list[dict[str, Any]]:
    named = [{"address": address, "port": port, "word": word} for address, port, word in targets]
    results = link.request("reach", targets=named, limit_s=limit_s)["results"]
    assert isinstance(results, list)
    return results


def kinds(link: AgentLink, *targets: tuple[str, int, str], limit_s: float = 5.0) -> list[str]:
    return [result["kind"] for result in reached(link, *targets, limit_s=limit_s)]


@EVERY_TRANSPORT
def test_a_node_reports_its_hardware(node: NodeUnderTest) -> None:
    answer = node.connect().request("probe", lease_dir=str(node.lease_dir))
    assert answer["root"]["path"] == str(node.root)
    assert answer["root"]["error"] is None
    assert answer["root"]["file_system"]
    assert answer["root"]["is_noexec"] is False
    assert 0 < answer["root"]["free_bytes"] < answer["root"]["total_bytes"]
    assert answer["leases"]["path"] == str(node.lease_dir)
    assert answer["leases"]["error"] is None
    assert answer["names"]["hostname"] == socket.gethostname()
    assert set(answer["logind"]) == {"in_session", "properties"}
    # The measurements leave no files.
    assert sorted(path.name for path in node.root.iterdir()) == [".distflow", "runtime"]


def test_unusable_directories_are_reported(node: NodeUnderTest) -> None:
    link = node.connect()
    node.lease_dir.write_text("a file in its place")
    # Root may write everywhere except in /proc.
    answer = link.request("probe", lease_dir=str(node.lease_dir))
    assert "Not a directory" in answer["leases"]["error"]
    assert link.request("probe", lease_dir="/proc/none/leases")["leases"]["error"]
    if os.getuid() != 0:
        node.root.chmod(0o500)
        assert "ermission" in link.request("probe", lease_dir="/tmp")["root"]["error"]
        node.root.chmod(0o700)


def test_paths_are_distinguished_by_names_and_sizes(node: NodeUnderTest, tmp_path: Path) -> None:
    link = node.connect()
    for name, files in (
        ("a", {"x/1": b"one", "2": b"two!"}),
        ("b", {"x/1": b"eno", "2": b"two!"}),
        ("c", {"1": b"one", "2": b"two!"}),
    ):
        for place, data in files.items():
            (tmp_path / name / place).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / place).write_bytes(data)
    places = [str(tmp_path / name) for name in ("a", "b", "c", "none")] + [str(tmp_path / "a/2")]
    answer = link.request("probe", lease_dir=str(node.lease_dir), paths=places)["paths"]
    a, b, c, missing, file = (answer[place] for place in places)
    assert (a["files"], a["bytes"], a["is_complete"], a["error"]) == (2, 7, True, None)
    assert a["digest"] == b["digest"] != c["digest"]
    assert missing == {"error": "No such file or directory"}
    assert (file["files"], file["bytes"]) == (1, 4)


def test_the_output_of_nvidia_smi_is_reported_unchanged(node: NodeUnderTest, tmp_path: Path) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    apps = f"GPU-1, {os.getpid()}, python, 512"
    smi.write_text(
        f'#!/bin/sh\ncase "$1" in *apps*) echo "{apps}";; -L) echo "GPU 0: A";; *) echo "0, GPU-1, A, 1, 2, 3";; esac\n'
    )
    smi.chmod(0o755)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexport PATH={smi.parent}:$PATH\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    answer = node.connect(python=str(python)).request("probe", lease_dir=str(node.lease_dir))
    assert (answer["gpus"]["exit_code"], answer["gpus"]["stdout"]) == (0, "0, GPU-1, A, 1, 2, 3\n")
    assert answer["gpu_apps"]["stdout"] == apps + "\n"
    assert list(answer["gpu_owners"]) == [str(os.getpid())]
    assert answer["gpu_owners"][str(os.getpid())]["attempt"] is None


@EVERY_TRANSPORT
def test_a_command_runs_in_the_environment_of_tasks(node: NodeUnderTest, tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text('#!/bin/sh\necho "$A|$B|${DISTFLOW_ATTEMPT-none}|$(umask)|$1"\necho words >&2\nexit 3\n')
    tool.chmod(0o755)
    answer = node.connect().request(
        "run", argv=["tool", "it's; $x"], env={"A": "1"}, path_prepend=[str(tmp_path)], shell_prelude="export B='2 3'"
    )
    assert (answer["exit_code"], answer["stderr"]) == (3, "words\n")
    a, b, attempt, umask, argument = answer["stdout"].strip().split("|")
    assert (a, b, attempt, argument) == ("1", "2 3", "none", "it's; $x")
    assert umask != "0077", "it is not the umask of the node"


def test_a_missing_command_is_not_an_error_of_the_agent(node: NodeUnderTest) -> None:
    answer = node.connect().request("run", argv=["/no/such/python", "-c", "1"])
    assert (answer["exit_code"], answer["stderr"]) == (127, "/no/such/python: No such file or directory")


def test_a_command_that_takes_too_long_is_ended(node: NodeUnderTest, marker: str) -> None:
    link = node.connect()
    begin = time.monotonic()
    answer = link.request("run", argv=["sh", "-c", f"sh -c 'sleep 60; true {marker}'; true"], limit_s=0.5)
    assert answer["exit_code"] is None
    assert time.monotonic() - begin < 50
    wait_until(lambda: not processes_with(marker), 20)
    assert link.request("ping")["now"] > 0


@EVERY_TRANSPORT
def test_a_command_ends_with_its_agent(node: NodeUnderTest, marker: str) -> None:
    link = node.connect()
    link.send("run", lambda _: None, argv=[sys.executable, "-c", f"import time; time.sleep(60) # {marker}"], limit_s=60)
    wait_until(lambda: processes_with(marker), 20)
    link.close()
    wait_until(lambda: not processes_with(marker), 20)


def test_a_listener_is_reached_and_identified_by_its_word(node: NodeUnderTest) -> None:
    link = node.connect()
    answer = link.request("listen", address="127.0.0.1", word="here-1")
    assert answer["is_own"] is True
    good = ("127.0.0.1", answer["port"], "here-1")
    assert kinds(link, good, good, ("127.0.0.1", answer["port"], "another")) == ["ok", "ok", "stranger"]
    assert reached(link, good)[0]["ms"] < 5000


def test_each_kind_of_failed_connection_is_distinguished(node: NodeUnderTest) -> None:
    link = node.connect()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        # The kernel accepts the connection, and no data follows: as with a firewall that drops the data.
        targets = [("127.0.0.1", free_port(), "w"), ("127.0.0.1", port, "w"), ("no-such-name.invalid", 1, "w")]
        assert kinds(link, *targets, limit_s=0.5) == ["refused", "timeout", "no_name"]
    assert kinds(link) == []


def test_an_address_of_another_machine_is_reported_and_all_addresses_are_listened_on(node: NodeUnderTest) -> None:
    link = node.connect()
    answer = link.request("listen", address="192.0.2.1", word="w")
    assert answer["is_own"] is False
    assert link.request("listen", address="a-name.invalid", word="w")["is_own"] is None
    assert kinds(link, ("127.0.0.1", answer["port"], "w")) == ["ok"]


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_ipv6_is_reached(node: NodeUnderTest) -> None:
    link = node.connect()
    if "::1" not in Path("/proc/net/if_inet6").read_text() and not any(
        line.split()[0].endswith("1") for line in Path("/proc/net/if_inet6").read_text().splitlines()
    ):
        pytest.skip("no IPv6 loopback here")
    answer = link.request("listen", address="::1", word="w")
    assert kinds(link, ("::1", answer["port"], "w")) == ["ok"]


def test_listening_ends_by_itself_and_with_the_agent(node: NodeUnderTest) -> None:
    first, second = node.connect(), node.connect()
    short = first.request("listen", address="127.0.0.1", word="w", limit_s=0.2)["port"]
    long = first.request("listen", address="127.0.0.1", word="w")["port"]
    wait_until(lambda: kinds(second, ("127.0.0.1", short, "w")) == ["refused"], 20)
    assert kinds(second, ("127.0.0.1", long, "w")) == ["ok"]
    first.close()
    wait_until(lambda: kinds(second, ("127.0.0.1", long, "w")) == ["refused"], 20)


def test_a_request_without_its_fields_is_refused(node: NodeUnderTest) -> None:
    link = node.connect()
    requests: list[tuple[Operation, dict[str, Any]]] = [
        ("probe", {}),
        ("run", {}),
        ("listen", {"word": "w"}),
        ("reach", {"targets": [{"address": "127.0.0.1"}]}),
        ("reach", {"targets": [{"address": "127.0.0.1", "port": "x", "word": "w"}]}),
    ]
    for op, fields in requests:
        with pytest.raises(AgentError) as caught:
            link.request(op, **fields)
        assert caught.value.kind == "bad_request", (op, fields)
