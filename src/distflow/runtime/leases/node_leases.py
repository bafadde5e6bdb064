"""Leases of a node's GPUs, ports, CPUs and memory, as file locks that vanish with the processes that hold them."""

from __future__ import annotations

import errno
import os
import socket
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from distflow.runtime.leases import shares, tickets
from distflow.runtime.leases.gpu_users import GpuUser
from distflow.runtime.leases.holder_names import holder_name, in_use
from distflow.runtime.leases.lease_files import lock, open_directory, said_of
from distflow.runtime.wire import Json, OpError

__all__ = ["Held", "keep_place", "take"]

_ATTEMPTS_AT_ANY_PORT = 200


class Held(NamedTuple):
    """A lease as descriptors. It ends when the last copy of them is closed."""

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
    wanted: Optional[shares.Wanted] = None,
    users: Sequence[GpuUser] = (),
) -> Held:
    """Lease ``gpus`` of ``gpu_ids``, ``port`` (a number, ``"any"`` or None) and the amounts in ``wanted``.

    Leases everything or raises ``OpError``. GPUs of ``users`` are unavailable while these processes live.
    """
    held = Held([], None, [], [])
    wanted = wanted or {}
    if not gpus and port is None and not any(want for want, _ in wanted.values()):
        return held
    if not lease_dir:
        raise OpError("bad_request", "`lease_dir` is needed for leases")
    directory = open_directory(lease_dir)
    asks = dict({name: want for name, (want, _) in wanted.items()}, gpus=gpus)
    waits = "attempt" in holder and any(asks.values())
    try:
        kept = tickets.kept_for_others(directory, holder["attempt"]) if waits else tickets.Kept({}, "")
        held.locks.extend(shares.take(directory, wanted, holder, kept))
        _take_gpus(directory, gpus, gpu_ids, holder, held, users, kept)
        if port is not None:
            number, lock, sockets = _take_port(directory, port, holder)
            held = held._replace(port=number, locks=held.locks + [lock], port_sockets=sockets)
        if waits:
            tickets.remove(directory, holder["attempt"])
    except BaseException as error:
        held.close()
        if waits and isinstance(error, OpError) and error.kind == "busy":
            tickets.leave(directory, holder, asks)
        raise
    finally:
        os.close(directory)
    return held


def keep_place(lease_dir: str, holder: Json, asks: Dict[str, int]) -> None:
    """Write a ticket for a task that releases its lease because not all nodes of its gang are available yet."""
    directory = open_directory(lease_dir)
    try:
        tickets.leave(directory, holder, asks)
    finally:
        os.close(directory)


def _take_gpus(
    directory: int,
    gpus: int,
    gpu_ids: Sequence[int],
    holder: Json,
    held: Held,
    users: Sequence[GpuUser],
    kept: tickets.Kept,
) -> None:
    others: List[Tuple[int, str]] = []
    for gpu in gpu_ids:
        if len(held.gpu_ids) == gpus:
            break
        name = "gpu-{}.lock".format(int(gpu))
        fd, _ = lock(directory, name, holder)
        # A process that has ended since the query does not count.
        user = next((one for one in users if one["gpu"] == gpu and os.path.exists("/proc/{}".format(one["pid"]))), None)
        if fd >= 0 and user is not None:
            os.close(fd)
            others.append((gpu, str(user["words"])))
        elif fd >= 0:
            held.gpu_ids.append(gpu)
            held.locks.append(fd)
        else:
            others.append((gpu, holder_name(said_of(directory, name), holder.get("attempt"))))
    if len(held.gpu_ids) < gpus:
        free = "{} of {} GPUs are free and this task needs {}".format(len(held.gpu_ids), len(gpu_ids), gpus)
        raise OpError("busy", "{}. In use: {}".format(free, in_use(others)) if others else free)
    reserved = min(kept.amounts.get("gpus", 0), len(gpu_ids)) if gpus else 0
    if reserved:
        taken = set(held.gpu_ids) | {one["gpu"] for one in users}
        idle = [gpu for gpu in gpu_ids if gpu not in taken and said_of(directory, "gpu-{}.lock".format(int(gpu))) is None]
        if len(idle) < reserved:
            said = "{} of {} GPUs are free and {} are kept for {}, whose gang has waited longer"
            raise OpError("busy", said.format(len(idle) + gpus, len(gpu_ids), reserved, kept.words))


def _take_port(directory: int, port: Union[str, int], holder: Json) -> Tuple[int, int, List[int]]:
    if port == "any":
        for _ in range(_ATTEMPTS_AT_ANY_PORT):
            try:
                sockets = _bind(0)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue  # free for IPv4 only
                raise OpError.from_os(error, "no port can be had") from error
            number = _number_of(sockets[0])
            held, _ = lock(directory, "port-{}.lock".format(number), holder)
            if held >= 0:
                return number, held, sockets
            for fd in sockets:
                os.close(fd)
        raise OpError("port_taken", "no free port was found")
    number = int(port)
    held, _ = lock(directory, "port-{}.lock".format(number), holder)
    if held < 0:
        who = holder_name(said_of(directory, "port-{}.lock".format(number)), holder.get("attempt"))
        raise OpError("port_taken", "port {} is in use by {}".format(number, who))
    try:
        return number, held, _bind(number)
    except (OSError, OverflowError) as error:
        os.close(held)
        if isinstance(error, OSError) and error.errno != errno.EADDRINUSE:
            raise OpError.from_os(error, "port {} cannot be used".format(number)) from error
        raise OpError("port_taken", "port {} is in use by another program (see `ss -tlnp`)".format(number)) from error


def _number_of(fd: int) -> int:
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
                break  # no IPv6 here
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
            port = port or _number_of(bound[0])
        return bound
    except OSError:
        for fd in bound:
            os.close(fd)
        raise
