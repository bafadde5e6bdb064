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
ENDED = ("FAILED_BACKEND_ERROR", "FAILED", "FAILED_SERVER_ERROR", "FAILED_CANCELED", "COMPLETED")
"""Statuses of an ended workflow. Tests wait for any of them, so that a wrong end fails at once."""


def waiting_spec(cli: Cli, text: str) -> str:
    """Return a spec whose tasks wait for the file ``go``, and then run a shell command."""
    return SPIN.replace("sleep 600", f"while [ ! -e {cli.folder / 'go'} ]; do sleep 0.2; done; {text}")


def test_a_gang_runs_on_two_nodes_with_its_gpus_and_gives_them_back(any_ray_pool: RayPool) -> None:
    cli = any_ray_pool.cli
    # The other tests fork the program on the cluster.
    any_ray_pool.configure(ray={"python": sys.executable})
    workflow, group = any_ray_pool.start(SPIN)
    nodes = {name: task["node_name"] for name, task in cli.tasks(workflow).items()}
    assert sorted(nodes.values()) == [f"n1@{group}", f"n2@{group}"]
    assert "0,1 on " in cli.await_log(workflow, " on ")
    assert cli.run("workflow", "exec", workflow, "worker", "--entry", "echo there").out == "there\n"
    variables = cli.run("workflow", "exec", workflow, "worker", "--entry", "env").out
    assert not [
        line for line in variables.splitlines() if line.startswith(("RAY_JOB_ID", "RAY_RAYLET_PID", "PYTHONBREAKPOINT"))
    ]
    assert cli.run("workflow", "cancel", workflow, "--wait", "60").code == 0
    any_ray_pool.cluster.await_empty()


def test_tasks_of_a_packed_gang_share_a_node(ray_pool: RayPool) -> None:
    ray_pool.configure(ray={"strategy": "STRICT_PACK"})
    workflow, group = ray_pool.start(SPIN.replace("gpu: 2", "gpu: 1"))
    names = sorted(task["node_name"] for task in ray_pool.cli.tasks(workflow).values())
    host = names[0].partition("+")[0].partition("@")[0]
    assert names == sorted([f"{host}@{group}", f"{host}+2@{group}"])
    wait_until(
        lambda: ray_pool.cli.logs(workflow).count(" on ") == 1 and "rank 1" in ray_pool.cli.logs(workflow), 30, "both run"
    )
    gpus = {
        ray_pool.cli.run("workflow", "exec", workflow, task, "--entry", "printenv CUDA_VISIBLE_DEVICES").out
        for task in ("master", "worker")
    }
    assert gpus == {"0\n", "1\n"}
    ray_pool.cli.run("workflow", "cancel", workflow, "--wait", "60")


def test_excluded_nodes_are_avoided(ray_pool: RayPool) -> None:
    spec = (
        SPIN.replace(
            "  resources: {default: {gpu: 2, cpu: 1}}",
            """
  resources:
    first: {gpu: 1, nodesExcluded: [n1]}
    second: {gpu: 1, nodesExcluded: [n2]}
""",
        )
        .replace("lead: true", "lead: true, resource: first")
        .replace("{name: worker,", "{name: worker, resource: second,")
    )
    workflow, group = ray_pool.start(spec)
    nodes = {name: task["node_name"] for name, task in ray_pool.cli.tasks(workflow).items()}
    assert nodes == {"master": f"n2@{group}", "worker": f"n1@{group}"}
    ray_pool.cli.run("workflow", "cancel", workflow, "--wait", "60")


def test_a_waiting_gang_shows_rays_resources_and_cancel_removes_its_placement_group(ray_pool: RayPool) -> None:
    cli = ray_pool.cli
    first, _ = ray_pool.start(BOTH_NODES)
    second = cli.submit(cli.spec(BOTH_NODES, "second.yaml"))
    wait_until(lambda: "NO_RESOURCES" in cli.query(second)["groups"][0]["message"], 60, "the reason is shown")
    assert "2 × 8 CPU; free: n" in cli.query(second)["groups"][0]["message"]
    assert len(ray_pool.cluster.allocations()) == 2
    assert cli.run("workflow", "cancel", second, "--wait", "60").code == 0
    assert cli.query(second)["status"] == "FAILED_CANCELED"
    wait_until(lambda: len(ray_pool.cluster.allocations()) == 1, 30, "the waiting placement group is gone")
    cli.run("workflow", "cancel", first, "--wait", "60")


