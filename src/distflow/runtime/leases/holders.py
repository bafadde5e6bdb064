"""The holders of this node's resources: leases of all distflow users, and processes on GPUs that distflow did not start."""

from __future__ import annotations

import os
import re
from typing import Dict, List, Tuple

from distflow.runtime.leases import gpu_users
from distflow.runtime.leases.holder_names import label_of
from distflow.runtime.leases.lease_files import open_directory, said_of
from distflow.runtime.leases.shares import number_of
from distflow.runtime.wire import Json, OpError

__all__ = ["look"]

_NAME = re.compile(r"(gpu|port|claim)-([0-9]{1,10})(?:-[0-9]{1,10})?\.lock")
_MOST = 10_000
_LARGEST = 1 << 53
"""Limit of an amount. Any user may have written it, and the sum must fit into a message."""


def look(lease_dir: str) -> Json:
    """Return ``holders``, one for each attempt, and ``foreign``, the other processes on GPUs. Nothing is leased or changed.

    Checking a lock takes it as shared for an instant, so a concurrent lease waits that long.
    """
    found: Dict[Tuple[str, str], Json] = {}
    for kind, number, said in _locked(lease_dir):
        holder = found.setdefault((str(said.get("user")), str(said.get("attempt"))), _holder(said))
        if kind == "claim":
            for name in ("cpus", "memory"):
                holder[name] = min(holder[name] + number_of(said.get(name)), _LARGEST)
        else:
            holder["gpus" if kind == "gpu" else "ports"].append(number)
    for holder in found.values():
        holder["gpus"].sort()
        holder["ports"].sort()
    held = {gpu for holder in found.values() for gpu in holder["gpus"]}
    foreign = [user for user in gpu_users.find() if user["gpu"] not in held]
    return {"holders": [found[key] for key in sorted(found)], "foreign": foreign}


def _holder(said: Json) -> Json:
    return {
        "user": str(said.get("user") or "")[:100],
        "attempt": str(said.get("attempt") or "")[:500],
        "label": label_of(said),
        "pid": number_of(said.get("pid")) or None,
        "gpus": [],
        "ports": [],
        "cpus": 0,
        "memory": 0,
    }


def _locked(lease_dir: str) -> List[Tuple[str, int, Json]]:
    """Return the locks that are held, with their untrusted contents."""
    if not os.path.isdir(os.path.expanduser(lease_dir)):
        return []
    found = []
    try:
        directory = open_directory(lease_dir)
    except OpError:
        return []
    try:
        for name in sorted(os.listdir(directory))[:_MOST]:
            match = _NAME.fullmatch(name)
            said = said_of(directory, name) if match else None
            if match and said is not None:
                found.append((match.group(1), int(match.group(2)), said))
    finally:
        os.close(directory)
    return found
