"""Atomic checkpoints: ``Checkpoints(directory)``, written and read by all ranks together.

``torch.distributed.checkpoint`` writes each rank's part of the tensors, and loads them on any number of ranks under any
strategy. This module adds a directory that is renamed when all files are on disk, a manifest with sizes and checksums, and
the same outcome on all ranks. They communicate in a separate group, so that saving does not mix with the training's reductions.
"""

from __future__ import annotations

import atexit
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import async_save as save_tensors_later
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.serialization import get_unsafe_globals_in_checkpoint

from distflow.train.checkpoints import manifest as files
from distflow.train.checkpoints.shared_directories import find_directories
from distflow.train.communication.votes import check_votes_allowed, from_all
from distflow.train.launcher.rank import write_exception
from distflow.train.strategies.states import set_training_state, training_state
from distflow.train.world import before_leaving

__all__ = ["CheckpointError", "Checkpoints", "Stateful", "random_state", "set_random_state"]

_Result = TypeVar("_Result")
_EXTRA = "extra.pt"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. After ``train.init``, all ranks raise it; the message names failed ranks."""


class Stateful(Protocol):
    """An object whose state is a dictionary: a ``Loader``, a learning rate scheduler, a gradient scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, strings, tensors, and lists and dictionaries of them."""

    def load_state_dict(self, state: Any, /) -> object:
        """Restore a state."""


class Checkpoints:
    """The checkpoints of one training run, in one directory. Every method is a collective.

    All but ``wait`` raise ``RuntimeError`` inside ``distflow.train.join``. If the path names different directories on different
    machines or tasks, each directory gets all files.
    """

    def __init__(self, directory: str | Path | None = None, *, keep_last: int = 3) -> None:
        """``directory`` defaults to ``DISTFLOW_CHECKPOINT``. ``keep_last`` is the number of checkpoints that a save keeps.

        Warns if the ranks see different directories, unless the directory is the default (a task's ``checkpoint:``). Raises
        ``ValueError``, and ``CheckpointError`` before ``init`` or if a directory cannot be created.
        """
        if not dist.is_initialized():
            raise CheckpointError("this process has not joined its world yet: call distflow.train.init() first")
        name = directory or os.environ.get("DISTFLOW_CHECKPOINT")
        if not name:
            raise ValueError("Checkpoints() has no directory: pass one, or set DISTFLOW_CHECKPOINT")
        if keep_last < 1:
            raise ValueError(f"keep_last={keep_last}: give 1 or more")
        check_votes_allowed()
        self.directory = Path(name)
        self._keep_last = keep_last
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo")
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._directories = find_directories(self.directory, self._group, self._together)
        if directory and not self._directories.is_one and self._rank == 0:
            without = [rank for rank, holder in enumerate(self._directories.holders) if holder != 0]
            warnings.warn(
                f"{self.directory} is not the same directory for rank{'s' * (len(without) > 1)} {', '.join(map(str, without))} "
                "as for rank 0: each directory gets all files; to avoid the copies, use a file system that all machines share",
                stacklevel=2,
            )
        before_leaving(self._leave)
        atexit.register(self._leave_at_exit)

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **others: Stateful) -> None:
        """Write a checkpoint, which is complete and on disk when this returns. It replaces a checkpoint of the same step.

        It contains rank 0's state of each of ``others`` under its name, and the random state of every rank. Raises
        ``CheckpointError`` (earlier checkpoints then remain), ``ValueError`` for a negative step, and ``TypeError`` for LBFGS.
        """
        folder = self._begin(step, others)
        state = training_state(model, optimizer, self._group)
        self._together(lambda: save_tensors(state, storage_writer=FileSystemWriter(folder), process_group=self._group))
        self._finish(step)

    def async_save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **others: Stateful
    ) -> None:
        """Copy the state, and write it while the training continues. Waits for an earlier asynchronous save.

        The save is complete after ``wait()``, the next save or load, ``train.finish()`` or the end of the process. Each of them
        reports its errors.
        """
        folder = self._begin(step, others)
        state = training_state(model, optimizer, self._group)
        writing = save_tensors_later(state, storage_writer=FileSystemWriter(folder), process_group=self._group)

        def write() -> None:
            self._together(writing.result)  # type: ignore[union-attr]
            self._finish(step)

        self._pending = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until an asynchronous save is complete. Raises ``CheckpointError`` if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load_latest(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **others: Stateful) -> int | None:
        """Load the newest complete checkpoint and return its step, or ``None`` if none exists.

        Broken checkpoints are skipped with a warning. The random state is restored only on the same number of ranks. Raises
        ``CheckpointError`` if a complete checkpoint is of another model, or lacks a state of ``others``, and
        ``TypeError`` for LBFGS.
        """
        check_votes_allowed()
        self.wait()

        def find() -> list[int]:
            if not self._directories.is_holder:
                return []
            files.recover(self.directory)
            return files.found_steps(self.directory)

        for step in sorted({step for part in from_all(self._together(find), self._group) for step in part}, reverse=True):
            folder = self.directory / f"step-{step}"
            manifest = self._verify(folder)
            if manifest is not None:
                self._load(folder, manifest, model, optimizer, others)
                return step
        return None

    def _leave(self) -> None:
        """Finish a running save, and release the group, because the group's threads must end before Python does."""
        try:
            self.wait()
        finally:
            self._group = None

    def _leave_at_exit(self) -> None:
        """Exit with 1 if the last asynchronous save failed: an exception at exit does not change the exit code."""
        try:
            self._leave()
        except RuntimeError as error:
            traceback.print_exception(error)
            write_exception(error, rank=self._rank)
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(1)

    # -- writing ------------------------------------------------------------------------------------------------------

    def _begin(self, step: int, others: Mapping[str, Stateful]) -> Path:
        """Create the directory of a checkpoint, with the random states and the states of ``others``."""
        if step < 0:
            raise ValueError(f"step={step}: steps are counted from 0")
        check_votes_allowed()
        self.wait()
        folder = files.unfinished(self.directory, step)

        def make() -> None:
            if self._directories.is_holder:
                self.directory.mkdir(parents=True, exist_ok=True)
                files.clear_unfinished(self.directory)
                folder.mkdir()

        def write() -> None:
            if not folder.is_dir():
                what = f"{folder} was removed while it was being written, perhaps by another run"
                raise FileNotFoundError(f"{what}: give each run its own directory instead of {self.directory}")
            _write(random_state(), folder / _random_name(self._rank))
            if self._rank == 0:
                _write({name: other.state_dict() for name, other in others.items()}, folder / _EXTRA)
                if refused := get_unsafe_globals_in_checkpoint(folder / _EXTRA):
                    raise ValueError(
                        f"the checkpoint of step {step} was not saved, because torch.load(weights_only=True) would refuse it: "
                        f"the state of {' or '.join(others)} contains {', '.join(sorted(refused))}; use only Python numbers, "
                        "strings, tensors, and lists or dictionaries of them, and convert numpy numbers with float(value)"
                    )

        self._together(make)
        self._together(write)
        return folder

    def _finish(self, step: int) -> None:
        """Complete a checkpoint whose tensors are written."""
        folder = files.unfinished(self.directory, step)

        def describe() -> dict[str, files.FileEntry]:
            names = [path.name for path in folder.glob(f"__{self._rank}_*")]
            names.append(_random_name(self._rank))
            if self._rank == 0:
                names += [".metadata", _EXTRA]
            return files.describe(folder, names)

        parts = from_all(self._together(describe), self._group)
        entries = {name: entry for part in parts for name, entry in part.items()}
        if not self._directories.is_one:
            sizes = {rank: {name: entry.size for name, entry in part.items()} for rank, part in enumerate(parts)}
            self._together(lambda: self._directories.copy_files(folder, folder, sizes, self._directories.holders, self._group))

        def publish() -> None:
            if self._directories.is_holder:
                files.publish(self.directory, files.Manifest(step=step, world_size=self._size, files=entries))
                files.prune(self.directory, newest=step, keep=self._keep_last)

        self._together(publish)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _verify(self, folder: Path) -> files.Manifest | None:
        """Return the manifest of a complete checkpoint, or ``None``. Copy the checkpoint to directories that lack it.

        Each rank checks its share of the files.
        """
        manifest, problems = None, []
        if self._directories.is_holder:
            try:
                manifest = files.read_manifest(folder)
            except (OSError, ValueError) as error:
                problems = [str(error)]
        manifests = from_all(manifest, self._group)
        mine = manifests[self._directories.holder]
        if mine is not None:
            problems = files.find_problems(folder, mine, self._directories.files_to_check(mine.files))
        found = from_all(problems, self._group)
        broken = {holder for holder, part in zip(self._directories.holders, found, strict=True) if part}
        whole = sorted(set(self._directories.holders) - broken)
        chosen = manifests[whole[0]] if whole else None
        if chosen is not None:
            lacking = broken | {holder for holder in whole if manifests[holder] != chosen}
            if lacking:
                self._together(lambda: self._copy_checkpoint(folder, chosen, whole[0], lacking))
            return chosen
        if self._rank == 0:
            problems = [problem for part in found for problem in part]
            warnings.warn(f"the checkpoint {folder} is damaged and not used: {'; '.join(problems[:3])}", stacklevel=3)
        return None

    def _copy_checkpoint(self, folder: Path, manifest: files.Manifest, source: int, lacking: Collection[int]) -> None:
        """Copy a complete checkpoint from one rank's directory to those of the ``lacking`` ranks."""
        target = files.unfinished(self.directory, manifest.step)
        failed: OSError | None = None
        if self._rank in lacking:
            try:
                files.clear_unfinished(self.directory)
                target.mkdir()
            except OSError as error:
                failed = error
        self._directories.copy_files(
            folder, target, {source: {name: one.size for name, one in manifest.files.items()}}, lacking, self._group
        )
        if failed is not None:
            raise failed
        if self._rank in lacking:
            files.publish(self.directory, manifest)

    def _load(
        self, folder: Path, manifest: files.Manifest, model: nn.Module, optimizer: torch.optim.Optimizer | None,
        others: Mapping[str, Stateful],
    ) -> None:  # fmt: skip
        saved = self._together(lambda: FileSystemReader(folder).read_metadata().state_dict_metadata)
        state = training_state(model, optimizer, self._group, saved=saved)

        def load() -> None:
            load_tensors(state, storage_reader=FileSystemReader(folder), process_group=self._group)
            set_training_state(model, optimizer, state)

        def load_others() -> None:
            extra = torch.load(folder / _EXTRA, map_location="cpu", weights_only=True)
            missing = sorted(others.keys() - extra.keys())
            if missing:
                found = f"only of {', '.join(sorted(extra))}" if extra else "nor of other objects"
                remedy = "load it without these objects, or load another checkpoint"
                raise ValueError(f"{folder} does not contain the state of {', '.join(missing)}, {found}: {remedy}")
            for name, other in others.items():
                other.load_state_dict(extra[name])
            if manifest.world_size == self._size:
                set_random_state(torch.load(folder / _random_name(self._rank), map_location="cpu", weights_only=True))

        self._together(load, f"{folder} cannot be loaded into this model and optimizer")
        self._together(load_others)

    # -- all ranks ----------------------------------------------------------------------------------------------------

    def _together(self, work: Callable[[], _Result], what: str = "") -> _Result:
        """Call ``work`` on every rank. If it fails on some, raise an error on all ranks, which names the failed ones."""
        problem: str | None = None
        cause: BaseException | None = None
        result: _Result | None = None
        try:
            result = work()
        except CheckpointException as error:  # torch's own BaseException, with an error for each rank
            failed = [f"{type(one).__name__}: {one}" for one, _ in error.failures.values()]
            cause, problem = error, "; ".join(dict.fromkeys(failed))
        except Exception as error:  # noqa: BLE001 (all ranks must raise, whatever the error is)
            cause, problem = error, f"{type(error).__name__}: {error}"
        problems = from_all(problem, self._group)
        by_text: dict[str, list[str]] = {}
        for rank, text in enumerate(problems):
            if text is not None:
                by_text.setdefault(text, []).append(str(rank))
        if by_text:
            found = list(by_text.items())[:3]
            bad = "; ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {text}" for text, ranks in found)
            raise CheckpointError(f"{what}: {bad}" if what else bad) from cause
        return result  # type: ignore[return-value]


def _random_name(rank: int) -> str:
    return f"random-{rank:05d}.pt"


def _write(value: object, path: Path) -> None:
    torch.save(value, path)
    files.sync_file(path)


def random_state() -> dict[str, Any]:
    """Return the random state of Python, numpy, torch and this rank's GPU, as plain values and tensors."""
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the generators to the state of ``random_state()``."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
