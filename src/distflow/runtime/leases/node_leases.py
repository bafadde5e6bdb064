"""Leases of a node's GPUs, ports, CPUs and memory, as file locks that end with the processes that hold them.

A share of the CPUs and the memory is a locked file (``claim-<uid>-<n>.lock``) in the lease directory. Shares only prevent
workflows of all users from leasing more in total than the node has. The real use of CPUs and memory is neither measured nor
limited here.

A task whose lease is refused writes a ticket, so that later gangs leave it the amounts that it needs (``leases.tickets``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import time

from distflow.protocol.light_typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union
from distflow.runtime.files.safe_files import has_name
from distflow.runtime.leases import gpu_users, tickets
from distflow.runtime.leases.gpu_users import GpuUser
from distflow.runtime.leases.lease_files import (
    amount_of,
    holder_name,
    in_use,
    label_of,
    lock,
    open_directory,
    open_lock,
    read_held,
)
from distflow.runtime.leases.tickets import ReservedAmounts
from distflow.runtime.wire import Json, OpError

__all__ = ["Held", "list_holders", "take", "write_ticket"]


_ATTEMPTS_AT_ANY_PORT = 200


class Held(NamedTuple):
    """The descriptors of a lease. The lease ends when their last copies are closed, or the locks are released."""

    gpu_ids: List[int]
    port: Optional[int]
    locks: List[int]
    port_sockets: List[int]

    def close(self) -> None:
        """Close this process's copies."""
        for fd in self.locks + self.port_sockets:
            os.close(fd)


def take(
    lease_dir: str,
    gpus: int,
    gpu_ids: Sequence[int],
    port: Union[str, int, None],
    holder: Json,
    wanted: Optional[_Wanted] = None,
    users: Sequence[GpuUser] = (),
) -> Held:
    """Lease ``gpus`` GPUs out of ``gpu_ids``, ``port`` (a number, ``"any"`` or None) and the amounts in ``wanted``.

    Leases all of them or none. Raises ``OpError``. ``holder`` is the record for the lock files. GPUs of the processes ``users``
    are unavailable while these processes live.
    """
    held = Held([], None, [], [])
    wanted = wanted or {}
    if not gpus and port is None and not any(want for want, _ in wanted.values()):
        return held
    if not lease_dir:
        raise OpError("bad_request", "`lease_dir` is missing")
    directory = open_directory(lease_dir)
    amounts = dict({name: want for name, (want, _) in wanted.items()}, gpus=gpus)
    uses_tickets = "attempt" in holder and any(amounts.values())
    try:
        kept = tickets.kept_for_others(directory, holder["attempt"]) if uses_tickets else ReservedAmounts({}, "")
        held.locks.extend(_take_shares(directory, wanted, holder, kept))
        _take_gpus(directory, gpus, gpu_ids, holder, held, users, kept)
        if port is not None:
            number, lock, sockets = _take_port(directory, port, holder)
            held = held._replace(port=number, locks=held.locks + [lock], port_sockets=sockets)
        if uses_tickets:
            tickets.remove_ticket(directory, holder["attempt"])
    except BaseException as error:
        held.close()
        if uses_tickets and isinstance(error, OpError) and error.kind == "busy":
            tickets.write_ticket(directory, holder, amounts)
        if isinstance(error, OSError):
            raise OpError.from_os(error, "cannot use the lease directory `{}`".format(lease_dir)) from error
        raise
    finally:
        os.close(directory)
    return held


def write_ticket(lease_dir: str, holder: Json, amounts: Dict[str, int]) -> None:
    """Write a ticket for a task that releases its lease because not all nodes of its gang are available yet."""
    directory = open_directory(lease_dir)
    try:
        tickets.write_ticket(directory, holder, amounts)
    finally:
        os.close(directory)


