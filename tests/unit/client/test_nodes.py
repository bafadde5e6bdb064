"""Workflow ids in messages from nodes, and arguments that are refused."""

from __future__ import annotations

import pytest

from distflow.client.nodes import replace_uuids
from distflow.client.running_tasks import RunningTask
from distflow.errors import InputError
from distflow.pools.model import Node, Pool

UUID = "7278eb5c" * 4
DASHED = "6b0d9a50-7c1f-4a4b-9a53-0f6b1d8f5b11"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"tasks may be running: {UUID}/g/w1/0, {UUID}/g/w2/3", "tasks may be running: spin-1/w1, spin-1/w2 retry-3"),
        (
            f"{DASHED}: the workflow is still running: {DASHED}/g/w1/0",
            "an unknown workflow: the workflow is still running: w1 of an unknown workflow",
        ),
        (f"{UUID}: no", "spin-1: no"),
        (f"/scratch/.distflow/{UUID}/g/w1/0: Permission denied", f"/scratch/.distflow/{UUID}/g/w1/0: Permission denied"),
        (f"{UUID}{UUID} is a hash", f"{UUID}{UUID} is a hash"),
        ("", ""),
    ],
)
def test_uuids_are_replaced_by_workflow_ids_and_task_names(text: str, shown: str) -> None:
    assert replace_uuids(text, {UUID: "spin-1"}) == shown


def test_an_argument_with_a_nul_byte_is_refused_before_it_is_sent() -> None:
    node = Node(name="n1", host="n1", root="/r", python="python3", gpus=0)
    task = RunningTask(
        workflow="w-1", task="t", attempt="a", pool=Pool(name="x", backend="ssh", nodes=(node,)), node=node, secrets={}
    )
    with pytest.raises(InputError, match="an argument contains a NUL byte"):
        task.open(["echo", "a\0b"], None, 1.0)
