"""The agent's single thread: descriptors, timers, child processes and jobs."""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import time
from typing import Callable, List, Set, Tuple, Union

from distflow.runtime import processes
from distflow.runtime.agent.jobs import fork_job, outcome, read_result
from distflow.runtime.wire import Json, OpError

__all__ = ["Loop"]

_MAX_PAUSE_S = 3600.0  # epoll's timeout is limited


class Loop:
    """Callbacks on a selector.

    Nothing is polled: the loop sleeps until a descriptor is ready, a child ends or a timer expires.
    """

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
        """Call back when ``fd`` is ready. For a watched ``fd``, the events are replaced; events 0 end the watch."""
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
        """Run ``work`` in a child, or here if it is quick (a fork costs milliseconds).

        ``done`` gets the result or the error.
        """
        if is_quick:
            done(outcome(work))
            return
        try:
            pid, fd = fork_job(work)
        except OSError as error:
            done(OpError.from_os(error, "no process could be made"))
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
                result = read_result(bytes(text))
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
