"""``top``, and running tasks in ``query --watch``."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from distflow.backends.machines.inspection import Holder, Holders
from distflow.cli.app import run
from distflow.cli.render.overview import overview_text
from distflow.cli.render.tables import Paint
from distflow.cli.render.workflow_text import workflow_text
from distflow.client.client import Client, user_name
from distflow.client.nodes import ask_resource_holders
from distflow.client.overview import read_overview
from distflow.client.workflows import read_status
from distflow.lifecycle.states import WorkflowState
from distflow.pools.model import Node, Pool
from distflow.state.record import WorkflowRecord
from unit.cli.screen import Screen, assert_golden
from unit.cli.test_metrics import metric
from unit.cli.test_samples import record_samples
from unit.state.stored import T0, completed_group, running_group, submit, supervised, task_log, workflow

CONFIGURATION = """default_pool: lab
pools:
  lab:
    backend: ssh
    nodes:
    - {name: master-node, host: 127.0.0.1, port: 1, gpus: 12}
    - {name: worker-node, host: 127.0.0.1, port: 1, gpus: 8}
    - {name: idle-node, host: 127.0.0.1, port: 1, gpus: 4}
  other:
    backend: ssh
    nodes: [{name: far, host: 127.0.0.1, port: 1}]
"""


@pytest.fixture
def busy(screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkflowRecord:
    """A running workflow whose master has samples and prints the total number of steps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "distflow.yaml").write_text(CONFIGURATION)
    record = submit(screen.store, workflow([running_group()], state=WorkflowState.RUNNING))
    task_log(screen.directory, record, "master", [(T0 + 30, metric(step=400, loss=0.25, total_steps=1000, rank=0))])
    record_samples(screen, record, "master")
    return record


def test_top_shows_workflows_and_gpus(screen: Screen, busy: WorkflowRecord) -> None:
    with supervised(screen.directory), Client() as client:
        found = overview_text(read_overview(client), now=T0 + 100, paint=Paint(), width=None)
    assert_golden("top.txt", found)


def test_gpus_of_nodes_that_do_not_answer_are_unknown_and_not_free(screen: Screen, busy: WorkflowRecord) -> None:
    answers = {("lab", name): Holders(error="connection refused") for name in ("master-node", "idle-node")}
    answers["lab", "worker-node"] = Holders(foreign=((0, "pid 6"),))
    with supervised(screen.directory), Client() as client:
        text = overview_text(read_overview(client, ["lab"], answers), now=T0 + 100, paint=Paint(), width=None)
    rows = {words[1]: words[2:] for line in text.splitlines() if (words := line.split())[:1] == ["lab"]}
    assert text.startswith("1 workflow, 16 of 24 GPUs in use, 8 unknown  ")
    assert rows["idle-node"][:4] == ["????", "0/4,", "4", "unknown"]
    assert rows["master-node"][:4] == ["??▄?????????", "8/12,", "4", "unknown"]
    assert rows["worker-node"][:2] == ["????????", "8/8"]
    assert text.splitlines()[-1] == "idle-node: connection refused"


