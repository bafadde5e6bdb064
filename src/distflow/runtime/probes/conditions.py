"""A node's free memory and shared memory, the limits of a login, and GPU errors since the boot."""

from __future__ import annotations

import os
import resource
from typing import Dict, List, Optional

from distflow.runtime.guard import kernel_log
from distflow.runtime.wire import Json

__all__ = ["conditions"]

_SHM = "/dev/shm"
_RDMA = "/sys/class/infiniband"
_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}


def conditions() -> Json:
    """Measure the conditions for this login. Values that this system does not report are ``None``."""
    return {
        "memory": _memory(),
        "shm": _shm(),
        "limits": {name: _soft(limit) for name, limit in _LIMITS.items()},
        "has_rdma": _has_rdma(),
        "xids": kernel_log.xids(),
    }


def _memory() -> Optional[Json]:
    found: Dict[str, int] = {}
    try:
        with open("/proc/meminfo", encoding="ascii", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    found[name] = int(value.split()[0]) << 10
        return {"available_bytes": found["MemAvailable"], "total_bytes": found["MemTotal"]}
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _shm() -> Optional[Json]:
    try:
        found = os.statvfs(_SHM)
    except OSError:
        return None
    return {"free_bytes": found.f_bavail * found.f_frsize, "total_bytes": found.f_blocks * found.f_frsize}


def _soft(limit: int) -> Optional[int]:
    soft = resource.getrlimit(limit)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _has_rdma() -> bool:
    names: List[str] = []
    try:
        names = os.listdir(_RDMA)
    except OSError:
        pass
    return bool(names)
