"""Whose GPU an error in the kernel's log is of: the PCI address in its line, against those of the node's GPUs. Pure."""

from __future__ import annotations

import re
from typing import Collection, Dict, FrozenSet, Optional

__all__ = ["address_of", "is_of_another", "others"]

_ADDRESS = re.compile(r"(?i)\b([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\b")
_XID = re.compile(r"(?i)NVRM: Xid \((?:PCI:)?([^ )]+)")
"""The address may be followed by a MIG slice; old drivers wrote no ``PCI:``."""
_PID = re.compile(r"\bpid='?(\d+)")


def address_of(text: str) -> Optional[str]:
    """Where on the bus, as both write it: ``00000000:3B:00.0`` is nvidia-smi's, ``0000:3b:00`` the driver's."""
    found = _ADDRESS.match(text)
    return "{:04x}:{:02x}:{:02x}".format(*(int(part, 16) for part in found.groups())) if found else None


def others(addresses: Dict[str, str], gpu_ids: Collection[int]) -> FrozenSet[str]:
    """Where the node's other GPUs are. ``addresses``: by index, of those that are known."""
    return frozenset(at for gpu, at in addresses.items() if int(gpu) not in gpu_ids)


def is_of_another(line: str, elsewhere: Collection[str], pids: Collection[int]) -> bool:
    """Whether an Xid is of one of the GPUs that are ``elsewhere``, and of no process in ``pids``."""
    said, pid = _XID.search(line), _PID.search(line)
    if pid and int(pid.group(1)) in pids:
        return False
    return said is not None and address_of(said.group(1)) in elsewhere
