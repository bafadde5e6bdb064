"""Launchers and ``distflow.distributed`` in real tasks, on this machine and on SSH hosts whose Python has no distflow."""

from __future__ import annotations

import importlib.util
import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from scenarios.conftest import Cli
from scenarios.lab import Lab, json_lines

BARE_PYTHON = str(Path(sys.base_prefix) / "bin" / "python3")
"""A Python without distflow, as on most nodes."""

SHOW_MEMBER = """
import json, os, sys
import distflow.train
from distflow import distributed

try:
    import distflow.errors
    print(json.dumps({"error": "distflow is installed here"}))
except ImportError:
    pass
me, master = distributed.me(), distributed.master()
print(json.dumps({
    "member": distributed.rank, "of": distributed.required_count, "node": me.identity, "address": me.primary_local_ip,
    "master": master.primary_local_ip, "master_addr": os.environ.get("MASTER_ADDR"), "group": distributed.group_name,
    "from": distflow.train.__file__, "path": os.environ["PYTHONPATH"], "since": me.announce_time,
}))
"""

GANG = """
workflow:
  name: who
  groups:
  - name: train
    framework: custom
    tasks:
    - {name: master, lead: true, ranks: {size: 2}, command: [PYTHON, /who.py], files: [{path: /who.py, localpath: who.py}]}
    - name: worker
      replicas: COUNT
      ranks: {size: 2}
      command: [PYTHON, /who.py]
      environment: {PYTHONPATH: /mine}
      files: [{path: /who.py, localpath: who.py}]
"""

SUM = """
import datetime, json, os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
dist.barrier()  # from here, each rank notices the end of another one at once
if os.environ.get("FAIL_AT") == os.environ.get("TORCHELASTIC_RESTART_COUNT"):
    os._exit(3)  # its peers wait for it in the sum
value = torch.tensor([float(dist.get_rank())])
dist.all_reduce(value)
sys.stdout.write(json.dumps({
    "rank": dist.get_rank(), "of": dist.get_world_size(), "sum": value.item(), "task": os.environ["DISTFLOW_TASK"],
    "restart": os.environ.get("TORCHELASTIC_RESTART_COUNT"), "lr": sys.argv[1:],
}) + "\\n")
dist.destroy_process_group()
"""

ENDS_SLOWLY = """
import atexit, os, pathlib, sys, time

lost = pathlib.Path("FOLDER/lost")
if os.environ["RANK"] == "0":
    while not lost.exists():
        time.sleep(0.05)
    raise RuntimeError("Connection closed by peer")
atexit.register(lambda: (lost.touch(), time.sleep(60)))
raise ValueError("bad label")
"""
"""Rank 1 fails, and its process remains after rank 0 has lost it."""

SLOW = """
workflow:
  name: slow
  groups:
  - name: train
    launcher: spawn
    tasks:
    - {name: master, lead: true, ranks: {size: 1}, command: [python3, train.py], files: [{path: train.py, localpath: train.py}]}
    - {name: worker, ranks: {size: 1}, command: [python3, train.py], files: [{path: train.py, localpath: train.py}]}
"""

TRAIN = """
workflow:
  name: train
  groups:
  - name: train
    launcher: LAUNCHER
    tasks:
    - name: master
      lead: true
      ranks: {size: 2}
      command: [PYTHON, -u, /sum.py, --lr, "0.1"]
      environment: {FAIL_AT: "FAIL"}
      files: [{path: /sum.py, localpath: sum.py}]
    - name: worker
      ranks: {size: 1}
      command: [PYTHON, /sum.py, --lr, "0.1"]
      files: [{path: /sum.py, localpath: sum.py}]
"""


