"""Joining the world of all ranks, and leaving it: ``world = init()`` at the start of a training script.

The ranks use torch's ``env://`` variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), but first register in a store. Error
messages can therefore name a rank that is missing, that joined twice, or that has another world size.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

# Import this before `init`. Its functions evaluate `group=dist.group.WORLD` at import, so a later import would keep a reference
# to the process group (see `_leave`).
import torch.distributed.nn
from torch import nn
from torch.distributed import HashStore, PrefixStore, Store, TCPStore, set_debug_level_from_env  # type: ignore[attr-defined]

from distflow.train.communication.collectives import serve_collectives
from distflow.train.strategies.description import Strategy, current_strategy_or_none, reset_current_strategy
from distflow.train.strategies.options import StrategyOptions

if TYPE_CHECKING:
    from distflow.train.parallel import ParallelPlan

__all__ = ["World", "WorldError", "before_leaving", "control_group", "finish", "init", "is_debug", "world"]

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_DEBUG = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""Defaults of variables with ``DISTFLOW_DEBUG=1``: torch then checks collectives and records the last ones."""


class WorldError(RuntimeError):
    """The world could not be joined, or has not been joined yet. The message names the ranks that are to blame, if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process's place among all ranks."""

    rank: int
    size: int
    """Number of ranks on all machines."""
    local_rank: int
    """Number of this process on its machine."""
    local_size: int
    device: torch.device
    """The GPU of this rank, or the CPU."""
    backend: str
    """As ``torch.distributed`` names it, such as ``gloo`` or ``cpu:gloo,cuda:nccl``."""

    def parallelize(
        self, model: nn.Module, strategy: Strategy | StrategyOptions | str | None = None, *,
        loss: Callable[[Any, Any], torch.Tensor] | None = None, example: tuple[torch.Tensor, ...] | None = None,
        weights: str | Path | None = None,
    ) -> ParallelPlan:  # fmt: skip
        """Let all ranks train the model together, and return the plan, which has the model of this rank. Collective.

        ``strategy`` is a kind (``"fsdp"``), a kind with options (``FSDP(mixed_precision="bf16")``) or a ``Strategy`` on a mesh.
        The default is the strategy of the last plan, else of the spec (``DISTFLOW_STRATEGY``), else ``"ddp"``.

        Ranks start from rank 0's parameters, except under ``none`` if the model is on a real device. The model may be on any
        device. A model on the meta device is divided before rank 0 draws its values, and each rank gets only its part of them,
        so no rank holds the whole model unless the strategy replicates it. A pipeline needs ``loss(outputs, targets)``, which
        returns a mean over samples. If the model is not an ``nn.Sequential``, a pipeline also needs ``example``, the inputs of
        one micro-batch.

        ``weights`` is a directory with safetensors files of Hugging Face, which every rank can read. Each rank reads its parts
        of the tensors. On the meta device, rank 0 initializes only modules with non-persistent buffers, which no file has.
        Raises ``ValueError`` or ``TypeError`` if model, strategy, options, files and ranks do not fit, ``FileNotFoundError``
        without files, and ``RuntimeError`` without the package safetensors or torch 2.8.
        """
        from distflow.train.parallel import parallelize  # noqa: PLC0415  it needs this module

        return parallelize(model, strategy, loss=loss, example=example, weights=weights)


_joined: World | None = None
_control: dist.ProcessGroup | None = None
_left = 0
"""Number of worlds that this process has left."""
_leaving: list[Callable[[], None]] = []
"""Functions to call before this process leaves its world."""
_stores: dict[tuple[str, int, int], TCPStore] = {}
"""Stores by address, port and rank. Rank 0 keeps its store, so that ranks can join the next world before rank 0 does."""


