"""Use of CPU, memory, disk and network by the processes of an attempt, from /proc and /sys.

The processes are the descendants of the keeper, and the processes in the cgroup of a container that a daemon started. The
kernel adds the time and the bytes of an ended process to its parent, and the keeper adopts orphans. The sums therefore include
processes that ended between two samples. Sources: proc(5), https://docs.kernel.org/admin-guide/cgroup-v2.html.
"""

from __future__ import annotations

import os
import re
import time

from distflow.protocol.light_typing import Dict, List, NamedTuple, Optional, Set, Tuple

__all__ = ["HostUsage", "limits"]

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_RENEW_ROUNDS = 100
"""All processes are read again after this number of samples, because their ids may be reused."""
_COUNTER_UNIT = 4
"""Unit of the counters of InfiniBand ports, in bytes."""
_INFINIBAND = "/sys/class/infiniband"
_CGROUPS = "/sys/fs/cgroup"


class _Stat(NamedTuple):
    parent: int
    ticks: int
    """CPU time of the process and of its ended children."""


class HostUsage:
    """Measures the descendants of the process ``root``, and a container. Rates are averages since the previous ``read``.

    The rates of CPU and disk include those of ``root`` itself.
    """

    def __init__(self, root: int, command: int, container: str = "") -> None:
        """Prepare to measure the descendants of ``root``.

        ``command`` is the descendant whose network counters are read. ``container``: id of the task's container, if any.
        """
        self._root = root
        self._command = command
        self._container = container
        self._cgroup: Optional[str] = None
        self._others: Set[int] = set()
        """Known processes that do not belong to the attempt."""
        self._rounds = 0
        self._last: Optional[Dict[str, float]] = None
        self._last_at = 0.0
        self._physical = _physical_interfaces()
        self._ports = _infiniband_ports()

    def read(self) -> Optional[Dict[str, float]]:
        """Return the values by name; None for the first call, because rates need two measurements.

        ``cpu`` in cores, ``memory`` in bytes, ``processes``, and in bytes per second ``disk_read``, ``disk_write``,
        ``network_receive``, ``network_transmit``, ``rdma_receive``, ``rdma_transmit``. ``memory`` is the private pages of all
        processes, and the shared pages of the process that has most of them; other shared pages are missing. The network's
        values include all processes of the node that share the interfaces.
        """
        counters, levels = self._measure()
        at = time.monotonic()
        last, self._last = self._last, counters
        seconds, self._last_at = at - self._last_at, at
        if last is None or seconds <= 0:
            return None
        # A counter can shrink: a process may end without a parent that waits for it.
        rates = {name: max(0.0, value - last[name]) / seconds for name, value in counters.items() if name in last}
        return {**rates, **levels}

    def _measure(self) -> Tuple[Dict[str, float], Dict[str, float]]:
        root = _read_stat(self._root)
        ticks = root.ticks if root is not None else 0
        stats = self._find()
        own, shared, read, write, has_io = 0, 0, 0, 0, False
        for pid in [self._root, *stats]:
            io = _read_io(pid)
            if io is not None:
                has_io, read, write = True, read + io[0], write + io[1]
        for pid, stat in stats.items():
            ticks += stat.ticks
            sizes = _read_statm(pid)
            own += max(0, sizes[0] - sizes[1])
            shared = max(shared, sizes[1])
        counters = {"cpu": ticks / _TICKS}
        if has_io:
            counters.update(disk_read=read, disk_write=write)
        counters.update(self._network())
        counters.update(self._rdma())
        return counters, {"memory": (own + shared) * _PAGE, "processes": len(stats)}

    def _find(self) -> Dict[int, _Stat]:
        """Return the attempt's processes. Only these and new processes are read, because a node may have thousands."""
        self._rounds += 1
        if self._rounds % _RENEW_ROUNDS == 0:
            self._others.clear()
        if self._container and self._cgroup is None:
            self._cgroup = _cgroup_of_container(self._container)  # Docker creates it later than the id
            if self._cgroup is not None:
                self._others.clear()
        listed = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {self._root}
        enclosed = _pids_in(self._cgroup) if self._cgroup else set()
        self._others &= listed
        stats: Dict[int, _Stat] = {}
        for pid in listed.difference(self._others):
            stat = _read_stat(pid)
            if stat is not None:
                stats[pid] = stat
        found: Dict[int, _Stat] = {}
        for pid, stat in stats.items():
            if pid in enclosed or self._is_below(pid, stats):
                found[pid] = stat
            elif stat.parent in listed or stat.parent == 0:
                self._others.add(pid)
        return found

    def _is_below(self, pid: int, stats: Dict[int, _Stat]) -> bool:
        for _ in range(64):
            stat = stats.get(pid)
            if stat is None:
                return False  # its ancestors do not belong to the attempt, or have just ended
            if stat.parent == self._root:
                return True
            pid = stat.parent
        return False

    def _network(self) -> Dict[str, float]:
        try:
            with open("/proc/{}/net/dev".format(self._command), "rb", buffering=0) as file:
                lines = file.read(1 << 18).decode("ascii", "replace").splitlines()[2:]
        except OSError:
            return {}
        rows: Dict[str, List[str]] = {}
        for line in lines:
            name, _, numbers = line.partition(":")
            fields = numbers.split()
            if len(fields) >= 16 and name.strip() != "lo":
                rows[name.strip()] = fields
        # A bond or a bridge counts the bytes of its physical interfaces again.
        names = self._physical.intersection(rows) or set(rows)
        return {
            "network_receive": sum(int(rows[name][0]) for name in names),
            "network_transmit": sum(int(rows[name][8]) for name in names),
        }

    def _rdma(self) -> Dict[str, float]:
        received = [_read_number(port + "/counters/port_rcv_data") for port in self._ports]
        sent = [_read_number(port + "/counters/port_xmit_data") for port in self._ports]
        if not self._ports or None in received or None in sent:
            return {}
        return {
            "rdma_receive": sum(filter(None, received)) * _COUNTER_UNIT,
            "rdma_transmit": sum(filter(None, sent)) * _COUNTER_UNIT,
        }


