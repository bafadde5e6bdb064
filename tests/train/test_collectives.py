"""Where a rank is among its collectives, by torch's flight recorder: the real one of gloo, and records as NCCL's look."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from distflow.testing.waiting import wait_until
from distflow.train.communication.collectives import current_collective
from train.conftest import DEADLINE_S, Start

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def entry(number: int, operation: str, state: str, *, retired: bool = False, p2p: bool = False) -> dict[str, Any]:
    """As torch 2.13 writes it (FlightRecorderDetail.hpp); NCCL's records have states, gloo's only say `retired`."""
    return {
        "record_id": number, "collective_seq_id": number, "profiling_name": operation, "state": state, "retired": retired,
        "is_p2p": p2p, "process_group": ["0", "default_pg"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "place"),
    [
        ([], (0, "", True, 0)),
        ([entry(1, "gloo:barrier", "scheduled", retired=True)], (1, "barrier", True, 1)),
        (
            [entry(1, "gloo:all_reduce", "scheduled", retired=True), entry(2, "gloo:all_gather", "scheduled")],
            (2, "all_gather", False, 2),
        ),
        (
            [
                entry(3, "nccl:all_reduce", "scheduled"),
                entry(1, "nccl:all_reduce", "completed"),
                entry(2, "nccl:broadcast", "started"),
            ],
            (2, "broadcast", False, 3),
        ),
        (
            [entry(1, "nccl:all_reduce", "completed"), entry(2, "nccl:recv 0<-1", "started", p2p=True)],
            (1, "all_reduce", True, 1),
        ),
        ([entry(1, "unknown", "started")], (1, "unknown", False, 1)),
    ],
    ids=["none", "over", "waits", "queued", "sends", "other name"],
)
def test_the_first_that_has_not_ended_is_where_it_is(entries: list[dict[str, Any]], place: tuple[int, str, bool, int]) -> None:
    assert tuple(current_collective(entries).values()) == place


SCRIPT = """
import os, time, torch, torch.distributed as dist
from distflow import train
place = train.init()
mine = dist.new_group([1], group_desc="mine")
for _ in range(3):
    dist.all_reduce(torch.ones(2))
train.report(step=0, pid=os.getpid())
if place.rank == 1:
    time.sleep(600)
dist.barrier()
"""


def told(folder: Path, pid: int) -> Any:
    at = os.open(folder, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(f"/proc/self/fd/{at}/collectives-{pid}")
            return json.loads(b"".join(iter(lambda: caller.recv(65536), b"")))
    finally:
        os.close(at)


def test_ranks_that_wait_in_torch_answer_all_the_same(start_with_torch: Start, tmp_path: Path) -> None:
    folder = tmp_path / ("attempt" * 20)  # more than an address of a socket can be
    folder.mkdir()
    run = start_with_torch(SCRIPT, "--size", "2", DISTFLOW_ATTEMPT_DIR=str(folder))
    pids = {record["rank"]: record["pid"] for record in run.wait_for_records(2)}
    wait_until(lambda: told(folder, pids[0])["groups"][0]["operation"] == "barrier", DEADLINE_S)
    waiting, elsewhere = (told(folder, pids[rank]) for rank in (0, 1))
    assert waiting["groups"][0] == {
        "name": "0 default_pg", "ranks": [0, 1], "number": 4, "operation": "barrier", "is_over": False, "entered": 4,
    }  # fmt: skip
    default, control, mine = elsewhere["groups"]
    assert (elsewhere["rank"], default["number"], default["operation"], default["is_over"]) == (1, 3, "all_reduce", True)
    assert control["name"].endswith(" distflow")
    assert (mine["name"].split()[-1], mine["ranks"], mine["number"]) == ("mine", [1], 0)


def test_a_record_that_does_not_name_its_groups_is_not_guessed_at(start_with_torch: Start, tmp_path: Path) -> None:
    run = start_with_torch(SCRIPT, "--size", "2", DISTFLOW_ATTEMPT_DIR=str(tmp_path), DISTFLOW_DEBUG="1")
    assert [told(tmp_path, record["pid"]) for record in run.wait_for_records(2)] == [{}, {}]
