"""Text for findings: suggestions for mistyped names, and lists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["did_you_mean", "few", "listed"]


def did_you_mean(name: str, known: Iterable[str], *, what: str = "known") -> str:
    """Return a hint with the most similar known name, if there is one, and all known names."""
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
    """Return names as a list in a sentence: ```a`, `b` and `c```."""
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}" if quoted else "nothing"


def few(words: Sequence[str], between: str = ", ", *, most: int = 4, spare: int = 1) -> str:
    """Join the first ``most`` words for one line and count the rest: a pool may have a thousand nodes.

    Up to ``spare`` further words are shown instead of counted.
    """
    more = [f"and {len(words) - most} more"] if len(words) > most + spare else []
    return between.join([*(words[:most] if more else words), *more])


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
