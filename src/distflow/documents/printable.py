"""Text that others wrote, made safe for a terminal: no escape sequences, no control characters."""

from __future__ import annotations

import re

__all__ = ["ESCAPES", "plain", "plain_lines"]

# Patterns, and not compiled: most text is printable and needs neither.
ESCAPES = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])"
"""Matches one escape sequence of a terminal."""
# Also characters that change the order in which a terminal shows the others: a text must read as what it is.
_CONTROLS = r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]+"


def plain(text: str) -> str:
    """Return text without escape sequences and control characters, so that it cannot disturb a terminal or a table."""
    return text if text.isprintable() else re.sub(_CONTROLS, " ", re.sub(ESCAPES, "", text))


def plain_lines(text: str) -> str:
    """Return text of several lines of which each is ``plain``."""
    return text if text.isprintable() else "\n".join(plain(line) for line in text.split("\n"))
