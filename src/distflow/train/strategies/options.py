"""The options of training strategies as dataclasses, and their validation.

A spec is validated before anything starts, and the arguments of ``parallelize`` when it is called. Options that torch has too
have torch's names (``bucket_cap_mb``, ``sharding_strategy``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

__all__ = [
    "AXES",
    "DDP",
    "FSDP",
    "KINDS",
    "MAIN_AXIS",
    "MESH_SIZES",
    "OPTIONS",
    "STRATEGIES",
    "HybridParallel",
    "InvalidOption",
    "Misfit",
    "NotParallel",
    "Option",
    "PipelineParallel",
    "StrategyOptions",
    "TensorParallel",
    "clashes",
    "default_mesh",
    "micro_batches",
    "misfits",
    "normal_value",
    "regular_mesh",
]

AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ddp": ("dp",), "fsdp": ("dp", "fsdp"), "tp": ("tp",), "hybrid": ("dp", "fsdp", "cp", "tp"),
        "pipeline": ("pp", "dp", "fsdp", "tp"), "none": ("dp",),
    }
)  # fmt: skip
"""The mesh axes of each kind, from the outermost to the innermost: ranks that differ only in the last axis are neighbors."""
MAIN_AXIS: Mapping[str, str] = MappingProxyType({**{kind: axes[-1] for kind, axes in AXES.items()}, "pipeline": "pp"})
"""The axis that every mesh of a kind has."""
KINDS = tuple(AXES)
"""The kinds: replicas, shards, tensor parallelism, tensor parallelism with shards, pipeline stages, and no parallelism."""

MESH_SIZES: Mapping[str, str] = MappingProxyType({"tp_size": "tp", "cp_size": "cp", "shard_size": "fsdp", "stages": "pp"})
"""Option → mesh axis whose size it sets. One axis whose size is not set takes the remaining ranks (``default_mesh``)."""


class InvalidOption(Exception):
    """An option has an invalid value; the text describes valid values."""


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The options of every kind of strategy. ``None`` means that an option is not given."""

    kind: ClassVar[str] = ""
    """The name of the kind in a spec."""

    micro_batch_size: int | None = None
    """Samples of one pass on one rank."""
    global_batch_size: int | None = None
    """Samples of one step on all ranks."""
    timeout_s: float | None = None
    """Time limit of a collective in seconds. ``init`` reads it from the spec."""

    def given(self) -> dict[str, object]:
        """Return name → value of the given options, as in a spec."""
        return {option.name: value for option in fields(self) if (value := getattr(self, option.name)) is not None}


@dataclass(frozen=True, kw_only=True)
class _Accumulation(StrategyOptions):
    gradient_accumulation_steps: int | None = None
    """Forward and backward passes of one step."""


@dataclass(frozen=True, kw_only=True)
class _Layers(StrategyOptions):
    activation_checkpointing: bool | None = None
    """Compute the repeated layers again in the backward pass, instead of keeping their activations."""
    transformer_layer_cls: str | Sequence[str] | None = None
    """Class names of the repeated layers."""


