"""The filters of ``distflow workflow list``, and their conversion to SQL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from distflow.errors import InputError
from distflow.lifecycle.states import Reason, WorkflowState
from distflow.state.record import Priority

__all__ = ["Search", "label_globs", "where"]

_MOST_GLOBS, _MOST_BYTES = 32, 4096
_SELECTOR = r"(?:[-A-Za-z0-9_.*]|\([-A-Za-z0-9_.*]+(?:\|[-A-Za-z0-9_.*]+)+\))+"
_PARTS = r"\(([^)]*)\)|([^(]+)"


class Search(Struct, frozen=True, kw_only=True):
    """The conditions of a search for workflows. Without any condition, all workflows match."""

    statuses: Sequence[tuple[WorkflowState, Reason | None]] | None = None
    """Allowed pairs of state and reason: an empty list matches no workflow, ``None`` matches all.

    The reason ``None`` in a pair matches only workflows without a reason.
    """
    name: str | None = None
    """A part of the id."""
    users: Sequence[str] = ()
    pools: Sequence[str] = ()
    priorities: Sequence[Priority] = ()
    tags: Sequence[str] = ()
    """Tags, one of which the workflow has."""
    labels: Sequence[tuple[str, str]] = ()
    """Keys and selectors (``label_globs``), all of which match."""
    without_labels: Sequence[str] = ()
    """Keys of labels, none of which the workflow has."""
    submitted_after: float | None = None
    """Submitted at this instant or later."""
    submitted_before: float | None = None
    """Submitted before this instant."""
    unfinished: bool = False
    """Whether to find only workflows that have not ended or whose logs are incomplete.

    Ended workflows that need a supervisor only to stop orphan attempts do not match.
    """


def label_globs(selector: str) -> tuple[str, ...]:
    """Return the patterns of a label selector, one of which must match. ``*`` matches any text, ``(a|b)`` one of the texts.

    Raises ``ValueError`` if the selector is not valid.

    >>> label_globs("(train|eval)-*")
    ('train-*', 'eval-*')
    """
    if len(selector.encode()) > _MOST_BYTES:
        raise ValueError(f"use a shorter pattern: it is longer than {_MOST_BYTES} bytes")
    if not re.fullmatch(_SELECTOR, selector):
        raise ValueError("use letters, digits, `-`, `_`, `.`, `*` and alternatives such as `(a|b)`, which cannot be nested")
    globs = [""]
    for several, text in re.findall(_PARTS, selector):
        globs = [before + one for before in globs for one in (several.split("|") if several else [text])]
        if len(globs) > _MOST_GLOBS:
            raise ValueError(f"use fewer alternatives: it expands to more than {_MOST_GLOBS} patterns")
    return tuple(globs)


def where(search: Search) -> tuple[str, list[object]]:
    """Return the SQL condition of a search over the table ``workflows``, and its values.

    Raises ``InputError`` for a label selector that is not valid.
    """
    parts, values = ["1"], list[object]()

    def add(part: str, *more: object) -> None:
        parts.append(part)
        values.extend(more)

    if search.statuses is not None:
        pairs = [(state.value, reason.value if reason else "") for state, reason in search.statuses]
        either = f"(state, coalesce(reason, '')) IN (VALUES {','.join(['(?,?)'] * len(pairs))})" if pairs else "0"
        add(either, *(word for pair in pairs for word in pair))
    columns: Mapping[str, Sequence[str]] = MappingProxyType(
        {"user": search.users, "pool": search.pools, "priority": [one.value for one in search.priorities]}
    )
    for column, wanted in columns.items():
        if wanted:
            add(f"{column} IN ({_marks(wanted)})", *wanted)
    if search.name is not None:
        add("instr(id, ?) > 0", search.name)
    if search.tags:
        add(f"uuid IN (SELECT workflow FROM tags WHERE tag IN ({_marks(search.tags)}))", *search.tags)  # noqa: S608  question marks are pasted
    for key, selector in search.labels:
        globs = _globs_of(key, selector)
        condition = " OR ".join(["json_extract(labels, ?) GLOB ?"] * len(globs))
        add(f"({condition})", *(value for glob in globs for value in (_path(key), glob)))
    for key in search.without_labels:
        add("json_extract(labels, ?) IS NULL", _path(key))
    if search.submitted_after is not None:
        add("submitted_at >= ?", search.submitted_after)
    if search.submitted_before is not None:
        add("submitted_at < ?", search.submitted_before)
    if search.unfinished:
        add("unfinished = 1")
    return " AND ".join(parts), values


def _globs_of(key: str, selector: str) -> tuple[str, ...]:
    try:
        return label_globs(selector)
    except ValueError as error:
        raise InputError(f"the pattern `{selector[:100]}` for the label `{key}` is not valid", hint=str(error)) from None


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


def _path(key: str) -> str:
    return f'$."{key}"'