def test_an_infeasible_gang_ends_after_queue_timeout_and_shows_rays_resources(ray_pool: RayPool) -> None:
    cli = ray_pool.cli
    spec = SPIN.replace("  name: spin\n", "  name: spin\n  timeout: {queue_timeout: 20s}\n", 1)
    workflow = cli.submit(cli.spec(spec.replace("gpu: 2, cpu: 1", "gpu: 64")))
    answer = cli.await_status(workflow, "FAILED_QUEUE_TIMEOUT")
    message = answer["groups"][0]["message"]
    assert "queue_timeout" in message
    assert "INFEASIBLE" in message
    assert "2 × 1 CPU, 64 GPU" in message
    assert "2 of 2 GPU" in message


def test_a_killed_rank_stops_the_gang(ray_pool: RayPool) -> None:
    cli = ray_pool.cli
    workflow, _ = ray_pool.start(SPIN.replace("sleep 600'", 'echo "pid $$"; exec sleep 600\'', 1))
    pid = int(cli.await_log(workflow, "pid ").split("pid ")[1].split()[0])
    os.kill(pid, signal.SIGKILL)
    cause = cli.await_status(workflow, "FAILED", *ENDED)["groups"][0]["first_cause"]
    assert (cause["task"], cause["signal"]) == ("master", signal.SIGKILL), cause


@pytest.mark.timeout(300)
def test_a_lost_node_is_named(ray_pool: RayPool) -> None:
    workflow, _ = ray_pool.start(SPIN)
    ray_pool.cluster.kill_raylet("n2")
    try:
        answer = ray_pool.cli.await_status(workflow, *ENDED, timeout=90)
        assert answer["status"] == "FAILED_BACKEND_ERROR", answer
        assert answer["groups"][0]["first_cause"]["reason"] == "NODE_LOST"
        assert "on n2: its Ray node died" in json.dumps(answer)
        wait_until(lambda: not ray_pool.cluster.residents(), 60, "the programs on the lost node have ended")
    finally:
        ray_pool.cluster.kill_node("n2")
        ray_pool.cluster.start_node("n2")


@pytest.mark.timeout(300)
def test_a_killed_actor_ends_its_task_and_the_gang(ray_pool: RayPool) -> None:
    cli = ray_pool.cli
    workflow, group = ray_pool.start(SPIN)
    code = "import ray._private.state as s\n"
    pid = int(
        ray_pool.cluster.run(code + f"print([a['Pid'] for a in s.actors().values() if a['Name'].endswith('1@{group}')][0])")
    )
    os.kill(pid, signal.SIGKILL)
    answer = cli.await_status(workflow, *ENDED, timeout=90)
    assert answer["status"] == "FAILED_BACKEND_ERROR", answer
    assert "task worker" in json.dumps(answer["groups"][0])
    ray_pool.cluster.await_empty()

    workflow, group = ray_pool.start(SPIN)
    find = f"next(a['name'] for a in ray.util.list_named_actors(all_namespaces=True) if a['name'].endswith('0@{group}'))"
    ray_pool.cluster.run(f"ray.kill(ray.get_actor({find}))")
    answer = cli.await_status(workflow, *ENDED, timeout=90)
    assert answer["status"] == "FAILED_CANCELED", answer
    assert "ray.kill" in json.dumps(answer["groups"][0])


def test_a_removed_placement_group_ends_the_gang(ray_pool: RayPool) -> None:
    workflow, group = ray_pool.start(SPIN)
    name = f"next(one['name'] for id, one in ray.util.placement_group_table().items() if id.startswith('{group}'))"
    ray_pool.cluster.run(f"ray.util.remove_placement_group(ray.util.get_placement_group({name}))")
    answer = ray_pool.cli.await_status(workflow, *ENDED, timeout=90)
    assert answer["status"] == "FAILED_CANCELED", answer
    assert f"placement group {group} was removed" in json.dumps(answer["groups"][0])


@pytest.mark.timeout(400)
def test_a_restarted_head_ends_the_gang_and_runs_later_ones(ray_pool: RayPool) -> None:
    cli = ray_pool.cli
    workflow, _ = ray_pool.start(SPIN)
    ray_pool.cluster.restart_head()
    answer = cli.await_status(workflow, *ENDED, timeout=120)
    assert answer["status"] == "FAILED_BACKEND_ERROR", answer
    assert answer["groups"][0]["first_cause"]["reason"] == "NODE_LOST"
    later = cli.run("workflow", "submit", cli.spec(SPIN.replace("sleep 600", "true"), "later.yaml"), "--wait")
    assert later.code == 0, later.err + later.out