def _members(cli: Cli, count: int) -> list[dict[str, Any]]:
    """Run a gang of a master and ``count`` workers. Check and return what each member got from ``distflow.distributed``."""
    (cli.folder / "who.py").write_text(SHOW_MEMBER)
    began = datetime.now(timezone.utc).replace(microsecond=0)
    done = cli.run(
        "workflow", "submit", cli.spec(GANG.replace("PYTHON", BARE_PYTHON, 2).replace("COUNT", str(count))), "--wait"
    )
    assert done.code == 0, done.out + done.err
    workflow = done.out.splitlines()[0]
    rows = sorted(json_lines(cli.logs(workflow)), key=lambda row: int(row["member"]))
    assert [(row["member"], row["of"]) for row in rows] == [(number, count + 1) for number in range(count + 1)]
    tasks = cli.tasks(workflow)
    for row, task in zip(rows, ("master", *(f"worker-{number}" for number in range(count))), strict=True):
        assert row["node"] == tasks[task]["node_name"]
        assert row["group"] == f"task-{workflow}-train"
        lib = Path(tasks[task]["output_dir"]).parent / "lib"
        assert row["from"] == str(lib / "distflow" / "train" / "__init__.py")
        assert row["path"].endswith(f"{'' if task == 'master' else '/mine:'}{lib}")
        assert row["master"] == row["master_addr"]
        assert began <= datetime.fromisoformat(row["since"]).replace(tzinfo=timezone.utc) <= datetime.now(timezone.utc)
    return rows


def test_tasks_on_ssh_hosts_get_their_gang_without_an_installed_distflow(lab: Lab) -> None:
    lab.configure(python=BARE_PYTHON)
    rows = _members(lab.cli, 2)
    assert [row["address"] for row in rows] == [f"127.0.1.{row['node'][-1]}" for row in rows]


def test_valohai_utils_reads_the_members_of_a_gang(cli: Cli) -> None:
    if importlib.util.find_spec("valohai") is None:
        pytest.skip("valohai-utils is not installed")
    (cli.folder / "who.py").write_text(
        "import json, valohai; d = valohai.distributed; print(json.dumps({'member': d.rank, 'master': d.me().is_master, "
        "'of': d.required_count, 'ip': d.master().primary_local_ip, 'out': valohai.outputs().path('model.pt')}))"
    )
    done = cli.run("workflow", "submit", cli.spec(GANG.replace("PYTHON", sys.executable, 2).replace("COUNT", "1")), "--wait")
    assert done.code == 0, done.out + done.err
    rows = sorted(json_lines(cli.logs("who-1")), key=lambda row: int(row["member"]))
    assert [(row["member"], row["master"], row["of"]) for row in rows] == [(0, True, 2), (1, False, 2)]
    outputs = [task["output_dir"] for _, task in sorted(cli.tasks("who-1").items())]
    assert [row["out"] for row in rows] == [f"{folder}/model.pt" for folder in outputs]


def _train(cli: Cli, launcher: str, *, fail: str = "never") -> list[dict[str, Any]]:
    (cli.folder / "sum.py").write_text(SUM)
    text = TRAIN.replace("PYTHON", sys.executable).replace("LAUNCHER", launcher).replace('"FAIL"', f'"{fail}"')
    done = cli.run("workflow", "submit", cli.spec(text), "--wait", timeout=170)
    assert done.code == 0, done.out + done.err
    return sorted(json_lines(cli.logs("train-1")), key=lambda row: (str(row["restart"]), int(row["rank"])))


@pytest.mark.torch
@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_a_launcher_starts_exactly_the_ranks_of_the_spec(cli: Cli, launcher: str, forking_site: str) -> None:
    cli.configure(environment={"PYTHONPATH": forking_site})
    rows = _train(cli, launcher)
    assert [(row["rank"], row["of"], row["sum"]) for row in rows] == [(rank, 3, 3.0) for rank in range(3)]
    assert [row["task"] for row in rows] == ["master", "master", "worker"]
    assert all(row["lr"] == ["--lr", "0.1"] for row in rows)
    for rank, task in ((0, "master"), (1, "master"), (2, "worker")):
        lines = json.loads(cli.logs("train-1", "--rank", str(rank), "--format-type", "json"))
        rank_rows = [json.loads(line["text"]) for line in lines if line["text"].startswith("{")]
        assert [(row["rank"], row["task"]) for row in rank_rows] == [(rank, task)]
    assert "[master rank 1] {" in cli.logs("train-1")


