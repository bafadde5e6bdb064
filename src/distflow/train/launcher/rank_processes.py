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

from distflow.protocol.ends import signal_name
from distflow.protocol.error_file import is_symptom
from distflow.train.launcher.rank import Failure, read_failure

__all__ = ["STOPPED", "LaunchOutcome", "RankEnd", "RankProcess", "SignalWaiter", "end_now", "signal_waiter", "supervise"]

STOPPED = 128 + signal.SIGTERM
"""143: the exit code of a process that stopped on request. Its script ends with ``sys.exit(STOPPED)``."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_POLL_S = 1.0
"""Longest time between checks of the ranks, in case the launcher misses the signal that a rank has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A started process, which leads its own process group."""

    rank: int
    """Global rank."""
    pid: int
    poll: Callable[[], int | None]
    """Returns the exit code, the negative signal number if a signal ended the process, or ``None`` while it runs."""
    error_file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How a rank ended."""

    rank: int
    pid: int
    code: int
    """The exit code or the negative signal number; 1 if the launcher ended the rank after the rank had raised an exception."""
    noticed_ns: int
    """When the launcher noticed the end, by the clock of the file system with the error files, in nanoseconds."""
    was_asked: bool
    """Whether the launcher had asked the running ranks to stop."""
    was_killed: bool
    """Whether the launcher had sent SIGKILL."""
    failure: Failure | None

    @property
    def is_stop(self) -> bool:
        """Whether the rank stopped on request."""
        return self.failure is None and self.code in (STOPPED, -signal.SIGTERM)

    @property
    def is_failure(self) -> bool:
        """Whether the rank failed by itself."""
        if self.failure is not None:
            return self.code != 0
        # SIGKILL may also come from the kernel (lack of memory) after the launcher has sent SIGTERM because a peer failed.
        is_by_launcher = self.was_killed if self.code == -signal.SIGKILL else self.was_asked and self.code < 0
        return self.code != 0 and not self.is_stop and not is_by_launcher

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it: 128 plus the number of a signal."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def how(self) -> str:
        """Return a text such as ``exit code 1`` or ``SIGKILL``."""
        return f"exit code {self.code}" if self.code >= 0 else signal_name(-self.code)

    @property
    def message(self) -> str:
        """The message of the rank's exception, or how the rank ended."""
        return self.failure.report.message if self.failure else f"rank {self.rank} ended with {self.how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOutcome:
    """How the ranks of this machine ended."""

    exit_code: int
    """0, the exit code of the first failure, or, after a request to stop, 143 (Ctrl-C: 130, SIGHUP: 129, SIGQUIT: 131)."""
    first: RankEnd | None
    """The first failure, if a rank failed."""


def end_now(ranks: Iterable[RankProcess]) -> None:
    """Kill ranks with their process groups, and wait until they have ended."""
    for rank in ranks:
        _kill(rank)
        while rank.poll() is None:
            os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)


def supervise(
    ranks: Sequence[RankProcess], waiter: SignalWaiter, *, stop_grace_s: float, failure_grace_s: float
) -> LaunchOutcome:
    """Wait until all ranks have ended, then kill the processes that they left behind in their groups.

    When a rank fails or writes an error file, the running ranks get SIGTERM (except those with an error file) and, after
    ``failure_grace_s`` seconds, SIGKILL. The same happens, with ``stop_grace_s``, when this process gets SIGTERM, SIGINT,
    SIGHUP or SIGQUIT, and when a rank stops on request (exit code 143, or SIGTERM). Enter ``signal_waiter()``, which yields
    ``waiter``, before the first rank starts, to lose no signal.
    """
    watch = _Watch(ranks)
    while watch.running:
        waiter.wait(watch.wait_s())
        watch.collect_ends()
        if waiter.signals and watch.stop_signal is None:
            watch.stop_signal = waiter.signals[0]
            watch.stop(stop_grace_s)
        elif watch.first_failure() is not None or watch.has_raised():
            watch.stop(failure_grace_s, sooner=True)
        elif any(end.is_stop for end in watch.ends):
            watch.stop(stop_grace_s)
        watch.kill_late()
    for rank in ranks:  # processes that ended ranks have left behind
        _send(os.killpg, rank.pid, signal.SIGKILL)
    return watch.outcome()


