"""The current collective of a rank in torch's flight recorder: of real ranks with gloo, and in entries like those of NCCL."""

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
    """Return an entry as torch 2.13 records it (FlightRecorderDetail.hpp). Entries of gloo have no states, only `retired`."""
    return {
        "record_id": number, "collective_seq_id": number, "profiling_name": operation, "state": state, "retired": retired,
        "is_p2p": p2p, "process_group": ["0", "default_pg"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "expected"),
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
    ids=["no entry", "finished", "waiting", "queued", "point to point", "unknown name"],
)
def test_the_current_collective_is_the_first_unfinished_one(
    entries: list[dict[str, Any]], expected: tuple[int, str, bool, int]
) -> None:
    assert tuple(current_collective(entries).values()) == expected


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


def read_collectives(folder: Path, pid: int) -> Any:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(f"/proc/self/fd/{descriptor}/collectives-{pid}")
            return json.loads(b"".join(iter(lambda: caller.recv(65536), b"")))
    finally:
        os.close(descriptor)


def test_ranks_that_wait_in_torch_report_their_collectives(start_with_torch: Start, tmp_path: Path) -> None:
    folder = tmp_path / ("attempt" * 20)  # longer than the address of a socket may be
    folder.mkdir()
    run = start_with_torch(SCRIPT, "--size", "2", DISTFLOW_ATTEMPT_DIR=str(folder))
    pids = {record["rank"]: record["pid"] for record in run.wait_for_records(2)}
    wait_until(lambda: read_collectives(folder, pids[0])["groups"][0]["operation"] == "barrier", DEADLINE_S)
    waiting, elsewhere = (read_collectives(folder, pids[rank]) for rank in (0, 1))
    assert waiting["groups"][0] == {
        "name": "0 default_pg", "ranks": [0, 1], "number": 4, "operation": "barrier", "is_over": False, "entered": 4,
    }  # fmt: skip
    default, control, mine = elsewhere["groups"]
    assert (elsewhere["rank"], default["number"], default["operation"], default["is_over"]) == (1, 3, "all_reduce", True)
    assert control["name"].endswith(" distflow")
    assert (mine["name"].split()[-1], mine["ranks"], mine["number"]) == ("mine", [1], 0)


def test_entries_without_their_group_are_not_reported(start_with_torch: Start, tmp_path: Path) -> None:
    run = start_with_torch(SCRIPT, "--size", "2", DISTFLOW_ATTEMPT_DIR=str(tmp_path), DISTFLOW_DEBUG="1")
    assert [read_collectives(tmp_path, record["pid"]) for record in run.wait_for_records(2)] == [{}, {}]