def test_a_killed_supervisor_loses_nothing(ray_pool: RayPool) -> None:
    cli = ray_pool.cli
    workflow, group = ray_pool.start(waiting_spec(cli, "echo late"))
    second = cli.submit(cli.spec(BOTH_NODES, "second.yaml"))
    wait_until(lambda: len(ray_pool.cluster.allocations()) == 2, 30, "both have a placement group")
    cli.kill_supervisor()
    (cli.folder / "go").touch()
    assert cli.await_status(workflow, "COMPLETED", "FAILED", *ENDED)["status"] == "COMPLETED"
    assert ray_pool.group_of(workflow) == group
    assert cli.logs(workflow).count("late") == 2
    cli.await_running(second)
    assert len(ray_pool.cluster.allocations()) == 1, "no second placement group was made"
    cli.run("workflow", "cancel", second, "--wait", "60")


@pytest.mark.ssh
def test_a_killed_program_on_the_cluster_is_started_again(far_ray_pool: RayPool) -> None:
    cli = far_ray_pool.cli
    workflow, group = far_ray_pool.start(waiting_spec(cli, "echo late"))

    assert far_ray_pool.cluster.kill_programs() > 0
    second = cli.submit(cli.spec(BOTH_NODES, "second.yaml"))
    wait_until(lambda: "NO_RESOURCES" in cli.query(second)["groups"][0]["message"], 60, "the program answers again")
    (cli.folder / "go").touch()
    assert cli.await_status(workflow, "COMPLETED", "FAILED", *ENDED)["status"] == "COMPLETED"
    assert (cli.logs(workflow).count("late"), far_ray_pool.group_of(workflow)) == (2, group)
    cli.await_running(second)
    cli.run("workflow", "cancel", second, "--wait", "60")


def test_a_placement_group_without_a_supervisor_is_removed(ray_pool: RayPool) -> None:
    cli = ray_pool.cli
    # Longer than a busy machine needs to start the tasks after the placement group was created.
    ray_pool.configure(ray={"idle_release": "20s"})
    workflow, _ = ray_pool.start(waiting_spec(cli, "echo late"))
    cli.kill_supervisor()
    (cli.folder / "go").touch()
    ray_pool.cluster.await_empty(90)
    # The next command starts a supervisor, which finds the exit codes and the output on the login node.
    assert cli.await_status(workflow, "COMPLETED", "FAILED", *ENDED)["status"] == "COMPLETED"
    assert cli.logs(workflow).count("late") == 2


def test_reap_removes_placement_groups_of_ended_workflows_and_names_those_of_others(ray_pool: RayPool) -> None:
    cli = ray_pool.cli
    done = cli.run("workflow", "submit", cli.spec(SPIN.replace("sleep 600", "true")), "--wait")
    assert done.code == 0, done.err
    uuid = cli.query("spin-1")["uuid"]

    def create_placement_group(marker: str) -> str:
        code = f"print(ray.util.placement_group([{{'CPU': 1}}], name={marker!r}, lifetime='detached').id.hex()[:12])"
        return ray_pool.cluster.run(code).strip()

    ours, foreign = create_placement_group(f"distflow:{uuid}/train/0"), create_placement_group(f"distflow:{'a' * 32}/train/0")
    assert "would stop" in cli.run("node", "reap", "--dry-run").out
    shown = cli.run("node", "reap").out
    assert f"placement group {ours}" in shown
    assert f"placement group {foreign}" in shown
    wait_until(lambda: ray_pool.cluster.allocations() == [foreign], 30, "only the foreign placement group is left")
    ray_pool.cluster.ask("release", ids=[foreign])


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
    assert "Ray at `127.0.0.1:1` did not answer" in done.out


@pytest.mark.ssh
def test_a_restarted_login_node_loses_nothing(far_ray_pool: RayPool) -> None:
    cli = far_ray_pool.cli
    workflow, group = far_ray_pool.start(waiting_spec(cli, "echo late"))
    assert far_ray_pool.login is not None
    far_ray_pool.login.restart()
    wait_until(lambda: "reachable again" in cli.run("workflow", "events", workflow).out, 60, "the nodes are reachable again")
    (cli.folder / "go").touch()
    assert cli.await_status(workflow, "COMPLETED", "FAILED", *ENDED)["status"] == "COMPLETED"
    assert (cli.logs(workflow).count("late"), far_ray_pool.group_of(workflow)) == (2, group)
    assert far_ray_pool.login.connections() <= 4
