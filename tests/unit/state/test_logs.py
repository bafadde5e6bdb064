"""Lines from the mirrored logs: their times, their merging, their end, and following them."""

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


def logged(root: Path, task: str, *reads: tuple[float, bytes]) -> LogSource:
    made = source(root, task)
    write_log(made.folder, reads)
    return made


def shown(lines: object) -> list[tuple[str, float | None, str]]:
    return [(line.task, line.time, line.text) for line in lines]  # type: ignore[attr-defined]


def test_a_line_has_the_time_of_the_read_that_holds_its_first_byte(tmp_path: Path) -> None:
    one = logged(tmp_path, "a", (1.0, b"one\ntwo\nthr"), (2.0, b"ee\nfour\n"), (3.0, b"five\n"))
    times = [(line.time, line.text) for line in read_lines([one])]
    assert times == [(1.0, "one"), (1.0, "two"), (1.0, "three"), (2.0, "four"), (3.0, "five")]


def test_tasks_are_merged_by_time(tmp_path: Path) -> None:
    a = logged(tmp_path, "a", (1.0, b"a1\n"), (3.0, b"a3\na3 again\n"))
    b = logged(tmp_path, "b", (2.0, b"b2\n"), (3.0, b"b3\n"), (4.0, b"b4\n"))
    texts = [line.text for line in read_lines([a, b])]
    assert texts == ["a1", "b2", "a3", "a3 again", "b3", "b4"]


def test_a_clock_that_went_back_reorders_no_task(tmp_path: Path) -> None:
    a = logged(tmp_path, "a", (5.0, b"first\n"), (1.0, b"second\n"))
    b = logged(tmp_path, "b", (4.0, b"other\n"))
    assert shown(read_lines([a, b])) == [("b", 4.0, "other"), ("a", 5.0, "first"), ("a", 1.0, "second")]


def test_lines_without_an_index_have_no_time(tmp_path: Path) -> None:
    one = logged(tmp_path, "a", (1.0, b"x\n"))
    (one.folder / "output.idx").unlink()
    assert shown(read_lines([one])) == [("a", None, "x")]


def test_a_torn_index_record_is_not_read(tmp_path: Path) -> None:
    one = logged(tmp_path, "a", (1.0, b"x\ny\n"))
    with (one.folder / "output.idx").open("ab") as index:
        index.write(struct.pack("<dQ", 2.0, 2)[:9])
    assert [line.time for line in read_lines([one])] == [1.0, 1.0]


def test_an_attempt_without_output_has_no_lines(tmp_path: Path) -> None:
    assert list(read_lines([source(tmp_path, "nobody")])) == []
    assert mirrored_bytes(source(tmp_path, "nobody")) == 0


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"plain\n", "plain"),
        (b"windows\r\n", "windows"),
        (b"no end", "no end"),
        (b"\xff\xfe\n", "\ufffd\ufffd"),
        ("größe 日本\n".encode(), "größe 日本"),
        # A progress bar, as tqdm writes it: what stands there in the end.
        (b"  0%|  |\r 50%|# |\r100%|##|\n", "100%|##|"),
        # A shorter text leaves the rest of a longer one, and padding wipes it.
        (b"downloading\rdone\n", "doneloading"),
        (b"downloading\rdone       \n", "done"),
        (b"half\r", "half"),
        # Lengths say nothing once there are escape sequences: the last state is taken.
        (b"\x1b[31m10 of 200\x1b[0m\r\x1b[K20\n", "20"),
        (b"\r\r\n", ""),
        (b"kept  \n", "kept  "),
        # Other separators of str.splitlines are part of a line.
        ("a\u2028b\x0bc\n".encode(), "a\u2028b\x0bc"),
    ],
)
def test_a_line_is_what_a_terminal_shows_in_the_end(tmp_path: Path, raw: bytes, text: str) -> None:
    assert [line.text for line in read_lines([logged(tmp_path, "a", (1.0, raw))])] == [text]


def test_characters_and_lines_cut_by_a_block_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_BLOCK", 5)
    text = "größe\n\n日本日本\r\nlast"
    one = logged(tmp_path, "a", (1.0, text.encode()))
    assert [line.text for line in read_lines([one])] == ["größe", "", "日本日本", "last"]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 65536])
@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("last", [0, 1, 2, 3, 99])
def test_the_last_lines_are_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, end: bytes, last: int
) -> None:
    monkeypatch.setattr(logs, "_BLOCK", max(block, 16))
    one = logged(tmp_path, "a", (1.0, b"one\n\ntwo\n"), (2.0, b"three\nfour" + end))
    whole = list(read_lines([one]))
    assert list(read_lines([one], last=last)) == (whole[-last:] if last else [])


