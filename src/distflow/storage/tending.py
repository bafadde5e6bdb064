"""Removing what is at a URL, and finding out what one may do there."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from distflow.documents.urls import StorageUrl
from distflow.storage.base import Store
from distflow.storage.selecting import Wanted, select_found
from distflow.storage.trying import Patience, for_all

__all__ = ["Access", "check_access", "delete", "find_removable"]


class Access(str, Enum):
    """What one may want to do with data."""

    READ = "READ"
    WRITE = "WRITE"
    DELETE = "DELETE"


def find_removable(store: Store, url: StorageUrl, regex: str = "", *, patience: Patience | None = None) -> tuple[Wanted, ...]:
    """Return the objects that ``delete`` removes at a URL, of which ``regex`` matches the relative path.

    Raises ``StorageMissing`` when there is nothing at all at the URL.
    """
    return select_found(url, (patience or Patience()).keep_trying(lambda: store.find_removable(url.key)), regex)


def delete(
    store: Store, url: StorageUrl, wanted: Sequence[Wanted], *, at_once: int = 8, patience: Patience | None = None
) -> int:
    """Remove objects that ``find_removable`` found at a URL, and return their number.

    Raises ``StorageError`` for the first object that cannot be removed.
    """
    patience = patience or Patience()

    def remove(one: Wanted) -> None:
        patience.keep_trying(lambda: store.delete(one.entry.key, top=url.key))

    return len(for_all(wanted, remove, at_once, patience))


def check_access(store: Store, url: StorageUrl, access: Access, *, patience: Patience | None = None) -> None:
    """Return when the store allows it, having asked it. Raises ``StorageError``.

    For WRITE and DELETE an empty object is written below the URL, and removed.
    """
    patience = patience or Patience()
    if access is Access.READ:
        patience.keep_trying(lambda: store.check_readable(url.key))
    else:
        patience.keep_trying(lambda: store.check_writable(url.key))
