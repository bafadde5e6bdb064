"""Report to the node which collective this rank is in, so that ``distflow workflow stacks`` can compare the ranks.

torch's flight recorder has it: on unless ``TORCH_FR_BUFFER_SIZE`` is 0, for gloo as for NCCL (torch 2.13,
``torch/csrc/distributed/c10d/FlightRecorderDetail.hpp``). A thread answers from a socket in the attempt's directory: a
rank that waits in a collective runs no handler of Python's, but lets other threads run.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from distflow.train.torch_private import named_groups, recorded_collectives

__all__ = ["answer_collectives", "known_collectives", "where"]

_TALK_S = 5.0
_is_answering = False


def answer_collectives() -> None:
    """Answer from now on, in a task of distflow; nothing that goes wrong here ends the rank."""
    global _is_answering  # noqa: PLW0603 (a process answers once, whatever worlds it joins)
    folder = os.environ.get("DISTFLOW_ATTEMPT_DIR")
    if not folder or _is_answering:
        return
    path = f"{folder}/collectives-{os.getpid()}"
    with suppress(OSError):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The address of a socket must be short; a path through a descriptor always is.
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)
            listener.bind(f"/proc/self/fd/{at}/collectives-{os.getpid()}")
        finally:
            os.close(at)
        os.chmod(path, 0o600)
        listener.listen(8)
        threading.Thread(target=_serve, args=(listener,), name="distflow-collectives", daemon=True).start()
        _is_answering = True


def _serve(listener: socket.socket) -> None:
    while True:
        # Ignore attributes that another torch version does not have; they do not affect the rank.
        with suppress(Exception):
            caller, _ = listener.accept()
            with caller:
                caller.settimeout(_TALK_S)
                caller.sendall(json.dumps(known_collectives()).encode())


def known_collectives() -> dict[str, Any]:
    """Return ``rank`` and, of each process group that it is in, ``name``, ``ranks`` and ``where`` it is there.

    Nothing without a world, and where the record does not say whose its entries are: that of gloo with
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` does not (torch 2.13).
    """
    if not dist.is_initialized():
        return {}
    entries = recorded_collectives()
    if any(not entry["process_group"][0] for entry in entries):
        return {}
    return {
        "rank": dist.get_rank(),
        "groups": [
            {
                "name": f"{name} {group.group_desc}" if group.group_desc != "undefined" else name,
                "ranks": ranks,
                **where(entry for entry in entries if entry["process_group"][0] == name),
            }
            for name, group, ranks in named_groups()
        ],
    }


def where(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return ``number`` and ``operation`` of where a rank is in one process group, by its record there.

    That is the first collective that has not ended, else the last one, which ``is_over``; ``entered`` is the number of the
    last one that was begun. Numbers count the group's collectives from 1, alike on all of its ranks; 0 is before the first.
    Sends and receives between two ranks are not among them.
    """
    found = sorted((entry for entry in entries if not entry["is_p2p"]), key=lambda entry: int(entry["record_id"]))
    if not found:
        return {"number": 0, "operation": "", "is_over": True, "entered": 0}
    # For a collective that has ended, gloo only reports that it is retired.
    ended = [bool(entry["retired"]) or entry["state"] == "completed" for entry in found]
    at = ended.index(False) if False in ended else -1
    return {
        "number": int(found[at]["collective_seq_id"]),
        "operation": str(found[at]["profiling_name"]).partition(":")[2] or str(found[at]["profiling_name"]),
        "is_over": ended[at],
        "entered": int(found[-1]["collective_seq_id"]),
    }
