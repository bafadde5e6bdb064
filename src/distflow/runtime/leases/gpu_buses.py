"""Assigns GPU errors in the kernel's log to GPUs, by the PCI addresses in its lines. Pure."""

from __future__ import annotations

import re
from typing import Collection, Dict, FrozenSet, Optional

__all__ = ["address_of", "is_of_another", "others"]

_ADDRESS = re.compile(r"(?i)\b([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\b")
_XID = re.compile(r"(?i)NVRM: Xid \((?:PCI:)?([^ )]+)")
"""A MIG slice may follow the address. Old drivers did not write ``PCI:``."""
_PID = re.compile(r"\bpid='?(\d+)")


def address_of(text: str) -> Optional[str]:
    """Return a normalized PCI address, from nvidia-smi's form ``00000000:3B:00.0`` or the driver's ``0000:3b:00``."""
    found = _ADDRESS.match(text)
    return "{:04x}:{:02x}:{:02x}".format(*(int(part, 16) for part in found.groups())) if found else None


def others(addresses: Dict[str, str], gpu_ids: Collection[int]) -> FrozenSet[str]:
    """Return the PCI addresses of the node's other GPUs. ``addresses`` maps the index of each GPU to its address, if known."""
    return frozenset(at for gpu, at in addresses.items() if int(gpu) not in gpu_ids)


def is_of_another(line: str, elsewhere: Collection[str], pids: Collection[int]) -> bool:
    """Whether an Xid is about one of the GPUs ``elsewhere``, and about no process in ``pids``."""
    said, pid = _XID.search(line), _PID.search(line)
    if pid and int(pid.group(1)) in pids:
        return False
    return said is not None and address_of(said.group(1)) in elsewhere
