"""The attempts that one agent watches. The *pair* of an attempt is its runner and its keeper, to which the agent connects."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import socket
import time

from distflow.protocol.light_typing import Callable, Dict, List, Optional, Union
from distflow.runtime import processes
from distflow.runtime.agent.loop import Loop
from distflow.runtime.cleanup import orphans
from distflow.runtime.clock import now
from distflow.runtime.files import attempts, records
from distflow.runtime.guard import command, control
from distflow.runtime.wire import Json, LineReader, OpError, OutQueue, encode

__all__ = ["Watch", "Watches"]


_STUCK_S = 5.0
_CHECK_S = 1.0


class Watch:
    """One watched attempt."""

    def __init__(self, attempt: str, directory: str) -> None:
        self.attempt = attempt
        self.directory = directory
        self.link: Optional[_PairLink] = None
        self.reported: Optional[Json] = None
        """The status that was reported last."""
        self.is_new = False
        """Whether the attempt's pair is starting, and has not sent its first message yet."""
        self.heartbeat_at = 0.0
        """Modification time of the heartbeat file when it was last reported, in seconds since the epoch."""
        self.keeper: Optional[int] = None
        """The keeper's process id, once this agent has connected to the pair."""
        self.on_up: List[Callable[[], None]] = []
        """Called when the pair has sent its first message, or has ended without one."""
        self.on_gone: List[Callable[[], None]] = []
        """Called when runner and keeper are gone and the attempt's files are final."""
        self.is_unresponsive = False
        """Whether the pair accepts no connection, and the agent is finding out why."""
        self.stopped: Optional[Json] = None
        """Cause and time of the first stop request that this agent got."""


