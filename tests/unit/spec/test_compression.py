"""Archives are compressed on several cores: the same bytes everywhere, and no error is lost."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib

import pytest

from distflow.spec.compression import ParallelGzip

BLOCKS = [os.urandom(1000) + bytes([number]) * 100_000 for number in range(40)]


def _pack(sink: io.BytesIO, blocks: int = len(BLOCKS)) -> tuple[bytes, str]:
    with ParallelGzip(sink) as packed:
        for block in BLOCKS[:blocks]:
            packed.write(block)
    return sink.getvalue(), packed.digest


def test_the_result_does_not_depend_on_the_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    data, digest = _pack(io.BytesIO())
    assert gzip.decompress(data) == b"".join(BLOCKS)
    assert digest == hashlib.sha256(data).hexdigest()
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert _pack(io.BytesIO()) == (data, digest)


def test_only_blocks_that_shrink_are_compressed() -> None:
    for block, level in ((os.urandom(1 << 20), 0), (b"some words " * 95_000, 1), (os.urandom(100), 1), (b"", 1)):
        sink = io.BytesIO()
        with ParallelGzip(sink) as packed:
            packed.write(block)
        packer = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        assert sink.getvalue()[10:-8] == packer.compress(block) + packer.flush()
        assert gzip.decompress(sink.getvalue()) == block


class _FullDisk(io.BytesIO):
    tries = 0

    def write(self, data: object) -> int:
        self.tries += 1
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("blocks", [1, len(BLOCKS)])
def test_after_the_error_of_a_full_disk_nothing_more_is_written(blocks: int) -> None:
    sink = _FullDisk()
    with pytest.raises(OSError, match="No space left"):
        _pack(sink, blocks)
    assert sink.tries == 1
