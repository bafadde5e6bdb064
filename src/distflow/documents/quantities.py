"""Durations, times and amounts of memory: parse them, and format them for people and programs.

Durations and amounts have the same forms as in OSMO (``90s``, ``PT1H30M``, ``30Gi``), but signs and Booleans are errors.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from types import MappingProxyType

from distflow.errors import InvalidValue

__all__ = [
    "ZONED",
    "bytes_text",
    "count_text",
    "day_start",
    "duration_hms",
    "duration_literal",
    "iso",
    "local_milli",
    "local_minute",
    "local_second",
    "parse_bytes",
    "parse_duration",
    "parse_log_bytes",
    "seconds_text",
    "times",
]


_SECONDS: Mapping[str, float] = MappingProxyType({"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6})
_DURATION = re.compile(r"([0-9]+)(d|h|ms|us|m|s)")
_ISO = re.compile(r"P(?:([0-9]+)D)?(?:T(?:([0-9]+)H)?(?:([0-9]+)M)?(?:([0-9]+(?:\.[0-9]+)?)S)?)?")
_LONGEST_S = 100 * 365 * 86400.0

# OSMO accepts the unit `m` for memory, and so does distflow: `5m` is 5 bytes.
_POWERS: Mapping[str, int] = MappingProxyType({"": 0, "B": 0, "m": 0, "K": 1, "M": 2, "G": 3, "T": 4})
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)")
_UNIT = re.compile(r"([KMGT])(?:i|iB)?")

_EXAMPLES = "write a whole number and one unit, such as `90s`, `10m`, `2h` or `7d`, or a number of seconds"


def parse_duration(value: str | float) -> float:
    """Return a duration in seconds. Raises ``InvalidValue`` with the problem and the remedy.

    A number without a unit is seconds, a string needs a unit: ``90``, ``"90s"``, ``"PT1H30M"``.
    """
    if isinstance(value, bool):
        raise InvalidValue(f"`{str(value).lower()}` is not a duration", _EXAMPLES)
    # Whole numbers are not converted, because they may be too large for a float.
    seconds = _duration_of(value) if isinstance(value, str) else value
    if not 0 <= seconds <= _LONGEST_S:
        problem = "negative" if seconds < 0 else "longer than 100 years" if seconds > 0 else "not a duration"
        raise InvalidValue(f"`{value}` is {problem}", _EXAMPLES)
    return float(seconds)


def _duration_of(text: str) -> float:
    if match := _DURATION.fullmatch(text):
        return float(match.group(1)) * _SECONDS[match.group(2)]
    if (match := _ISO.fullmatch(text)) and any(match.groups()) and not text.endswith("T"):
        parts = [float(part or 0) for part in match.groups()]
        return sum(part * unit for part, unit in zip(parts, (86400.0, 3600.0, 60.0, 1.0), strict=True))
    if text.startswith("-"):
        raise InvalidValue(f"`{text}` is negative", _EXAMPLES)
    if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", text):
        # A number with a unit must be whole.
        literal = duration_literal(min(_LONGEST_S, float(text))) if "." in text else f"{text}s"
        raise InvalidValue(f'the text "{text}" has no unit', f"write `{literal}`")
    if re.fullmatch(r"(?:[0-9]+(?:d|h|ms|us|m|s)){2,}", text):
        total = min(_LONGEST_S, sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text)))
        raise InvalidValue(f"`{text}` has several units", f"write it in one unit: `{duration_literal(total)}`")
    raise InvalidValue(f"`{text}` is not a duration", _EXAMPLES)


def duration_literal(seconds: float) -> str:
    """Return the shortest way to write a duration with one unit, such as ``90s`` or ``2h``, exact to a microsecond."""
    for unit in ("d", "h", "m", "s"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{int(seconds // _SECONDS[unit])}{unit}"
    micros = round(seconds * 1e6)
    if micros == 0:
        return "0s"
    return f"{micros // 1000}ms" if micros % 1000 == 0 else f"{micros}us"


def count_text(number: int, noun: str) -> str:
    """Return a number with a noun: ``1 file``, ``2,000 files``. ``noun`` is the singular, and its plural ends with an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def bytes_text(size: float) -> str:
    """Return a number of bytes for people, such as ``340 MiB`` or ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def seconds_text(value: float) -> str:
    """Return a duration for people, rounded.

    >>> seconds_text(0.25), seconds_text(19.7107), seconds_text(90), seconds_text(300), seconds_text(301.4)
    ('0.25 s', '20 s', '90 s', '5 min', '301 s')
    """
    rounded = round(value) if value >= 10 else float(f"{value:.2g}")
    return f"{rounded:g} s" if rounded < 120 or rounded % 60 else f"{rounded / 60:g} min"


def parse_bytes(value: str | float) -> int:
    """Return a number of bytes. Raises ``InvalidValue`` with the problem. ``30G`` is ``30Gi``, as in OSMO."""
    text = str(value)
    example = "write a number and a unit, such as `512Mi` or `30Gi`"
    match = _BYTES.fullmatch(text)
    if isinstance(value, bool) or match is None:
        problem = "is negative" if text.startswith("-") else "is not a number of bytes"
        reversed_ = re.fullmatch(r"([A-Za-z]+)([0-9.]+)", text)
        hint = f"write `{reversed_.group(2)}{reversed_.group(1)}`" if reversed_ else example
        raise InvalidValue(f"`{text}` {problem}", hint)
    number, unit = match.groups()
    prefix = _UNIT.fullmatch(unit)
    if prefix is None and unit not in _POWERS:
        raise InvalidValue(f"`{unit}` is not a valid unit", "use one of Ti, Gi, Mi, Ki, B")
    power = _POWERS[prefix.group(1) if prefix else unit]
    whole, _, fraction = number.partition(".")
    # Compute with integers: a float has only 53 bits, so large amounts such as 128.067Ti would be wrong by one byte.
    return (int(whole + fraction) << (10 * power)) // int(10 ** len(fraction))


def parse_log_bytes(value: str | float) -> int:
    """Return the maximum size of a log in bytes, like ``parse_bytes``. Also raises ``InvalidValue`` for less than 1 MiB."""
    size = parse_bytes(value)
    if size < 1 << 20:
        raise InvalidValue(f"`{value}` is too small for a log", "write `1Mi` or more")
    return size


# -- times of day -----------------------------------------------------------------------------------------------------


def local_minute(at: float | None) -> str:
    """Return a time in the user's time zone, as OSMO shows it: ``Apr 11, 2025 14:31 PDT``; ``-`` for none."""
    return "-" if at is None else time.strftime("%b %d, %Y %H:%M %Z", time.localtime(at))


