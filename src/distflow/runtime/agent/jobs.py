"""Slow work in a forked child: the agent has one thread, and its heartbeat must not wait for a disk."""

from __future__ import annotations

import json
import os
import signal
from typing import Callable, NoReturn, Tuple, Union

from distflow.runtime import processes
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import MAX_LINE, Json, OpError

__all__ = ["fork_job", "outcome", "read_result"]


def fork_job(work: Callable[[], Json]) -> Tuple[int, int]:
    """Run ``work`` in a child that dies with this process. Returns the child's id and a descriptor to read its result."""
    read, write = os.pipe()
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _run(work, write, parent)
    except OSError:
        os.close(read)
        os.close(write)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(write)
    os.set_blocking(read, False)
    return pid, read


def outcome(work: Callable[[], Json]) -> Union[Json, OpError]:
    """Return the result of ``work``, or its failure as an ``OpError``."""
    try:
        return work()
    except OpError as error:
        return error
    except OSError as error:
        return OpError.from_os(error, "it failed")
    except Exception as error:  # whatever it is, the supervisor must get a reply
        return OpError("internal", repr(error))


def _run(work: Callable[[], Json], write: int, parent: int) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        processes.reset_signals()
        processes.close_all_but({write})
        processes.reset_limits()
        if processes.die_with_parent(signal.SIGKILL, parent):
            processes.rename_self("df-job")
            result = outcome(work)
            reply = {"ok": False, "error": result.as_json()} if isinstance(result, OpError) else {"ok": True, "result": result}
            with os.fdopen(write, "w", encoding="utf-8") as pipe:
                json.dump(reply, pipe)
    finally:
        os._exit(0)


def read_result(text: bytes) -> Json:
    """Decode a child's result. Raises the ``OpError`` with which the work failed."""
    try:
        result = decode_object(text, max_bytes=MAX_LINE)
    except ValueError as error:
        raise OpError("internal", "the child that did the work was killed") from error
    if not result.get("ok"):
        raise OpError(result["error"]["kind"], result["error"]["message"])
    value = result["result"]
    return value if isinstance(value, dict) else {"result": value}
