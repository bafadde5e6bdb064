"""A workflow of three stages on three hosts: prepare, train on two nodes, and evaluate.

One rank fails, and the training continues from a checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from distflow.testing.s3 import S3Server
from scenarios.conftest import Cli
from scenarios.lab import Lab

TRAIN = '''
"""Fits y = 3x by gradient descent, with one rank in each task; rank 0 writes the model after each step."""
import os, pathlib, sys
import torch, torch.distributed as dist

data, kept, out = (pathlib.Path(one) for one in sys.argv[1:4])
dist.init_process_group("gloo")
rank = dist.get_rank()
xs = torch.tensor([float(line) for line in (data / "points.txt").read_text().split()])[rank::2]
kept.mkdir(parents=True, exist_ok=True)
found = [float((kept / name).read_text()) if (kept / name).exists() else 0.0 for name in ("step", "weight")]
print(f"rank {rank} finds step {found[0]:g}", flush=True)
state = torch.tensor(found)
dist.broadcast(state, 0)  # the checkpoints of two ranks may be a step apart
begin, weight = int(state[0]), state[1]
for step in range(begin + 1, 9):
    gradient = (2 * (weight * xs - 3 * xs) * xs).mean()
    dist.all_reduce(gradient)
    weight = weight - 0.01 * gradient
    for name, value in (("weight", float(weight)), ("step", step)):
        (kept / f"{name}.new").write_text(f"{value}\\n")
        (kept / f"{name}.new").rename(kept / name)
    if rank == 1 and step == 4 and os.environ["DISTFLOW_RETRY_ID"] == "0":
        os._exit(75)  # gloo's threads may abort a process that exits with its group
if rank == 0:
    (out / "weight").write_text(f"{float(weight)}\\n")
dist.destroy_process_group()
'''

STORY = """
workflow:
  name: story
  retry: {backoff: 100ms}
  groups:
  - name: preparation
    tasks:
    - name: prepare
      lead: true
      command: [sh, -c, 'seq 1 8 > "{{output}}/points.txt"']
  - name: training
    tasks:
    - name: master
      lead: true
      ranks: {size: 1}
      command: [PYTHON, /train.py, "{{input:prepare}}", /tmp/model, "{{output}}"]
      files: [{path: /train.py, localpath: train.py}]
      inputs: [{task: prepare}]
      checkpoint: [{path: /tmp/model, url: "s3://b/{{workflow_id}}/master", frequency: 1h}]
      outputs: [{dataset: {name: line, path: weight}}]
    - name: worker
      ranks: {size: 1}
      command: [PYTHON, /train.py, "{{input:prepare}}", /tmp/model, "{{output}}"]
      files: [{path: /train.py, localpath: train.py}]
      inputs: [{task: prepare}]
      exitActions: {RESCHEDULE: 75}
      checkpoint: [{path: /tmp/model, url: "file://KEPT", frequency: 1h}]
  - name: evaluation
    tasks:
    - name: evaluate
      lead: true
      command: [sh, -c, 'cat "{{input:master}}/weight"; cat "{{input:1}}/model/step"']
      inputs:
      - task: master
      - {url: "s3://b/{{workflow_id}}/master"}
"""


@pytest.mark.torch
def test_a_workflow_of_three_stages_continues_from_a_checkpoint_after_a_failure(
    lab: Lab, cli: Cli, s3: S3Server, forking_site: str, tmp_path: Path
) -> None:
    lab.configure(environment={"PYTHONPATH": forking_site})
    assert len(lab.servers) == 3
    bucket = s3.bucket("b")
    (cli.folder / "train.py").write_text(TRAIN)
    story = STORY.replace("PYTHON", sys.executable).replace("KEPT", str(tmp_path / "kept"))
    done = cli.run("workflow", "submit", cli.spec(story), "--wait", timeout=170)
    assert done.code == 0, done.out + done.err
    lines = sorted(line for line in done.out.splitlines() if "finds step" in line)
    assert [line.rpartition(" ")[0] for line in lines] == [
        "[master retry-1] rank 0 finds step", "[master] rank 0 finds step",
        "[worker retry-1] rank 1 finds step", "[worker] rank 1 finds step",
    ]  # fmt: skip
    found = [line.rpartition(" ")[2] for line in lines]
    assert {found[0], found[2]} <= {"3", "4"}
    assert (found[1], found[3]) == ("0", "0")
    weight, step = (line.removeprefix("[evaluate] ") for line in done.out.splitlines() if line.startswith("[evaluate] "))
    assert (abs(float(weight) - 3.0) < 0.1, step) == (True, "8")
    assert len({task["node_name"] for task in cli.tasks("story-1").values() if task["ranks"]}) == 2
    for kept in (bucket / "story-1" / "master", tmp_path / "kept"):
        assert (kept / "model" / "step").read_text() == "8\n"
    (dataset,) = json.loads(cli.run("dataset", "list", "-t", "json").out)["datasets"]
    assert dataset["name"] == "line"
    events = cli.run("workflow", "events", "story-1").out
    expected = [
        "[prepare] its output was copied to this machine: ",
        "[worker] FAILED: exit code 75",
        "[worker] its checkpoint is at file://",
        "training: RESCHEDULED: worker: exit code 75; attempt 2 of at most 11",
        "[master retry-1] its checkpoint is at s3://b/story-1/master",
        "training: COMPLETED",
        "[evaluate] its input is fetched by its node: s3://b/story-1/master",
        "workflow story-1: COMPLETED",
    ]
    positions = [events.find(words) for words in expected]
    assert -1 not in positions, (expected[positions.index(-1)], events)
    assert positions == sorted(positions), events