def local_second(at: float | None) -> str:
    """Return a time in the user's time zone, as in OSMO's logs: ``2025/04/11 14:31:07``; dashes for none."""
    return "----/--/-- --:--:--" if at is None else time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(at))


def local_milli(at: float) -> str:
    """Return a time in the user's time zone, to the millisecond: ``2025/04/11 14:31:07.250``."""
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


ZONED = MappingProxyType(
    {
        "time": "at",
        "submit_time": "submitted_at",
        "start_time": "started_at",
        "end_time": "ended_at",
        "scheduling_start_time": "scheduling_at",
        "initializing_start_time": "initializing_at",
        "input_download_start_time": "input_download_started_at",
        "input_download_end_time": "input_download_ended_at",
        "output_upload_start_time": "output_upload_started_at",
        "outputs_until": "outputs_expire_at",
        "since": "began_at",
        "created": "created_at",
        "modified": "modified_at",
        "last_synced": "last_synced_at",
    }
)
"""Maps the JSON key of a time without a zone (mostly OSMO's names) to the key of the same time with its zone."""


def times(**given: float | None) -> dict[str, str | None]:
    """Return each time twice for a JSON document: without a zone, as in OSMO, and with its zone under its key in ``ZONED``.

    >>> times(start_time=1744407067.25, end_time=None)
    {'start_time': '2025-04-11T21:31:07.250', 'started_at': '2025-04-11T21:31:07.250Z', 'end_time': None, 'ended_at': None}
    """
    found: dict[str, str | None] = {}
    for key, at in given.items():
        text = iso(at)
        found |= {key: text, ZONED[key]: None if text is None else f"{text}Z"}
    return found


def day_start(text: str) -> float:
    """Return the beginning of a day (``2025-04-11``) in the user's time zone. Raises ``ValueError``."""
    return time.mktime(time.strptime(text, "%Y-%m-%d"))


def duration_hms(seconds: float | None) -> str:
    """Return a duration for people; ``-`` for ``None``, the duration of a phase that has not begun.

    >>> duration_hms(42.9), duration_hms(3723), duration_hms(273904)
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
