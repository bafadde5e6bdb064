"""torch's error file: a process that fails writes its exception into it, for the process that started it.

Its format and the variable are defined by ``torch.distributed.elastic.multiprocessing.errors.ErrorHandler`` (torch 2.13).
distflow adds ``rank``, ``pid`` and ``raised_at`` at the top level, and its launcher also adds ``signal``.
"""

from __future__ import annotations

import math
import re

from distflow.protocol.light_typing import Any, Mapping, NamedTuple, Optional

__all__ = ["VARIABLE", "ErrorReport", "error_file", "is_symptom", "parse_error_file"]

VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""The environment variable with the path of the file."""

_SYMPTOM = re.compile(
    r"Connection (?:closed|reset) by peer|Broken pipe|Connection refused|Timed out waiting \d+ms for (?:recv|send)"
    r"|wait timeout after \d+ms|Socket Timeout|remote process exited|ncclRemoteError|Failed to recv|recvValue failed"
)


class ErrorReport(NamedTuple):
    """The content of an error file."""

    message: str
    """Such as ``ValueError: shapes differ``; empty when there is none."""
    callstack: str = ""
    """Python's traceback; empty when there is none."""
    rank: Optional[int] = None
    pid: Optional[int] = None
    raised_at: Optional[float] = None
    """The time of the failure, in seconds since the epoch by the clock of its node.

    If only the whole second is known (torch's ``timestamp``), this is the end of that second.
    """


def error_file(message: str, callstack: str, raised_at: float, more: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content of an error file, ready for JSON.

    ``raised_at`` is in seconds since the epoch. ``more`` has additional fields for the top level.
    """
    extra = {"py_callstack": callstack, "timestamp": str(int(raised_at))}
    return {"message": {"message": message, "extraInfo": extra}, "raised_at": raised_at, **more}


def parse_error_file(content: object) -> Optional[ErrorReport]:
    """Return the report in decoded JSON, or ``None`` if it is not an error file. Any process may have written the file."""
    if not isinstance(content, dict) or "message" not in content:
        return None
    message, extra = content["message"], None
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        message = message.get("message", "")
    extra = extra if isinstance(extra, dict) else {}
    callstack = extra.get("py_callstack")
    return ErrorReport(
        message="" if message is None else str(message),  # torch also accepts a plain string as `message`
        callstack=callstack if isinstance(callstack, str) else "",
        rank=_integer(content.get("rank")),
        pid=_integer(content.get("pid")),
        raised_at=_seconds(content.get("raised_at"), extra.get("timestamp")),
    )


def is_symptom(text: str) -> bool:
    """Return whether a text contains words with which gloo, TCPStore or NCCL (torch 2.13) report a lost or silent process."""
    return _SYMPTOM.search(text) is not None


def _integer(value: object) -> Optional[int]:
    return value if isinstance(value, int) and not isinstance(value, bool) else None  # JSON's `true` is an int to Python


def _seconds(exact: object, whole: object) -> Optional[float]:
    """Return the time in distflow's field if that is a float; None if the float is not finite.

    Otherwise return the end of the second in torch's field; None if that field is invalid.
    """
    if isinstance(exact, float):
        return exact if math.isfinite(exact) else None
    return int(whole) + 1.0 if isinstance(whole, str) and re.fullmatch(r"[0-9]{1,12}", whole) else None
