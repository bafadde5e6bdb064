"""Who computes on the node's GPUs, by ``nvidia-smi``: a GPU on which somebody else does is not leased."""

from __future__ import annotations

import os
from typing import Dict, List

from distflow.runtime.facts import nvidia_smi, user_name
from distflow.runtime.processes import mark_of, said_by

__all__ = ["GpuUser", "find"]

_TOOL_S = 10.0

GpuUser = Dict[str, object]
"""``gpu`` (index), ``pid``, ``words``."""


def find() -> List[GpuUser]:
    """Every process on a GPU that can be seen here; none when ``nvidia-smi`` is not there, or fails."""
    smi = nvidia_smi()
    if smi is None:
        return []
    index = {row[1]: row[0] for row in _ask(smi, "--query-gpu=index,uuid") if len(row) == 2}
    users: List[GpuUser] = []
    for row in _ask(smi, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"):
        if len(row) < 4 or not row[1].isdigit() or not index.get(row[0], "").isdigit():
            continue
        # A process may have commas in its name.
        users.append({"gpu": int(index[row[0]]), "pid": int(row[1]), "words": _words(row[1], ", ".join(row[2:-1]), row[-1])})
    return users


def _words(pid: str, name: str, memory: str) -> str:
    try:
        who = [user_name(os.stat("/proc/" + pid).st_uid)]
    except OSError:
        who = []
    who += [os.path.basename(name), *(["{} MiB".format(memory)] if memory.isdigit() else [])]
    attempt = mark_of(int(pid))
    origin = "which is left of {}".format(attempt) if attempt else "which distflow did not start"
    return "pid {} ({}), {}".format(pid, ", ".join(who), origin)


def _ask(smi: str, query: str) -> List[List[str]]:
    # A hanging driver says nothing: leases still keep distflow's own workflows apart.
    lines = (said_by([smi, query, "--format=csv,noheader,nounits"], _TOOL_S) or "").split("\n")
    return [[field.strip() for field in line.split(",")] for line in lines if line.strip()]
