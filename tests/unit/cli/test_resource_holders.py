"""The users and tasks that hold resources of nodes: ``resource list --live``."""

from __future__ import annotations

from pathlib import Path

from distflow.backends.machines.inspection import Holder, Holders
from distflow.cli.render.nodes import holders_json, holders_text
from distflow.client.pools import NodeUsage
from distflow.pools.model import Node, Pool

UUID = "7278eb5c" * 4
NODE = Node(name="n2", host="n2", root=str(Path("~/.distflow")), python="python3")
USAGE = NodeUsage(pool=Pool(name="lab", backend="ssh", nodes=(NODE,)), node=NODE, held=())


def _holder(label: str, **amounts: tuple[int, ...]) -> Holder:
    return Holder(user="root", attempt=f"{UUID}/g/w1/0", label=label, pid=4652, **amounts)  # type: ignore[arg-type]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_holders_are_shown_by_workflow_and_task_with_ranges() -> None:
    holders = Holders(holders=(_holder("spin-1/w1", gpus=(0, 1, 2, 3, 6), ports=(29500,)), _holder("", gpus=(7,))))
    shown = holders_text([(USAGE, holders)], {}).splitlines()
    assert _cells(shown[-2]) == ["n2", "GPUs 0-3, 6, port 29500", "root", "spin-1/w1"]
    assert _cells(shown[-1]) == ["n2", "GPU 7", "root", "unknown task"]
    assert UUID not in "\n".join(shown)
    assert holders_text([(USAGE, holders)], {UUID: "spin-9"}).splitlines()[-1].endswith("spin-9/w1")
    assert [one["label"] for one in holders_json(holders, {})["holders"]] == ["spin-1/w1", None]  # type: ignore[attr-defined]


def test_idle_nodes_are_reported_in_a_sentence() -> None:
    assert holders_text([(USAGE, Holders())], {}) == "Nothing is in use on these nodes.\n"


def test_a_node_that_cannot_be_inspected_is_not_reported_as_idle() -> None:
    failed = Holders(error="connection refused")
    assert holders_text([(USAGE, failed)], {}) == "n2: the query failed: connection refused\n"
    both = holders_text([(USAGE, failed), (USAGE, Holders())], {})
    assert both == "Nothing is in use on the nodes that responded.\nn2: the query failed: connection refused\n"
