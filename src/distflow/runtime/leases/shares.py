"""CPUs and memory that are promised to attempts on this node, for all of its users.

Each promise is a file in the lease directory, locked by its holder, so that it ends with the holder's processes. It counts
while it is locked. Nothing is measured or enforced here: this only prevents workflows, also those of several users, from being
promised more than the node has.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from typing import Dict, List, Tuple

from distflow.runtime.leases.holder_names import holder_name
from distflow.runtime.leases.lease_files import lock, open_lock, said_of
from distflow.runtime.leases.tickets import Kept
from distflow.runtime.wire import Json, OpError

__all__ = ["Wanted", "number_of", "take"]

Wanted = Dict[str, Tuple[int, int]]
"""The requested and the total amount of ``cpus`` and ``memory`` (bytes)."""

_NAME = re.compile(r"claim-[0-9]+-[0-9]+\.lock")
_MOST = 10_000
_MOST_FILES = 100_000
"""Limit of files in the lease directory, which has one for each port that was ever leased.

Any user can create millions of files there, and an agent that reads them all sends no heartbeat for minutes.
"""
_OWN_S = 2.0
"""Time limit of the search for a free file. A file that another process holds as shared costs a tenth of a second."""
_GATE_TRIES = 50
_GATE_PAUSE_S = 0.005
"""The list is normally locked for a millisecond. A longer lock must not block an agent, which has one thread."""
_UNITS = {"cpus": (1, "CPUs"), "memory": (1 << 30, "GiB of memory")}


def take(directory: int, wanted: Wanted, holder: Json, kept: Kept) -> List[int]:
    """Get a promise. Returns the descriptor that holds it, or none if nothing is asked for.

    Raises ``busy`` with the holders of the rest. ``kept`` is left for others.
    """
    asked = {name: pair for name, pair in wanted.items() if pair[0]}
    if not asked:
        return []
    gate = open_lock(directory, "claims.lock")
    try:
        _enter(gate)
        others = _held(directory)
        for name, (want, have) in sorted(asked.items()):
            used = sum(number_of(one.get(name)) for one in others)
            # A request for more than the node has was accepted by placement: it runs alone.
            if used and used + want > have:
                holders = [one for one in others if number_of(one.get(name))]
                raise OpError("busy", _words(name, want, have, holders, holder.get("attempt")))
            reserved = min(kept.amounts.get(name, 0), have)
            if reserved and used + want + reserved > have:
                unit, called = _UNITS[name]
                said = "{:.4g} {} are kept for {}, whose gang has waited longer"
                raise OpError("busy", said.format(reserved / unit, called, kept.words))
        return [_own(directory, dict(holder, **{name: want for name, (want, _) in asked.items()}))]
    finally:
        os.close(gate)


def _enter(gate: int) -> None:
    """Lock the list of promises. Raises ``busy`` if another process keeps it locked."""
    for _ in range(_GATE_TRIES):
        try:
            return fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_GATE_PAUSE_S)  # noqa: TID251  flock knows no time limit
    raise OpError("busy", "another process of this machine keeps claims.lock of the lease directory (lslocks names it)")


def _held(directory: int) -> List[Json]:
    """Return the records of the locked files, which may contain anything."""
    names: List[str] = []
    with os.scandir(directory) as entries:
        for number, entry in enumerate(entries):
            if number >= _MOST_FILES or len(names) >= _MOST:
                said = "the lease directory holds more than {} files; let root remove those of users that no process locks"
                raise OpError("busy", said.format(number))
            if _NAME.fullmatch(entry.name):
                names.append(entry.name)
    return [said for said in (said_of(directory, name) for name in names) if said]


def _own(directory: int, holder: Json) -> int:
    """Lock a free file of this user. Files are reused, because ending processes cannot remove them."""
    until = time.monotonic() + _OWN_S
    for number in range(_MOST):
        fd, _ = lock(directory, "claim-{}-{}.lock".format(os.getuid(), number), holder)
        if fd >= 0:
            return fd
        if time.monotonic() > until:
            break
    raise OpError(
        "busy", "other processes keep {} files claim-{}-*.lock of the lease directory".format(number + 1, os.getuid())
    )


def number_of(value: object) -> int:
    """Return an untrusted amount, or 0 if it is not one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _words(name: str, want: int, have: int, others: List[Json], attempt: object) -> str:
    unit, called = _UNITS[name]
    left = max(0, have - sum(number_of(one[name]) for one in others))
    free = "{:.4g} of {:.4g} {} are free and this task needs {:.4g}".format(left / unit, have / unit, called, want / unit)
    held = ["{:.4g} by {}".format(number_of(one[name]) / unit, holder_name(one, attempt)) for one in others]
    return "{}. In use: {}".format(free, ", ".join(held))
