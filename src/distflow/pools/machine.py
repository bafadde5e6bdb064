"""The CPUs, memory and GPUs of this machine, read from the kernel without external tools."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Machine", "count_gpus", "parse_memory", "this_machine"]

_GPU = re.compile(r"nvidia[0-9]+")
_MEMORY = re.compile(r"^MemTotal:\s*([0-9]+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The resources of a machine."""

    cpus: int | None
    """Cores that this process may use."""
    memory: int | None
    """Bytes."""
    gpus: int
    python: str
    """Path of the interpreter that runs distflow."""


def this_machine() -> Machine:
    """Return the resources of this machine."""
    return Machine(
        cpus=_cpus(),
        memory=parse_memory(_read(Path("/proc/meminfo"))),
        gpus=count_gpus(_names(Path("/dev"))),
        python=sys.executable,
    )


def count_gpus(devices: Iterable[str]) -> int:
    """Count the GPUs among the names in ``/dev`` (``nvidia0``; not ``nvidiactl``)."""
    return sum(1 for name in devices if _GPU.fullmatch(name))


def parse_memory(meminfo: str) -> int | None:
    """Return the total memory in bytes from the text of ``/proc/meminfo``; ``None`` if it is missing."""
    match = _MEMORY.search(meminfo)
    return int(match.group(1)) * 1024 if match else None


def _cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _names(path: Path) -> tuple[str, ...]:
    try:
        return tuple(os.listdir(path))
    except OSError:
        return ()
