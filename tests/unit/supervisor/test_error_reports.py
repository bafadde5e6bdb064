"""What tasks say of their failures: error files and reports of torch 2.13, as it wrote them."""

from __future__ import annotations

import pytest

from distflow.state.ends import End
from distflow.supervisor.error_reports import FailureReport, failure_report, signal_name

STACK = """\
Traceback (most recent call last):
  File "a.py", line 7, in main
    raise ValueError("bad label")
ValueError: bad label
"""
EXTRA = {"py_callstack": STACK, "timestamp": "1795284656"}
RAISED = {"message": {"message": "ValueError: bad label", "extraInfo": EXTRA, "errorCode": 1}}
REPORT = """\
=======================================================
a.py FAILED
-------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_18:10:49
  host      : localhost
  rank      : 8 (local_rank: 0)
  exitcode  : -15 (pid: 11471)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 11471
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_18:10:49
  host      : localhost
  rank      : 9 (local_rank: 1)
  exitcode  : {code} (pid: 11472)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 11472
=======================================================
"""


def _report(code: int, before: str = "") -> list[str]:
    return (before + REPORT.format(code=code)).splitlines()


def _end(**error: object) -> End:
    return End(ended_at=1.0, exit_code=1, error=error or None)


def test_an_error_file_tells_the_message_and_the_traceback() -> None:
    assert failure_report(_end(**RAISED), ()) == FailureReport(detail="ValueError: bad label", traceback=STACK.rstrip())


def test_rank_and_process_are_the_error_files_where_it_says_them() -> None:
    told = failure_report(_end(**RAISED, rank=12, pid=77), _report(1))
    assert (told.rank, told.pid) == ("12", 77)


def test_torchruns_report_tells_rank_and_process_of_an_error_file_that_does_not() -> None:
    told = failure_report(_end(**RAISED), _report(1))
    assert (told.detail, told.rank, told.pid, told.traceback) == ("ValueError: bad label", "9", 11472, STACK.rstrip())


@pytest.mark.parametrize(("code", "detail"), [(-9, "rank 9 was killed by SIGKILL"), (3, "rank 9 exited with code 3")])
def test_torchruns_report_is_enough(code: int, detail: str) -> None:
    told = failure_report(_end(), _report(code))
    assert (told.detail, told.rank, told.pid, told.is_symptom) == (detail, "9", 11472, False)


@pytest.mark.parametrize(
    ("code", "before", "is_symptom"),
    [
        (1, "[rank9]: RuntimeError: Connection closed by peer [10.0.0.1]:4\n", True),
        # It is the other rank that lost its peer.
        (1, "[rank8]: RuntimeError: Connection closed by peer\n[rank9]: ValueError: bad label\n", False),
        (-9, "[rank9]: RuntimeError: Connection closed by peer\n", False),
    ],
)
def test_under_torchrun_the_first_ranks_words_count(code: int, before: str, is_symptom: bool) -> None:
    assert failure_report(_end(), _report(code, before)).is_symptom is is_symptom


def test_only_the_end_of_an_output_tells_why_it_ended() -> None:
    assert failure_report(_end(), ["Connection refused", *["step"] * 7]).is_symptom
    assert not failure_report(_end(), ["Connection refused", *["step"] * 8]).is_symptom


@pytest.mark.parametrize(
    "error", [{"message": 3}, {"message": {"message": None}}, {"message": {"extraInfo": 4}}, {"rank": "x"}, {}]
)
def test_a_file_of_another_kind_does_no_harm(error: dict[str, object]) -> None:
    told = failure_report(End(ended_at=1.0, error=error), ())
    assert (told.rank, told.pid, told.traceback) == ("", None, "")


def test_signals_have_names() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(63) == "signal 63"


def test_what_is_no_number_is_no_process_whatever_python_counts_as_one() -> None:
    """A cause with such a process could be written down, and never read again."""
    told = failure_report(_end(**RAISED, rank=True, pid=False), ())
    assert (told.rank, told.pid) == ("", None)