def _take_gpus(
    directory: int,
    gpus: int,
    gpu_ids: Sequence[int],
    holder: Json,
    held: Held,
    users: Sequence[GpuUser],
    kept: ReservedAmounts,
) -> None:
    def user_of(gpu: int) -> Optional[GpuUser]:
        # A process that has ended since the query does not count.
        return next((one for one in users if one["gpu"] == gpu and os.path.exists("/proc/{}".format(one["pid"]))), None)

    others: List[Tuple[int, str]] = []
    errors: List[str] = []
    for gpu in gpu_ids:
        if len(held.gpu_ids) == gpus:
            break
        name = "gpu-{}.lock".format(int(gpu))
        fd, who, error = lock(directory, name, holder)
        user = user_of(gpu)
        if fd >= 0 and user is not None:
            os.close(fd)
            others.append((gpu, str(user["words"])))
        elif fd >= 0:
            held.gpu_ids.append(gpu)
            held.locks.append(fd)
        elif who:
            others.append((gpu, who))
        else:
            errors.append(error)
    if len(held.gpu_ids) < gpus:
        text = "{} of {} GPUs are free and this task needs {}".format(len(held.gpu_ids), len(gpu_ids), gpus)
        text += ". In use: {}".format(in_use(others)) if others else ""
        raise OpError("busy", text + (". Cannot lock {}".format(", ".join(errors)) if errors else ""))
    reserved = min(kept.amounts.get("gpus", 0), len(gpu_ids)) if gpus else 0
    if reserved:
        others_free = [gpu for gpu in gpu_ids if gpu not in held.gpu_ids and user_of(gpu) is None]
        idle = [gpu for gpu in others_free if read_held(directory, "gpu-{}.lock".format(int(gpu))) is None]
        if len(idle) < reserved:
            text = "{} of {} GPUs are free, this task needs {}, and {} {}"
            kept_for = _kept_for(kept, reserved)
            raise OpError("busy", text.format(len(idle) + gpus, len(gpu_ids), gpus, reserved, kept_for))


def _kept_for(kept: ReservedAmounts, amount: float) -> str:
    verb, whose = "is" if amount == 1 else "are", "whose gangs have" if ", " in kept.names else "whose gang has"
    return "{} kept for {}, {} waited longer".format(verb, kept.names, whose)


def _take_port(directory: int, port: Union[str, int], holder: Json) -> Tuple[int, int, List[int]]:
    if port == "any":
        last = ""
        for _ in range(_ATTEMPTS_AT_ANY_PORT):
            try:
                sockets = _bind(0)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue  # the port is free only for IPv4
                raise OpError.from_os(error, "cannot reserve a port") from error
            number = _port_of(sockets[0])
            held, who, reason = lock(directory, "port-{}.lock".format(number), holder)
            if held >= 0:
                return number, held, sockets
            what = "is in use by {}" if who else "could not be leased: {}"
            last = "; the last one, port {}, ".format(number) + what.format(who or reason)
            for fd in sockets:
                os.close(fd)
        raise OpError("port_taken", "no free port was found after {} tries".format(_ATTEMPTS_AT_ANY_PORT) + last)
    number = int(port)
    held, who, reason = lock(directory, "port-{}.lock".format(number), holder)
    if held < 0:
        text = "port {} is in use by {}" if who else "cannot lease port {}: {}"
        raise OpError("port_taken", text.format(number, who or reason))
    try:
        return number, held, _bind(number)
    except (OSError, OverflowError) as error:
        os.close(held)
        if isinstance(error, OverflowError):
            raise OpError("port_taken", "cannot use port {}: ports are numbers from 0 to 65535".format(number)) from error
        if error.errno != errno.EADDRINUSE:
            raise OpError.from_os(error, "cannot use port {}".format(number)) from error
        raise OpError("port_taken", "port {} is in use by another program (see `ss -tlnp`)".format(number)) from error


def _port_of(fd: int) -> int:
    with socket.socket(fileno=os.dup(fd)) as bound:
        return int(bound.getsockname()[1])


