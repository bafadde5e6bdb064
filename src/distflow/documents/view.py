"""A tolerant way to read a document whose shape its schema has checked already.

Every finding is reported at once, so the checks that come after the schema's see documents with wrong shapes too: a ``View``
gives what has the right shape and leaves out what has not, because the schema has said so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from distflow.documents.document import Document, Path, Text, path_text
from distflow.documents.problems import Mark, Problem, Severity

__all__ = ["View"]

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class View:
    """A mapping of a document, and where its findings are collected."""

    document: Document
    path: Path
    problems: list[Problem] = field(default_factory=list)
    """Shared by all views of a document."""

    @property
    def mark(self) -> Mark:
        """Where the mapping begins."""
        return self.document.mark_at(self.path)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that it has."""
        value = self.document.value_at(self.path)
        return tuple(value) if isinstance(value, dict) else ()

    def has(self, key: str) -> bool:
        """Tell whether the key is there with a value: neither null nor an empty list or mapping."""
        value = self.document.value_at((*self.path, key))
        return value is not None and value not in ([], {})

    def key_mark(self, key: str) -> Mark:
        """Return where a key stands, or the mapping when it is not there."""
        return self.document.key_mark_at((*self.path, key)) if key in self.keys else self.mark

    def text(self, key: str) -> Text | None:
        """Return a scalar as written."""
        return self.document.text_at((*self.path, key))

    def string(self, key: str) -> str | None:
        """Return a scalar as written, without its places."""
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
        """Return true or false, also when given as a text of that name."""
        value = self.document.value_at((*self.path, key))
        if isinstance(value, str):
            return {"true": True, "false": False}.get(value.lower())
        return value if isinstance(value, bool) else None

    def whole(self, key: str) -> int | None:
        """Return a whole number, also when given as a text of digits."""
        value = self.document.value_at((*self.path, key))
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
            return int(value)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def parsed(self, key: str, parse: Callable[[str | float], Parsed]) -> Parsed | None:
        """Return what ``parse`` makes of a text or number; its ``ValueError`` becomes a finding."""
        value = self.document.value_at((*self.path, key))
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return None
        try:
            return parse(value)
        except ValueError as error:
            message, _, hint = str(error).partition("; ")
            self.add(f"`{path_text((*self.path, key))}`: {message}", hint, key=key)
            return None

    def view(self, *keys: str | int) -> View:
        """Return a part of the mapping; one without keys where there is none."""
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
        """Add a finding: at ``where``, else at a key, else at the mapping."""
        place = where or (self.key_mark(key) if key is not None else self.mark)
        path = path_text(self.path if key is None else (*self.path, key))
        self.problems.append(Problem(where=place, message=message, hint=hint, path=path, severity=severity))

    def warn(self, message: str, hint: str = "", *, key: str | None = None) -> None:
        """Add a finding that does not stop anything."""
        self.add(message, hint, key=key, severity=Severity.WARNING)
