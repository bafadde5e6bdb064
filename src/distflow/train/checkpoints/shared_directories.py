"""Find which ranks see the same directory at a path, and copy files between different directories."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from distflow.train.checkpoints.manifest import sync_file
from distflow.train.communication.votes import from_all, from_first

__all__ = ["RankDirectories", "find_directories"]

_CHUNK = 16 << 20


class RankDirectories:
    """The directories that ranks see at a path: one for all of them, or one for each machine or task."""

    def __init__(self, holders: Sequence[int]) -> None:
        """``holders``: for each rank, the lowest rank that sees the same directory."""
        self.holders = tuple(holders)
        self.is_one = len(set(holders)) == 1
        """Whether all ranks see the same directory."""
        self._rank = dist.get_rank()
        self.holder = holders[self._rank]
        """The rank that creates, publishes and removes checkpoints in this rank's directory."""
        self.is_holder = self.holder == self._rank

    def files_to_check(self, names: Collection[str]) -> list[str]:
        """Return the files that this rank checks, when all ranks with the same directory share the work."""
        ranks_of_directory = [rank for rank, holder in enumerate(self.holders) if holder == self.holder]
        return sorted(names)[ranks_of_directory.index(self._rank) :: len(ranks_of_directory)]

    def copy_files(
        self, source: Path, target: Path, parts: Mapping[int, Mapping[str, int]], writers: Collection[int],
        group: dist.ProcessGroup | None,
    ) -> None:  # fmt: skip
        """Copy files between directories. All ranks must call this.

        ``parts`` maps each owner, a rank that reads the files from its ``source``, to their names and sizes (bytes). The ranks
        ``writers``, which are holders of their directories, write them to ``target``, except for the holder of the owner's
        directory, which has them. If this rank cannot read or write, it raises ``OSError`` only after the last broadcast, so
        that the other ranks do not wait for it.
        """
        failed: OSError | None = None
        for owner, sizes in sorted(parts.items()):
            writes = self._rank in writers and self.holders[owner] != self._rank
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


def find_directories(
    directory: Path, group: dist.ProcessGroup | None, together: Callable[[Callable[[], None]], None]
) -> RankDirectories:
    """Create the directory if it is missing, and find which ranks see the same one. Collective.

    ``together`` calls a function on every rank, and raises on all ranks if it fails on one.
    """
    rank, run_id = dist.get_rank(), from_first(uuid.uuid4().hex, group)

    def probe(number: int) -> Path:
        return directory / f".probe-{run_id}-{number}"

    def mark() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        probe(rank).touch()

    together(mark)
    holders = from_all(next((number for number in range(rank) if probe(number).exists()), rank), group)
    probe(rank).unlink()
    return RankDirectories(holders)


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