def test_json_contains_workflows_nodes_and_gpus(
    screen: Screen, busy: WorkflowRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    with supervised(screen.directory):
        assert run(["top", "-t", "json"]) == 0
        found = json.loads(capsys.readouterr().out)
        (one,) = found["workflows"]
        assert (one["workflow_id"], one["status"], len(one["tasks"])) == (busy.id, "RUNNING", 2)
        assert one["tasks"][0]["usage"]["gpu_utilization"] == 65
        nodes = {node["node_name"]: node for node in found["nodes"]}
        assert [*nodes] == ["master-node", "worker-node", "idle-node", "far"]
        gpus = nodes["master-node"]["gpus"]
        assert gpus[2] == {
            "index": 2, "workflow_id": busy.id, "task": "master", "task_name": "master",
            "values": {"utilization": 40, "memory": 4 << 30, "power": 300}, "state": "mine", "used_by": f"{busy.id}/master",
        }  # fmt: skip
        assert (gpus[7]["task"], gpus[8]["task"], gpus[8]["workflow_id"], len(gpus)) == ("master", None, None, 12)
        assert (gpus[8]["state"], nodes["idle-node"]["gpus"][0]["state"]) == (None, None)  # no node is reachable
        assert all(node["error"] for node in nodes.values())
        assert run(["top", "--pool", "other"]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("0 workflows, 0 of 0 GPUs in use")
        assert f"\nfar: {nodes['far']['error']}\n" in printed
        assert run(["top", "--pool", "none"]) == 2


def test_top_shows_gpus_that_other_workflows_and_processes_use(screen: Screen, busy: WorkflowRecord) -> None:
    alice = Holder(user="alice", attempt=f"{'7e' * 16}/train/w/0", label="bert-7/w", pid=7, gpus=(0, 1))
    elsewhere = Holder(user=user_name(), attempt=f"{'7f' * 16}/train/w/0", label="mine-2/w", pid=8, gpus=(2, -1, 10**9))
    answers = {
        ("lab", "master-node"): Holders(holders=(Holder(user="ada", attempt=f"{busy.uuid}/train/master/0", pid=9, gpus=(2,)),)),
        ("lab", "idle-node"): Holders(holders=(alice, elsewhere), foreign=((5, "pid 6 (bob, py\x1b[31mthon)"),)),
        ("lab", "worker-node"): Holders(error="no answer within 10 s"),
    }
    with supervised(screen.directory), Client() as client:
        overview = read_overview(client, ["lab"], answers)
    text = overview_text(overview, now=T0 + 100, paint=Paint(), width=None)
    assert_golden("top_asked.txt", text)
    assert "unknown" not in text
    nodes = {node.node: node for node in overview.nodes}
    assert [gpu.state for gpu in nodes["idle-node"].gpus] == ["other", "other", "mine", "free", "free", "foreign"]
    assert [nodes["master-node"].gpus[gpu].state for gpu in (0, 11)] == ["mine", "free"]


def test_top_does_not_wait_for_unresponsive_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def ask(_: Pool, node: Node) -> Holders:
        if node.name == "slow":
            release.wait(60)
        return Holders(foreign=((0, node.name),))

    monkeypatch.setattr("distflow.client.nodes.ask_holders", ask)
    nodes = [Node(name=name, host=name, root="~", python="python3") for name in ("slow", "fast")]
    pool = Pool(name="lab", backend="ssh", nodes=tuple(nodes))
    try:
        assert ask_resource_holders([(pool, node) for node in nodes], within_s=0.5) == [
            Holders(error="no answer within 0.5 s"), Holders(foreign=((0, "fast"),)),
        ]  # fmt: skip
    finally:
        release.set()


def test_a_watched_query_has_ages_trends_and_progress(screen: Screen, busy: WorkflowRecord) -> None:
    status = read_status(screen.client, busy)
    texts = [
        workflow_text(busy, now=T0 + 92, metrics=status.metrics, usage=status.usage, is_live=is_live)
        for is_live in (True, False)
    ]
    assert_golden("query_live.txt", texts[0])
    assert "1 min ago" in texts[0]
    assert "Trend" not in texts[1]


def test_progress_needs_a_valid_number_of_steps(screen: Screen) -> None:
    record = submit(screen.store, workflow([completed_group()]))
    for total, shown in (("x", None), (0, None), (-5, None), (True, None), (400, "[####################] 100%"), (9, "100%")):
        task_log(screen.directory, record, "master", [(T0 + 30, metric(step=400, total_steps=total, rank=0))])
        text = workflow_text(record, now=T0 + 100, metrics=read_status(screen.client, record).metrics)
        assert (shown or "%]") in text or shown is None
        assert shown is not None or "[#" not in text
