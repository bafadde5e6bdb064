"""Ids of machines, from their lease directories, to detect two entries of a pool that are one machine."""

from __future__ import annotations

import os

from distflow.runtime import processes
from distflow.runtime.leases.lease_files import open_directory
from distflow.runtime.wire import OpError

__all__ = ["machine_of"]

_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "fuse.glusterfs", "9p", "afs")


def machine_of(lease_dir: str) -> str:
    """Return an id of the lease directory itself, not of its name; empty if it cannot be used.

    Two nodes of a pool with the same id lease the same GPUs: they are one machine, or share a directory over the network.
    """
    if not lease_dir:
        return ""
    try:
        directory = open_directory(lease_dir)
    except OpError:
        return ""
    try:
        info = os.fstat(directory)
    finally:
        os.close(directory)
    source = _network_source("{}:{}".format(os.major(info.st_dev), os.minor(info.st_dev)))
    if source:
        return "network {} {}".format(source, info.st_ino)
    return "machine {} {} {} {}".format(_machine_id(), processes.boot_id(), info.st_dev, info.st_ino)


def _machine_id() -> str:
    try:
        with open("/etc/machine-id", encoding="ascii", errors="replace") as file:
            return file.read(64).strip()
    except OSError:
        return ""


def _network_source(device: str) -> str:
    """Return a network file system's source (``server:/export``) by its device number; empty for any other file system."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().split("\n")
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        words, described = before.split(" "), after.split(" ")
        if len(words) > 2 and words[2] == device and len(described) > 1 and described[0].startswith(_NETWORK):
            return described[1]
    return ""
