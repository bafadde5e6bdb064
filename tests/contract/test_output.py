"""Output on a node: separated by rank, limited in size, and mirrored without gaps."""

from __future__ import annotations

import base64
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from contract.conftest import EVERY_TRANSPORT, LOCAL_TRANSPORT
from distflow.state.logs import LogLine, LogSource, mirrored_bytes, read_lines
from distflow.state.mirror import Mirror
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from contract.conftest import NodeUnderTest

pytestmark = LOCAL_TRANSPORT

PYTHON = sys.executable

LAUNCHER = """
import os, subprocess, sys
own = os.environ.get("PYTHON_EXEC", sys.executable)
print("launcher begins", flush=True)
workers = [
    subprocess.Popen([own, "-u", "-c", sys.argv[1]], env={**os.environ, "RANK": str(rank)}) for rank in range(4, 6)
]
codes = [worker.wait() for worker in workers]
print("launcher ends", codes, flush=True)
"""
"""A launcher that starts its workers as torchrun does."""


def lines_of(node: NodeUnderTest, attempt: str) -> list[LogLine]:
    """Read the output on the node, in the way in which the mirror is read."""
    return list(read_lines([LogSource("t", 0, node.directory(attempt))]))


def texts(lines: list[LogLine], rank: int | None) -> list[str]:
    return [line.text for line in lines if line.rank == rank]


def test_output_of_a_launchers_ranks_is_separated_byte_by_byte(node: NodeUnderTest) -> None:
    worker = r"""
import os, sys
rank = os.environ["RANK"]
for number in range(200):
    print("rank", rank, "line", number)
    print("rank", rank, "error", number, file=sys.stderr)
os.write(1, b"bar 1\rbar 2\rbar 3\n[rank9]: \xff own words\n")
os.write(2, b"no end of " + rank.encode())
os.kill(os.getpid(), 9)
"""
    link = node.connect()
    attempt = node.start(link, [PYTHON, "-c", LAUNCHER, worker], ranks=[4, 2])
    node.await_end(attempt)
    lines = lines_of(node, attempt)
    for rank in (4, 5):
        printed = [text for n in range(200) for text in (f"rank {rank} line {n}", f"rank {rank} error {n}")]
        assert texts(lines, rank) == [*printed, "bar 3", "[rank9]: \ufffd own words", f"no end of {rank}"]
    assert texts(lines, None) == ["launcher begins", "launcher ends [-9, -9]"]
    raw = (node.directory(attempt) / "output.log").read_bytes()
    assert raw.count(b"bar 1\rbar 2\rbar 3\n[rank9]: \xff own words\n") == 2


def test_redirected_output_of_ranks_goes_to_its_file(node: NodeUnderTest) -> None:
    link = node.connect()
    script = f'{PYTHON} -c "$0" "$1" > only.txt; cat only.txt'
    # Use one `write` for each line, because the unbuffered `print` of two ranks could mix lines in the file.
    worker = 'import os, sys; os.write(1, b"out %s\\n" % os.environb[b"RANK"]); print("err", file=sys.stderr)'
    attempt = node.start(link, ["sh", "-c", script, LAUNCHER, worker], ranks=[4, 2])
    node.await_end(attempt)
    lines = lines_of(node, attempt)
    assert sorted(texts(lines, None)) == ["launcher begins", "launcher ends [0, 0]", "out 4", "out 5"]
    assert (texts(lines, 4), texts(lines, 5)) == (["err"], ["err"])


def test_the_last_output_of_ranks_survives_their_keeper(node: NodeUnderTest) -> None:
    worker = 'import os, sys, time; os.write(1, b"said\\nhalf of a line"); time.sleep(60)'
    link = node.connect()
    attempt = node.start(link, [PYTHON, "-c", LAUNCHER, worker], ranks=[4, 2])
    wait_until(lambda: (node.directory(attempt) / "output.log").read_bytes().count(b"half of a line") == 2)
    os.kill(node.state(attempt)["keeper"]["pid"], signal.SIGKILL)
    assert node.await_end(attempt)["reason"] == "keeper_died"
    lines = lines_of(node, attempt)
    assert texts(lines, 4) == texts(lines, 5) == ["said", "half of a line"]


def test_secrets_of_ranks_are_masked_wherever_they_are_cut(node: NodeUnderTest) -> None:
    worker = (
        'import os, time; s = os.environ["TOKEN"]; os.write(1, b"a " + s[:5].encode()); os.write(1, s[5:].encode() + b" z\\n")'
    )
    link = node.connect()
    secret = {"TOKEN": "swordfish-4711"}
    attempt = node.start(link, [PYTHON, "-c", LAUNCHER, worker], ranks=[4, 2], secret_env=secret)
    node.await_end(attempt)
    lines = lines_of(node, attempt)
    assert texts(lines, 4) == texts(lines, 5) == ["a ******** z"]


