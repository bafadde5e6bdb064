"""Our clock, and the measurement of a node's clock by the pings of a connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from distflow.backends.steady import now
from distflow.lifecycle.clocks import Clock, best_clock

__all__ = ["ClockWatch", "now"]

_SAMPLES = 8
"""The quickest of this number of pings counts: enough for a quiet moment, few enough to follow drifting clocks."""


class ClockWatch:
    """Measures a node's clock, ping by ping."""

    def __init__(self) -> None:
        """Start without samples."""
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=_SAMPLES)

    @property
    def clock(self) -> Clock | None:
        """Return the current estimate of the node's clock."""
        return best_clock(tuple(self._samples))

    def ping(self) -> Callable[[object], None]:
        """Record that a ping is sent now. Returns the callback for its answer."""
        asked = now()

        def answered(answer: object) -> None:
            if isinstance(answer, Mapping) and isinstance(said := _said(answer), float):
                self._samples.append((asked, said, now()))

        return answered


def _said(answer: Mapping[str, Any]) -> float | None:
    said = answer.get("now")
    return float(said) if isinstance(said, int | float) else None
