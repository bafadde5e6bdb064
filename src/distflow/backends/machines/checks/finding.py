"""A finding about nodes, and texts that findings share. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["Finding", "Grade", "amount", "count", "error", "few", "note", "warning"]

_FEW = 5


class Grade(str, Enum):
    """The severity of a finding, in the order of reports."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding about nodes."""

    grade: Grade
    about: str
    """One word for programs: ``ssh``, ``python``, ``root``, ``disk``, ``cpus``, ``memory``, ``shm``, ``limits``, ``leases``,
    ``clock``, ``gpus``, ``torch``, ``address``, ``name``, ``login``, ``reach`` or ``all-reduce``."""
    nodes: tuple[str, ...]
    message: str
    hint: str = ""
    """What to do; may be empty for a note."""

    def as_text(self) -> str:
        """Return the finding as lines."""
        lines = [f"{self.grade.value}: {', '.join(self.nodes)}: {self.message}"]
        lines += [f"    {line}" for line in self.hint.splitlines()]
        return "\n".join(lines)


def few(names: Sequence[str]) -> str:
    """Return a list of names that fits on a line."""
    more = len(names) - _FEW
    return ", ".join(names[:_FEW]) + (f" and {more} more" if more > 0 else "")


def count(number: int, word: str, words: str = "") -> str:
    """Return a number with its noun."""
    return f"{number} {word if number == 1 else words or word + 's'}"


def amount(size: int) -> str:
    """Return bytes as GiB."""
    return f"{size / (1 << 30):.1f} GiB"


def error(about: str, nodes: Sequence[str], message: str, hint: str) -> Finding:
    """Return an error."""
    return Finding(grade=Grade.ERROR, about=about, nodes=tuple(nodes), message=message, hint=hint)


def warning(about: str, nodes: Sequence[str], message: str, hint: str) -> Finding:
    """Return a warning."""
    return Finding(grade=Grade.WARNING, about=about, nodes=tuple(nodes), message=message, hint=hint)


def note(about: str, nodes: Sequence[str], message: str, hint: str) -> Finding:
    """Return a note."""
    return Finding(grade=Grade.NOTE, about=about, nodes=tuple(nodes), message=message, hint=hint)
