"""Our clock, and what the pings of a connection tell of the node's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from distflow.backends.steady import now
from distflow.lifecycle.clocks import Clock, best_clock

__all__ = ["ClockWatch", "now"]

_SAMPLES = 8
"""Of so many pings the quickest counts: enough to have met a quiet moment, few enough to follow clocks that drift."""


class ClockWatch:
    """Measures a node's clock, ping by ping."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=_SAMPLES)

    @property
    def clock(self) -> Clock | None:
        """The node's clock as it is known at present."""
        return best_clock(tuple(self._samples))

    def ping(self) -> Callable[[object], None]:
        """Note that a ping goes out now; return what takes its answer."""
        asked = now()

        def answered(answer: object) -> None:
            if isinstance(answer, Mapping) and isinstance(said := _said(answer), float):
                self._samples.append((asked, said, now()))

        return answered


def _said(answer: Mapping[str, Any]) -> float | None:
    said = answer.get("now")
    return float(said) if isinstance(said, int | float) else None
