#!/usr/bin/env python3
# mypy: allow-untyped-calls
"""Train a small network on handwritten digits with DistributedDataParallel, on one machine or on many.

Each machine starts one process for each of its ranks, ``offset`` to ``offset + size - 1``. All ranks connect to
MASTER_ADDR:MASTER_PORT (default 127.0.0.1:29500), where rank 0 listens::

    machine 0    MASTER_ADDR=10.0.0.1 python3 train_dist.py --offset 0 --size 8 --world_size 16
    machine 1    MASTER_ADDR=10.0.0.1 python3 train_dist.py --offset 8 --size 8 --world_size 16

Or let torchrun start the processes: ``torchrun --nproc_per_node 8 train_dist.py``. With CUDA, each rank uses the GPU of its
local rank, and NCCL. Without CUDA, all ranks run on the CPU with gloo. Standard output has only JSON lines.

Exit codes: 0 the training is complete; 1 a rank failed, and standard error has its traceback or signal; 2 wrong arguments; 143
stopped on request. SIGTERM or Ctrl-C on any rank stops all ranks after the same step; with --checkpoint, rank 0 writes one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from multiprocessing import active_children, connection, parent_process
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # a later import would keep a reference to the process group: see run_rank
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STOPPED = 128 + signal.SIGTERM
"""Exit code of a process that stopped on request."""
STOP_GRACE_S = 5.0
"""A rank that is still running this long after a request to stop, such as one that waits for a peer, ends itself."""


def main() -> int:
    """Run the ranks of this machine; return the exit code."""
    args = parse_arguments()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} <= os.environ.keys():
        local_rank = int(os.environ["LOCAL_RANK"])  # torchrun has already started one process per rank
        args.offset, args.world_size = int(os.environ["RANK"]) - local_rank, int(os.environ["WORLD_SIZE"])
        run_rank(local_rank, args)
        return 0
    if args.size == 1:
        run_rank(0, args)
        return 0
    return spawn_ranks(args)


def parse_arguments() -> argparse.Namespace:
    """Read the command line. The defaults of the three rank flags come from distflow's environment variables."""

    def environment(name: str, default: int) -> int:
        return int(os.environ.get(f"DISTFLOW_{name}", default))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--offset", type=int, default=environment("RANK_OFFSET", 0), help="first global rank of this machine")
    add("--size", type=int, default=environment("RANK_SIZE", 1), help="number of ranks on this machine")
    add("--world_size", type=int, default=environment("WORLD_SIZE", 1), help="number of ranks on all machines")
    add("--epochs", type=int, default=15, help="passes over the training data")
    add("--batch_size", type=int, default=32, help="samples per rank and step; the global batch is world_size times it")
    add("--lr", type=float, default=3e-3, help="learning rate of Adam")
    add("--data-dir", type=Path, help="folder of MNIST's four idx files, plain or .gz (default: scikit-learn's digits)")
    add("--checkpoint", type=Path, help="file to resume from and to write after each epoch; only rank 0 uses it")
    add("--output", type=Path, default=Path(), help="folder for model.pt, which rank 0 writes at the end")
    add("--seed", type=int, default=0, help="seed of the weights and of the order of the samples")
    args = parser.parse_args()
    if args.size < 1 or args.offset < 0 or args.offset + args.size > args.world_size:
        parser.error(f"ranks {args.offset} to {args.offset + args.size - 1} do not fit a world of {args.world_size}")
    return args


# ---- processes -------------------------------------------------------------------------------------------------------


def spawn_ranks(args: argparse.Namespace) -> int:
    """Start one process per rank and wait for all. If one fails, stop the others and report its rank."""
    asked_to_stop = threading.Event()

    def stop_all(*_: object) -> None:
        asked_to_stop.set()
        for child in active_children():
            child.terminate()

    signal.signal(signal.SIGTERM, stop_all)
    signal.signal(signal.SIGINT, stop_all)
    ranks = spawn(run_rank, args=(args,), nprocs=args.size, join=False)
    if asked_to_stop.is_set():
        stop_all()  # ranks that started after the signal
    was_asked, ended_at = False, 0.0
    try:
        while ranks.sentinels:
            connection.wait(ranks.sentinels)
            # Record this now: `join` first ends the other ranks. Meanwhile, peers may fail and cause a stop of this task.
            was_asked, ended_at = asked_to_stop.is_set(), time.time_ns() / 1e9
            ranks.join()
    except ProcessExitedException as error:
        if was_asked or error.exit_code == STOPPED:
            return STOPPED
        rank, name = args.offset + error.error_index, error.signal_name
        how = f"was killed by {name}" if name else f"exited with code {error.exit_code}"
        sys.stderr.write(f"rank {rank} {how} (pid {error.error_pid})\n")
        # A peer may have reported its broken connection already. This process is the cause: replace that report.
        write_error_file(rank, f"rank {rank} {how}", pid=error.error_pid, signal_name=name, replace=True, at=ended_at)
        return 1
    except ProcessRaisedException as error:
        sys.stderr.write(f"rank {args.offset + error.error_index} failed:\n{error.msg.strip()}\n")
        return STOPPED if asked_to_stop.is_set() else 1
    return 0


