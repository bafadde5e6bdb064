"""How a group trains: a ``Strategy`` from a block of a spec, or the problems in it. This module does no I/O and needs no torch.

A strategy is a kind, a mesh over all ranks of the group, and options. Ranks fill the mesh row by row, as torch does: in
``[[2, 2], ["fsdp", "tp"]]``, tensor parallelism splits each tensor between the ranks 0 and 1, and between 2 and 3. FSDP shards
the first half over the ranks 0 and 2, and the second half over 1 and 3, so each rank holds a quarter.

The checks before a start: the mesh has as many places as the group has ranks; the ranks that share a tensor are on one node;
the sizes of the axes divide the number of ranks; options are valid for the kind and with each other; the batch sizes are
consistent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

from distflow.documents.document import Path
from distflow.documents.problems import Mark, Problem, Severity, errors_of
from distflow.documents.text import did_you_mean
from distflow.layout.ranks import WorldLayout
from distflow.layout.strategy.forms import FOREIGN_KEYS, StrategyDraft, read_block
from distflow.spec.model import GroupSpec
from distflow.train.strategies.description import Strategy
from distflow.train.strategies.options import (
    AXES,
    KINDS,
    MAIN_AXIS,
    MESH_SIZES,
    InvalidOption,
    Misfit,
    clashes,
    default_mesh,
    misfits,
    normal_value,
    regular_mesh,
)

__all__ = ["group_strategy", "parse_strategy", "unread_strategy"]


_PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


def parse_strategy(
    block: Mapping[str, object],
    sizes: Sequence[int],
    *,
    path: Path = ("strategy",),
    locate: Callable[[Path], Mark] = lambda _: Mark("-"),
) -> tuple[Strategy | None, tuple[Problem, ...]]:
    """Return the strategy of a block for tasks with these numbers of ranks, and the findings.

    ``locate`` returns the position of a path in the document, like ``Document.key_mark_at``. If a finding is an error, there is
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
    if kind == "fsdp" and "dp" in draft.names:
        options.setdefault("sharding_strategy", "HYBRID_SHARD")
    mesh = _mesh(draft, kind, options, sizes)
    if errors_of(draft.problems):
        return None, tuple(draft.problems)
    for name in MESH_SIZES:
        options.pop(name, None)
    strategy = Strategy(kind=kind, shape=tuple(mesh.values()), names=tuple(mesh), options=MappingProxyType(options))
    _report(draft, clashes(kind, mesh, options))
    _tasks(draft, strategy, sizes)
    if errors_of(draft.problems):
        return None, tuple(draft.problems)
    return strategy, tuple(draft.problems)


def _report(draft: StrategyDraft, found: Iterable[Misfit]) -> None:
    for name, message, hint in found:
        draft.add(draft.options[name].path if name in draft.options else draft.path, message, hint)


# -- values, kind, claims ---------------------------------------------------------------------------------------------


def _values(draft: StrategyDraft) -> dict[str, Any]:
    """Return the options in their normal form.

    Report wrong values, an unknown kind, and an option without effect.
    """
    options: dict[str, Any] = {}
    for name, option in draft.options.items():
        try:
            options[name] = normal_value(name, option.value)
        except InvalidOption as invalid:
            draft.add(option.path, f"`{option.path[-1]}` has an invalid value: {option.value!r}", f"write {invalid}")
    if "state_dict_type" in options:
        message = "`state_dict_type` has no effect: the calls of the program define which state is saved"
        hint = (
            "plan.full_state_dict() returns the whole state on rank 0; Checkpoints writes shards that every strategy can read"
        )
        draft.add(draft.options["state_dict_type"].path, message, hint, severity=Severity.WARNING)
    kind = draft.kind
    if kind is not None and kind.value not in KINDS:
        draft.add(kind.path, f"`{kind.value}` is not a kind of strategy", did_you_mean(str(kind.value), KINDS, what="kinds"))
    return options


def _kind(draft: StrategyDraft, world: int) -> str:
    """Return the kind of the block, or the one that its mesh or ``stages`` implies; else ``ddp``, or ``none`` for one rank.

    Report a mesh that implies another kind.
    """
    active = {name for name, size in zip(draft.names, draft.shape, strict=True) if size > 1}
    implied = "none"
    if active:
        inner = "tp" if active == {"tp"} else "hybrid"
        implied = "pipeline" if "pp" in active else inner if active & {"cp", "tp"} else "fsdp" if "fsdp" in active else "ddp"
    if draft.kind is None:
        if not draft.mesh_path and "stages" in draft.options:
            return "pipeline"
        return implied if draft.mesh_path else "ddp" if world > 1 else "none"
    kind = str(draft.kind.value)
    # Report only a mesh that implies another kind and does not fit this one. `regular_mesh` checks the axes of all others.
    if implied != kind and active and (not active <= set(AXES[kind]) or not {MAIN_AXIS[kind], "cp"} & set(draft.names)):
        axes = ", ".join(name for name in draft.names if name in active)
        draft.add(
            draft.mesh_path,
            f"a mesh of {axes} means {implied}, but the kind is {kind}",
            f"write kind: {implied}, or remove the kind or the mesh",
        )
    return kind