def _bind(port: int) -> List[int]:
    """Reserve ``port`` by binding it with SO_REUSEADDR, without listening.

    torch's stores can still bind it, and ``bind(0)`` never returns it.
    """
    bound: List[int] = []
    try:
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            try:
                one = socket.socket(family, socket.SOCK_STREAM)
            except OSError:
                if family == socket.AF_INET:
                    raise
                break  # this node has no IPv6
            bound.append(one.detach())
            with socket.socket(fileno=os.dup(bound[-1])) as same:
                same.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    same.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                try:
                    same.bind((address, port))
                except OSError as error:
                    if family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL:
                        os.close(bound.pop())
                        break  # IPv6 is compiled in but disabled
                    raise
            port = port or _port_of(bound[0])
        return bound
    except (OSError, OverflowError):
        for fd in bound:
            os.close(fd)
        raise


_Wanted = Dict[str, Tuple[int, int]]
"""The requested and the total amount of ``cpus`` and ``memory`` (bytes)."""

_SHARE_NAME = r"claim-[0-9]+-[0-9]+\.lock"
_MAX_SHARES = 10_000
_MAX_FILES = 100_000
"""Limit of files in the lease directory, which has one for each port that was ever leased.

Any user can create millions of files there, and an agent that reads them all sends no heartbeat for minutes.
"""
_SEARCH_S = 2.0
"""Time limit of the search for a free file. A file with a shared lock of another process takes a tenth of a second."""
_LIST_TRIES = 50
_LIST_PAUSE_S = 0.005
"""`claims.lock` is normally locked for a millisecond. A longer lock must not block an agent, which has one thread."""
_UNITS = {"cpus": (1, "CPUs"), "memory": (1 << 30, "GiB of memory")}


def _take_shares(directory: int, wanted: _Wanted, holder: Json, kept: ReservedAmounts) -> List[int]:
    """Lease shares of CPUs and memory. Returns the descriptor of the locked file; an empty list if no share is requested.

    Raises ``busy`` if too little is free. The amounts in ``kept`` are reserved by the tickets of gangs that
    have waited longer.
    """
    requested = {name: pair for name, pair in wanted.items() if pair[0]}
    if not requested:
        return []
    list_lock = _lock_list(directory)
    try:
        others = _locked_shares(directory)
        for name, (want, have) in sorted(requested.items()):
            used = sum(amount_of(one.get(name)) for one in others)
            # Placement has compared the request with the whole node, so only the amounts of other tasks matter here.
            if used and used + want > have:
                holders = [one for one in others if amount_of(one.get(name))]
                raise OpError("busy", _shortage(name, want, have, holders, holder.get("attempt")))
            reserved = min(kept.amounts.get(name, 0), have)
            if reserved and used + want + reserved > have:
                unit, called = _UNITS[name]
                called = "CPU" if (name, reserved) == ("cpus", 1) else called
                raise OpError("busy", "{:.4g} {} {}".format(reserved / unit, called, _kept_for(kept, reserved / unit)))
        return [_lock_own_file(directory, dict(holder, **{name: want for name, (want, _) in requested.items()}))]
    finally:
        os.close(list_lock)


