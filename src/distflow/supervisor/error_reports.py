"""What a failed task reports about its failure: torch's error file, tracebacks in its output, torchrun's report. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distflow.protocol.ends import EndReason
from distflow.protocol.error_file import ErrorReport, is_symptom, parse_error_file
from distflow.state.ends import End
from distflow.supervisor.printed_errors import (
    PrintedException,
    ReportedRank,
    printed_exceptions,
    read_report,
    without_launcher,
)

__all__ = ["FailureReport", "failure_report", "hidden_failure_report", "signal_name"]

_LAST = 8
"""Lines at the end of an output that explain its end; the task may have recovered from errors in earlier lines."""
_NEAR = 20
"""Lines that may follow the traceback of the fatal exception: libraries print warnings while the interpreter exits."""
_NOT_PYTHONS = (-9, -15, 137, 143)
"""Exit codes of processes that a signal ended, not an exception."""
_PYTHONS = (1, -6, -11)
"""Exit codes of Python after an exception; threads of gloo and NCCL may abort the process while it exits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """What is known about a failure in addition to the end of the task's command."""

    detail: str = ""
    """The failure in one line."""
    rank: str = ""
    """The rank that failed first; empty if it is not known."""
    pid: int | None = None
    signal: int | None = None
    """The signal that ended that rank, as torchrun reports it."""
    traceback: str = ""
    is_symptom: bool = False
    """Whether it only reports that another process was gone."""
    has_joined: bool = False
    """Whether the rank had joined its world: torch had labeled the traceback with it."""


def failure_report(end: End | None, lines: Sequence[str]) -> FailureReport:
    """Return the failure that the error file of an end reports, or else the last ``lines`` of the output.

    The file has torch's format (``torch.distributed.elastic.multiprocessing.errors.error_handler``). Our sample adds ``rank``
    and ``pid``.
    """
    error = parse_error_file(end.error if end else None) or ErrorReport(message="")
    detail, traceback = (error.message.strip().splitlines() or [""])[-1][:300], error.callstack.rstrip()
    reported = read_report(lines)
    raised = {} if detail else _raised(lines, reported, is_by_exception=_may_be_exception(end))
    first, exception = _first(reported, raised)
    pid = error.pid
    rank = error.rank if error.rank is not None else first.rank if first else exception.rank if exception else None
    if exception is not None:
        detail, traceback = exception.message[:300], exception.traceback
    return FailureReport(
        detail=_printable(detail) or (_reported(first) if first else ""),
        rank=str(rank) if rank is not None else "",
        pid=pid if pid is not None else first.pid if first else None,
        signal=-first.exit_code if first is not None and first.exit_code < 0 and exception is None and not detail else None,
        traceback=traceback,
        is_symptom=_is_symptom(detail if exception is None else exception.text, lines, first),
        has_joined=exception is not None and exception.is_labeled,
    )


def hidden_failure_report(lines: Sequence[str]) -> FailureReport | None:
    """Return the failure of the ranks of a task whose command ended with code 0; ``None`` if the output reports none."""
    report = failure_report(End(ended_at=0.0, exit_code=1), lines)
    return report if report.detail else None


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9; numbers without a name as ``signal 50``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _printable(text: str) -> str:
    """Return a text that is safe in an event or a message: a task's output must not move a terminal's cursor."""
    return text if text.isprintable() else "".join(one if one.isprintable() else " " for one in text).strip()


def _reported(failed: ReportedRank) -> str:
    code = failed.exit_code
    return f"rank {failed.rank} " + (f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}")


def _may_be_exception(end: End | None) -> bool:
    """Return whether an exception in the output may have ended the command."""
    if end is None or end.reason is not EndReason.EXITED or end.oom_pid is not None:
        return False
    code = -end.signal if end.signal else end.exit_code
    return code not in (None, 0, *_NOT_PYTHONS)


def _raised(
    lines: Sequence[str], reported: Sequence[ReportedRank], *, is_by_exception: bool
) -> dict[ReportedRank | None, PrintedException]:
    """Return the exception that ended each failed rank, if the output shows it. Without a report, its key is ``None``."""
    own = without_launcher(lines)
    printed = [one for one in printed_exceptions(own) if not one.is_launchers]
    if not reported:
        if not is_by_exception:
            return {}
        last = {(one.rank, one.local_rank): one for one in printed if one.last_line >= len(own) - _NEAR}
        return {None: _most_telling(list(last.values()))} if last else {}
    failed = [one for one in reported if one.exit_code not in _NOT_PYTHONS]
    anonymous = [one for one in printed if one.rank is None and one.local_rank is None]
    found: dict[ReportedRank | None, PrintedException] = {}
    for one in failed:
        its_own = [
            each for each in printed if each.rank == one.rank or (each.rank is None and each.local_rank == one.local_rank)
        ]
        # Lines without a label may be from any rank: consider as many of the last exceptions as there are failed ranks.
        candidates = its_own[-1:] or anonymous[-len(failed) :]
        if one.exit_code not in _PYTHONS:
            candidates = [each for each in candidates if each.last_line >= len(own) - _NEAR]
        if candidates:
            found[one] = _most_telling(candidates)
    return found


def _most_telling(candidates: Sequence[PrintedException]) -> PrintedException:
    """Return the first exception that reports more than the loss of another process, or else the first one."""
    return next((one for one in candidates if not is_symptom(one.text)), candidates[0])


def _first(
    reported: Sequence[ReportedRank], raised: Mapping[ReportedRank | None, PrintedException]
) -> tuple[ReportedRank | None, PrintedException | None]:
    """Return the rank that failed first, and its exception.

    torchrun polls ten times a second. If several ranks fail between two polls, it names the one with the lowest number, which
    may only have lost its connection to another failed rank.
    """
    if not reported:
        return None, raised.get(None)
    first = reported[0]
    if first in raised and is_symptom(raised[first].text):
        telling = (one for one in reported if one in raised and not is_symptom(raised[one].text))
        first = next(telling, first)
    return first, raised.get(first)


def _is_symptom(words: str, lines: Sequence[str], failed: ReportedRank | None) -> bool:
    if words:
        return is_symptom(words)
    if failed is None:
        return any(is_symptom(line) for line in lines[-_LAST:])
    # The other ranks lost their peer, too, so only the output of the first one counts. A signal leaves no message.
    return failed.exit_code > 0 and any(is_symptom(line) for line in lines if line.startswith(f"[rank{failed.rank}]"))
