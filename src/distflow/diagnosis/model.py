"""What a diagnosis is made from, and what it says: frozen values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from distflow.lifecycle.states import Reason

__all__ = ["Case", "Diagnosis", "First", "Hit", "Level", "Witness", "hits_in"]

_RANK = re.compile(r"^(?:\[default\d+\]:)?\[rank ?(\d+)\]", re.IGNORECASE)
"""How torch begins what a rank writes once it has joined its world."""


class Level(IntEnum):
    """How near to the cause a symptom is; the nearest is believed."""

    CAUSE = 0
    """It names what was wrong."""
    STALL = 1
    """Ranks waited for others, which may have died, hung, or never started."""
    BYSTANDER = 2
    """It only says that another process was gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """One attempt of a task: what it printed, and how it ended."""

    task: str
    node: str = ""
    ranks: range = range(0)
    """The global ranks that it holds; empty without a world."""
    lines: tuple[str, ...] = ()
    """The last lines that it printed, and those of its error file."""
    kernel: tuple[str, ...] = ()
    """What its node's kernel said."""
    reason: Reason | None = None
    exit_code: int | None = None
    signal: int | None = None

    @property
    def place(self) -> str:
        """``worker on gpu2``."""
        return f"{self.task} on {self.node}" if self.node else self.task


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """The first cause as the verdict has it."""

    task: str
    rank: str = ""
    """The rank that failed, or those of the task; empty without a world."""
    message: str = ""
    rank_signal: int | None = None
    """The signal that ended that rank, where a launcher reports it."""
    traceback: str = ""
    """Of the Python exception that ended it; empty where none is known."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attempt of a group."""

    witnesses: tuple[Witness, ...]
    """All of its tasks, in the order of the spec."""
    first: First | None = None
    silence: str = ""
    """What the supervisor said of a gang that prints nothing any more; empty when it printed to the end."""
    missing: str = ""
    """What the supervisor said of ranks that failed although their task ended with code 0; empty without any."""

    @cached_property
    def world_size(self) -> int:
        """How many ranks the layout has; 0 without a world."""
        return max((witness.ranks.stop for witness in self.witnesses), default=0)

    def holder(self, rank: int) -> Witness | None:
        """Return the task that holds a rank."""
        return next((witness for witness in self.witnesses if rank in witness.ranks), None)

    def rank_words(self, rank: int) -> str:
        """Return ``rank 9 (worker on gpu2)``; only the rank where no task holds it."""
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
        """The rank that wrote the line, where that is known."""
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
    """A cause, how it showed, and what to do about it."""

    key: str
    """For programs, such as ``rank-missing``."""
    cause: str
    """One clause in plain words."""
    found: str
    """What of it is known in this case; may be empty."""
    remedy: str
    """``<id>`` in it stands for the workflow's."""
    task: str = ""
    """Whose output, or end, shows it."""
    line: str = ""
    """The line that shows it; empty where an end or an event did."""
    traceback: str = ""
    """Of the Python exception that is the cause; empty where another line or an end shows it."""


def hits_in(witness: Witness, patterns: tuple[re.Pattern[str], ...]) -> Iterator[Hit]:
    """Yield the lines of a task, kernel's too, in which one of the patterns is found."""
    for line in (*witness.lines, *witness.kernel):
        for pattern in patterns:
            match = pattern.search(line)
            if match:
                yield Hit(witness=witness, line=line, match=match)
                break
