"""Gangs that wait keep their place, and no ticket holds anybody back for long."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

import pytest

from distflow.runtime.leases import node_leases, tickets
from distflow.runtime.wire import OpError

GPUS = [0, 1]


class Line:
    """A node with two GPUs, a clock that the test moves, and gangs that ask for them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.at = 1_800_000_000.0
        monkeypatch.setattr(tickets, "now", lambda: self.at)
        monkeypatch.setattr(tickets, "_waiting", {})

    def holder(self, gang: str, task: str = "t") -> dict[str, Any]:
        return {"user": gang, "attempt": f"{uuid.uuid5(uuid.NAMESPACE_DNS, gang)}/g/{task}/0", "pid": 1}

    def ask(self, gang: str, gpus: int = 2, **wanted: tuple[int, int]) -> node_leases.Held | str:
        """Ask for GPUs: the lease, or why it was refused."""
        try:
            return node_leases.take(str(self.folder), gpus, GPUS, None, self.holder(gang), wanted)
        except OpError as error:
            return f"{error.kind}: {error.message}"

    def got(self, gang: str, gpus: int = 2, **wanted: tuple[int, int]) -> node_leases.Held:
        held = self.ask(gang, gpus, **wanted)
        assert isinstance(held, node_leases.Held), held
        return held

    def give_back(self, held: node_leases.Held, gang: str, gpus: int = 2) -> None:
        """Give a lease back, because another node of the gang refused."""
        node_leases.write_ticket(str(self.folder), self.holder(gang), {"gpus": gpus, "cpus": 0, "memory": 0})
        held.close()


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    made = Line(tmp_path / "leases", monkeypatch)
    made.folder.mkdir(mode=0o700)
    # Files get the time of the test's clock.
    rename = os.rename

    def dated(source: str, target: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        os.utime(source, (made.at, made.at), dir_fd=src_dir_fd)
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", dated)
    return made


def test_a_gang_that_waits_comes_before_gangs_that_ask_later(line: Line) -> None:
    first = line.got("first")
    assert "needs 2" in str(line.ask("waiting"))
    line.at += 1
    first.close()
    refused = line.ask("later", 1)
    assert "2 are kept for waiting" in str(refused)
    assert "whose gang has waited longer" in str(refused)
    line.at += 1
    line.got("waiting").close()
    # Its ticket went when it had its turn; the later one's does not stand in its own way.
    line.got("later", 1).close()
    assert not list(line.folder.glob("ticket-*"))


def test_a_lease_that_is_given_back_for_want_of_another_node_keeps_its_place(line: Line) -> None:
    """Here is room for the gang, on its other node there is not; short gangs would fill this node meanwhile."""
    held = line.got("two-nodes")
    line.give_back(held, "two-nodes")
    for _ in range(4):
        line.at += 10
        assert "kept for two-nodes" in str(line.ask("short"))
        line.give_back(line.got("two-nodes"), "two-nodes")
    line.got("two-nodes").close()


def test_what_a_ticket_leaves_may_be_had(line: Line) -> None:
    first = line.got("first", 1)
    line.ask("waiting", 2)
    line.at += 1
    assert "are kept for" in str(line.ask("later", 1))
    first.close()
    one = line.got("waiting", 1)  # it asks for less now: what is left is free
    line.got("later", 1).close()
    one.close()


def test_a_gang_that_asks_no_more_holds_nobody_back(line: Line) -> None:
    first = line.got("first")
    line.ask("gone")
    first.close()
    line.at += 10
    assert "kept for gone" in str(line.ask("later"))
    line.at += 11
    line.got("later").close()


def test_tasks_of_one_gang_do_not_wait_for_each_other(line: Line) -> None:
    first = line.got("first", 1)
    line.ask("gang")
    first.close()
    line.at += 1
    held = node_leases.take(str(line.folder), 1, GPUS, None, line.holder("gang", "another"))
    held.close()


def test_cpus_and_memory_are_kept_as_well(line: Line) -> None:
    first = line.got("first", 0, cpus=(6, 8))
    assert isinstance(line.ask("waiting", 0, cpus=(8, 8)), str)
    line.at += 1
    first.close()
    assert "8 CPUs are kept for waiting" in str(line.ask("later", 0, cpus=(1, 8)))
    line.got("memory-alone", 0, memory=(1 << 30, 2 << 30)).close()


HOSTILE: dict[str, Any] = {
    "older than all": {"since": -1e300, "gang": "eve/g", "gpus": 2},
    "more than there is": {"since": 0, "gang": "eve/g", "gpus": 1 << 62, "cpus": 1 << 62, "memory": 1 << 62},
    "no amounts": {"since": 0, "gang": "eve/g", "gpus": "2", "cpus": True, "memory": -1},
    "no gang": {"since": 0, "gang": ["eve"], "gpus": 2},
    "no time": {"since": "x", "gang": "eve/g", "gpus": 2},
    "a list": [1, 2],
    "deep": "[" * 4000,
    "long number": '{"since": 1e999, "gang": "eve/g", "gpus": ' + "9" * 400 + "}",
}


@pytest.mark.parametrize("said", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_ticket_that_is_renewed_for_ever_holds_nobody_back_for_more_than_a_minute(line: Line, said: Any) -> None:
    ticket = line.folder / f"ticket-{os.getuid()}-{'0' * 16}.json"
    began = line.at
    while True:
        ticket.write_text(said if isinstance(said, str) else json.dumps(said))
        os.utime(ticket, (line.at, line.at))
        held = line.ask("honest", 1, cpus=(1, 4))
        if isinstance(held, node_leases.Held):
            break
        line.at += 10
        assert line.at - began <= 60
    held.close()


def test_many_tickets_of_one_user_count_as_one_gang(line: Line) -> None:
    for number in range(50):
        ticket = line.folder / f"ticket-{os.getuid()}-{number:016x}.json"
        ticket.write_text(json.dumps({"since": number, "gang": f"eve/{number}", "gpus": 1}))
        os.utime(ticket, (line.at, line.at))
    line.got("honest", 1).close()


def test_files_that_are_no_tickets_of_their_owner_are_passed_over(line: Line, tmp_path: Path) -> None:
    said = json.dumps({"since": 0, "gang": "eve/g", "gpus": 2})
    (line.folder / f"ticket-{os.getuid() + 1}-{'0' * 16}.json").write_text(said)
    os.mkfifo(line.folder / f"ticket-{os.getuid()}-{'1' * 16}.json")
    (line.folder / f"ticket-{os.getuid()}-{'2' * 16}.json").mkdir()
    (tmp_path / "elsewhere").write_text(said)
    (line.folder / f"ticket-{os.getuid()}-{'3' * 16}.json").symlink_to(tmp_path / "elsewhere")
    os.link(tmp_path / "elsewhere", line.folder / f"ticket-{os.getuid()}-{'4' * 16}.json")
    future = line.folder / f"ticket-{os.getuid()}-{'5' * 16}.json"
    future.write_text(said)
    os.utime(future, (line.at + 1e6, line.at + 1e6))
    for path in line.folder.iterdir():
        if path != future:
            os.utime(path, (line.at, line.at), follow_symlinks=False)
    line.got("honest").close()
