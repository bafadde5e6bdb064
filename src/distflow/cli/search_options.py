"""Filter options of the commands that list workflows and tasks, and functions that parse them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Annotated

import typer

from distflow.cli.completion import complete_pool, complete_priority
from distflow.documents.quantities import day_start
from distflow.errors import InputError
from distflow.state.record import Priority
from distflow.state.search import label_globs

__all__ = [
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


class Order(str, Enum):
    """The order of a list by time. With ``asc``, the newest entry is last."""

    ASC = "asc"
    DESC = "desc"


CountOption = Annotated[int, typer.Option("--count", "-c", min=1, help="The maximum number of entries.")]
OffsetOption = Annotated[int, typer.Option("--offset", "-f", min=0, help="Skip this number of newest entries.")]
OrderOption = Annotated[Order, typer.Option("--order", "-o", help="The order by time: with asc, the newest entry is last.")]
PoolsOption = Annotated[
    list[str] | None, typer.Option("--pool", "-p", help="Only this pool; may be repeated.", autocompletion=complete_pool)
]
PrioritiesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--priority",
        metavar="HIGH|NORMAL|LOW",
        help="Only entries with this priority; may be repeated.",
        autocompletion=complete_priority,
    ),
]
UsersOption = Annotated[
    list[str] | None, typer.Option("--user", "-u", help="Only entries submitted by this user; may be repeated.")
]
AllUsersOption = Annotated[bool, typer.Option("--all-users", "-a", help="Include all users. This is the default.")]


def choose_users(users: Sequence[str] | None, all_users: bool) -> Sequence[str]:
    """Return the names of the users to filter by. Empty means all users. Raises ``InputError`` if both options are given."""
    if users and all_users:
        raise InputError("--user and --all-users cannot be combined")
    return users or ()


def days(after: str | None, before: str | None, what: str) -> tuple[float | None, float | None]:
    """Return the start times of two days, in seconds since the epoch.

    Args:
        after: The first day, as YYYY-MM-DD, or ``None``.
        before: The day after the last one, or ``None``.
        what: The prefix of the options, for error messages: ``started`` for ``--started-after``.

    Raises:
        InputError: if a day is not valid, or if ``after`` is later than ``before``.

    """
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
        raise InputError(f"{flag}: `{text}` is not a valid date", hint="use the form YYYY-MM-DD, such as 2025-04-11") from None


def priorities(words: Sequence[str] | None) -> tuple[Priority, ...]:
    """Return the priorities with these names, ignoring case. Raises ``InputError`` for an unknown name."""
    return tuple(Priority(one_of(word, [one.value for one in Priority], "priority", "priorities")) for word in words or ())


def one_of(word: str, known: Sequence[str], singular: str, plural: str) -> str:
    """Return a word in upper case if it is valid.

    Args:
        word: The word, in any case.
        known: The valid words, in upper case.
        singular: The noun for such a word in the error message, such as ``priority``.
        plural: The plural of this noun.

    Raises:
        InputError: if the word is not valid.

    """
    if word.upper() not in known:
        from distflow.documents.text import did_you_mean

        article = "an" if singular[0] in "aeiou" else "a"
        raise InputError(f"`{word}` is not {article} {singular}", hint=did_you_mean(word.upper(), known, what=plural))
    return word.upper()


def label_selectors(texts: Sequence[str] | None) -> tuple[tuple[str, str], ...]:
    """Return the key and the selector of each ``--label``. Raises ``InputError`` if one is not valid."""
    found = []
    for text in texts or ():
        key, equals, selector = text.partition("=")
        if not equals:
            raise InputError(
                f"--label `{text}` is not of the form KEY=SELECTOR", hint=f"to match any value: --label '{text}=*'"
            )
        label_key(key, "--label")
        try:
            label_globs(selector)
        except ValueError as error:
            raise InputError(f"--label `{text}` has an invalid selector", hint=str(error)) from None
        found.append((key, selector))
    return tuple(found)


def label_key(key: str, flag: str) -> str:
    """Return the key of a label. Raises ``InputError`` if it is not valid."""
    from distflow.spec.names import LABEL_KEY_FORMAT, is_label_key

    if not is_label_key(key):
        raise InputError(f"{flag}: `{key}` is not a valid label key", hint=f"a key is {LABEL_KEY_FORMAT}")
    return key
