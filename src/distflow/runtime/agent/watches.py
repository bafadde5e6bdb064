"""The attempts that one agent looks after: links to their pairs, what was last told, and what to do when a pair is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Callable, Dict, List, Optional, Union

from distflow.runtime import processes
from distflow.runtime.agent.loop import Loop
from distflow.runtime.agent.pair_link import PairLink
from distflow.runtime.cleanup import orphans
from distflow.runtime.clock import now
from distflow.runtime.files import attempts, records
from distflow.runtime.guard import command
from distflow.runtime.wire import Json, OpError

__all__ = ["Watch", "Watches"]

_STUCK_S = 5.0
_LOOK_S = 1.0


class Watch:
    """One attempt that is looked after."""

    def __init__(self, attempt: str, directory: str) -> None:
        self.attempt = attempt
        self.directory = directory
        self.link: Optional[PairLink] = None
        self.told: Optional[Json] = None
        """The status that the other side knows."""
        self.is_new = False
        """Leased by this agent a moment ago: its pair has not said a word yet."""
        self.beaten_at = 0.0
        """When its heartbeat was touched last, as far as that was told; seconds since the epoch by the node's clock."""
        self.keeper: Optional[int] = None
        self.when_up: List[Callable[[], None]] = []
        """Called when the pair has spoken for the first time, or will never."""
        self.when_gone: List[Callable[[], None]] = []
        """Called when no process of the pair is left and the files say all that they ever will."""
        self.is_leaving = False
        """Nobody answers any more; what that means is being found out."""
        self.stopped: Optional[Json] = None
        """Why and when it was asked to stop first, as far as this agent was asked."""


