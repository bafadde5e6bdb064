"""Provoke faults of distributed training in real ranks: ``python faults.py FOLDER``, with gloo on 127.0.0.1.

This process imports torch once. It forks every rank of every fault, and all ranks run at the same time. The output of a rank
goes to ``FOLDER/<fault>/<rank>.log``. ``FOLDER/results.json`` contains: fault → rank → exit code, or minus the number of a
signal.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import set_debug_level_from_env  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from distflow import train

LIMIT_S = 90
"""Seconds until SIGALRM ends a rank."""
JOIN_LIMIT_S = 10.0
"""Seconds that a rank waits for the others to join. It is long, because all faults start at the same moment."""


def check_collectives() -> None:
    """Let torch check collectives, as ``debug: true`` does."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    set_debug_level_from_env()


def join(seconds: float = 20, **changes: str) -> None:
    """Join the other ranks as scripts do. ``changes`` replaces environment variables."""
    os.environ.update(changes)
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))


def master_unreachable() -> None:
    if os.environ["RANK"] == "1":
        join(2)


def master_unknown() -> None:
    if os.environ["RANK"] == "1":
        join(2, MASTER_ADDR="no-such-host.invalid")


def rank_missing() -> None:
    if os.environ["RANK"] != "2":
        join(3)


def rank_twice() -> None:
    # Rank 0 waits longest: it has the store, and the others fail with another error if it ends first.
    join(JOIN_LIMIT_S if os.environ["RANK"] == "2" else 2 * JOIN_LIMIT_S, RANK=min(os.environ["RANK"], "1"))


def world_size_differs() -> None:
    join(3, WORLD_SIZE="3" if os.environ["RANK"] == "0" else "2")


def another_collective() -> None:
    check_collectives()
    join()
    one = torch.ones(4, 2)
    dist.all_reduce(one) if dist.get_rank() == 0 else dist.broadcast(one, 0)


def another_shape() -> None:
    check_collectives()
    join()
    dist.all_reduce(torch.ones(2 + dist.get_rank(), 3))


def another_size_unchecked() -> None:
    join(5)
    dist.all_reduce(torch.ones(4096 if dist.get_rank() == 0 else 512))
    dist.barrier()


def barrier_missed() -> None:
    join()
    if dist.get_rank() == 0:
        dist.monitored_barrier(timeout=timedelta(seconds=2), wait_all_ranks=True)
    else:
        threading.Event().wait(8)  # longer than the others wait


def collective_missed() -> None:
    join(3)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        threading.Event().wait(8)  # longer than the others wait


def rank_killed() -> None:
    join()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def rank_raises() -> None:
    join()
    if dist.get_rank() == 1:
        raise ValueError("invalid label")
    dist.all_reduce(torch.ones(1))


def init_rank_missing() -> None:
    """As `rank_missing`, but with ``train.init``, which the next three faults use, too."""
    if os.environ["RANK"] != "2":
        train.init(start_timeout=2)


def init_rank_twice() -> None:
    os.environ["RANK"] = min(os.environ["RANK"], "1")
    train.init(start_timeout=JOIN_LIMIT_S)


def init_world_size_differs() -> None:
    os.environ["WORLD_SIZE"] = "3" if os.environ["RANK"] == "0" else "2"
    train.init(start_timeout=JOIN_LIMIT_S)


def init_master_unreachable() -> None:
    if os.environ["RANK"] == "1":
        train.init(start_timeout=2)


def no_such_interface() -> None:
    join(5, GLOO_SOCKET_IFNAME="nosuch0")


def mesh_too_big() -> None:
    join()
    init_device_mesh("cpu", (8, 2), mesh_dim_names=("fsdp", "tp"))


class Half(nn.Module):
    """A model with a layer that does not contribute to the result."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(x)
        return result


def parameters_unused() -> None:
    join()
    model = DistributedDataParallel(Half())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def no_memory() -> None:
    join()
    torch.empty(1 << 50)


def port_taken() -> None:
    if os.environ["RANK"] == "0":
        join(3)


def variable_missing() -> None:
    del os.environ["RANK"]
    join()


def module_missing() -> None:
    importlib.import_module("no_such_module")


def file_missing() -> None:
    Path("no/such/data.npz").read_bytes()


def devices_mixed() -> None:
    nn.functional.layer_norm(torch.ones(2, 2), (2,), torch.ones(2, device="meta"))


def states_mixed() -> None:
    state = torch.ones(1, 1, 2, device="meta")
    nn.LSTM(2, 2)(torch.ones(1, 1, 2), (state, state))


def mount_small_disk() -> None:
    """Mount a file system of 1 MiB at ``/dev/shm`` that only this process sees."""
    if ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS
        raise OSError("no mount namespaces here")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], check=True)


class Large(torch.utils.data.Dataset[torch.Tensor]):
    """Two samples of 4 MiB."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1 << 20)


def shared_memory_full() -> None:
    mount_small_disk()
    list(torch.utils.data.DataLoader(Large(), num_workers=1))


def disk_full() -> None:
    mount_small_disk()
    Path("/dev/shm/samples.bin").write_bytes(bytes(1 << 22))


def disk_full_of_a_model() -> None:
    mount_small_disk()
    torch.save({"weights": torch.ones(1 << 20)}, "/dev/shm/model.pt")


FAULTS: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        fault.__name__: fault
        for fault in (
            master_unreachable, master_unknown, rank_missing, rank_twice, world_size_differs, another_collective, another_shape,
            another_size_unchecked, barrier_missed, collective_missed, rank_killed, rank_raises, no_such_interface,
            mesh_too_big, parameters_unused, no_memory, port_taken, variable_missing, module_missing, file_missing,
            init_rank_missing, init_rank_twice, init_world_size_differs, init_master_unreachable, devices_mixed, states_mixed,
            shared_memory_full, disk_full, disk_full_of_a_model,
        )
    }
)  # fmt: skip
NEED_MOUNT = ("shared_memory_full", "disk_full", "disk_full_of_a_model")
"""Faults that need the permission to mount a file system. Without it, they are omitted."""
OF_THREE_RANKS = ("rank_missing", "rank_twice", "init_rank_missing", "init_rank_twice")
"""Faults with three ranks. The others have two."""


def start(folder: Path, name: str, rank: int, port: int) -> int:
    """Fork a process that runs one rank of a fault. Return its id."""
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(LIMIT_S)
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    size = 3 if name in OF_THREE_RANKS else 2
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = 0
    try:
        FAULTS[name]()
    except Exception as error:  # noqa: BLE001  (as the interpreter does at the end of any script)
        # torch's hook, which prints the rank before every line.
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    mounts = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0
    faults = [name for name in FAULTS if mounts or name not in NEED_MOUNT]
    sockets = {}
    for name in faults:
        # A port that is bound like this, and does not listen, is reserved: only a store that binds this number gets it.
        sockets[name] = socket.socket()
        sockets[name].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sockets[name].bind(("127.0.0.1", 0))
    sockets["port_taken"].listen()
    ports = {name: one.getsockname()[1] for name, one in sockets.items()}
    pids = {}
    for name in faults:
        (root / name).mkdir(parents=True)
        for rank in range(3 if name in OF_THREE_RANKS else 2):
            pids[start(root / name, name, rank, ports[name])] = (name, rank)
    results: dict[str, dict[str, int]] = {name: {} for name in faults}
    while pids:
        pid, status = os.wait()
        name, rank = pids.pop(pid)
        results[name][str(rank)] = os.waitstatus_to_exitcode(status)
    (root / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
