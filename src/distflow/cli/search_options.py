"""What the listing commands filter by: options, and the search that they mean."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Annotated

import typer

from distflow.documents.times import day_start
from distflow.errors import InputError
from distflow.state.record import Priority
from distflow.state.search import label_globs

__all__ = [
    "OSMO_STATUSES",
    "AllUsersOption",
    "CountOption",
    "OffsetOption",
    "Order",
    "OrderOption",
    "PoolsOption",
    "PrioritiesOption",
    "UsersOption",
    "choose_users",
    "days",
    "label_key",
    "label_selectors",
    "one_of",
    "priorities",
]


OSMO_STATUSES = frozenset({
    "SUBMITTING", "WAITING", "PENDING", "PROCESSING", "SCHEDULING", "INITIALIZING", "RUNNING", "RESCHEDULED", "COMPLETED",
    "FAILED", "FAILED_CANCELED", "FAILED_SERVER_ERROR", "FAILED_EXEC_TIMEOUT", "FAILED_QUEUE_TIMEOUT", "FAILED_SUBMISSION",
    "FAILED_PREEMPTED", "FAILED_EVICTED", "FAILED_UPSTREAM", "FAILED_BACKEND_ERROR", "FAILED_IMAGE_PULL",
    "FAILED_START_ERROR", "FAILED_START_TIMEOUT",
})  # fmt: skip
"""Every status of OSMO; one that nothing here ever has matches nothing, so that OSMO's scripts go on."""


class Order(str, Enum):
    """Which end the newest is at."""

    ASC = "asc"
    DESC = "desc"


CountOption = Annotated[int, typer.Option("--count", "-c", min=1, help="Show the newest N.")]
OffsetOption = Annotated[int, typer.Option("--offset", "-f", min=0, help="Skip the newest N.")]
OrderOption = Annotated[Order, typer.Option("--order", "-o", help="asc has the newest at the bottom.")]
PoolsOption = Annotated[list[str] | None, typer.Option("--pool", "-p", help="Only those of this pool; may be repeated.")]
PrioritiesOption = Annotated[
    list[str] | None,
    typer.Option("--priority", metavar="HIGH|NORMAL|LOW", help="Only those of this priority; may be repeated."),
]
UsersOption = Annotated[
    list[str] | None, typer.Option("--user", "-u", help="Only those that this user submitted; may be repeated.")
]
AllUsersOption = Annotated[
    bool, typer.Option("--all-users", "-a", help="Those of every user; so it is without --user too: the state is one user's.")
]


def choose_users(users: Sequence[str] | None, all_users: bool) -> Sequence[str]:
    """Return whose workflows are meant, nobody for everybody's. Raises ``InputError`` for both flags."""
    if users and all_users:
        raise InputError("--user and --all-users exclude each other")
    return users or ()


def days(after: str | None, before: str | None, what: str) -> tuple[float | None, float | None]:
    """Return the instants of two days, ``what`` being the name of their flags. Raises ``InputError``."""
    begin, end = (_day(text, f"--{what}-{word}") for text, word in ((after, "after"), (before, "before")))
    if begin is not None and end is not None and begin > end:
        raise InputError(f"--{what}-after {after} is later than --{what}-before {before}")
    return begin, end


def _day(text: str | None, flag: str) -> float | None:
    if text is None:
        return None
    try:
        return day_start(text)
    except (ValueError, OverflowError):
        raise InputError(f"{flag} {text!r} is no day", hint="write it as YYYY-MM-DD, such as 2025-04-11") from None


def priorities(words: Sequence[str] | None) -> tuple[Priority, ...]:
    """Return the priorities of these names, in any case. Raises ``InputError`` for others."""
    return tuple(Priority(one_of(word, [one.value for one in Priority], "priority", "priorities")) for word in words or ())


def one_of(word: str, known: Sequence[str], one: str, several: str) -> str:
    """Return a word as it is known, whatever its case. Raises ``InputError``."""
    if word.upper() not in known:
        from distflow.documents.text import did_you_mean

        article = "an" if one[0] in "aeiou" else "a"
        raise InputError(f"{word!r} is not {article} {one}", hint=did_you_mean(word.upper(), known, what=several))
    return word.upper()


def label_selectors(texts: Sequence[str] | None) -> tuple[tuple[str, str], ...]:
    """Return key and selector of each ``--label``. Raises ``InputError``."""
    found = []
    for text in texts or ():
        key, equals, selector = text.partition("=")
        if not equals:
            raise InputError(f"--label {text!r} is not of the form KEY=SELECTOR", hint=f"any value: --label '{text}=*'")
        label_key(key, "--label")
        try:
            label_globs(selector)
        except ValueError as error:
            raise InputError(f"--label {text!r}: {error}") from None
        found.append((key, selector))
    return tuple(found)


def label_key(key: str, flag: str) -> str:
    """Return a label's key. Raises ``InputError`` for what cannot be one."""
    from distflow.client.submitting.labels import is_label_key

    if not is_label_key(key):
        raise InputError(f"{flag} {key!r} is no key of a label", hint="[prefix/]name of letters, digits, `-`, `_` and `.`")
    return key
