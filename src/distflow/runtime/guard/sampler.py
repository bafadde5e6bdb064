"""The sampler: a process that records an attempt's use of CPU, memory, disk, GPUs and network.

The network traffic is that of the interfaces that the task sees.

The runner forks the sampler. It is a separate process because a call of a GPU's driver may hang or crash, which must not
disturb the task. It continues while no agent is connected, and ends with the runner.

``output.samples`` has lines of JSON. An object names the columns and the limits, which rarely change:
``{"columns": ["time", "system/cpu/usage", …], "limits": {"system/cpu/limit": 8, …}}``. An array is one sample; ``null`` is an
unknown value. The object is repeated, so that the end of the file can be read alone. docs/metrics.md lists the names.

The CPU time is limited: each pause is at least 300 times the CPU time of the previous sample. The file's growth is limited,
too: the interval doubles for each 2 MiB of the file. A task with 8 GPUs writes about 15 MB in three weeks.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import sys
import time

from distflow.protocol.light_typing import Dict, List, NoReturn, Optional
from distflow.runtime import processes
from distflow.runtime.clock import now
from distflow.runtime.files import log_files, records
from distflow.runtime.guard.control import AttemptHandles

__all__ = ["end", "fork", "record"]

INTERVAL_S = 5.0
_WAIT_S = 1.0
_PAUSE_PER_CPU_SECOND = 300
"""Each pause is at least this many times the CPU time of the sample before it."""
_BYTES_PER_DOUBLING = 2 << 20
_ROWS_PER_HEADER = 100
_NICE = 10
_END_S = 0.2
_HOST = {
    "cpu": "system/cpu/usage",
    "cpu_limit": "system/cpu/limit",
    "memory": "system/memory/usage",
    "memory_limit": "system/memory/limit",
    "processes": "system/processes",
    "disk_read": "system/disk/read",
    "disk_write": "system/disk/write",
    "network_receive": "system/network/receive",
    "network_transmit": "system/network/transmit",
    "rdma_receive": "system/rdma/receive",
    "rdma_transmit": "system/rdma/transmit",
}
"""The column of each value of ``host_usage``."""


def fork(handles: AttemptHandles, keeper: int, shared: mmap.mmap) -> Optional[int]:
    """Fork the sampler in the runner. Returns its process id, or None if no process can be created.

    ``keeper`` is the keeper's process id. ``shared`` is the memory with the task's secrets, which the sampler closes.
    """
    runner = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        return None
    if pid == 0:
        _run(handles, runner, keeper, shared)
    return pid


def end(pid: Optional[int]) -> None:
    """Kill the sampler, and reap it unless it hangs in a driver. SIGCHLD must be blocked: this function waits for it."""
    if pid is None:
        return
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _END_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        signal.sigtimedwait({signal.SIGCHLD}, _END_S / 10)


def _run(handles: AttemptHandles, runner: int, keeper: int, shared: mmap.mmap) -> NoReturn:
    try:
        processes.reset_signals()  # otherwise, the runner's handler would pass TERM on to the keeper
        shared.close()  # this memory contains the task's secrets
        if processes.die_with_parent(signal.SIGKILL, runner):
            processes.rename_self("df-sampler")
            processes.close_all_but({handles.dir_fd})
            os.nice(_NICE)
            _serve(handles, keeper)
    except BaseException as error:  # this copy of the runner must not continue with the runner's code
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(0)


def _serve(handles: AttemptHandles, keeper: int) -> None:
    while True:
        state = records.read_state(handles.directory) or {}
        container = records.read_text(handles.directory, "container.id") if state.get("container") else ""
        if state.get("command") and (container or not state.get("container")):
            break
        select.select([], [], [], _WAIT_S)
    record(handles.dir_fd, keeper, int(state["command"].get("pid") or 0), handles.gpu_ids, container)


def record(
    dir_fd: int, keeper: int, command: int, gpu_ids: List[int], container: str = "", interval_s: float = INTERVAL_S
) -> NoReturn:
    """Record samples in the directory ``dir_fd`` until this process is killed.

    The samples cover the descendants of ``keeper``, the container with the id ``container``, and the GPUs ``gpu_ids``. Network
    counters are those of the interfaces that the process ``command`` sees.
    """
    from distflow.runtime.probes import gpu_usage, host_usage

    host = host_usage.HostUsage(keeper, command, container)
    gpus = gpu_usage.open_gpus(gpu_ids)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    table = _Table(os.open(log_files.SAMPLES, flags, 0o600, dir_fd=dir_fd))
    limits = {_HOST[name]: value for name, value in host_usage.limits().items()}
    host.read()
    pause_s = _WAIT_S
    while True:
        select.select([], [], [], pause_s)
        began = time.process_time()
        values = {_HOST[name]: value for name, value in (host.read() or {}).items()}
        for gpu, found in gpus.read().items():
            for name, value in found.items():
                target = limits if name in gpu_usage.LIMITS else values
                target["system/gpu{}/{}".format(gpu, name)] = value
        size = table.add(now(), values, limits)
        pause_s = max(interval_s * 2 ** (size // _BYTES_PER_DOUBLING), _PAUSE_PER_CPU_SECOND * (time.process_time() - began))


class _Table:
    """Appends samples to a file. Samples are lost while the disk is full."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._columns: List[str] = []
        self._limits: Dict[str, float] = {}
        self._rows = 0
        self._is_torn = False

    def add(self, at: float, values: Dict[str, float], limits: Dict[str, float]) -> int:
        """Append a sample. Returns the size of the file in bytes."""
        known = set(self._columns)
        lines = []
        if self._rows % _ROWS_PER_HEADER == 0 or not known.issuperset(values) or limits != self._limits:
            self._columns += sorted(set(values) - known)
            self._limits = dict(limits)
            lines.append(_text({"columns": ["time", *self._columns], "limits": {k: _short(v) for k, v in limits.items()}}))
        self._rows += 1
        lines.append(_text([round(at, 1), *(_short(values.get(name)) for name in self._columns)]))
        text = ("\n" * self._is_torn + "".join(line + "\n" for line in lines)).encode("ascii")
        try:
            self._is_torn = os.write(self._fd, text) < len(text)
        except OSError:
            self._rows = 0  # the header may be missing
        return os.fstat(self._fd).st_size


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _short(value: Optional[float]) -> Optional[float]:
    """Return a value without its fraction if it is at least 1000, or else with at most four significant digits."""
    if value is None or value == int(value):
        return value if value is None else int(value)
    return int(value) if abs(value) >= 1000 else float("{:.4g}".format(value))
