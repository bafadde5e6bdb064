"""Which CPUs a rank runs on: threads per rank, and the NUMA node of its GPU.

Reads ``/sys`` and ``/proc/driver/nvidia`` only: the launcher has no CUDA. GPUs are numbered in the order of their PCI
addresses, which is CUDA's own order for GPUs of one kind (and for all with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["cpus_near_gpu", "parse_cpus", "threads_per_rank"]


def threads_per_rank(size: int) -> int:
    """Return how many CPU threads each of ``size`` ranks of this machine gets: its share of the CPUs that may be used."""
    return max(1, len(os.sched_getaffinity(0)) // size)


def cpus_near_gpu(local_rank: int, environment: Mapping[str, str], root: Path = Path("/")) -> frozenset[int] | None:
    """Return the CPUs of the NUMA node that the GPU of a rank hangs on; ``None`` when the machine does not say.

    ``root`` is where ``sys`` and ``proc`` are.
    """
    address = _gpu_address(local_rank, environment, root)
    if address is None:
        return None
    try:
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
        if node < 0:  # the firmware does not know
            return None
        return parse_cpus((root / f"sys/devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return None


def parse_cpus(text: str) -> frozenset[int]:
    """Return the numbers in the kernel's form ``0-3,8,10-11``. Raises ``ValueError`` for anything else."""
    cpus: set[int] = set()
    for piece in filter(None, text.strip().split(",")):
        first, _, last = piece.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _gpu_address(local_rank: int, environment: Mapping[str, str], root: Path) -> str | None:
    """Return the PCI address of the GPU that a process sees as number ``local_rank``."""
    folder = root / "proc/driver/nvidia/gpus"
    try:
        addresses = sorted(path.name for path in folder.iterdir())
    except OSError:
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return addresses[local_rank] if local_rank < len(addresses) else None
    names = [name.strip() for name in visible.split(",")]
    if local_rank >= len(names):
        return None
    name = names[local_rank]
    if name.isdecimal():
        return addresses[int(name)] if int(name) < len(addresses) else None
    return next((address for address in addresses if name and name in _uuid(folder / address)), None)


def _uuid(folder: Path) -> str:
    try:
        lines = (folder / "information").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("GPU UUID")), "")
