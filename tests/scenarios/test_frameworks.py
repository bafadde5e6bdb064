"""Frameworks that are installed here, in gangs of two tasks, on this machine or on two hosts behind SSH."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import pytest

from scenarios.conftest import Cli
from scenarios.lab import Lab, json_lines

GANG = """
workflow:
  name: gang
  resources: {default: {gpu: 0, cpu: 1}}
  groups:
  - name: train
    framework: FRAMEWORK
    tasks:
    - name: master
      lead: true
      ranks: {size: SIZE}
      command: [PYTHON, /script.py]
      environment: &environment ENVIRONMENT
      files: &files [{path: /script.py, localpath: script.py}]
    - {name: worker, ranks: {size: SIZE}, command: [PYTHON, /script.py], environment: *environment, files: *files}
"""

NONE: Mapping[str, str] = MappingProxyType({})

ACCELERATE = """
import json, os, sys, torch
from accelerate import Accelerator

accelerator = Accelerator()
total = accelerator.reduce(torch.tensor([float(accelerator.process_index)]), reduction="sum")
sys.stdout.write(json.dumps({
    "rank": accelerator.process_index, "of": accelerator.num_processes, "sum": total.item(),
    "device": accelerator.device.type, "task": os.environ["DISTFLOW_TASK"],
}) + "\\n")
accelerator.end_training()
"""

DEEPSPEED = """
import datetime, json, os, sys, torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
sys.stdout.write(json.dumps({
    "rank": dist.get_rank(), "of": dist.get_world_size(), "sum": total.item(), "task": os.environ["DISTFLOW_TASK"],
    "local": os.environ["LOCAL_RANK"], "arguments": sys.argv[1:],
}) + "\\n")
dist.destroy_process_group()
"""

JAX = """
import json, os
import jax

jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(
    num_processes=int(os.environ["JAX_NUM_PROCESSES"]), process_id=int(os.environ["JAX_PROCESS_ID"])
)
from jax.experimental.multihost_utils import process_allgather

gathered = process_allgather(jax.numpy.array([float(jax.process_index())]))
print(json.dumps({"rank": jax.process_index(), "of": jax.process_count(), "sum": float(gathered.sum())}), flush=True)
jax.distributed.shutdown()
"""

RAY = """
import json, os, ray

ray.init(log_to_driver=False, logging_level="ERROR")
alive = [node for node in ray.nodes() if node["Alive"]]

@ray.remote(num_cpus=1)
def square(x):
    return x * x

squares = ray.get([square.remote(x) for x in range(4)])
print(json.dumps({"nodes": len(alive), "cpus": ray.cluster_resources()["CPU"], "squares": squares}), flush=True)
"""


def _run(
    cli: Cli, framework: str, script: str, *, size: int = 1, timeout: float = 150.0, environment: Mapping[str, str] = NONE
) -> list[dict[str, Any]]:
    (cli.folder / "script.py").write_text(script)
    text = GANG.replace("FRAMEWORK", framework).replace("SIZE", str(size)).replace("PYTHON", sys.executable)
    text = text.replace("ENVIRONMENT", json.dumps(dict(environment)))
    done = cli.run("workflow", "submit", cli.spec(text), "--wait", timeout=timeout)
    assert done.code == 0, done.out + done.err
    return json_lines(cli.logs("gang-1"))


@pytest.mark.torch
@pytest.mark.parametrize("size", [1, 2], ids=["one rank a task", "two ranks a task"])
def test_accelerate_connects_all_processes_of_a_gang(cli: Cli, size: int, forking_site: str) -> None:
    cli.configure(environment={"PYTHONPATH": forking_site})
    rows = sorted(_run(cli, "accelerate", ACCELERATE, size=size), key=lambda row: int(row["rank"]))
    ranks = list(range(2 * size))
    assert [(row["rank"], row["of"], row["sum"], row["device"]) for row in rows] == [
        (rank, 2 * size, float(sum(ranks)), "cpu") for rank in ranks
    ]
    assert [row["task"] for row in rows] == ["master"] * size + ["worker"] * size


@pytest.mark.torch
def test_deepspeed_starts_its_processes_without_ssh_between_the_nodes(lab: Lab) -> None:
    """The launcher is DeepSpeed's, but the ranks use torch: without a GPU, DeepSpeed compiles for minutes."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed here")  # the test tools do not include it, because its build takes minutes
    lab.configure(names=("gpu1", "gpu2"))
    lab.cli.environment["DS_ACCELERATOR"] = "cpu"
    rows = sorted(_run(lab.cli, "deepspeed", DEEPSPEED, size=2, timeout=100), key=lambda row: int(row["rank"]))
    assert [(row["rank"], row["of"], row["sum"], row["local"]) for row in rows] == [
        (rank, 4, 6.0, str(rank % 2)) for rank in range(4)
    ]
    assert [row["task"] for row in rows] == ["master", "master", "worker", "worker"]
    assert rows[3]["arguments"] == ["--local_rank=1"]


@pytest.mark.torch
def test_jax_connects_two_hosts(lab: Lab) -> None:
    lab.configure(names=("gpu1", "gpu2"))
    rows = sorted(_run(lab.cli, "jax", JAX), key=lambda row: int(row["rank"]))
    assert [(row["rank"], row["of"], row["sum"]) for row in rows] == [(0, 2, 1.0), (1, 2, 1.0)]


@pytest.fixture
def ray_directory() -> Iterator[Path]:
    """A directory for Ray's sessions. Its path is short, because it contains sockets."""
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as made:
        yield Path(made)


@pytest.mark.torch
def test_ray_sees_both_nodes_of_a_gang(lab: Lab, ray_directory: Path) -> None:
    lab.configure(names=("gpu1", "gpu2"))
    (row,) = _run(lab.cli, "ray", RAY, environment={"RAY_TMPDIR": str(ray_directory)})
    assert (row["nodes"], row["cpus"], row["squares"]) == (2, 2.0, [0, 1, 4, 9])
    tasks = lab.cli.tasks("gang-1")
    assert {task["status"] for task in tasks.values()} == {"COMPLETED"}, tasks
    assert (ray_directory / "ray" / "session_latest").exists()
    # Ray's daemons leave the task's session but keep its environment, so `lab` finds any that remain.
