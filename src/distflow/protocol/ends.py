"""How a node describes the end of an attempt, and when that end counts as a failure of its gang."""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

__all__ = [
    "BOTH_DIED",
    "EVICTED",
    "EVICTED_CODE",
    "EXITED",
    "KEEPER_DIED",
    "PEER_FAILED",
    "REASONS",
    "REBOOTED",
    "RELEASED",
    "RUNNER_DIED",
    "START_ERROR",
    "START_TIMEOUT",
    "STOPPED",
    "UNATTENDED",
    "Ranges",
    "code_of",
    "counts_as_failure",
    "is_in",
]

EXITED = "exited"
"""The command ended by itself: with an exit code, or by a signal that distflow did not send."""
STOPPED = "stopped"
"""distflow stopped it."""
START_ERROR = "start_error"
"""The command could not be started."""
START_TIMEOUT = "start_timeout"
"""The lease expired before the order to start."""
RELEASED = "released"
"""The lease was given back before the order to start."""
PEER_FAILED = "peer_failed"
"""The node stopped it because another task of its gang failed."""
UNATTENDED = "unattended"
"""The node stopped it after a long time without contact to the supervisor."""
EVICTED = "evicted"
"""The node stopped it because it used more resources than it had asked for."""
REBOOTED = "rebooted"
"""The node was rebooted while it ran."""
RUNNER_DIED = "runner_died"
"""The runner process was killed, so the keeper stopped the command."""
KEEPER_DIED = "keeper_died"
"""The keeper process was killed, so the runner stopped the command."""
BOTH_DIED = "both_died"
"""Runner and keeper were killed, so the next agent stopped what was left."""

REASONS = (
    EXITED, STOPPED, START_ERROR, START_TIMEOUT, RELEASED, PEER_FAILED, UNATTENDED, EVICTED, REBOOTED, RUNNER_DIED,
    KEEPER_DIED, BOTH_DIED,
)  # fmt: skip

EVICTED_CODE = 3004
"""The exit code of an evicted task in ``exitActions``, as in OSMO."""

Ranges = Sequence[Tuple[int, int]]
"""Ranges of exit codes, both ends included."""


def is_in(code: int, ranges: Ranges) -> bool:
    """Return whether a code is in one of the ranges."""
    return any(first <= code <= last for first, last in ranges)


def code_of(exit_code: Optional[int], signal: Optional[int]) -> Optional[int]:
    """Return the exit code of a command as a shell reports it: 128 + n when signal n ended it."""
    return exit_code if signal is None else 128 + signal


def counts_as_failure(reason: str, code: Optional[int], success: Ranges, failure: Ranges) -> bool:
    """Return whether an end stops the gang.

    ``code`` is that of ``code_of``. ``success`` and ``failure`` are the codes that the spec's ``exitActions`` name; for other
    codes, 0 is a success.
    """
    if reason not in (EXITED, EVICTED, START_ERROR):
        return False
    if reason == EVICTED:
        code = EVICTED_CODE
    if code is None or is_in(code, success):
        return False
    return code != 0 or is_in(0, failure)
