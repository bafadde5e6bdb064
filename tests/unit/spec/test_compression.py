"""Archives are compressed on several cores: the same bytes everywhere, and no error is lost."""

from __future__ import annotations

import gzip
import hashlib
import io
import os

import pytest

from distflow.spec.compression import ParallelGzip

BLOCKS = [os.urandom(1000) + bytes([number]) * 100_000 for number in range(40)]


def _pack(level: int, sink: io.BytesIO, blocks: int = len(BLOCKS)) -> tuple[bytes, str]:
    with ParallelGzip(sink, level) as packed:
        for block in BLOCKS[:blocks]:
            packed.write(block)
    return sink.getvalue(), packed.digest


@pytest.mark.parametrize("level", [0, 3])
def test_the_result_does_not_depend_on_the_number_of_cores(monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    data, digest = _pack(level, io.BytesIO())
    assert gzip.decompress(data) == b"".join(BLOCKS)
    assert digest == hashlib.sha256(data).hexdigest()
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert _pack(level, io.BytesIO()) == (data, digest)


class _FullDisk(io.BytesIO):
    tries = 0

    def write(self, data: object) -> int:
        self.tries += 1
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("blocks", [1, len(BLOCKS)])
def test_a_full_disk_is_an_error_and_is_not_written_again(blocks: int) -> None:
    sink = _FullDisk()
    with pytest.raises(OSError, match="No space left"):
        _pack(3, sink, blocks)
    assert sink.tries == 1
