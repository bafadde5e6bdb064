"""Tickets in the lease directory: a gang that waits for a node keeps its place in the queue before later gangs.

Without tickets, a gang that needs several nodes at once could wait forever behind short gangs that follow one another on each
node. A task whose lease is refused as ``busy`` writes a ticket with the amounts that it needs. A lease for a later gang is
refused if it would leave less than these amounts.

All users of the machine write tickets, so their effect is limited. A ticket is valid while its file is fresh, and only if its
name contains the id of the file's owner. Only the oldest gang of each user counts. A task that has itself waited for
``_RESPECT_S`` ignores all tickets.
"""

from __future__ import annotations

import json
import os
import re
import stat

from distflow.protocol.light_typing import Any, Dict, NamedTuple, Tuple
from distflow.runtime.clock import now
from distflow.runtime.hashing import sha256_hex
from distflow.runtime.leases import lease_files
from distflow.runtime.leases.lease_files import holder_name
from distflow.runtime.wire import Json

__all__ = ["NAME", "ReservedAmounts", "kept_for_others", "remove_ticket", "write_ticket"]

NAME = r"ticket-([0-9]{1,10})-[0-9a-f]{16}\.json"
_FRESH_S = 20.0
"""The maximum age of a valid ticket. A waiting gang requests its lease again within 10 s, which renews its ticket."""
_RESPECT_S = 60.0
_FORGOTTEN_S = 120.0
_MOST = 10_000
_AMOUNTS = ("gpus", "cpus", "memory")

_waiting: Dict[str, Tuple[float, float]] = {}
"""Tasks that wait for a lease → the time of the first and of the last ticket that this agent wrote for them."""


class ReservedAmounts(NamedTuple):
    """Amounts that are kept for gangs that have waited longer."""

    amounts: Dict[str, int]
    """Amounts of ``gpus``, ``cpus`` and ``memory`` (bytes)."""
    names: str
    """A task of each of those gangs, for messages."""


def kept_for_others(directory: int, attempt: str) -> ReservedAmounts:
    """Return the amounts that a lease for ``attempt`` must leave for gangs that have waited longer, according to tickets."""
    at = now()
    since = _waiting[_task(attempt)][0] if _task(attempt) in _waiting else at
    oldest: Dict[int, Tuple[float, str]] = {}
    gangs: Dict[Tuple[int, str], ReservedAmounts] = {}
    for name in os.listdir(directory)[:_MOST] if at - since < _RESPECT_S else ():
        match = re.fullmatch(NAME, name)
        ticket = _read(directory, name, int(match.group(1)), at) if match else None
        if not ticket or ticket["gang"] == _gang(attempt) or ticket["since"] >= since:
            continue
        owner, gang = ticket["owner"], ticket["gang"]
        oldest[owner] = min(oldest.get(owner, (ticket["since"], gang)), (ticket["since"], gang))
        before = gangs.get((owner, gang), ReservedAmounts(dict.fromkeys(_AMOUNTS, 0), ""))
        amounts = {one: before.amounts[one] + ticket[one] for one in _AMOUNTS}
        gangs[owner, gang] = ReservedAmounts(amounts, holder_name(ticket, None))
    ahead = [gangs[owner, gang] for owner, (_, gang) in oldest.items()]
    return ReservedAmounts(
        {one: sum(kept.amounts[one] for kept in ahead) for one in _AMOUNTS}, ", ".join(kept.names for kept in ahead)
    )


def write_ticket(directory: int, holder: Json, amounts: Dict[str, int]) -> None:
    """Write or renew the ticket of a waiting task. If that fails, the task only loses its place in the queue."""
    at, task = now(), _task(str(holder["attempt"]))
    for one in [one for one, (_, last) in _waiting.items() if at - last > _FORGOTTEN_S]:
        del _waiting[one]
    since = _waiting.get(task, (at, at))[0]
    _waiting[task] = (since, at)
    ticket = dict(holder, gang=_gang(str(holder["attempt"])), since=since, **amounts)
    name = _name(task)
    new = "{}.{}".format(name, os.getpid())
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags, 0o644, dir_fd=directory), "w") as file:
            os.fchmod(file.fileno(), 0o644)  # other users read it
            json.dump(ticket, file)
        os.rename(new, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        _unlink(directory, new)


def remove_ticket(directory: int, attempt: str) -> None:
    """Remove the ticket of a task that has its lease. If the lease is soon released, ``write_ticket`` restores its place."""
    _unlink(directory, _name(_task(attempt)))


def _read(directory: int, name: str, owner: int, at: float) -> Dict[str, Any]:
    """Return a fresh and valid ticket; empty for any other file."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return {}
    try:
        info = os.fstat(fd)
        is_sound = stat.S_ISREG(info.st_mode) and info.st_nlink == 1 and info.st_uid == owner
        ticket = lease_files.read_holder(fd) if is_sound and abs(at - info.st_mtime) < _FRESH_S else None
    except OSError:
        return {}
    finally:
        os.close(fd)
    since = (ticket or {}).get("since")
    if (
        ticket is None
        or isinstance(since, bool)
        or not isinstance(since, (int, float))
        or not isinstance(ticket.get("gang"), str)
    ):
        return {}
    return dict(ticket, owner=owner, **{one: lease_files.amount_of(ticket.get(one)) for one in _AMOUNTS})


def _task(attempt: str) -> str:
    return attempt.rpartition("/")[0]


def _gang(attempt: str) -> str:
    return "/".join(attempt.split("/")[:2])


def _name(task: str) -> str:
    return "ticket-{}-{}.json".format(os.getuid(), sha256_hex(task.encode("utf-8", "replace"))[:16])


def _unlink(directory: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except OSError:
        pass