class Watches:
    """All of them.

    ``push(event)`` sends an event. ``on_output(attempt, has_ended)`` says that there may be more to read of an attempt, for the
    last time when it has ended.
    """

    def __init__(self, loop: Loop, root: str, push: Callable[[Json], None], on_output: Callable[[str, bool], None]) -> None:
        self._loop = loop
        self._root = root
        self._push = push
        self._on_output = on_output
        self._watches: Dict[str, Watch] = {}

    def get(self, attempt: str) -> Watch:
        """Look after an attempt from now on."""
        watch = self._watches.get(attempt)
        if watch is None:
            watch = self._watches[attempt] = Watch(attempt, attempts.directory_of(self._root, attempt))
        if watch.link is None and not watch.is_leaving and self.status(watch)["phase"] not in ("absent", "ended"):
            self._connect(watch)
        return watch

    def expect(self, attempt: str, when_up: Callable[[], None]) -> None:
        """Look after an attempt whose pair was just forked; ``when_up`` is called when it speaks, or when it never will."""
        watch = self._watches.get(attempt)
        if watch is None or not watch.is_new:
            self.forget(attempt)
            watch = self._watches[attempt] = Watch(attempt, attempts.directory_of(self._root, attempt))
            watch.is_new = True
        watch.when_up.append(when_up)
        if watch.link is None and not watch.is_leaving:
            self._connect(watch)

    def forget(self, attempt: str) -> None:
        """Look after it no more."""
        watch = self._watches.pop(attempt, None)
        if watch is not None and watch.link is not None:
            watch.link.close()

    def forget_workflow(self, workflow: str) -> None:
        """Look after none of its attempts any more."""
        for attempt in [name for name in self._watches if name.split("/")[0] == workflow]:
            self.forget(attempt)

    def status(self, watch: Watch) -> Json:
        """What the attempt's files say now."""
        return attempts.read_status(watch.directory)

    def look(self, watch: Watch) -> Json:
        """Read the files and tell what has changed."""
        status = self.status(watch)
        if self._watches.get(watch.attempt) is watch and status != watch.told:
            watch.told = status
            self._push({"event": "status", "attempt": watch.attempt, "status": status, "at": now()})
        self._on_output(watch.attempt, status["phase"] == "ended")
        return status

    def tell_beats(self) -> None:
        """Tell of every running attempt whose heartbeat was touched since this was asked last."""
        for watch in self._watches.values():
            if watch.link is None:
                continue
            try:
                at = os.stat(os.path.join(watch.directory, command.HEARTBEAT), follow_symlinks=False).st_mtime
            except OSError:
                continue
            if at != watch.beaten_at:
                watch.beaten_at = at
                self._push({"event": "beat", "attempt": watch.attempt, "age_s": max(0.0, now() - at)})

    def stop_the_suspended(self, watch: Watch, grace_s: float) -> None:
        """Until the pair is gone: have it go on where somebody suspended it (SIGSTOP), and kill it where that does not help.

        Without this a stop would wait for ever, and so would the gang. What the keeper leaves, the runner ends; what both
        leave, this agent does (``_end_adopted``, ``orphans.settle``). A keeper that is busy is left alone: its command has
        ended, and it alone knows how. A driver that is asked for processes on its GPUs may take longer than any grace.
        """
        last_rung = time.monotonic() + grace_s + _STUCK_S

        def check() -> None:
            state = records.read_state(watch.directory) or {}
            if self._watches.get(watch.attempt) is not watch or not orphans.is_pair_alive(state):
                return
            for name in ("runner", "keeper"):  # in this order: what a keeper leaves, a suspended runner could not end
                one = state.get(name) or {}
                process = processes.read_process(one.get("pid", 0))
                if process is not None and process.start == one.get("start") and process.state in "Tt":
                    _signal(process.pid, signal.SIGCONT if time.monotonic() < last_rung else signal.SIGKILL)
            self._loop.later(_LOOK_S, check)

        check()

    def note_stop(self, watch: Watch, why: str) -> None:
        """Remember that the attempt was asked to stop: should both of its pair die before they can, it is on record so."""
        watch.stopped = watch.stopped or {"why": why, "stopped_at": now()}

    def stop_unheard(self, watch: Watch) -> None:
        """Have a pair stop that cannot be spoken to, as its socket was removed: TERM to a keeper is a stop, too."""
        state = records.read_state(watch.directory) or {}
        keeper = state.get("keeper") or {}
        pid = int(keeper.get("pid", 0))
        if state.get("boot_id") == processes.boot_id() and processes.is_same(pid, int(keeper.get("start", 0))):
            _signal(pid, signal.SIGTERM)

    def end_unreached(self, watch: Watch) -> None:
        """Have the pair of a task that has not run end where it cannot be reached. Raises ``TaskIsLocked`` until then."""
        status = self.status(watch)
        if watch.is_leaving and status["phase"] != "ended" and status["started_at"] is None:
            self.stop_unheard(watch)
            raise attempts.TaskIsLocked("the attempt's two processes cannot be reached")

    # -- links

    def _connect(self, watch: Watch) -> None:
        watch.is_leaving = False
        try:
            heard, lost = (lambda news: self._heard(watch, news)), (lambda: self._lost(watch))
            watch.link = PairLink(self._loop, watch.directory, heard, lost)
        except BlockingIOError:
            watch.is_leaving = True
            self._loop.later(0.2, lambda: self._connect(watch))  # the keeper is dead and the runner, busy, accepts nobody
        except OSError:
            watch.is_leaving = True
            self._check_gone(watch)

    def _heard(self, watch: Watch, news: str) -> None:
        if news == "output":
            self._on_output(watch.attempt, False)
            return
        if news == "ready":
            watch.keeper = ((records.read_state(watch.directory) or {}).get("keeper") or {}).get("pid")
        self._is_up(watch)
        self.look(watch)

    def _is_up(self, watch: Watch) -> None:
        watch.is_new = False
        callbacks, watch.when_up = watch.when_up, []
        for callback in callbacks:
            callback()

    def _lost(self, watch: Watch) -> None:
        watch.link = None
        self._connect(watch)

    def _check_gone(self, watch: Watch) -> None:
        """Nobody answers at the attempt's socket. Find out whether that is its end."""
        state = records.read_state(watch.directory)
        if attempts.read_status(watch.directory)["phase"] in ("ended", "absent") or state is None:
            self._is_gone(watch)
        elif orphans.is_pair_alive(state):
            # On its way out, or its socket was removed by hand, or there was just no descriptor to reach it by.
            self._loop.later(0.05, lambda: self._connect(watch))
        else:
            self._end_adopted(watch)

    def _end_adopted(self, watch: Watch) -> None:
        keepers = {one.keeper for one in self._watches.values() if one.keeper is not None and one is not watch}
        if not orphans.end_adopted(keepers | self._loop.children):
            self._loop.later(0.005, lambda: self._end_adopted(watch))
            return

        def settled(_result: Union[Json, OpError]) -> None:
            self._is_gone(watch)

        self._loop.job(lambda: orphans.settle(self._root, watch.attempt, watch.stopped), settled)

    def _is_gone(self, watch: Watch) -> None:
        watch.is_leaving = False
        self._is_up(watch)
        self.look(watch)
        callbacks, watch.when_gone = watch.when_gone, []
        for callback in callbacks:
            callback()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