def _lock_list(directory: int) -> int:
    """Lock `claims.lock`, so that one process at a time leases shares. Returns its descriptor. May raise ``busy``."""
    for _ in range(_LIST_TRIES):
        list_lock, is_locked = open_lock(directory, "claims.lock"), False
        try:
            fcntl.flock(list_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = has_name(list_lock, "claims.lock", directory)  # false if it was removed after it was opened
        except BlockingIOError:
            time.sleep(_LIST_PAUSE_S)  # noqa: TID251  flock has no time limit
        finally:
            if not is_locked:
                os.close(list_lock)
        if is_locked:
            return list_lock
    raise OpError(
        "busy", "another process on this node keeps `claims.lock` in the lease directory locked; `lslocks` on the node shows it"
    )


def _locked_shares(directory: int) -> List[Json]:
    """Return the records of the locked files of shares, except empty ones. They may contain anything."""
    names: List[str] = []
    with os.scandir(directory) as entries:
        for number, entry in enumerate(entries):
            if number >= _MAX_FILES or len(names) >= _MAX_SHARES:
                text = "the lease directory contains more than {} files; ask root to remove files that no process locks"
                raise OpError("busy", text.format(number))
            if re.fullmatch(_SHARE_NAME, entry.name):
                names.append(entry.name)
    return [record for record in (read_held(directory, name) for name in names) if record]


def _lock_own_file(directory: int, holder: Json) -> int:
    """Lock a free file of this user. Files are reused, because ending processes cannot remove them."""
    until = time.monotonic() + _SEARCH_S
    for number in range(_MAX_SHARES):
        fd, _, error = lock(directory, "claim-{}-{}.lock".format(os.getuid(), number), holder)
        if fd >= 0:
            return fd
        if time.monotonic() > until:
            break
    if error:
        raise OpError("busy", "cannot lock a file in the lease directory to lease CPUs or memory: {}".format(error))
    count = "{} file{}".format(number + 1, "s" if number else "")
    raise OpError(
        "busy",
        "other processes hold locks on {} `claim-{}-*.lock` in the lease directory; `lslocks` on the node shows them".format(
            count, os.getuid()
        ),
    )


def _shortage(name: str, want: int, have: int, others: List[Json], attempt: object) -> str:
    unit, called = _UNITS[name]
    left = max(0, have - sum(amount_of(one[name]) for one in others))
    free = "{:.4g} of {:.4g} {} are free and this task needs {:.4g}".format(left / unit, have / unit, called, want / unit)
    held = ["{:.4g} by {}".format(amount_of(one[name]) / unit, holder_name(one, attempt)) for one in others]
    return "{}. In use: {}".format(free, ", ".join(held))


_LOCK_NAME = r"(gpu|port|claim)-([0-9]{1,10})(?:-[0-9]{1,10})?\.lock"
_MAX_LOCKS = 10_000
_MAX_AMOUNT = 1 << 53
"""Limit of an amount. Any user may have written it, and the sum must fit into a message."""


def list_holders(lease_dir: str) -> Json:
    """Return ``holders``, one for each attempt, and ``foreign``, the processes on GPUs that are not leased.

    This function leases nothing. It checks each lock file by taking a shared lock for an instant. A process that leases the
    same file meanwhile waits until that lock is released.
    """
    found: Dict[Tuple[str, str], Json] = {}
    for kind, number, record in _held_locks(lease_dir):
        holder = found.setdefault((str(record.get("user")), str(record.get("attempt"))), _holder(record))
        if kind == "claim":
            for name in ("cpus", "memory"):
                holder[name] = min(holder[name] + amount_of(record.get(name)), _MAX_AMOUNT)
        else:
            holder["gpus" if kind == "gpu" else "ports"].append(number)
    for holder in found.values():
        holder["gpus"].sort()
        holder["ports"].sort()
    held = {gpu for holder in found.values() for gpu in holder["gpus"]}
    foreign = [user for user in gpu_users.list_gpu_users() if user["gpu"] not in held]
    return {"holders": [found[key] for key in sorted(found)], "foreign": foreign}


def _holder(record: Json) -> Json:
    return {
        "user": str(record.get("user") or "")[:100],
        "attempt": str(record.get("attempt") or "")[:500],
        "label": label_of(record),
        "pid": amount_of(record.get("pid")) or None,
        "gpus": [],
        "ports": [],
        "cpus": 0,
        "memory": 0,
    }


def _held_locks(lease_dir: str) -> List[Tuple[str, int, Json]]:
    """Return kind, number and untrusted content of each held lock file."""
    if not os.path.isdir(os.path.expanduser(lease_dir)):
        return []
    found = []
    try:
        directory = open_directory(lease_dir)
    except OpError:
        return []
    try:
        for name in sorted(os.listdir(directory))[:_MAX_LOCKS]:
            match = re.fullmatch(_LOCK_NAME, name)
            record = read_held(directory, name) if match else None
            if match and record is not None:
                found.append((match.group(1), int(match.group(2)), record))
    finally:
        os.close(directory)
    return found
