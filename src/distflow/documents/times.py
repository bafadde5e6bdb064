"""Times and durations as people and programs read them."""

from __future__ import annotations

import time
from datetime import datetime, timezone

__all__ = ["day_start", "duration", "iso", "local_milli", "local_minute", "local_second"]


def local_minute(at: float | None) -> str:
    """Return a time in the reader's zone, as OSMO shows it: ``Apr 11, 2025 14:31 PDT``; ``-`` for none."""
    return "-" if at is None else time.strftime("%b %d, %Y %H:%M %Z", time.localtime(at))


def local_second(at: float | None) -> str:
    """Return a time in the reader's zone, as OSMO stamps log lines: ``2025/04/11 14:31:07``; dashes of its width for none."""
    return "----/--/-- --:--:--" if at is None else time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(at))


def local_milli(at: float) -> str:
    """Return a time in the reader's zone, to the millisecond: ``2025/04/11 14:31:07.250``."""
    whole, thousandths = divmod(round(at * 1000), 1000)
    return f"{local_second(whole)}.{thousandths:03}"


def iso(at: float | None) -> str | None:
    """Return a time for programs: ISO 8601 in UTC without a zone, as OSMO writes it, to the millisecond.

    >>> iso(1744407067.25)
    '2025-04-11T21:31:07.250'
    """
    if at is None:
        return None
    return datetime.fromtimestamp(at, timezone.utc).replace(tzinfo=None).isoformat(timespec="milliseconds")


def day_start(text: str) -> float:
    """Return when a day (``2025-04-11``) begins in the reader's zone. Raises ``ValueError``."""
    return time.mktime(time.strptime(text, "%Y-%m-%d"))


def duration(seconds: float | None) -> str:
    """Return how long something took or takes; ``-`` when it has not begun.

    >>> duration(42.9), duration(3723), duration(273904)
    ('0:42', '1:02:03', '3d 4:05:04')
    """
    if seconds is None:
        return "-"
    minutes, second = divmod(int(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if not hours:
        return f"{minute}:{second:02}"
    return f"{f'{days}d ' if days else ''}{hour}:{minute:02}:{second:02}"
