"""What an attempt's pair holds in its hands: the descriptors that it got from the agent, and the facts of its lease."""

from __future__ import annotations

import fcntl
from typing import FrozenSet, List, NamedTuple, Optional, Set

from distflow.runtime.leases import lease_files
from distflow.runtime.wire import Json

__all__ = ["AttemptHandles"]


class AttemptHandles(NamedTuple):
    """All numbers are open descriptors. None of them survives an exec."""

    attempt: str
    directory: str
    dir_fd: int
    listener: int
    """The socket ``control``, listening: runner and keeper both hold it, so that connecting fails when both are gone."""
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
    """The node's usual one, for the command; ours is 077."""
    gpu_ids: List[int]
    other_gpus: FrozenSet[str]
    """Where those of the node's GPUs are on the PCI bus that are not the attempt's, as far as that is known."""
    port: Optional[int]
    link: int
    """Where the gang link's hub listens; -1 for a task that is not it."""
    link_port: Optional[int]
    start_timeout_s: float
    holder: Json
    """What the lock files say."""

    def descriptors(self) -> Set[int]:
        """All of them."""
        single = {self.dir_fd, self.listener, self.record, self.state, self.log, self.stamps, self.errors}
        return single | set(self.locks) | set(self.port_sockets) | ({self.link} if self.link >= 0 else set())

    def sign_locks(self, pid: int) -> None:
        """Write into the lock files who holds them."""
        for fd in self.locks:
            lease_files.sign(fd, dict(lease_files.read(fd) or {}, **dict(self.holder, pid=pid)))

    def unlock(self) -> None:
        """Give the GPUs and the port back, for all who share these descriptors."""
        for fd in self.locks:
            fcntl.flock(fd, fcntl.LOCK_UN)
