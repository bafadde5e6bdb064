"""How a group trains: a ``Strategy`` from a block of a spec, or the problems in it. Pure; needs no torch.

A strategy is a kind, a mesh over all ranks of the group, and options. Ranks fill the mesh row by row, as torch does: in
``[[2, 2], ["fsdp", "tp"]]`` the ranks 0 and 1 share a tensor, and so do 2 and 3; 0 and 2 share the shards of one half.

The checks before a start: the mesh has as many places as the group has ranks; the ranks that share a tensor are on one node;
stages divide the ranks; options are valid for the kind and with each other; batch sizes add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

from distflow.documents.document import Path
from distflow.documents.problems import Mark, Problem, Severity, errors_of
from distflow.documents.text import did_you_mean
from distflow.layout.ranks import World
from distflow.layout.strategy.forms import FOREIGN_KEYS, Draft, read_block
from distflow.spec.model import GroupSpec
from distflow.train.strategies.options import AXES, KINDS, MESH_SIZES, Misfit, Wrong, clashes, misfits, normal_value

__all__ = ["Strategy", "group_strategy", "parse_strategy", "unread_strategy"]


_PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_MAIN = {"ddp": "dp", "fsdp": "fsdp", "tp": "tp", "hybrid": "tp", "pipeline": "pp", "none": "dp"}
_FROM_AXES: Mapping[frozenset[str], str] = MappingProxyType(
    {
        frozenset(): "none",
        frozenset({"dp"}): "ddp",
        frozenset({"fsdp"}): "fsdp",
        frozenset({"dp", "fsdp"}): "fsdp",
        frozenset({"tp"}): "tp",
        frozenset({"fsdp", "tp"}): "hybrid",
        frozenset({"pp"}): "pipeline",
        frozenset({"dp", "pp"}): "pipeline",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How the ranks of a group train one model together."""

    kind: str
    """One of ``KINDS``."""
    shape: tuple[int, ...]
    """The sizes of the mesh; their product is the number of ranks."""
    names: tuple[str, ...]
    """The axes of the mesh: ``dp`` (replicas), ``fsdp`` (shards), ``tp`` (parts of tensors), ``pp`` (stages)."""
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """The given options in their normal form (``options.OPTIONS``)."""

    @property
    def world_size(self) -> int:
        """The number of its ranks."""
        return prod(self.shape)

    def normalized(self) -> dict[str, Any]:
        """Return it as the JSON object that the ranks read from ``DISTFLOW_STRATEGY``."""
        mesh = {"shape": list(self.shape), "names": list(self.names)}
        return {"kind": self.kind, "mesh": mesh, "options": dict(sorted(self.options.items()))}

    def as_block(self) -> dict[str, Any]:
        """Return the block for this strategy, in the form of a spec."""
        mesh = {"mesh_shape": [list(self.shape), list(self.names)]} if len(self.shape) > 1 else {}
        return {"kind": self.kind, **mesh, **dict(sorted(self.options.items()))}


def parse_strategy(
    block: Mapping[str, object],
    sizes: Sequence[int],
    *,
    path: Path = ("strategy",),
    locate: Callable[[Path], Mark] = lambda _: Mark("-"),
) -> tuple[Strategy | None, tuple[Problem, ...]]:
    """Return the strategy of a block for tasks with these numbers of ranks, and all findings.

    ``locate`` returns the position of a path in the document (``Document.key_mark_at``). If a finding is an error, there is
    no strategy; warnings may come with one.
    """
    draft = read_block(block, path, locate)
    options = _values(draft)
    if errors_of(draft.problems):
        return None, tuple(draft.problems)
    world = sum(sizes)
    _claims(draft, sizes)
    _placement(draft, sizes)
    kind = _kind(draft, world)
    if errors_of(draft.problems):
        return None, tuple(draft.problems)
    _report(draft, misfits(kind, options))
    shape, names = _mesh(draft, kind, options, sizes)
    if errors_of(draft.problems):
        return None, tuple(draft.problems)
    if "dp" in names and kind == "fsdp":
        options.setdefault("sharding_strategy", "HYBRID_SHARD")
    for name in MESH_SIZES:
        options.pop(name, None)
    strategy = Strategy(kind=kind, shape=shape, names=names, options=MappingProxyType(options))
    _report(draft, clashes(kind, dict(zip(names, shape, strict=True)), options))
    _tasks(draft, strategy, sizes)
    if errors_of(draft.problems):
        return None, tuple(draft.problems)
    return strategy, tuple(draft.problems)


