"""How a node describes the end of an attempt, and which ends are failures."""

from __future__ import annotations

import enum

from distflow.protocol.light_typing import Optional, Sequence, Tuple

__all__ = [
    "EVICTED_CODE",
    "EndReason",
    "Ranges",
    "code_of",
    "counts_as_failure",
    "is_in",
    "signal_name",
]


class EndReason(str, enum.Enum):
    """Why an attempt ended."""

    EXITED = "exited"
    """The command ended by itself: with an exit code, or by a signal that distflow did not send."""
    STOPPED = "stopped"
    """The attempt was stopped on request, or because its keeper received SIGTERM."""
    START_ERROR = "start_error"
    """The command, or its container, could not be started."""
    START_TIMEOUT = "start_timeout"
    """The lease expired before the supervisor started the command."""
    RELEASED = "released"
    """The supervisor released the lease before it started the command."""
    PEER_FAILED = "peer_failed"
    """The node stopped it because another task of its gang failed."""
    UNATTENDED = "unattended"
    """The node stopped it after a long time without contact to the supervisor."""
    EVICTED = "evicted"
    """The node or the kernel stopped it because it used more memory than it had requested."""
    REBOOTED = "rebooted"
    """The node was rebooted before the attempt had ended."""
    RUNNER_DIED = "runner_died"
    """The runner process died, so the keeper stopped the command."""
    KEEPER_DIED = "keeper_died"
    """The keeper process died, so the runner stopped the command."""
    BOTH_DIED = "both_died"
    """Runner and keeper died, so an agent killed the remaining processes."""
    ALLOCATION_OVER = "allocation_over"
    """The cluster engine ended the allocation of the attempt's node. The supervisor sets this reason, never a node."""
    UNKNOWN = "unknown"
    """The node reported a reason that this version of distflow does not know. Nodes never write this value."""

    @classmethod
    def of(cls, value: object) -> EndReason:
        """Return the member with this value; ``UNKNOWN`` for any other value."""
        return next((reason for reason in cls if reason.value == value), cls.UNKNOWN)

    def __str__(self) -> str:
        """Return the value. Without this method, the text would depend on the version of Python."""
        return str(self.value)


EVICTED_CODE = 3004
"""The exit code of an evicted task in ``exitActions``, as in OSMO."""

Ranges = Sequence[Tuple[int, int]]
"""Ranges of exit codes, both ends included."""


def is_in(code: int, ranges: Ranges) -> bool:
    """Return whether a code is in one of the ranges."""
    return any(first <= code <= last for first, last in ranges)


def code_of(exit_code: Optional[int], signal: Optional[int]) -> Optional[int]:
    """Return the exit code of a command as a shell reports it: 128 + n when signal n ended it. None if it has neither."""
    return exit_code if signal is None else 128 + signal


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL``; ``signal 50`` for a number without a name."""
    import signal  # takes 1 ms, and few tasks end by a signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal {}".format(number)


def counts_as_failure(reason: EndReason, code: Optional[int], success: Ranges, failure: Ranges) -> bool:
    """Return whether the end of an attempt is a failure by the spec's ``exitActions``.

    Only an end by itself, an eviction or a start error can be a failure. ``code`` is the result of ``code_of``. If it is None,
    only an eviction can be a failure. ``success`` and ``failure`` are the codes in the spec's ``exitActions``. Of all other
    codes, only 0 is a success.
    """
    if reason not in (EndReason.EXITED, EndReason.EVICTED, EndReason.START_ERROR):
        return False
    if reason is EndReason.EVICTED:
        code = EVICTED_CODE
    if code is None or is_in(code, success):
        return False
    return code != 0 or is_in(0, failure)
