"""Which collective each rank of an attempt is at, by the word of those that answer: ranks of ``distflow.train``.

Each listens at a socket ``collectives-<pid>`` in the attempt's directory, and answers whoever connects with one JSON document.
What a rank says is the task's own word: it is shaped here, and of anything else nothing is told.
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
"""For one whose turn comes late: its answer has arrived by then, if it gave one."""
_MOST_BYTES = 256 * 1024
_MOST_GROUPS = 64
_LONGEST_NAME = 100


def ask(directory: str) -> List[Json]:
    """What every rank says that answers in time, by rank."""
    try:
        names = sorted(name for name in os.listdir(directory) if name.startswith(_NAME))
        # An address of a socket is short; a path through a descriptor always is.
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
    """An answer as it is to be; None for one that is not."""
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
    except OSError:  # its process has gone
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
        except (OSError, ValueError):  # it holds the interpreter, or is just ending
            pass
    return None