def test_the_last_lines_are_taken_from_the_merged_stream(tmp_path: Path) -> None:
    a = logged(tmp_path, "a", (1.0, b"a1\n"), (5.0, b"a5\n"), (6.0, b"a6\n"))
    b = logged(tmp_path, "b", (2.0, b"b2\n"), (3.0, b"b3\n"), (4.0, b"b4\n"))
    assert [line.text for line in read_lines([a, b], last=3)] == ["b4", "a5", "a6"]
    assert len(list(read_lines([a, b], last=10**20))) == 6


def test_the_end_of_a_huge_log_is_found_without_reading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = logged(tmp_path, "a", (1.0, b"begin\n"))
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


def test_the_times_of_the_last_lines_are_searched_not_counted(tmp_path: Path) -> None:
    one = logged(tmp_path, "a", *((float(number), b"%d\n" % number) for number in range(20000)))
    assert [(line.time, line.text) for line in read_lines([one], last=2)] == [(19998.0, "19998"), (19999.0, "19999")]


def test_an_endless_line_is_given_in_pieces_and_a_progress_bar_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_BLOCK", 64)
    monkeypatch.setattr(logs, "_LONGEST_LINE", 256)
    endless = logged(tmp_path, "endless", (1.0, b"x" * 1000 + b"\n"))
    pieces = [line.text for line in read_lines([endless])]
    assert "".join(pieces) == "x" * 1000
    assert max(map(len, pieces)) <= 256 + 64
    bar = logged(tmp_path, "bar", (1.0, b"".join(b"\r%5d of 99999" % number for number in range(1000)) + b"\n"))
    assert [line.text for line in read_lines([bar])] == ["  999 of 99999"]


class Follower:
    """Follows logs with steps in place of waiting: one is taken at each wait, and after the last it is over."""

    def __init__(self, sources: list[LogSource], *steps: Callable[[], object], last: int | None = None) -> None:
        self.waits = 0
        self.seen: list[list[str]] = [[]]
        self._steps = list(steps)
        self._over = not steps
        for line in follow_lines(lambda: sources, wait=self._wait, is_over=lambda: self._over, last=last):
            self.seen[-1].append(line.text)

    def _wait(self, seconds: float) -> None:
        assert 0 < seconds < 1
        self.waits += 1
        self._steps.pop(0)()
        self._over = not self._steps
        self.seen.append([])


def test_new_lines_are_followed_until_it_is_over(tmp_path: Path) -> None:
    a, b = logged(tmp_path, "a", (1.0, b"a1\na2 be")), source(tmp_path, "b")
    follower = Follower(
        [a, b],
        lambda: write_log(a.folder, [(2.0, b"gins\n")]),
        lambda: write_log(b.folder, [(2.5, b"b1\n")]),
        lambda: None,
        lambda: write_log(a.folder, [(3.0, b"a3 without an end")]),
    )
    assert follower.seen == [["a1"], ["a2 begins"], ["b1"], [], ["a3 without an end"]]


def test_following_begins_with_the_last_lines_of_the_merged_stream(tmp_path: Path) -> None:
    a, b = logged(tmp_path, "a", (1.0, b"a1\n"), (4.0, b"a4\n")), logged(tmp_path, "b", (2.0, b"b2\nb2 again\n"))
    follower = Follower([a, b], lambda: write_log(b.folder, [(5.0, b"b5\nb6\n")]), last=2)
    assert follower.seen == [["b2 again", "a4"], ["b5", "b6"]]


def test_an_attempt_that_begins_later_is_followed_from_its_first_line(tmp_path: Path) -> None:
    sources = [logged(tmp_path, "a", (1.0, b"a1\na2\n"))]

    def begin() -> None:
        retry = source(tmp_path, "a", attempt=1)
        write_log(retry.folder, [(2.0, b"again 1\nagain 2\n")])
        sources.append(retry)

    assert Follower(sources, begin, last=1).seen == [["a2"], ["again 1", "again 2"]]


def test_text_waits_one_poll_for_its_time(tmp_path: Path) -> None:
    """The mirror brings the text and its times one after the other."""
    one = logged(tmp_path, "a", (1.0, b"one\n"))
    index = one.folder / "output.idx"
    late = struct.pack("<dQ", 2.0, 4)

    def text_alone() -> None:
        with (one.folder / "output.log").open("ab") as log:
            log.write(b"two\n")

    steps: Iterator[Callable[[], object]] = iter(
        [text_alone, lambda: index.write_bytes(index.read_bytes() + late), lambda: None]
    )
    taken: list[LogLine] = []
    left = 3

    def wait(_: float) -> None:
        nonlocal left
        left -= 1
        next(steps)()

    taken.extend(follow_lines(lambda: [one], wait=wait, is_over=lambda: left == 0))
    assert [(line.time, line.text) for line in taken] == [(1.0, "one"), (2.0, "two")]


