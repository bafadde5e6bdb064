"""The current collective of each rank of an attempt, as ranks of ``distflow.train`` report it.

Each rank listens on a socket ``collectives-<pid>`` in the attempt's directory, and sends one JSON document to each connection.
These documents are untrusted: only valid ones are used, in a fixed form.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any, List, Optional

from distflow.runtime.untrusted import decode_json
from distflow.runtime.wire import Json

__all__ = ["ask", "shaped"]

_NAME = "collectives-"
_WAIT_S = 3.0
_LEAST_S = 0.05
"""Minimum time for a rank that is read late: if it answered, its answer has arrived by then."""
_MOST_BYTES = 256 * 1024
_MOST_GROUPS = 64
_LONGEST_NAME = 100


def ask(directory: str) -> List[Json]:
    """Return the answers that arrive in time, sorted by rank."""
    try:
        names = sorted(name for name in os.listdir(directory) if name.startswith(_NAME))
        # Socket addresses must be short; a path through a descriptor always is.
        at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return []
    try:
        callers = [_call("/proc/self/fd/{}/{}".format(at, name)) for name in names]
    finally:
        os.close(at)
    until = time.monotonic() + _WAIT_S
    said = [shaped(_listen(caller, until)) for caller in callers if caller is not None]
    return sorted((one for one in said if one is not None), key=lambda one: int(one["rank"]))


def shaped(said: Any) -> Optional[Json]:
    """Return an answer in the fixed form; None if it is invalid."""
    try:
        groups = [
            {
                "name": str(one["name"])[:_LONGEST_NAME],
                "ranks": [int(rank) for rank in one["ranks"]],
                "number": int(one["number"]),
                "operation": str(one["operation"])[:_LONGEST_NAME],
                "is_over": bool(one["is_over"]),
                "entered": int(one["entered"]),
            }
            for one in said["groups"][:_MOST_GROUPS]
        ]
        return {"rank": int(said["rank"]), "groups": groups}
    except (KeyError, TypeError, ValueError):
        return None


def _call(address: str) -> Optional[socket.socket]:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        caller.connect(address)
        return caller
    except OSError:  # its process is gone
        caller.close()
        return None


def _listen(caller: socket.socket, until: float) -> Any:
    said = b""
    with caller:
        try:
            while len(said) <= _MOST_BYTES:
                caller.settimeout(max(_LEAST_S, until - time.monotonic()))
                more = caller.recv(65536)
                if not more:
                    return decode_json(said.decode("utf-8", "replace"))
                said += more
        except (OSError, ValueError):  # it does not release the interpreter's lock, or it is exiting
            pass
    return None
