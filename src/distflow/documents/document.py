"""A parsed YAML document: its values, and the line and column of each part.

Values follow YAML 1.1 as in OSMO, except that dates, times of day (``12:30:45``) and whole numbers such as ``010`` remain text.
``Document.text_at`` returns the text of a scalar, regardless of its YAML type: ``on`` remains ``on``.

``View`` reads a document after the check against its schema. All findings are reported at once, so later checks run even if
that check found wrong types. A ``View`` therefore returns only values of the right type, and ``None`` or an
empty result for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from msgspec import Struct, field

from distflow.documents.problems import Mark, Problem, Severity
from distflow.errors import InvalidValue

__all__ = ["Document", "Path", "Place", "Text", "View", "path_text"]

Path = tuple[str | int, ...]
"""Keys and positions from the top of a document to one of its parts."""


class Text(Struct, frozen=True):
    """A string of a document, with the place of each of its lines."""

    value: str
    mark: Mark
    """The beginning of the string in the file; for a block scalar, its first line of content."""
    lines: tuple[Mark, ...] = ()
    """One mark for each line of ``value``; empty if all lines are at ``mark``."""

    def mark_at(self, offset: int) -> Mark:
        """Return the line that contains the character at ``offset`` of ``value``."""
        line = self.value.count("\n", 0, offset)
        return self.lines[line] if line < len(self.lines) else self.mark


class Place(Struct, frozen=True, kw_only=True):
    """The place of one part of a document."""

    mark: Mark
    """The beginning of the value; for a block scalar, its first line of content."""
    key: Mark
    """The beginning of the key; for an item of a list, the beginning of the item."""
    raw: str | None = None
    """The text of a scalar, without quotes and with escapes replaced; ``None`` for lists, mappings and missing values."""
    plain: bool = False
    """Whether YAML guesses the type of the scalar: it has no quotes, no tag, and is not a block."""
    lines: tuple[Mark, ...] = ()
    """One mark for each line of a scalar of several lines; empty if all lines are at ``mark``."""


class Document(Struct, frozen=True, kw_only=True):
    """The content of a file, with the place of every part."""

    file: str
    value: Any
    """Mappings, lists and scalars; ``None`` for an empty document."""
    places: Mapping[Path, Place]
    """The place of each path; the empty path is the whole document."""
    warnings: tuple[Problem, ...] = ()
    """Warnings about keys that are given twice with the same value."""

    def value_at(self, path: Path) -> Any:
        """Return the value at ``path``, or ``None`` if there is none."""
        value = self.value
        for step in path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def mark_at(self, path: Path) -> Mark:
        """Return the mark of the value at ``path``, or of the nearest part that contains it."""
        return self._nearest(path).mark

    def key_mark_at(self, path: Path) -> Mark:
        """Return the mark of the key of ``path``, or of the nearest part that contains it."""
        return self._nearest(path).key

    def raw_at(self, path: Path) -> str | None:
        """Return the text of the scalar at ``path``, without quotes and with escapes replaced, or ``None`` for other values."""
        place = self.places.get(path)
        return place.raw if place is not None else None

    def text_at(self, path: Path) -> Text | None:
        """Return the scalar at ``path`` as a text with its places, or ``None`` if it is null or not a scalar."""
        place = self.places.get(path)
        if place is None or place.raw is None or self.value_at(path) is None:
            return None
        return Text(place.raw, place.mark, place.lines)

    def _nearest(self, path: Path) -> Place:
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, _whole_file(self.file))


def path_text(path: Path) -> str:
    """Return a path for messages, such as ``workflow.groups[0].tasks[1].args``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def _whole_file(file: str) -> Place:
    return Place(mark=Mark(file), key=Mark(file))


Parsed = TypeVar("Parsed")


class View(Struct, frozen=True):
    """A mapping in a document, with a list that collects findings."""

    document: Document
    path: Path
    problems: list[Problem] = field(default_factory=list)
    """Shared with all views that this view returns."""

    @property
    def mark(self) -> Mark:
        """The beginning of the mapping."""
        return self.document.mark_at(self.path)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the mapping."""
        value = self.document.value_at(self.path)
        return tuple(value) if isinstance(value, dict) else ()

    def has(self, key: str) -> bool:
        """Return whether the key has a value other than null, an empty list and an empty mapping."""
        value = self.document.value_at((*self.path, key))
        return value is not None and value not in ([], {})

    def key_mark(self, key: str) -> Mark:
        """Return the mark of a key, or of the mapping if the key is missing."""
        return self.document.key_mark_at((*self.path, key)) if key in self.keys else self.mark

    def text(self, key: str) -> Text | None:
        """Return a scalar as a text with its places."""
        return self.document.text_at((*self.path, key))

    def string(self, key: str) -> str | None:
        """Return the text of a scalar."""
        text = self.text(key)
        return text.value if text is not None else None

    def texts(self, key: str) -> tuple[Text, ...]:
        """Return the scalars of a list."""
        values = self.document.value_at((*self.path, key))
        found = (
            [self.document.text_at((*self.path, key, position)) for position in range(len(values))]
            if isinstance(values, list)
            else []
        )
        return tuple(text for text in found if text is not None)

    def flag(self, key: str) -> bool | None:
        """Return a Boolean. The texts ``true`` and ``false`` are accepted."""
        value = self.document.value_at((*self.path, key))
        if isinstance(value, str):
            return {"true": True, "false": False}.get(value.lower())
        return value if isinstance(value, bool) else None

    def whole(self, key: str) -> int | None:
        """Return a whole number. A text of digits and a number such as ``8.0`` are accepted."""
        value = self.document.value_at((*self.path, key))
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
            return int(value)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def parsed(self, key: str, parse: Callable[[str | float], Parsed]) -> Parsed | None:
        """Return ``parse(value)`` for a text or number. A ``ValueError`` becomes a finding."""
        value = self.document.value_at((*self.path, key))
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return None
        try:
            return parse(value)
        except ValueError as error:
            message, hint = (error.message, error.hint) if isinstance(error, InvalidValue) else (str(error), "")
            self.add(f"`{path_text((*self.path, key))}`: {message}", hint, key=key)
            return None

    def view(self, *keys: str | int) -> View:
        """Return a part of the mapping; if it is missing, a view without keys."""
        return View(self.document, (*self.path, *keys), self.problems)

    def views(self, key: str) -> Iterator[View]:
        """Yield the mappings of a list."""
        values = self.document.value_at((*self.path, key))
        for position, value in enumerate(values if isinstance(values, list) else ()):
            if isinstance(value, dict):
                yield self.view(key, position)

    def add(
        self,
        message: str,
        hint: str = "",
        *,
        key: str | None = None,
        where: Mark | None = None,
        severity: Severity = Severity.ERROR,
    ) -> None:
        """Add a finding: at ``where`` if it is given, else at ``key`` if it is given, else at the mapping."""
        place = where or (self.key_mark(key) if key is not None else self.mark)
        path = path_text(self.path if key is None else (*self.path, key))
        self.problems.append(Problem(where=place, message=message, hint=hint, path=path, severity=severity))

    def warn(self, message: str, hint: str = "", *, key: str | None = None) -> None:
        """Add a warning, which does not prevent a submission."""
        self.add(message, hint, key=key, severity=Severity.WARNING)