class _Watch:
    """The state of the ranks while they run."""

    def __init__(self, ranks: Sequence[RankProcess]) -> None:
        self.running = list(ranks)
        self.ends: list[RankEnd] = []
        self.stop_signal: int | None = None
        """The signal that asked this process to stop."""
        self._deadline: float | None = None
        """When the running ranks will be killed, on the monotonic clock."""
        self._was_asked = self._was_killed = False

    def wait_s(self) -> float:
        return _POLL_S if self._deadline is None else min(_POLL_S, max(0.0, self._deadline - time.monotonic()))

    def collect_ends(self) -> None:
        """Move the ranks that have ended from ``running`` to ``ends``."""
        for rank in tuple(self.running):
            code = rank.poll()
            if code is not None:
                self.running.remove(rank)
                noticed_ns, failure = _now_ns(rank.error_file.parent), read_failure(rank.error_file)
                if failure is not None and self._was_asked and code < 0:
                    code = 1
                self.ends.append(RankEnd(
                    rank=rank.rank, pid=rank.pid, code=code, noticed_ns=noticed_ns, was_asked=self._was_asked,
                    was_killed=self._was_killed, failure=failure,
                ))  # fmt: skip

    def has_raised(self) -> bool:
        """Return whether a running rank has already written its error file."""
        return any(rank.error_file.exists() for rank in self.running)

    def stop(self, grace_s: float, *, sooner: bool = False) -> None:
        """Send SIGTERM to the running ranks, once. With ``sooner``, a later call may shorten their grace period."""
        deadline = time.monotonic() + grace_s
        if self._deadline is None:
            self._deadline = deadline
            self._was_asked = True
            for rank in self.running:
                # A rank with an error file is about to exit, and may still have to flush its output.
                if not rank.error_file.exists():
                    _send(os.kill, rank.pid, signal.SIGTERM)
        elif sooner:
            self._deadline = min(self._deadline, deadline)

    def kill_late(self) -> None:
        """Kill the running ranks with their process groups if the grace period is over."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._was_killed = True
            for rank in self.running:
                _kill(rank)

    def first_failure(self) -> RankEnd | None:
        """Return the failure that happened first. Failures that only report the loss of another rank come last."""

        def order(end: RankEnd) -> tuple[bool, int]:
            if end.failure is None:
                return False, end.noticed_ns
            # Other ranks may end before a rank that raised first, so compare the times at which error files were written.
            return is_symptom(end.failure.report.message), end.failure.written_ns

        return min((end for end in self.ends if end.is_failure), key=order, default=None)

    def outcome(self) -> LaunchOutcome:
        first = self.first_failure()
        is_stop = self.stop_signal is not None or any(end.is_stop and not end.was_asked for end in self.ends)
        if is_stop and first is not None and first.failure is not None and is_symptom(first.failure.report.message):
            first = None  # the rank only lost another rank, which stopped on request
        if first is not None:
            return LaunchOutcome(exit_code=first.exit_code, first=first)
        if any(end.code for end in self.ends):
            return LaunchOutcome(exit_code=STOPPED if self.stop_signal is None else 128 + self.stop_signal, first=None)
        return LaunchOutcome(exit_code=0, first=None)


def _now_ns(folder: Path) -> int:
    """Return the current time of the clock of a file system, which may be the clock of another machine."""
    try:
        os.utime(folder)
        return folder.stat().st_mtime_ns
    except OSError:
        return time.time_ns()


class SignalWaiter:
    """Waits for signals that this process gets."""

    def __init__(self, reader: int) -> None:
        self._reader = reader
        self.signals: list[int] = []
        """The requests to stop, oldest first."""

    def wait(self, timeout_s: float) -> None:
        """Wait until this process gets a signal, at most ``timeout_s`` seconds."""
        if select.select([self._reader], [], [], timeout_s)[0]:
            self.signals += [number for number in os.read(self._reader, 4096) if number in _STOPS]


@contextlib.contextmanager
def signal_waiter() -> Iterator[SignalWaiter]:
    """Yield a ``SignalWaiter``, and restore the handlers of its signals afterwards. Only the main thread may call this."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def ignore(_number: int, _frame: FrameType | None) -> None:
        """Do nothing: Python writes the number of the signal to the pipe."""

    # A process that ignores SIGHUP was started with nohup, and must outlive its terminal.
    stops = [number for number in _STOPS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    # Set the pipe before the handlers, so that no handled signal is lost.
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = {number: signal.signal(number, ignore) for number in (signal.SIGCHLD, *stops)}
    try:
        yield SignalWaiter(reader)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(reader)
        os.close(writer)


def _kill(rank: RankProcess) -> None:
    """Kill a rank and its process group. A rank that was just started may not lead a group yet."""
    _send(os.killpg, rank.pid, signal.SIGKILL)
    _send(os.kill, rank.pid, signal.SIGKILL)


def _send(kill: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(pid, number)
