"""A cluster engine in memory. All of its hosts are this machine. It implements ``backends.allocated.engine.Engine``.

Tests decide when it grants and ends an allocation. It does not end processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from distflow.backends.allocated.engine import (
    Allocation,
    AllocationRequest,
    AllocationState,
    Granted,
    Over,
    QueryLimit,
    Queued,
    RequestRefused,
    node_name,
)
from distflow.backends.base import NO_EXIT_CODES
from distflow.backends.machines.checks.findings import Finding
from distflow.errors import NodeUnreachable
from distflow.transports.base import Transport
from distflow.transports.local import LocalTransport

__all__ = ["LocalEngine"]


@dataclass(slots=True)
class _Job:
    allocation: Allocation
    hosts: Mapping[str, str]
    state: AllocationState = field(default_factory=lambda: Queued("waits for resources (Resources)"))


class LocalEngine:
    """Allocations that exist only in this object."""

    query_limit: ClassVar = QueryLimit(at_once=10.0, every_s=0.1)

    def __init__(self, *, grants_at_once: bool = True) -> None:
        """Start without allocations. Unless ``grants_at_once``, an allocation waits until ``grant`` is called."""
        self.grants_at_once = grants_at_once
        self.refusal = ""
        """The message with which the engine refuses every request permanently; empty if it accepts requests."""
        self.given_notice = ""
        """The text that ``notice`` returns."""
        self.is_away = False
        """Whether requests, releases and queries of allocations fail, because the engine does not respond."""
        self.requests: list[AllocationRequest] = []
        self.released: list[str] = []
        self.exit_codes: dict[str, int | None] = {}
        """The exit code with which each allocation was released."""
        self._jobs: dict[str, _Job] = {}
        self._lock = threading.RLock()

    def request(self, wanted: AllocationRequest) -> str:
        """Request an allocation, unless it exists, and return its id. Its hosts are ``h0``, ``h1`` and so on."""
        with self._lock:
            self._check_reachable()
            if self.refusal:
                raise RequestRefused(self.refusal)
            for allocation_id, job in self._jobs.items():
                if job.allocation == wanted.allocation and not isinstance(job.state, Over):
                    return allocation_id
            self.requests.append(wanted)
            number = str(len(self._jobs) + 1)
            hosts = {one.task: f"h{index}" for index, one in enumerate(wanted.nodes)}
            self._jobs[number] = _Job(wanted.allocation, hosts)
            if self.grants_at_once:
                self.grant(number)
            return number

    def notice(self, allocation_id: str) -> str:
        """Return ``given_notice`` for every known allocation, else an empty text."""
        return self.given_notice if allocation_id in self._jobs else ""

    def states(self, ids: Mapping[str, Sequence[str]]) -> Mapping[str, AllocationState]:
        """Return the state of each allocation."""
        with self._lock:
            self._check_reachable()
            unknown = Over(reason=None, message="the engine does not know it")
            return {name: self._jobs[name].state if name in self._jobs else unknown for name in ids}

    def allocations(self) -> Mapping[str, Allocation]:
        """Return all allocations that have not ended."""
        with self._lock:
            self._check_reachable()
            return {name: job.allocation for name, job in self._jobs.items() if not isinstance(job.state, Over)}

    def release(self, ids: Sequence[str], exit_codes: Mapping[str, int] = NO_EXIT_CODES) -> None:
        """End allocations."""
        with self._lock:
            self._check_reachable()
            for name in ids:
                self.released.append(name)
                self.exit_codes[name] = exit_codes.get(name)
                self.end(name, Over(reason=None, message="it was released"))

    def transport(self, allocation_id: str, host: str) -> Transport:
        """Return a transport that runs commands on this machine."""
        return LocalTransport(node_name(host, allocation_id))

    def check(self, on_progress: Callable[[str], None] = lambda _: None) -> Sequence[Finding]:
        """Return no findings."""
        on_progress("asking the engine")
        return ()

    def login_transport(self) -> Transport:
        """Return a transport that runs commands on this machine."""
        return LocalTransport("login")

    def close(self) -> None:
        """Do nothing: there is no connection."""

    # Actions of tests.

    def grant(self, allocation_id: str) -> None:
        """Grant an allocation."""
        with self._lock:
            job = self._jobs[allocation_id]
            job.state = Granted(hosts=job.hosts)

    def end(self, allocation_id: str, state: Over) -> None:
        """End an allocation."""
        with self._lock:
            self._jobs[allocation_id].state = state

    def _check_reachable(self) -> None:
        if self.is_away:
            raise NodeUnreachable("login", "the controller does not answer")
