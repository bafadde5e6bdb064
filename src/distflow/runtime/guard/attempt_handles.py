"""The descriptors that runner and keeper of an attempt get from the agent, and the facts of its lease."""

from __future__ import annotations

import fcntl
from typing import FrozenSet, List, NamedTuple, Optional, Set

from distflow.runtime.leases import lease_files
from distflow.runtime.wire import Json

__all__ = ["AttemptHandles"]


class AttemptHandles(NamedTuple):
    """Descriptors and facts of one attempt. All descriptors are open, and none of them survives an exec."""

    attempt: str
    directory: str
    dir_fd: int
    listener: int
    """The listening socket ``control``. Runner and keeper both hold it, so connecting fails only when both are gone."""
    locks: List[int]
    """Lock files of the GPUs and of the port."""
    port_sockets: List[int]
    record: int
    """The allocated, unnamed ``exit.json``."""
    state: int
    log: int
    stamps: int
    """``output.idx``."""
    errors: int
    """``pair.log``: the standard error of runner and keeper."""
    umask: int
    """The node's usual umask, which the command gets. Runner and keeper use 077."""
    gpu_ids: List[int]
    other_gpus: FrozenSet[str]
    """PCI bus addresses of the node's GPUs that do not belong to the attempt, as far as they are known."""
    port: Optional[int]
    link: int
    """Descriptor on which the hub of the gang link listens; -1 for tasks that are not the hub."""
    link_port: Optional[int]
    start_timeout_s: float
    holder: Json
    """The holder's entry in the lock files."""

    def descriptors(self) -> Set[int]:
        """Return all open descriptors."""
        single = {self.dir_fd, self.listener, self.record, self.state, self.log, self.stamps, self.errors}
        return single | set(self.locks) | set(self.port_sockets) | ({self.link} if self.link >= 0 else set())

    def sign_locks(self, pid: int) -> None:
        """Write the holder's entry, with this process id, into the lock files."""
        for fd in self.locks:
            lease_files.sign(fd, dict(lease_files.read(fd) or {}, **dict(self.holder, pid=pid)))

    def unlock(self) -> None:
        """Release the GPUs and the port, for all processes that share these descriptors."""
        for fd in self.locks:
            fcntl.flock(fd, fcntl.LOCK_UN)
