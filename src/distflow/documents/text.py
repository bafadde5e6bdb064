"""Text for people: names safe for a terminal, suggestions for mistyped names, and lists."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Sequence

__all__ = [
    "ESCAPES",
    "bug_text",
    "did_you_mean",
    "few",
    "listed",
    "most_similar",
    "one_line",
    "plain",
    "plain_lines",
    "ranges",
    "report_bug",
    "splitting_problem",
]


def did_you_mean(name: str, known: Iterable[str], *, what: str) -> str:
    """Return a hint with the most similar known name, if there is one, and the first 40 known names.

    ``what`` describes the known names, such as ``pools``. Without known names, the hint states that there are none.
    """
    names = sorted(set(known))
    if not names:
        return f"there are no {what} here"
    near = most_similar(name, names)
    every = f"{what}: {', '.join(f'`{known_name}`' for known_name in names[:40])}{', …' if len(names) > 40 else ''}"
    return f"did you mean `{near}`? {every}" if near else every


def most_similar(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to a mistyped one, or ``None`` if no name is similar."""
    by_normalized: dict[str, str] = {}
    for candidate in known:
        by_normalized.setdefault(_normalized(candidate), candidate)
    near = difflib.get_close_matches(_normalized(name), by_normalized, n=1, cutoff=0.6)
    return by_normalized[near[0]] if near else None


def listed(names: Iterable[str]) -> str:
    """Return names as a list in a sentence: ```a`, `b` and `c```."""
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}" if quoted else "nothing"


def splitting_problem(error: ValueError) -> str:
    """Return the cause of an error of ``shlex.split``: a quote that is not closed, or a backslash at the end."""
    return "a backslash at the end" if "escape" in str(error) else "a quote that is not closed"


def few(words: Sequence[str], between: str = ", ", *, most: int = 4, spare: int = 1) -> str:
    """Join the first ``most`` words for one line, and count the remaining words: a pool may have a thousand nodes.

    If at most ``spare`` words would be counted, all words are shown.
    """
    more = [f"and {len(words) - most} more"] if len(words) > most + spare else []
    return between.join([*(words[:most] if more else words), *more])


def ranges(numbers: Iterable[int], between: str = ", ") -> str:
    """Fold numbers into ranges.

    >>> ranges([3, 0, 1, 2, 7])
    '0-3, 7'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return between.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _normalized(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


# `ESCAPES` and `_CONTROLS` are not compiled at import, because most text is printable and needs neither.
ESCAPES = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])"
"""Matches one escape sequence of a terminal."""
# Control characters, and characters that change the order in which a terminal shows text.
_CONTROLS = r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]+"


def plain(text: str) -> str:
    """Return text that cannot disturb a terminal or a table: without escape sequences, with spaces for control characters."""
    return text if text.isprintable() else re.sub(_CONTROLS, " ", re.sub(ESCAPES, "", text))


def plain_lines(text: str) -> str:
    """Return text of several lines, with ``plain`` applied to each line."""
    return text if text.isprintable() else "\n".join(plain(line) for line in text.split("\n"))


def one_line(error: Exception) -> str:
    """Return the message of an error, with its hint if it has one, as one line for logs and records."""
    return "; ".join(str(error).splitlines())


def report_bug(error: Exception) -> str:
    """Write the traceback of an unexpected exception to the supervisor's log, and return a message for the user."""
    sys.excepthook(type(error), error, error.__traceback__)
    return bug_text(repr(error))


def bug_text(what: str) -> str:
    """Return the message for a bug whose traceback is in the supervisor's log."""
    return f"a bug in distflow, please report it: {what}; the traceback is in `supervisor.log` in the state directory"
