"""Reports of failures by tasks: error files and reports in the output of torch 2.6 and 2.13."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.documents.text import plain
from distflow.protocol.ends import EndReason
from distflow.state.ends import End, PrintedLine
from distflow.supervisor.error_reports import (
    FailureReport,
    failure_report,
    printed_exceptions,
    read_report,
    without_launcher,
)

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


def test_error_file_has_the_message_and_the_traceback() -> None:
    assert failure_report(_end(**RAISED), ()) == FailureReport(detail="ValueError: bad label", traceback=STACK.rstrip())


def test_rank_and_pid_of_the_error_file_take_precedence() -> None:
    failure = failure_report(_end(**RAISED, rank=12, pid=77), _report(1))
    assert (failure.rank, failure.pid) == ("12", 77)


def test_torchruns_report_completes_an_error_file_without_rank_and_pid() -> None:
    failure = failure_report(_end(**RAISED), _report(1))
    assert (failure.detail, failure.rank, failure.pid, failure.traceback) == (
        "ValueError: bad label",
        "9",
        11472,
        STACK.rstrip(),
    )


@pytest.mark.parametrize(("code", "detail"), [(-9, "rank 9 was killed by SIGKILL"), (3, "rank 9 exited with code 3")])
def test_torchruns_report_is_sufficient_without_an_error_file(code: int, detail: str) -> None:
    failure = failure_report(_end(), _report(code))
    assert (failure.detail, failure.rank, failure.pid, failure.is_symptom) == (detail, "9", 11472, False)


@pytest.mark.parametrize(
    ("code", "before", "is_symptom"),
    [
        (1, "[rank9]: RuntimeError: Connection closed by peer [10.0.0.1]:4\n", True),
        # The other rank lost its peer.
        (1, "[rank8]: RuntimeError: Connection closed by peer\n[rank9]: ValueError: bad label\n", False),
        (-9, "[rank9]: RuntimeError: Connection closed by peer\n", False),
    ],
)
def test_under_torchrun_the_output_of_the_first_failed_rank_counts(code: int, before: str, is_symptom: bool) -> None:
    assert failure_report(_end(), _report(code, before)).is_symptom is is_symptom


def test_only_the_last_lines_of_the_output_show_that_a_peer_was_lost() -> None:
    assert failure_report(_end(), ["Connection refused", *["step"] * 7]).is_symptom
    assert not failure_report(_end(), ["Connection refused", *["step"] * 8]).is_symptom


@pytest.mark.parametrize(
    "error", [{"message": 3}, {"message": {"message": None}}, {"message": {"extraInfo": 4}}, {"rank": "x"}, {}]
)
def test_error_file_of_another_format_is_ignored(error: dict[str, object]) -> None:
    failure = failure_report(End(ended_at=1.0, error=error), ())
    assert (failure.rank, failure.pid, failure.traceback) == ("", None, "")


def test_pid_that_is_not_an_integer_is_ignored() -> None:
    """The store could write a cause with such a pid, but could not read it."""
    failure = failure_report(_end(**RAISED, rank=True, pid=False), ())
    assert (failure.rank, failure.pid) == ("", None)


GOLDENS = Path(__file__).resolve().parents[2] / "goldens" / "torchrun"
VERSIONS = ("2.6", "2.13")
FAILED = End(ended_at=1.0, exit_code=1)
BEGIN = "Traceback (most recent call last):"


def output(version: str, name: str) -> list[str]:
    return (GOLDENS / version / f"{name}.txt").read_text().splitlines()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "rank", "detail", "frame"),
    [
        ("plain.bare", "1", "ValueError: bad batch 17", 'File "/data/plain.py", line 7, in train'),
        ("plain.tee", "1", "ValueError: bad batch 17", 'File "/data/plain.py", line 7, in train'),
        ("gang.bare", "1", "RuntimeError: bad batch 17", 'File "/data/gang.py", line 8, in train'),
        ("gang.tee", "1", "RuntimeError: bad batch 17", 'File "/data/gang.py", line 8, in train'),
        ("chained.bare", "1", "BadLabel: line 3 of labels.csv:", 'File "/data/chained.py", line 13, in label'),
        ("chained.tee", "1", "BadLabel: line 3 of labels.csv:", 'File "/data/chained.py", line 13, in label'),
        ("missing.bare", "0", "ModuleNotFoundError: No module named 'no_such_module'", 'File "/data/missing.py", line 1'),
        ("recorded.bare", "1", "ValueError: bad batch 17", 'File "/data/recorded.py", line 10, in main'),
        ("recorded.tee", "1", "ValueError: bad batch 17", 'File "/data/recorded.py", line 10, in main'),
        ("two_nodes.1", "3", "RuntimeError: bad batch 17", 'File "/data/gang.py", line 8, in train'),
    ],
)
def test_rank_exception_and_traceback_are_found_in_the_output_of_torchrun(
    version: str, name: str, rank: str, detail: str, frame: str
) -> None:
    failure = failure_report(FAILED, output(version, name))
    assert (failure.rank, failure.detail, failure.is_symptom) == (rank, detail, False)
    assert failure.pid is not None
    assert failure.traceback.startswith(BEGIN)
    assert frame in failure.traceback
    assert detail in failure.traceback.splitlines()
    assert "[rank" not in failure.traceback
    assert "ChildFailedError" not in failure.traceback


@pytest.mark.parametrize("version", VERSIONS)
def test_chained_exceptions_are_in_the_traceback(version: str) -> None:
    failure = failure_report(FAILED, output(version, "chained.bare"))
    assert "ValueError: invalid literal for int() with base 10: 'cat'" in failure.traceback
    assert failure.traceback.count(BEGIN) == 2


UNCOMPILED = ['  File "/data/train.py", line 2', '    print("start"', "         ^", "SyntaxError: '(' was never closed"]
"""Python's output for a script that it cannot compile: without a ``Traceback`` line and a function."""


