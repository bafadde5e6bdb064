"""Start one process per rank of this machine, from a script's command line or from a function; never imports torch.

Each process gets the whole environment that torchrun gives to its workers, so that ``env://`` and programs
written for torchrun work. ``TORCHELASTIC_USE_AGENT_STORE`` is never ``True``: rank 0 itself hosts the store.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from distflow.protocol.error_file import VARIABLE, ErrorReport
from distflow.train.launcher import rank as rank_process
from distflow.train.launcher.rank import cpus_near_gpu, threads_per_rank, write_failure
from distflow.train.launcher.rank_processes import LaunchOutcome, RankProcess, SignalWaiter, end_now, signal_waiter, supervise

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LaunchOptions", "LaunchSettings", "LayoutError", "is_rank", "launch", "read_settings", "run_command"]

_LOCAL = "127.0.0.1"


class LayoutError(ValueError):
    """Options or variables are invalid or contradict each other. The message says what to change."""


class LaunchOptions(TypedDict, total=False):
    """Options that a program or a command line may set. See ``read_settings`` and ``LaunchSettings`` for their defaults."""

    offset: int | None
    """First global rank of this machine."""
    size: int | None
    """Number of ranks of this machine."""
    world_size: int | None
    master_addr: str | None
    master_port: int | None
    max_restarts: int
    stop_grace_s: float
    """Time between SIGTERM and SIGKILL for ranks that are asked to stop."""
    failure_grace_s: float
    """The same, after a rank has failed. Keep it below the pool's ``peer_failed_grace``, or the launcher is killed first."""
    numa: bool
    """Bind each rank to the CPUs next to its GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """This machine's ranks, and the settings of their processes (``LaunchOptions``)."""

    offset: int
    size: int
    world_size: int
    master_addr: str
    master_port: int
    """The port of the first start; 0 means a free port. Each restart uses a free port."""
    max_restarts: int = 0
    stop_grace_s: float = 30.0
    failure_grace_s: float = 3.0
    numa: bool = False


def read_settings(environment: Mapping[str, str], **options: Unpack[LaunchOptions]) -> LaunchSettings:
    """Take ranks, address and port from the options, else from ``DISTFLOW_*`` and ``MASTER_*``. Raises ``LayoutError``."""
    first = _number(environment, "DISTFLOW_RANK_OFFSET", options.get("offset"), 0)
    count = _number(environment, "DISTFLOW_RANK_SIZE", options.get("size"), 1)
    world = _number(environment, "DISTFLOW_WORLD_SIZE", options.get("world_size"), first + count)
    address = options.get("master_addr") or environment.get("MASTER_ADDR")
    port = _number(environment, "MASTER_PORT", options.get("master_port"), 0)
    layout = {"offset": first, "size": count, "world_size": world, "master_addr": address or _LOCAL, "master_port": port}
    values: dict[str, Any] = {**options, **layout}
    settings = LaunchSettings(**values)
    if count < 1:
        raise LayoutError(f"--size (DISTFLOW_RANK_SIZE) is {count}: a machine has at least one rank; give 1 or more")
    if first < 0:
        raise LayoutError(f"--offset (DISTFLOW_RANK_OFFSET) is {first}: ranks are counted from 0; give 0 or more")
    if first + count > world:
        raise LayoutError(
            f"ranks {first} to {first + count - 1} do not fit a world of {world}; give --world_size (DISTFLOW_WORLD_SIZE) "
            f"{first + count} or more, or a smaller "
            f"{'--size (DISTFLOW_RANK_SIZE)' if first < world else '--offset (DISTFLOW_RANK_OFFSET)'}"
        )
    for flag, name in (("--stop-grace", "stop_grace_s"), ("--failure-grace", "failure_grace_s")):
        seconds = getattr(settings, name)
        if not seconds >= 0:
            raise LayoutError(f"{flag} ({name}) is {seconds:g}: give 0 seconds or more")
    if settings.max_restarts < 0:
        raise LayoutError(f"--max-restarts (max_restarts) is {settings.max_restarts}: give 0 or more")
    if settings.max_restarts and count < world:
        raise LayoutError(
            "--max-restarts (max_restarts): one machine cannot restart a world on several machines; let distflow retry the "
            "group (exitActions in the spec)"
        )
    if not 0 <= port < 65536:
        given = f"MASTER_PORT={port}" if options.get("master_port") is None else f"--master-port {port}"
        raise LayoutError(f"{given}: give a port from 1 to 65535")
    if count < world and not address:
        raise LayoutError("--master-addr is missing: give the address of the machine that has rank 0, or set MASTER_ADDR")
    if count < world and not port:
        raise LayoutError(
            "--master-port is missing: give a port that is free on the master, the same on all machines, or set MASTER_PORT"
        )
    return settings


