"""Aligned columns and a little colour, without a library: what pipes get, and quick enough for every prompt."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TextIO

from distflow.documents.printable import ESCAPES, plain

__all__ = ["Paint", "cut", "table", "terminal_width", "visible_width"]

_GAP = "  "
_TASK_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RED, _GREEN, _YELLOW, _CYAN = 31, 32, 33, 36


class Paint:
    """Colours words for a terminal, or leaves them as they are."""

    def __init__(self, enabled: bool = False) -> None:
        """Colour only if ``enabled``."""
        self.enabled = enabled

    @classmethod
    def of(cls, stream: TextIO, environ: Mapping[str, str] = MappingProxyType(os.environ)) -> Paint:
        """Return the paint for a stream: a terminal has colours unless ``NO_COLOR`` is set or it is dumb."""
        return cls(stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb")

    def status(self, status: str) -> str:
        """Colour a status by what it means."""
        if status == "COMPLETED":
            return self._in(status, _GREEN)
        if status.startswith("FAILED"):
            return self._in(status, _RED)
        return self._in(status, _CYAN if status == "RUNNING" else _YELLOW)

    def task(self, text: str, number: int) -> str:
        """Colour what belongs to the task of this number."""
        return self._in(text, _TASK_COLOURS[number % len(_TASK_COLOURS)])

    def strong(self, text: str) -> str:
        """Make a heading of it."""
        return self._in(text, 1)

    def bad(self, text: str) -> str:
        """Mark what went wrong."""
        return self._in(text, _RED)

    def _in(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.enabled else text


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None) -> str:
    """Return rows as aligned columns under a header and a rule, each line ended.

    The last column is cut so that lines fit ``width``. Cells may be coloured; an empty cell shows as ``-``.

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
    """Return a text shortened to ``width`` columns, ending in ``…`` when something is missing.

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
    """Return how many columns a text takes on a terminal; its escape sequences take none."""
    if "\x1b" in text:
        text = re.sub(ESCAPES, "", text)
    return len(text) if text.isascii() else sum(_character_width(character) for character in text)


def terminal_width(stream: TextIO) -> int | None:
    """Return the width of the terminal that a stream is, or ``None`` when it is none."""
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
    import unicodedata  # a megabyte, for the few texts that are not ASCII

    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
