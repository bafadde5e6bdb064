"""The input and the result of a diagnosis, as frozen values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import IntEnum
from functools import cached_property

from msgspec import Struct

from distflow.lifecycle.states import Reason

__all__ = ["Diagnosis", "FirstFailure", "GroupOutcome", "Hit", "Level", "TaskOutcome", "hits_in"]

_RANK = re.compile(r"^(?:\[default\d+\]:)?\[rank ?(\d+)\]", re.IGNORECASE)
"""The start of lines that torch prints for a rank after it has joined its world."""


class Level(IntEnum):
    """The distance between a symptom and the cause. The closest symptom is reported."""

    CAUSE = 0
    """The symptom names the cause."""
    STALL = 1
    """The symptom shows that ranks waited for others, which may have died, hung, or never started."""
    BYSTANDER = 2
    """The symptom only shows that another process disappeared."""


class TaskOutcome(Struct, frozen=True, kw_only=True):
    """One attempt of a task: its output and its end."""

    task: str
    node: str = ""
    ranks: range = range(0)
    """The task's global ranks; empty without a world."""
    lines: tuple[str, ...] = ()
    """The last lines of its output, without those of torchrun, and then the message in its error file."""
    kernel: tuple[str, ...] = ()
    """Lines of its node's kernel log."""
    reason: Reason | None = None
    exit_code: int | None = None
    signal: int | None = None

    @property
    def place(self) -> str:
        """The task and its node, such as ``worker on gpu2``."""
        return f"{self.task} on {self.node}" if self.node else self.task


class FirstFailure(Struct, frozen=True, kw_only=True):
    """The failure that distflow recorded or found as the first cause."""

    task: str
    rank: str = ""
    """The rank that failed, or all ranks of the task if it is not known; empty without a world."""
    message: str = ""
    rank_signal: int | None = None
    """The signal that ended that rank, if a launcher reports it."""
    traceback: str = ""
    """The traceback of the Python exception that ended that rank; empty if none is known."""


class GroupOutcome(Struct, frozen=True, kw_only=True, dict=True):
    """The outcome of one attempt of a group."""

    outcomes: tuple[TaskOutcome, ...]
    """All tasks of the attempt, in the order of the spec."""
    first: FirstFailure | None = None
    silence: str = ""
    """The report that no task printed anything or sent a heartbeat for ``hang_timeout``; empty if there is none."""
    hidden_failure: str = ""
    """The report of ranks that failed although their task ended with code 0; empty if there are none."""

    @cached_property
    def world_size(self) -> int:
        """The number of ranks in the layout; 0 without a world."""
        return max((outcome.ranks.stop for outcome in self.outcomes), default=0)

    def holder(self, rank: int) -> TaskOutcome | None:
        """Return the task that holds a rank; ``None`` if no task does."""
        return next((outcome for outcome in self.outcomes if rank in outcome.ranks), None)

    def rank_label(self, rank: int) -> str:
        """Return a rank with its task, such as ``rank 9 (worker on gpu2)``, or only the rank if no task holds it."""
        outcome = self.holder(rank)
        return f"rank {rank} ({outcome.place})" if outcome else f"rank {rank}"


class Hit(Struct, frozen=True, kw_only=True):
    """A line that shows a symptom."""

    outcome: TaskOutcome
    line: str
    match: re.Match[str]

    @property
    def rank(self) -> int | None:
        """The rank that wrote the line, or the only rank of its task; ``None`` if it is not known."""
        own = _RANK.match(self.line)
        if own:
            return int(own[1])
        return self.outcome.ranks.start if len(self.outcome.ranks) == 1 else None

    @property
    def who(self) -> str:
        """The rank or task to which the line belongs, such as ``rank 9 (worker on gpu2)`` or ``worker on gpu2``."""
        return self.outcome.place if self.rank is None else f"rank {self.rank} ({self.outcome.place})"


class Diagnosis(Struct, frozen=True, kw_only=True):
    """A cause, its evidence, and its remedy."""

    key: str
    """The name of the rule, for programs, such as ``rank-missing``."""
    cause: str
    """One clause in plain words."""
    found: str
    """The evidence; may be empty."""
    remedy: str
    """The remedy. The client replaces ``<id>`` by the workflow's id, and adds the pool to ``distflow pool check``."""
    task: str = ""
    """The task whose output or end shows the cause; the first of several. Empty for a silent gang."""
    line: str = ""
    """The line that shows the cause; empty if there is none."""
    traceback: str = ""
    """The traceback of the Python exception that is the cause; empty for other causes."""


def hits_in(outcome: TaskOutcome, patterns: tuple[re.Pattern[str], ...]) -> Iterator[Hit]:
    """Yield the lines of a task and of its kernel log that match one of the patterns."""
    for line in (*outcome.lines, *outcome.kernel):
        for pattern in patterns:
            match = pattern.search(line)
            if match:
                yield Hit(outcome=outcome, line=line, match=match)
                break
