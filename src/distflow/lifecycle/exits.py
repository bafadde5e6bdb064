"""Exit codes in OSMO's ranges, and the actions that a spec assigns to them (``exitActions``). This module does no I/O.

Codes from 0 to 255 are the command's own (128 + n when signal n ended it). Other causes have other codes: 302 for images, 2xxx
for data, 3xxx for most others, such as lost nodes, memory, the start and dependencies. A cancellation,
``exec_timeout``, ``queue_timeout``, a refused submission and the failure of another task of the group have no code, so no
action applies to them. Nor does an action apply to a group that ends before it has nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType

from msgspec import Struct

from distflow.errors import InvalidValue
from distflow.lifecycle.states import Reason
from distflow.protocol import ends

__all__ = [
    "CODES",
    "Action",
    "Codes",
    "ExitActions",
    "action_of",
    "exit_code_of",
    "exit_text",
    "overlap",
    "parse_codes",
]

CODES: Mapping[Reason, int | None] = MappingProxyType(
    {
        Reason.EXIT_CODE: None,  # the command's own
        Reason.SIGNAL: None,  # 128 + its number
        Reason.OOM_KILLED: 3004,
        Reason.PEER_FAILED: None,
        Reason.EXEC_TIMEOUT: None,
        Reason.QUEUE_TIMEOUT: None,
        Reason.START_ERROR: 3003,
        Reason.START_TIMEOUT: 3005,
        Reason.NODE_LOST: 3001,
        Reason.UPSTREAM: 3000,
        Reason.CANCELED: None,
        Reason.SUBMISSION: None,
        Reason.IMAGE_PULL: 302,
        Reason.EVICTED: ends.EVICTED_CODE,
        Reason.PREEMPTED: 3006,
        Reason.DATA: 2012,
        Reason.INTERNAL: 3002,
    }
)
"""The code of each reason; ``None`` for reasons with the command's own code or without a code."""

_LARGEST = 9999
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")

Codes = tuple[tuple[int, int], ...]
"""Ranges of exit codes, both ends included."""


class Action(str, Enum):
    """The effect of an exit code on a task or its group."""

    COMPLETE = "COMPLETE"
    """It counts as a success."""
    FAIL = "FAIL"
    """It counts as a failure, also with code 0."""
    RESCHEDULE = "RESCHEDULE"
    """The group is retried, as often as its ``retry`` allows."""


class ExitActions(Struct, frozen=True, kw_only=True):
    """A task's ``exitActions``. A code has at most one action."""

    complete: Codes = ()
    fail: Codes = ()
    reschedule: Codes = ()

    def action(self, code: int | None) -> Action | None:
        """Return the spec's action for a code; ``None`` if it has none."""
        if code is None:
            return None
        for action, ranges in self.by_action().items():
            if ends.is_in(code, ranges):
                return action
        return None

    @property
    def failures(self) -> Codes:
        """The codes that count as failures. 0 may be one of them."""
        return (*self.fail, *self.reschedule)

    def by_action(self) -> dict[Action, Codes]:
        """Return the codes of each action."""
        return {Action.COMPLETE: self.complete, Action.FAIL: self.fail, Action.RESCHEDULE: self.reschedule}


def parse_codes(text: str) -> Codes:
    """Return the codes of a text such as ``0,1-10,16``. Raises ``InvalidValue``."""
    hint = "write codes and ranges without spaces, such as `0,1-10,16`"
    found = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise InvalidValue(f"`{part}` is not an exit code or a range of exit codes", hint)
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise InvalidValue(f"the range `{part}` is empty", f"write `{last}-{first}`")
        if last > _LARGEST:
            raise InvalidValue(
                f"`{last}` is not an exit code: the largest is {_LARGEST}",
                "write 0-255 for exit codes of the command, or a code of distflow such as 2012 or 3001 (docs/retries.md)",
            )
        found.append((first, last))
    return tuple(found)


def overlap(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> int | None:
    """Return the smallest code that both have; ``None`` if they have no code in common."""
    shared = [max(first, low) for first, last in one for low, high in other if max(first, low) <= min(last, high)]
    return min(shared, default=None)


def exit_code_of(reason: Reason | None, exit_code: int | None, signal: int | None, *, has_run: bool) -> int | None:
    """Return the code of a task's end in OSMO's ranges; ``None`` for an end without a code, such as a cancellation.

    ``exit_code`` and ``signal`` are the command's own. A failed transfer of data has the code 2010 before the command has run,
    and 2012 afterwards.
    """
    if reason is None or reason is Reason.EXIT_CODE:
        return exit_code
    if reason is Reason.SIGNAL:
        return ends.code_of(None, signal)
    if reason is Reason.DATA and not has_run:
        return 2010
    return CODES[reason]


def action_of(
    actions: ExitActions, reason: Reason | None, exit_code: int | None, signal: int | None, *, has_run: bool
) -> Action | None:
    """Return the spec's action for a task's end. The arguments are those of ``exit_code_of``.

    A kill for lack of memory has the code 3004. If the spec has no action for it, the command's own code decides (137 after
    SIGKILL), so that a retry does not depend on whether the node's kernel log is readable.
    """
    found = actions.action(exit_code_of(reason, exit_code, signal, has_run=has_run))
    if found is None and reason is Reason.OOM_KILLED:
        found = actions.action(
            exit_code_of(Reason.EXIT_CODE if signal is None else Reason.SIGNAL, exit_code, signal, has_run=True)
        )
    return found


def exit_text(exit_code: int | None, signal: int | None) -> str:
    """Return ``exit code 1`` or ``SIGKILL``, and an empty text if neither is known."""
    if signal is not None:
        return ends.signal_name(signal)
    return f"exit code {exit_code}" if exit_code is not None else ""