@dataclass(frozen=True, kw_only=True)
class _Shards(_Layers):
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] | None = None
    mixed_precision: Literal["none", "bf16", "fp16"] | bool | None = None
    """The dtype of parameters in computations; true is bf16."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """The dtype in which gradients are reduced."""
    cpu_offload: bool | None = None
    """Keep shards in CPU memory."""
    auto_wrap_policy: Literal["none", "transformer_layer", "size"] | None = None
    min_num_params: int | None = None
    """Modules with at least this many parameters are gathered separately, with ``auto_wrap_policy="size"``."""
    state_dict_type: Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT"] | None = None
    """Accepted as in FSDP; changes nothing."""
    shard_size: int | None = None
    """The size of the axis ``fsdp``: the number of ranks over which each parameter is sharded. The axis ``dp`` has copies."""


@dataclass(frozen=True, kw_only=True)
class _Tensors(StrategyOptions):
    plan: Mapping[str, str] | None = None
    """Name pattern of modules → ``colwise`` or ``rowwise``."""
    tp_size: int | None = None
    """Ranks that share a tensor."""
    sequence_parallel: bool | None = None
    """Each rank keeps only its part of the sequence between attention and MLP, and computes the norms of this part."""


@dataclass(frozen=True, kw_only=True)
class DDP(_Accumulation, _Layers):
    """Replicas: each rank holds the whole model."""

    kind: ClassVar[str] = "ddp"
    bucket_cap_mb: float | None = None
    static_graph: bool | None = None
    find_unused_parameters: bool | None = None
    gradient_as_bucket_view: bool | None = None
    compression: Literal["none", "fp16", "bf16", "powersgd"] | None = None
    powersgd_rank: int | None = None
    sync_gradients_every: int | None = None
    """Steps between two averages of the parameters (local SGD)."""


@dataclass(frozen=True, kw_only=True)
class FSDP(_Accumulation, _Shards):
    """Shards of parameters, gradients and optimizer states, by default 1/N per rank. ``shard_size`` needs ``HYBRID_SHARD``."""

    kind: ClassVar[str] = "fsdp"


@dataclass(frozen=True, kw_only=True)
class TensorParallel(_Accumulation, _Layers, _Tensors):
    """Each rank holds a part of the large matrices, and all ranks get the same data."""

    kind: ClassVar[str] = "tp"


@dataclass(frozen=True, kw_only=True)
class HybridParallel(_Accumulation, _Shards, _Tensors):
    """Tensor parallelism in groups of ``tp_size`` ranks, and shards over these groups."""

    kind: ClassVar[str] = "hybrid"
    cp_size: int | None = None
    """Ranks that share a sequence (context parallelism); GPUs only."""


@dataclass(frozen=True, kw_only=True)
class PipelineParallel(_Shards, _Tensors):
    """Each rank holds some layers (a stage), or a part of them, and micro-batches flow through the stages."""

    kind: ClassVar[str] = "pipeline"
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] | None = None
    stages_per_rank: int | None = None
    """Stages that each rank holds with ``interleaved_1f1b``, by default 2."""
    split_points: str | Sequence[str] | None = None
    """The modules that begin the second and each further stage."""
    micro_batches: int | None = None
    stages: int | None = None
    """The number of ranks of the axis ``pp``, each of which holds one stage, or ``stages_per_rank`` stages."""


@dataclass(frozen=True, kw_only=True)
class NotParallel(_Accumulation):
    """One rank, or ranks that do not train together."""

    kind: ClassVar[str] = "none"


STRATEGIES: Mapping[str, type[StrategyOptions]] = MappingProxyType(
    {one.kind: one for one in (DDP, FSDP, TensorParallel, HybridParallel, PipelineParallel, NotParallel)}
)
"""The options of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The valid values of an option, and the kinds that have it."""

    kinds: tuple[str, ...]
    words: tuple[str, ...]
    """The valid values, if they are a fixed list; else empty, and ``type`` decides."""
    type: Any
    instead: str
    """The hint if the option is given for another kind; may be empty."""


_INSTEAD = {
    "compression": "it needs `kind: ddp`; fsdp, hybrid and pipeline have `reduce_dtype` instead",
    "sync_gradients_every": "only replicas can drift apart between two averages: use `kind: ddp`",
    "mixed_precision": "it needs fsdp, hybrid or pipeline; otherwise use torch.autocast in the program",
    "reduce_dtype": "with ddp, write `compression: bf16` or `fp16`",
    "sequence_parallel": "it needs tensor parallelism: use `kind: tp`, `kind: hybrid`, or `kind: pipeline` with the axis tp",
    "cpu_offload": "only sharded parameters can be kept on the CPU: use `kind: fsdp`, `hybrid` or `pipeline`",
    "micro_batches": "without stages, use `gradient_accumulation_steps`",
    "gradient_accumulation_steps": "in a pipeline, use `micro_batches`",
}
_TYPES = {
    name: get_args(hint)[0]
    for options in STRATEGIES.values()
    for name, hint in get_type_hints(options).items()
    if name != "kind" and name not in MESH_SIZES
}
OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        name: Option(
            kinds=tuple(kind for kind, options in STRATEGIES.items() if name in options.__dataclass_fields__),
            words=get_args(its_type) if get_origin(its_type) is Literal else (),
            type=get_origin(its_type) or its_type,
            instead=_INSTEAD.get(name, ""),
        )
        for name, its_type in _TYPES.items()
    }
)
"""Every option by its name, without those in ``MESH_SIZES``."""

_VALID: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (lambda value: type(value) is int and value >= 1, "a whole number of at least 1"),
    float: (lambda value: type(value) in (int, float) and 0 < value < float("inf"), "a number above 0"),
    str: (
        lambda value: isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value or [""]),
        "a name, or a list of names",
    ),
    Mapping: (
        lambda value: (
            isinstance(value, Mapping)
            and all(isinstance(name, str) and style in ("colwise", "rowwise") for name, style in (value or {"": ""}).items())
        ),
        "a mapping from module names (`blocks.*.attention.q`) to `colwise` or `rowwise`",
    ),
}
"""Option type → function that returns whether a value is valid, and description of valid values."""


def normal_value(name: str, value: object) -> object:
    """Return the value of an option, or of a mesh axis, in its normal form. Raises ``InvalidOption`` for an invalid one."""
    words = OPTIONS[name].words if name in OPTIONS else ()
    if words:
        if name == "mixed_precision" and isinstance(value, bool):  # other tools use true and false
            value = "bf16" if value else "none"
        known = {word.lower(): word for word in words}
        if not isinstance(value, str) or value.lower() not in known:
            raise InvalidOption(f"one of {', '.join(f'`{word}`' for word in words)}")
        return known[value.lower()]
    its_type = OPTIONS[name].type if name in OPTIONS else int
    if its_type is str and isinstance(value, str):
        value = [value]
    is_valid, description = _VALID[its_type]
    if not is_valid(value):
        raise InvalidOption(description)
    return list(value) if isinstance(value, tuple) else value


class Misfit(NamedTuple):
    """An option that does not fit the kind, the mesh or another option."""

    name: str
    """The name of the option."""
    message: str
    hint: str
    """What to do instead."""


def misfits(kind: str, names: Iterable[str]) -> Iterator[Misfit]:
    """Yield the options that a kind does not have; unknown names are skipped."""
    for name in names:
        if name in OPTIONS and kind not in OPTIONS[name].kinds:
            option = OPTIONS[name]
            yield Misfit(name, f"{kind} has no option `{name}`", option.instead or f"use it with {', '.join(option.kinds)}")
        if name in MESH_SIZES and MESH_SIZES[name] not in AXES[kind]:
            having = ", ".join(one for one, axes in AXES.items() if MESH_SIZES[name] in axes)
            yield Misfit(name, f"{kind} has no option `{name}`", f"use it with {having}")


def default_mesh(kind: str, ranks: int, options: Mapping[str, Any], per_node: int | None) -> dict[str, int] | Misfit:
    """Return axis → size of a mesh over all ranks, or a ``Misfit``. Options in ``MESH_SIZES`` set the sizes of their axes.

    ``per_node`` is the default ``shard_size`` of HYBRID_SHARD: the ranks on each node, or ``None`` if nodes differ.
    """
    sizes = {axis: int(options[name]) for name, axis in MESH_SIZES.items() if name in options}
    has_replicas = kind == "fsdp" and options.get("sharding_strategy") == "HYBRID_SHARD"
    if kind == "tp" and sizes.setdefault("tp", ranks) != ranks:
        hint = "remove `tp_size`, or write kind: hybrid, which shards the model over groups of `tp_size` ranks"
        return Misfit("tp_size", f"`tp_size` is {sizes['tp']}, but the number of ranks is {ranks}", hint)
    if kind == "fsdp" and not has_replicas and "shard_size" in options:
        message = "`shard_size` has no effect without HYBRID_SHARD: all ranks share the shards"
        return Misfit("shard_size", message, "add sharding_strategy: HYBRID_SHARD, or remove `shard_size`")
    if has_replicas and per_node is not None:
        sizes.setdefault("fsdp", per_node)
    for name, axis in (("tp_size", "tp"),) if kind == "hybrid" else (("shard_size", "fsdp"),) if has_replicas else ():
        if axis not in sizes:
            axes = "fsdp, tp" if axis == "tp" else "dp, fsdp"
            return Misfit(name, f"the size of `{axis}` is not defined", f"add {name}, or mesh_shape: [[…, …], [{axes}]]")
    rest = ranks
    for name, axis in MESH_SIZES.items():
        if rest % sizes.get(axis, 1):
            fitting = ", ".join(str(number) for number in range(1, rest + 1) if rest % number == 0)
            left = f"{'the remaining ' * (rest < ranks)}{rest} rank{'s' * (rest > 1)}"
            return Misfit(name, f"`{name}` is {sizes[axis]}, which does not divide {left}", f"use one of {fitting}")
        rest //= sizes.get(axis, 1)
    outer = next((axis for axis in (MAIN_AXIS[kind], "fsdp" if kind == "hybrid" else "dp") if axis not in sizes), "dp")
    sizes[outer] = rest
    return regular_mesh(kind, {axis: sizes[axis] for axis in AXES[kind] if axis in sizes}, options)


def regular_mesh(kind: str, sizes: Mapping[str, int], options: Mapping[str, Any]) -> dict[str, int] | Misfit:
    """Return axis → size of a mesh without the axes of size 1 that the kind does not need, or a ``Misfit``.

    ``sizes`` are in the order of the mesh.
    """
    needed = {"hybrid": {"fsdp", "tp"}, "fsdp": {"fsdp"}}.get(kind, {MAIN_AXIS[kind]})
    if kind == "fsdp" and options.get("sharding_strategy") == "HYBRID_SHARD":
        needed = {"dp", "fsdp"}
    written = [axis for axis, size in sizes.items() if size > 1]
    if foreign := [axis for axis in written if axis not in AXES[kind]]:
        return Misfit("mesh_shape", f"{kind} has no axis {foreign[0]}", f"its axes are {', '.join(AXES[kind])}")
    order = [axis for axis in AXES[kind] if axis in written or axis in needed]
    if kind == "pipeline" and written[:2] == ["dp", "pp"]:  # neighboring ranks are stages instead of replicas
        order[:2] = ["dp", "pp"]
    if written != [axis for axis in order if axis in written]:
        message = f"the axes of the mesh are in the wrong order ({', '.join(written)}): ranks of the last axis are neighbors"
        hint = f"write [[{', '.join(str(sizes.get(axis, 1)) for axis in order)}], [{', '.join(order)}]]"
        return Misfit("mesh_shape", message, hint)
    return {axis: sizes.get(axis, 1) for axis in order}


_SHARDING = ("sharding_strategy", "mixed_precision", "reduce_dtype", "cpu_offload", "auto_wrap_policy")


def clashes(kind: str, mesh: Mapping[str, int], options: Mapping[str, Any]) -> Iterator[Misfit]:
    """Yield options that exclude each other, that have no effect without another one, or that do not fit the mesh.

    ``mesh`` is axis → size; the options are in their normal form.
    """
    sharding = options.get("sharding_strategy", "FULL_SHARD")
    if sharding == "NO_SHARD":
        for name in ("cpu_offload", "mixed_precision", "reduce_dtype"):
            if options.get(name, False) not in (False, "none"):
                yield Misfit(name, f"`{name}` needs shards, but NO_SHARD creates none", f"use FULL_SHARD, or remove `{name}`")
    if kind in ("hybrid", "pipeline") and sharding in ("HYBRID_SHARD", "NO_SHARD"):
        message = f"{kind} does not support {sharding}: the axes dp and fsdp of the mesh define replicas and shards"
        yield Misfit("sharding_strategy", message, "write FULL_SHARD or SHARD_GRAD_OP")
    if kind == "fsdp" and "dp" in mesh and sharding != "HYBRID_SHARD":
        message = f"a mesh of dp and fsdp needs HYBRID_SHARD, not {sharding}"
        yield Misfit("sharding_strategy", message, "write HYBRID_SHARD, or a mesh of one axis")
    if "powersgd_rank" in options and options.get("compression") != "powersgd":
        yield Misfit("powersgd_rank", "`powersgd_rank` has no effect without PowerSGD", "write compression: powersgd")
    if options.get("sync_gradients_every", 1) > 1 and options.get("compression", "none") != "none":
        message = "`compression` and `sync_gradients_every` exclude each other: between two averages no gradient is sent"
        yield Misfit("compression", message, "keep one of the two")
    if kind in ("fsdp", "hybrid", "pipeline"):
        yield from _wrapping(options)
    if kind == "pipeline":
        yield from _staging(mesh["pp"], options)
        yield from _without_axis(mesh, options)
    if "global_batch_size" in options:
        yield from _batches(mesh, options)


def _without_axis(mesh: Mapping[str, int], options: Mapping[str, Any]) -> Iterator[Misfit]:
    for axis, names in (("fsdp", _SHARDING), ("tp", ("plan", "sequence_parallel"))):
        for name in names if axis not in mesh else ():
            if options.get(name, False) not in (False, "none"):
                yield Misfit(name, f"`{name}` needs the axis {axis}, which the mesh does not have", f"add {axis} to the mesh")


def micro_batches(mesh: Mapping[str, int], options: Mapping[str, Any]) -> int:
    """Return the number of micro-batches (accumulation steps) of a step.

    The default is the size of the axis ``pp`` with ``micro_batch_size``, else 1. (A pipeline then chooses the number itself.)
    """
    default = mesh.get("pp", 1) if "micro_batch_size" in options else 1
    return int(options.get("gradient_accumulation_steps", options.get("micro_batches", default)))


def _staging(ranks: int, options: Mapping[str, Any]) -> Iterator[Misfit]:
    count, schedule = options.get("micro_batches", ranks), options.get("schedule")
    if schedule != "gpipe" and count < ranks:
        message = f"1F1B keeps the {ranks} ranks of the axis pp busy only with at least {ranks} micro-batches, not {count}"
        yield Misfit("micro_batches", message, f"write micro_batches: {ranks} or more, or schedule: gpipe")
    if "stages_per_rank" in options and (schedule != "interleaved_1f1b" or options["stages_per_rank"] == 1):
        message = "`stages_per_rank` needs an interleaved schedule and at least 2 stages on each rank"
        yield Misfit("stages_per_rank", message, "write schedule: interleaved_1f1b and stages_per_rank: 2 or more")


def _wrapping(options: Mapping[str, Any]) -> Iterator[Misfit]:
    policy = options.get("auto_wrap_policy")
    if "min_num_params" in options and policy != "size":
        message = "`min_num_params` has no effect without wrapping by size"
        yield Misfit("min_num_params", message, "write auto_wrap_policy: size")
    if "transformer_layer_cls" in options and policy in ("size", "none"):
        message = f"`transformer_layer_cls` has no effect with auto_wrap_policy: {policy}"
        yield Misfit("transformer_layer_cls", message, "write auto_wrap_policy: transformer_layer")


def _batches(mesh: Mapping[str, int], options: Mapping[str, Any]) -> Iterator[Misfit]:
    """Yield inconsistent batch sizes. The rule is: global = per rank × data ranks × accumulation."""
    whole, micro = options["global_batch_size"], options.get("micro_batch_size")
    steps = micro_batches(mesh, options)
    data = mesh.get("dp", 1) * mesh.get("fsdp", 1)
    parts = f"{data} data rank{'s' if data != 1 else ''} × {steps} micro-batch{'es' if steps != 1 else ''}"
    if micro is not None and whole != micro * data * steps:
        message = f"`global_batch_size` is {whole}, but `micro_batch_size` {micro} × {parts} is {micro * data * steps}"
        yield Misfit("global_batch_size", message, f"write {micro * data * steps}, or remove `global_batch_size`")
    elif whole % (data * steps):
        message = f"a global batch of {whole} cannot be divided over {parts}"
        yield Misfit("global_batch_size", message, f"use a multiple of {data * steps}")