def test_a_rank_that_ends_slowly_after_its_exception_is_the_first_cause(cli: Cli) -> None:
    cli.spec(ENDS_SLOWLY.replace("FOLDER", str(cli.folder)), "train.py")
    workflow = cli.submit(cli.spec(SLOW))
    assert cli.await_status(workflow, "FAILED")["status"] == "FAILED"
    (group,) = json.loads(cli.run("workflow", "why", workflow, "-t", "json").out)["groups"]
    assert (group["first_cause"]["task"], group["first_cause"]["ranks"]) == ("worker", "1"), group
    assert "ValueError: bad label" in group["first_cause"]["message"]


@pytest.mark.torch
def test_torchrun_restarts_the_ranks_of_a_gang(cli: Cli, forking_site: str) -> None:
    cli.configure(environment={"PYTHONPATH": forking_site})
    rows = _train(cli, "{kind: torchrun, max_restarts: 2}", fail="0")
    assert {row["restart"] for row in rows if row["task"] == "master"} == {"1"}
    assert sorted((row["rank"], row["of"], row["sum"]) for row in rows) == [(rank, 3, 3.0) for rank in range(3)]


def test_the_dry_run_shows_the_launcher_command_of_each_task(cli: Cli) -> None:
    (cli.folder / "sum.py").write_text(SUM)
    text = TRAIN.replace("PYTHON", "python3").replace("LAUNCHER", "spawn")
    done = cli.run("workflow", "submit", cli.spec(text), "--dry-run", "-t", "json")
    assert done.code == 0, done.err
    master, worker = json.loads(done.out)["groups"][0]["tasks"]
    assert master["command"][1:9] == ["-m", "distflow.train.launch", "--offset", "0", "--size", "2", "--world_size", "3"]
    assert worker["command"][4] == "2"
    assert worker["python_path"] == ["@@ATTEMPT_DIR@@/lib"]
    assert [file["path"] for file in worker["files"]] == ["/sum.py", "distflow.train"]


SHARDED = """
import json, sys
import torch
from distflow import train

world = train.init(start_timeout=60)
plan = world.parallelize(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
model = plan.model
held = sum(parameter.to_local().numel() for parameter in model.parameters())
loss = model(torch.ones(2, 8)).sum()
loss.backward()
row = {"rank": world.rank, "kind": plan.strategy.kind, "held": held, "from": train.__file__}
sys.stdout.write(json.dumps(row) + "\\n")
"""

STRATEGY = """
workflow:
  name: train
  groups:
  - name: train
    launcher: spawn
    strategy: {kind: fsdp}
    tasks:
    - name: master
      lead: true
      ranks: {size: 2}
      command: [PYTHON, /train.py]
      files: [{path: /train.py, localpath: sharded.py}]
"""


@pytest.mark.torch
def test_the_ranks_train_with_the_strategy_of_the_spec(cli: Cli, forking_site: str) -> None:
    cli.configure(environment={"PYTHONPATH": forking_site})
    (cli.folder / "sharded.py").write_text(SHARDED)
    done = cli.run("workflow", "submit", cli.spec(STRATEGY.replace("PYTHON", sys.executable)), "--wait", timeout=170)
    assert done.code == 0, done.out + done.err
    rows = sorted(json_lines(cli.logs("train-1")), key=lambda row: int(row["rank"]))
    assert [(row["rank"], row["kind"], row["held"]) for row in rows] == [(0, "fsdp", 72), (1, "fsdp", 72)]
    assert all("/lib/distflow/train/" in row["from"] for row in rows)


MISMATCH = """
import datetime, os
import torch, torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
dist.all_reduce(torch.ones(2 + dist.get_rank()))
"""


@pytest.mark.torch
def test_debug_reports_the_shapes_of_mismatched_collectives(cli: Cli, forking_site: str) -> None:
    cli.configure(environment={"PYTHONPATH": forking_site})
    (cli.folder / "sharded.py").write_text(MISMATCH)
    text = STRATEGY.replace("PYTHON", sys.executable).replace("strategy: {kind: fsdp}", "debug: true")
    done = cli.run("workflow", "submit", cli.spec(text), "--wait", timeout=170)
    assert done.code == 1
    logs = cli.logs("train-1")
    assert "Detected mismatch between collectives on ranks. Rank " in logs
    assert "TensorShape=[2]" in logs
    assert "TensorShape=[3]" in logs
