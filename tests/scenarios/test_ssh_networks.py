"""SSH hosts in network namespaces: names that mean 127.0.1.1, bastions, and links that are cut and healed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distflow.lifecycle.states import State
from distflow.state.record import WorkflowRecord
from distflow.testing.kernel import NetnsHost, Network
from distflow.testing.sshd import make_key
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli
from scenarios.lab import Lab, copy_specs, largest_file_size, train

pytestmark = pytest.mark.ssh

CUT_S = 60.0
"""Seconds for which the link is cut while four tasks run."""
PAUSE_S = 0.25
"""Seconds between two lines of these tasks. With more lines, the test would need more processor time."""

TWO = """
workflow:
  name: two
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 1}
      command: [sh, -c, 'hostname; getent hosts "$(hostname)"; echo "$MASTER_ADDR $GLOO_SOCKET_IFNAME"; cat FIFO']
    - name: worker
      ranks: {size: 1}
      command: [sh, -c, 'hostname; getent hosts "$(hostname)"; echo "$MASTER_ADDR $GLOO_SOCKET_IFNAME"; cat FIFO']
"""


_RESOURCES = "  resources: {first: {platform: first}, second: {platform: second}}\n"
PLATFORMS = (
    TWO.replace("  groups:\n", f"{_RESOURCES}  groups:\n")
    .replace("lead: true", "lead: true\n      resource: first")
    .replace("- name: worker", "- name: worker\n      resource: second")
)
"""``TWO`` with the master on the node of platform ``first``."""


def _start_two(lab: Lab, spec: str = TWO) -> tuple[str, Callable[[], None]]:
    """Submit two tasks on two hosts. Return the workflow and a function that lets the tasks end."""
    fifo = lab.cli.folder / "fifo"
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    # While this descriptor is open, `cat` waits for more input.
    held = os.open(fifo, os.O_RDWR)
    workflow = lab.cli.submit(lab.cli.spec(spec.replace("FIFO", str(fifo))))

    def end_tasks() -> None:
        # A task that opens the path only now finds an empty file; in a FIFO, it would wait for a writer.
        empty = fifo.with_name("empty")
        empty.touch()
        empty.replace(fifo)
        os.close(held)

    return workflow, end_tasks


@pytest.mark.torch
def test_gloo_trains_on_hosts_whose_own_names_mean_127_0_1_1(
    far_lab: Lab, hosts: dict[str, NetnsHost], repository: Path, forking_site: str
) -> None:
    far_lab.configure(environment={"PYTHONPATH": forking_site})
    workflow, end_tasks = _start_two(far_lab)
    far_lab.cli.await_running(workflow)
    end_tasks()
    far_lab.cli.await_status(workflow, "COMPLETED")
    log = far_lab.cli.run("workflow", "logs", workflow).out
    master = hosts[far_lab.cli.tasks(workflow)["master"]["node_name"]]
    for line in (f"[master] {master.hostname}", f"[master] 127.0.1.1       {master.hostname}", "[worker] 127.0.1.1"):
        assert line in log
    assert log.count(f"] {master.address} eth0\n") == 2
    tasks, finished = train(far_lab.cli, copy_specs(far_lab.cli, repository) / "pytorch_dist.yaml", epochs=2)
    assert {task["node_name"] for task in tasks.values()} == {"gpu1", "gpu2"}
    assert finished["world_size"] == 2


def test_a_gang_behind_a_bastion_uses_addresses_that_only_the_bastion_reaches(
    cli: Cli, network: Network, tmp_path_factory: pytest.TempPathFactory
) -> None:
    key = make_key(tmp_path_factory.mktemp("key") / "id")
    folder = tmp_path_factory.mktemp("bastion")
    bastion = network.host(folder, hostname="bastion", alias="bastion", user_key=key)
    inner = {
        name: network.host(tmp_path_factory.mktemp(name), hostname=name, alias=name, user_key=key, behind=bastion)
        for name in ("gpu1", "gpu2")
    }
    lab = Lab(cli, {name: host.sshd for name, host in inner.items()})
    # The configuration has the address of gpu1, and for gpu2 a name that only the bastion can resolve.
    gpu1, gpu2 = inner["gpu1"], inner["gpu2"]
    with (folder / "hosts").open("a") as file:
        file.write(f"{gpu2.address} gpu2.inner\n")
    # gpu2 has two addresses. Only its sshd knows to which one the bastion connected.
    gpu2.add_interface("docker0", "172.17.0.1")
    named = gpu2.sshd.client_stanza(ProxyJump="bastion", HostName="gpu2.inner", HostKeyAlias=gpu2.address)
    lab.ssh_config.write_text(bastion.sshd.client_stanza() + gpu1.sshd.client_stanza(ProxyJump="bastion") + named)
    for first in ("gpu1", "gpu2"):
        lab.configure(nodes={name: {"platform": "first" if name == first else "second"} for name in inner})
        workflow, end_tasks = _start_two(lab, PLATFORMS)
        cli.await_running(workflow)
        for task in ("master", "worker"):
            log = cli.await_log(workflow, f"[{task}] {inner[first].address} eth0\n")
        end_tasks()
        cli.await_status(workflow, "COMPLETED")
        assert cli.tasks(workflow)["master"]["node_name"] == first
        assert log.count(f"] {inner[first].address} eth0\n") == 2
    assert "Accepted publickey" in bastion.sshd.log.read_text()
    lab.await_no_processes()


COUNTING = """
workflow:
  name: counting
  groups:
  - name: train
    tasks:
