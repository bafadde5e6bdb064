"""The offset of a node's clock from this machine's, with its uncertainty, measured from round trips. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

__all__ = ["Clock", "best_clock"]


class Clock(Struct, frozen=True, kw_only=True):
    """The offset of a node's clock from this machine's clock."""

    offset_s: float
    """Positive if the node's clock is ahead."""
    uncertainty_s: float
    """Half of the fastest round trip: the largest possible error of the offset."""

    def ours(self, at: float) -> float:
        """Convert a time of the node's clock to this machine's clock.

        >>> Clock(offset_s=-30.0, uncertainty_s=0.01).ours(970.0)
        1000.0
        """
        return at - self.offset_s


def best_clock(samples: Iterable[tuple[float, float, float]]) -> Clock | None:
    """Return the clock from samples of (asked, said, answered). The fastest round trip is the most accurate.

    >>> best_clock([(10.0, 15.5, 11.0), (20.0, 25.1, 20.2)])
    Clock(offset_s=5.0, uncertainty_s=0.1)
    """
    quickest = min(samples, key=lambda sample: sample[2] - sample[0], default=None)
    if quickest is None:
        return None
    asked, said, answered = quickest
    return Clock(offset_s=round(said - (asked + answered) / 2, 6), uncertainty_s=round((answered - asked) / 2, 6))
