"""Bringing here what tasks of ended workflows wrote, for workflows that build on them: from their nodes to the blob store."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from distflow.backends.machines.backend import transport_of
from distflow.backends.machines.transfer.fetching import Fetched, fetch_output
from distflow.backends.machines.transfer.pace import Pace
from distflow.cli.bottom import Bottom
from distflow.documents.quantities import bytes_text
from distflow.errors import NodeError, NodeUnreachable
from distflow.pools.model import Pool

__all__ = ["Source", "bring"]

_TRIES = 3
"""Connections that may break one after the other; each goes on where the last one ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a task's output lies."""

    shown: str
    """What people call it, such as ``prepare of train-7``."""
    attempt: str
    """As its node calls it."""
    pool: Pool
    """As it was when it ran there."""
    node: str


def bring(sources: Sequence[Source], blobs: Path) -> list[Fetched]:
    """Fetch every output, and return them in the same order; a terminal is told how far they are.

    Raises ``NodeError`` that names the task of the first that cannot be had.
    """
    bottom = Bottom(sys.stderr)
    blobs.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        # Apart from what the supervisor fetches: it cleans its own up.
        with tempfile.TemporaryDirectory(prefix="incoming-", dir=blobs.parent) as folder:
            fetched = [_fetch(source, Path(folder), bottom) for source in sources]
            for digest in {one.digest for one in fetched}:
                os.replace(Path(folder) / digest, blobs / digest)
            return fetched
    finally:
        bottom.clear()


def _fetch(source: Source, blobs: Path, bottom: Bottom) -> Fetched:
    node = next(node for node in source.pool.nodes if node.name == source.node)
    with closing(transport_of(source.pool, node)) as transport:
        for tries_left in reversed(range(_TRIES)):
            told = _told(source, bottom)
            try:
                return fetch_output(
                    transport, node.root, node.python, source.attempt, blobs,
                    timeout_s=source.pool.connect_timeout_s, progress=told,
                )  # fmt: skip
            except NodeError as error:
                if tries_left and isinstance(error, NodeUnreachable):
                    continue
                words = f"what {source.shown} wrote cannot be fetched: {error.detail}"
                raise NodeError(error.node, words, hint=error.hint) from error
    raise AssertionError("the last try returns or raises")


def _told(source: Source, bottom: Bottom) -> Callable[[bool, int, int], None]:
    pace = Pace()

    def told(is_packed: bool, done: int, total: int) -> None:
        rate = pace.due(done)
        if rate is not None:
            doing = "fetching" if is_packed else "packing"
            share = f"{bytes_text(done)} of {bytes_text(total)}, {bytes_text(rate)}/s"
            bottom.show(f"{doing} what {source.shown} wrote: {share}")

    return told
