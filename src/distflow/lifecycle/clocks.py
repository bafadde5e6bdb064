"""The offset of a node's clock from this machine's, with its uncertainty, measured from round trips.

This module does no I/O.
"""

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
    """Return the clock of a node from the fastest round trip, which is the most accurate; ``None`` without samples.

    A sample is the time of a request, the time in the node's reply by its own clock, and the time when the reply arrived.

    >>> best_clock([(10.0, 15.5, 11.0), (20.0, 25.1, 20.2)])
    Clock(offset_s=5.0, uncertainty_s=0.1)
    """
    fastest = min(samples, key=lambda sample: sample[2] - sample[0], default=None)
    if fastest is None:
        return None
    sent, node_time, received = fastest
    return Clock(offset_s=round(node_time - (sent + received) / 2, 6), uncertainty_s=round((received - sent) / 2, 6))
