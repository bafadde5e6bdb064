"""The table of causes: the symptom in the output of ranks, the cause in plain words, and the remedy.

Most patterns match messages that processes with torch 2.13 and gloo printed (``tests/train/faults.py``), messages of
``distflow.train``, and messages from the sources of CUDA and NCCL. Others match messages of Python, shells and the kernel. The
most specific rules come first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from msgspec import Struct

from distflow.diagnosis import explanations
from distflow.diagnosis.model import GroupOutcome, Hit, Level

__all__ = ["EXCEPTION", "HANG", "HOST_MEMORY", "PEER_DIED", "RULES", "Rule"]

Explain = Callable[[GroupOutcome, Sequence[Hit]], str | None]
"""A function that returns the details of a cause from the lines that show it; ``None`` if the lines mean another cause."""


class Rule(Struct, frozen=True, kw_only=True):
    """One cause."""

    key: str
    shows: str
    """A description of the symptom, for the docs."""
    cause: str
    remedy: str
    """The remedy. ``<id>`` stands for the id of the workflow."""
    level: Level = Level.CAUSE
    patterns: tuple[re.Pattern[str], ...] = ()
    """The symptom is a line that matches one of them. Other modules of this package apply the rules without patterns."""
    explain: Explain = explanations.printed_by


def _any(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern) for pattern in patterns)


_RAISED = r"^(?:\[[^\]]*\]:? ?)*"
"""Prefixes of a launcher or of torch that mark the rank, before the name of an exception."""

_KEY = r"wait timeout after \d+ms, keys: \S*default_pg/\S*//cpu//\d+/(?P<key>\d+)\s*$"
"""A timeout for a key in gloo's store. The key ends with the missing rank.

