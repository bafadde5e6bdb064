"""The strategy of this process: the argument of ``parallelize``, or ``DISTFLOW_STRATEGY``, which distflow sets.

The JSON has been checked before the process was started; without either, ranks replicate the model. Knows nothing of torch,
so that a data loader can ask for its share before anything heavy is imported.
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
    Misfit,
    Wrong,
    clashes,
    micro_batches,
    misfits,
    normal_value,
)

__all__ = ["Strategy", "choose", "current_strategy", "data_shard", "forget", "make_strategy", "said_strategy"]

_DATA_AXES = ("dp", "fsdp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How the ranks train one model together."""

    kind: str
    """``ddp``, ``fsdp``, ``tp``, ``hybrid``, ``pipeline`` or ``none``."""
    shape: tuple[int, ...]
    """The sizes of the mesh, which ranks fill row by row."""
    names: tuple[str, ...]
    """Its axes: ``dp`` (replicas), ``fsdp`` (shards), ``tp`` (parts of tensors), ``pp`` (stages)."""
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """As docs/strategies.md lists them."""

    @property
    def world_size(self) -> int:
        """How many ranks it is for."""
        return prod(self.shape)

    @property
    def passes(self) -> int:
        """How many passes go into a step (``gradient_accumulation_steps``)."""
        return int(self.options.get("gradient_accumulation_steps", 1))

    @property
    def batch_size(self) -> int | None:
        """The samples of one step over all ranks, as ``global_batch_size`` or ``micro_batch_size`` says; ``None`` without."""
        if "micro_batch_size" not in self.options:
            return self.options.get("global_batch_size")
        return int(self.options["micro_batch_size"]) * micro_batches(self.options) * self.data_shard(0)[1]

    def size(self, axis: str) -> int:
        """Return the size of an axis; 1 when the mesh has none of that name."""
        return dict(zip(self.names, self.shape, strict=True)).get(axis, 1)

    def having(self, options: Mapping[str, Any]) -> Strategy:
        """Return this strategy with more options, or others. Raises ``ValueError`` for those that a spec could not say."""
        together = _normal({**self.options, **options}, list(OPTIONS))
        _refuse(misfits(self.kind, together))
        _refuse(clashes(self.kind, dict(zip(self.names, self.shape, strict=True)), together))
        return replace(self, options=MappingProxyType(together))

    def data_shard(self, rank: int) -> tuple[int, int]:
        """Return which share of the data a rank takes, and how many shares there are.

        Ranks that share a tensor, and stages of one pipeline, take the same share.

        >>> Strategy(kind="hybrid", shape=(2, 2), names=("fsdp", "tp")).data_shard(1)
        (0, 2)
        """
        index, count, rest = 0, 1, rank
        places: list[int] = []
        for size in reversed(self.shape):
            rest, place = divmod(rest, size)
            places.append(place)
        for name, size, place in zip(self.names, self.shape, reversed(places), strict=True):
            if name in _DATA_AXES:
                index, count = index * size + place, count * size
        return index, count


_chosen: tuple[Strategy, int] | None = None
"""The last strategy that ``parallelize`` got, and this process's rank in it."""


def choose(strategy: Strategy, rank: int) -> None:
    """Let ``current_strategy`` and ``data_shard`` answer with this strategy from now on.

    The last one counts; one that gives this rank another share of the data than the one before is warned of. A model of kind
    ``none``, such as a frozen teacher next to the trained model, changes nothing.
    """
    global _chosen  # noqa: PLW0603 (a process is in one world)
    before = said_strategy()
    if strategy.kind == "none" and before is not None and before.kind != "none":
        return
    if _chosen is not None and _chosen[0].kind != "none" and _chosen[0].data_shard(rank) != strategy.data_shard(rank):
        warnings.warn(
            f"a model was made ready for {_chosen[0].kind}, another for {strategy.kind}, and this rank's share of the data is "
            f"not the same for both: data_shard() and Loader now give {strategy.kind}'s; for the other model pass rank and "
            "world_size yourself",
            stacklevel=3,
        )
    _chosen = strategy, rank


def forget() -> None:
    """Undo ``choose``: the variable counts again."""
    global _chosen  # noqa: PLW0603
    _chosen = None