def run_rank(local_rank: int, args: argparse.Namespace) -> None:
    """Run one rank: join the world, train, leave."""
    rank = args.offset + local_rank
    stop = listen_for_stop()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # by default each process uses all cores, and ranks on one machine would slow each other down
    where = {"host": socket.gethostname(), "pid": os.getpid()}
    emit(event="started", rank=rank, local_rank=local_rank, world_size=args.world_size, **where)
    try:
        if torch.cuda.is_available():
            device, backend = torch.device("cuda", local_rank), "nccl"
            torch.cuda.set_device(device)
        else:
            device, backend = torch.device("cpu"), "gloo"
        gpu = device if backend == "nccl" else None
        dist.init_process_group(backend, rank=rank, world_size=args.world_size, device_id=gpu)
        finished = train(args, device, stop)
        dist.barrier()  # no rank leaves before the model is saved
        # Gloo's threads must end here: a thread that frees a tensor while Python exits aborts the process. They end with the
        # last reference to the process group. The model holds one, and is part of a reference cycle. The functions of
        # `torch.distributed.nn` hold the group that exists when DistributedDataParallel first imports them.
        gc.collect()
        dist.destroy_process_group()
    except Exception as error:
        if stop.is_set():  # a peer that has already stopped looks like a broken connection
            raise SystemExit(STOPPED) from None
        write_error_file(rank, f"{type(error).__name__}: {error}", traceback.format_exc())
        raise
    if not finished:
        raise SystemExit(STOPPED)


def listen_for_stop() -> threading.Event:
    """Return an event that the training loop checks. SIGTERM, Ctrl-C and the end of a parent that used ``spawn`` set it.

    Python runs signal handlers only in the main thread, which may wait in C++ for a peer that never answers. The signal also
    writes to a wake-up pipe at once. A separate thread reads the pipe, and ends the process if it does not end in time.
    """
    stop = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    parent = parent_process()

    def watch() -> None:
        connection.wait([reader, parent.sentinel] if parent else [reader])
        stop.set()
        threading.Event().wait(STOP_GRACE_S)
        os._exit(STOPPED)

    threading.Thread(target=watch, name="stop", daemon=True).start()
    return stop


# ---- training --------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, device: torch.device, stop: threading.Event) -> bool:
    """Train and save the model. Return False if a rank was asked to stop before the end."""
    rank, begin = dist.get_rank(), time.monotonic()
    if rank == 0:
        args.output.mkdir(parents=True, exist_ok=True)  # an error must appear now, not after the last epoch
    train_set, test_set = read_mnist(args.data_dir) if args.data_dir else read_digits()
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

    torch.manual_seed(args.seed)
    model = build_model(side=train_set.tensors[0].shape[-1]).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    epoch, step = resume(args.checkpoint, model, optimizer, device)

    def checkpoint() -> None:
        if rank == 0 and args.checkpoint:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": step}
            save(state, args.checkpoint)

    accuracy = evaluate(model, test_set, device)
    while epoch < args.epochs:
        sampler.set_epoch(epoch)  # without it, every epoch has the samples in the same order
        # Random numbers, such as those of dropout, depend on epoch and rank, so they are the same after a resume.
        torch.manual_seed((args.seed + epoch) * args.world_size + rank)
        loss_sum = count = 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(images.to(device)), labels.to(device))
            loss.backward()  # averages the gradients over all ranks
            optimizer.step()
            step += 1
            # One small all-reduce carries the losses and the stop requests of all ranks. All ranks therefore stop after the
            # same step, and no rank waits for one that has stopped.
            totals = torch.tensor([loss.item() * len(labels), len(labels), stop.is_set()], device=device)
            dist.all_reduce(totals)
            if totals[2] > 0:
                checkpoint()  # of the completed epochs; the current one will be repeated
                return False
            loss_sum, count = loss_sum + totals[0].item(), count + totals[1].item()
        epoch += 1
        accuracy = evaluate(model, test_set, device)
        checkpoint()
        if rank == 0:
            figures = {"loss": round(loss_sum / count, 6), "accuracy": round(accuracy, 6)}
            emit(epoch=epoch, step=step, **figures, world_size=args.world_size)
    if rank == 0:
        save(model.state_dict(), args.output / "model.pt")
        seconds = round(time.monotonic() - begin, 3)
        figures = {"accuracy": round(accuracy, 6), "world_size": args.world_size, "seconds": seconds}
        emit(event="finished", epoch=epoch, step=step, **figures)
    return True


