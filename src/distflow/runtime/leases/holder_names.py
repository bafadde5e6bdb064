"""Names of lease holders for people, from their lock files. Other users write these files, so nothing in them is trusted."""

from __future__ import annotations

import re
from typing import Dict, List, Optional, Sequence, Tuple

from distflow.runtime.wire import Json

__all__ = ["folded", "holder_name", "in_use", "label_of"]

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}/[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,63}")


def holder_name(said: Optional[Json], attempt: object) -> str:
    """Return the name of a lease's holder: ``spin-1/worker (alice)``, or ``alice``. ``attempt`` is the asking attempt."""
    said = said or {}
    theirs, ours = str(said.get("attempt") or "").split("/"), str(attempt or "").split("/")
    if len(theirs) == len(ours) == 4 and theirs[:2] == ours[:2]:
        if theirs[3] != ours[3]:
            return "an earlier attempt of this group, which is ending"
        return "this group's own task {}".format(theirs[2][:100])
    user, label = str(said.get("user") or ""), label_of(said)
    user = user if _USER.fullmatch(user) else "an unknown user"
    return "{} ({})".format(label, user) if label else user


def label_of(said: Json) -> str:
    """Return the workflow and task that hold a lease, such as ``spin-1/worker``; empty if the lock file does not name them."""
    label = str(said.get("label") or "")
    return label if _LABEL.fullmatch(label) else ""


def folded(numbers: Sequence[int]) -> str:
    """Return numbers as ranges.

    >>> folded([3, 0, 1, 2, 7])
    '0-3, 7'
    """
    ranges: List[Tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ", ".join(str(first) if first == last else "{}-{}".format(first, last) for first, last in ranges)


def in_use(holders: Sequence[Tuple[int, str]]) -> str:
    """Describe GPUs in use on one line: ``GPUs 0-1 by spin-1/w1 (root), GPU 3 by pid 7 of bob (python)``."""
    by_name: Dict[str, List[int]] = {}
    for gpu, name in holders:
        by_name.setdefault(name, []).append(gpu)
    return ", ".join("GPU{} {} by {}".format("s" * (len(gpus) > 1), folded(gpus), name) for name, gpus in by_name.items())
