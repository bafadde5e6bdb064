"""Strategies on a mesh of ranks, and the strategy of this process from ``DISTFLOW_STRATEGY``.

If the spec has a strategy, distflow sets this variable when it starts the process. This module does not import torch.
"""

from __future__ import annotations

import difflib
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace  # noqa: TID251  the library does not import `distflow.structs`
from math import prod
from types import MappingProxyType
from typing import Any

from distflow.train.strategies.options import (
    KINDS,
    MESH_SIZES,
    OPTIONS,
    InvalidOption,
    Misfit,
    StrategyOptions,
    clashes,
    default_mesh,
    micro_batches,
    misfits,
    normal_value,
    regular_mesh,
)

__all__ = [
    "Strategy",
    "current_strategy",
    "current_strategy_or_none",
    "data_shard",
    "make_strategy",
    "reset_current_strategy",
    "resolve_strategy",
    "set_current_strategy",
    "warn_of_conflict",
]

_DATA_AXES = ("dp", "fsdp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How the ranks train one model together."""

    kind: str
    """``ddp``, ``fsdp``, ``tp``, ``hybrid``, ``pipeline`` or ``none``."""
    shape: tuple[int, ...]
    """The size of each axis. Ranks fill the mesh row by row: (2, 4) has ranks 0 to 3 in its first row."""
    names: tuple[str, ...]
    """Axes: ``dp`` (replicas), ``fsdp`` (shards), ``cp`` (parts of sequences), ``tp`` (parts of tensors), ``pp`` (stages)."""
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """The options in docs/strategies.md, except those in ``MESH_SIZES``: ``shape`` and ``names`` already define the mesh."""

    @property
    def world_size(self) -> int:
        """The number of ranks on the mesh."""
        return prod(self.shape)

    @property
    def passes(self) -> int:
        """The number of forward and backward passes in one step (``gradient_accumulation_steps``)."""
        return int(self.options.get("gradient_accumulation_steps", 1))

    @property
    def batch_size(self) -> int | None:
        """The number of samples of one step on all ranks; ``None`` if the options state neither batch size."""
        if "micro_batch_size" not in self.options:
            return self.options.get("global_batch_size")
        return int(self.options["micro_batch_size"]) * micro_batches(self.mesh, self.options) * self.data_shard(0)[1]

    @property
    def mesh(self) -> dict[str, int]:
        """The size of each axis."""
        return dict(zip(self.names, self.shape, strict=True))

    def normalized(self) -> dict[str, Any]:
        """Return the JSON object for ``DISTFLOW_STRATEGY``."""
        mesh = {"shape": list(self.shape), "names": list(self.names)}
        return {"kind": self.kind, "mesh": mesh, "options": dict(sorted(self.options.items()))}

    def as_block(self) -> dict[str, Any]:
        """Return the ``strategy`` block of a spec."""
        mesh = {"mesh_shape": [list(self.shape), list(self.names)]} if len(self.shape) > 1 else {}
        return {"kind": self.kind, **mesh, **dict(sorted(self.options.items()))}

    def having(self, options: Mapping[str, Any]) -> Strategy:
        """Return this strategy with some options added or replaced. Raises ``ValueError`` for invalid options."""
        if sizes := MESH_SIZES.keys() & options:
            raise ValueError(
                f"`{min(sizes)}` cannot be set on a Strategy, because its mesh is already defined: change `shape` and `names`, "
                "or `mesh_shape` of the spec"
            )
        merged = _normal({**self.options, **options}, list(OPTIONS))
        _refuse(misfits(self.kind, merged))
        _refuse(clashes(self.kind, self.mesh, merged))
        return replace(self, options=MappingProxyType(merged))

    def data_shard(self, rank: int) -> tuple[int, int]:
        """Return the index of a rank's share of the data, and the number of shares.

        Ranks of one tensor-parallel or sequence-parallel group, and the stages of one pipeline, take the same share.

        >>> Strategy(kind="hybrid", shape=(2, 2), names=("fsdp", "tp")).data_shard(1)
        (0, 2)
        """
        index, count, neighbors = 0, 1, 1
        for name, size in reversed(self.mesh.items()):
            if name in _DATA_AXES:
                index, count = index + rank // neighbors % size * count, count * size
            neighbors *= size
        return index, count


_last: tuple[Strategy, int] | None = None
"""The strategy of the latest ``ParallelPlan`` of this process, and this process's rank.

Functions that get no ``ParallelPlan``, such as ``data_shard`` and ``Loader``, use them.
"""
_conflict = ""
"""The warning of these functions if this process has several ``ParallelPlan`` with different shares of the data; else empty."""


def set_current_strategy(strategy: Strategy, rank: int) -> None:
    """Let functions that get no ``ParallelPlan`` use this strategy.

    A strategy of kind ``none`` (a frozen model) does not replace another.
    """
    global _last, _conflict  # noqa: PLW0603 (a process is in one world)
    before = current_strategy_or_none()
    if strategy.kind == "none" and before is not None and before.kind != "none":
        return
    if _last is not None and _last[0].kind != "none" and _last[0].data_shard(rank) != strategy.data_shard(rank):
        _conflict = (
            f"a model was prepared for {_last[0].kind} and another for {strategy.kind}, which give this rank different shares "
            f"of the data: data_shard() and Loader use {strategy.kind}; use the loader() and data_shard of each plan instead"
        )
    _last = strategy, rank


def reset_current_strategy() -> None:
    """Undo ``set_current_strategy``, so that ``DISTFLOW_STRATEGY`` is used again."""
    global _last, _conflict
    _last, _conflict = None, ""


def warn_of_conflict() -> None:
    """Warn once if this process has several ``ParallelPlan`` with different shares of the data."""
    global _conflict  # noqa: PLW0603
    if _conflict:
        warnings.warn(_conflict, stacklevel=4)
        _conflict = ""


def current_strategy(environ: Mapping[str, str] | None = None) -> Strategy:
    """Return the strategy of the latest ``ParallelPlan``, else of ``DISTFLOW_STRATEGY``, else replicas (``ddp``) on all ranks.

    A process without other ranks gets ``none`` instead of ``ddp``. With ``environ``, any ``ParallelPlan`` is ignored. Raises
    ``ValueError`` if the variable is not valid.
    """
    if (configured := current_strategy_or_none(environ)) is not None:
        return configured
    world = int((os.environ if environ is None else environ).get("WORLD_SIZE", "1"))
    return make_strategy("ddp" if world > 1 else "none", world)


def current_strategy_or_none(environ: Mapping[str, str] | None = None) -> Strategy | None:
    """Return the strategy of the latest ``ParallelPlan``, else of ``DISTFLOW_STRATEGY``; ``None`` if neither exists."""
    if environ is None and _last is not None:
        return _last[0]
    text = (os.environ if environ is None else environ).get("DISTFLOW_STRATEGY", "")
    if not text:
        return None
    try:
        value = json.loads(text)
        mesh = value["mesh"]
        _check_kind(value["kind"])
        return Strategy(
            kind=str(value["kind"]),
            shape=tuple(int(size) for size in mesh["shape"]),
            names=tuple(str(name) for name in mesh["names"]),
            options=MappingProxyType(dict(value.get("options") or {})),
        )
    except (ValueError, KeyError, TypeError) as error:
        example = '{"kind": "ddp", "mesh": {"shape": [2], "names": ["dp"]}, "options": {}}'
        raise ValueError(
            f"DISTFLOW_STRATEGY is {text!r}, not a valid strategy such as {example}: unset it, or let distflow set it"
        ) from error


def data_shard(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Return the index of this rank's share of the data and the number of shares, under ``current_strategy``."""
    if environ is None:
        warn_of_conflict()
        if _last is not None:
            return _last[0].data_shard(_last[1])
    return current_strategy(environ).data_shard(int((os.environ if environ is None else environ).get("RANK", "0")))


def resolve_strategy(strategy: Strategy | StrategyOptions | str, world: int) -> Strategy:
    """Return ``strategy`` as a ``Strategy``.

    A ``Strategy`` keeps the sizes of its axes; otherwise the mesh has ``world`` ranks. Raises ``ValueError`` for an unknown
    kind, invalid options, or a mesh that does not fit the kind or the number of ranks. A ``Strategy`` of kind ``none`` may have
    any number of ranks, because they do not train together.
    """
    if isinstance(strategy, Strategy):
        _check_kind(strategy.kind)
        mesh = regular_mesh(strategy.kind, strategy.mesh, strategy.options)
        resolved = _on_mesh(strategy.kind, mesh).having(strategy.options)
        if resolved.kind != "none" and resolved.world_size != world:
            ranks = f"{resolved.world_size} rank{'s' * (resolved.world_size != 1)}"
            shape = f" ({' × '.join(map(str, resolved.shape))})" if len(resolved.shape) > 1 else ""
            raise ValueError(
                f"the strategy is for {ranks}{shape}, but there {'is' if world == 1 else 'are'} {world}: start {ranks}, "
                "or change the strategy"
            )
        return resolved
    if isinstance(strategy, str):
        return make_strategy(strategy, world)
    return make_strategy(strategy.kind, world, strategy.given())


def make_strategy(kind: str, world: int, options: Mapping[str, Any] | None = None) -> Strategy:
    """Return a strategy over ``world`` ranks. Options in ``MESH_SIZES`` set the sizes of axes.

    Raises ``ValueError`` if these sizes do not fit the number of ranks, and for an unknown kind or invalid options.
    """
    _check_kind(kind)
    given = _normal(options or {}, [*OPTIONS, *MESH_SIZES])
    _refuse(misfits(kind, given))
    mesh = default_mesh(kind, world, given, int(os.environ.get("LOCAL_WORLD_SIZE") or world))
    return _on_mesh(kind, mesh).having({name: value for name, value in given.items() if name not in MESH_SIZES})


def _check_kind(kind: object) -> None:
    if kind not in KINDS:
        raise ValueError(f"unknown strategy {kind!r}: use {', '.join(KINDS[:-1])} or {KINDS[-1]}")


def _on_mesh(kind: str, mesh: dict[str, int] | Misfit) -> Strategy:
    if isinstance(mesh, Misfit):
        raise ValueError(f"{mesh.message}: {mesh.hint}")  # noqa: TRY004  the value is wrong, not its type
    return Strategy(kind=kind, shape=tuple(mesh.values()), names=tuple(mesh))


def _normal(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return options in their normal form. Raises ``ValueError`` for unknown options and invalid values."""
    normal = {}
    for name, value in options.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            raise ValueError(f"a strategy has no option {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))
        try:
            normal[name] = normal_value(name, value)
        except InvalidOption as invalid:
            raise ValueError(f"{name} is {value!r}: give {invalid}") from None
    return normal


def _refuse(found: Iterable[Misfit]) -> None:
    for _, message, hint in found:
        raise ValueError(f"{message}: {hint}")
