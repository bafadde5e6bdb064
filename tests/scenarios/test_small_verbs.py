"""Small commands of OSMO: `resource info`, `profile`, `validate --label`, `logs --error`, and `cancel` of several ids."""

from __future__ import annotations

import json
import os

import pytest

from scenarios.conftest import Cli

TASK = "workflow: {name: NAME, tasks: [{name: a, command: [sh, -c, 'CODE']}]}"
TWO_POOLS = """
default_pool: here
pools:
  here:
    backend: local
    nodes: [{name: local, root: ROOT, gpus: 2, cpus: 8, memory: 4Gi, platform: a100, labels: {rack: r1},
             environment: {NCCL_DEBUG: INFO, TOKEN: hidden-value}}]
  there:
    backend: ssh
    nodes: [{name: gpu1, host: gpu1.lab, user: ada, platform: h100}, {name: local, host: gpu2.lab, root: /scratch/d}]
"""


@pytest.fixture
def pools(cli: Cli) -> Cli:
    """Two pools, which have a node of the same name."""
    (cli.folder / "distflow.yaml").write_text(TWO_POOLS.replace("ROOT", str(cli.top)))
    return cli


def test_resource_info_shows_the_configuration_of_a_node(pools: Cli) -> None:
    both = pools.run("resource", "info", "local")
    assert both.code == 0, both.err
    first, second = (dict(line.split(":", 1) for line in part.splitlines()) for part in both.out.split("\n\n"))
    shown = {key: value.strip() for key, value in first.items()}
    expected = {"Node": "local", "Pool": "here", "Platform": "a100", "CPU [#]": "0/8", "Memory [Gi]": "0/4", "GPU [#]": "0/2",
              "Labels": "rack=r1", "Environment": "NCCL_DEBUG TOKEN", "Tasks": "-"}  # fmt: skip
    assert expected.items() <= shown.items()
    assert "hidden-value" not in both.out
    assert {"Pool": "there", "Host": "gpu2.lab", "Root": "/scratch/d", "GPU [#]": "0/-"}.items() <= {
        key: value.strip() for key, value in second.items()
    }.items()
    answer = json.loads(pools.run("resource", "info", "local", "--pool", "here", "-t", "json").out)
    (one,) = answer["resources"]
    assert one["allocatable_fields"] == {"cpu": 8, "memory": 4 << 30, "gpu": 2}
    assert one["config_fields"]["environment"] == ["NCCL_DEBUG", "TOKEN"]
    assert pools.run("resource", "info", "gpu1", "-p", "there", "-pl", "h100").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpu2"], "there is no node `gpu2`\ndid you mean `gpu1`?"),
        (["gpu1", "--pool", "here"], "pool `here` has no node `gpu1`\nnodes: `local`"),
        (["gpu1", "--platform", "a100"], "there is no node `gpu1` with platform `a100`"),
        (["gpu1", "-p", "here", "--platform", "a100"], "pool `here` has no node `gpu1` with platform `a100`\nnodes: `local`"),
        (["gpu1", "--pool", "nowhere"], "there is no pool `nowhere`"),
    ],
)
def test_resource_info_refuses_unknown_nodes_and_pools(pools: Cli, arguments: list[str], message: str) -> None:
    done = pools.run("resource", "info", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_the_pool_of_the_profile_overrides_the_configuration_but_not_the_spec(pools: Cli) -> None:
    def pool_of(*arguments: str, text: str = TASK) -> str:
        spec = pools.spec(text.replace("NAME", "n").replace("CODE", "true"))
        done = pools.run("workflow", "submit", spec, "--dry-run", *arguments)
        assert done.code == 0, done.err
        return done.out.splitlines()[0].rpartition(" ")[2]

    assert pool_of() == "here"
    assert pools.run("profile", "set", "pool", "there").out == "Set pool to there.\n"
    assert pool_of() == "there"
    assert pool_of(text=TASK.replace("{name: NAME", "{pool: here, name: NAME")) == "here"
    assert pool_of("--pool", "here") == "here"
    assert "there (default)" in pools.run("pool", "list").out
    assert [pool["name"] for pool in json.loads(pools.run("pool", "list", "-p", "here", "-t", "json").out)["pools"]] == ["here"]
    assert pools.run("pool", "list", "--pool", "nowhere").code == 2
    assert f"User:  {os.environ['USER']}\nPool:  there (your profile)\nPools: here, there\n" == pools.run("profile", "list").out
    answer = json.loads(pools.run("profile", "list", "-t", "json").out)
    assert answer["profile"] | {"pool": "there", "email_notification": False} == answer["profile"]
    assert answer["pools"] == ["here", "there"]
    # The configuration of another directory may not have this pool.
    text = (pools.folder / "distflow.yaml").read_text()
    (pools.folder / "distflow.yaml").write_text(text.replace("  there:", "  elsewhere:"))
    done = pools.run("pool", "list")
    assert "here (default)" in done.out
    assert "does not have the default pool of your profile, `there`" in done.err
    assert pools.run("profile", "unset", "pool").code == 0
    assert (pool_of(), pools.run("pool", "list").err) == ("here", "")


def test_invalid_values_of_a_profile_are_reported(pools: Cli) -> None:
    for arguments, message in (
        (["set", "pool", "hree"], "there is no pool `hree`\ndid you mean `here`?"),
        (["set", "notifications", "email", "slack"], "distflow profile set notify NAME"),
        (["set", "notify"], "needs at least one target"),
        (["set", "notify", "team"], "this machine has no credential `team`"),
        (["set", "pool"], "needs the name of one pool"),
        (["set", "pool", "here", "there"], "needs the name of one pool"),
        (["set", "shade", "green"], "`shade` is not a setting of the profile"),
    ):
        done = pools.run("profile", *arguments)
        assert (done.code, message in done.err) == (2, True), done.err
    pools.state.mkdir(exist_ok=True)
    (pools.state / "profile.json").write_text("{")
    done = pools.run("profile", "list")
    assert (done.code, "is damaged" in done.err) == (5, True), done.err


def test_validate_checks_labels(cli: Cli) -> None:
    spec = cli.spec(TASK.replace("NAME", "n").replace("CODE", "true").replace("{name: n", "{labels: {a: b}, name: n"))
    assert cli.run("workflow", "validate", spec, "--label", "team=vision").code == 0
    for labels, message in ((["team"], "not of the form KEY=VALUE"), (["team=a b"], "is not a valid label value")):
        done = cli.run("workflow", "validate", spec, "--label", *labels)
        assert (done.code, message in done.err) == (2, True), done.err
    many = [word for number in range(16) for word in ("--label", f"l{number}=x")]
    done = cli.run("workflow", "validate", spec, *many)
    assert (done.code, "at most 16 labels, not 17" in done.err) == (2, True), done.err


def test_the_error_file_of_a_task_can_be_read(cli: Cli) -> None:
    error = {"message": {"message": "RuntimeError: no", "extraInfo": {"py_callstack": "Traceback\n  line 1"}}}
    (cli.folder / "error.json").write_text(json.dumps(error))
    fails = f"cp {cli.folder}/error.json $TORCHELASTIC_ERROR_FILE; echo oops >&2; exit 3"
    members = f"{{name: a, lead: true, command: [sh, -c, '{fails}']}}, {{name: b, command: ['true']}}"
    spec = cli.spec(f"workflow: {{name: bad, groups: [{{name: g, tasks: [{members}]}}]}}")
    assert cli.run("workflow", "submit", spec, "--wait").code == 1
    done = cli.run("workflow", "logs", "bad-1", "--task", "a", "--error")
    assert (done.code, done.out) == (0, "[a] RuntimeError: no\n[a] Traceback\n[a]   line 1\n")
    answer = json.loads(cli.run("workflow", "logs", "bad-1", "-t", "a", "--error", "--format-type", "json").out)
    assert answer == [{"task": "a", "task_name": "a", "retry_id": 0, "error": error}]
    none = cli.run("workflow", "logs", "bad-1", "-t", "b", "--error")
    assert (none.code, none.out) == (0, "")
    assert "b has not written an error file. Its output: distflow workflow logs bad-1 --task b" in none.err
    for arguments in (["--error"], ["--error", "-t", "a", "-t", "b"], ["--error", "-t", "a", "-f"]):
        refused = cli.run("workflow", "logs", "bad-1", *arguments)
        assert (refused.code, "--error prints the error file of one task" in refused.err) == (2, True)


def test_an_error_file_with_half_a_surrogate_pair_is_shown(cli: Cli) -> None:
    (cli.folder / "error.json").write_text('{"message": "half of a pair: \\ud83d"}')
    fails = f"cp {cli.folder}/error.json $TORCHELASTIC_ERROR_FILE; exit 3"
    spec = cli.spec(f"workflow: {{name: bad, tasks: [{{name: a, command: [sh, -c, '{fails}']}}]}}")
    assert cli.run("workflow", "submit", spec, "--wait").code == 1
    assert "exit code 3: half of a pair: ?" in cli.run("workflow", "why", "bad-1").out


def test_cancel_tries_every_id_and_reports_each_failure(cli: Cli) -> None:
    wait = 'trap "" TERM; while [ ! -e GO ]; do sleep 0.2; done'.replace("GO", str(cli.folder / "GO")).replace('"', '\\"')
    for name, code in (("over", "true"), ("one", wait), ("two", wait)):
        text = f'{{"workflow": {{"name": "{name}", "tasks": [{{"name": "a", "command": ["sh", "-c", "{code}"]}}]}}}}'
        cli.submit(cli.spec(text, f"{name}.yaml"))
    cli.await_status("over-1", "COMPLETED")
    cli.await_running("one-1")
    cli.await_running("two-1")
    ids = ["nothing-7", "one-1", "over-1", "two-1"]
    done = cli.run("workflow", "cancel", *ids, "--message", "wrong data", "--force", "-t", "json", "--wait", "60")
    assert done.code == 2
    answer = json.loads(done.out)
    assert [(one["name"], one.get("error", "")) for one in answer["workflows"]] == [
        ("nothing-7", "there is no workflow `nothing-7`"),
        ("one-1", ""),
        ("over-1", "over-1 has already ended: COMPLETED"),
        ("two-1", ""),
    ]
    assert "there is no workflow `nothing-7`" in done.err
    assert "over-1 has already ended" in done.err
    for name in ("one-1", "two-1"):
        assert cli.query(name)["status"] == "FAILED_CANCELED"
        assert "wrong data" in cli.run("workflow", "events", name).out