def init(backend: str = "auto", timeout: float | timedelta | None = None, *, start_timeout: float | timedelta = 600.0) -> World:
    """Join the world, choose this rank's device, and return the ``World``. Until ``finish``, later calls return the same one.

    ``backend``: ``auto`` is ``cpu:gloo,cuda:nccl`` with CUDA, else ``gloo``. ``timeout`` (seconds) limits each collective. It
    defaults to ``timeout_s`` of the spec's strategy, or else to torch's default. ``start_timeout`` (seconds) limits the wait
    for the other ranks. Without torch's variables, the world has one rank. At exit, a process leaves the world, but not
    after an exception.

    SIGUSR1 then prints the stack of every thread, to standard error or, in a task of distflow, to a file. The command
    ``distflow workflow stacks`` reads it and the rank's collective. With ``DISTFLOW_DEBUG=1``, torch compares the collectives.

    Raises ``WorldError``, and ``ValueError`` if ``DISTFLOW_STRATEGY`` is not valid.
    """
    global _joined, _control  # noqa: PLW0603 (a process is in one world)
    if _joined is not None:
        return _joined
    if dist.is_initialized():
        raise WorldError("the process group exists already: call distflow.train.init() instead of init_process_group()")
    # Handle SIGUSR1 first: once the stack file exists, the node may send the signal.
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    faulthandler.register(signal.SIGUSR1, file=_stack_file(), all_threads=True, chain=False)
    if is_debug():
        for name, value in _DEBUG.items():
            os.environ.setdefault(name, value)
        set_debug_level_from_env()
    place = _place(os.environ, backend)
    if timeout is None and (strategy := current_strategy_or_none()) is not None:
        timeout = strategy.options.get("timeout_s")
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    bound = None if timeout is None else _delta(timeout)
    dist.init_process_group(
        place.backend,
        store=_rendezvous(os.environ, place, _delta(start_timeout)),
        rank=place.rank, world_size=place.size, timeout=bound,
        device_id=place.device if place.device.type == "cuda" else None,
    )  # fmt: skip
    _control = dist.new_group(backend="gloo", timeout=bound, group_desc="distflow")
    serve_collectives()
    # Wait for all: a rank that leaves at once must not close the connections on which others still join.
    if is_debug():
        dist.monitored_barrier(_control, timeout=_delta(start_timeout), wait_all_ranks=True)
    else:
        dist.barrier(_control)
    atexit.register(_finish_at_exit)
    _joined = place
    return place


def _stack_file() -> int:
    """Return the descriptor to which SIGUSR1 writes. The open file tells the node that the signal is safe."""
    folder = os.environ.get("DISTFLOW_ATTEMPT_DIR")
    if folder:
        with suppress(OSError):
            return os.open(f"{folder}/stacks-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return 2


def world() -> World:
    """Return this process's ``World``. Raises ``WorldError`` before ``init`` and after ``finish``."""
    if _joined is None:
        raise WorldError("this process is not in a world: call distflow.train.init() first")
    return _joined


def control_group() -> dist.ProcessGroup | None:
    """Return the gloo group in which ranks vote on errors; ``None`` outside of a world. Do not keep it (see ``_leave``)."""
    return _control


def before_leaving(work: Callable[[], None]) -> None:
    """Let ``finish`` call ``work`` while the ranks can still communicate."""
    _leaving.append(work)


def finish() -> None:
    """Leave the world, if this process is in one; ``init`` may then join another one.

    Waits for running saves of checkpoints, and raises their errors after it has left the world.
    """
    with ExitStack() as last_first:
        last_first.callback(_leave)
        for work in _leaving:
            last_first.callback(work)
        _leaving.clear()


def _leave() -> None:
    global _joined, _control, _left  # noqa: PLW0603
    _left += _joined is not None
    _joined = _control = None
    atexit.unregister(_finish_at_exit)
    reset_current_strategy()
    if dist.is_initialized():
        # Gloo's threads end with the last reference to the group. They must end here, because a thread that frees a tensor
        # while Python exits aborts the process. A model in DDP refers to the group, and is part of a reference cycle.
        gc.collect()
        dist.destroy_process_group()


def is_debug() -> bool:
    """Return whether ``DISTFLOW_DEBUG`` enables slow checks."""
    return os.environ.get("DISTFLOW_DEBUG", "") not in ("", "0")


def _finish_at_exit() -> None:
    """Leave the world, but not after an exception, because leaving may then wait for ranks that are in a collective."""
    if getattr(sys, "last_value", None) is None:
        finish()


def _delta(value: float | timedelta) -> timedelta:
    return value if isinstance(value, timedelta) else timedelta(seconds=value)


def _place(environment: Mapping[str, str], backend: str) -> World:
    """Return the ``World`` that torch's variables describe."""
    found = [name for name in _VARIABLES if environment.get(name)]
    if "RANK" in found and len(found) < len(_VARIABLES):
        missing = ", ".join(name for name in _VARIABLES if name not in found)
        raise WorldError(f"RANK is set, but not {missing}: start the script with python -m distflow.train.launch, or torchrun")
    if "RANK" not in found and max(_number(environment, "WORLD_SIZE", 1), _number(environment, "DISTFLOW_WORLD_SIZE", 1)) > 1:
        raise WorldError(
            "WORLD_SIZE or DISTFLOW_WORLD_SIZE is more than 1, but RANK is not set: start the script with "
            "python -m distflow.train.launch, or torchrun"
        )
    rank, size = _number(environment, "RANK", 0), _number(environment, "WORLD_SIZE", 1)
    if not 0 <= rank < size:
        valid = "correct these variables" if size < 1 else f"ranks are 0 to {size - 1}; correct these variables"
        raise WorldError(f"RANK={rank} is not a rank of WORLD_SIZE={size}: {valid}")
    local_rank = _number(environment, "LOCAL_RANK", 0)
    has_cuda = torch.cuda.is_available()
    if backend == "auto":
        backend = "cpu:gloo,cuda:nccl" if has_cuda else "gloo"
    device = torch.device("cpu")
    if has_cuda and "nccl" in backend:
        if local_rank >= (count := torch.cuda.device_count()):
            raise WorldError(
                f"rank {rank} wants GPU {local_rank}, but torch sees {count} GPU{'s' * (count > 1)}: start at most {count} "
                f"rank{'s' * (count > 1)} on this machine, or check CUDA_VISIBLE_DEVICES"
            )
        device = torch.device("cuda", local_rank)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", 1)
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, device=device, backend=backend)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"{name}={text}: not a number; correct or unset it") from None


