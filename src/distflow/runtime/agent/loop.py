"""The agent's single thread: descriptors, timers, child processes, and jobs.

Slow work is a job in a forked child, because the agent's heartbeat must not wait for a disk.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import selectors
import signal
import time

from distflow.protocol.light_typing import Callable, List, NoReturn, Set, Tuple, Union
from distflow.runtime import processes
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import MAX_LINE, Json, OpError

__all__ = ["Loop"]


_MAX_PAUSE_S = 3600.0  # epoll's timeout is limited


class Loop:
    """An event loop: it sleeps until descriptors are ready, children end or timers expire, and then calls functions."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.is_over = False
        self.children: Set[int] = set()
        """Processes that the agent forked itself: jobs and runners."""
        self._timers: List[Tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        read, write = os.pipe()
        for fd in (read, write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wake = read
        self.selector.register(read, selectors.EVENT_READ, self._on_wakeup)

    def run(self) -> None:
        """Serve until ``is_over``."""
        while not self.is_over:
            pause = min(max(0.0, self._timers[0][0] - time.monotonic()), _MAX_PAUSE_S) if self._timers else None
            for key, events in self.selector.select(pause):
                known = self.selector.get_map().get(key.fd)
                if known is not None and known.data == key.data:  # an earlier callback of this round may have closed it
                    key.data(events)
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Call ``callback`` when ``fd`` is ready. If ``events`` is 0, stop watching it.

        If ``fd`` is watched already, other events and their callback replace the old ones; with the same events, the old
        callback stays.
        """
        known = fd in self.selector.get_map()
        if not events:
            if known:
                self.selector.unregister(fd)
        elif known:
            if self.selector.get_key(fd).events != events:
                self.selector.modify(fd, events, callback)
        else:
            self.selector.register(fd, events, callback)

    def later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call back once, after ``delay_s``."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), callback))

    def job(self, work: Callable[[], Json], done: Callable[[Union[Json, OpError]], None], *, is_quick: bool = False) -> None:
        """Run ``work`` in a child process. Quick work runs in this process, because a fork costs milliseconds.

        ``done`` gets the result or the error.
        """
        if is_quick:
            done(_outcome(work))
            return
        try:
            pid, fd = _fork_job(work)
        except OSError as error:
            done(OpError.from_os(error, "cannot create a process"))
            return
        self.children.add(pid)
        text = bytearray()

        def take(_events: int) -> None:
            try:
                data = os.read(fd, 262144)
            except BlockingIOError:
                return
            if data:
                text.extend(data)
                return
            self.watch(fd, 0, take)
            os.close(fd)
            result: Union[Json, OpError]
            try:
                result = _read_result(bytes(text))
            except OpError as error:
                result = error
            done(result)

        self.watch(fd, selectors.EVENT_READ, take)

    def _on_wakeup(self, _events: int) -> None:
        try:
            os.read(self._wake, 65536)
        except BlockingIOError:
            pass
        ended, _ = processes.reap()
        self.children.difference_update(pid for pid, _ in ended)


def _fork_job(work: Callable[[], Json]) -> Tuple[int, int]:
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


def _outcome(work: Callable[[], Json]) -> Union[Json, OpError]:
    """Return the result of ``work``, or its failure as an ``OpError``."""
    try:
        return work()
    except OpError as error:
        return error
    except OSError as error:
        return OpError.from_os(error, "the operation failed")
    except Exception as error:  # the supervisor must get a reply for every error
        return OpError("internal", repr(error))


def _run(work: Callable[[], Json], write: int, parent: int) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        processes.reset_signals()
        processes.close_all_but({write})
        processes.reset_descriptor_limit()
        if processes.die_with_parent(signal.SIGKILL, parent):
            processes.rename_self("df-job")
            result = _outcome(work)
            reply = {"ok": False, "error": result.as_json()} if isinstance(result, OpError) else {"ok": True, "result": result}
            with os.fdopen(write, "w", encoding="utf-8") as pipe:
                json.dump(reply, pipe)
    finally:
        os._exit(0)


def _read_result(text: bytes) -> Json:
    """Decode a child's result. Raises the ``OpError`` with which the work failed; ``internal`` if there is no result."""
    try:
        result = decode_object(text, max_bytes=MAX_LINE)
    except ValueError as error:
        raise OpError(
            "internal", "the agent's child process for this request sent no valid result; it may have been killed"
        ) from error
    if not result.get("ok"):
        raise OpError.from_json(result["error"])
    value = result["result"]
    return value if isinstance(value, dict) else {"result": value}
