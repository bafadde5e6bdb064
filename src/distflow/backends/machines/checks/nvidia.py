"""Parsers for the output of ``nvidia-smi`` (``csv,noheader,nounits``). Pure. Unknown numbers are ``None``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Gpu", "GpuApp", "parse_apps", "parse_gpus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    index: int
    uuid: str
    name: str
    driver: str
    memory_mib: int | None
    used_mib: int | None
    ecc_errors: int | None = None
    """Uncorrected memory errors since the driver was loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuApp:
    """A process on a GPU."""

    gpu_uuid: str
    pid: int
    name: str
    used_mib: int | None


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs in the output of the query of ``runtime.probes.probing``.

    It has for each GPU index, uuid, name, driver_version, memory.total, memory.used and ecc.errors.uncorrected.volatile.total.
    Other lines (a warning, a lost GPU) are left out.
    """
    found = []
    for fields in _rows(text, 7):
        index = _number(fields[0])
        if index is not None and fields[1].startswith(("GPU-", "MIG-")):
            found.append(
                Gpu(
                    index=index,
                    uuid=fields[1],
                    name=", ".join(fields[2:-4]),
                    driver=fields[-4],
                    memory_mib=_number(fields[-3]),
                    used_mib=_number(fields[-2]),
                    ecc_errors=_number(fields[-1]),
                )
            )
    return tuple(found)


def parse_apps(text: str) -> tuple[GpuApp, ...]:
    """Return the processes of ``--query-compute-apps=gpu_uuid,pid,process_name,used_memory``."""
    found = []
    for fields in _rows(text, 4):
        pid = _number(fields[1])
        if pid is not None and fields[0].startswith(("GPU-", "MIG-")):
            # A process may have commas in its name.
            name = ", ".join(fields[2:-1])
            found.append(GpuApp(gpu_uuid=fields[0], pid=pid, name=name, used_mib=_number(fields[-1])))
    return tuple(found)


def _rows(text: str, least: int) -> list[list[str]]:
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    return [fields for fields in rows if len(fields) >= least]


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None
