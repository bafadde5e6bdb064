"""What a failed task's own words tell of its failure: torch's error file, torchrun's report, its last lines. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distflow.state.ends import End

__all__ = ["Told", "hear", "signal_name"]

_SYMPTOM = re.compile(
    r"Connection (?:closed|reset) by peer|Broken pipe|Connection refused|Timed out waiting \d+ms for (?:recv|send)"
    r"|wait timeout after \d+ms|Socket Timeout|remote process exited|ncclRemoteError|Failed to recv|recvValue failed"
)
"""What torch's backends say when it was another process that went away (gloo, TCPStore, NCCL; texts of torch 2.13)."""
_LAST = 8
"""Lines at the end of an output that tell why it ended; what stands before may have been overcome."""
_REPORT = re.compile(r"Root Cause .*?\n +rank +: (\d+) .*?\n +exitcode +: (-?\d+) +\(pid: (\d+)\)", re.DOTALL)
"""How torchrun ends its output (``ChildFailedError``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What is known of a failure beyond the end of the task's command."""

    detail: str = ""
    """One line."""
    rank: str = ""
    """The rank that failed first; empty when not known."""
    pid: int | None = None
    traceback: str = ""
    is_symptom: bool = False
    """It only says that another process was gone."""


def hear(end: End | None, lines: Sequence[str]) -> Told:
    """Return what the error file of an end tells, and where that is silent the last ``lines``.

    The file's format is torch's (``torch.distributed.elastic.multiprocessing.errors.error_handler``); ``rank`` and ``pid``
    in it are our sample's additions.
    """
    error: Mapping[str, object] = (end.error if end else None) or {}
    detail, traceback = _message(error)
    report = _REPORT.search("\n".join(lines))
    rank, pid = _number(error, "rank"), _number(error, "pid")
    known = Told(
        detail=detail,
        rank=str(rank) if rank is not None else report[1] if report else "",
        pid=pid if pid is not None else int(report[3]) if report else None,
        traceback=traceback,
        is_symptom=_is_symptom(detail, lines, report),
    )
    if detail or report is None:
        return known
    return Told(detail=_reported(report), rank=known.rank, pid=known.pid, is_symptom=known.is_symptom)


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9; numbers without a name as ``signal 50``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _number(error: Mapping[str, object], name: str) -> int | None:
    value = error.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None  # JSON's `true` is an int to Python


def _message(error: Mapping[str, object]) -> tuple[str, str]:
    """Return the last line of an error file's message, and its Python traceback."""
    message, traceback = error.get("message", ""), ""
    if isinstance(message, Mapping):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, Mapping) else None
        message, traceback = message.get("message", ""), stack if isinstance(stack, str) else ""
    text = str(message).strip().splitlines()
    return (text[-1][:300] if text else ""), traceback.rstrip()


def _reported(report: re.Match[str]) -> str:
    code = int(report[2])
    return f"rank {report[1]} " + (f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}")


def _is_symptom(detail: str, lines: Sequence[str], report: re.Match[str] | None) -> bool:
    if detail:
        return bool(_SYMPTOM.search(detail))
    if report is None:
        return any(_SYMPTOM.search(line) for line in lines[-_LAST:])
    # Its other ranks lost their peer, too: only what the first of them said counts. One that a signal ended said nothing.
    return int(report[2]) > 0 and any(_SYMPTOM.search(line) for line in lines if line.startswith(f"[rank{report[1]}]"))
