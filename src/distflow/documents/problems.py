"""Findings about a document, collected and reported all at once.

Most checks of user input do not raise. They return ``Problem`` values with the place, the message and a hint. A caller that
needs a correct document raises all of them as one ``ProblemsFound``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from msgspec import Struct

from distflow.errors import InputError

__all__ = ["Mark", "Problem", "ProblemsFound", "Severity", "errors_of", "in_document_order", "raise_errors"]


class Mark(Struct, frozen=True, order=True):
    """A place in a file."""

    file: str
    """The name that the user gave; ``-`` for standard input."""
    line: int = 0
    """Counted from 1; 0 means the file as a whole."""
    column: int = 0
    """Counted from 1; 0 means the line as a whole."""

    def __str__(self) -> str:
        """Return ``file:line``, which terminals and editors can open."""
        return f"{self.file}:{self.line}" if self.line else self.file


class Severity(str, Enum):
    """Whether a finding prevents the use of a document."""

    ERROR = "error"
    """The document cannot be used."""
    WARNING = "warning"
    """The document can be used, but the user should check it."""


class Problem(Struct, frozen=True, kw_only=True):
    """One finding about a document."""

    where: Mark
    """The place to change."""
    message: str
    """The problem, in one sentence."""
    hint: str = ""
    """The remedy; empty if the message implies it."""
    path: str = ""
    """The key's path, such as ``workflow.groups[0].tasks[1].args``; empty if the finding is not about one part."""
    drawing: str = ""
    """A picture in text, such as the rank layout, printed below the finding; empty for none."""
    severity: Severity = Severity.ERROR

    def as_text(self) -> str:
        """Return the finding as lines for a terminal, without colors."""
        lines = [f"{self.where}: {self.severity.value}: {self.message}"]
        if self.hint:
            lines += [f"    {line}" for line in self.hint.splitlines()]
        if self.drawing:
            lines += ["", *(f"    {line}".rstrip() for line in self.drawing.splitlines()), ""]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        return {
            "severity": self.severity.value,
            "file": self.where.file,
            "line": self.where.line,
            "column": self.where.column,
            "path": self.path,
            "message": self.message,
            "hint": self.hint,
        }


class ProblemsFound(InputError):
    """A document has errors. ``problems`` contains all findings, including warnings."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        """Collect the findings in the order of the document."""
        self.problems = in_document_order(problems)
        super().__init__("\n".join(problem.as_text() for problem in self.problems))


def in_document_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Return the findings sorted by place, without duplicates. Findings at one place keep their order."""
    return tuple(sorted(dict.fromkeys(problems), key=lambda problem: problem.where))


def errors_of(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Return the findings that make a document unusable."""
    return tuple(problem for problem in problems if problem.severity is Severity.ERROR)


def raise_errors(problems: Sequence[Problem]) -> None:
    """Raise ``ProblemsFound`` with all findings if at least one of them is an error."""
    if errors_of(problems):
        raise ProblemsFound(problems)
