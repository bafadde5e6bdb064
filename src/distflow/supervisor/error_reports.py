"""Find a failed task's own reports of its failure: torch's error file, tracebacks in its output, torchrun's report.

A script that uses neither torch's ``@record`` nor distflow's launcher leaves no error file. Its traceback is only in the
output, between the output of other ranks and above torchrun's own traceback and report. The formats are those of torch 2.6 and
2.13 (``torch/distributed/elastic/multiprocessing/errors``, ``torch/distributed/distributed_c10d.py``). This module does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, field

from distflow.documents.text import plain
from distflow.protocol.ends import EndReason, signal_name
from distflow.protocol.error_file import ErrorReport, is_symptom, parse_error_file
from distflow.state.ends import End, PrintedLine

__all__ = [
    "FailureReport",
    "PrintedException",
    "ReportedRank",
    "failure_report",
    "hidden_failure_report",
    "printed_exceptions",
    "raised_before_stop",
    "read_report",
    "without_launcher",
]


_LAST_LINES = 8
"""The number of last lines that can explain an end. The task may have recovered from errors in earlier lines."""
_MAX_LINES_AFTER = 20
"""The maximum number of lines after a fatal traceback: libraries print warnings while the interpreter exits."""
_SIGNAL_EXIT_CODES = (-9, -15, 137, 143)
"""Exit codes of processes that SIGKILL or SIGTERM ended, not an exception."""
_PYTHON_EXIT_CODES = (1, -6, -11)
"""Exit codes of Python after an exception; threads of gloo and NCCL may abort the process while it exits."""


class FailureReport(Struct, frozen=True, kw_only=True):
    """The details of a failure, in addition to the end of the task's command."""

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
    """Whether the rank had joined its world: torch labeled the traceback with the rank."""


def failure_report(end: End | None, lines: Sequence[str]) -> FailureReport:
    """Return the failure from an end's error file, or else from the last ``lines`` of the output.

    The file has torch's format (``torch.distributed.elastic.multiprocessing.errors.error_handler``). The files that distflow
    writes also have ``rank`` and ``pid``.
    """
    error = parse_error_file(end.error if end else None) or ErrorReport(message="")
    detail, traceback = (error.message.strip().splitlines() or [""])[-1][:300], error.callstack.rstrip()
    reported = read_report(lines)
    raised = {} if detail else _rank_exceptions(lines, reported, is_by_exception=_may_be_exception(end))
    first, exception = _first_failure(reported, raised)
    if not detail and end is not None and (earlier := raised_before_stop(end, lines)):
        first, exception = None, earlier
    pid = error.pid
    rank = error.rank if error.rank is not None else first.rank if first else exception.rank if exception else None
    if exception is not None:
        detail, traceback = exception.message[:300], exception.traceback
    return FailureReport(
        detail=plain(detail).strip() or (_report_text(first) if first else ""),
        rank=str(rank) if rank is not None else "",
        pid=pid if pid is not None else first.pid if first else None,
        signal=-first.exit_code if first is not None and first.exit_code < 0 and exception is None and not detail else None,
        traceback=traceback,
        is_symptom=_reports_lost_peer(detail if exception is None else exception.text, lines, first),
        has_joined=exception is not None and exception.is_labeled,
    )


def raised_before_stop(end: End, lines: Sequence[str]) -> PrintedException | None:
    """Return the exception that ended a rank of a task before the task was stopped, or ``None`` if the output shows none.

    torch labels a traceback only if nothing caught the exception. torchrun reports a failed rank after its other ranks have
    ended, so it is often stopped before that. Exceptions that only report the loss of another process are ignored.
    """
    if end.stopped_at is None:  # usually; the search below takes time
        return None
    for one in printed_exceptions(lines):
        line = lines[one.last_line]
        time = line.time if isinstance(line, PrintedLine) else None
        if one.is_labeled and time is not None and not is_symptom(one.text):
            return one if end.was_stopped_after(time) else None
    return None


def hidden_failure_report(lines: Sequence[str]) -> FailureReport | None:
    """Return the failure of the ranks of a task whose command ended with code 0; ``None`` if the output reports none."""
    report = failure_report(End(ended_at=0.0, exit_code=1), lines)
    return report if report.detail else None


def _report_text(failed: ReportedRank) -> str:
    code = failed.exit_code
    return f"rank {failed.rank} " + (f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}")


