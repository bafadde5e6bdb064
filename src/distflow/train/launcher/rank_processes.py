"""The processes of one machine's ranks: wait for all, stop the rest when one fails, say which failed first.

Knows nothing of how they were started; never imports torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from distflow.protocol.error_file import is_symptom
from distflow.train.launcher.error_files import Failure, read_failure

__all__ = ["STOPPED", "End", "Outcome", "RankProcess", "Wake", "end_now", "supervise", "woken"]

STOPPED = 128 + signal.SIGTERM
"""Exit code of a process that was asked to stop, and did: 143."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_POLL_S = 1.0
"""A child's end wakes the launcher at once; this is for the case that its signal was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A started process. It leads a process group of its own."""

    rank: int
    """Global rank."""
    pid: int
    poll: Callable[[], int | None]
    """Its exit code, minus the signal's number when a signal ended it, ``None`` while it runs."""
    error_file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a rank ended."""

    rank: int
    pid: int
    code: int
    """Exit code, or minus a signal's number; 1 when it was ended after it had raised an exception."""
    seen_ns: int
    """When the launcher saw it, by the clock of the file system of the error files, in nanoseconds."""
    was_told: bool
    """It had been sent SIGTERM by the launcher."""
    was_killed: bool
    """It had been sent SIGKILL by the launcher."""
    failure: Failure | None
    """Its error file."""

    @property
    def is_stop(self) -> bool:
        """Tell whether it ended on request."""
        return self.failure is None and self.code in (STOPPED, -signal.SIGTERM)

    @property
    def is_failure(self) -> bool:
        """Tell whether it failed by itself."""
        if self.failure is not None:
            return self.code != 0
        # The end of a rank with much memory or a GPU is seen a while after its peers have lost it.
        is_ours = self.was_killed if self.code == -signal.SIGKILL else self.was_told and self.code < 0
        return self.code != 0 and not self.is_stop and not is_ours

    @property
    def exit_code(self) -> int:
        """What a shell would show."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def how(self) -> str:
        """Return ``exit code 1`` or ``SIGKILL``."""
        return f"exit code {self.code}" if self.code >= 0 else _signal_name(-self.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the ranks of this machine ended."""

    exit_code: int
    """0, that of the first failure, or 143 (130 after Ctrl-C, and so on) when they were stopped."""
    first: End | None
    """The failure to blame."""


def end_now(ranks: Iterable[RankProcess]) -> None:
    """Kill ranks, with all that they started in their groups, and wait for their end."""
    for rank in ranks:
        _kill(rank)
        while rank.poll() is None:
            os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)


def supervise(ranks: Sequence[RankProcess], wake: Wake, *, stop_grace_s: float, failure_grace_s: float) -> Outcome:
    """Wait for the end of all ranks.

    When one fails, the others get SIGTERM and, after ``failure_grace_s``, their process groups SIGKILL. A rank fails when it
    leaves an error file, even if it then hangs on its way out. SIGTERM, SIGINT,
    SIGHUP and SIGQUIT to this process are passed on, each rank as SIGTERM, and they have ``stop_grace_s`` to end; so have
    they when one of them ends with 143, which is how a rank says that it was asked to stop. ``wake`` is of ``woken()``, from
    before the first rank was started: what comes while they start is a request to them, too.
    """
    watch = _Watch(ranks)
    while watch.running:
        wake.wait(watch.wait_s())
        watch.look()
        if wake.signals and watch.asked is None:
            watch.asked = wake.signals[0]
            watch.stop(stop_grace_s)
        elif watch.first_failure() is not None or watch.has_raised():
            watch.stop(failure_grace_s, sooner=True)
        elif any(end.is_stop for end in watch.ends):
            watch.stop(stop_grace_s)
        watch.kill_late()
    watch.sweep()
    return watch.outcome()