def current_strategy(environ: Mapping[str, str] | None = None) -> Strategy:
    """Return the strategy of this process: that of ``parallelize``, else the variable's, else replicas of all ranks.

    With an ``environ`` it is the one that these variables say. Raises ``ValueError`` when the variable holds something else.
    """
    if (said := said_strategy(environ)) is not None:
        return said
    world = int((os.environ if environ is None else environ).get("WORLD_SIZE", "1"))
    return make_strategy("ddp" if world > 1 else "none", world)


def said_strategy(environ: Mapping[str, str] | None = None) -> Strategy | None:
    """Return ``current_strategy``, but ``None`` where neither ``parallelize`` nor the variable has said one."""
    if environ is None and _chosen is not None:
        return _chosen[0]
    text = (os.environ if environ is None else environ).get("DISTFLOW_STRATEGY", "")
    if not text:
        return None
    try:
        value = json.loads(text)
        mesh = value["mesh"]
        return Strategy(
            kind=str(value["kind"]),
            shape=tuple(int(size) for size in mesh["shape"]),
            names=tuple(str(name) for name in mesh["names"]),
            options=MappingProxyType(dict(value.get("options") or {})),
        )
    except (ValueError, KeyError, TypeError) as error:
        example = '{"kind": "ddp", "mesh": {"shape": [2], "names": ["dp"]}, "options": {}}'
        raise ValueError(f"DISTFLOW_STRATEGY is {text!r}, not JSON such as {example}") from error


def data_shard(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Return this rank's share of the data and the number of shares: rank and num_replicas for a ``DistributedSampler``.

    They are those of ``current_strategy``: ask after ``parallelize``, unless the spec says the strategy.
    """
    if environ is None and _chosen is not None:
        strategy, rank = _chosen
        return strategy.data_shard(rank)
    return current_strategy(environ).data_shard(int((os.environ if environ is None else environ).get("RANK", "0")))


def make_strategy(kind: str, world: int, options: Mapping[str, Any] | None = None) -> Strategy:
    """Return the strategy of a kind over all ranks. ``tp_size``, ``shard_size`` and ``stages`` give the second axis its size.

    Raises ``ValueError`` when the ranks cannot be divided so, and for options that a spec could not say either.
    """
    if kind not in KINDS:
        raise ValueError(f"there is no strategy {kind!r}: {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    given = _normal(options or {}, [*OPTIONS, *MESH_SIZES])
    _refuse(misfits(kind, given))
    wanted = {name: given.pop(name, None) for name in MESH_SIZES}

    def over(inner: int, outer: str, axis: str) -> tuple[tuple[int, int], tuple[str, str]]:
        if world % inner:
            raise ValueError(f"{kind}: {axis} of {inner} does not divide {world} ranks")
        return (world // inner, inner), (outer, axis)

    shape: Sequence[int] = (world,)
    names: Sequence[str] = ("dp",)
    if kind == "hybrid":
        if wanted["tp_size"] is None:
            raise ValueError("hybrid: say tp_size, the number of ranks that share a tensor")
        shape, names = over(wanted["tp_size"], "fsdp", "tp")
    elif kind == "fsdp" and given.get("sharding_strategy") == "HYBRID_SHARD":
        shape, names = over(wanted["shard_size"] or int(os.environ.get("LOCAL_WORLD_SIZE") or world), "dp", "fsdp")
    elif kind == "pipeline":
        (replicas, stages), _ = over(wanted["stages"] or world, "dp", "pp")
        shape, names = ((stages, replicas), ("pp", "dp")) if replicas > 1 else ((stages,), ("pp",))
    elif kind in ("fsdp", "tp"):
        names = (kind,)
        if wanted["shard_size"] is not None:
            raise ValueError(
                "`shard_size` without HYBRID_SHARD: all ranks share the shards: say sharding_strategy: HYBRID_SHARD"
            )
        if wanted["tp_size"] not in (None, world):
            raise ValueError(
                f"`tp_size` is {wanted['tp_size']}, but there are {world} ranks: hybrid uses the others for shards"
            )
    return Strategy(kind=kind, shape=tuple(shape), names=tuple(names)).having(given)


def _normal(options: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Return options in their normal form. Raises ``ValueError`` for one that does not exist, or has a value it cannot have."""
    normal = {}
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"a strategy has no option {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))
        try:
            normal[name] = normal_value(name, value)
        except Wrong as wrong:
            raise ValueError(f"{name} is {value!r}: give {wrong}") from None
    return normal


def _refuse(found: Iterable[Misfit]) -> None:
    for _, message, hint in found:
        raise ValueError(f"{message}: {hint}")
