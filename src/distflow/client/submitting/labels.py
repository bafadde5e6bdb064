"""Check the labels of workflows, and merge those of a spec with those of the command line."""

from __future__ import annotations

from collections.abc import Mapping

from distflow.errors import InputError
from distflow.spec.names import MOST_LABELS, check_label, is_label_key

__all__ = ["check_label", "is_label_key", "join_labels"]


def join_labels(labels: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Merge the labels of a spec with given labels, which take precedence. Raises ``InputError`` if there are too many."""
    joined = {**labels, **given}
    if len(joined) > MOST_LABELS:
        raise InputError(f"a workflow has at most {MOST_LABELS} labels; these are {len(joined)}")
    return joined
