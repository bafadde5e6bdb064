"""Gangs on a real Ray cluster, from one of its nodes and through a node over SSH. Faults are real."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from distflow.testing.waiting import wait_until
from scenarios.cluster import SPIN, SPIN_ON_BOTH_NODES
from scenarios.conftest import Cli
from scenarios.raypool import RayPool

BOTH_NODES = SPIN_ON_BOTH_NODES.replace("cpu: 16", "cpu: 8")
"""A gang that needs both nodes of the cluster, so that another one has to wait."""
ALONE = """
workflow:
  name: alone
  groups:
  - name: train
    tasks: [{name: master, lead: true, ranks: {size: 1}, command: [sh, -c, 'sleep 600']}]
  resources: {default: {cpu: 1}}
"""
"""A gang with one task, because each actor takes a second of processor time to start."""
WHOLE_NODE = ALONE.replace("cpu: 1", "cpu: 8")
"""A gang that needs a whole node: ``BOTH_NODES`` waits for its end, and it waits if both nodes are in use."""
ENDED = ("FAILED_BACKEND_ERROR", "FAILED", "FAILED_SERVER_ERROR", "FAILED_CANCELED", "COMPLETED")
"""Statuses of an ended workflow. Tests wait for any of them, so that a wrong end fails at once."""


def waiting_spec(cli: Cli, spec: str = SPIN, file: str = "go") -> str:
    """Return a spec whose tasks wait for a file, and then print ``late``."""
    return spec.replace("sleep 600", f"while [ ! -e {cli.folder / file} ]; do sleep 0.2; done; echo late")


def test_a_gang_runs_with_its_gpus_on_nodes_that_it_does_not_exclude_and_gives_them_back(any_ray_pool: RayPool) -> None:
    cli = any_ray_pool.cli
    # The other tests fork the program on the cluster.
    any_ray_pool.configure(ray={"python": sys.executable})
    resources = "{first: {gpu: 2, cpu: 1, nodesExcluded: [n1]}, second: {gpu: 2, cpu: 1, nodesExcluded: [n2]}}"
    spec = SPIN.replace("{default: {gpu: 2, cpu: 1}}", resources).replace("lead: true", "lead: true, resource: first")
    workflow, group = any_ray_pool.start(spec.replace("{name: worker,", "{name: worker, resource: second,"))
    nodes = {name: task["node_name"] for name, task in cli.tasks(workflow).items()}
    assert nodes == {"master": f"n2@{group}", "worker": f"n1@{group}"}
    assert "0,1 on " in cli.await_log(workflow, " on ")
    variables = cli.run("workflow", "exec", workflow, "worker", "--entry", "env").out.splitlines()
    assert "DISTFLOW_TASK=worker" in variables
    assert not [line for line in variables if line.startswith(("RAY_JOB_ID", "RAY_RAYLET_PID", "PYTHONBREAKPOINT"))]
    assert cli.run("workflow", "cancel", workflow, "--wait", "60").code == 0
    any_ray_pool.cluster.await_empty()


def test_tasks_of_a_packed_gang_share_a_node(ray_pool: RayPool) -> None:
    ray_pool.configure(ray={"strategy": "STRICT_PACK"})
    workflow, group = ray_pool.start(SPIN.replace("gpu: 2", "gpu: 1"))
    names = sorted(task["node_name"] for task in ray_pool.cli.tasks(workflow).values())
    host = names[0].partition("+")[0].partition("@")[0]
    assert names == sorted([f"{host}@{group}", f"{host}+2@{group}"])
    gpu = ray_pool.cli.await_log(workflow, " on ").partition(" on ")[0].split()[-1]
    other = ray_pool.cli.run("workflow", "exec", workflow, "worker", "--entry", "printenv CUDA_VISIBLE_DEVICES").out.strip()
    assert {gpu, other} == {"0", "1"}
    ray_pool.cli.run("workflow", "cancel", workflow, "--wait", "60")


def test_waiting_gangs_show_rays_resources_and_placement_groups_of_ended_ones_are_removed(ray_pool: RayPool) -> None:
    cli, cluster = ray_pool.cli, ray_pool.cluster
    first, _ = ray_pool.start(WHOLE_NODE)
    second = cli.submit(cli.spec(BOTH_NODES, "second.yaml"))
    cli.await_group_message(second, "NO_RESOURCES")
    assert "2 × 8 CPU; free: n" in cli.query(second)["groups"][0]["message"]
    assert len(cluster.allocations()) == 2
    assert cli.run("workflow", "cancel", second, "--wait", "60").code == 0
    assert cli.query(second)["status"] == "FAILED_CANCELED"
    wait_until(lambda: len(cluster.allocations()) == 1, 30, "the waiting placement group is gone")

    spec = SPIN.replace("  name: spin\n", "  name: spin\n  timeout: {queue_timeout: 20s}\n", 1)
    infeasible = cli.submit(cli.spec(spec.replace("gpu: 2, cpu: 1", "gpu: 64"), "infeasible.yaml"))
    cli.run("workflow", "cancel", first, "--wait", "60")
    answer = cli.await_status(infeasible, "FAILED_QUEUE_TIMEOUT")
    message = answer["groups"][0]["message"]
    for part in ("queue_timeout", "INFEASIBLE", "2 × 1 CPU, 64 GPU", "2 of 2 GPU"):
        assert part in message
    cluster.await_empty()

    def create_placement_group(marker: str) -> str:
        code = f"print(ray.util.placement_group([{{'CPU': 1}}], name={marker!r}, lifetime='detached').id.hex()[:12])"
        return cluster.run(code).strip()

    ours = create_placement_group(f"distflow:{answer['uuid']}/train/0")
    foreign = create_placement_group(f"distflow:{'a' * 32}/train/0")
    assert "would stop" in cli.run("node", "reap", "--dry-run").out
    shown = cli.run("node", "reap").out
    assert f"placement group {ours}" in shown
    assert f"placement group {foreign}" in shown
    wait_until(lambda: cluster.allocations() == [foreign], 30, "only the foreign placement group is left")
    cluster.ask("release", ids=[foreign])


@pytest.mark.timeout(300)
def test_killed_ranks_killed_actors_and_removed_placement_groups_end_their_gangs(ray_pool: RayPool) -> None:
    cli, cluster = ray_pool.cli, ray_pool.cluster
    spin = SPIN.replace("gpu: 2, cpu: 1", "cpu: 1")
    killed_rank, _ = ray_pool.start(spin.replace("sleep 600'", 'echo "pid $$"; exec sleep 600\'', 1))
    killed_process, first = ray_pool.start(spin)
    killed_actor, second = ray_pool.start(ALONE)
    removed, third = ray_pool.start(ALONE)

    os.kill(int(cli.await_log(killed_rank, "pid ").split("pid ")[1].split()[0]), signal.SIGKILL)
    code = "import ray._private.state as s\n"
    pid = cluster.run(code + f"print([a['Pid'] for a in s.actors().values() if a['Name'].endswith('1@{first}')][0])")
    os.kill(int(pid), signal.SIGKILL)
    find = f"next(a['name'] for a in ray.util.list_named_actors(all_namespaces=True) if a['name'].endswith('0@{second}'))"
    cluster.run(f"ray.kill(ray.get_actor({find}))")
    name = f"next(one['name'] for id, one in ray.util.placement_group_table().items() if id.startswith('{third}'))"
    cluster.run(f"ray.util.remove_placement_group(ray.util.get_placement_group({name}))")

    cause = cli.await_status(killed_rank, *ENDED)["groups"][0]["first_cause"]
    assert (cause["task"], cause["signal"]) == ("master", signal.SIGKILL), cause
    for workflow, status, text in (
        (killed_rank, "FAILED", "master"),
        (killed_process, "FAILED_BACKEND_ERROR", "task worker"),
        (killed_actor, "FAILED_CANCELED", "ray.kill"),
        (removed, "FAILED_CANCELED", f"placement group {third} was removed"),
    ):
        answer = cli.await_status(workflow, *ENDED, timeout=90)
        assert answer["status"] == status, answer
        assert text in json.dumps(answer["groups"][0])
    cluster.await_empty()


@pytest.mark.timeout(400)
def test_a_lost_node_is_named_and_a_restarted_head_ends_the_gang_and_runs_later_ones(ray_pool: RayPool) -> None:
    cli, cluster = ray_pool.cli, ray_pool.cluster
    on_lost_node, _ = ray_pool.start(SPIN)
    cluster.kill_raylet("n2")
    try:
        answer = cli.await_status(on_lost_node, *ENDED, timeout=90)
        assert answer["status"] == "FAILED_BACKEND_ERROR", answer
        assert answer["groups"][0]["first_cause"]["reason"] == "NODE_LOST"
        assert "on n2: its Ray node died" in json.dumps(answer)
        wait_until(lambda: not cluster.residents(), 60, "the programs on the lost node have ended")
        workflow, _ = ray_pool.start(ALONE)
    finally:
        cluster.restart_head()  # this also starts n2
    answer = cli.await_status(workflow, *ENDED, timeout=120)
    assert answer["status"] == "FAILED_BACKEND_ERROR", answer
    assert answer["groups"][0]["first_cause"]["reason"] == "NODE_LOST"
    later = cli.run("workflow", "submit", cli.spec(ALONE.replace("sleep 600", "true"), "later.yaml"), "--wait")
    assert later.code == 0, later.err + later.out


@pytest.mark.timeout(300)
def test_a_killed_supervisor_loses_nothing_and_without_a_supervisor_the_placement_group_is_removed(ray_pool: RayPool) -> None:
    cli, cluster = ray_pool.cli, ray_pool.cluster
    # Longer than a busy machine needs to start the tasks after the placement group was created.
    ray_pool.configure(ray={"idle_release": "20s"})
    workflow, group = ray_pool.start(waiting_spec(cli))
    second = cli.submit(cli.spec(waiting_spec(cli, BOTH_NODES, "go-second"), "second.yaml"))
    wait_until(lambda: len(cluster.allocations()) == 2, 30, "both have a placement group")
    cli.kill_supervisor()
    (cli.folder / "go").touch()
    assert cli.await_status(workflow, *ENDED)["status"] == "COMPLETED"
    assert ray_pool.group_of(workflow) == group
    assert cli.logs(workflow).count("late") == 2
    cli.await_running(second)
    assert len(cluster.allocations()) == 1, "no second placement group was made"

    cli.kill_supervisor()
    (cli.folder / "go-second").touch()
    cluster.await_empty(90)
    # The next command starts a supervisor, which finds the exit codes and the output on the login node.
    assert cli.await_status(second, *ENDED)["status"] == "COMPLETED"
    assert cli.logs(second).count("late") == 2


@pytest.mark.ssh
@pytest.mark.timeout(300)
def test_a_killed_program_on_the_cluster_and_a_restarted_login_node_lose_nothing(far_ray_pool: RayPool) -> None:
    cli, login = far_ray_pool.cli, far_ray_pool.login
    assert login is not None
    workflow, group = far_ray_pool.start(waiting_spec(cli))
    assert far_ray_pool.cluster.kill_programs() > 0
    second = cli.submit(cli.spec(WHOLE_NODE, "second.yaml"))
    cli.await_group_message(second, "NO_RESOURCES")  # the program answers again
    login.restart()
    cli.await_event(workflow, "reachable again")
    (cli.folder / "go").touch()
    assert cli.await_status(workflow, *ENDED)["status"] == "COMPLETED"
    assert (cli.logs(workflow).count("late"), far_ray_pool.group_of(workflow)) == (2, group)
    assert login.connections() <= 4
    cli.await_running(second)
    cli.run("workflow", "cancel", second, "--wait", "60")


def test_pool_check_reports_resources_and_wrong_settings(ray_pool: RayPool) -> None:
    done = ray_pool.cli.run("pool", "check")
    assert done.code == 0, done.out + done.err
    assert "2 nodes with 16 CPUs, 4 GPUs" in done.out
    ray_pool.configure(python="/no/python", platforms={"h100": {"resources": {"accelerator_type:H100": 0.001}}})
    done = ray_pool.cli.run("pool", "check")
    assert done.code != 0
    assert "n1, n2: `/no/python` does not run" in done.out
    assert "no node has `accelerator_type:H100`, which platform `h100` needs" in done.out
    ray_pool.configure(ray={"python": "/usr/bin/python3"})
    done = ray_pool.cli.run("pool", "check")
    assert "its Python has no Ray" in done.out
    ray_pool.configure(ray={"address": "127.0.0.1:1"})
    done = ray_pool.cli.run("pool", "check")
    assert "cannot connect to Ray at `127.0.0.1:1`" in done.out