@pytest.mark.parametrize("error", ["SyntaxError: '(' was never closed", "IndentationError: unexpected indent", "TabError: x"])
def test_a_script_that_cannot_be_compiled_is_reported_with_its_line(error: str) -> None:
    lines = ["setting up", *UNCOMPILED[:3], error]
    failure = failure_report(FAILED, lines)
    assert (failure.detail, failure.traceback) == (error, "\n".join(lines[1:]))


@pytest.mark.parametrize("version", VERSIONS)
def test_under_torchrun_a_script_that_cannot_be_compiled_is_reported_with_its_rank(version: str) -> None:
    launcher = output(version, "exits.bare")
    failure = failure_report(FAILED, [*(PrintedLine.of(line, rank) for rank in (0, 1) for line in UNCOMPILED), *launcher])
    assert (failure.rank, failure.detail) == ("1", UNCOMPILED[-1])
    assert failure.traceback == "\n".join(UNCOMPILED)


@pytest.mark.parametrize(
    "lines",
    [
        [*UNCOMPILED[:3], "ValueError: bad label"],
        ['  File "/data/train.py", line 2, in <module>', "    main()", UNCOMPILED[-1]],
        [UNCOMPILED[0], "nothing was found there"],
        UNCOMPILED[:3],
    ],
)
def test_other_lines_that_name_a_file_are_not_a_compile_error(lines: list[str]) -> None:
    assert printed_exceptions(lines) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_ranks_that_lost_a_peer_are_recognized_by_their_exception(version: str) -> None:
    failure = failure_report(FAILED, output(version, "two_nodes.0"))
    assert (failure.rank, failure.is_symptom) == ("0", True)
    assert "Connection closed by peer" in failure.detail


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "detail"), [("exits.bare", "rank 1 exited with code 3"), ("killed.bare", "rank 1 was killed by SIGKILL")]
)
def test_rank_without_an_exception_is_reported_with_its_exit_code(version: str, name: str, detail: str) -> None:
    failure = failure_report(FAILED, output(version, name))
    assert (failure.rank, failure.detail, failure.traceback) == ("1", detail, "")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("plain.bare", "ValueError: bad batch 17"),
        ("chained.tee", "[default1]:is not a number"),
        ("exits.bare", "no data"),
        ("killed.bare", None),
    ],
)
def test_the_launchers_own_lines_are_left_out(version: str, name: str, last: str | None) -> None:
    own = without_launcher(output(version, name))
    assert (own[-1] if own else None) == last
    assert not any("torch/distributed/run.py" in line or "FAILED" in line for line in own)


