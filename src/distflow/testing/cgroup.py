"""A memory limit for processes that enter it, so that the kernel kills them for lack of memory. Needs root."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from distflow.testing.waiting import wait_until

__all__ = ["MemoryLimit", "missing_cgroups"]

_ROOTS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)


class MemoryLimit:
    """A memory cgroup of a test's own; a process enters it by writing its id into ``procs``."""

    def __init__(self, limit: int) -> None:
        """Make one of ``limit`` bytes."""
        root, setting = next((root, setting) for root, setting in _ROOTS if _can_be_used(root))
        self.path = root / f"distflow-test-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()
        (self.path / setting).write_text(str(limit))
        self.procs = self.path / "cgroup.procs"

    def close(self) -> None:
        """Remove it, once everything in it has ended."""
        wait_until(lambda: not self.procs.read_text().strip(), 30)
        self.path.rmdir()


def missing_cgroups() -> str:
    """Return why no limit can be made here, or why the kernel's word of it could not be read; empty when all is well."""
    if os.getuid() != 0:
        return "only root makes cgroups"
    if not any(_can_be_used(root) for root, _ in _ROOTS):
        return "there is no memory cgroup that can be written"
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return "the kernel's log cannot be read"
    return ""


def _can_be_used(root: Path) -> bool:
    if root.name == "memory":
        return os.access(root / "cgroup.procs", os.W_OK)
    controllers = root / "cgroup.subtree_control"
    return controllers.exists() and "memory" in controllers.read_text().split() and os.access(root, os.W_OK)
