"""Names of datasets as people write them: ``mnist``, ``mnist:3``, ``mnist:latest``. Pure."""

from __future__ import annotations

import re

from distflow.errors import InputError

__all__ = ["parse_dataset"]

_DATASET = re.compile(r"([A-Za-z0-9_-]+)(?::([A-Za-z0-9_-]+))?")


def parse_dataset(text: str) -> tuple[str, int | None]:
    """Return the name of a dataset and the version; ``None``: the latest. Raises ``InputError``.

    >>> parse_dataset("mnist:3")
    ('mnist', 3)
    >>> parse_dataset("mnist:latest")
    ('mnist', None)
    """
    match = _DATASET.fullmatch(text)
    if match is None:
        hint = "use letters, digits, `-` and `_`; a version stands behind a colon: `mnist:3`"
        raise InputError(f"`{text}` is no name of a dataset", hint=hint)
    name, version = match.group(1), match.group(2)
    if version in (None, "latest"):
        return name, None
    if not re.fullmatch("[1-9][0-9]{0,8}", version):
        raise InputError(f"`{version}` is no version of a dataset", hint="versions are 1, 2, 3, …, and `latest`")
    return name, int(version)
