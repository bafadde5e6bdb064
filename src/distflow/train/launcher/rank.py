"""The process of one rank, which the launcher starts as ``python -m distflow.train.launcher.rank``.

It runs the script as ``python`` would, and writes an exception to torch's error file (``distflow.protocol.error_file``). This
module never imports torch. To find the CPUs next to a GPU, it reads ``/sys`` and ``/proc/driver/nvidia``, and orders GPUs by
PCI address, as CUDA does for GPUs of one model, or with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping
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
    "parse_cpus",
    "prepare_process",
    "read_failure",
    "threads_per_rank",
    "write_exception",
    "write_failure",
]

PARENT = "DISTFLOW_LAUNCHER_PID"
"""The environment variable with the process id of the launcher."""
CPUS = "DISTFLOW_CPUS"
"""The environment variable with the CPUs of this rank, such as ``0-3,8``. Unset, the rank uses all CPUs of the launcher."""
_PR_SET_PDEATHSIG = 1


class RecordedFailure(AbstractContextManager[None]):
    """Writes an exception to the error file, and raises it again. ``SystemExit`` and Ctrl-C are not failures."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, SystemExit | KeyboardInterrupt):
            # `world._finish_at_exit` reads this. Python sets it for uncaught exceptions, but multiprocessing catches them.
            sys.last_value = error
            write_exception(error, rank=int(os.environ["RANK"]))


def prepare_process() -> None:
    """Make this process die with the launcher, use only the CPUs of its rank, and write to the pipe of its rank."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(os.environ[PARENT]):  # the launcher died before this call
        os.kill(os.getpid(), signal.SIGKILL)
    # The container or the machine may allow fewer CPUs than the launcher chose.
    if cpus := parse_cpus(os.environ.get(CPUS, "")) & os.sched_getaffinity(0):
        os.sched_setaffinity(0, cpus)
    _redirect_output()


def _redirect_output() -> None:
    """Send standard output and error to this rank's own pipe, if distflow reads one. Leave streams that the task redirected."""
    folder = os.environ.get("DISTFLOW_ATTEMPT_DIR")
    if not folder or "DISTFLOW_OUTPUT_PIPE" not in os.environ:
        return
    try:
        # O_NONBLOCK: without a reader this fails instead of waiting, and the rank keeps the output of its task.
        pipe = os.open(os.path.join(folder, "ranks", os.environ["RANK"]), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return
    os.set_blocking(pipe, True)
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{stream}") == os.environ["DISTFLOW_OUTPUT_PIPE"]:
                os.dup2(pipe, stream)
    os.close(pipe)


def _main() -> None:
    """Run a script as ``python target arguments`` does, or a module as ``python -m target arguments`` does."""
    prepare_process()
    kind, target, *arguments = sys.argv[1:]
    sys.argv = [target, *arguments]
    sys.excepthook = _show_exception
    with RecordedFailure():
        if kind == "module":
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(target).resolve().parent)
            runpy.run_path(target, run_name="__main__")


def _show_exception(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    shown = _frames_of_script(frames)
    sys.__excepthook__(kind, error.with_traceback(shown), shown)


def _frames_of_script(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the leading frames of this module, ``runpy`` and modules with ``__tracebackhide__``."""
    inner = frames
    while inner is not None:
        names = inner.tb_frame.f_globals
        if names is not globals() and names.get("__name__") != "runpy" and "__tracebackhide__" not in names:
            return inner
        inner = inner.tb_next
    return frames


def threads_per_rank(size: int) -> int:
    """Return the number of CPU threads for each of the ``size`` ranks of this machine: its share of the available CPUs."""
    return max(1, len(os.sched_getaffinity(0)) // size)


def cpus_near_gpu(local_rank: int, environment: Mapping[str, str], root: Path = Path("/")) -> frozenset[int] | None:
    """Return the CPUs of the NUMA node of a rank's GPU, or ``None`` if the machine does not report them.

    ``root`` is the directory that contains ``sys`` and ``proc``.
    """
    try:
        address = _gpu_address(local_rank, environment, root / "proc/driver/nvidia/gpus")
        # The node is -1 if the firmware does not report it; such a node has no directory.
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
        return parse_cpus((root / f"sys/devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError, LookupError):
        return None


def parse_cpus(text: str) -> frozenset[int]:
    """Return the CPU numbers in a list of the kernel, such as ``0-3,8,10-11``. Raises ``ValueError`` for other texts."""
    cpus: set[int] = set()
    for piece in filter(None, text.strip().split(",")):
        first, _, last = piece.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _gpu_address(local_rank: int, environment: Mapping[str, str], folder: Path) -> str:
    """Return the PCI address of GPU ``local_rank`` of a process. Raises ``OSError`` or ``LookupError`` if it is unknown."""
    addresses = sorted(path.name for path in folder.iterdir())
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    name = str(local_rank) if visible is None else visible.split(",")[local_rank].strip()
    if name.isdecimal():
        return addresses[int(name)]
    for address in addresses if name else ():
        if re.search(f"^GPU UUID:.*{re.escape(name)}", (folder / address / "information").read_text(), re.MULTILINE):
            return address
    raise LookupError(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The content of a rank's error file."""

    report: ErrorReport
    written_ns: int
    """When the file was written, by the clock of the file system, in nanoseconds."""


def write_exception(error: BaseException, *, rank: int) -> None:
    """Write the exception of this process to its error file, unless torch's ``@record`` has already written that file."""
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
    """Return the content of an error file, or ``None`` if the file does not exist or has another format."""
    try:
        written_ns = path.stat().st_mtime_ns
        report = parse_error_file(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except (OSError, ValueError, RecursionError):
        return None
    return None if report is None else Failure(report=report, written_ns=written_ns)


if __name__ == "__main__":
    _main()