TASKS
"""
COUNTER = """
    - name: NAME
      ranks: {size: 1}LEAD
      command:
      - python3
      - -c
      - |
        import itertools, os, sys, time
        for number in itertools.count():
            print("NAME", number, flush=True)
            if os.path.exists(sys.argv[1]):
                break
            time.sleep(PAUSE)
        print("NAME ends after", number, flush=True)
      - GO
"""


def _numbers(log: str, task: str) -> list[int]:
    prefix = f"[{task}] {task} "
    numbers = (line.removeprefix(prefix) for line in log.splitlines() if line.startswith(prefix))
    return [int(number) for number in numbers if number.isdigit()]  # the last line may not be complete yet


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_four_tasks_lose_nothing_when_the_supervisor_is_killed_and_a_link_is_cut(
    far_lab: Lab, hosts: dict[str, NetnsHost]
) -> None:
    # Two gangs of two tasks: four tasks on two hosts.
    cli, go = far_lab.cli, far_lab.cli.folder / "go"
    far_lab.configure(connect_timeout="2s", node_lost_after="5m")
    spec = COUNTING.replace("TASKS", "".join(
        COUNTER.replace("NAME", name).replace("LEAD", "\n      lead: true" if name == "master" else "").strip("\n") + "\n"
        for name in ("master", "worker")
    )).replace("PAUSE", str(PAUSE_S))  # fmt: skip
    workflows = [far_lab.submit(go, spec) for _ in range(2)]
    for workflow in workflows:
        cli.await_running(workflow)
    cli.kill_supervisor()
    hosts["gpu2"].cut()
    # The next command starts another supervisor, which can connect to only one of the hosts.
    for workflow in workflows:
        far_lab.await_message(workflow, "gpu2 has been unreachable since", "RUNNING")
    received = [len(_numbers(cli.logs(workflow), "worker")) for workflow in workflows]
    _pause(CUT_S)
    assert all(cli.query(workflow)["status"] == "RUNNING" for workflow in workflows)
    assert [len(_numbers(cli.logs(workflow), "worker")) for workflow in workflows] == received
    hosts["gpu2"].heal()
    for workflow in workflows:
        cli.await_output(lambda shown: "unreachable" not in shown, "workflow", "query", workflow, timeout=90)
    go.touch()
    for workflow in workflows:
        cli.await_status(workflow, "COMPLETED")
        log, tasks = cli.logs(workflow), cli.tasks(workflow)
        assert {task["node_name"] for task in tasks.values()} == {"gpu1", "gpu2"}
        for name, task in tasks.items():
            assert (task["status"], task["exit_code"]) == ("COMPLETED", 0)
            numbers = _numbers(log, name)
            assert numbers == list(range(len(numbers))), name
            assert len(numbers) > CUT_S / PAUSE_S / 2
            assert f"[{name}] {name} ends after {numbers[-1]}" in log
        events = cli.run("workflow", "events", workflow).out
        assert events.count("gpu2: reachable again") == 1
        assert sum("started on" in line for line in events.splitlines()) == 2


def _pause(seconds: float) -> None:
    """Wait, because the duration of the cut is part of the test."""
    import threading

    threading.Event().wait(seconds)


def test_a_link_that_loses_every_tenth_packet_ends_nothing_and_loses_no_line(far_lab: Lab, hosts: dict[str, NetnsHost]) -> None:
    cli, go = far_lab.cli, far_lab.cli.folder / "go"
    far_lab.configure(connect_timeout="10s", node_lost_after="5m")
    counter = COUNTER.replace("NAME", "master").replace("LEAD", "\n      lead: true").replace("PAUSE", "0.1")
    workflow = far_lab.submit(go, COUNTING.replace("TASKS", counter))
    name = cli.await_running(workflow)["master"]["node_name"]
    try:
        hosts[name].lose(10)
    except OSError as error:
        go.touch()
        cli.await_status(workflow, "COMPLETED")
        pytest.skip(f"packets cannot be lost here: {error}")
    received = len(_numbers(cli.logs(workflow), "master"))
    wait_until(lambda: len(_numbers(cli.logs(workflow), "master")) > received + 100, 120, "lines still arrive")
    go.touch()
    cli.await_status(workflow, "COMPLETED", timeout=120)
    log = cli.logs(workflow)
    numbers = _numbers(log, "master")
    assert numbers == list(range(len(numbers)))
    assert f"[master] master ends after {numbers[-1]}" in log
    assert sum("started on" in line for line in cli.run("workflow", "events", workflow).out.splitlines()) == 1


def test_a_gang_waits_for_an_unreachable_host_and_a_cancel_stops_its_task_when_the_host_answers(
    far_lab: Lab, hosts: dict[str, NetnsHost]
) -> None:
    cli = far_lab.cli
    far_lab.configure(connect_timeout="2s", node_lost_after="5m")
    # The start waits for a host whose packets are lost.
    hosts["gpu2"].cut()
    workflow, end_tasks = _start_two(far_lab)
    unreachable = f"gpu2: {hosts['gpu2'].sshd.user}@{hosts['gpu2'].address}:22 did not answer within 2 s"
    far_lab.await_message(workflow, "Waiting for nodes:", unreachable)
    hosts["gpu2"].heal()
    away = cli.await_running(workflow)["worker"]["node_name"]
    # The task of a host that is cut off while it runs is stopped later.
    hosts[away].cut()
    far_lab.await_message(workflow, f"{away} has been unreachable since")
    canceled = cli.run("workflow", "cancel", workflow)
    assert canceled.code == 0
    assert f"{workflow}: canceling\n{workflow}: {away} has been unreachable since" in canceled.out
    assert f"worker may still run on {away} and will be stopped as soon as it responds." in canceled.out
    assert "`node_lost_after` (300 s)" in canceled.out
    waited = cli.run("workflow", "cancel", workflow, "--wait", "2", "-t", "json")
    assert waited.code == 3
    assert f"{away} has been unreachable since" in waited.err
    shown = far_lab.await_message(workflow, "STOPPING", f"{away} has been unreachable")
    assert "FAILED_CANCELED" in shown
    hosts[away].heal()
    answer = cli.await_status(workflow, "FAILED_CANCELED", timeout=90)
    assert [task["status"] for task in answer["groups"][0]["tasks"]] == ["FAILED_CANCELED"] * 2
    assert "unreachable since" not in cli.run("workflow", "query", workflow).out
    end_tasks()


def test_a_canceled_task_on_an_unreachable_node_is_reported_at_the_end(far_lab: Lab, hosts: dict[str, NetnsHost]) -> None:
    cli = far_lab.cli
    far_lab.configure(connect_timeout="2s", node_lost_after="8s")
    workflow, _ = _start_two(far_lab)
    away = cli.await_running(workflow)["worker"]["node_name"]
    hosts[away].cut()
    far_lab.await_message(workflow, f"{away} has been unreachable since")
    canceled = cli.run("workflow", "cancel", workflow, "--wait", "60", "-t", "json")
    assert canceled.code == 0
    assert '"out_of_reach": [\n' in canceled.out
    assert f"warning: worker: {away} has been unreachable for" in canceled.err
    assert "it may still run there" in canceled.err
    assert cli.query(workflow)["status"] == "FAILED_CANCELED"
    hosts[away].heal()
    far_lab.await_abandoned_attempt_end(workflow, "worker")


def test_a_link_that_is_back_in_time_loses_no_node(far_lab: Lab, hosts: dict[str, NetnsHost]) -> None:
    cli = far_lab.cli
    # `node_lost_after` is longer than the detection of the silence, and shorter than one attempt to connect.
    far_lab.configure(connect_timeout="30s", node_lost_after="25s")
    workflow, end_tasks = _start_two(far_lab)
    away = cli.await_running(workflow)["worker"]["node_name"]
    hosts[away].cut()
    begun = time.monotonic()
    far_lab.await_message(workflow, f"{away} has been unreachable since")
    wait_until(lambda: time.monotonic() > begun + 12.0, 20)
    hosts[away].heal()
    end_tasks()
    cli.await_status(workflow, "COMPLETED", timeout=60)


OTHER = """
workflow:
  name: other
  tasks:
  - name: other
    command: ["true"]
