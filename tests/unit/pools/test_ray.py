"""Pools on Ray in the configuration: their settings, and all problems of invalid ones."""

from __future__ import annotations

import pytest

from distflow.documents.problems import ProblemsFound
from distflow.pools.load import Machine, parse_configuration
from distflow.pools.model import Pool, RayPlatform, RaySettings

MACHINE = Machine(cpus=8, memory=64 << 30, gpus=2, python="/venv/bin/python")


def pool_of(text: str) -> Pool:
    (pool,) = parse_configuration(text, "distflow.yaml", root="/data/node", machine=MACHINE).pools.values()
    return pool


def test_all_keys_are_read() -> None:
    pool = pool_of("""
pools:
  ray:
    backend: ray
    login: me@head
    python: /sw/bin/python
    ray: {address: "10.0.0.1:6379", strategy: PACK, python: /opt/ray/bin/python, idle_release: 1h}
    platforms:
      h100: {resources: {"accelerator_type:H100": 0.001}}
""")
    assert pool.ray == RaySettings(
        address="10.0.0.1:6379", strategy="PACK", python="/opt/ray/bin/python", idle_release_s=3600.0,
        platforms={"h100": RayPlatform(resources={"accelerator_type:H100": 0.001})},
    )  # fmt: skip
    assert pool.is_allocated
    assert (pool.login.host, pool.login.user) == ("head", "me")  # type: ignore[union-attr]
    assert pool.node("n1@abc").python == "/sw/bin/python"
    assert set(pool.platforms) == {"h100"}


@pytest.mark.parametrize(
    ("keys", "pythons"),
    [
        ("", ("python3", "python3")),
        ("ray: {python: /ray/python}", ("/ray/python", "/ray/python")),
        ("python: /sw/python", ("/sw/python", "/sw/python")),
        ("defaults: {python: /sw/python}\n    ray: {python: /ray/python}", ("/ray/python", "/sw/python")),
    ],
)
def test_the_pythons_of_login_and_tasks_default_to_each_other(keys: str, pythons: tuple[str, str]) -> None:
    pool = pool_of(f"pools:\n  ray:\n    backend: ray\n    {keys}\n")
    assert (pool.ray.python, pool.node("n1@abc").python) == pythons  # type: ignore[union-attr]


def test_all_problems_are_reported_at_once_with_their_lines_and_remedies() -> None:
    with pytest.raises(ProblemsFound) as caught:
        pool_of("""
pools:
  ray:
    backend: ray
    nodes: [n1]
    slurm: {partition: gpu}
    defaults: {host: head}
    ray:
      address: ray://head:10001
      strategy: SOMEHOW
      idle_release: 0
    platforms:
      h100: {partition: gpu, resources: {GPU: 1, big: -1}}
""")
    messages = str(caught.value)
    for expected in (
        "distflow.yaml:5: error: a pool with `backend: ray` has no `nodes`, because Ray chooses the nodes",
        "distflow.yaml:6: error: `slurm` needs `backend: slurm`",
        "distflow.yaml:7: error: `defaults.host` has no meaning with `backend: ray`, which chooses the nodes",
        "distflow.yaml:9: error: `pools.ray.ray.address` is an address of Ray Client",
        "set `login` of the pool to a node of the cluster",
        "distflow.yaml:10: error: `pools.ray.ray.strategy`",
        "distflow.yaml:11: error: `pools.ray.ray.idle_release` must be more than 0",
        "distflow.yaml:13: error: `partition` of a platform needs `backend: slurm`",
        "distflow.yaml:13: error: `GPU` of a platform comes from the `resources` of the spec",
        "distflow.yaml:13: error: `pools.ray.platforms.h100.resources.big`",
    ):
        assert expected in messages