def test_text_without_a_time_is_shown_after_a_poll(tmp_path: Path) -> None:
    one = source(tmp_path, "a")
    one.folder.mkdir(parents=True)
    (one.folder / "output.log").write_bytes(b"one\n")
    assert Follower([one], lambda: None, lambda: None).seen == [[], ["one"], []]


def ranked(root: Path, *reads: tuple[int | None, bytes], folder: str = "a") -> LogSource:
    """Mirror what ranks printed, each read with its rank; its time is its number."""
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


def by_rank(lines: Iterable[LogLine]) -> list[tuple[int | None, str]]:
    return [(line.rank, line.text) for line in lines]


def test_lines_of_ranks_stay_whole_whatever_others_print_between(tmp_path: Path) -> None:
    one = ranked(
        tmp_path, (None, b"torchrun\n"), (3, b" 10%\r"), (4, b"four\nhalf "), (3, b" 20%\r 30%\n"), (None, b"x"), (4, b"line\n")
    )
    expected = [(None, "torchrun"), (4, "four"), (3, " 30%"), (4, "half line"), (None, "x")]
    assert by_rank(read_lines([one])) == expected


@pytest.mark.parametrize("last", [0, 1, 2, 3, 5, 99])
@pytest.mark.parametrize("rank", [None, 0, 2])
def test_the_last_lines_of_a_rank_are_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, rank: int | None
) -> None:
    monkeypatch.setattr(logs, "_BLOCK", 16)
    reads = [(number % 3, b"rank %d line %d\nrank %d ha" % ((number % 3, number, number % 3))) for number in range(40)]
    one = ranked(tmp_path, *reads)

    def keep(line: LogLine) -> bool:
        return rank is None or line.rank == rank

    whole = by_rank(read_lines([one], keep=keep))
    assert len(whole) > 10
    assert by_rank(read_lines([one], last=last, keep=keep)) == (whole[-last:] if last else [])


def test_a_line_is_not_taken_for_that_of_another_rank_while_it_is_followed(tmp_path: Path) -> None:
    """The text of a rank is here before the record that says whose it is."""
    one = ranked(tmp_path, (0, b"zero\n"))
    index = one.folder / "output.idx"

    def text_alone() -> None:
        with (one.folder / "output.log").open("ab") as log:
            log.write(b"one\n")

    def its_record() -> None:
        index.write_bytes(index.read_bytes() + struct.pack("<dQ", 1.0, 2 << 48 | 5))

    def nothing() -> None:
        """Look again."""

    steps = iter([nothing, text_alone, its_record, nothing, nothing, nothing, nothing])
    left = 7

    def wait(_: float) -> None:
        nonlocal left
        left -= 1
        next(steps)()

    lines = by_rank(follow_lines(lambda: [one], wait=wait, is_over=lambda: left == 0))
    assert lines == [(0, "zero"), (1, "one")]


def test_output_that_was_not_kept_is_a_line_of_its_own(tmp_path: Path) -> None:
    one = logged(tmp_path, "a", (1.0, b"one\ntwo\n"))
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
    # What is followed from the middle knows the lines before it, too.
    assert [line.text for line in read_lines([one], last=4)] == ["two", gap.text, "tail", "end"]


def test_only_a_bounded_end_is_read_for_causes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = logged(tmp_path, "a", (1.0, b"begin\n"))
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
    one = ranked(tmp_path, (0, b"begin\n"))
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
    looks = iter([False, False, True])
    lines = list(follow_lines(lambda: [one], wait=lambda _: None, is_over=lambda: next(looks), last=2))
    # The newest line waits for one look more: its text might have come before the record of another rank.
    assert by_rank(lines) == [(1, "line"), (0, "line"), (1, "line")]
    assert read < 1 << 20


def test_output_behind_a_gap_is_refused(tmp_path: Path) -> None:
    # A sparse file of terabytes costs a node one message, and whoever reads the log days.
    mirror, attempt = Mirror(tmp_path), "0" * 32 + "/g/t/0"
    mirror.write(attempt, "output.log", 0, b"one\n")
    with pytest.raises(ValueError, match="has 4 bytes here, but the next data starts at 1000000000000"):
        mirror.write(attempt, "output.log", 10**12, b"x")
    mirror.write(attempt, "output.log", 2, b"e\ntwo\n")
    assert (tmp_path / attempt / "output.log").read_bytes() == b"one\ntwo\n"
