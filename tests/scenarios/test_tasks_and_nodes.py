"""`task list`, `resource list` and `pool list`: tasks of all workflows, and used and free resources of nodes."""

from __future__ import annotations

import json

from scenarios.conftest import Cli

SPEC = """
workflow:
  name: NAME
  resources: {default: {gpu: 1, cpu: 2, memory: 1536Mi}}
  tasks:
  - name: one
    command: [sh, -c, 'while [ ! -e GO ]; do sleep 0.2; done']
  - name: two
    command: [sh, -c, 'while [ ! -e GO ]; do sleep 0.2; done']
"""


def _rows(cli: Cli, *arguments: str) -> list[tuple[str, str, str]]:
    done = cli.run("task", "list", "-t", "json", *arguments)
    assert done.code == 0, done.err
    return [(one["workflow_id"], one["task_name"], one["status"]) for one in json.loads(done.out)["tasks"]]


def test_tasks_and_their_leases_are_listed(cli: Cli) -> None:
    cli.configure(gpus=3)
    go = cli.folder / "go"
    first = cli.submit(cli.spec(SPEC.replace("NAME", "first").replace("GO", str(go))))
    cli.await_running(first)
    second = cli.submit(cli.spec(SPEC.replace("NAME", "second").replace("GO", str(go))), "--priority", "HIGH")
    cli.await_status(second, "RUNNING")
    expected = [("first-1", "one", "RUNNING"), ("first-1", "two", "RUNNING"), ("second-1", "one", "RUNNING")]
    assert _rows(cli, "-s", "RUNNING") == expected
    assert _rows(cli) == [*expected, ("second-1", "two", "SCHEDULING")]
    assert _rows(cli, "-c", "2", "-f", "1") == expected[1:]
    assert _rows(cli, "-o", "desc", "-w", "first") == expected[1::-1]
    assert _rows(cli, "--priority", "high", "normal", "-n", "local", "elsewhere") == expected
    assert _rows(cli, "--started-before", "2020-01-01") == []
    text = cli.run("task", "list", "-v").out.splitlines()
    assert text[-1].split() == ["Sum", *["-"] * 7, "0", "8", "6", "4"]
    summary = json.loads(cli.run("task", "list", "-W", "-t", "json", "-s", "RUNNING").out)["summaries"]
    assert [(one["workflow_id"], one["priority"], one["cpu"], one["memory"], one["gpu"]) for one in summary] == [
        ("first-1", "NORMAL", 4, 3.0, 2),
        ("second-1", "HIGH", 2, 1.5, 1),
    ]
    assert cli.run("task", "list", "-S").out.splitlines()[-1].split()[2:] == ["HIGH", "0", "4", "3", "2"]

    # The configuration does not set the memory of the node, so the list shows this machine's.
    shown = cli.run("resource", "list")
    name, pool, platform, cpus, memory, gpus, tasks = shown.out.splitlines()[-2].split()
    assert (name, pool, platform, cpus, gpus, tasks) == ("local", "local", "-", "6/64", "3/3", "3")
    assert memory.startswith("5/")
    assert "No node was contacted" in shown.err
    free = cli.run("resource", "list", "--mode", "free").out.splitlines()[-2].split()
    assert [free[3], free[5], free[6]] == ["58", "0", "3"]
    (node,) = json.loads(cli.run("resource", "list", "-t", "json").out)["resources"]
    assert (node["usage_fields"], node["tasks"]) == (
        {"cpu": 6, "memory": 3 * 1536 * 2**20, "gpu": 3},
        ["first-1/one", "first-1/two", "second-1/one"],
    )
    assert json.loads(cli.run("resource", "list", "--platform", "h100", "-t", "json").out) == {"resources": []}

    # With `--live`, the node reports its leases, also to a user with another state directory.
    live = cli.run("resource", "list", "--live")
    assert live.code == 0, live.err
    held = sorted(line.split() for line in live.out.splitlines()[-3:])
    assert [(line[0], line[1], line[-1]) for line in held] == [
        ("local", "GPU", "first-1/one"), ("local", "GPU", "first-1/two"), ("local", "GPU", "second-1/one"),
    ]  # fmt: skip
    assert all(line[3:7] == ["2", "CPUs,", "1.5", "GiB"] for line in held)
    (node,) = json.loads(cli.run("resource", "list", "--live", "-t", "json").out)["resources"]
    assert sorted(gpu for one in node["holders"] for gpu in one["gpus"]) == [0, 1, 2]
    assert {one["workflow_id"] for one in node["holders"]} == {"first-1", "second-1"}
    assert (node["foreign"], node["error"]) == ([], None)
    state, cli.environment["DISTFLOW_STATE"] = cli.environment["DISTFLOW_STATE"], str(cli.folder / "other")
    (node,) = json.loads(cli.run("resource", "list", "--live", "-t", "json").out)["resources"]
    assert {one["workflow_id"] for one in node["holders"]} == {None}
    assert {one["label"] for one in node["holders"]} == {"first-1/one", "first-1/two", "second-1/one"}
    assert node["usage_fields"]["gpu"] == 0
    cli.environment["DISTFLOW_STATE"] = state
    (pool,) = json.loads(cli.run("pool", "list", "-t", "json").out)["pools"]
    assert pool["nodes"][0]["usage_fields"] == {"cpu": 6, "memory": 3 * 1536 * 2**20, "gpu": 3}
    assert cli.run("pool", "list", "--mode", "free").out.splitlines()[-1].split()[4:6] == ["0", "58"]
    go.touch()
    for one in (first, second):
        cli.await_status(one, "COMPLETED")
    assert _rows(cli) == []
    assert _rows(cli, "-s", "COMPLETED", "-c", "1") == [("second-1", "two", "COMPLETED")]
    assert json.loads(cli.run("resource", "list", "-t", "json").out)["resources"][0]["tasks"] == []
    for arguments, message in (
        (["task", "list", "-s", "RUNING"], "did you mean `RUNNING`?"),
        (["task", "list", "-v", "-S"], "cannot be combined"),
        (["resource", "list", "-p", "nowhere"], "there is no pool `nowhere`"),
        (["resource", "list", "-p", "local", "--all"], "cannot be combined"),
    ):
        done = cli.run(*arguments)
        assert (done.code, message in done.err) == (2, True), done.err
