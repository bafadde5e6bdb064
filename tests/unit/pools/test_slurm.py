"""Pools on Slurm in the configuration: their settings, and all problems of invalid ones."""

from __future__ import annotations

import pytest

from distflow.documents.problems import ProblemsFound
from distflow.pools.load import Machine, parse_configuration
from distflow.pools.model import NodeSettings, Pool, SlurmPlatform, SlurmSettings

MACHINE = Machine(cpus=8, memory=64 << 30, gpus=2, python="/venv/bin/python")


def pool_of(text: str) -> Pool:
    (pool,) = parse_configuration(text, "distflow.yaml", root="/data/node", machine=MACHINE).pools.values()
    return pool


def refusal(text: str) -> str:
    with pytest.raises(ProblemsFound) as caught:
        pool_of(text)
    return str(caught.value)


def test_all_keys_are_read() -> None:
    pool = pool_of("""
pools:
  cluster:
    backend: slurm
    login: {host: hpc-login, user: me, port: 2222, identity_file: /k}
    root: /scratch/me
    setup: module load cuda
    environment: {A: pool, B: pool}
    container: apptainer
    defaults: {python: /sw/bin/python, environment: {A: defaults}, enforce_limits: false}
    slurm:
      partition: gpu,debug
      account: 123
      qos: high
      constraint: "h100&ib"
      reservation: week
      exclusive: true
      time: 8h
      gres: gpu:h100
      gpu_option: gpus-per-task
      het_jobs: false
      extra: [--licenses=matlab, "--mail-user=a b", -x n7]
      container: pyxis
      idle_release: 5m
    platforms:
      h100: {constraint: h100, gres: "gpu:h100"}
      cpu: {partition: cpu}
""")
    assert pool.slurm == SlurmSettings(
        partition="gpu,debug",
        account="123",
        qos="high",
        constraint="h100&ib",
        reservation="week",
        exclusive=True,
        time_s=8 * 3600,
        gres="gpu:h100",
        gpu_option="gpus-per-task",
        het_jobs=False,
        extra=("--licenses=matlab", "--mail-user=a b", "-x n7"),
        container="pyxis",
        idle_release_s=300,
        platforms={"h100": SlurmPlatform(constraint="h100", gres="gpu:h100"), "cpu": SlurmPlatform(partition="cpu")},
    )
    assert pool.login is not None
    assert (pool.login.name, pool.login.host, pool.login.user, pool.login.port, pool.login.identity_file) == (
        "hpc-login",
        "hpc-login",
        "me",
        2222,
        "/k",
    )
    assert (pool.nodes, pool.is_allocated, pool.shares_nodes) == ((), True, False)
    node = pool.node("gpu7@123")
    assert (node.name, node.host, node.root, node.python, node.setup) == (
        "gpu7@123",
        "gpu7",
        "/scratch/me",
        "/sw/bin/python",
        "module load cuda",
    )
    assert (node.environment, node.container, node.enforce_limits) == ({"A": "defaults", "B": "pool"}, "apptainer", False)
    assert (node.gpus, node.cpus, node.memory) == (None, None, None)


def test_the_smallest_pool_uses_this_machine_and_all_defaults() -> None:
    pool = pool_of("pools: {here: {backend: slurm}}")
    assert (pool.login, pool.slurm, pool.nodes) == (None, SlurmSettings(), ())
    assert pool.template is not None
    assert (pool.template.root, pool.template.python) == ("~/.distflow", "python3")
    assert pool.with_settings(NodeSettings(python="/p")).node("a@1").python == "/p"


@pytest.mark.parametrize(
    ("login", "host", "user"), [("hpc", "hpc", None), ("me@hpc", "hpc", "me"), ("{host: u@hpc, user: me}", "hpc", "me")]
)
def test_a_login_node_is_a_name_a_destination_or_a_mapping(login: str, host: str, user: str | None) -> None:
    node = pool_of(f"pools: {{c: {{backend: slurm, login: {login}}}}}").login
    assert node is not None
    assert (node.name, node.host, node.user, node.port) == (host, host, user, None)


