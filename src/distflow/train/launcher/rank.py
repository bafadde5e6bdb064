"""What runs first in the process of one rank: ``python -m distflow.train.launcher.rank``, for the launcher only.

It ends with the launcher, keeps to its CPUs, runs the script as ``python`` would, and leaves an exception of the script in
the error file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from distflow.train.launcher.affinity import parse_cpus
from distflow.train.launcher.error_files import write_exception

__all__ = ["CPUS", "PARENT", "RecordedFailure", "end_with_parent", "keep_to_cpus", "run_script", "take_own_output"]

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
    with RecordedFailure():
        run(target, arguments)


if __name__ == "__main__":
    _main()