def _number(environment: Mapping[str, str], variable: str, given: int | None, default: int) -> int:
    if given is not None:
        return given
    text = environment.get(variable) or str(default)
    try:
        return int(text)
    except ValueError:
        raise LayoutError(f"{variable}={text}: not a number; correct or unset it") from None


def is_rank(environment: Mapping[str, str]) -> bool:
    """Return whether this launcher or torchrun started this process as a rank."""
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} <= environment.keys()


def run_command(settings: LaunchSettings, kind: str, target: str, arguments: Sequence[str]) -> int:
    """Run a script (``kind`` is ``script``) or a module (``module``) in every rank; return the exit code."""

    def start(environment: Mapping[str, str]) -> _Started:
        command = [sys.executable, "-u", "-m", rank_process.__name__, kind, target, *arguments]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        return process.pid, process.poll

    return _run(settings, start)


def launch(function: Callable[..., object], args: tuple[Any, ...] = (), **options: Unpack[LaunchOptions]) -> None:
    """Call ``function(*args)`` in one new process per rank of this machine, and wait for all.

    Missing options come from distflow's variables; the default is one rank. A process that is already a rank calls the function
    directly. ``function`` must be importable; in a notebook, or a program from standard input, it must come from a module. Call
    ``launch`` in the main thread, under ``if __name__ == "__main__":``.

    Raises ``LayoutError``, ``TypeError`` if new processes cannot get or import the function, ``RuntimeError`` in another
    thread, and ``SystemExit`` with the exit code of ``distflow.train.launch`` if it is not 0.
    """
    if is_rank(os.environ):
        function(*args)
        return
    settings = read_settings(os.environ, **options)
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "launch() was called in another thread, where Python cannot handle signals: call it in the main thread"
        )
    name = f"`{getattr(function, '__qualname__', function)}`"
    try:
        pickled = ForkingPickler.dumps((function, args))
    except Exception as error:
        raise TypeError(
            f"launch() cannot send {name} and its arguments to other processes ({error}): define the function at the top "
            "level of a module, and give it arguments that pickle can serialize"
        ) from error
    program = sys.modules["__main__"]
    # Whether new processes can import this program.
    has_file = program.__spec__ is not None or os.path.isfile(getattr(program, "__file__", None) or "")
    if not has_file and b"__main__" in bytes(pickled):
        raise TypeError(
            f"launch() starts new processes, which cannot import {name} or its arguments: this program has no file (it "
            "is a notebook, or came from standard input). Write the function to a file, such as training.py (in a notebook: "
            "%%writefile training.py), then call launch() with the function that you import from there"
        )
    context = multiprocessing.get_context("spawn")

    def start(environment: Mapping[str, str]) -> _Started:
        # Not daemonic, because a rank may start processes, such as the workers of a loader.
        process = context.Process(target=_call, args=(function, args))
        before = dict(os.environ)
        os.environ.clear()
        os.environ.update(environment)  # libraries read it while the function is being imported
        # In a program without a file, `__file__` may name a missing path (<stdin>), which the process would run first.
        path = None if has_file else vars(program).pop("__file__", None)
        try:
            process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
            if path is not None:
                program.__file__ = path
        return cast("int", process.pid), lambda: process.exitcode

    code = _run(settings, start)
    if code:
        raise SystemExit(code)