class Watches:
    """All watched attempts.

    ``push(event)`` sends an event. ``on_output(attempt, has_ended)`` is called when an attempt may have new output, for the
    last time after it has ended.
    """

    def __init__(self, loop: Loop, root: str, push: Callable[[Json], None], on_output: Callable[[str, bool], None]) -> None:
        self._loop = loop
        self._root = root
        self._push = push
        self._on_output = on_output
        self._watches: Dict[str, Watch] = {}

    def get(self, attempt: str) -> Watch:
        """Return the watch of an attempt, which is created and connected if necessary."""
        watch = self._watches.get(attempt)
        if watch is None:
            watch = self._watches[attempt] = Watch(attempt, attempts.directory_of(self._root, attempt))
        if watch.link is None and not watch.is_unresponsive and self.status(watch)["phase"] not in ("absent", "ended"):
            self._connect(watch)
        return watch

    def expect(self, attempt: str, on_up: Callable[[], None]) -> None:
        """Watch an attempt whose pair is starting. ``on_up`` is called when the pair responds, or when it has ended."""
        watch = self._watches.get(attempt)
        if watch is None or not watch.is_new:
            self.forget(attempt)
            watch = self._watches[attempt] = Watch(attempt, attempts.directory_of(self._root, attempt))
            watch.is_new = True
        watch.on_up.append(on_up)
        if watch.link is None and not watch.is_unresponsive:
            self._connect(watch)

    def forget(self, attempt: str) -> None:
        """Stop watching an attempt."""
        watch = self._watches.pop(attempt, None)
        if watch is not None and watch.link is not None:
            watch.link.close()

    def forget_workflow(self, workflow: str) -> None:
        """Stop watching the attempts of a workflow."""
        for attempt in [name for name in self._watches if name.split("/")[0] == workflow]:
            self.forget(attempt)

    def status(self, watch: Watch) -> Json:
        """Return the attempt's current status from its files."""
        return attempts.read_status(watch.directory)

    def report_changes(self, watch: Watch) -> None:
        """Read the attempt's files and report changes."""
        status = self.status(watch)
        if self._watches.get(watch.attempt) is watch and status != watch.reported:
            watch.reported = status
            self._push({"event": "status", "attempt": watch.attempt, "status": status, "at": now()})
        self._on_output(watch.attempt, status["phase"] == "ended")

    def report_heartbeats(self) -> None:
        """Report every attempt with a connected pair whose heartbeat has changed since its last report."""
        for watch in self._watches.values():
            if watch.link is None:
                continue
            try:
                at = os.stat(os.path.join(watch.directory, command.HEARTBEAT), follow_symlinks=False).st_mtime
            except OSError:
                continue
            if at != watch.heartbeat_at:
                watch.heartbeat_at = at
                self._push({"event": "beat", "attempt": watch.attempt, "age_s": max(0.0, now() - at)})

    def resume_or_kill_suspended(self, watch: Watch, grace_s: float) -> None:
        """Until the pair is gone, resume its runner and keeper if suspended (SIGSTOP), and kill them if that does not help.

        Without this, a stop would wait forever, and so would the gang. The runner ends processes that the keeper leaves. This
        agent ends processes that both leave (``_end_orphans``, ``orphans.settle``). A keeper that is busy but not suspended is
        not killed, because only the keeper knows how its command ended. It may query a GPU driver for longer than any grace
        period.
        """
        kill_at = time.monotonic() + grace_s + _STUCK_S

        def check() -> None:
            state = records.read_state(watch.directory) or {}
            if self._watches.get(watch.attempt) is not watch or not orphans.is_pair_alive(state):
                return
            for name in ("runner", "keeper"):  # in this order: a suspended runner could not end the processes of a dead keeper
                identity = state.get(name) or {}
                process = processes.read_process(identity.get("pid", 0))
                if process is not None and process.start == identity.get("start") and process.state in "Tt":
                    _signal(process.pid, signal.SIGCONT if time.monotonic() < kill_at else signal.SIGKILL)
            self._loop.later(_CHECK_S, check)

        check()

    def note_stop(self, watch: Watch, why: str) -> None:
        """Remember a stop request, in case runner and keeper die before they can record it."""
        watch.stopped = watch.stopped or {"why": why, "stopped_at": now()}

    def stop_by_signal(self, watch: Watch) -> None:
        """Stop a pair that this agent is not connected to, by sending TERM to the keeper."""
        state = records.read_state(watch.directory) or {}
        keeper = state.get("keeper") or {}
        pid = int(keeper.get("pid", 0))
        if state.get("boot_id") == processes.boot_id() and processes.is_alive(pid, int(keeper.get("start", 0))):
            _signal(pid, signal.SIGTERM)

    def end_unreachable(self, watch: Watch) -> None:
        """End the pair of a task that has not run, if it is unreachable, and raise ``TaskIsLocked`` until it has ended."""
        status = self.status(watch)
        if watch.is_unresponsive and status["phase"] != "ended" and status["started_at"] is None:
            self.stop_by_signal(watch)
            raise attempts.TaskIsLocked("runner and keeper of the attempt do not respond")

    # -- links

    def _connect(self, watch: Watch) -> None:
        watch.is_unresponsive = False
        try:
            on_news, on_disconnect = (lambda news: self._on_news(watch, news)), (lambda: self._on_disconnect(watch))
            watch.link = _PairLink(self._loop, watch.directory, on_news, on_disconnect)
        except BlockingIOError:
            watch.is_unresponsive = True
            self._loop.later(0.2, lambda: self._connect(watch))  # no process accepts connections now
        except OSError:
            watch.is_unresponsive = True
            self._check_gone(watch)

    def _on_news(self, watch: Watch, news: str) -> None:
        if news == "output":
            self._on_output(watch.attempt, False)
            return
        if news == "ready":
            watch.keeper = ((records.read_state(watch.directory) or {}).get("keeper") or {}).get("pid")
        self._report_up(watch)
        self.report_changes(watch)

    def _report_up(self, watch: Watch) -> None:
        watch.is_new = False
        callbacks, watch.on_up = watch.on_up, []
        for callback in callbacks:
            callback()

    def _on_disconnect(self, watch: Watch) -> None:
        watch.link = None
        self._connect(watch)

    def _check_gone(self, watch: Watch) -> None:
        """Handle a pair that does not accept connections: find out whether it has ended."""
        state = records.read_state(watch.directory)
        if attempts.read_status(watch.directory)["phase"] in ("ended", "absent") or state is None:
            self._report_gone(watch)
        elif orphans.is_pair_alive(state):
            # The pair is exiting, its socket was removed by hand, or no descriptor was free to connect.
            self._loop.later(0.05, lambda: self._connect(watch))
        else:
            self._end_orphans(watch)

    def _end_orphans(self, watch: Watch) -> None:
        keepers = {one.keeper for one in self._watches.values() if one.keeper is not None and one is not watch}
        if not orphans.kill_adopted_orphans(keepers | self._loop.children):
            self._loop.later(0.005, lambda: self._end_orphans(watch))
            return

        def settled(_result: Union[Json, OpError]) -> None:
            self._report_gone(watch)

        self._loop.job(lambda: orphans.settle(self._root, watch.attempt, watch.stopped), settled)

    def _report_gone(self, watch: Watch) -> None:
        watch.is_unresponsive = False
        self._report_up(watch)
        self.report_changes(watch)
        callbacks, watch.on_gone = watch.on_gone, []
        for callback in callbacks:
            callback()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