def test_all_problems_are_reported_at_once_with_their_lines_and_remedies() -> None:
    messages = refusal("""\
default_pool: a
pools:
  a:
    backend: slurm
    login: {user: me}
    nodes: [gpu1]
    hostfile: hosts.txt
    defaults: {gpus: 8, user: me}
    slurm:
      partion: gpu
      account: a b
      gres: gpu:8
      time: 8hours
      idle_release: 0
      exclusive: maybe
      container: docker
      extra: [train.sh, --array=1-3, -p gpu, -G 8, --time=5, "--x=\\n"]
    platforms:
      h100: {gres: "gpu:h100:8", gpus: 8}
      -x: {}
  b:
    backend: ssh
    nodes: [n]
    login: hpc
    slurm: {}
  c: {backend: local, platforms: {h100: {}}}
  d: {backend: slurm, slurm: {time: 30s}}
  e: {backend: slurm, slurm: {gpu_option: gpus-per-task, gres: tpu}}
""")
    for expected in (
        "distflow.yaml:5: error: `pools.a.login` has no `host`",
        (
            "distflow.yaml:6: error: a pool with `backend: slurm` has no `nodes`, because Slurm chooses the nodes\n"
            "    remove `nodes`"
        ),
        "distflow.yaml:7: error: a pool with `backend: slurm` has no `hostfile`",
        (
            "distflow.yaml:8: error: `defaults.gpus` has no meaning with `backend: slurm`, which chooses the nodes\n"
            "    remove it; tasks"
        ),
        (
            "distflow.yaml:8: error: `defaults.user` has no meaning with `backend: slurm`, which chooses the nodes\n"
            "    remove it; the key"
        ),
        "distflow.yaml:10: error: unknown key `partion` in `pools.a.slurm`\n    did you mean `partition`?",
        "distflow.yaml:11: error: `pools.a.slurm.account`",
        "distflow.yaml:12: error: `pools.a.slurm.gres`",
        "distflow.yaml:13: error: `pools.a.slurm.time`: `8hours` is not a duration",
        "distflow.yaml:14: error: `pools.a.slurm.idle_release` must be more than 0",
        "distflow.yaml:15: error: `pools.a.slurm.exclusive`",
        "distflow.yaml:16: error: `pools.a.slurm.container`",
        (
            "distflow.yaml:17: error: `train.sh` in `slurm.extra` is not an option of sbatch\n"
            "    write an option and its value as one"
        ),
        (
            "distflow.yaml:17: error: `--array` cannot be in `slurm.extra`, because it would change how distflow runs the job\n"
            "    remove it"
        ),
        (
            "distflow.yaml:17: error: `-p` cannot be in `slurm.extra`, because `slurm` has a key for it\n"
            "    remove it; use the key `partition`"
        ),
        (
            "distflow.yaml:17: error: `-G` cannot be in `slurm.extra`, because `slurm` has a key for it\n"
            "    remove it; set `gpu` in `resources` of the spec"
        ),
        (
            "distflow.yaml:17: error: `--time` cannot be in `slurm.extra`, because `slurm` has a key for it\n"
            "    remove it; use the key `time`"
        ),
        "in `slurm.extra` is not an option of sbatch",
        "distflow.yaml:19: error: `pools.a.platforms.h100.gres`",
        "distflow.yaml:19: error: unknown key `gpus` in `pools.a.platforms.h100`",
        "distflow.yaml:20: error: `-x` is not a valid name here",
        "distflow.yaml:24: error: `login` needs `backend: slurm` or `backend: ray`\n    write `backend: slurm`, or",
        "distflow.yaml:25: error: `slurm` needs `backend: slurm`",
        "distflow.yaml:26: error: `platforms` needs `backend: slurm` or `backend: kubernetes` or `backend: ray`",
        "distflow.yaml:27: error: `pools.d.slurm.time` must be at least 1 minute",
        "distflow.yaml:28: error: `--gpus-per-task` requests only the generic resource `gpu`, not `tpu`",
    ):
        assert expected in messages