def _may_be_exception(end: End | None) -> bool:
    """Return whether an exception in the output may have ended the command."""
    if end is None or end.reason is not EndReason.EXITED or end.oom_pid is not None:
        return False
    code = -end.signal if end.signal else end.exit_code
    return code not in (None, 0, *_SIGNAL_EXIT_CODES)


def _rank_exceptions(
    lines: Sequence[str], reported: Sequence[ReportedRank], *, is_by_exception: bool
) -> dict[ReportedRank | None, PrintedException]:
    """Return the exception that ended each failed rank, if the output shows it.

    Without a report of torchrun, the only key is ``None``. ``is_by_exception``: whether an exception may have ended the task.
    """
    own = without_launcher(lines)
    printed = [one for one in printed_exceptions(own) if not one.is_from_launcher]
    if not reported:
        if not is_by_exception:
            return {}
        last = {(one.rank, one.local_rank): one for one in printed if one.last_line >= len(own) - _MAX_LINES_AFTER}
        return {None: _most_informative(list(last.values()))} if last else {}
    failed = [one for one in reported if one.exit_code not in _SIGNAL_EXIT_CODES]
    anonymous = [one for one in printed if one.rank is None and one.local_rank is None]
    found: dict[ReportedRank | None, PrintedException] = {}
    for one in failed:
        own_exceptions = [
            each for each in printed if each.rank == one.rank or (each.rank is None and each.local_rank == one.local_rank)
        ]
        # Lines without a label may be from any rank: consider as many of the last exceptions as there are failed ranks.
        candidates = own_exceptions[-1:] or anonymous[-len(failed) :]
        if one.exit_code not in _PYTHON_EXIT_CODES:
            candidates = [each for each in candidates if each.last_line >= len(own) - _MAX_LINES_AFTER]
        if candidates:
            found[one] = _most_informative(candidates)
    return found


def _most_informative(candidates: Sequence[PrintedException]) -> PrintedException:
    """Return the first exception that reports more than the loss of another process, or else the first one."""
    return next((one for one in candidates if not is_symptom(one.text)), candidates[0])