def _call(function: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Run as one rank. This function is at the top level so that it can be pickled."""
    os.setsid()
    rank_process.prepare_process()
    with rank_process.RecordedFailure():
        function(*args)


_Started = tuple[int, Callable[[], "int | None"]]
_Start = Callable[[Mapping[str, str]], _Started]


def _run(settings: LaunchSettings, start: _Start) -> int:
    """Run the ranks until they complete, are stopped, or have failed more often than allowed."""
    restarts = 0
    with signal_waiter() as waiter:
        while True:
            outcome = _run_once(settings, start, restarts, waiter)
            waiter.wait(0)  # read a stop signal that arrived when the last rank ended
            if outcome.first is None or waiter.signals or restarts == settings.max_restarts:
                _write_first_failure(outcome)
                return outcome.exit_code
            restarts += 1
            _report(f"restart {restarts} of {settings.max_restarts}")


def _run_once(settings: LaunchSettings, start: _Start, restarts: int, waiter: SignalWaiter) -> LaunchOutcome:
    # In a task of distflow, put the files into the directory of the task's attempt. They are then removed with it, even if the
    # launcher is killed.
    parent = os.environ.get("DISTFLOW_ATTEMPT_DIR")
    parent = parent if parent and os.access(parent, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="distflow-ranks-", dir=parent) as folder, _port(settings, restarts) as port:
        ranks: list[RankProcess] = []
        try:
            for local_rank in range(settings.size):
                rank = settings.offset + local_rank
                error_file = Path(folder) / f"error-{rank}.json"
                environment = {**os.environ, **_environment(settings, local_rank, restarts, port), VARIABLE: str(error_file)}
                pid, poll = start(environment)
                ranks.append(RankProcess(rank=rank, pid=pid, poll=poll, error_file=error_file))
        except BaseException:
            end_now(ranks)  # otherwise they would wait for the missing ranks, and this process would wait for them
            raise
        outcome = supervise(ranks, waiter, stop_grace_s=settings.stop_grace_s, failure_grace_s=settings.failure_grace_s)
    if (end := outcome.first) is not None:
        callstack = f"\n{end.failure.report.callstack}".rstrip("\n") if end.failure else ""
        _report(f"rank {end.rank} failed first (pid {end.pid}, {end.how}): {end.message}{callstack}")
    return outcome


def _environment(settings: LaunchSettings, local_rank: int, restarts: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a worker, and those that the process of a rank reads."""
    rank, world_size = str(settings.offset + local_rank), str(settings.world_size)
    node_rank = os.environ.get("NODE_RANK") or str(settings.offset // settings.size)
    nodes = os.environ.get("NNODES") or str(-(-settings.world_size // settings.size))
    environment = {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(settings.size),
        "GROUP_RANK": node_rank,
        "GROUP_WORLD_SIZE": nodes,
        "NODE_RANK": node_rank,
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": settings.master_addr,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(settings.max_restarts),
        "TORCHELASTIC_RUN_ID": os.environ.get("DISTFLOW_WORKFLOW_ID") or "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads_per_rank(settings.size)),
        rank_process.PARENT: str(os.getpid()),
    }
    cpus = cpus_near_gpu(local_rank, os.environ) if settings.numa else None
    if cpus:
        environment[rank_process.CPUS] = ",".join(map(str, sorted(cpus)))
    return environment


@contextlib.contextmanager
def _port(settings: LaunchSettings, restarts: int) -> Iterator[int]:
    """Yield the port for one start of the ranks. A restart uses a free port, because old sockets may hold the previous one.

    A socket that never listens reserves the free port until torch uses it.
    """
    if settings.master_port and restarts == 0:
        yield settings.master_port
        return
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def _write_first_failure(outcome: LaunchOutcome) -> None:
    """Write the first failure of the last start to the launcher's own error file."""
    end, path = outcome.first, os.environ.get(VARIABLE)
    if end is not None and path:
        more: dict[str, Any] = {"rank": end.rank, "pid": end.pid}
        if end.code < 0:
            more["signal"] = end.how
        report = end.failure.report if end.failure else ErrorReport(message="")
        write_failure(Path(path), end.message, report.callstack, report.raised_at or time.time_ns() / 1e9, more)


def _report(text: str) -> None:
    sys.stderr.write(f"distflow.train.launch: {text}\n")
    sys.stderr.flush()
