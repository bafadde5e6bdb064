"""Report to the node which collective this rank is in, so that ``distflow workflow stacks`` can compare the ranks.

torch's flight recorder records collectives of gloo and NCCL unless ``TORCH_FR_BUFFER_SIZE`` is 0 (torch 2.13,
``torch/csrc/distributed/c10d/FlightRecorderDetail.hpp``). A thread serves a socket in the attempt's directory, because a rank
that waits in a collective runs no signal handlers of Python, but lets other threads run.
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

__all__ = ["current_collective", "report_collectives", "serve_collectives"]

_SEND_TIMEOUT_S = 5.0
_is_serving = False


def serve_collectives() -> None:
    """Start a thread that serves the socket. Does nothing outside of a distflow task (without ``DISTFLOW_ATTEMPT_DIR``).

    Errors of the socket do not end the rank.
    """
    global _is_serving  # noqa: PLW0603 (a process has one socket for all its worlds)
    folder = os.environ.get("DISTFLOW_ATTEMPT_DIR")
    if not folder or _is_serving:
        return
    path = f"{folder}/collectives-{os.getpid()}"
    with suppress(OSError):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The path of a socket must be short. A path through a descriptor always is.
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
        _is_serving = True


def _serve(listener: socket.socket) -> None:
    while True:
        # Ignore errors, such as names that another torch version does not have: they must not affect the rank.
        with suppress(Exception):
            caller, _ = listener.accept()
            with caller:
                caller.settimeout(_SEND_TIMEOUT_S)
                caller.sendall(json.dumps(report_collectives()).encode())


def report_collectives() -> dict[str, Any]:
    """Return this rank's collectives as ``{"rank": …, "groups": […]}``.

    Each group has ``name``, ``ranks`` and the fields of ``current_collective``. The result is empty without a world, and if
    entries lack their group, as in gloo with ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` (torch 2.13).
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
                **current_collective(entry for entry in entries if entry["process_group"][0] == name),
            }
            for name, group, ranks in named_groups()
        ],
    }


def current_collective(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the current collective of a rank in one process group, from the group's recorded entries.

    ``number`` and ``operation`` describe the first collective that has not ended, or else the last one; then ``is_over`` is
    true. ``entered`` is the number of the last collective that began. Numbers count from 1, and those of a collective are equal
    on all ranks; 0 means that none has begun. Sends and receives between two ranks do not count.
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
