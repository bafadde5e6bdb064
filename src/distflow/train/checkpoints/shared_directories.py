"""Directories of one name that may be several: which ranks see the same one, and bringing files from one to the others."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from distflow.train.checkpoints.manifest import sync_file
from distflow.train.communication.votes import from_all, from_first

__all__ = ["Places", "find_places"]

_CHUNK = 16 << 20


class Places:
    """Who sees the same directory: one place for all ranks, or one for each machine or task."""

    def __init__(self, holders: Sequence[int]) -> None:
        """``holders``: for each rank the lowest one that sees the same directory as it does."""
        self.holders = tuple(holders)
        self.is_one = len(set(holders)) == 1
        """Whether all ranks see the same directory."""
        self._rank = dist.get_rank()
        self.holder = holders[self._rank]
        """The rank that does for this rank's place what is done once."""
        self.is_holder = self.holder == self._rank
        """Whether this rank does so."""

    def share(self, names: Collection[str]) -> list[str]:
        """Return this rank's part of files that the ranks of a place check together."""
        mates = [rank for rank, holder in enumerate(self.holders) if holder == self.holder]
        return sorted(names)[mates.index(self._rank) :: len(mates)]

    def spread(
        self, source: Path, target: Path, parts: Mapping[int, Mapping[str, int]], holders: Collection[int],
        group: dist.ProcessGroup | None,
    ) -> None:  # fmt: skip
        """Write files of some ranks below ``target`` in the other places of ``holders``. Collective.

        ``parts``: by rank, the names and sizes in bytes of the files that it has in ``source``. Raises ``OSError`` when this
        rank cannot read or write, after it has taken part to the end: the others wait for nothing.
        """
        failed: OSError | None = None
        for owner, sizes in sorted(parts.items()):
            writes = self._rank in holders and self.holders[owner] != self._rank
            for name, size in sorted(sizes.items()):
                for offset in range(0, max(size, 1), _CHUNK):
                    piece = torch.zeros(min(_CHUNK, size - offset), dtype=torch.uint8)
                    try:
                        if self._rank == owner and failed is None:
                            _read(source / name, offset, piece)
                    except OSError as error:
                        failed = error
                    if len(piece):
                        dist.broadcast(piece, src=owner, group=group)
                    try:
                        if writes and failed is None:
                            _write(target / name, offset, piece, is_last=offset + _CHUNK >= size)
                    except OSError as error:
                        failed = error
        if failed is not None:
            raise failed


def find_places(directory: Path, group: dist.ProcessGroup | None, together: Callable[[Callable[[], None]], None]) -> Places:
    """Make the directory where it is missing, and find out who sees the same one. Collective.

    ``together`` does something on every rank, and raises on all when it fails on one.
    """
    rank, word = dist.get_rank(), from_first(uuid.uuid4().hex, group)

    def token(number: int) -> Path:
        return directory / f".probe-{word}-{number}"

    def mark() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        token(rank).touch()

    together(mark)
    holders = from_all(next((number for number in range(rank) if token(number).exists()), rank), group)
    token(rank).unlink()
    return Places(holders)


def _read(path: Path, offset: int, piece: torch.Tensor) -> None:
    with path.open("rb") as file:
        file.seek(offset)
        if file.readinto(piece.numpy().data) != len(piece):
            raise OSError(f"{path} became shorter while it was read")


def _write(path: Path, offset: int, piece: torch.Tensor, *, is_last: bool) -> None:
    with path.open("ab" if offset else "wb") as file:
        file.write(piece.numpy().data)
    if is_last:
        sync_file(path)