class _Watch:
    """What is known of the ranks while they run."""

    def __init__(self, ranks: Sequence[RankProcess]) -> None:
        self.running = list(ranks)
        self.ends: list[End] = []
        self.asked: int | None = None
        """The signal that asked this process to stop."""
        self._all = tuple(ranks)
        self._deadline: float | None = None
        """When the rest is killed, on the monotonic clock."""
        self._was_told = self._was_killed = False

    def wait_s(self) -> float:
        return _POLL_S if self._deadline is None else min(_POLL_S, max(0.0, self._deadline - time.monotonic()))

    def look(self) -> None:
        """Take in who has ended."""
        for rank in tuple(self.running):
            code = rank.poll()
            if code is not None:
                self.running.remove(rank)
                seen_ns, failure = _now_ns(rank.error_file.parent), read_failure(rank.error_file)
                if failure is not None and self._was_told and code < 0:
                    code = 1
                end = End(
                    rank=rank.rank, pid=rank.pid, code=code, seen_ns=seen_ns, was_told=self._was_told,
                    was_killed=self._was_killed, failure=failure,
                )  # fmt: skip
                self.ends.append(end)

    def has_raised(self) -> bool:
        """Tell whether a rank has left its error file, and still runs."""
        return any(rank.error_file.exists() for rank in self.running)

    def stop(self, grace_s: float, *, sooner: bool = False) -> None:
        """Ask the rest to end, once; ``sooner`` may bring the end of their grace forward."""
        deadline = time.monotonic() + grace_s
        if self._deadline is None:
            self._deadline = deadline
            self._was_told = True
            for rank in self.running:
                if not rank.error_file.exists():  # it is on its way out, and may have something to flush
                    _send(os.kill, rank.pid, signal.SIGTERM)
        elif sooner:
            self._deadline = min(self._deadline, deadline)

    def kill_late(self) -> None:
        """Kill those that had their time, with all that they started in their groups."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._was_killed = True
            for rank in self.running:
                _kill(rank)

    def sweep(self) -> None:
        """Kill what ended ranks left in their groups."""
        for rank in self._all:
            _send(os.killpg, rank.pid, signal.SIGKILL)

    def first_failure(self) -> End | None:
        """Return the failure to blame: what only reports the loss of a peer comes after what does not.

        A process takes a while to end after its exception, and its peers notice before that: so it counts when the error
        file was written.
        """
        failures = [end for end in self.ends if end.is_failure]
        return min(failures, key=_blame, default=None)

    def outcome(self) -> Outcome:
        first = self.first_failure()
        is_stop = self.asked is not None or any(end.is_stop and not end.was_told for end in self.ends)
        if is_stop and first is not None and first.failure is not None and is_symptom(first.failure.report.message):
            first = None  # a peer that stopped a moment earlier
        if first is not None:
            return Outcome(exit_code=first.exit_code, first=first)
        if any(end.code for end in self.ends):
            return Outcome(exit_code=STOPPED if self.asked is None else 128 + self.asked, first=None)
        return Outcome(exit_code=0, first=None)


def _blame(end: End) -> tuple[bool, int]:
    if end.failure is None:
        return False, end.seen_ns
    return is_symptom(end.failure.report.message), end.failure.written_ns


def _now_ns(folder: Path) -> int:
    """Return the time by the clock of a file system, which may be another machine's."""
    try:
        os.utime(folder)
        return folder.stat().st_mtime_ns
    except OSError:
        return time.time_ns()


class Wake:
    """Waits for signals to this process."""

    def __init__(self, reader: int) -> None:
        self._reader = reader
        self.signals: list[int] = []
        """Requests to stop, in their order."""

    def wait(self, timeout_s: float) -> None:
        """Wait for the next signal, whatever it is, at most for so long."""
        if select.select([self._reader], [], [], timeout_s)[0]:
            self.signals += [number for number in os.read(self._reader, 4096) if number in _STOPS]


@contextlib.contextmanager
def woken() -> Iterator[Wake]:
    """Turn signals into bytes that can be waited for, and leave the handlers as they were. For the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def ignore(_number: int, _frame: FrameType | None) -> None:
        """The byte in the pipe says it all."""

    # A process that ignores SIGHUP was started with nohup, and must outlive its terminal.
    taken = [number for number in _STOPS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    # Never is a signal taken of which no byte tells.
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = {number: signal.signal(number, ignore) for number in (signal.SIGCHLD, *taken)}
    try:
        yield Wake(reader)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(reader)
        os.close(writer)


def _kill(rank: RankProcess) -> None:
    """Kill a rank that has not been seen to end, also before it leads a group."""
    _send(os.killpg, rank.pid, signal.SIGKILL)
    _send(os.kill, rank.pid, signal.SIGKILL)


def _send(how: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        how(pid, number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