def _report(draft: Draft, found: Iterable[Misfit]) -> None:
    for name, message, hint in found:
        draft.add(draft.options[name].path if name in draft.options else draft.path, message, hint)


# -- values, kind, claims ---------------------------------------------------------------------------------------------


def _values(draft: Draft) -> dict[str, Any]:
    """Return the options in their normal form; those with wrong values become problems."""
    options: dict[str, Any] = {}
    for name, given in draft.options.items():
        try:
            options[name] = normal_value(name, given.value)
        except Wrong as wrong:
            draft.add(given.path, f"`{given.path[-1]}` has an invalid value: {given.value!r}", f"write {wrong}")
    if "state_dict_type" in options:
        message = "`state_dict_type` has no effect: the calls of the program define which state is saved"
        hint = (
            "full_state_dict(model) returns the whole state on rank 0; Checkpoints writes shards that every strategy can read"
        )
        draft.add(draft.options["state_dict_type"].path, message, hint, severity=Severity.WARNING)
    kind = draft.kind
    if kind is not None and kind.value not in KINDS:
        draft.add(kind.path, f"`{kind.value}` is not a kind of strategy", did_you_mean(str(kind.value), KINDS, what="kinds"))
    return options


def _kind(draft: Draft, world: int) -> str:
    """Return the kind of the block, or the one that its mesh implies; ddp if it has neither."""
    active = frozenset(name for name, size in zip(draft.names, draft.shape, strict=True) if size > 1)
    meant = _FROM_AXES.get(active)
    if meant is None:
        axes = " and ".join(sorted(active))
        hint = "supported meshes: dp; fsdp; dp and fsdp; tp; fsdp and tp; pp; dp and pp"
        draft.add(draft.mesh_path, f"there is no strategy for a mesh of {axes}", hint)
        return "none"
    if draft.kind is None:
        if not draft.mesh_path and "stages" in draft.options:
            return "pipeline"
        return meant if draft.mesh_path else "ddp" if world > 1 else "none"
    kind = str(draft.kind.value)
    if draft.mesh_path and active and (not active <= set(AXES[kind]) or _MAIN[kind] not in (active | _one_of(draft))):
        axes = ", ".join(draft.names)
        draft.add(
            draft.mesh_path,
            f"a mesh of {axes} means {meant}, but the kind is {kind}",
            f"write kind: {meant}, or remove the kind or the mesh",
        )
    return kind


def _one_of(draft: Draft) -> frozenset[str]:
    """Return the axes of size 1, which have no effect."""
    return frozenset(name for name, size in zip(draft.names, draft.shape, strict=True) if size == 1)


def _claims(draft: Draft, sizes: Sequence[int]) -> None:
    world = sum(sizes)
    for claim in draft.worlds:
        if claim.value != world:
            hint = f"give the group {claim.value} ranks, or write {world} here"
            draft.add(claim.path, f"`{claim.path[-1]}` is {claim.value}, but the group has {_ranks(sizes)}", hint)
    claimed = draft.sizes
    if claimed is not None and isinstance(claimed.value, list) and claimed.value != list(sizes):
        wanted = _ranks(claimed.value)
        hint = "write one task for each node, with `ranks:` of these sizes"
        draft.add(claimed.path, f"`{claimed.path[-1]}` requests {wanted}, but the group has {_ranks(sizes)}", hint)


def _placement(draft: Draft, sizes: Sequence[int]) -> None:
    """Report a placement that differs from the placement of the tasks: each task of a world has its own node."""
    wanted = draft.placement
    if wanted is None:
        return
    word = str(wanted.value).upper()
    message = f"`placement_group` is {word}, but the group has {len(sizes)} tasks, each on a separate node"
    if word not in _PLACEMENTS:
        draft.add(wanted.path, f"`{wanted.value}` is not a placement", did_you_mean(word, _PLACEMENTS, what="placements"))
    elif word.endswith("SPREAD") and max(sizes) > 1:
        message = f"`placement_group` is {word}, but a task of the group has {max(sizes)} ranks on one node"
        draft.add(wanted.path, message, "write one task for each rank, with `ranks: {size: 1}`, or remove `placement_group`")
    elif word.endswith("PACK") and len(sizes) > 1:
        draft.add(wanted.path, message, "write one task with all ranks, or remove `placement_group`")


