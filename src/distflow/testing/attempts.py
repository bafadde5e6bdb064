"""The attempts of the fake backend. They hold leases, run and end by a clock that tests set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distflow.backends.base import AttemptKey
from distflow.lifecycle.clocks import Clock

__all__ = ["Attempt", "Attempts", "Behavior"]

_NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Behavior:
    """The behavior of a task on the fake backend."""

    seconds: float = 1.0
    """The run time in seconds; infinite for a task that hangs."""
    exit_code: int = 0
    signal: int | None = None
    output: bytes = b""
    obeys_term: bool = True
    """Whether it ends at once when the backend stops it; otherwise it ends after the grace period."""
    prepare_error: str = ""
    """The error of its preparation; empty if the preparation succeeds."""
    collect_error: str = ""
    """The error of the collection of its output; empty if the collection succeeds."""


@dataclass(slots=True)
class Attempt:
    """One attempt on a node, from the grant of its lease."""

    key: AttemptKey
    gpus: tuple[int, ...]
    expires_at: float = _NEVER
    """The time at which the lease expires if the attempt has not started."""
    phase: str = "leased"
    """``leased``, ``prepared``, ``running``, ``stopping`` or ``ended``."""
    behavior: Behavior = field(default_factory=Behavior)
    started_at: float = 0.0
    ends_at: float = _NEVER
    stopped_at: float | None = None
    end: dict[str, Any] | None = None

    @property
    def is_running(self) -> bool:
        """Whether its command runs."""
        return self.phase in ("running", "stopping") and self.started_at > 0

    @property
    def due_at(self) -> float:
        """The time at which its command exits, or at which a stop or the lease's end ends the attempt before it starts."""
        return self.ends_at if self.started_at > 0 else min(self.ends_at, self.expires_at)

    def finish(self, at: float, why: str = "") -> None:
        """Record the end, with ``why`` as its reason (default: ``stopped`` or ``exited``)."""
        why = why or ("stopped" if self.stopped_at else "exited")
        has_exited, behavior = why == "exited", self.behavior
        self.phase = "ended"
        self.end = {
            "exit_code": None if behavior.signal or not has_exited else behavior.exit_code,
            "signal": behavior.signal if has_exited else 15 if why in ("stopped", "peer_failed") else None,
            "reason": why,
            "stopped_at": self.stopped_at,
            "started_at": self.started_at if self.started_at > 0 else None,
            "ended_at": at,
        }

    def end_in_time_of(self, clock: Clock) -> dict[str, Any]:
        """Return the recorded end with its times converted to a node's clock."""
        return {
            name: value + clock.offset_s if name.endswith("_at") and value is not None else value
            for name, value in (self.end or {}).items()
        }

    def step(self, seconds: float) -> None:
        """Adjust all times after the clock was set forward or back by ``seconds``."""
        self.started_at += seconds if self.started_at > 0 else 0.0
        self.ends_at += seconds
        self.expires_at += seconds
        self.stopped_at = None if self.stopped_at is None else self.stopped_at + seconds
        if self.end is not None:
            self.end |= {name: self.end[name] + seconds for name in self.end if name.endswith("_at") and self.end[name]}


class Attempts:
    """All attempts, and the watched ones, whose changes are reported. Indexed by node: there may be thousands of nodes."""

    def __init__(self) -> None:
        """Start without attempts."""
        self.known: dict[AttemptKey, Attempt] = {}
        """All attempts, including ended ones, until they are removed."""
        self.alive: dict[AttemptKey, Attempt] = {}
        """The attempts that run or hold a lease."""
        self._alive_on: dict[str, dict[AttemptKey, Attempt]] = defaultdict(dict)
        self._watched_on: dict[str, dict[AttemptKey, None]] = defaultdict(dict)

    def on(self, node: str) -> list[Attempt]:
        """Return the attempts of a node that run or hold a lease."""
        return list(self._alive_on[node].values())

    def watched(self, node: str) -> list[AttemptKey]:
        """Return the watched attempts of a node."""
        return list(self._watched_on[node])

    def watch(self, key: AttemptKey) -> None:
        """Watch an attempt from now on."""
        self._watched_on[key.node][key] = None

    def is_watched(self, key: AttemptKey) -> bool:
        """Whether an attempt is watched."""
        return key in self._watched_on[key.node]

    def unwatch(self) -> None:
        """Stop watching all attempts."""
        self._watched_on.clear()

    def add(self, attempt: Attempt) -> None:
        """Add a new attempt."""
        self.known[attempt.key] = self.alive[attempt.key] = self._alive_on[attempt.key.node][attempt.key] = attempt

    def end(self, key: AttemptKey) -> None:
        """Record that an attempt no longer runs or holds a lease."""
        self.alive.pop(key, None)
        self._alive_on[key.node].pop(key, None)

    def drop(self, key: AttemptKey) -> None:
        """Remove an attempt, and with it the record of its end."""
        self.end(key)
        self.known.pop(key, None)

    def forget(self, which: Callable[[AttemptKey], bool], *, unwatch: bool = False) -> None:
        """Remove the attempts that ``which`` selects; with ``unwatch``, also stop watching them."""
        for key in [key for key in self.known if which(key)]:
            self.drop(key)
            if unwatch:
                self._watched_on[key.node].pop(key, None)