def _rendezvous(environment: Mapping[str, str], place: World, timeout: timedelta) -> Store:
    """Return the store, after all ranks have registered there."""
    if not environment.get("RANK"):
        return HashStore()
    deadline = time.monotonic() + timeout.total_seconds()
    address, port = environment["MASTER_ADDR"], _number(environment, "MASTER_PORT", 0)
    # torchrun's agent may host the store; else rank 0 does.
    hosts = place.rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    key = address, port, place.rank
    try:
        if key not in _stores:
            _stores[key] = TCPStore(address, port, place.size, hosts, timeout, wait_for_workers=False, multi_tenant=True)
    except dist.DistError as error:
        why = str(error).splitlines()[0]
        if hosts and "server socket" in why:
            raise WorldError(
                f"rank 0 cannot listen on port {port}: {why}; set MASTER_PORT to a free port, the same on all ranks"
            ) from error
        if hosts:
            remedy = "check that MASTER_ADDR is an address of this machine"
            raise WorldError(f"rank 0 cannot connect to its own store at {address}:{port}: {why}; {remedy}") from error
        raise WorldError(
            f"rank {place.rank} does not reach the master at {address}:{port}: {why}; check that rank "
            "0 (or torchrun) runs there, and that this machine can connect to MASTER_ADDR"
        ) from error
    try:
        return _register_and_wait(_stores[key], environment, place, timeout, deadline)
    except dist.DistNetworkError as error:
        del _stores[key]
        why = str(error).splitlines()[0]
        raise WorldError(
            f"rank {place.rank} lost the store at {address}:{port} before all ranks had joined: {why}; see the "
            "output of the process that runs the store: rank 0, or torchrun"
        ) from error


def _register_and_wait(tcp: Store, environment: Mapping[str, str], place: World, timeout: timedelta, deadline: float) -> Store:
    """Register this rank in the store ``tcp``, and wait until ``deadline`` (monotonic clock) for the other ranks."""
    # If the store outlives an attempt or a world, the next one must not see the ranks of the previous one.
    store = PrefixStore(f"distflow/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_left}", tcp)
    expected = store.compare_set("size", "", str(place.size)).decode()
    if expected != str(place.size):
        raise WorldError(
            f"rank {place.rank} expects {place.size} ranks, another rank expects {expected}: WORLD_SIZE must be the same"
        )
    if store.add(f"rank/{place.rank}", 1) > 1:
        raise WorldError(
            f"rank {place.rank} joined twice: two machines have the same offset (DISTFLOW_RANK_OFFSET), two tasks set the same "
            "RANK, or a process of an earlier run is still running; correct the numbers, or end that process"
        )
    if store.add("arrived", 1) == place.size:
        store.set("all", "1")
    pause, pause_s = threading.Event(), 0.005
    # Poll, because a timeout of the store's own wait writes warnings that contain only addresses.
    while not store.check(["all"]):
        if time.monotonic() > deadline:
            missing = [rank for rank in range(place.size) if not store.check([f"rank/{rank}"])]
            if not missing:  # the last rank has just joined
                break
            raise WorldError(
                f"{_ranks(missing)} did not join within {timeout.total_seconds():g} s: check their output, or "
                "increase `start_timeout` of `train.init()`"
            )
        pause.wait(pause_s)
        pause_s = min(2 * pause_s, 0.25)
    return store


def _ranks(ranks: list[int]) -> str:
    """Return ``rank 3`` or ``ranks 3, 5``; after 16 ranks, ``and 2 others``."""
    shown = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} other{'s' * (len(ranks) > 17)}" if len(ranks) > 16 else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}{more}"