def _ranks(sizes: Sequence[int]) -> str:
    """Return how the ranks are spread, such as ``8 ranks (4 + 4)``."""
    world = sum(sizes)
    spread = f" ({' + '.join(map(str, sizes))})" if len(sizes) > 1 else ""
    return f"{world} rank{'s' if world != 1 else ''}{spread}"


# -- the mesh ---------------------------------------------------------------------------------------------------------


def _mesh(draft: Draft, kind: str, options: Mapping[str, Any], sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the shape and the names of the mesh: those of the block, or from the kind and the sizes of its axes."""
    world = sum(sizes)
    if draft.mesh_path:
        shape, names = _written(draft, kind, options)
        places = prod(shape)
        if places != world:
            product = " × ".join(map(str, draft.shape))
            message = f"the mesh has {product} = {places} places, but the group has {_ranks(sizes)}"
            draft.add(draft.mesh_path, message, _other_shape(names, shape, world))
        return shape, names
    if kind == "hybrid":
        return _split(draft, "tp_size", None, world, names=("fsdp", "tp"))
    if kind == "tp":
        tp = options.get("tp_size", world)
        if tp != world:
            message = f"`tp_size` is {tp}, but the group has {_ranks(sizes)}"
            draft.add(draft.options["tp_size"].path, message, "write kind: hybrid, which shards the model over the other ranks")
        return (world,), ("tp",)
    if kind == "pipeline":
        shape, names = _split(draft, "stages", world, world, names=("dp", "pp"))
        # Replicas of one stage are neighbors, so that gradients stay on a node if possible.
        return ((shape[1], shape[0]), ("pp", "dp")) if shape[0] > 1 else ((shape[1],), ("pp",))
    if kind == "fsdp" and options.get("sharding_strategy") == "HYBRID_SHARD":
        return _split(draft, "shard_size", sizes[0] if len(set(sizes)) == 1 else None, world, names=("dp", "fsdp"))
    if "shard_size" in options:
        hint = "add sharding_strategy: HYBRID_SHARD, or remove `shard_size`"
        message = "`shard_size` has no effect without HYBRID_SHARD: all ranks share the shards"
        draft.add(draft.options["shard_size"].path, message, hint)
    return (world,), ("fsdp",) if kind == "fsdp" else ("dp",)


def _written(draft: Draft, kind: str, options: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the mesh of the block, without axes of size 1 that the kind does not use."""
    for name in ("tp_size", "shard_size", "stages"):
        if name in options:
            draft.add(draft.options[name].path, f"`{name}` cannot be combined with a mesh", "remove one of them")
    two = kind == "hybrid" or (kind == "fsdp" and options.get("sharding_strategy") == "HYBRID_SHARD")
    found = dict(zip(draft.names, draft.shape, strict=True))
    if two:
        for axis in AXES[kind]:
            found.setdefault(axis, 1)
    kept = {name: size for name, size in found.items() if size > 1 or name == _MAIN[kind] or (two and name in AXES[kind])}
    kept = kept or {_MAIN[kind]: 1}
    inner = {"hybrid": "tp", "fsdp": "fsdp"}.get(kind)
    if inner in kept and list(kept)[-1] != inner:
        if kept[inner] == 1 or all(size == 1 for name, size in kept.items() if name != inner):
            kept[inner] = kept.pop(inner)
        else:
            message = f"`{inner}` is not the last axis of the mesh, so its ranks are not neighbors on a node"
            order = [*(name for name in kept if name != inner), inner]
            hint = f"write [[{', '.join(str(kept[name]) for name in order)}], [{', '.join(order)}]]"
            draft.add(draft.mesh_path, message, hint)
    return tuple(kept.values()), tuple(kept)


def _split(
    draft: Draft, option: str, default: int | None, world: int, *, names: tuple[str, str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return a mesh whose last axis has the size of an option, and whose first axis takes the other ranks."""
    given = draft.options.get(option)
    inner = given.value if given is not None else default
    path = given.path if given is not None else draft.path
    if not isinstance(inner, int):
        draft.add(path, f"the size of `{names[1]}` is not defined", f"add {option}, or mesh_shape: [[…, …], {list(names)}]")
        return (world, 1), names
    if world % inner:
        fitting = ", ".join(str(number) for number in range(1, world + 1) if world % number == 0)
        draft.add(
            path, f"`{option}` is {inner}, which does not divide the {world} ranks of the group", f"write one of {fitting}"
        )
    return (max(world // inner, 1), inner), names


def _other_shape(names: Sequence[str], shape: Sequence[int], world: int) -> str:
    """Return a hint: the nearest mesh for this many ranks, changing the first axis only."""
    rest = prod(shape[1:])
    text = ", ".join(names)
    if world % rest == 0:
        fitting = ", ".join(str(size) for size in (world // rest, *shape[1:]))
        return f"write [[{fitting}], [{text}]], or give the group {prod(shape)} ranks"
    return f"give the group {prod(shape)} ranks, or sizes whose product is {world}"


def _tasks(draft: Draft, strategy: Strategy, sizes: Sequence[int]) -> None:
    """Report ranks that share a tensor but are not on one node."""
    if "tp" not in strategy.names:
        return
    tp = strategy.shape[strategy.names.index("tp")]
    if over := [size for size in sizes if size % tp]:
        at = draft.mesh_path or (draft.options["tp_size"].path if "tp_size" in draft.options else draft.path)
        message = f"tp is {tp}, but a task has {over[0]} rank{'s' if over[0] != 1 else ''}: "
        message += "ranks that share a tensor communicate in every layer, so they must be on one node"
        fitting = [number for number in range(1, max(sizes) + 1) if all(size % number == 0 for size in sizes)]
        hint = f"set tp to {' or '.join(map(str, fitting))}, and use the other ranks for fsdp"
        draft.add(at, message, hint)


# -- the strategy of a group ------------------------------------------------------------------------------------------

_OF_THEIR_OWN = ("accelerate", "deepspeed", "horovod", "jax", "tensorflow")
"""Frameworks that distribute a model according to their own configuration or the program."""


def group_strategy(group: GroupSpec, world: World | None) -> tuple[Strategy | None, tuple[Problem, ...]]:
    """Return the strategy of a group and all findings about it; nothing for a group without one."""
    block = group.strategy
    if block is None:
        return None, ()
    if world is None:
        message = "`strategy` needs ranks, and no task of the group has any"
        hint = "add `ranks: {size: N}` to its tasks, or a `launcher` to the group"
        return None, (Problem(where=block.mark_at(block.path), message=message, hint=hint),)
    strategy, problems = parse_strategy(block.value, [item.size for item in world.tasks], path=block.path, locate=block.mark_at)
    cluster = block.value.get("cluster")
    says_ray = isinstance(cluster, Mapping) and cluster.get("name") == "ray"
    if says_ray and (group.framework is None or group.framework.value != "ray"):
        message = "`cluster: {name: ray}` does not start Ray"
        hint = "write `framework: ray` in the group to start Ray, or remove `name` for plain DDP"
        ray = Problem(where=block.mark_at((*block.path, "cluster", "name")), message=message, hint=hint)
        return None, (ray, *problems)
    foreign = [key for key in block.value if key in FOREIGN_KEYS]
    if strategy is None or not foreign:
        return strategy, problems
    import yaml  # noqa: PLC0415  only blocks of other guides need it

    keys = ", ".join(f"`{key}`" for key in foreign)
    text = yaml.safe_dump(strategy.as_block(), default_flow_style=True, sort_keys=False, width=10_000).strip()
    converted = Problem(
        where=block.mark_at((*block.path, foreign[0])),
        severity=Severity.WARNING,
        message=f"the strategy was converted from another form ({keys})",
        hint=f"write it as `strategy: {text}`",
    )
    return strategy, (converted, *problems)


def unread_strategy(group: GroupSpec) -> tuple[Problem, ...]:
    """Return a warning for a ``strategy`` of a group whose framework does not read it."""
    block, framework = group.strategy, group.framework
    if block is None or framework is None or framework.value not in _OF_THEIR_OWN:
        return ()
    message = f"`framework: {framework.value}` does not use `strategy`: it has its own configuration"
    hint = "configure it there, or use `framework: pytorch`, or call `parallelize` of `distflow.train`, which uses `strategy`"
    return (Problem(where=block.mark_at(block.path), severity=Severity.WARNING, message=message, hint=hint),)
