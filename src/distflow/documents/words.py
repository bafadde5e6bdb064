"""Words for findings: suggestions for what was mistyped, and lists that read well."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["did_you_mean", "few", "listed"]


def did_you_mean(name: str, known: Iterable[str], *, what: str = "known") -> str:
    """Return a hint: the nearest of the known names, when one is near, and all of them."""
    names = sorted(set(known))
    if not names:
        return f"there are no {what} names here"
    plain: dict[str, str] = {}
    for candidate in names:
        plain.setdefault(_plain(candidate), candidate)
    near = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=0.6)
    every = f"{what}: {', '.join(f'`{known_name}`' for known_name in names[:40])}{', …' if len(names) > 40 else ''}"
    return f"did you mean `{plain[near[0]]}`? {every}" if near else every


def listed(names: Iterable[str]) -> str:
    """Return names as a list to read: ```a`, `b` and `c```."""
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}" if quoted else "nothing"


def few(words: Sequence[str], between: str = ", ", *, most: int = 4, spare: int = 1) -> str:
    """Join words for one line, the first of many and how many more there are: a pool may have a thousand nodes.

    ``spare``: so many beyond the ``most`` are shown rather than counted.
    """
    more = [f"and {len(words) - most} more"] if len(words) > most + spare else []
    return between.join([*(words[:most] if more else words), *more])


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
