"""The options of training strategies: their names, what values they take, and with which kinds they go. Pure.

The names are torch's where torch has one (``bucket_cap_mb``, ``sharding_strategy``), so that a reader finds them there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["KINDS", "MESH_SIZES", "OPTIONS", "Option", "Wrong"]

KINDS = ("ddp", "fsdp", "tp", "hybrid", "pipeline", "none")
"""What a strategy can be: replicated, sharded, tensor parallel, sharded × tensor parallel, in stages, or a plain module."""

MESH_SIZES: Mapping[str, str] = MappingProxyType({"tp_size": "tp", "shard_size": "fsdp", "stages": "pp"})
"""Options that give the size of a mesh axis, and that axis; the other axis takes what is left of the ranks."""


class Wrong(Exception):
    """A value does not fit an option; the text says what would."""


def _flag(value: object) -> object:
    if isinstance(value, bool):
        return value
    raise Wrong("true or false")


def _count(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise Wrong("a whole number of at least 1")


def _number(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return value
    raise Wrong("a number above 0")


def _names(value: object) -> object:
    names = [value] if isinstance(value, str) else value
    if isinstance(names, list | tuple) and names and all(isinstance(name, str) and name for name in names):
        return list(names)
    raise Wrong("a name, or a list of names")


def _plan(value: object) -> object:
    if isinstance(value, Mapping) and value and all(isinstance(name, str) for name in value):
        styles = list(value.values())
        if all(style in ("colwise", "rowwise") for style in styles):
            return dict(value)
    raise Wrong("a mapping from module names (`blocks.*.attention.q`) to `colwise` or `rowwise`")


def _choice(*words: str, lower: bool = True) -> Callable[[object], object]:
    def check(value: object) -> object:
        word = (value.lower() if lower else value.upper()) if isinstance(value, str) else value
        if word in words:
            return word
        raise Wrong(f"one of {', '.join(f'`{known}`' for known in words)}")

    return check


def _precision(value: object) -> object:
    """Return the precision; ``true`` is bf16, as the guides' ``mixed_precision: true`` sets it."""
    if isinstance(value, bool):
        return "bf16" if value else "none"
    return _choice("none", "bf16", "fp16")(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option."""

    kinds: tuple[str, ...]
    """The kinds that it goes with."""
    check: Callable[[object], object]
    """Returns the value in its normal form, or raises ``Wrong``."""
    instead: str = ""
    """What to say to those who use it with another kind; empty for nothing."""


_SHARDED = ("fsdp", "hybrid")
_REPEATED = ("ddp", "fsdp", "tp", "hybrid")
_ALL = ("ddp", "fsdp", "tp", "hybrid", "pipeline", "none")

OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "bucket_cap_mb": Option(kinds=("ddp",), check=_number),
        "static_graph": Option(kinds=("ddp",), check=_flag),
        "find_unused_parameters": Option(kinds=("ddp",), check=_flag),
        "gradient_as_bucket_view": Option(kinds=("ddp",), check=_flag),
        "compression": Option(
            kinds=("ddp",),
            check=_choice("none", "fp16", "bf16", "powersgd"),
            instead="with sharding, `reduce_dtype: bf16` halves what is sent",
        ),
        "powersgd_rank": Option(kinds=("ddp",), check=_count),
        "sync_gradients_every": Option(
            kinds=("ddp",), check=_count, instead="only replicas can drift apart between two averages: use `kind: ddp`"
        ),
        "sharding_strategy": Option(
            kinds=_SHARDED, check=_choice("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", lower=False)
        ),
        "mixed_precision": Option(
            kinds=_SHARDED,
            check=_precision,
            instead="with ddp, `compression: bf16` halves what is sent; for bf16 arithmetic use torch.autocast in the program",
        ),
        "reduce_dtype": Option(
            kinds=_SHARDED, check=_choice("fp32", "bf16", "fp16"), instead="with ddp, say `compression: bf16` or `fp16`"
        ),
        "cpu_offload": Option(
            kinds=_SHARDED, check=_flag, instead="only sharded parameters can be kept on the CPU: `kind: fsdp`"
        ),
        "activation_checkpointing": Option(kinds=_REPEATED, check=_flag),
        "auto_wrap_policy": Option(kinds=_SHARDED, check=_choice("none", "transformer_layer", "size")),
        "transformer_layer_cls": Option(kinds=_REPEATED, check=_names),
        "min_num_params": Option(kinds=_SHARDED, check=_count),
        "state_dict_type": Option(kinds=_SHARDED, check=_choice("FULL_STATE_DICT", "SHARDED_STATE_DICT", lower=False)),
        "plan": Option(kinds=("tp", "hybrid"), check=_plan),
        "schedule": Option(kinds=("pipeline",), check=_choice("gpipe", "1f1b")),
        "split_points": Option(kinds=("pipeline",), check=_names),
        "micro_batches": Option(
            kinds=("pipeline",), check=_count, instead="without stages, micro-batches are `gradient_accumulation_steps`"
        ),
        "gradient_accumulation_steps": Option(
            kinds=("ddp", "fsdp", "tp", "hybrid", "none"), check=_count, instead="in a pipeline these are the `micro_batches`"
        ),
        "micro_batch_size": Option(kinds=_ALL, check=_count),
        "global_batch_size": Option(kinds=_ALL, check=_count),
        "timeout_s": Option(kinds=_ALL, check=_number),
    }
)
"""Every option by its name. Sizes of mesh axes (``MESH_SIZES``) are read before and do not stand here."""
