"""Scripts of ``distflow workflow export --to slurm`` on a real Slurm: ranks, outputs and final states."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distflow.testing.slurm import Slurm
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli

SHAPES = """\
workflow:
  name: shapes
  resources:
    small: {gpu: 0, cpu: 2}
    large: {gpu: 4, cpu: 1}
  groups:
  - name: training
    tasks:
    - {name: master, lead: true, resource: small, ranks: {size: 2}, command: [bash, /tmp/show.sh], files: &files [
        {path: /tmp/show.sh, contents: "echo $DISTFLOW_TASK ranks $DISTFLOW_RANK_OFFSET+$DISTFLOW_RANK_SIZE of
         $DISTFLOW_WORLD_SIZE on $SLURMD_NODENAME,
         $SLURM_CPUS_ON_NODE CPUs, GPUs [$CUDA_VISIBLE_DEVICES], $TOKEN > {{output}}/seen\\n"}]}
    - {name: worker, resource: large, ranks: {size: 4}, command: [bash, /tmp/show.sh], files: *files}
"""
BROKEN = """\
workflow:
  name: broken
  groups:
  - name: first
    tasks:
    - {name: rank-0, lead: true, ranks: {size: 1}, command: [sh, -c, "touch RUNS; exec sleep 1000"]}
    - {name: rank-1, ranks: {size: 1}, command: [sh, -c, "until [ -e RUNS ]; do sleep 0.1; done; exit 7"]}
  - name: second
    tasks:
    - {name: never, command: [touch, "{{output}}/wrong"], inputs: [{task: rank-0}]}
"""


def submit(cli: Cli, slurm: Slurm, folder: Path, spec: str, *options: str, **variables: str) -> list[str]:
    """Export a spec, submit the script as its user would, and return the ids of its jobs."""
    name = Path(spec).stem
    done = cli.run("workflow", "export", spec, "--to", "slurm", "--output", str(folder / f"{name}.sh"), *options)
    assert done.code == 0, done.err
    environment = os.environ | {"PATH": f"{slurm.commands}:{os.environ['PATH']}", "RUN_DIR": name} | variables
    shown = subprocess.run(
        ["sh", f"{name}.sh"], cwd=folder, env=environment, stdout=subprocess.PIPE, check=True, text=True, timeout=60
    )
    return re.findall(r"job (\d+)$", shown.stdout, re.MULTILINE)


def state(slurm: Slurm, job: str) -> str:
    found = re.search(r"JobState=(\w+)", slurm.run("scontrol", "show", "job", "-o", job))
    return found[1] if found else ""


def ranks_of(cli: Cli, spec: str) -> dict[str, tuple[int, int]]:
    """Return the first rank and the number of ranks of each task of a spec."""
    plan = json.loads(cli.run("workflow", "submit", spec, "--dry-run", "-t", "json").out)
    return {task["name"]: (task["offset"], task["size"]) for group in plan["groups"] for task in group["tasks"]}


@pytest.mark.timeout(400)
def test_exported_scripts_run_as_their_specs_say(cli: Cli, slurm: Slurm, tmp_path: Path, repository: Path) -> None:
    cli.configure(gpus=8)
    hello = submit(cli, slurm, tmp_path, str(repository / "workflow_specs/hello_world.yaml"))
    # Without cgroups, Slurm may miss a process that starts while its step is ended, so the lead waits for the server.
    graph_text = (repository / "tests/goldens/slurm/graph.yaml").read_text()
    runs = tmp_path / "server-runs"
    for old, new in (
        ('[sleep, "1000"]', f'[sh, -c, "touch {runs}; exec sleep 1000"]'),
        ('"echo yes', f'"until [ -e {runs} ]; do sleep 0.1; done; echo yes'),
    ):
        assert old in graph_text
        graph_text = graph_text.replace(old, new)
    graph = submit(cli, slurm, tmp_path, cli.spec(graph_text, "graph.yaml"))
    shapes = submit(cli, slurm, tmp_path, cli.spec(SHAPES, "shapes.yaml"), "--set-env", "TOKEN=hunter2", TOKEN="hunter2")
    broken = submit(cli, slurm, tmp_path, cli.spec(BROKEN.replace("RUNS", str(tmp_path / "rank-0-runs")), "broken.yaml"))
    wait_until(lambda: not slurm.jobs(), 150, "all jobs have ended")

    logs = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
    assert {state(slurm, job) for job in (*hello, *graph, *shapes)} == {"COMPLETED"}, logs
    ranks = ranks_of(cli, str(repository / "workflow_specs/hello_world.yaml"))
    assert ranks == {"master": (0, 1), "worker": (1, 1)}
    for number, (task, (offset, _)) in enumerate(ranks.items()):
        assert f"{number}: rank {offset} of 2\n" in logs[f"hello-world-{hello[0]}.log"], task

    # The end of the lead stopped the server, exit code 3 is a success, and only a part of the output is an input.
    assert (tmp_path / "graph/reader/output/seen").read_text() == "keep.txt\nyes\n"

    # A heterogeneous job: each task has its own resources, and the secret is only in the environment.
    assert (tmp_path / "shapes/master/output/seen").read_text() == "master ranks 0+2 of 6 on n1, 2 CPUs, GPUs [], hunter2\n"
    output = (tmp_path / "shapes/worker/output/seen").read_text()
    assert re.fullmatch(r"worker ranks 2\+4 of 6 on n2, 1 CPUs, GPUs \[\d,\d,\d,\d\], hunter2\n", output), output
    assert "hunter2" not in (tmp_path / "shapes.sh").read_text()

    # A failed rank stops the other one, which would run for minutes, and the group after it never starts.
    assert [state(slurm, job)[:6] for job in broken] == ["FAILED", "CANCEL"]
    assert not (tmp_path / "broken/never").exists()


@pytest.mark.torch
def test_an_exported_torchrun_script_trains_on_two_nodes(
    cli: Cli, slurm: Slurm, tmp_path: Path, repository: Path, forking_site: str
) -> None:
    spec = str(repository / "workflow_specs/pytorch_torchrun.yaml")
    options = ("--set", "epochs=1", "--set", "size=2", "--python", sys.executable)
    (job,) = submit(cli, slurm, tmp_path, spec, *options, PYTHONPATH=forking_site)
    wait_until(lambda: not slurm.jobs(), 120, "the job has ended")
    log = (tmp_path / f"pytorch-torchrun-{job}.log").read_text()
    assert state(slurm, job) == "COMPLETED", log
    started = [(line[0], json.loads(line[3:])) for line in log.splitlines() if '"started"' in line]
    assert sorted((node, one["rank"]) for node, one in started) == [("0", 0), ("0", 1), ("1", 2), ("1", 3)]
    assert {one["world_size"] for _, one in started} == {4}
    assert (tmp_path / "pytorch_torchrun/master/output/model.pt").is_file()