def test_a_limited_log_keeps_its_beginning_and_its_end_and_counts_the_rest(node: NodeUnderTest) -> None:
    count = 400_000
    link = node.connect()
    attempt = node.start(
        link, [PYTHON, "-c", f"for n in range({count}): print('line', n, flush=n > {count - 5})"], max_log=1 << 20
    )
    end = node.await_end(attempt, 60)
    lines = lines_of(node, attempt)
    gaps = [number for number, line in enumerate(lines) if line.dropped]
    assert len(gaps) == 1
    gap = lines[gaps[0]]
    head, tail = [line.text for line in lines[: gaps[0]]], [line.text for line in lines[gaps[0] + 1 :]]
    assert head == [f"line {number}" for number in range(len(head))]
    assert tail == [f"line {number}" for number in range(count - len(tail), count)]
    sizes = [path.stat().st_size for path in node.directory(attempt).glob("output*.log")]
    assert 0.8 * (1 << 20) < sum(sizes) <= 1 << 20
    assert end["output_bytes"] == sum(sizes) + gap.dropped == sum(len(f"line {number}\n") for number in range(count))
    assert f"{gap.dropped:,} bytes in {count - len(head) - len(tail):,} lines" in gap.text


def test_an_index_has_the_same_limit_as_its_log(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.start(link, [PYTHON, "-c", "import os\nfor n in range(60000): os.write(1, b'x')\n"], max_log=1 << 18)
    node.await_end(attempt, 120)
    assert sum(path.stat().st_size for path in node.directory(attempt).glob("output*.idx")) <= 1 << 18


class MirrorSession:
    """A connection that mirrors one attempt, as the supervisor does."""

    def __init__(self, node: NodeUnderTest, attempt: str, mirror: Mirror) -> None:
        self.ended: set[int] = set()
        self.bytes = 0
        self._mirror, self._attempt, self._node = mirror, attempt, node
        self._event_count = len(node.events)
        self.link = node.connect()
        for stream, kind in enumerate(("idx", "log")):
            file, offset = mirror.resume_position(attempt, kind)
            self.link.request("tail", stream=stream, attempt=attempt, file=file, offset=offset)

    def take(self) -> bool:
        """Store the received output, and return whether it is complete."""
        events = self._node.events[self._event_count :]
        self._event_count += len(events)  # a thread may have added more events meanwhile
        for event in events:
            if event["event"] == "data":
                data = base64.b64decode(event["data"])
                self._mirror.write(self._attempt, event["file"], event["offset"], data)
                self.bytes += len(data)
                self.link.credit(event["stream"], len(data))
            elif event["event"] == "eof":
                self.ended.add(event["stream"])
        return self.ended == {0, 1}


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "go"
    yield path
    path.touch()


def test_a_mirror_resumes_even_at_an_offset_that_was_dropped(node: NodeUnderTest, tmp_path: Path, gate: Path) -> None:
    script = f"""
import os, time
def say(first, last):
    for n in range(first, last):
        print("line", n)
    print(end="", flush=True)
say(0, 90_000)
while not os.path.exists({str(gate)!r}):
    time.sleep(0.01)
say(90_000, 300_000)
"""
    mirror = Mirror(tmp_path / "mirror")
    link = node.connect()
    attempt = node.start(link, [PYTHON, "-c", script], max_log=1 << 20)
    source = LogSource("t", 0, tmp_path / "mirror" / attempt)
    first = MirrorSession(node, attempt, mirror)
    total = sum(len(f"line {number}\n") for number in range(90_000))
    wait_until(lambda: first.take() or mirrored_bytes(source) == total, 30)
    first.link.close()
    before = list(read_lines([source]))
    assert before[-1].text == "line 89999"
    gate.touch()
    node.await_end(attempt, 60)
    second = MirrorSession(node, attempt, mirror)
    wait_until(second.take, 30)
    lines, node_lines = list(read_lines([source])), lines_of(node, attempt)
    assert lines[-1].text == "line 299999"
    assert sum(line.dropped for line in lines) + sum(
        len(line.text) + 1 for line in lines if not line.dropped
    ) == mirrored_bytes(source)
    assert sum(path.stat().st_size for path in source.folder.glob("output*.log")) <= 1 << 20
    # The gap is the output that the node dropped meanwhile, and no line is stored twice.
    numbers = [int(line.text.split()[1]) for line in lines if not line.dropped]
    assert numbers == sorted(set(numbers))
    assert [line.text for line in node_lines][-1000:] == [line.text for line in lines][-1000:]


@EVERY_TRANSPORT
def test_an_interrupted_mirror_becomes_complete(node: NodeUnderTest, tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "mirror")
    link = node.connect()
    attempt = node.start(link, [PYTHON, "-c", "for n in range(100000): print('line', n)"], max_log=1 << 30)
    node.await_end(attempt, 60)
    first = MirrorSession(node, attempt, mirror)
    wait_until(lambda: first.take() or first.bytes > 200_000, 30)
    first.link.close()
    second = MirrorSession(node, attempt, mirror)
    wait_until(second.take, 30)
    for name in ("output.log", "output.idx"):
        assert (tmp_path / "mirror" / attempt / name).read_bytes() == (node.directory(attempt) / name).read_bytes()
