"""What runs on the nodes of the fake backend: attempts that lease, run and end on a clock that is turned by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distflow.backends.base import AttemptKey
from distflow.lifecycle.clocks import Clock

__all__ = ["Attempt", "Attempts", "Behaviour"]

_NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How a task of the fake runs."""

    seconds: float = 1.0
    """Until it ends by itself; infinite for one that hangs."""
    exit_code: int = 0
    signal: int | None = None
    output: bytes = b""
    obeys_term: bool = True
    """Ends at once when stopped; otherwise after the grace."""
    refuses: str = ""
    """Cannot be prepared, for this reason."""
    spoils: str = ""
    """Its output cannot be collected, for this reason."""


@dataclass(slots=True)
class Attempt:
    """One attempt on its node, from its lease on."""

    key: AttemptKey
    gpus: tuple[int, ...]
    expires_at: float = _NEVER
    """When it is given up unless it was started."""
    phase: str = "leased"
    behaviour: Behaviour = field(default_factory=Behaviour)
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
        """The time of its next change by itself."""
        return self.ends_at if self.started_at > 0 else min(self.ends_at, self.expires_at)

    def finish(self, at: float, why: str = "") -> None:
        """Write down its end."""
        why = why or ("stopped" if self.stopped_at else "exited")
        own, behaviour = why == "exited", self.behaviour
        self.phase = "ended"
        self.end = {
            "exit_code": None if behaviour.signal or not own else behaviour.exit_code,
            "signal": behaviour.signal if own else 15 if why in ("stopped", "peer_failed") else None,
            "reason": why,
            "stopped_at": self.stopped_at,
            "started_at": self.started_at if self.started_at > 0 else None,
            "ended_at": at,
        }

    def end_by(self, clock: Clock) -> dict[str, Any]:
        """Return its end with the times of a node's clock."""
        return {
            name: value + clock.offset_s if name.endswith("_at") and value is not None else value
            for name, value in (self.end or {}).items()
        }

    def step(self, seconds: float) -> None:
        """Tell its times by a clock that was set forward or back."""
        self.started_at += seconds if self.started_at > 0 else 0.0
        self.ends_at += seconds
        self.expires_at += seconds
        self.stopped_at = None if self.stopped_at is None else self.stopped_at + seconds
        if self.end is not None:
            self.end |= {name: self.end[name] + seconds for name in self.end if name.endswith("_at") and self.end[name]}


class Attempts:
    """The nodes' view of attempts, and their watchers, by node, because there may be thousands of nodes."""

    def __init__(self) -> None:
        """Know nothing."""
        self.known: dict[AttemptKey, Attempt] = {}
        self.alive: dict[AttemptKey, Attempt] = {}
        """Those that run or hold a lease."""
        self._alive_on: dict[str, dict[AttemptKey, Attempt]] = defaultdict(dict)
        self._watched_on: dict[str, dict[AttemptKey, None]] = defaultdict(dict)

    def on(self, node: str) -> list[Attempt]:
        """Those of a node that run or hold a lease."""
        return list(self._alive_on[node].values())

    def watched(self, node: str) -> list[AttemptKey]:
        """Those of a node that somebody wants to hear of."""
        return list(self._watched_on[node])

    def watch(self, key: AttemptKey) -> None:
        """Somebody wants to hear of it from now on."""
        self._watched_on[key.node][key] = None

    def is_watched(self, key: AttemptKey) -> bool:
        """Whether somebody wants to hear of it."""
        return key in self._watched_on[key.node]

    def unwatch(self) -> None:
        """Nobody wants to hear of any."""
        self._watched_on.clear()

    def add(self, attempt: Attempt) -> None:
        """Take a new one."""
        self.known[attempt.key] = self.alive[attempt.key] = self._alive_on[attempt.key.node][attempt.key] = attempt

    def end(self, key: AttemptKey) -> None:
        """It no longer runs and holds nothing."""
        self.alive.pop(key, None)
        self._alive_on[key.node].pop(key, None)

    def drop(self, key: AttemptKey) -> None:
        """Nothing is left of it."""
        self.end(key)
        self.known.pop(key, None)

    def forget(self, which: Callable[[AttemptKey], bool], *, unwatch: bool = False) -> None:
        """Forget some of them; with ``unwatch``, without a notification."""
        for key in [key for key in self.known if which(key)]:
            self.drop(key)
            if unwatch:
                self._watched_on[key.node].pop(key, None)
