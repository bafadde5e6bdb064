"""Waiting gangs keep their place in the queue, and no ticket delays another gang for long."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

import pytest

from distflow.runtime.leases import node_leases, tickets
from distflow.runtime.leases.gpu_users import GpuUser
from distflow.runtime.wire import OpError

GPUS = [0, 1]


class Queue:
    """A node with two GPUs, a clock that the test moves, and gangs that request GPUs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.users: list[GpuUser] = []
        self.at = 1_800_000_000.0
        monkeypatch.setattr(tickets, "now", lambda: self.at)
        monkeypatch.setattr(tickets, "_waiting", {})

    def holder(self, gang: str, task: str = "t") -> dict[str, Any]:
        return {"user": gang, "attempt": f"{uuid.uuid5(uuid.NAMESPACE_DNS, gang)}/g/{task}/0", "pid": 1}

    def request(self, gang: str, gpus: int = 2, **wanted: tuple[int, int]) -> node_leases.Held | str:
        """Request GPUs. Returns the lease, or the error."""
        try:
            return node_leases.take(str(self.folder), gpus, GPUS, None, self.holder(gang), wanted, self.users)
        except OpError as error:
            return f"{error.kind}: {error.message}"

    def lease(self, gang: str, gpus: int = 2, **wanted: tuple[int, int]) -> node_leases.Held:
        held = self.request(gang, gpus, **wanted)
        assert isinstance(held, node_leases.Held), held
        return held

    def release(self, held: node_leases.Held, gang: str, gpus: int = 2) -> None:
        """Release a lease, because another node of the gang is not free."""
        node_leases.write_ticket(str(self.folder), self.holder(gang), {"gpus": gpus, "cpus": 0, "memory": 0})
        held.close()


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue(tmp_path / "leases", monkeypatch)
    made.folder.mkdir(mode=0o700)
    # Files get the time of the test's clock.
    rename = os.rename

    def rename_with_time(source: str, target: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        os.utime(source, (made.at, made.at), dir_fd=src_dir_fd)
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", rename_with_time)
    return made


def test_a_waiting_gang_gets_gpus_before_later_gangs(queue: Queue) -> None:
    first = queue.lease("first")
    assert "needs 2" in str(queue.request("waiting"))
    queue.at += 1
    first.close()
    refused = queue.request("later", 1)
    assert "2 are kept for waiting" in str(refused)
    assert "whose gang has waited longer" in str(refused)
    queue.at += 1
    queue.lease("waiting").close()
    # A lease removes the gang's ticket, and a gang's own ticket does not delay it.
    queue.lease("later", 1).close()
    assert not list(queue.folder.glob("ticket-*"))


def test_a_gang_that_releases_its_lease_keeps_its_place_in_the_queue(queue: Queue) -> None:
    """This node has free GPUs for the gang, but its other node has none. Short gangs would use this node meanwhile."""
    held = queue.lease("two-nodes")
    queue.release(held, "two-nodes")
    for _ in range(4):
        queue.at += 10
        assert "kept for two-nodes" in str(queue.request("short"))
        queue.release(queue.lease("two-nodes"), "two-nodes")
    queue.lease("two-nodes").close()


def test_gpus_that_no_ticket_needs_can_be_leased(queue: Queue) -> None:
    first = queue.lease("first", 1)
    queue.request("waiting", 2)
    queue.at += 1
    assert "are kept for" in str(queue.request("later", 1))
    first.close()
    lease = queue.lease("waiting", 1)  # it now requests one GPU, so the other GPU is free
    queue.lease("later", 1).close()
    lease.close()


def test_a_gpu_process_that_has_ended_meanwhile_does_not_occupy_the_gpu(queue: Queue) -> None:
    first = queue.lease("first")
    queue.request("waiting", 1)
    first.close()
    queue.at += 1
    for pid, is_leased in ((os.getpid(), False), (1 << 30, True)):
        queue.users = [{"gpu": 1, "pid": pid, "words": "another program"}]
        held = queue.request("later", 1)
        assert isinstance(held, node_leases.Held) == is_leased, held
        if isinstance(held, node_leases.Held):
            held.close()


def test_a_gang_that_stops_requesting_delays_no_other_gang(queue: Queue) -> None:
    first = queue.lease("first")
    queue.request("gone")
    first.close()
    queue.at += 10
    assert "kept for gone" in str(queue.request("later"))
    queue.at += 11
    queue.lease("later").close()


def test_tasks_of_one_gang_do_not_wait_for_each_other(queue: Queue) -> None:
    first = queue.lease("first", 1)
    queue.request("gang")
    first.close()
    queue.at += 1
    held = node_leases.take(str(queue.folder), 1, GPUS, None, queue.holder("gang", "another"))
    held.close()


def test_cpus_and_memory_are_kept_for_a_waiting_gang(queue: Queue) -> None:
    first = queue.lease("first", 0, cpus=(6, 8))
    assert isinstance(queue.request("waiting", 0, cpus=(8, 8)), str)
    queue.at += 1
    first.close()
    assert "8 CPUs are kept for waiting" in str(queue.request("later", 0, cpus=(1, 8)))
    queue.lease("memory-alone", 0, memory=(1 << 30, 2 << 30)).close()


HOSTILE: dict[str, Any] = {
    "older than all": {"since": -1e300, "gang": "eve/g", "gpus": 2},
    "more than there is": {"since": 0, "gang": "eve/g", "gpus": 1 << 62, "cpus": 1 << 62, "memory": 1 << 62},
    "invalid amounts": {"since": 0, "gang": "eve/g", "gpus": "2", "cpus": True, "memory": -1},
    "invalid gang": {"since": 0, "gang": ["eve"], "gpus": 2},
    "invalid time": {"since": "x", "gang": "eve/g", "gpus": 2},
    "a list": [1, 2],
    "deep": "[" * 4000,
    "long number": '{"since": 1e999, "gang": "eve/g", "gpus": ' + "9" * 400 + "}",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_ticket_delays_a_gang_for_at_most_a_minute(queue: Queue, content: Any) -> None:
    ticket = queue.folder / f"ticket-{os.getuid()}-{'0' * 16}.json"
    began = queue.at
    while True:
        ticket.write_text(content if isinstance(content, str) else json.dumps(content))
        os.utime(ticket, (queue.at, queue.at))
        held = queue.request("honest", 1, cpus=(1, 4))
        if isinstance(held, node_leases.Held):
            break
        queue.at += 10
        assert queue.at - began <= 60
    held.close()


def test_many_tickets_of_one_user_count_as_one_gang(queue: Queue) -> None:
    for number in range(50):
        ticket = queue.folder / f"ticket-{os.getuid()}-{number:016x}.json"
        ticket.write_text(json.dumps({"since": number, "gang": f"eve/{number}", "gpus": 1}))
        os.utime(ticket, (queue.at, queue.at))
    queue.lease("honest", 1).close()


def test_files_that_are_not_tickets_of_their_owner_are_ignored(queue: Queue, tmp_path: Path) -> None:
    content = json.dumps({"since": 0, "gang": "eve/g", "gpus": 2})
    (queue.folder / f"ticket-{os.getuid() + 1}-{'0' * 16}.json").write_text(content)
    os.mkfifo(queue.folder / f"ticket-{os.getuid()}-{'1' * 16}.json")
    (queue.folder / f"ticket-{os.getuid()}-{'2' * 16}.json").mkdir()
    (tmp_path / "elsewhere").write_text(content)
    (queue.folder / f"ticket-{os.getuid()}-{'3' * 16}.json").symlink_to(tmp_path / "elsewhere")
    os.link(tmp_path / "elsewhere", queue.folder / f"ticket-{os.getuid()}-{'4' * 16}.json")
    future = queue.folder / f"ticket-{os.getuid()}-{'5' * 16}.json"
    future.write_text(content)
    os.utime(future, (queue.at + 1e6, queue.at + 1e6))
    for path in queue.folder.iterdir():
        if path != future:
            os.utime(path, (queue.at, queue.at), follow_symlinks=False)
    queue.lease("honest").close()
