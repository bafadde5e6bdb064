"""Names of the files that hold an attempt's output: the head of the log, the segments of its tail, and the resource samples.

The log is one stream of bytes. ``output.log`` holds its beginning. When that file is full, segments follow. The name
``output-<offset>-<lines>.log`` contains the offset of the segment's first byte and the number of lines before it. Only the
newest segments are kept, and their names show how much was dropped. Each file of the log has an index of the same name that
ends in ``.idx``. ``output.samples`` holds the use of CPU, memory, network, disk and GPUs (``runtime.guard.sampler``).
"""

from __future__ import annotations

import os

from distflow.protocol.light_typing import List, NamedTuple, Optional, Union

__all__ = [
    "INDEX",
    "KEPT",
    "LOG",
    "SAMPLES",
    "LogSegment",
    "end_of",
    "is_output",
    "next_of",
    "parse",
    "segment_bytes",
    "segments",
    "surplus",
]

LOG = "output.log"
INDEX = "output.idx"
SAMPLES = "output.samples"
KEPT = 5
"""Number of segments of the tail that are kept."""
_DIGITS = 18
"""Maximum number of digits of each number in a name."""


class LogSegment(NamedTuple):
    """One file of the log or of its index, or the file of samples."""

    start: int
    """Offset of its first byte in the whole output; 0 for the head."""
    lines: int
    """Number of line feeds before it."""
    kind: str
    """``log``, ``idx`` or ``samples``."""

    @property
    def name(self) -> str:
        """The file's name."""
        return "output-{}-{}.{}".format(*self) if self.start else "output." + self.kind


def parse(name: str) -> Optional[LogSegment]:
    """Parse the name of an output file; None for other files."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("output") or kind not in ("log", "idx", "samples"):
        return None
    numbers = stem.split("-")[1:] or ["0", "0"]
    if len(numbers) != 2 or not all(one.isascii() and one.isdigit() and len(one) <= _DIGITS for one in numbers):
        return None
    segment = LogSegment(int(numbers[0]), int(numbers[1]), kind)
    return segment if name == (segment.name if kind != "samples" else SAMPLES) else None


def is_output(name: str) -> bool:
    """Return whether ``name`` is the name of an output file."""
    return parse(name) is not None


def segments(place: Union[int, str], kind: str) -> List[LogSegment]:
    """Return the files of one kind in a directory (a path or a descriptor), in order; empty if it cannot be read."""
    try:
        found = [parse(name) for name in os.listdir(place)]
    except OSError:
        return []
    return sorted(one for one in found if one is not None and one.kind == kind)


def next_of(place: Union[int, str], segment: LogSegment) -> Optional[LogSegment]:
    """Return the first file after ``segment``; None if it is the last."""
    return next((one for one in segments(place, segment.kind) if one.start > segment.start), None)


def surplus(found: List[LogSegment]) -> List[LogSegment]:
    """Return the segments to remove. ``found`` are all files of one kind, in order."""
    return [one for one in found if one.start][:-KEPT]


def segment_bytes(segment: LogSegment, max_log: int) -> int:
    """Return how many bytes a file may have: half of ``max_log`` is for the head, the other half for the kept segments."""
    return max(1, max_log // 2 // (KEPT if segment.start else 1))


def end_of(directory: str) -> int:
    """Return how many bytes of output are or were in the attempt's log, including bytes of removed segments."""
    found = segments(directory, "log")
    if not found:
        return 0
    try:
        return found[-1].start + os.stat(os.path.join(directory, found[-1].name)).st_size
    except OSError:
        return found[-1].start