def limits(cgroup: str = _CGROUPS) -> Dict[str, float]:
    """Return the number of usable CPUs (``cpu_limit``) and the bytes of memory (``memory_limit``) of this node.

    In a container, such as a pod of Kubernetes, the limits of its cgroup (v2) also apply.
    """
    found = {"cpu_limit": float(len(os.sched_getaffinity(0))), "memory_limit": float(os.sysconf("SC_PHYS_PAGES") * _PAGE)}
    quota = _read(os.path.join(cgroup, "cpu.max"), 64).split()
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]):
        found["cpu_limit"] = min(found["cpu_limit"], int(quota[0]) / int(quota[1]))
    memory = _read_number(os.path.join(cgroup, "memory.max"))
    if memory is not None:
        found["memory_limit"] = min(found["memory_limit"], memory)
    return found


def _read(path: str, size: int = 4096) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(size) or b""
    except OSError:
        return b""


def _read_number(path: str) -> Optional[int]:
    text = _read(path, 64).strip()
    return int(text) if text.isdigit() else None


def _read_stat(pid: int) -> Optional[_Stat]:
    text = _read("/proc/{}/stat".format(pid))
    fields = text[text.rfind(b")") + 2 :].split()
    if len(fields) < 15:
        return None
    return _Stat(int(fields[1]), sum(int(fields[number]) for number in range(11, 15)))


def _read_statm(pid: int) -> Tuple[int, int]:
    """Return the resident and the shared pages of a process; zeros if it has ended."""
    fields = _read("/proc/{}/statm".format(pid), 256).split()
    return (int(fields[1]), int(fields[2])) if len(fields) > 2 else (0, 0)


def _read_io(pid: int) -> Optional[Tuple[int, int]]:
    """Return the bytes that a process read from and wrote to disks and network file systems; None if that is not readable."""
    found = dict(re.findall(rb"(?m)^(read_bytes|write_bytes): ([0-9]+)$", _read("/proc/{}/io".format(pid))))
    return (int(found[b"read_bytes"]), int(found[b"write_bytes"])) if len(found) == 2 else None


def _cgroup_of_container(container: str) -> Optional[str]:
    """Return the cgroup of a container of Docker; None if it is not found."""
    if not re.fullmatch(r"[0-9a-f]{12,64}", container):
        return None
    for base in (_CGROUPS, os.path.join(_CGROUPS, "pids"), os.path.join(_CGROUPS, "memory")):
        for name in ("system.slice/docker-{}.scope", "docker/{}"):
            path = os.path.join(base, name.format(container))
            if os.path.isdir(path):
                return path
    return None


def _pids_in(cgroup: str) -> Set[int]:
    found: Set[int] = set()
    for folder, _, _ in os.walk(cgroup):
        found.update(int(word) for word in _read(os.path.join(folder, "cgroup.procs"), 1 << 20).split())
    return found


def _physical_interfaces() -> Set[str]:
    try:
        names = os.listdir("/sys/class/net")
    except OSError:
        return set()
    return {name for name in names if os.path.exists("/sys/class/net/{}/device".format(name))}


def _infiniband_ports() -> List[str]:
    """Return the directories of the ports of InfiniBand and RoCE adapters."""
    ports: List[str] = []
    try:
        for device in sorted(os.listdir(_INFINIBAND)):
            folder = os.path.join(_INFINIBAND, device, "ports")
            ports += [os.path.join(folder, port) for port in sorted(os.listdir(folder))]
    except OSError:
        pass
    return ports