def _claims(draft: StrategyDraft, sizes: Sequence[int]) -> None:
    world = sum(sizes)
    for claim in draft.worlds:
        if claim.value != world:
            hint = f"give the group {claim.value} ranks, or write {world} here"
            draft.add(claim.path, f"`{claim.path[-1]}` is {claim.value}, but the group has {_ranks(sizes)}", hint)
    claimed = draft.sizes
    if claimed is not None and isinstance(claimed.value, list) and claimed.value != list(sizes):
        wanted = _ranks(claimed.value)
        hint = "write one task for each node, with `ranks:` of these sizes"
        is_product = claimed.path[-1] == "gpus_per_node"
        keys = "`num_nodes` and `gpus_per_node` request" if is_product else f"`{claimed.path[-1]}` requests"
        draft.add(claimed.path, f"{keys} {wanted}, but the group has {_ranks(sizes)}", hint)


def _placement(draft: StrategyDraft, sizes: Sequence[int]) -> None:
    """Report a requested placement that contradicts the tasks. Each task of a world has its own node, except on ``local``."""
    wanted = draft.placement
    if wanted is None:
        return
    word = str(wanted.value).upper()
    message = f"`placement_group` is {word}, but the group has {len(sizes)} tasks on separate nodes (except in a local pool)"
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


def _mesh(draft: StrategyDraft, kind: str, options: Mapping[str, Any], sizes: Sequence[int]) -> dict[str, int]:
    """Return axis → size of the mesh. Without a mesh in the block, compute it from the kind and the options in ``MESH_SIZES``.

    Problems are added to the draft. The result is empty if no mesh can be computed.
    """
    world = sum(sizes)
    if not draft.mesh_path:
        mesh = default_mesh(kind, world, options, sizes[0] if len(set(sizes)) == 1 else None)
    else:
        for name in MESH_SIZES:
            if name in options:
                draft.add(draft.options[name].path, f"`{name}` cannot be combined with a mesh", "remove one of them")
        axes = dict(zip(draft.names, draft.shape, strict=True))
        mesh = regular_mesh(kind, axes, options)
        if (places := prod(draft.shape)) != world:
            product = " × ".join(map(str, draft.shape))
            message = f"the mesh has {product} = {places} places, but the group has {_ranks(sizes)}"
            regular = axes if isinstance(mesh, Misfit) else mesh
            draft.add(draft.mesh_path, message, _other_shape(tuple(regular), tuple(regular.values()), world))
    if isinstance(mesh, Misfit):
        path = draft.mesh_path or (draft.options[mesh.name].path if mesh.name in draft.options else draft.path)
        draft.add(path, mesh.message, mesh.hint)
        return {}
    return mesh


def _other_shape(names: Sequence[str], shape: Sequence[int], world: int) -> str:
    """Return a hint: the mesh for this many ranks with another size of the first axis, if there is one."""
    rest = prod(shape[1:])
    text = ", ".join(names)
    if world % rest == 0:
        fitting = ", ".join(str(size) for size in (world // rest, *shape[1:]))
        return f"write [[{fitting}], [{text}]], or give the group {prod(shape)} ranks"
    return f"give the group {prod(shape)} ranks, or write mesh sizes whose product is {world}"


def _tasks(draft: StrategyDraft, strategy: Strategy, sizes: Sequence[int]) -> None:
    """Report ranks that share a tensor but are not on one node."""
    tp = strategy.mesh.get("tp", 1)
    if over := [size for size in sizes if size % tp]:
        at = draft.mesh_path or (draft.options["tp_size"].path if "tp_size" in draft.options else draft.path)
        message = f"tp is {tp}, but a task has {over[0]} rank{'s' if over[0] != 1 else ''}: "
        message += "ranks that share a tensor communicate in every layer, so they must be on one node"
        fitting = [number for number in range(1, max(sizes) + 1) if all(size % number == 0 for size in sizes)]
        hint = f"set tp to {' or '.join(map(str, fitting))}, and use the other ranks for fsdp"
        draft.add(at, message, hint)


# -- the strategy of a group ------------------------------------------------------------------------------------------

_OWN_CONFIGURATION = (
    "the framework has its own configuration",
    "configure parallelism there, use `framework: pytorch`, or call `world.parallelize` of `distflow.train` to use `strategy`",
)
_OWN_PROGRAM = (
    "the program itself distributes the model",
    "remove `strategy`; for a program that uses PyTorch, you can also write `framework: pytorch`",
)
_UNREAD_BY: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "accelerate": _OWN_CONFIGURATION,
        "deepspeed": _OWN_CONFIGURATION,
        "horovod": _OWN_PROGRAM,
        "jax": _OWN_PROGRAM,
        "tensorflow": _OWN_PROGRAM,
    }
)
"""Frameworks that do not read ``strategy``, each with the reason and the hint of the warning."""


def group_strategy(group: GroupSpec, world: WorldLayout | None) -> tuple[Strategy | None, tuple[Problem, ...]]:
    """Return the strategy of a group and the findings about it; nothing for a group without a ``strategy``."""
    block = group.strategy
    if block is None:
        return None, ()
    if world is None:
        message = "`strategy` needs ranks, but the spec does not define how many ranks this group has"
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
    import yaml  # noqa: PLC0415  only blocks in another form need it

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
    if block is None or framework is None or framework.value not in _UNREAD_BY:
        return ()
    reason, hint = _UNREAD_BY[framework.value]
    message = f"`framework: {framework.value}` does not use `strategy`: {reason}"
    return (Problem(where=block.mark_at(block.path), severity=Severity.WARNING, message=message, hint=hint),)
