"""The collectives that ranks report through sockets."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from distflow.runtime.probes import stacks

GROUP = {"name": "0 default_pg", "ranks": [0, 1], "number": 5, "operation": "all_reduce", "is_over": False, "entered": 5}


def listener(folder: Path, name: str) -> socket.socket:
    """Return a socket that listens at a path of any length."""
    made = socket.socket(socket.AF_UNIX)
    folder_fd = os.open(folder, os.O_RDONLY)
    made.bind(f"/proc/self/fd/{folder_fd}/{name}")
    os.close(folder_fd)
    made.listen()
    return made


def answer(made: socket.socket, data: bytes) -> None:
    def once() -> None:
        caller, _ = made.accept()
        with caller:
            caller.sendall(data)

    threading.Thread(target=once, daemon=True).start()


def test_answers_are_sorted_by_rank_and_ranks_that_do_not_answer_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_ANSWER_S", 0.5)
    folder = tmp_path / ("long" * 30)  # longer than the address of a socket may be
    folder.mkdir()
    listeners = {name: listener(folder, f"collectives-{name}") for name in ("1", "2", "3", "hangs", "gone")}
    answer(listeners["1"], json.dumps({"rank": 1, "groups": [GROUP]}).encode())
    answer(listeners["2"], json.dumps({"rank": 0, "groups": []}).encode())
    answer(listeners["3"], b"rubbish")
    listeners["gone"].close()
    (folder / "collectives-file").touch()
    assert stacks.collect_collectives(str(folder)) == [{"rank": 0, "groups": []}, {"rank": 1, "groups": [GROUP]}]
    for one in listeners.values():
        one.close()
    assert stacks.collect_collectives(str(tmp_path / "none")) == []


@pytest.mark.parametrize("reply", [None, 3, [], {}, {"rank": "x", "groups": []}, {"rank": 1, "groups": [{"name": "a"}]}])
def test_an_invalid_answer_is_ignored(reply: Any) -> None:
    assert stacks.validated_collectives(reply) is None


def test_unknown_fields_are_left_out_and_long_values_are_shortened() -> None:
    reply = {"rank": 1, "groups": [dict(GROUP, more="x", name="n" * 1000)] * 100, "more": "x"}
    validated = stacks.validated_collectives(reply)
    assert validated is not None
    assert (set(validated), len(validated["groups"]), set(validated["groups"][0])) == ({"rank", "groups"}, 64, set(GROUP))
    assert len(validated["groups"][0]["name"]) == 100
