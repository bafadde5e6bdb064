"""Which line of a file each line of a YAML scalar stands in.

Folded and quoted scalars join lines, so a finding in the third line of a shell script may stand in the fifth of the file. The
walk here follows YAML's folding; where its result does not have as many lines as the scalar, it says nothing rather than
something wrong.
"""

from __future__ import annotations

from itertools import pairwise

__all__ = ["content_lines"]


def content_lines(text: str, start: int, end: int, style: str, value: str, first: int) -> tuple[int, ...]:
    """Return the line of the text for each line of ``value``; empty when it cannot be said.

    ``start`` and ``end`` are the offsets of the scalar, ``style`` is ``|``, ``>``, a quote or empty, ``first`` the line of
    ``start``.
    """
    wanted = len(value.split("\n")) - (1 if value.endswith("\n") and style in ("|", ">") else 0)
    if style == "|":
        return tuple(range(first + 1, first + 1 + wanted))
    source = text[start:end].split("\n")
    found = _folded(source[1:], first + 1) if style == ">" else _flow(source, first)
    return tuple(found[:wanted]) if len(found) >= wanted else ()


def _folded(source: list[str], first: int) -> list[int]:
    """Lines of a ``>`` scalar: neighbours of equal indentation are joined, empty and deeper lines keep their breaks."""
    filled = [len(line) - len(line.lstrip(" ")) for line in source if line.strip()]
    if not filled:
        return [first + position for position in range(len(source))]
    indent = filled[0]
    found = [first]
    for position, (before, line) in enumerate(pairwise(source), start=1):
        empty, was_empty = not line[indent:].strip(" "), not before[indent:].strip(" ")
        deeper, was_deeper = line[indent : indent + 1] in (" ", "\t"), before[indent : indent + 1] in (" ", "\t")
        if was_empty and not empty and not deeper:
            # The break before an empty line was folded away; the one after it counts, and was counted with that line.
            found[-1] = first + position
        elif empty or deeper or was_deeper:
            found.append(first + position)
    return found


def _flow(source: list[str], first: int) -> list[int]:
    """Lines of a plain or quoted scalar: each empty line is one break, all others are joined."""
    found = [first]
    for position, line in enumerate(source[1:], start=1):
        if not line.strip():
            found.append(first + position + 1)
    return found
