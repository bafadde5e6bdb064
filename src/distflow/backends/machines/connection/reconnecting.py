"""The backoff between tries to reconnect to a node.

While a pool still waits for the node (``node_lost_after``), the tries are at most a few seconds apart, or about 10 to 30 s
after refused logins. The last of them comes just before the wait ends, so that a node that returns in time is found. After
that, tries become rare.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

__all__ = ["ReconnectBackoff", "heartbeat_s"]

_PAUSES: Mapping[tuple[bool, bool], tuple[float, ...]] = MappingProxyType(
    {
        (False, False): (0.1, 0.5, 1.0, 2.0, 4.0),
        (False, True): (5.0, 10.0, 30.0),
        (True, False): (10.0, 20.0, 30.0),
        (True, True): (30.0, 60.0, 120.0, 300.0),
    }
)
"""Seconds after the first try, the second, …, by (whether the login was refused, whether the wait for the node has ended).

After a refused login, a person must change something first, and many machines lock out clients that try too often.
"""
_JITTER = 0.25
"""Nodes of a large pool often disappear and return together. Jitter spreads their tries."""
_LAST_TRY_S = 5.0
_LAST_TRY_PART = 0.25
"""The last try begins 5 s before the wait ends, or a quarter of the wait if that is shorter. This leaves time for the login."""
_STABLE_S = 10.0
_HEARTBEATS = 10
_SHORTEST_HEARTBEAT_S = 0.2


def heartbeat_s(ping_s: float, lost_after_s: float) -> float:
    """Return the interval of heartbeats in seconds, at most ``ping_s``.

    A connection counts as broken after about four intervals without an answer. If ``lost_after_s`` (the pool's
    ``node_lost_after``) is at least 2, these four intervals take less than half of ``lost_after_s``.

    >>> heartbeat_s(5.0, 120.0), heartbeat_s(5.0, 10.0)
    (5.0, 1.0)
    """
    return min(ping_s, max(_SHORTEST_HEARTBEAT_S, lost_after_s / _HEARTBEATS))


class ReconnectBackoff:
    """The pauses between tries to reach one node."""

    def __init__(
        self,
        lost_after_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Start the wait for the node now.

        ``clock`` returns seconds and never jumps; ``jitter(a, b)`` returns a number between ``a`` and ``b``.
        """
        self._lost_after_s = lost_after_s
        self._margin_s = min(_LAST_TRY_S, lost_after_s * _LAST_TRY_PART)
        self._clock = clock
        self._jitter = jitter
        self._lost_at = clock() + lost_after_s
        self._tries: Counter[tuple[bool, bool]] = Counter()
        self._has_last_try = False

    def restart(self, silent_s: float, lasted_s: float = math.inf) -> None:
        """Restart the wait: the node answered until ``silent_s`` seconds ago, and the connection lasted ``lasted_s`` seconds.

        After a short connection, the pauses keep growing, because the next connection may break just as soon.
        """
        self._lost_at = self._clock() - silent_s + self._lost_after_s
        if lasted_s >= _STABLE_S:
            self._tries.clear()
        self._has_last_try = False

    def pause_s(self, *, is_refused: bool) -> float:
        """Return the seconds to wait before the next try. ``is_refused``: the last login was refused.

        One pause is shortened, so that a last try begins just before the wait for the node ends.
        """
        kind = (is_refused, self._clock() >= self._lost_at)
        pause_s = _PAUSES[kind][min(self._tries[kind], len(_PAUSES[kind]) - 1)] * self._jitter(1 - _JITTER, 1 + _JITTER)
        self._tries[kind] += 1
        left_s = self.last_try_in_s or 0.0
        if not self._has_last_try and pause_s >= left_s:
            self._has_last_try = True
            return left_s
        return pause_s

    @property
    def last_try_in_s(self) -> float | None:
        """The number of seconds until the last try must begin; ``None`` if that time has passed."""
        left_s = self._lost_at - self._margin_s - self._clock()
        return left_s if left_s > 0 else None
