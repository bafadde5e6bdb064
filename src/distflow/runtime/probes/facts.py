"""Facts about the node for the reply to ``hello``."""

from __future__ import annotations

import array
import fcntl
import os
import pwd
import socket
import struct
import sys

from distflow.protocol.light_typing import Dict, List, Optional
from distflow.runtime import processes
from distflow.runtime.clock import now
from distflow.runtime.wire import Json

__all__ = ["can_gather_in_agent", "free_bytes", "gather_facts", "nvidia_smi", "user_name"]

_SIOCGIFCONF = 0x8912
_NVIDIA_SMI_S = 5.0
_AMD_NODES = "/sys/class/kfd/kfd/topology/nodes"


def user_name(uid: Optional[int] = None) -> str:
    """Return the name of the user ``uid`` (default: the current user); the id if the user has no name."""
    uid = os.getuid() if uid is None else uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def gather_facts(root: str) -> Json:
    """Return the facts. Runs ``nvidia-smi``, which may take seconds, if the node has it."""
    gpus = _gpus()
    return {
        "hostname": socket.gethostname(),
        "python": sys.executable,
        "python_real": os.path.realpath(sys.executable),
        "python_version": ".".join(str(part) for part in sys.version_info[:3]),
        "cpus": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "free_bytes": free_bytes(root),
        "gpus": len(gpus),
        "gpu_names": gpus,
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "addresses": _ipv4() + _ipv6(),
        "ssh_server": _ssh_server(),
        "boot_id": processes.boot_id(),
        "user": user_name(),
        "root": root,
        "now": now(),
    }


def free_bytes(path: str) -> int:
    """Return the free bytes of the file system of ``path``."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


def can_gather_in_agent() -> bool:
    """Return whether ``gather_facts`` is fast enough to run in the agent, which is so if it does not start ``nvidia-smi``."""
    return nvidia_smi() is None


def nvidia_smi() -> Optional[str]:
    """Return the path of ``nvidia-smi``, or None."""
    return processes.find_program("nvidia-smi", os.environ.get("PATH", ""))


def _gpus() -> List[str]:
    smi = nvidia_smi()
    text = processes.output_of([smi, "-L"], _NVIDIA_SMI_S) if smi is not None else None
    if text is not None:
        import re

        return [match.group(1).strip() for match in re.finditer(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", text, re.MULTILINE)]
    # Without nvidia-smi, or with a hanging driver, the device files still show the number of GPUs.
    count = sum(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir("/dev"))
    return ["unknown"] * count or _amd_gpus()


def _amd_gpus() -> List[str]:
    """Return the GPUs that the AMD driver lists: nodes of its topology whose ``gpu_id`` is not 0. CPUs have 0."""
    found: List[str] = []
    try:
        names = sorted(os.listdir(_AMD_NODES))
    except OSError:
        return found
    for name in names:
        try:
            with open(os.path.join(_AMD_NODES, name, "gpu_id"), encoding="utf-8", errors="replace") as file:
                if file.read(32).strip() not in ("", "0"):
                    found.append("AMD")
        except OSError:
            continue
    return found


def _ssh_server() -> str:
    """Return the address on which sshd accepted this connection (SSH_CONNECTION), or the address of an allocated node."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    return parts[2] if len(parts) == 4 else os.environ.get("DISTFLOW_NODE_ADDRESS", "")


def _ipv4() -> List[Dict[str, str]]:
    """Return every IPv4 address with its interface, as the kernel lists them.

    SIOCGIFCONF also lists additional addresses of an interface.
    """
    entry = 40 if struct.calcsize("P") == 8 else 32
    buffer = array.array("B", bytes(entry * 256))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        used = struct.unpack("iP", fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, request))[0]
    text = buffer.tobytes()
    return [
        {
            "interface": text[at : at + 16].split(b"\0", 1)[0].decode("utf-8", "replace").split(":")[0],  # eth0:1 is eth0
            "address": socket.inet_ntoa(text[at + 20 : at + 24]),
            "family": "inet",
        }
        for at in range(0, used, entry)
    ]


def _ipv6() -> List[Dict[str, str]]:
    found: List[Dict[str, str]] = []
    try:
        with open("/proc/net/if_inet6", encoding="utf-8") as file:
            lines = file.read().split("\n")
    except OSError:
        return found
    for line in lines:
        parts = line.split()
        if len(parts) == 6:
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(parts[0]))
            found.append({"interface": parts[5], "address": address, "family": "inet6"})
    return found
