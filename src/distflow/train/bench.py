"""Measure how ranks communicate: ``python -m distflow.train.bench allreduce | scaling``.

Both start ranks on this machine. If a launcher has set ``RANK``, ``allreduce`` joins its world instead, and ``scaling`` is
refused. Times are medians that omit warm-up rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.benchmark import Timer

from distflow.train.launcher.starting import launch
from distflow.train.world import finish, init, world

__all__ = ["allreduce", "main", "scaling", "step_time"]

_SIZES = tuple(2**power for power in range(10, 27, 4))
"""Bytes: 1 KiB to 64 MiB."""
_ROUNDS = 7
Row = dict[str, Any]


def allreduce(sizes: Sequence[int] = _SIZES) -> list[Row]:
    """Return the median seconds of an all-reduce for each size in bytes, and its bandwidths in bytes per second.

    As in nccl-tests, the algorithm bandwidth is the size divided by the time; the bus bandwidth is that of the busiest link.
    """
    device, ranks = world().device, dist.get_world_size()
    rows = []
    for size in sizes:
        tensor = torch.ones(max(size // 4, 1), device=device)
        seconds = _median_seconds("dist.all_reduce(tensor)", dist=dist, tensor=tensor)
        bandwidth = tensor.nbytes / seconds
        bus = bandwidth * 2 * (ranks - 1) / ranks
        rows.append({"bytes": tensor.nbytes, "seconds": seconds, "algorithm_bandwidth": bandwidth, "bus_bandwidth": bus})
    return rows


def step_time(*, batch_size: int = 1024) -> float:
    """Return the median seconds of a training step of four layers under DDP. The ranks divide the global batch."""
    torch.manual_seed(0)
    current_world = world()
    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    model = current_world.parallelize(layers, "ddp").model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    parts = torch.randn(batch_size, 256).tensor_split(current_world.size)
    inputs = parts[current_world.rank].to(current_world.device)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()

    return _median_seconds("step()", step=step)


def _median_seconds(statement: str, **names: Any) -> float:
    timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
    return median(timer.timeit(1).mean for _ in range(_ROUNDS))


def scaling(ranks: int) -> list[Row]:
    """Return seconds of a step and the efficiency (t1/n)/tn for 1, 2, 4 … and ``ranks`` ranks, with one global batch size."""
    counts = sorted({*(2**power for power in range(ranks.bit_length()) if 2**power <= ranks), ranks})
    times = {count: float(_start(count, step_time, _backend(ranks))) for count in counts}
    return [{"ranks": n, "seconds": times[n], "efficiency": times[1] / n / times[n]} for n in counts]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table or one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m distflow.train.bench", description="Measure how ranks communicate.")
    parser.add_argument("what", choices=["allreduce", "scaling"])
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start on this machine (default: 2)")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    options = parser.parse_args(arguments)
    if options.ranks < 1:
        parser.error("--ranks must be at least 1")
    ranks = options.ranks
    if "RANK" in os.environ:
        if options.what == "scaling":
            parser.error("scaling starts its own ranks, but RANK is set: run it without a launcher")
        ranks, backend = init(_backend(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))).size, str(dist.get_backend())
        rows, is_first = allreduce(), world().rank == 0
        finish()
        if not is_first:
            return
    else:
        backend = "nccl" if _backend(ranks) == "auto" and torch.cuda.is_available() else "gloo"
        rows = scaling(ranks) if options.what == "scaling" else _start(ranks, allreduce, _backend(ranks))
    if options.format == "json":
        lines = [json.dumps({"measured": options.what, "ranks": ranks, "backend": backend, "results": rows}, indent=2)]
    else:
        lines = [f"{options.what}, ranks: {ranks}, {backend}", "".join(f"{name.replace('_', ' '):>21}" for name in rows[0])]
        lines += ["".join(f"{_text(name, value):>21}" for name, value in row.items()) for row in rows]
    sys.stdout.write("\n".join(lines) + "\n")


def _text(name: str, value: float) -> str:
    if "bandwidth" in name:
        return f"{value / 1e9:.3f} GB/s"
    return f"{value * 1e3:.3f} ms" if name == "seconds" else f"{value:.4g}" if name == "efficiency" else str(value)


def _start(ranks: int, measure: Callable[[], Any], backend: str) -> Any:
    """Run a measurement on new ranks of this machine, and return the result of rank 0."""
    with tempfile.TemporaryDirectory(prefix="distflow-bench-") as folder:
        path = Path(folder) / "result.json"
        launch(_rank, (measure, path, backend), size=ranks, offset=0, world_size=ranks, master_addr="127.0.0.1", master_port=0)
        return json.loads(path.read_text())


def _rank(measure: Callable[[], Any], path: Path, backend: str) -> None:
    current_world, result = init(backend), measure()
    if current_world.rank == 0:
        path.write_text(json.dumps(result))
    finish()


def _backend(ranks: int) -> str:
    # All on GPUs or all on the CPU: NCCL refuses ranks that share a GPU.
    return "auto" if torch.cuda.device_count() >= ranks else "gloo"


if __name__ == "__main__":
    main()