_Answered = Callable[[Optional[Json], Optional[OpError]], None]


class _PairLink:
    """Sends requests to the keeper and receives its news.

    ``on_gone`` is called once, when the connection ends. After that, every open request is answered with ``(None, None)``.
    """

    def __init__(self, loop: Loop, directory: str, on_news: Callable[[str], None], on_gone: Callable[[], None]) -> None:
        """Connect. Raises ``OSError`` if neither runner nor keeper is running; ``BlockingIOError`` if they are too busy."""
        self._socket: Optional[socket.socket] = control.connect(directory)
        self._fd = self._socket.fileno()
        self._loop = loop
        self._on_news = on_news
        self._on_gone = on_gone
        self._reader = LineReader()
        self._queue = OutQueue()
        self._numbers = itertools.count(1)
        self._waiting: Dict[int, _Answered] = {}
        loop.watch(self._fd, selectors.EVENT_READ, self._ready)

    def ask(self, request: Json, answered: _Answered) -> None:
        """Send a request. ``answered`` gets the result or the error, or neither if the pair disconnected before."""
        if self._socket is None:
            answered(None, None)
            return
        number = next(self._numbers)
        self._waiting[number] = answered
        self._queue.put(encode(dict(request, id=number)))
        self._write()

    def close(self) -> None:
        """Close the connection without calling ``on_gone``."""
        self._on_gone = lambda: None
        self._gone()

    def _ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write()
        if events & selectors.EVENT_READ and self._socket is not None:
            self._read(self._socket)

    def _write(self) -> None:
        try:
            self._queue.write_to(self._fd)
        except OSError:
            self._queue = OutQueue()  # the next read reports the end of the connection
        self._loop.watch(self._fd, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._queue else 0), self._ready)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
            messages = self._reader.feed(data)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            data, messages = b"", []
        news = []
        for message in messages:
            if "news" in message:
                if message["news"] not in news:
                    news.append(message["news"])
                continue
            answered = self._waiting.pop(message.get("id", 0), None)
            if answered is None:
                continue
            if message.get("ok"):
                answered(message, None)
            else:
                answered(None, OpError.from_json(message.get("error")))
        for item in news:
            self._on_news(item)
        if not data:
            self._gone()

    def _gone(self) -> None:
        if self._socket is None:
            return
        self._loop.watch(self._fd, 0, self._ready)
        self._socket.close()
        self._socket = None
        waiting, self._waiting = self._waiting, {}
        self._on_gone()
        for answered in waiting.values():
            answered(None, None)
