"""The input and the result of a diagnosis, as frozen values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from distflow.lifecycle.states import Reason

__all__ = ["Case", "Diagnosis", "First", "Hit", "Level", "Witness", "hits_in"]

_RANK = re.compile(r"^(?:\[default\d+\]:)?\[rank ?(\d+)\]", re.IGNORECASE)
"""The start of lines that torch prints for a rank after it has joined its world."""


class Level(IntEnum):
    """How close a symptom is to the cause. The closest one is reported."""

    CAUSE = 0
    """It names the cause."""
    STALL = 1
    """Ranks waited for others, which may have died, hung, or never started."""
    BYSTANDER = 2
    """It only shows that another process disappeared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """One attempt of a task: its output and its end."""

    task: str
    node: str = ""
    ranks: range = range(0)
    """The global ranks that it holds; empty without a world."""
    lines: tuple[str, ...] = ()
    """The last lines that it printed, and those of its error file."""
    kernel: tuple[str, ...] = ()
    """Lines of its node's kernel log."""
    reason: Reason | None = None
    exit_code: int | None = None
    signal: int | None = None

    @property
    def place(self) -> str:
        """``worker on gpu2``."""
        return f"{self.task} on {self.node}" if self.node else self.task


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """The first cause from the verdict."""

    task: str
    rank: str = ""
    """The rank that failed, or those of the task; empty without a world."""
    message: str = ""
    rank_signal: int | None = None
    """The signal that ended that rank, where a launcher reports it."""
    traceback: str = ""
    """The traceback of the Python exception that ended it; empty if none is known."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attempt of a group."""

    witnesses: tuple[Witness, ...]
    """All of its tasks, in the order of the spec."""
    first: First | None = None
    silence: str = ""
    """The supervisor's report that the gang is silent; empty if it printed to the end."""
    missing: str = ""
    """The supervisor's report of ranks that failed although their task ended with code 0; otherwise empty."""

    @cached_property
    def world_size(self) -> int:
        """How many ranks the layout has; 0 without a world."""
        return max((witness.ranks.stop for witness in self.witnesses), default=0)

    def holder(self, rank: int) -> Witness | None:
        """Return the task that holds a rank."""
        return next((witness for witness in self.witnesses if rank in witness.ranks), None)

    def rank_words(self, rank: int) -> str:
        """Return ``rank 9 (worker on gpu2)``, or only the rank if no task holds it."""
        witness = self.holder(rank)
        return f"rank {rank} ({witness.place})" if witness else f"rank {rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A line that shows a symptom."""

    witness: Witness
    line: str
    match: re.Match[str]

    @property
    def rank(self) -> int | None:
        """The rank that wrote the line, if it is known."""
        own = _RANK.match(self.line)
        if own:
            return int(own[1])
        return self.witness.ranks.start if len(self.witness.ranks) == 1 else None

    @property
    def who(self) -> str:
        """``rank 9 (worker on gpu2)``, or ``worker on gpu2``."""
        return self.witness.place if self.rank is None else f"rank {self.rank} ({self.witness.place})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A cause, its evidence, and its remedy."""

    key: str
    """For programs, such as ``rank-missing``."""
    cause: str
    """One clause in plain words."""
    found: str
    """Details of this case; may be empty."""
    remedy: str
    """``<id>`` in it stands for the workflow's."""
    task: str = ""
    """The task whose output or end shows it."""
    line: str = ""
    """The line that shows it; empty if an end or an event does."""
    traceback: str = ""
    """The traceback of the Python exception that is the cause; empty for other causes."""


def hits_in(witness: Witness, patterns: tuple[re.Pattern[str], ...]) -> Iterator[Hit]:
    """Yield the lines of a task and of its kernel log that match one of the patterns."""
    for line in (*witness.lines, *witness.kernel):
        for pattern in patterns:
            match = pattern.search(line)
            if match:
                yield Hit(witness=witness, line=line, match=match)
                break