"""


BLOB = """
workflow:
  name: heavy
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 1}
      command: [sh, -c, 'wc -c < /data.bin']
      files: &files [{path: /data.bin, localpath: data.bin}]
    - name: worker
      ranks: {size: 1}
      command: [sh, -c, 'wc -c < /data.bin']
      files: *files
"""
SIZE_MB = 48


def test_a_host_that_dies_while_files_are_sent_ends_the_start_and_is_named(far_lab: Lab, hosts: dict[str, NetnsHost]) -> None:
    cli = far_lab.cli
    far_lab.configure(connect_timeout="2s", start_barrier="25s", node_lost_after="5m")
    (cli.folder / "data.bin").write_bytes(os.urandom(1 << 20) * SIZE_MB)
    workflow = cli.submit(cli.spec(BLOB))
    wait_until(lambda: largest_file_size(cli.folder / "gpu2") > 1 << 20, 60, "the file is on its way")
    hosts["gpu2"].cut()
    assert largest_file_size(cli.folder / "gpu2") < SIZE_MB << 20
    far_lab.await_message(workflow, "gpu2 has been unreachable since", "INITIALIZING")
    cli.await_record(workflow, _is_named_when_stopping, 60)
    hosts["gpu2"].heal()
    ended = cli.await_status(workflow, "FAILED_START_TIMEOUT", timeout=90)
    assert "not ready within 25 s" in ended["groups"][0]["message"]


def _is_named_when_stopping(record: WorkflowRecord) -> bool:
    group = record.groups[0]
    return group.state in (State.STOPPING, State.FAILED) and "gpu2" in group.message


def test_files_that_were_cut_off_are_sent_again_when_the_host_comes_back(far_lab: Lab, hosts: dict[str, NetnsHost]) -> None:
    cli = far_lab.cli
    far_lab.configure(connect_timeout="2s")
    (cli.folder / "data.bin").write_bytes(os.urandom(1 << 20) * SIZE_MB)
    workflow = cli.submit(cli.spec(BLOB))
    wait_until(lambda: largest_file_size(cli.folder / "gpu2") > 1 << 20, 60, "the file is on its way")
    hosts["gpu2"].cut()
    assert largest_file_size(cli.folder / "gpu2") < SIZE_MB << 20
    far_lab.await_message(workflow, "gpu2 has been unreachable since")
    hosts["gpu2"].heal()
    cli.await_status(workflow, "COMPLETED", timeout=90)
    assert cli.logs(workflow).count(str(SIZE_MB << 20)) == 2


def test_a_host_that_dies_while_it_runs_fails_the_gang_after_node_lost_after(far_lab: Lab, hosts: dict[str, NetnsHost]) -> None:
    cli = far_lab.cli
    far_lab.configure(connect_timeout="2s", node_lost_after="8s")
    workflow, _ = _start_two(far_lab)
    away = cli.await_running(workflow)["worker"]["node_name"]
    hosts[away].cut()
    far_lab.await_message(workflow, f"{away} has been unreachable since", "RUNNING")
    answer = cli.await_status(workflow, "FAILED_BACKEND_ERROR")
    cause = answer["groups"][0]["first_cause"]
    assert (cause["task"], cause["node"], cause["reason"]) == ("worker", away, "NODE_LOST")
    assert f"{away} has been unreachable for" in cause["message"]
    assert cli.tasks(workflow)["master"]["status"] == "FAILED"
    assert cli.tasks(workflow)["master"]["reason"] == "PEER_FAILED"
    # The task on the unreachable host still runs. It is stopped when the host answers again.
    cli.kill_supervisor()
    hosts[away].heal()
    assert cli.submit(cli.spec(OTHER))
    far_lab.await_abandoned_attempt_end(workflow, "worker")
