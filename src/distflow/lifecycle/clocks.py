"""How far a node's clock is from ours, and how sure that is: measured from round trips, applied to its times. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Clock", "best_clock"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How far a node's clock is before ours; negative when it is behind."""

    offset_s: float
    uncertainty_s: float
    """Half of the quickest round trip: the truth lies that near."""

    def ours(self, at: float) -> float:
        """Return a time that the node told as our clock had it.

        >>> Clock(offset_s=-30.0, uncertainty_s=0.01).ours(970.0)
        1000.0
        """
        return at - self.offset_s


def best_clock(samples: Iterable[tuple[float, float, float]]) -> Clock | None:
    """Return the clock from samples of (asked, said, answered): the quickest round trip tells it best.

    >>> best_clock([(10.0, 15.5, 11.0), (20.0, 25.1, 20.2)])
    Clock(offset_s=5.0, uncertainty_s=0.1)
    """
    quickest = min(samples, key=lambda sample: sample[2] - sample[0], default=None)
    if quickest is None:
        return None
    asked, said, answered = quickest
    return Clock(offset_s=round(said - (asked + answered) / 2, 6), uncertainty_s=round((answered - asked) / 2, 6))
