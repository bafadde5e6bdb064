"""Findings about the conditions on a node: memory, shared memory, limits, health of GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from distflow.backends.machines.checks.finding import Finding, amount, count, warning
from distflow.backends.machines.checks.measured import Measured

__all__ = ["RULES"]

_LEAST = 1 << 30
_LEAST_PART = 0.05
_LEAST_FILES = 1024
_LEAST_PROCESSES = 4096


def _memory(measured: Measured) -> Iterator[Finding]:
    memory = measured.probe.get("memory")
    if not memory:
        return
    available, total = memory["available_bytes"], memory["total_bytes"]
    if available < _LEAST or available < total * _LEAST_PART:
        message = f"only {amount(available)} of its {amount(total)} of memory are free"
        yield warning("memory", [measured.node.name], message, "see what uses it: `ps aux --sort=-rss | head`")


def _shm(measured: Measured) -> Iterator[Finding]:
    shm = measured.probe.get("shm")
    if shm and shm["free_bytes"] < _LEAST:
        message = f"only {amount(shm['free_bytes'])} of {amount(shm['total_bytes'])} are free in /dev/shm"
        hint = (
            "workers of a DataLoader and NCCL share memory there: remove what is left in it, or as root "
            "`mount -o remount,size=50% /dev/shm`; of a container, `--shm-size`"
        )
        yield warning("shm", [measured.node.name], message, hint)


def _limits(measured: Measured) -> Iterator[Finding]:
    limits, names = measured.probe.get("limits") or {}, [measured.node.name]
    files, processes, locked = limits.get("nofile"), limits.get("nproc"), limits.get("memlock")
    where = "raise it in its /etc/security/limits.conf, or by `ulimit` in `setup`"
    if files is not None and files < _LEAST_FILES:
        yield warning("limits", names, f"a process may open {count(files, 'file')} only (ulimit -n)", where)
    if processes is not None and processes < _LEAST_PROCESSES:
        message = f"its user may have {count(processes, 'process', 'processes')} and threads only (ulimit -u)"
        yield warning("limits", names, message, where)
    if locked is not None and measured.probe.get("has_rdma"):
        message = f"a process may lock {amount(locked)} of memory only (ulimit -l), and it has InfiniBand or RoCE"
        yield warning("limits", names, message, f"NCCL needs `unlimited` for them: {where}")


def _gpu_health(measured: Measured) -> Iterator[Finding]:
    names = [measured.node.name]
    broken = [gpu for gpu in measured.gpus or () if gpu.ecc_errors]
    if broken:
        said = ", ".join(f"GPU {gpu.index}: {gpu.ecc_errors}" for gpu in broken)
        message = f"memory errors that could not be corrected, since its driver was loaded: {said}"
        yield warning("gpus", names, message, "reset the GPU or reboot; when they come again, have it replaced")
    xids = measured.probe.get("xids") or []
    if xids:
        message = f"{count(len(xids), 'GPU error')} in its kernel's log, the last: {xids[-1]}"
        yield warning("gpus", names, message, "the number behind `Xid` is explained in NVIDIA's list of Xid errors")


RULES = (_memory, _shm, _limits, _gpu_health)
