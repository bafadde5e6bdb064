"""A document as values and places: what a YAML file says, and for every part of it where it was written.

Values follow YAML 1.1 as OSMO reads it, without its traps: dates, times of day (``12:30:45``) and numbers with a leading zero
stay text. Whoever wants a text asks for it with ``Document.text_at`` and gets the scalar as it was written (``on`` stays
``on``), whatever type YAML saw in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distflow.documents.problems import Mark, Problem

__all__ = ["Document", "Path", "Place", "Text", "path_text"]

Path = tuple[str | int, ...]
"""Keys and positions from the top of a document to one of its parts."""


@dataclass(frozen=True, slots=True)
class Text:
    """A string of a document, and where each of its lines stands."""

    value: str
    mark: Mark
    """Where it begins in the file (for a block scalar: its first line of content)."""
    lines: tuple[Mark, ...] = ()
    """One mark for each line of ``value``; empty when all stand at ``mark``."""

    def mark_at(self, offset: int) -> Mark:
        """Return the place of the character at ``offset`` of ``value``, to the line."""
        line = self.value.count("\n", 0, offset)
        return self.lines[line] if line < len(self.lines) else self.mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one part of a document stands."""

    mark: Mark
    """Of the value (for a block scalar: its first line of content)."""
    key: Mark
    """Of the key; for an item of a list the same as ``mark``."""
    raw: str | None = None
    """A scalar as written, without quotes; ``None`` for lists and mappings, and for nothing at all."""
    plain: bool = False
    """True for a scalar without quotes, whose type YAML guesses."""
    lines: tuple[Mark, ...] = ()
    """One mark for each line of a scalar that has several; empty when all stand at ``mark``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What a file says, and where it says it."""

    file: str
    value: Any
    """Mappings, lists and scalars; ``None`` for an empty document."""
    places: Mapping[Path, Place]
    """Of every part, the whole (the empty path) included."""
    warnings: tuple[Problem, ...] = ()
    """Keys that are given twice with the same value."""

    def value_at(self, path: Path) -> Any:
        """Return the part at ``path``, or ``None`` where there is nothing."""
        value = self.value
        for step in path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def mark_at(self, path: Path) -> Mark:
        """Return where the value at ``path`` stands, or the nearest part above it."""
        return self._nearest(path).mark

    def key_mark_at(self, path: Path) -> Mark:
        """Return where the key of ``path`` stands, or the nearest part above it."""
        return self._nearest(path).key

    def raw_at(self, path: Path) -> str | None:
        """Return the scalar at ``path`` as written, or ``None`` when there is no scalar."""
        place = self.places.get(path)
        return place.raw if place is not None else None

    def text_at(self, path: Path) -> Text | None:
        """Return the scalar at ``path`` as a text with its places, or ``None`` when there is no scalar or it is null."""
        place = self.places.get(path)
        if place is None or place.raw is None or self.value_at(path) is None:
            return None
        return Text(place.raw, place.mark, place.lines)

    def _nearest(self, path: Path) -> Place:
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, _nowhere(self.file))


def path_text(path: Path) -> str:
    """Return a path as people write it, such as ``workflow.groups[0].tasks[1].args``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def _nowhere(file: str) -> Place:
    return Place(mark=Mark(file), key=Mark(file))