def _first_failure(
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
        informative = (one for one in reported if one in raised and not is_symptom(raised[one].text))
        first = next(informative, first)
    return first, raised.get(first)


def _reports_lost_peer(detail: str, lines: Sequence[str], failed: ReportedRank | None) -> bool:
    if detail:
        return is_symptom(detail)
    if failed is None:
        return any(is_symptom(line) for line in lines[-_LAST_LINES:])
    # The other ranks lost their peer, too, so only the output of the first one counts. A signal leaves no message.
    return failed.exit_code > 0 and any(is_symptom(line) for line in lines if line.startswith(f"[rank{failed.rank}]"))


_COLORS = re.compile(r"\x1b\[[0-?]{0,32}[ -/]{0,8}[@-~]")
"""Terminal colors: Python 3.13 colors tracebacks if ``FORCE_COLOR`` is set."""
_LABEL = re.compile(r"\[(?P<name>[A-Za-z_]\w{0,40}?) ?(?P<number>\d{1,9})\]:")
"""torch labels tracebacks ``[rank3]: `` once a rank has joined its world; ``torchrun --tee`` labels lines ``[default1]:``."""
_TRACEBACK = re.compile(r"(?P<lead> *(?:\+ Exception Group |Original )?)Traceback \(most recent call last\):\s*")
_UNCOMPILED = re.compile(r'  File "[^"]{1,4096}", line \d{1,9}\s*')
"""If Python cannot compile the script itself, it prints no ``Traceback`` line, only the location, the code and the error."""
_COMPILER_ERROR = re.compile(r"(?:SyntaxError|IndentationError|TabError): .*")
_EXCEPTION = re.compile(r"(?:[^\W\d]\w*\.)*[^\W\d]\w*(?:: .*|:)?\s*")
_IN_GROUP = re.compile(r" +\| (?P<text>(?:[^\W\d]\w*\.)*[^\W\d]\w*: .*)")
_LINKS = ("The above exception was the direct cause of", "During handling of the above exception", "-- Process ")
"""Lines between two tracebacks of one failure; the last one is of ``torch.multiprocessing``."""
_HARMLESS = ("Exception ignored in", "Exception in thread")
"""Lines before a traceback after which the process continues."""
_MAX_MESSAGE_LINES = 20
"""The maximum number of lines of a message after its first one. Torch's label must show that they belong to it."""
_MAX_LINES_BETWEEN = 19
"""The maximum number of lines between a traceback and the ``Original Traceback`` of the same failure below it."""
_LONGEST = 100
"""The maximum number of lines of a traceback that are kept, half of them from each end."""
_WIDEST = 500
"""The maximum length of a line that is kept."""

_LAUNCHER_NOTE = re.compile(
    r"[IWEF]\d{4} [\d:.]+ \d+ \S*torch/distributed/(?:elastic|launcher|run)"
    r"|(?:\[[\d :,-]+\] |[A-Z]+:)torch\.distributed\.(?:elastic|run)\b"
)
"""The first characters of torchrun's log lines: the format of torch 2.3 and newer, and that of older versions."""
_LAUNCHER_RAISES = ("ChildFailedError", "SignalException")
_RANK = re.compile(
    r"^ {1,4}rank {1,9}: (\d{1,9}) \(local_rank: (\d{1,9})\)\n {1,4}exitcode {1,9}: (-?\d{1,9}) {1,4}\(pid: (\d{1,9})\)",
    re.MULTILINE,
)


class ReportedRank(Struct, frozen=True, kw_only=True):
    """A failed rank in torchrun's report."""

    rank: int
    local_rank: int
    exit_code: int
    """A negative number is the signal that ended the rank."""
    pid: int


class PrintedException(Struct, frozen=True, kw_only=True):
    """An exception that was printed to the output."""

    message: str
    """Its first line, such as ``ValueError: bad label``."""
    traceback: str
    """The traceback, together with the exceptions that led to it."""
    text: str
    """All lines of the message.

    For an ``ExceptionGroup``, the message of the first member that reports its own failure, or else of the first member.
    """
    rank: int | None = None
    """The rank that printed it, if each rank has its own output or torch labeled the lines; otherwise ``None``."""
    is_labeled: bool = False
    """Whether torch labeled its lines, which shows that the rank had joined its world."""
    local_rank: int | None = None
    last_line: int
    """The index of its last line in the searched lines."""

    @property
    def is_from_launcher(self) -> bool:
        """Whether torchrun raised it, to report a failed rank or a signal."""
        return self.message.partition(":")[0].endswith(_LAUNCHER_RAISES)


class _Stream(Struct):
    """The lines with the same label: number, text, and whether torch labeled the line as part of a traceback."""

    rank: int | None = None
    lines: list[tuple[int, str, bool]] = field(default_factory=list)


def printed_exceptions(lines: Sequence[str]) -> list[PrintedException]:
    """Return the exceptions in a task's output that may have ended a process, ordered by their last lines."""
    streams: dict[tuple[str, int] | None, _Stream] = {}
    for number, line in enumerate(lines):
        key, rank, text, has_torch_label = _unlabeled(line)
        stream = streams.setdefault(key, _Stream())
        stream.rank = rank if rank is not None else stream.rank
        stream.lines.append((number, text, has_torch_label))
    found = [one for key, stream in streams.items() for one in _exceptions(key, stream)]
    return sorted(found, key=lambda one: one.last_line)


def read_report(lines: Sequence[str]) -> list[ReportedRank]:
    """Return the ranks in torchrun's report, starting with the first one to fail; empty without a report."""
    text = _COLORS.sub("", "\n".join(lines))
    root = text.rfind("Root Cause (first observed failure)")
    if root < 0:
        return []
    report = text[max(0, text.rfind(" FAILED\n", 0, root)) :]
    ranks = [
        ReportedRank(rank=int(one[1]), local_rank=int(one[2]), exit_code=int(one[3]), pid=int(one[4]))
        for one in _RANK.finditer(report)
    ]
    return [*ranks[-1:], *ranks[:-1]]


def without_launcher(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the ranks' own output, without torchrun's notes, traceback and report."""
    left_out = {number for number, line in enumerate(lines) if _LAUNCHER_NOTE.match(line)}
    for one in printed_exceptions(lines):
        if one.is_from_launcher:
            left_out.update(range(one.last_line - one.traceback.count("\n"), one.last_line + 1))
    begin: int | None = None
    for number, line in enumerate(lines):
        is_rule = len(line) > 2 and not line.strip("=")
        if begin is not None and is_rule:
            left_out.update(range(begin, number + 1))
            begin = None
        elif is_rule and number + 1 < len(lines) and lines[number + 1].endswith(" FAILED"):
            begin = number
    return tuple(line for number, line in enumerate(lines) if number not in left_out)


def _unlabeled(line: str) -> tuple[tuple[str, int] | None, int | None, str, bool]:
    """Return a line's stream, its global rank, its text without labels, and whether torch labeled it as a rank's traceback."""
    key: tuple[str, int] | None = None
    rank, start, has_torch_label = None, 0, False
    if isinstance(line, PrintedLine) and line.rank is not None:
        key, rank = ("rank", line.rank), line.rank
    line = _COLORS.sub("", line) if "\x1b" in line else line
    while match := _LABEL.match(line, start):
        start = match.end()
        number = int(match["number"])
        if match["name"].lower() == "rank":
            rank = number if rank is None else rank
            has_torch_label = line.startswith(" ", start)
            start += has_torch_label
        key = key or (match["name"].lower(), number)
    return key, rank, line[start:], has_torch_label


def _exceptions(key: tuple[str, int] | None, stream: _Stream) -> Iterator[PrintedException]:
    local_rank = key[1] if key is not None and key[0] != "rank" else None
    begin, end = 0, 0
    blocks: list[tuple[int, int, int, list[str]]] = []
    """For each traceback: the indices of its first line, its exception and the line after its end, and the exception's text.

    For an ``ExceptionGroup``, the texts of its members follow.
    """
    position = 0
    while position < len(stream.lines):
        head = _TRACEBACK.fullmatch(stream.lines[position][1])
        is_uncompiled = head is None and _UNCOMPILED.fullmatch(stream.lines[position][1]) is not None
        position += 1
        if head is None and not is_uncompiled:
            continue
        begin = position - 1
        if begin and stream.lines[begin - 1][1].startswith(_HARMLESS):
            continue
        shown: list[str] = []
        while position < len(stream.lines) and stream.lines[position][1][:1] in (" ", "\t"):
            in_group = _IN_GROUP.fullmatch(stream.lines[position][1]) if head and "Group" in head["lead"] else None
            shown += [in_group["text"]] if in_group else []
            position += 1
        if not shown:
            exception = _COMPILER_ERROR if is_uncompiled else _EXCEPTION
            if position == len(stream.lines) or not exception.fullmatch(stream.lines[position][1]):
                continue
            shown = [stream.lines[position][1].strip()]
            position += 1
        at, end = position - 1, position
        while end < len(stream.lines) and end < position + _MAX_MESSAGE_LINES and stream.lines[end][2]:
            if _TRACEBACK.fullmatch(stream.lines[end][1]) or stream.lines[end][1].startswith(_LINKS):
                break
            end += 1
        if blocks and _is_linked(stream, blocks[-1][2], begin):
            begin = blocks.pop()[0]
        blocks.append((begin, at, end, shown))
    for first, at, after, (message, *members) in blocks:
        member = next((one for one in members if not is_symptom(one)), members[0] if members else None)
        texts = [text.rstrip() for _, text, _ in stream.lines[first:after]]
        yield PrintedException(
            message=message[:_WIDEST], traceback="\n".join(_shortened(texts)).rstrip(),
            text=member or "\n".join(text for _, text, _ in stream.lines[at:after]), rank=stream.rank, local_rank=local_rank,
            is_labeled=stream.lines[at][2], last_line=stream.lines[after - 1][0],
        )  # fmt: skip


def _is_linked(stream: _Stream, after: int, begin: int) -> bool:
    """Return whether the traceback at ``begin`` belongs to the same failure as the one that ended before ``after``."""
    if stream.lines[begin][1].startswith("Original "):
        return begin - after <= _MAX_LINES_BETWEEN
    between = [text for _, text, _ in stream.lines[max(after, begin - 3) : begin] if text.strip()]
    return bool(between) and between[-1].startswith(_LINKS)


def _shortened(texts: list[str]) -> list[str]:
    kept = [text if len(text) <= _WIDEST else f"{text[:_WIDEST]} …" for text in texts]
    if len(kept) <= _LONGEST:
        return kept
    half = _LONGEST // 2
    return [*kept[:half], f"… {len(kept) - 2 * half} lines left out …", *kept[-half:]]