Only keys of the default process group match: it contains all ranks, and other process groups number their ranks differently.
"""

HOST_MEMORY = Rule(
    key="host-memory",
    shows="`can't allocate memory`, `MemoryError`, or the reason OOM_KILLED",
    cause="the memory of a node, container or job ran out",
    remedy="Give the task more memory, or use less: fewer workers of the data loader, no copy of the data set in every "
    "rank, loading weights on one rank only. A single huge number in the message points to a wrong shape.",
    patterns=_any(r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (\d+) bytes", _RAISED + r"MemoryError\b"),
    explain=explanations.host_memory,
)
HANG = Rule(
    key="hang",
    shows="the event `may hang` (`hang_timeout`)",
    cause="the gang has been silent for a long time and may hang",
    remedy="While it runs, `distflow workflow stacks <id>` shows where each rank is. Usually all ranks but one wait in the "
    "same call: find out why that one did not reach it. `debug: true` in the group names ranks whose collectives differ.",
    level=Level.STALL,
)
PEER_DIED = Rule(
    key="peer-died",
    shows="`Connection closed by peer`, `Connection reset by peer`, `Broken pipe`, `ncclRemoteError`, `remote process "
    "exited`",
    cause="one rank failed, and the others lost it",
    remedy="Only the first failure matters: `distflow workflow why <id>` has its traceback and last lines.",
    level=Level.BYSTANDER,
    patterns=_any(
        r"Connection (?:closed|reset) by peer", r"Broken pipe", r"ncclRemoteError", r"remote process exited", r"Failed to recv",
        r"Connection refused", r"recvValue failed",
    ),
    explain=explanations.lost_peer,
)  # fmt: skip

EXCEPTION = Rule(
    key="exception",
    shows="a Python traceback that no other row of this table explains",
    cause="the script raised an exception",
    remedy="Start with the last frame of the traceback that is your own code. `distflow workflow logs <id>` shows the "
    "rank's earlier output. An exception on a single rank often depends on that rank's part of the data.",
)

RULES: tuple[Rule, ...] = (
    Rule(
        key="collective-mismatch",
        shows="`Detected mismatch between collectives on ranks`, `Received data size doesn't match expected size`",
        cause="ranks called different collectives",
        remedy="Every rank must call the same collectives in the same order with the same shapes. Look for a "
        "collective inside `if rank == 0`, for a last batch that is smaller on some ranks, and for a branch that depends on "
        "the data. With `debug: true` in the group, torch names the ranks and their calls.",
        patterns=_any(
            r"Detected mismatch between collectives on ranks\. (.*)",
            r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)\. Received data size doesn't match",
        ),
        explain=explanations.mismatch,
    ),
    Rule(
        key="world-size-mismatch",
        shows="`expects 2 ranks, another rank expects 3`, `2/3 clients joined` in a layout of 2, `mismatch in rank count "
        "from procs`",
        cause="ranks disagree about the size of the world",
        remedy="WORLD_SIZE must be the same on all ranks. Read the variable, or use {{world_size}}; do not write a "
        "number into the script. `distflow workflow submit --dry-run` shows the environment of each task.",
        patterns=_any(
            r"rank (?P<rank>\d+) (?:expects|was \w+ of) (?P<one>\d+) ranks, another (?:rank expects|one of) (?P<other>\d+)",
            r"mismatch in rank count from procs (?P<one>\d+) : (?P<other>\d+)",
            r"Timed out after \d+ seconds waiting for clients\. (?P<there>\d+)/(?P<wanted>\d+) clients joined",
            _KEY,
        ),
        explain=explanations.world_size,
    ),
    Rule(
        key="rank-twice",
        shows="`rank 1 joined twice`, `rank 1 of 2 ranks has already checked in`, a rank that waits for its own number",
        cause="two processes hold the same rank",
        remedy="Offsets must not overlap: `distflow workflow submit --dry-run` shows the ranks of each task. A script that "
        "numbers its ranks itself must add DISTFLOW_RANK_OFFSET. Also check whether a process of an earlier run is left: "
        "`distflow node reap`.",
        patterns=_any(
            r"rank (?P<rank>\d+) (?:joined|is there) twice", r"rank (?P<rank>\d+) of \d+ ranks has already checked in",
            _KEY,
        ),
        explain=explanations.duplicate_rank,
    ),
    Rule(
        key="mesh-too-big",
        shows="`Mesh should not be bigger than default world size`, `the strategy is for … ranks, but there are`",
        cause="the device mesh does not have as many places as there are ranks",
        remedy="The product of the mesh's sizes is the number of ranks: correct `mesh_shape` (or the numbers in "
        "`init_device_mesh`), or request more ranks. With `strategy:` in the spec this is checked before anything starts.",
        patterns=_any(
            r"Mesh should not be bigger than default world size (?P<world>\d+), but found (?P<mesh>\d+) ranks",
            r"the strategy is for (?P<mesh>\d+) ranks?(?: \([^)]*\))?, but there (?:is|are) (?P<world>\d+)",
        ),
        explain=explanations.mesh,
    ),
    Rule(
        key="unused-parameters",
        shows="`Expected to have finished reduction in the prior iteration`",
        cause="DDP waits for gradients of parameters that do not contribute to the loss",
        remedy="Remove unused layers from the model, or freeze them (`requires_grad_(False)`). If the unused parameters "
        "change from step to step, use `DistributedDataParallel(model, find_unused_parameters=True)`, which costs time. "
        "`TORCH_DISTRIBUTED_DEBUG=INFO` prints their names.",
        patterns=_any(r"Expected to have finished reduction in the prior iteration"),
        explain=explanations.unused,
    ),
    Rule(
        key="gpu-memory",
        shows="`CUDA out of memory. Tried to allocate`, `CUBLAS_STATUS_ALLOC_FAILED`",
        cause="a GPU's memory ran out",
        remedy="Use smaller batches per rank (and accumulate), activation checkpointing, bf16, or a strategy that shards "
        "(`distflow train advise` suggests one). If much memory is free, set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. If a process of an earlier job holds it, run `distflow node reap`. "
        "`train.MemoryGuard` skips single steps on all ranks together.",
        patterns=_any(
            r"CUDA out of memory\.? Tried to allocate (?P<wanted>[\d.]+ \w+)"
            r"(?:.*?GPU (?P<gpu>\d+) has a total capacity of (?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free)?",
            r"CUBLAS_STATUS_ALLOC_FAILED", r"CUDA error: out of memory", r"some rank ran out of memory in \d+ steps in a row",
        ),
        explain=explanations.gpu_memory,
    ),
    HOST_MEMORY,
    Rule(
        key="shared-memory",
        shows="`Error while creating shared memory segment`, `DataLoader worker … Bus error`, `unable to allocate "
        "shared memory(shm) for file </torch_`",
        cause="the shared memory of a node or container (/dev/shm) is full or too small",
        remedy="NCCL and the data loader's workers use shared memory. Give the container more with `--shm-size` (docker's "
        "default is 64 MB), remove files of dead processes from /dev/shm, or use fewer workers.",
        patterns=_any(
            r"Error while creating shared memory segment", r"DataLoader worker .*(?:Bus error|shared memory)",
            r"unable to mmap \d+ bytes from file </torch_", r"unable to write to file </torch_",
            r"unable to allocate shared memory\(shm\) for file </torch_",
        ),
    ),
    Rule(
        key="disk-full",
        shows="`No space left on device`; from `torch.save`: `inline_container.cc … unexpected pos`",
        cause="a disk is full",
        remedy="Run `df -h` on the node. `distflow node clean` removes old workflows, and `keep_last` limits checkpoints.",
        patterns=_any(r"No space left on device", r"inline_container\.cc:\d+\].*unexpected pos \d+ vs \d+"),
    ),
    Rule(
        key="nccl-versions",
        shows="`Mismatched NCCL version detected`",
        cause="ranks run different versions of NCCL, and so of torch",
        remedy="Give all nodes the same environment: the same container image, or the same `python` in the pool. "
        "`distflow pool check` shows the torch of each node.",
        patterns=_any(r"Mismatched NCCL version detected : rank (\d+) version (\d+) rank (\d+) version (\d+)"),
        explain=explanations.nccl_versions,
    ),
    Rule(
        key="unlike-gpus",
        shows="`no kernel image is available for execution on the device`, `driver on your system is too old`, "
        "`not compiled with CUDA enabled`",
        cause="this torch does not fit the GPU or its driver",
        remedy="All nodes of a gang should have the same GPUs: put different nodes into separate platforms, and name one "
        "platform in `resources`. Or install the torch for this GPU and driver (torch.cuda.get_arch_list() lists the "
        "supported GPUs).",
        patterns=_any(
            r"no kernel image is available for execution on the device", r"driver on your system is too old.*",
            r"Torch not compiled with CUDA enabled", r"CUDA driver version is insufficient for CUDA runtime version",
        ),
    ),
    Rule(
        key="too-few-gpus",
        shows="`invalid device ordinal`, `wants GPU 4, but torch sees 2 GPUs`, `Duplicate GPU detected`",
        cause="a rank has no GPU of its own",
        remedy="Each rank needs one GPU: request as many GPUs as the task has ranks (`gpu:` in `resources`), use "
        "LOCAL_RANK (not RANK) as the device number, and check CUDA_VISIBLE_DEVICES.",
        patterns=_any(
            r"invalid device ordinal", r"rank \d+ wants GPU \d+, but torch sees \d+",
            r"Duplicate GPU detected : rank \d+ and rank \d+ both on CUDA device \w+",
        ),
    ),
    Rule(
        key="devices-mixed",
        shows="`Expected all tensors to be on the same device`, `Tensor on device cpu is not on the expected device meta`",
        cause="an operation got tensors of different devices",
        remedy="Move the model to the rank's device before you create the optimizer, and move every batch with its targets "
        "(`world.device` of `train.init()`). Tensors that are created in the forward pass, and tensors that are neither a "
        "parameter nor a registered buffer, are easily forgotten. Tensors on `meta` have no values yet: `world.parallelize` "
        "sets them.",
        patterns=_any(
            r"Expected all tensors to be on the same device", r"Tensor on device \S+ is not on the expected device \S+",
            r"Input type \((?:torch\.\w+\) and weight type \(torch\.cuda\.\w+|torch\.cuda\.\w+\) and weight type "
            r"\(torch\.\w+)\) should be the same", r"tensors? are not at the same device, found",
        ),
    ),
    Rule(
        key="wrong-interface",
        shows="`Unable to find address for: eth7`, `no socket interface found`, `timed out connecting … remote=[127.0.1.1]` "
        "between nodes",
        cause="ranks announce an address or interface that the others cannot use",
        remedy="Unset GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and TP_SOCKET_IFNAME in the spec and the script: distflow "
        "sets them to the interface that has the node's address. If that interface is wrong, set the node's `address` in the "
        "configuration; `distflow pool check` tests it.",
        patterns=_any(
            r"Unable to find address for: (?P<name>\S+)", r"[Nn]o socket interface found",
            r"(?:timed out connecting|failed to connect).*remote=\[(?P<address>127\.\d+\.\d+\.\d+)\]",
            r"[Cc]onnect to (?P<address>127\.\d+\.\d+\.\d+)<\d+>",
        ),
        explain=explanations.interface,
    ),
    Rule(
        key="port-taken",
        shows="`EADDRINUSE`, `Address already in use`, `cannot listen on port`",
        cause="a port is taken, usually the rendezvous port on the master's node",
        remedy="Leave the port out of the spec, or use {{master_port}}: distflow finds a free one and reserves it. If you "
        "need a fixed port, `ss -ltnp` on the node shows the process that uses it; `distflow node reap` ends "
        "processes of earlier jobs. A second process with rank 0 on the same node causes the same error.",
        patterns=_any(
            r"failed to listen on any local network address\. port: (?P<port>\d+)", r"cannot listen on port (?P<port>\d+)",
            r"EADDRINUSE", r"[Aa]ddress already in use",
        ),
        explain=explanations.port,
    ),
    Rule(
        key="variable-missing",
        shows="`environment variable RANK expected, but not set`, `RANK is not set`",
        cause="the script was started as a single process, not as a rank",
        remedy="A task with several ranks needs a launcher: `launcher: torchrun` (or `spawn`) in the task, or "
        "`python -m distflow.train.launch` in the command.",
        patterns=_any(r"environment variable (\w+) expected, but not set", r"but (RANK) is not set: start the script with"),
        explain=explanations.variable,
    ),
    Rule(
        key="module-missing",
        shows="`ModuleNotFoundError`, `cannot open shared object file`",
        cause="a Python module or a library is missing",
        remedy="List it in the requirements file of `venv`, install it into the Python that the task runs on this node "
        "(`python` of the pool or node; `image` of the task), or send it with `files`. `setup:` of the pool is the place for "
        "`module load` and conda.",
        patterns=_any(_RAISED + r"ModuleNotFoundError: No module named '([^']+)'", r"(lib\S+): cannot open shared object file"),
        explain=explanations.missing_names,
    ),
    Rule(
        key="file-missing",
        shows="`FileNotFoundError`, `can't open file`, `command not found`",
        cause="a file or a command is missing",
        remedy="Send it with `files` (`localpath`), fetch it with `inputs`, or use a path that every node has. A relative "
        "path starts in the task's working directory.",
        patterns=_any(
            _RAISED + r"FileNotFoundError: \[Errno 2\] No such file or directory: '([^']+)'",
            r"can't open file '([^']+)'", r"can't open (\S+): No such file",
            r"^\S*sh: (?:line )?(?:\d+: )?(\S+): (?:command )?not found",
        ),
        explain=explanations.missing_names,
    ),
    Rule(
        key="gpu-fault",
        shows="`NVRM: Xid` in the kernel's log, `uncorrectable ECC error`",
        cause="a GPU or its driver reported a fault",
        remedy="Remove the node from the pool, run nvidia-smi and dcgmi diag there, and reset or reboot it. Xid 79: the "
        "GPU fell off the bus. 48, 63, 64, 94 and 95: memory errors. 31 and 13: usually errors of the program.",
        patterns=_any(r"NVRM: Xid .*", r"uncorrectable ECC error"),
    ),
    Rule(
        key="nccl-system",
        shows="`ncclSystemError`, `ncclUnhandledCudaError`, `ncclInternalError`",
        cause="a call of NCCL to the system, CUDA or its own code failed",
        remedy="Set NCCL_DEBUG=INFO in the task's environment: the line before the error names the call that failed. "
        "Common causes are the interface, a limit on locked memory with InfiniBand (`ulimit -l unlimited`), and /dev/shm.",
        patterns=_any(r"ncclSystemError", r"ncclUnhandledCudaError", r"ncclInternalError"),
    ),
    Rule(
        key="barrier-missed",
        shows="`Ranks 1 failed to pass monitoredBarrier`",
        cause="ranks did not reach a barrier",
        remedy="Those ranks hang, are slow, or took another branch: `distflow workflow logs <id> --rank N` shows their "
        "last output, and `distflow workflow stacks <id>` shows where they are while the workflow runs.",
        level=Level.STALL,
        patterns=_any(r"Ranks? (?P<ranks>\d[\d, ]*) failed to pass monitoredBarrier in (?P<ms>\d+) ms"),
        explain=explanations.absent_ranks,
    ),
    Rule(
        key="rank-missing",
        shows="`wait timeout after …, keys: …/2`, `2/3 clients joined`, `ranks 1, 2 did not join within`",
        cause="a rank did not join the rendezvous",
        remedy="Check its task: `distflow workflow logs <id> --rank N`. The rank may still be loading (raise the timeout "
        "of init_process_group), use another rank's number (print RANK), or be unable to reach the master.",
        level=Level.STALL,
        patterns=_any(
            r"(?:^|\W)ranks? (?P<ranks>\d[\d, ]*)(?: and \d+ others?)? did not (?:join|come) within",
            r"Timed out after \d+ seconds waiting for clients\. (?P<there>\d+)/(?P<wanted>\d+) clients joined",
            _KEY, r"wait timeout after \d+ms, keys: ",
        ),
        explain=explanations.absent_ranks,
    ),
    Rule(
        key="master-unreachable",
        shows="`The client socket has timed out … while trying to connect to`, `does not reach the master at`",
        cause="ranks could not reach the master",
        remedy="Does rank 0's task run at all (`distflow workflow logs <id> --rank 0`)? Is MASTER_ADDR the address of its "
        "node on the training network ({{master_addr}}; not a name, not 127.0.0.1)? Does a firewall allow that port between "
        "the nodes? `distflow pool check` tests it.",
        level=Level.STALL,
        patterns=_any(
            r"timed out after (?P<ms>\d+)ms while trying to connect to \((?P<host>[^,]+), (?P<port>\d+)\)",
            r"does not reach the master at (?P<host>\S+):(?P<port>\d+)",
        ),
        explain=explanations.master,
    ),
    Rule(
        key="collective-timeout",
        shows="`Timed out waiting …ms for recv operation`, `Watchdog caught collective operation timeout`, `connectFullMesh "
        "failed`",
        cause="ranks waited in a collective for other ranks",
        remedy="A rank was slow, hung, or took another branch: `distflow workflow logs <id>` shows which rank stopped "
        "printing first, `distflow workflow stacks <id>` shows where each rank is while the workflow runs, and `debug: "
        "true` names different collectives. If the rank is only slow (a checkpoint, a first compilation), raise the timeout "
        "of init_process_group.",
        level=Level.STALL,
        patterns=_any(
            r"Timed out waiting (?P<ms>\d+)ms for (?P<op>\w+) operation", r"Gloo connectFullMesh failed",
            r"Watchdog caught collective operation timeout: WorkNCCL\(.*?OpType=(?P<op>\w+).*?Timeout\(ms\)=(?P<ms>\d+)",
        ),
        explain=explanations.timeout,
    ),
    PEER_DIED,
)  # fmt: skip
"""The most specific rules come first."""
