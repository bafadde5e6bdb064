"""The process of one rank, which the launcher starts as ``python -m distflow.train.launcher.rank``.

The process ends with the launcher, keeps to its CPUs, runs the script as ``python`` would, and writes an exception of the
script to torch's error file (``distflow.protocol.error_file`` has the format). This module never imports torch.

The launcher chooses the CPUs from ``/sys`` and ``/proc/driver/nvidia``, because it has no CUDA. It numbers GPUs in the order
of their PCI addresses. That is CUDA's order for GPUs of one kind, and for all GPUs with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from distflow.protocol.error_file import VARIABLE, ErrorReport, error_file, parse_error_file

__all__ = [
    "CPUS",
    "PARENT",
    "Failure",
    "RecordedFailure",
    "cpus_near_gpu",
    "end_with_parent",
    "keep_to_cpus",
    "parse_cpus",
    "read_failure",
    "run_script",
    "take_own_output",
    "threads_per_rank",
    "write_exception",
    "write_failure",
]


PARENT = "DISTFLOW_LAUNCHER_PID"
"""The launcher's process."""
CPUS = "DISTFLOW_CPUS"
"""The CPUs of this rank, as ``0-3,8``; unset: all that the launcher has."""
_PR_SET_PDEATHSIG = 1


class RecordedFailure(AbstractContextManager[None]):
    """Write an exception to the error file, and raise it again. ``SystemExit`` and Ctrl-C are not failures."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write the error file, if this is a failure."""
        if error is not None and not isinstance(error, SystemExit | KeyboardInterrupt):
            write_exception(error, rank=int(os.environ["RANK"]))


def end_with_parent() -> None:
    """Have the kernel kill this process when the launcher dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(os.environ[PARENT]):  # it died before that
        os.kill(os.getpid(), signal.SIGKILL)


def keep_to_cpus() -> None:
    """Run on the CPUs that the launcher chose for this rank, as far as they may be used."""
    wanted = parse_cpus(os.environ.get(CPUS, "")) & os.sched_getaffinity(0)
    if wanted:
        os.sched_setaffinity(0, wanted)


def take_own_output() -> None:
    """Write to the pipe that distflow reads for this rank alone, if there is one and the output is not redirected."""
    place = os.environ.get("DISTFLOW_ATTEMPT_DIR")
    if not place or "DISTFLOW_OUTPUT_PIPE" not in os.environ:
        return
    try:
        # Does not wait: without a reader, the task's output works too.
        pipe = os.open(os.path.join(place, "ranks", os.environ["RANK"]), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return
    os.set_blocking(pipe, True)
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{stream}") == os.environ["DISTFLOW_OUTPUT_PIPE"]:
                os.dup2(pipe, stream)
    os.close(pipe)


def run_script(path: str, arguments: list[str]) -> None:
    """Run a script as ``python path arguments`` does."""
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    runpy.run_path(path, run_name="__main__")


def _run_module(name: str, arguments: list[str]) -> None:
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _main() -> None:
    end_with_parent()
    keep_to_cpus()
    take_own_output()
    kind, target, *arguments = sys.argv[1:]
    run: Callable[[str, list[str]], None] = {"script": run_script, "module": _run_module}[kind]
    sys.excepthook = _show_exception
    with RecordedFailure():
        run(target, arguments)


def _show_exception(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    shown = _frames_of_script(frames)
    sys.__excepthook__(kind, error.with_traceback(shown), shown)


def _frames_of_script(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of the launcher, which come before those of the script.

    A module with ``__tracebackhide__`` belongs to distflow, too.
    """
    inner = frames
    while inner is not None:
        names = inner.tb_frame.f_globals
        if names is not globals() and names.get("__name__") != "runpy" and "__tracebackhide__" not in names:
            return inner
        inner = inner.tb_next
    return frames


def threads_per_rank(size: int) -> int:
    """Return how many CPU threads each of ``size`` ranks of this machine gets: its share of the CPUs that may be used."""
    return max(1, len(os.sched_getaffinity(0)) // size)


def cpus_near_gpu(local_rank: int, environment: Mapping[str, str], root: Path = Path("/")) -> frozenset[int] | None:
    """Return the CPUs of the NUMA node of a rank's GPU; ``None`` when the machine does not say.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error file of a rank."""

    report: ErrorReport
    written_ns: int
    """When the file was written, by the clock of the file system, in nanoseconds."""


def write_exception(error: BaseException, *, rank: int) -> None:
    """Write the exception of this process, unless the file is there already (torch's ``@record`` may have written it)."""
    path = os.environ.get(VARIABLE)
    if path:
        text = "".join(traceback.format_exception(type(error), error, _frames_of_script(error.__traceback__)))
        more = {"rank": rank, "pid": os.getpid()}
        write_failure(Path(path), f"{type(error).__name__}: {error}", text, time.time_ns() / 1e9, more, mode="x")


def write_failure(
    path: Path, message: str, callstack: str, raised_at: float, more: Mapping[str, Any], *, mode: str = "w"
) -> None:
    """Write an error file. Errors of writing are ignored, because the failure itself matters more."""
    text = json.dumps(error_file(message, callstack, raised_at, more))
    with contextlib.suppress(OSError), path.open(mode, encoding="utf-8") as file:
        file.write(text)


def read_failure(path: Path) -> Failure | None:
    """Return the content of the file; ``None`` if it does not exist or is not an error file."""
    try:
        written_ns = path.stat().st_mtime_ns
        report = parse_error_file(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except (OSError, ValueError, RecursionError):
        return None
    return None if report is None else Failure(report=report, written_ns=written_ns)


if __name__ == "__main__":
    _main()
