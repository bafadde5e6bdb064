"""Which objects are meant, and where each lies below a folder of this machine. Pure; keys of a store are not trusted."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from distflow.documents.urls import StorageUrl
from distflow.errors import InputError, StorageError, StorageMissing
from distflow.storage.base import Entry

__all__ = ["Wanted", "check_names", "compile_regex", "select", "select_found", "why_not_a_file"]

_LONGEST_NAME = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An object that is meant."""

    entry: Entry
    name: str
    """Its path relative to the URL; of an object that the URL names itself, the last part of that."""


def compile_regex(regex: str) -> re.Pattern[str] | None:
    """Return the pattern; ``None`` for an empty one, which means everything. Raises ``InputError``."""
    try:
        return re.compile(regex) if regex else None
    except (re.error, OverflowError, RecursionError) as error:
        hint = r"write one of Python's, such as `.*\.pt`; it is matched from the start of the relative path"
        raise InputError(f"`{regex}` is no regular expression: {error}", hint=hint) from error


def select(url: StorageUrl, entries: Iterable[Entry], regex: str = "") -> tuple[Wanted, ...]:
    """Return what a URL means of what its store has, in the order of the names.

    An object of exactly this name is what is meant, alone; else it is everything below it. ``regex`` is matched from the start
    of the name. What stands for a folder only (a key with a slash at its end) is left out.
    """
    pattern = compile_regex(regex)
    found = list(entries)
    alone = [entry for entry in found if entry.key == url.key and url.key and not url.is_folder]
    top = f"{url.key}/" if url.key else ""
    named = [(entry, url.name) for entry in alone] or [
        (entry, entry.key.removeprefix(top)) for entry in found if entry.key.startswith(top) and not entry.key.endswith("/")
    ]
    wanted = [Wanted(entry=entry, name=name) for entry, name in named if pattern is None or pattern.match(name)]
    return tuple(sorted(wanted, key=lambda one: os.fsencode(one.name)))


def select_found(url: StorageUrl, entries: Iterable[Entry], regex: str = "") -> tuple[Wanted, ...]:
    """Return the same as ``select``. Raises ``StorageMissing`` when there is nothing at all at the URL."""
    there = list(entries)
    found = select(url, there, regex)
    if not found and not select(url, there):
        raise StorageMissing(f"there is nothing at {url}", hint="`distflow data list` shows what there is")
    return found


def check_names(url: StorageUrl, wanted: Sequence[Wanted]) -> None:
    """Refuse names that cannot be files below a folder, each and together. Raises ``StorageError``."""
    names = {one.name for one in wanted}
    for one in wanted:
        why = why_not_a_file(one.name, names)
        if why:
            raise StorageError(
                f"{url.shown(one.entry.key)!r} cannot be kept as a file: {why}",
                hint="rename it in the store, or leave it out with a regex",
            )


def why_not_a_file(name: str, names: Container[str]) -> str:
    """Return why an object cannot be a file of this name below a folder that gets all of ``names``; empty when it can."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts:
        return "its name leads elsewhere"
    if "" in parts or "." in parts:
        return "its name has a part that is empty or `.`"
    if "\0" in name:
        return "its name holds a zero byte"
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in parts):
        return f"a part of its name is longer than {_LONGEST_NAME} bytes"
    above = next(("/".join(parts[:end]) for end in range(1, len(parts)) if "/".join(parts[:end]) in names), None)
    return f"`{above}` would have to be a file and a directory" if above is not None else ""