def build_model(side: int) -> nn.Module:
    """Return two convolutions and a linear layer, for square gray images of ``side`` pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (side // 2) ** 2, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, test_set: TensorDataset, device: torch.device) -> float:
    """Return the accuracy on the held-out samples. Each rank evaluates its share."""
    share = Subset(test_set, range(dist.get_rank(), len(test_set), dist.get_world_size()))
    hits = torch.zeros(2, device=device)
    for images, labels in DataLoader(share, batch_size=512):
        right = model(images.to(device)).argmax(dim=1) == labels.to(device)
        hits += torch.tensor([right.sum(), len(labels)], device=device)
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


# ---- files -----------------------------------------------------------------------------------------------------------


def resume(path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[int, int]:
    """Load the checkpoint if rank 0 has one; return the numbers of completed epochs and steps.

    Rank 0 reads the file and sends it to the others, so the path need not be on a shared disk.
    """
    found: list[Any] = [None]
    if dist.get_rank() == 0 and path and path.exists():
        found = [torch.load(path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(found, device=device)
    if (state := found[0]) is None:
        return 0, 0
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"], state["step"]


def save(value: object, path: Path) -> None:
    """Write a file atomically: after a crash, either the old or the new version exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's 1797 digits of 8 x 8 pixels. A fixed fifth of them is the test set."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            "scikit-learn, which has the digits, is not installed: install it, or use --data-dir", name="sklearn"
        )
    # Read only its data file: importing scikit-learn takes as long as importing torch.
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    table = np.random.default_rng(0).permutation(table)
    images, labels = table[:, :-1].reshape(-1, 8, 8) / 16, table[:, -1]
    return to_dataset(images[360:], labels[360:]), to_dataset(images[:360], labels[:360])


def read_mnist(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """Return MNIST's training and test samples from its four idx files."""
    train_set, test_set = (
        to_dataset(read_idx(folder / f"{part}-images-idx3-ubyte") / 255, read_idx(folder / f"{part}-labels-idx1-ubyte"))
        for part in ("train", "t10k")
    )
    return train_set, test_set


def read_idx(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Read an array of bytes in idx format: type and number of dimensions (4 bytes), the dimensions, the data."""
    zipped = path.with_name(f"{path.name}.gz")
    content = path.read_bytes() if path.exists() else gzip.decompress(zipped.read_bytes())
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an idx file of bytes")
    shape = np.frombuffer(content, ">u4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + shape.nbytes).reshape(shape)


def to_dataset(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> TensorDataset:
    """Convert gray images with values from 0 to 1 to tensors with a color channel."""
    images, labels = images[:, np.newaxis].astype(np.float32), labels.astype(np.int64)
    return TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))


# ---- output ----------------------------------------------------------------------------------------------------------


def emit(**record: object) -> None:
    """Print one JSON line with a single write, so that lines of several processes do not mix."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def write_error_file(
    rank: int,
    message: str,
    callstack: str = "",
    *,
    pid: int | None = None,
    signal_name: str | None = None,
    replace: bool = False,
    at: float | None = None,
) -> None:
    """Write the reason of a failure to torch's error file for the launcher. Without ``replace``, keep an existing file.

    ``at`` is the time of the failure in seconds since the epoch. Default: now.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    at = at or time.time_ns() / 1e9
    extra = {"py_callstack": callstack, "timestamp": str(int(at))}
    record = {"message": {"message": message, "extraInfo": extra}, "raised_at": at, "rank": rank, "pid": pid or os.getpid()}
    if signal_name:
        record["signal"] = signal_name
    with contextlib.suppress(OSError), Path(path).open("w" if replace else "x", encoding="utf-8") as file:
        json.dump(record, file)


if __name__ == "__main__":
    sys.exit(main())