def test_rank_that_only_lost_a_peer_is_not_the_first_of_ranks_that_fail_together() -> None:
    """torchrun names the lower rank if it finds both dead at once."""
    lines = [line.replace("exitcode  : -15", "exitcode  : 1") for line in output("2.13", "gang.tee")]
    report = "\n".join(lines).replace("(local_rank: 1)", "(local_rank: x)").replace("(local_rank: 0)", "(local_rank: 1)")
    swapped = report.replace("(local_rank: x)", "(local_rank: 0)").replace("rank      : 0", "rank      : x")
    swapped = swapped.replace("rank      : 1", "rank      : 0").replace("rank      : x", "rank      : 1")
    assert [one.rank for one in read_report(swapped.splitlines())] == [0, 1]
    failure = failure_report(FAILED, swapped.splitlines())
    assert (failure.rank, failure.detail, failure.is_symptom) == ("1", "RuntimeError: bad batch 17", False)


def test_exception_of_a_script_without_a_launcher_is_found() -> None:
    lines = ["step 1", BEGIN, '  File "train.py", line 3, in <module>', "    main()", "KeyError: 'label'", "wandb: bye"]
    failure = failure_report(FAILED, lines)
    assert (failure.detail, failure.rank, failure.traceback) == ("KeyError: 'label'", "", "\n".join(lines[1:5]))


@pytest.mark.parametrize(
    "end",
    [
        None,
        End(ended_at=1.0, exit_code=0),
        End(ended_at=1.0, signal=9),
        End(ended_at=1.0, exit_code=137),
        End(ended_at=1.0, reason=EndReason.STOPPED, signal=15),
        End(ended_at=1.0, reason=EndReason.START_ERROR, exit_code=127),
    ],
)
def test_exception_that_did_not_end_the_command_is_not_reported(end: End | None) -> None:
    assert failure_report(end, [BEGIN, '  File "a.py", line 3', "KeyError: 'label'"]).traceback == ""


def test_handled_exception_is_not_reported() -> None:
    lines = [BEGIN, '  File "a.py", line 3', "KeyError: 'label'", *[f"step {number}" for number in range(30)]]
    assert failure_report(FAILED, lines).detail == ""
    ignored = ["Exception ignored in: <function Pool.__del__ at 0x7>", BEGIN, '  File "a.py", line 3', "OSError: closed"]
    assert failure_report(FAILED, ignored).detail == ""


def test_original_exception_of_child_processes_and_workers_is_reported() -> None:
    spawned = [
        BEGIN, '  File "main.py", line 9', "torch.multiprocessing.spawn.ProcessRaisedException: ", "",
        "-- Process 1 terminated with the following error:", BEGIN, '  File "main.py", line 4', "ValueError: bad label",
    ]  # fmt: skip
    assert failure_report(FAILED, spawned).detail == "ValueError: bad label"
    worker = [
        BEGIN, '  File "main.py", line 9', "KeyError: Caught KeyError in DataLoader worker process 0.",
        "Original Traceback (most recent call last):", '  File "data.py", line 4', "KeyError: 'cat'", "",
    ]  # fmt: skip
    failure = failure_report(FAILED, worker)
    assert (failure.detail, failure.traceback) == ("KeyError: 'cat'", "\n".join(worker[:-1]))
    group = [
        "  + Exception Group " + BEGIN, '  |   File "main.py", line 9', "  | ExceptionGroup: two of them (2 sub-exceptions)",
        "  +-+---------------- 1 ----------------", "    | ValueError: bad label", "    +------------------------------------",
    ]  # fmt: skip
    assert failure_report(FAILED, group).detail == "ExceptionGroup: two of them (2 sub-exceptions)"
    lost = [line.replace("ValueError: bad label", "RuntimeError: Connection closed by peer") for line in group]
    assert failure_report(FAILED, lost).is_symptom
    assert not failure_report(FAILED, [*lost[:-1], *group[-2:]]).is_symptom


