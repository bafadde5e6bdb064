"""The node's GPUs: addresses and processes from ``nvidia-smi``, and the GPU of an error in the kernel's log.

A GPU that another process uses is not leased, unless the request allows that (``share_gpus``).
"""

from __future__ import annotations

import os
import re
import time

from distflow.protocol.light_typing import Collection, Dict, FrozenSet, List, Optional, Tuple
from distflow.runtime.probes.facts import nvidia_smi, user_name
from distflow.runtime.processes import attempt_of, output_of
from distflow.runtime.wire import Json

__all__ = [
    "GpuUser",
    "address_of",
    "addresses_of_others",
    "is_xid_of_another",
    "list_gpu_users",
    "read_gpus",
    "wait_until_empty",
]


_TOOL_S = 10.0
_EMPTY_S = 5.0
_POLL_S = 0.2
_FIRST_NAMESPACE = 0xEFFFFFFC
"""Number of the machine's own namespace of process ids: PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h."""

GpuUser = Dict[str, object]
"""A process on a GPU: ``gpu`` (index), ``pid``, ``words`` (its description)."""


def list_gpu_users() -> List[GpuUser]:
    """Return the compute processes that ``nvidia-smi`` shows, once for each of their GPUs; empty without ``nvidia-smi``."""
    smi = nvidia_smi()
    return _users(smi, _gpus(smi)) if smi is not None else []


def read_gpus(with_users: bool) -> Json:
    """Return the data for a lease: ``users`` (empty unless ``with_users``), and ``gpu_addresses`` by index.

    The addresses are read now, because a GPU that later falls off the bus is no longer listed.
    """
    smi = nvidia_smi()
    gpus = _gpus(smi) if smi is not None else []
    addresses = {index: address_of(bus) for index, _, bus in gpus}
    return {
        "users": _users(smi, gpus) if smi is not None and with_users else [],
        "gpu_addresses": {index: address for index, address in addresses.items() if address is not None},
    }


def _gpus(smi: str) -> List[Tuple[str, str, str]]:
    """Return index, uuid and PCI address of each GPU."""
    rows = _query(smi, "--query-gpu=index,uuid,pci.bus_id")
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3 and row[0].isdigit()]


def _users(smi: str, gpus: List[Tuple[str, str, str]]) -> List[GpuUser]:
    index = {uuid: index for index, uuid, _ in gpus}
    users: List[GpuUser] = []
    if not index:
        return users  # a driver that lists no GPUs does not list processes either
    for row in _query(smi, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"):
        if len(row) < 4 or not row[1].isdigit() or row[0] not in index:
            continue
        # A process may have commas in its name.
        users.append(
            {"gpu": int(index[row[0]]), "pid": int(row[1]), "words": _description(row[1], ", ".join(row[2:-1]), row[-1])}
        )
    return users


def wait_until_empty(gpu_ids: Collection[int], attempt: str) -> str:
    """Wait until no process of an ended attempt is on its GPUs: drivers release GPUs later than processes end.

    Returns an empty string, or a description of the processes that remain after some seconds.
    """
    deadline = time.monotonic() + _EMPTY_S
    while True:
        left = [one for one in list_gpu_users() if one["gpu"] in gpu_ids and _belongs_to(int(str(one["pid"])), attempt)]
        if not left:
            return ""
        if time.monotonic() >= deadline:
            return "; ".join("GPU {}: {}".format(one["gpu"], one["words"]) for one in left)
        time.sleep(_POLL_S)  # noqa: TID251  the driver sends no event


def _belongs_to(pid: int, attempt: str) -> bool:
    """Return whether a process belongs to the attempt. An ended process counts: the driver has not released its GPU yet."""
    return attempt_of(pid) == attempt or (_sees_all_processes() and not os.path.exists("/proc/{}".format(pid)))


def _sees_all_processes() -> bool:
    """Return whether the driver's process ids are valid here. In a container with its own process ids, they are not."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_NAMESPACE
    except OSError:
        return False


def _description(pid: str, name: str, memory: str) -> str:
    try:
        who = [user_name(os.stat("/proc/" + pid).st_uid)]
    except OSError:
        who = []
    who += [os.path.basename(name), *(["{} MiB".format(memory)] if memory.isdigit() else [])]
    origin = (
        "started by a task of distflow (if that task has ended, run `distflow node reap`)"
        if attempt_of(int(pid))
        else "which is not known to be a task of distflow"
    )
    return "pid {} ({}), {}".format(pid, ", ".join(who), origin)


def _query(smi: str, query: str) -> List[List[str]]:
    # If the driver hangs, the result is empty. Leases still prevent two distflow workflows from using the same GPU.
    lines = (output_of([smi, query, "--format=csv,noheader,nounits"], _TOOL_S) or "").split("\n")
    return [[field.strip() for field in line.split(",")] for line in lines if line.strip()]


_ADDRESS = r"(?i)\b([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\b"
_XID = r"(?i)NVRM: Xid \((?:PCI:)?([^ )]+)"
"""A MIG slice may follow the address. Old drivers did not write ``PCI:``."""
_XID_PID = r"\bpid='?(\d+)"


def address_of(text: str) -> Optional[str]:
    """Return a normalized PCI address, from nvidia-smi's form ``00000000:3B:00.0`` or the driver's ``0000:3b:00``."""
    found = re.match(_ADDRESS, text)
    return "{:04x}:{:02x}:{:02x}".format(*(int(part, 16) for part in found.groups())) if found else None


def addresses_of_others(addresses: Dict[str, str], gpu_ids: Collection[int]) -> FrozenSet[str]:
    """Return the PCI addresses of all GPUs except ``gpu_ids``. ``addresses`` maps indexes of GPUs to their known addresses."""
    return frozenset(address for gpu, address in addresses.items() if int(gpu) not in gpu_ids)


def is_xid_of_another(line: str, other_gpus: Collection[str], pids: Collection[int]) -> bool:
    """Return whether an Xid error concerns one of ``other_gpus`` (PCI addresses) and no process in ``pids``."""
    gpu, pid = re.search(_XID, line), re.search(_XID_PID, line)
    if pid and int(pid.group(1)) in pids:
        return False
    return gpu is not None and address_of(gpu.group(1)) in other_gpus
