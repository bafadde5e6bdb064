"""Supervise the rank processes of one machine: wait for all, stop the rest when one fails, and report the first failure.

This module does not depend on how the processes were started, and never imports torch.
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
from distflow.train.launcher.rank import Failure, read_failure

__all__ = ["STOPPED", "End", "Outcome", "RankProcess", "Wake", "end_now", "supervise", "woken"]

STOPPED = 128 + signal.SIGTERM
"""Exit code of a process that was asked to stop, and did: 143."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_POLL_S = 1.0
"""A child's end wakes the launcher at once; this is for the case that its signal was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A started process, which leads its own process group."""

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
    was_asked: bool
    """Whether the launcher had sent it SIGTERM."""
    was_killed: bool
    """Whether the launcher had sent it SIGKILL."""
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
        # A rank with much memory or a GPU takes a while to end, so its peers may lose it before the launcher sees its end.
        is_ours = self.was_killed if self.code == -signal.SIGKILL else self.was_asked and self.code < 0
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
    """Kill ranks with their process groups, and wait for their end."""
    for rank in ranks:
        _kill(rank)
        while rank.poll() is None:
            os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)


def supervise(ranks: Sequence[RankProcess], wake: Wake, *, stop_grace_s: float, failure_grace_s: float) -> Outcome:
    """Wait for the end of all ranks.

    When one rank fails, the others get SIGTERM and, after ``failure_grace_s``, their process groups get SIGKILL. A rank that
    writes an error file has failed, even if it then hangs before its exit. SIGTERM, SIGINT, SIGHUP and SIGQUIT to this
    process are passed on to each rank as SIGTERM, and the ranks have ``stop_grace_s`` to end. They have the same time when
    one of them ends with 143, the exit code of a rank that was asked to stop. Enter ``woken()``, which yields ``wake``,
    before you start the first rank, so that a signal during the start also stops the ranks.
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
    """The state of the ranks while they run."""

    def __init__(self, ranks: Sequence[RankProcess]) -> None:
        self.running = list(ranks)
        self.ends: list[End] = []
        self.asked: int | None = None
        """The signal that asked this process to stop."""
        self._all = tuple(ranks)
        self._deadline: float | None = None
        """When the rest is killed, on the monotonic clock."""
        self._was_asked = self._was_killed = False

    def wait_s(self) -> float:
        return _POLL_S if self._deadline is None else min(_POLL_S, max(0.0, self._deadline - time.monotonic()))

    def look(self) -> None:
        """Record the ranks that have ended."""
        for rank in tuple(self.running):
            code = rank.poll()
            if code is not None:
                self.running.remove(rank)
                seen_ns, failure = _now_ns(rank.error_file.parent), read_failure(rank.error_file)
                if failure is not None and self._was_asked and code < 0:
                    code = 1
                end = End(
                    rank=rank.rank, pid=rank.pid, code=code, seen_ns=seen_ns, was_asked=self._was_asked,
                    was_killed=self._was_killed, failure=failure,
                )  # fmt: skip
                self.ends.append(end)

    def has_raised(self) -> bool:
        """Return whether a running rank has already written its error file."""
        return any(rank.error_file.exists() for rank in self.running)

    def stop(self, grace_s: float, *, sooner: bool = False) -> None:
        """Ask the remaining ranks to end, once. With ``sooner``, a later call may shorten their grace period."""
        deadline = time.monotonic() + grace_s
        if self._deadline is None:
            self._deadline = deadline
            self._was_asked = True
            for rank in self.running:
                if not rank.error_file.exists():  # it is about to exit, and may have output to flush
                    _send(os.kill, rank.pid, signal.SIGTERM)
        elif sooner:
            self._deadline = min(self._deadline, deadline)

    def kill_late(self) -> None:
        """Kill the remaining ranks with their process groups when the grace period is over."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._was_killed = True
            for rank in self.running:
                _kill(rank)

    def sweep(self) -> None:
        """Kill the remaining processes in the groups of ended ranks."""
        for rank in self._all:
            _send(os.killpg, rank.pid, signal.SIGKILL)

    def first_failure(self) -> End | None:
        """Return the failure to blame. Failures that only report the loss of a peer come last.

        A process takes a while to end after its exception, and its peers notice the exception earlier. Therefore the time
        at which the error file was written counts.
        """
        failures = [end for end in self.ends if end.is_failure]
        return min(failures, key=_blame, default=None)

    def outcome(self) -> Outcome:
        first = self.first_failure()
        is_stop = self.asked is not None or any(end.is_stop and not end.was_asked for end in self.ends)
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
    """Return the time of a file system, whose clock may be that of another machine."""
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
        """Wait for the next signal of any kind, up to a timeout."""
        if select.select([self._reader], [], [], timeout_s)[0]:
            self.signals += [number for number in os.read(self._reader, 4096) if number in _STOPS]


@contextlib.contextmanager
def woken() -> Iterator[Wake]:
    """Turn signals into bytes that can be waited for, and leave the handlers as they were. For the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def ignore(_number: int, _frame: FrameType | None) -> None:
        """Do nothing: the byte in the pipe reports the signal."""

    # A process that ignores SIGHUP was started with nohup, and must outlive its terminal.
    taken = [number for number in _STOPS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    # Set this before the handlers, so that each handled signal writes a byte.
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
    """Kill a rank that may still run, even if it does not lead a process group yet."""
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