def test_a_long_traceback_is_shortened_in_its_middle() -> None:
    (one,) = printed_exceptions(
        [BEGIN, *[f'  File "a.py", line {number}' for number in range(500)], "RecursionError: too deep"]
    )
    shown = one.traceback.splitlines()
    assert len(shown) == 101
    assert (shown[0], shown[50], shown[-1]) == (BEGIN, "… 402 lines left out …", "RecursionError: too deep")


@pytest.mark.parametrize(
    "line", ["[" + "a" * 200_000, "[a" + "1" * 200_000, " " * 200_000, "E1122 " + "1" * 200_000, f"{'=' * 9}\n", "x." * 100_000]
)
def test_long_lines_are_parsed_quickly(line: str) -> None:
    lines = [BEGIN, line, line, "Root Cause (first observed failure):", line, " " * 100_000 + "rank  : 1"]
    assert failure_report(FAILED, lines).rank == ""
    assert without_launcher(lines)


@pytest.mark.parametrize("version", VERSIONS)
def test_ranks_with_separate_output_need_no_labels(version: str) -> None:
    """Two ranks raise at the same moment. The rank of each line is known, so their order does not matter."""
    one = [PrintedLine.of(line, 1) for line in (BEGIN, '  File "a.py", line 3', "ConnectionError: Connection closed by peer")]
    two = [PrintedLine.of(line, 0) for line in (BEGIN, '  File "a.py", line 7', "KeyError: 'label'")]
    mixed = [line for pair in zip(one, two, strict=True) for line in pair]
    report = [line.replace("exitcode  : -15", "exitcode  : 1") for line in output(version, "killed.bare")]
    report = [line.replace("exitcode  : -9", "exitcode  : 1") for line in report]
    failure = failure_report(FAILED, [*mixed, *report])
    if version == "2.13":  # 2.6 reports the first rank only
        assert (failure.rank, failure.detail, failure.is_symptom) == ("0", "KeyError: 'label'", False)
        assert failure.traceback == f"{BEGIN}\n  File \"a.py\", line 7\nKeyError: 'label'"
    else:
        assert (failure.rank, failure.is_symptom) == ("1", True)
    assert not failure.has_joined
    assert failure_report(FAILED, mixed).rank == "0"


def test_colors_and_control_characters_are_ignored() -> None:
    colored = [
        BEGIN, '  File \x1b[35m"a.py"\x1b[0m, line \x1b[35m3\x1b[0m, in \x1b[35m<module>\x1b[0m',
        "\x1b[1;35mKeyError\x1b[0m: \x1b[35m'la\x07bel'\x1b[0m",
    ]  # fmt: skip
    failure = failure_report(FAILED, colored)
    assert failure.detail == "KeyError: 'la bel'"
    assert '  File "a.py", line 3, in <module>' in failure.traceback
    assert failure_report(
        End(ended_at=1.0, error={"message": {"message": "ValueError: \x1b]0;title\x07bad"}}), ()
    ).detail.isprintable()


@pytest.mark.parametrize(
    ("message", "detail"),
    [
        ("\x1b[31mValueError\x1b[0m: bad label", "ValueError: bad label"),
        ("ValueError: \x1b]0;title\x07bad\x9b label", "ValueError: bad  label"),
        ("\u202eValueError: bad label\t\u2066", "ValueError: bad label"),
    ],
)
def test_control_characters_are_removed_from_the_detail(message: str, detail: str) -> None:
    report = failure_report(_end(message={"message": message, "extraInfo": EXTRA}), ())
    assert report.detail == detail == plain(message).strip()
