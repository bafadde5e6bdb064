"""What the ranks send to each other: how often, how many bytes, how long, and at which bandwidth.

Bandwidths are nccl-tests': the algorithm bandwidth is bytes by time; the bus bandwidth is that times what the best algorithm
must carry over the slowest link, so that it can be compared with a link's speed whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Collective", "CommunicationMonitor", "bus_factor", "scaling_efficiency"]

_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv_": "recv",
}
"""torch's operations, in both of its namespaces, and what people call them."""
_NAMESPACES = ("c10d", "_c10d_functional")


@dataclass(slots=True)
class Collective:
    """What was seen of one kind of collective."""

    count: int = 0
    bytes: int = 0
    """Of the whole message: for an all-gather that of all ranks together."""
    seconds: list[float] = field(default_factory=list)
    """Of each call, from its start until its result was there; empty for what is only counted, as send and recv."""
    bus_bytes: float = 0.0
    """Bytes times the bus factor of each call's group."""

    def as_json(self) -> dict[str, float | int]:
        """Return it as a JSON object: times in seconds, bandwidths in bytes per second."""
        total = sum(self.seconds)
        values: dict[str, float | int] = {"count": self.count, "bytes": self.bytes}
        if self.seconds:
            values |= {
                "total_time": total,
                "mean": total / len(self.seconds),
                "min": min(self.seconds),
                "max": max(self.seconds),
                "algorithm_bandwidth": self.bytes / total if total else 0.0,
                "bus_bandwidth": self.bus_bytes / total if total else 0.0,
            }
        return values


class CommunicationMonitor:
    """Counts and times what this process sends while it watches.

    In a training step::

        monitor = CommunicationMonitor()
        with monitor.watch():
            loss.backward()
        print(monitor.stats()["all_reduce"])

    Timing waits for each collective before the program continues, so nothing overlaps: watch a few steps, not all of
    them. With ``timed=False`` it only counts, and changes nothing.
    """

    def __init__(self, *, timed: bool = True) -> None:
        self._timed = timed
        self._seen: dict[str, Collective] = {}

    @contextmanager
    def watch(self) -> Iterator[CommunicationMonitor]:
        """Watch this process's collectives: DDP's and FSDP's own as well as the program's."""
        with _Watch(self._call):
            yield self

    def stats(self) -> Mapping[str, Mapping[str, float | int]]:
        """Return what was seen, by the name of the collective, as JSON objects (``Collective.as_json``)."""
        return {name: collective.as_json() for name, collective in sorted(self._seen.items())}

    def measure_all_reduce(self, tensor: torch.Tensor, *, group: dist.ProcessGroup | None = None) -> float:
        """Sum a tensor over the ranks, in place, and return the seconds it took. All ranks must call it."""
        _synchronise(tensor.device)
        begin = perf_counter()
        dist.all_reduce(tensor, group=group)
        _synchronise(tensor.device)
        elapsed = perf_counter() - begin
        self._add("all_reduce", tensor.nbytes, dist.get_world_size(group), elapsed)
        return elapsed

    def _call(self, name: str, call: Callable[[], Any], arguments: Sequence[Any]) -> Any:
        tensors = list(_tensors(arguments))
        ranks = _ranks(arguments)
        sizes = [tensor.nbytes for tensor in tensors]
        # In both directions the larger side is the whole message; functional gathers show only the smaller one.
        message = max(sizes, default=0) if name in ("all_gather", "reduce_scatter") else sum(sizes)
        if name == "all_gather" and len(tensors) == 1:
            message *= ranks
        # Waiting for a message before its counterpart is sent would block both sides forever.
        if not self._timed or name in ("send", "recv"):
            self._add(name, message, ranks, None)
            return call()
        device = tensors[0].device if tensors else torch.device("cpu")
        _synchronise(device)
        begin = perf_counter()
        result = call()
        _wait(result)
        _synchronise(device)
        self._add(name, message, ranks, perf_counter() - begin)
        return result

    def _add(self, name: str, message: int, ranks: int, seconds: float | None) -> None:
        seen = self._seen.setdefault(name, Collective())
        seen.count += 1
        seen.bytes += message
        seen.bus_bytes += message * bus_factor(name, ranks)
        if seconds is not None:
            seen.seconds.append(seconds)


def bus_factor(name: str, ranks: int) -> float:
    """Return what part of a message the busiest link carries at the least, as nccl-tests has it.

    >>> bus_factor("all_reduce", 4)
    1.5
    """
    if name == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if name in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


def scaling_efficiency(times: Mapping[int, float]) -> dict[int, float]:
    """Return (t1/n)/tn for each number of ranks n: 1.0 when n ranks do the same work in 1/n of the time (strong scaling).

    ``times`` are seconds for the same work, by the number of ranks. Raises ``ValueError`` without a time of one rank.

    >>> scaling_efficiency({1: 8.0, 2: 4.0, 4: 2.5})
    {1: 1.0, 2: 1.0, 4: 0.8}
    """
    if 1 not in times:
        raise ValueError("scaling is measured against one rank: its time is missing")
    return {ranks: times[1] / ranks / elapsed for ranks, elapsed in sorted(times.items())}


# -- inspecting torch's operations ------------------------------------------------------------------------------------


class _Watch(TorchDispatchMode):
    """Hands every collective that this thread starts to a function."""

    def __init__(self, seen: Callable[[str, Callable[[], Any], Sequence[Any]], Any]) -> None:
        super().__init__()
        self._seen_by = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _NAMES.get(func.overloadpacket.__name__) if func.namespace in _NAMESPACES else None
        if name is None:
            return func(*args, **(kwargs or {}))
        return self._seen_by(name, lambda: func(*args, **(kwargs or {})), args)


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _ranks(arguments: Sequence[Any]) -> int:
    """Return the number of ranks of the group that is among the arguments, in one of the two ways of torch."""
    for value in arguments:
        if isinstance(value, torch.ScriptObject):
            try:
                return int(dist.ProcessGroup.unbox(value).size())
            except RuntimeError:  # another object: the operation's ReduceOp
                continue
        if isinstance(value, str):
            try:
                group = distributed_c10d._resolve_process_group(value)  # type: ignore[attr-defined, arg-type]  # noqa: SLF001
                return int(group.size())
            except (LookupError, RuntimeError, ValueError):  # another word: the operation's "sum"
                continue
    return dist.get_world_size()


def _wait(result: Any) -> None:
    """Wait until a collective has its result: torch gives a handle, or a tensor that is waited for."""
    for value in result if isinstance(result, tuple | list) else (result,):
        if isinstance(value, torch.ScriptObject):
            dist.Work.unbox(value).wait()
        elif isinstance(value, torch.Tensor):
            torch.ops._c10d_functional.wait_tensor(value)  # noqa: SLF001  torch's own name


def _synchronise(device: torch.device) -> None:
    """Wait for the GPU: a call only starts work there, so that its time alone says nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
