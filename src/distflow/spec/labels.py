"""The format of labels and tags. Labels are set at submission; tags can be changed later."""

from __future__ import annotations

import re

__all__ = ["MOST_LABELS", "check_label", "check_tag", "is_label_key"]

MOST_LABELS = 16

_WORD = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_PREFIX = r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?"
_WORDS = "at most 63 letters, digits, `-`, `_` and `.`, with a letter or digit at both ends"


def is_label_key(key: str) -> bool:
    """Return whether ``key`` is a valid label key: ``[prefix/]name``."""
    return re.fullmatch(f"(?:{_PREFIX}/)?{_WORD}", key) is not None


def check_label(key: str, value: str) -> None:
    """Raise ``ValueError`` unless this is a label."""
    if not is_label_key(key):
        raise ValueError(f"`{key}` is no key of a label: [prefix/]name of letters, digits, `-`, `_` and `.`")
    if not re.fullmatch(_WORD, value):
        raise ValueError(f"`{value}` is no value of a label: {_WORDS}")


def check_tag(tag: str) -> None:
    """Raise ``ValueError`` unless this is a tag."""
    if not re.fullmatch(_WORD, tag):
        raise ValueError(f"`{tag}` is no tag: {_WORDS}")
