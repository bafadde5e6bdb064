"""Format tables with aligned columns and colors. This module does not import rich, because that is slow."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TextIO

from distflow.documents.text import ESCAPES, plain, plain_lines

__all__ = ["Paint", "cut", "print_further_errors", "print_notice", "table", "terminal_width", "visible_width"]

_GAP = "  "
_TASK_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RED, _GREEN, _YELLOW, _CYAN = 31, 32, 33, 36


class Paint:
    """Colors text for a terminal, or returns it unchanged."""

    def __init__(self, enabled: bool = False) -> None:
        """Color text only if ``enabled``."""
        self.enabled = enabled

    @classmethod
    def of(cls, stream: TextIO, environ: Mapping[str, str] = MappingProxyType(os.environ)) -> Paint:
        """Return the paint for a stream. A terminal has colors unless ``NO_COLOR`` is set or ``TERM`` is ``dumb``."""
        return cls(stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb")

    def status(self, status: str) -> str:
        """Color a status by its meaning."""
        if status == "COMPLETED":
            return self._in(status, _GREEN)
        if status.startswith("FAILED"):
            return self._in(status, _RED)
        return self._in(status, _CYAN if status == "RUNNING" else _YELLOW)

    def task(self, text: str, number: int) -> str:
        """Color a text in the color of the task with this number."""
        return self._in(text, _TASK_COLORS[number % len(_TASK_COLORS)])

    def strong(self, text: str) -> str:
        """Return the text in bold, for headings."""
        return self._in(text, 1)

    def name(self, text: str) -> str:
        """Return the text in cyan, for names of commands and options."""
        return self._in(text, _CYAN)

    def bad(self, text: str) -> str:
        """Return the text in red, for errors."""
        return self._in(text, _RED)

    def grade(self, text: str, grade: str) -> str:
        """Color a text by the grade of a message: ``error``, ``warning`` or ``note``; unchanged for any other word."""
        code = {"error": _RED, "warning": _YELLOW, "note": _CYAN}.get(grade)
        return text if code is None else self._in(text, code)

    def messages(self, text: str) -> str:
        r"""Color the grade at the beginning of each message of a text.

        >>> Paint(True).messages("spec.yaml:3: error: no name")
        'spec.yaml:3: \x1b[31merror\x1b[0m: no name'
        """
        if not self.enabled:
            return text
        begin = r"^(\S+:\d+: )?(error|warning|note)(?=: )"
        return re.sub(begin, lambda one: (one[1] or "") + self.grade(one[2], one[2]), text, flags=re.MULTILINE)

    def _in(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.enabled else text


def print_notice(text: str) -> None:
    """Print notes, warnings or errors to standard error, with colors on a terminal.

    Control characters are escaped, because the text can contain texts of specs, nodes and stores.
    """
    print(Paint.of(sys.stderr).messages(plain_lines(text)), file=sys.stderr)


def print_further_errors(errors: Iterable[tuple[str, str]]) -> None:
    """Print the errors of nodes except the first one, with which the command ends.

    ``errors``: the name of each node, and its error, which may be empty.
    """
    for node, error in [(node, error) for node, error in errors if error][1:]:
        print(f"{node}: failed: {plain(error)}")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None) -> str:
    """Return rows as aligned columns below a header and a rule. Every line ends with a line break.

    The last column is cut to fit ``width``, but not below the width of its header. Cells can have colors, but a cut cell
    loses them. An empty cell is shown as ``-``.

    >>> print(table(("Task", "Status"), [("master", "RUNNING"), ("worker-12", "")]), end="")
    Task       Status
    ==================
    master     RUNNING
    worker-12  -
    """
    shown = [[cell or "-" for cell in row] for row in rows]
    widths = [max(visible_width(row[column]) for row in (header, *shown)) for column in range(len(header))]
    before = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
    if width is not None:
        widths[-1] = max(min(widths[-1], width - before), visible_width(header[-1]))
    lines = [_line(header, widths), "=" * min(before + widths[-1], width or sys.maxsize)]
    lines += [_line([*row[:-1], cut(row[-1], widths[-1])], widths) for row in shown]
    return "".join(f"{line}\n" for line in lines)


def cut(text: str, width: int) -> str:
    """Return a text shortened to ``width`` columns. A shortened text ends in ``…`` and has no colors.

    >>> cut("loss 0.25, accuracy 0.97", 12)
    'loss 0.25, …'
    """
    if visible_width(text) <= width:
        return text
    kept, used = [], 0
    for character in plain(text):
        used += _character_width(character)
        if used > width - 1:
            break
        kept.append(character)
    return "".join(kept) + "…"


def visible_width(text: str) -> int:
    """Return the number of columns of a text on a terminal, without its escape sequences."""
    if "\x1b" in text:
        text = re.sub(ESCAPES, "", text)
    return len(text) if text.isascii() else sum(_character_width(character) for character in text)


def terminal_width(stream: TextIO) -> int | None:
    """Return the width of a terminal in columns, or ``None`` if the stream is not a terminal."""
    if not stream.isatty():
        return None
    if (columns := os.environ.get("COLUMNS", "")).isdigit() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell + " " * (width - visible_width(cell)) for cell, width in zip(cells, widths, strict=True)]
    return _GAP.join(padded).rstrip()


def _character_width(character: str) -> int:
    import unicodedata  # imported here because it needs a megabyte of memory, and most texts are ASCII

    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
