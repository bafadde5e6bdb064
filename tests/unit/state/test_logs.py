"""Lines of mirrored logs: their times, order, ranks and gaps, the last lines, and following a log."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from distflow.state import logs
from distflow.state.logs import LogLine, LogSource, end_lines, follow_lines, mirrored_bytes, read_lines
from distflow.state.mirror import Mirror
from unit.state.stored import write_log


def source(root: Path, task: str, attempt: int = 0) -> LogSource:
    return LogSource(task, attempt, root / task / str(attempt))


def write_source(root: Path, task: str, *reads: tuple[float, bytes]) -> LogSource:
    made = source(root, task)
    write_log(made.folder, reads)
    return made


def fields(lines: object) -> list[tuple[str, float | None, str]]:
    return [(line.task, line.time, line.text) for line in lines]  # type: ignore[attr-defined]


def test_a_line_has_the_time_of_the_read_that_holds_its_first_byte(tmp_path: Path) -> None:
    one = write_source(tmp_path, "a", (1.0, b"one\ntwo\nthr"), (2.0, b"ee\nfour\n"), (3.0, b"five\n"))
    times = [(line.time, line.text) for line in read_lines([one])]
    assert times == [(1.0, "one"), (1.0, "two"), (1.0, "three"), (2.0, "four"), (3.0, "five")]


def test_tasks_are_merged_by_time(tmp_path: Path) -> None:
    a = write_source(tmp_path, "a", (1.0, b"a1\n"), (3.0, b"a3\na3 again\n"))
    b = write_source(tmp_path, "b", (2.0, b"b2\n"), (3.0, b"b3\n"), (4.0, b"b4\n"))
    texts = [line.text for line in read_lines([a, b])]
    assert texts == ["a1", "b2", "a3", "a3 again", "b3", "b4"]


def test_a_clock_that_was_set_back_does_not_reorder_the_lines_of_a_task(tmp_path: Path) -> None:
    a = write_source(tmp_path, "a", (5.0, b"first\n"), (1.0, b"second\n"))
    b = write_source(tmp_path, "b", (4.0, b"other\n"))
    assert fields(read_lines([a, b])) == [("b", 4.0, "other"), ("a", 5.0, "first"), ("a", 1.0, "second")]


def test_lines_without_an_index_have_no_time(tmp_path: Path) -> None:
    one = write_source(tmp_path, "a", (1.0, b"x\n"))
    (one.folder / "output.idx").unlink()
    assert fields(read_lines([one])) == [("a", None, "x")]


def test_an_incomplete_index_record_is_ignored(tmp_path: Path) -> None:
    one = write_source(tmp_path, "a", (1.0, b"x\ny\n"))
    with (one.folder / "output.idx").open("ab") as index:
        index.write(struct.pack("<dQ", 2.0, 2)[:9])
    assert [line.time for line in read_lines([one])] == [1.0, 1.0]


def test_an_attempt_without_output_has_no_lines(tmp_path: Path) -> None:
    assert list(read_lines([source(tmp_path, "silent")])) == []
    assert mirrored_bytes(source(tmp_path, "silent")) == 0


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"plain\n", "plain"),
        (b"windows\r\n", "windows"),
        (b"no end", "no end"),
        (b"\xff\xfe\n", "\ufffd\ufffd"),
        ("größe 日本\n".encode(), "größe 日本"),
        # A progress bar of tqdm: each state overwrites the previous one.
        (b"  0%|  |\r 50%|# |\r100%|##|\n", "100%|##|"),
        # A shorter text leaves the end of a longer one, unless it is padded with spaces.
        (b"downloading\rdone\n", "doneloading"),
        (b"downloading\rdone       \n", "done"),
        (b"half\r", "half"),
        # With escape sequences, the width of a text is unknown: only the last text is shown.
        (b"\x1b[31m10 of 200\x1b[0m\r\x1b[K20\n", "20"),
        (b"\r\r\n", ""),
        (b"kept  \n", "kept  "),
        # Other separators of str.splitlines are part of a line.
        ("a\u2028b\x0bc\n".encode(), "a\u2028b\x0bc"),
    ],
)
def test_a_line_is_the_text_that_a_terminal_shows_last(tmp_path: Path, raw: bytes, text: str) -> None:
    assert [line.text for line in read_lines([write_source(tmp_path, "a", (1.0, raw))])] == [text]


def test_characters_and_lines_across_two_blocks_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_BLOCK", 5)
    text = "größe\n\n日本日本\r\nlast"
    one = write_source(tmp_path, "a", (1.0, text.encode()))
    assert [line.text for line in read_lines([one])] == ["größe", "", "日本日本", "last"]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 65536])
@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("last", [0, 1, 2, 3, 99])
def test_the_last_lines_equal_the_end_of_all_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, end: bytes, last: int
) -> None:
    monkeypatch.setattr(logs, "_BLOCK", max(block, 16))
    one = write_source(tmp_path, "a", (1.0, b"one\n\ntwo\n"), (2.0, b"three\nfour" + end))
    whole = list(read_lines([one]))
    assert list(read_lines([one], last=last)) == (whole[-last:] if last else [])


def test_the_last_lines_are_those_of_all_tasks_together(tmp_path: Path) -> None:
    a = write_source(tmp_path, "a", (1.0, b"a1\n"), (5.0, b"a5\n"), (6.0, b"a6\n"))
    b = write_source(tmp_path, "b", (2.0, b"b2\n"), (3.0, b"b3\n"), (4.0, b"b4\n"))
    assert [line.text for line in read_lines([a, b], last=3)] == ["b4", "a5", "a6"]
    assert len(list(read_lines([a, b], last=10**20))) == 6


def test_the_last_lines_of_a_huge_log_are_found_without_reading_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = write_source(tmp_path, "a", (1.0, b"begin\n"))
    with (one.folder / "output.log").open("r+b") as log:
        log.seek(8 << 30)  # sparse
        log.write(b"\nlast but one\nlast\n")
    read = 0
    real = logs._read

    def counted(path: Path, offset: int, count: int) -> bytes:
        nonlocal read
        data = real(path, offset, count)
        read += len(data)
        return data

    monkeypatch.setattr(logs, "_read", counted)
    assert [line.text for line in read_lines([one], last=2)] == ["last but one", "last"]
    assert read < 1 << 20


def test_the_last_of_many_lines_have_the_right_times(tmp_path: Path) -> None:
    one = write_source(tmp_path, "a", *((float(number), b"%d\n" % number) for number in range(20000)))
    assert [(line.time, line.text) for line in read_lines([one], last=2)] == [(19998.0, "19998"), (19999.0, "19999")]


def test_a_very_long_line_is_split_but_a_progress_bar_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_BLOCK", 64)
    monkeypatch.setattr(logs, "_LONGEST_LINE", 256)
    endless = write_source(tmp_path, "endless", (1.0, b"x" * 1000 + b"\n"))
    pieces = [line.text for line in read_lines([endless])]
    assert "".join(pieces) == "x" * 1000
    assert max(map(len, pieces)) <= 256 + 64
    bar = write_source(tmp_path, "bar", (1.0, b"".join(b"\r%5d of 99999" % number for number in range(1000)) + b"\n"))
    assert [line.text for line in read_lines([bar])] == ["  999 of 99999"]


class Follower:
    """Follow logs, and run the next step at each wait. ``texts`` has the lines that were found before each wait.

    Following ends after the last step.
    """

    def __init__(self, sources: list[LogSource], *steps: Callable[[], object], last: int | None = None) -> None:
        self.waits = 0
        self.texts: list[list[str]] = [[]]
        self._steps = list(steps)
        self._is_over = not steps
        for line in follow_lines(lambda: sources, wait=self._wait, is_over=lambda: self._is_over, last=last):
            self.texts[-1].append(line.text)

    def _wait(self, seconds: float) -> None:
        assert 0 < seconds < 1
        self.waits += 1
        self._steps.pop(0)()
        self._is_over = not self._steps
        self.texts.append([])


def test_new_lines_are_followed_until_the_end(tmp_path: Path) -> None:
    a, b = write_source(tmp_path, "a", (1.0, b"a1\na2 be")), source(tmp_path, "b")
    follower = Follower(
        [a, b],
        lambda: write_log(a.folder, [(2.0, b"gins\n")]),
        lambda: write_log(b.folder, [(2.5, b"b1\n")]),
        lambda: None,
        lambda: write_log(a.folder, [(3.0, b"a3 without an end")]),
    )
    assert follower.texts == [["a1"], ["a2 begins"], ["b1"], [], ["a3 without an end"]]


def test_following_begins_with_the_last_lines_of_all_tasks_together(tmp_path: Path) -> None:
    a, b = write_source(tmp_path, "a", (1.0, b"a1\n"), (4.0, b"a4\n")), write_source(tmp_path, "b", (2.0, b"b2\nb2 again\n"))
    follower = Follower([a, b], lambda: write_log(b.folder, [(5.0, b"b5\nb6\n")]), last=2)
    assert follower.texts == [["b2 again", "a4"], ["b5", "b6"]]


def test_an_attempt_that_begins_later_is_followed_from_its_first_line(tmp_path: Path) -> None:
    sources = [write_source(tmp_path, "a", (1.0, b"a1\na2\n"))]

    def begin() -> None:
        retry = source(tmp_path, "a", attempt=1)
        write_log(retry.folder, [(2.0, b"again 1\nagain 2\n")])
        sources.append(retry)

    assert Follower(sources, begin, last=1).texts == [["a2"], ["again 1", "again 2"]]


def test_a_line_waits_one_poll_for_its_time(tmp_path: Path) -> None:
    """The mirror writes a text before its time."""
    one = write_source(tmp_path, "a", (1.0, b"one\n"))
    index = one.folder / "output.idx"
    record = struct.pack("<dQ", 2.0, 4)

    def write_text() -> None:
        with (one.folder / "output.log").open("ab") as log:
            log.write(b"two\n")

    steps: Iterator[Callable[[], object]] = iter(
        [write_text, lambda: index.write_bytes(index.read_bytes() + record), lambda: None]
    )
    lines: list[LogLine] = []
    remaining = 3

    def wait(_: float) -> None:
        nonlocal remaining
        remaining -= 1
        next(steps)()

    lines.extend(follow_lines(lambda: [one], wait=wait, is_over=lambda: remaining == 0))
    assert [(line.time, line.text) for line in lines] == [(1.0, "one"), (2.0, "two")]


def test_a_line_without_a_time_is_shown_after_one_poll(tmp_path: Path) -> None:
    one = source(tmp_path, "a")
    one.folder.mkdir(parents=True)
    (one.folder / "output.log").write_bytes(b"one\n")
    assert Follower([one], lambda: None, lambda: None).texts == [[], ["one"], []]


def write_ranked_source(root: Path, *reads: tuple[int | None, bytes], folder: str = "a") -> LogSource:
    """Write the mirrored output of ranks. ``reads`` has the rank and the data of each read; its time is its index."""
    made = source(root, folder)
    made.folder.mkdir(parents=True, exist_ok=True)
    log, index = made.folder / "output.log", made.folder / "output.idx"
    for number, (rank, data) in enumerate(reads):
        at = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            file.write(data)
        with index.open("ab") as file:
            file.write(struct.pack("<dQ", float(number), (0 if rank is None else rank + 1) << 48 | at))
    return made


def ranks_and_texts(lines: Iterable[LogLine]) -> list[tuple[int | None, str]]:
    return [(line.rank, line.text) for line in lines]


def test_a_line_of_a_rank_stays_whole_when_other_ranks_print_in_between(tmp_path: Path) -> None:
    one = write_ranked_source(
        tmp_path, (None, b"torchrun\n"), (3, b" 10%\r"), (4, b"four\nhalf "), (3, b" 20%\r 30%\n"), (None, b"x"), (4, b"line\n")
    )
    expected = [(None, "torchrun"), (4, "four"), (3, " 30%"), (4, "half line"), (None, "x")]
    assert ranks_and_texts(read_lines([one])) == expected


@pytest.mark.parametrize("last", [0, 1, 2, 3, 5, 99])
@pytest.mark.parametrize("rank", [None, 0, 2])
def test_the_last_lines_of_a_rank_equal_the_end_of_all_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, rank: int | None
) -> None:
    monkeypatch.setattr(logs, "_BLOCK", 16)
    reads = [(number % 3, b"rank %d line %d\nrank %d ha" % ((number % 3, number, number % 3))) for number in range(40)]
    one = write_ranked_source(tmp_path, *reads)

    def keep(line: LogLine) -> bool:
        return rank is None or line.rank == rank

    whole = ranks_and_texts(read_lines([one], keep=keep))
    assert len(whole) > 10
    assert ranks_and_texts(read_lines([one], last=last, keep=keep)) == (whole[-last:] if last else [])


def test_following_never_assigns_a_line_to_another_rank(tmp_path: Path) -> None:
    """The mirror writes a text before the index record with its rank."""
    one = write_ranked_source(tmp_path, (0, b"zero\n"))
    index = one.folder / "output.idx"

    def write_text() -> None:
        with (one.folder / "output.log").open("ab") as log:
            log.write(b"one\n")

    def write_record() -> None:
        index.write_bytes(index.read_bytes() + struct.pack("<dQ", 1.0, 2 << 48 | 5))

    def nothing() -> None:
        """Only poll again."""

    steps = iter([nothing, write_text, write_record, nothing, nothing, nothing, nothing])
    remaining = 7

    def wait(_: float) -> None:
        nonlocal remaining
        remaining -= 1
        next(steps)()

    lines = ranks_and_texts(follow_lines(lambda: [one], wait=wait, is_over=lambda: remaining == 0))
    assert lines == [(0, "zero"), (1, "one")]


def test_a_gap_in_the_output_is_shown_as_a_separate_line(tmp_path: Path) -> None:
    one = write_source(tmp_path, "a", (1.0, b"one\ntwo\n"))
    for name, data, at in (("output-5008-102", b"tail\n", 5008), ("output-5013-103", b"end\n", 5013)):
        (one.folder / f"{name}.log").write_bytes(data)
        (one.folder / f"{name}.idx").write_bytes(struct.pack("<dQ", 9.0, at))
    found = list(read_lines([one]))
    assert [line.text for line in found if not line.dropped] == ["one", "two", "tail", "end"]
    (gap,) = [line for line in found if line.dropped]
    assert (gap.dropped, gap.time) == (5000, 9.0)
    assert gap.text == "[distflow: 5,000 bytes in 100 lines were not kept here, see `max_log`]"
    assert mirrored_bytes(one) == 5017
    assert [line.text for line in read_lines([one], last=2)] == ["tail", "end"]
    # Reading from the middle of the log also finds the lines before the gap.
    assert [line.text for line in read_lines([one], last=4)] == ["two", gap.text, "tail", "end"]


def test_end_lines_reads_only_the_end_of_a_huge_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write_source(tmp_path, "a", (1.0, b"begin\n"))
    with (one.folder / "output.log").open("r+b") as log:
        log.seek(200 << 20)  # one line of 200 MB
        log.write(b"\nRuntimeError: bad batch 17\n")
    read = 0
    real = logs._read

    def counted(path: Path, offset: int, count: int) -> bytes:
        nonlocal read
        data = real(path, offset, count)
        read += len(data)
        return data

    monkeypatch.setattr(logs, "_read", counted)
    lines = end_lines(one, 300)
    assert [line.text for line in lines] == ["RuntimeError: bad batch 17"]
    assert read < 8 << 20
    with (one.folder / "output.log").open("ab") as more:
        more.write(b"a" + b"x" * (4 << 20) + b"z")
    (line,) = end_lines(one, 300)[-1:]
    assert len(line.text) < 5000
    assert line.text.endswith("z")


def test_following_a_long_log_of_ranks_reads_little_of_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write_ranked_source(tmp_path, (0, b"begin\n"))
    with (one.folder / "output.log").open("ab") as log, (one.folder / "output.idx").open("ab") as index:
        for number in range(50_000):
            index.write(struct.pack("<dQ", float(number), (1 + number % 2) << 48 | log.tell()))
            log.write(b"line\n")
    read = 0
    real = logs._read

    def counted(path: Path, offset: int, count: int) -> bytes:
        nonlocal read
        data = real(path, offset, count)
        read += len(data)
        return data

    monkeypatch.setattr(logs, "_read", counted)
    polls = iter([False, False, True])
    lines = list(follow_lines(lambda: [one], wait=lambda _: None, is_over=lambda: next(polls), last=2))
    # The newest line is shown one poll later, because the index record with its rank might be missing.
    assert ranks_and_texts(lines) == [(1, "line"), (0, "line"), (1, "line")]
    assert read < 1 << 20


def test_the_mirror_refuses_data_after_a_gap(tmp_path: Path) -> None:
    # With one message, a node could otherwise create a sparse file of terabytes, which takes days to read.
    mirror, attempt = Mirror(tmp_path), "0" * 32 + "/g/t/0"
    mirror.write(attempt, "output.log", 0, b"one\n")
    with pytest.raises(ValueError, match="has 4 bytes here, but the next data starts at 1000000000000"):
        mirror.write(attempt, "output.log", 10**12, b"x")
    mirror.write(attempt, "output.log", 2, b"e\ntwo\n")
    assert (tmp_path / attempt / "output.log").read_bytes() == b"one\ntwo\n"
