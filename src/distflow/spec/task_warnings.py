"""Warnings about a task: keys of OSMO that distflow ignores, and misspelled variables of NCCL and torch.

NCCL ignores unknown variables without a message. Names that are not similar to a known one are accepted, because every release
adds new ones. Sources: NCCL's user guide (``docs/userguide/source/env.rst``) and ``torch/csrc/distributed/c10d`` of torch 2.13.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from distflow.documents.document import View

__all__ = ["notice_task", "notice_variables", "output_words"]

_TASK_WARNINGS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "downloadType": ("`downloadType` is ignored", ""),
        "cacheSize": ("`cacheSize` is ignored", ""),
        "kpis": ("`kpis` is ignored: nothing is uploaded", "write them to a URL, with `outputs`"),
    }
)


def notice_task(task: View) -> None:
    """Warn about keys of a task that distflow ignores."""
    for key, (message, hint) in _TASK_WARNINGS.items():
        if task.has(key):
            task.warn(message, hint, key=key)


def output_words(task: View) -> tuple[str, ...]:
    """Describe where the task's output goes, for people."""
    words = []
    for entry in task.views("outputs"):
        for key, verb in (("url", "upload to"), ("dataset", "store as dataset"), ("update_dataset", "add to dataset")):
            what = entry.string(key) or entry.view(key).string("name")
            if what:
                words.append(f"{verb} {what}")
    return tuple(words)


_NCCL = (
    "ALGO", "ALLOC_P2P_NET_LL_BUFFERS", "ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "BUFFSIZE", "CGA_CLUSTER_SIZE",
    "CHECKS_DISABLE", "CHECK_POINTERS", "COLLNET_ENABLE", "COLLNET_NODE_THRESHOLD", "COMM_BLOCKING", "COMM_ID", "CONF_FILE",
    "CROSS_NIC", "CTA_POLICY", "CUMEM_ENABLE", "CUMEM_HOST_ENABLE", "DEBUG", "DEBUG_FILE", "DEBUG_SUBSYS",
    "DEBUG_TIMESTAMP_FORMAT", "DEBUG_TIMESTAMP_LEVELS", "DESYNC_DEBUG", "DMABUF_ENABLE", "ENABLE_TIMING", "GRAPH_DUMP_FILE",
    "GRAPH_FILE", "GRAPH_MIXING_SUPPORT", "GRAPH_REGISTER", "GRAPH_STREAM_ORDERING", "HOSTID", "IB_ADAPTIVE_ROUTING",
    "IB_ADDR_FAMILY", "IB_ADDR_RANGE", "IB_AR_THRESHOLD", "IB_CUDA_SUPPORT", "IB_DISABLE", "IB_ECE_ENABLE", "IB_FIFO_TC",
    "IB_GID_INDEX", "IB_HCA", "IB_MERGE_NICS", "IB_PCI_RELAXED_ORDERING", "IB_QPS_PER_CONNECTION", "IB_RETRY_CNT",
    "IB_RETURN_ASYNC_EVENTS", "IB_ROCE_VERSION_NUM", "IB_SL", "IB_SPLIT_DATA_ON_QPS", "IB_TC", "IB_TIMEOUT",
    "IGNORE_CPU_AFFINITY", "IPC_USE_ABSTRACT_SOCKET", "LAUNCH_MODE", "LAUNCH_ORDER_IMPLICIT", "LAUNCH_RACE_FATAL",
    "LEGACY_CUDA_REGISTER", "LL_THRESHOLD", "LOCAL_REGISTER", "MAX_CTAS", "MAX_NCHANNELS", "MAX_NRINGS", "MAX_P2P_NCHANNELS",
    "MEM_SYNC_DOMAIN", "MIN_CTAS", "MIN_NCHANNELS", "MIN_NRINGS", "MIN_P2P_NCHANNELS", "MNNVL_CLIQUE_ID", "MNNVL_ENABLE",
    "MNNVL_UUID", "NCHANNELS_PER_NET_PEER", "NCHANNELS_PER_PEER", "NET", "NETDEVS_POLICY", "NET_GDR_C2C", "NET_GDR_LEVEL",
    "NET_GDR_READ", "NET_MERGE_LEVEL", "NET_MERGE_POLICY", "NET_PLUGIN", "NET_SHARED_BUFFERS", "NET_SHARED_COMMS",
    "NSOCKS_PERTHREAD", "NTHREADS", "NVB_DISABLE", "NVLS_ENABLE", "OOB_NET_ENABLE", "OOB_NET_IFNAME", "P2P_DIRECT_DISABLE",
    "P2P_DISABLE", "P2P_LEVEL", "P2P_LL_THRESHOLD", "P2P_NET_CHUNKSIZE", "P2P_PXN_LEVEL", "PROFILER_PLUGIN", "PROTO",
    "PXN_C2C", "PXN_DISABLE", "RAS_ADDR", "RAS_ENABLE", "RAS_TIMEOUT_FACTOR", "RMA_EAGER_INIT", "RUNTIME_CONNECT",
    "SET_THREAD_NAME", "SHM_DISABLE", "SINGLE_RING_THRESHOLD", "SOCKET_FAMILY", "SOCKET_IFNAME", "SOCKET_NTHREADS",
    "SOCKET_RETRY_CNT", "SOCKET_RETRY_SLEEP_MSEC", "SYM_GIN_KERNELS_ENABLE", "TOPO_DUMP_FILE", "TOPO_DUMP_FILE_RANK",
    "TOPO_FILE", "TREE_THRESHOLD", "TUNER_PLUGIN", "UID_STAGGER_RATE", "UID_STAGGER_THRESHOLD", "WIN_ENABLE",
)  # fmt: skip
"""Names after ``NCCL_``: those of the manual, and torch's former names, which it still reads."""
_TORCH_NCCL = (
    "ASYNC_ERROR_HANDLING", "AVOID_RECORD_STREAMS", "BLOCKING_WAIT", "DEBUG_INFO_TEMP_FILE", "DESYNC_DEBUG",
    "DUMP_ON_TIMEOUT", "ENABLE_MONITORING", "ENABLE_TIMING", "HEARTBEAT_TIMEOUT_SEC", "TRACE_BUFFER_SIZE", "TRACE_CPP_STACK",
    "USE_COMM_NONBLOCKING", "WAIT_TIMEOUT_DUMP_MILSEC",
)  # fmt: skip
_KNOWN = frozenset({*(f"NCCL_{name}" for name in _NCCL), *(f"TORCH_NCCL_{name}" for name in _TORCH_NCCL)})
_WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {"NCCL_P2P_CONNECT_TIMEOUT": "there is none; write `init_process_group(timeout=…)` in the script"}
)
_NEAR = 0.88
"""Similarity from which a name counts as a misspelled known name, from 0 to 1."""


def notice_variables(task: View) -> None:
    """Warn about misspelled variables of NCCL and torch in the task's environment."""
    environment = task.view("environment")
    for name in environment.keys:
        if name in _KNOWN or not name.startswith(("NCCL_", "TORCH_NCCL_")):
            continue
        near = difflib.get_close_matches(name, sorted(_KNOWN), n=1, cutoff=_NEAR)
        hint = _WITHOUT_EFFECT.get(name) or (f"did you mean {near[0]}?" if near else "")
        if hint:
            environment.warn(f"`{name}` is not a variable that NCCL or torch reads", hint, key=name)
