"""Tensor parallelism: large matrices cut over the ranks of the axis ``tp``, by a plan or by the names that models commonly use.

In a pair, the first matrix is cut by columns and the second by rows, so that one all-reduce is enough: query, key, value
and output of attention; up, gate and down of an MLP. A module must take the number of heads from the tensor
(``view(batch, time, -1, head_size)``), because each rank sees only its own heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, parallel

from distflow.train.strategies.initial import tied_names

__all__ = ["COLWISE", "ROWWISE", "derive_plan", "own_plan", "split_tensors", "tensor_styles"]

COLWISE = frozenset(
    {
        *("q", "k", "v", "query", "key", "value", "q_proj", "k_proj", "v_proj", "wq", "wk", "wv", "q_lin", "k_lin", "v_lin"),
        *("gate", "up", "gate_proj", "up_proj", "w1", "w3", "fc1", "c_fc", "linear1", "lin1", "fc_in", "dense_h_to_4h"),
    }
)
"""Names of matrices that are cut by columns: each rank computes some of the outputs."""
ROWWISE = frozenset(
    {
        *("o", "out", "output", "proj", "o_proj", "out_proj", "wo", "out_lin"),
        *("down", "down_proj", "w2", "fc2", "c_proj", "linear2", "lin2", "fc_out", "dense_4h_to_h"),
    }
)
"""Names of matrices that are cut by rows: each rank takes some of the inputs, and the results are summed."""
FUSED = frozenset(
    {
        *("qkv", "wqkv", "qkv_proj", "c_attn", "in_proj", "query_key_value", "w_pack", "kv", "kv_proj"),
        *("gate_up", "gate_up_proj", "w12", "w13"),
    }
)
"""Lowercase names of matrices that consist of several matrices, which a cut by columns would mix on each rank."""
_HEADS = ("n_heads", "n_head", "num_heads", "num_attention_heads", "num_key_value_heads", "n_kv_heads", "heads")


def derive_plan(model: nn.Module) -> dict[str, str]:
    """Return a plan from the names of the model's linear layers.

    A module's layers are in the plan if their names show that some are cut by columns, and exactly one by rows. The plan is
    empty without such a module. A matrix that combines several, such as query, key and value, stays whole, and so do its
    siblings: a cut would mix them.
    """
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        linear = [child for child, inner in module.named_children() if isinstance(inner, nn.Linear)]
        columns = [child for child in linear if child in COLWISE]
        rows = [child for child in linear if child in ROWWISE]
        if columns and len(rows) == 1 and not any(child.lower() in FUSED for child in linear):
            prefix = f"{name}." if name else ""
            plan |= {f"{prefix}{child}": "colwise" for child in columns}
            plan[f"{prefix}{rows[0]}"] = "rowwise"
    return plan


_GATHERED = ("colwise_gather_output", "colwise_rep")
"""Hugging Face's styles for a matrix that is cut by columns and whose whole outputs are on every rank, such as the head."""


def own_plan(model: nn.Module, ranks: int) -> dict[str, str]:
    """Return the plan of a Hugging Face model (``tp_plan``), by module name; empty if it has none.

    Embeddings and the head stay whole if they are tied, have a padding row or are not divisible. Raises ``ValueError`` for a
    style that distflow does not support.
    """
    tied = {name.rpartition(".")[0] for names in tied_names(model) for name in names}
    plan: dict[str, str] = {}
    for pattern, style in (getattr(model, "tp_plan", None) or {}).items():
        if style not in ("colwise", "rowwise", "embedding_rowwise", *_GATHERED):
            raise ValueError(
                f"tensor parallelism: the model's `tp_plan` has the style {style!r} for {pattern}, but distflow does not "
                "support this style: give a plan of your own (plan: {...}), or use kind: fsdp"
            )
        for name, module in model.named_modules():
            if not fnmatchcase(name, pattern):
                continue
            rows = getattr(module, "num_embeddings", getattr(module, "out_features", 0))
            may_stay_whole = style == "embedding_rowwise" or style in _GATHERED
            # An embedding with a padding row stays whole: only torch 2.13 is known to keep its gradient at zero after a cut.
            stays = name in tied or rows % ranks or getattr(module, "padding_idx", None) is not None
            if not (may_stay_whole and stays):
                plan[name] = style
    return plan


def _style(name: str) -> parallel.ParallelStyle:
    if name in _GATHERED:
        return parallel.ColwiseParallel(output_layouts=Replicate())
    if name == "embedding_rowwise":
        return parallel.RowwiseParallel(input_layouts=Replicate())
    return parallel.ColwiseParallel() if name == "colwise" else parallel.RowwiseParallel()


def tensor_styles(model: nn.Module, ranks: int, plan: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return module name → style for each matrix of a model that is cut over ``ranks``.

    The styles are those of ``plan``, else of the model's own plan, else of a plan from common names. Raises ``ValueError`` if
    there is no plan or a matrix cannot be cut, and ``TypeError`` if a colwise or rowwise module is not a linear layer.
    """
    chosen = dict(plan or own_plan(model, ranks) or derive_plan(model))
    if not chosen:
        raise ValueError(
            "tensor parallelism: distflow found no matrices to cut. It looks for an attention or MLP that has separate "
            "matrices with known names: some for columns (q_proj, up_proj, …), and exactly one for rows (o_proj, down_proj, "
            "…). For other names, set `plan` of the strategy, such as {'blocks.*.attention.q': 'colwise', …}"
        )
    modules = dict(model.named_modules())
    styles: dict[str, str] = {}
    for pattern, style in chosen.items():
        matching = [name for name in modules if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(f"tensor parallelism: the plan names {pattern!r}, but the model has no such module")
        for name in matching:
            if style in ("colwise", "rowwise"):
                _check(name, modules, style, ranks)
            styles[name] = style
    return styles


def split_tensors(
    model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, str], sequence_layers: Sequence[nn.Module] | None = None
) -> None:
    """Cut the matrices of a model, or of one of its stages, over a mesh of one axis, in place.

    ``styles`` are those of the whole model. ``sequence_layers`` also use sequence parallelism.
    """
    modules = dict(model.named_modules())
    own = {name: _style(style) for name, style in styles.items() if name in modules}
    if sequence_layers:  # a stage may have no layer
        _divide_sequence(sequence_layers, mesh, {modules[name]: name for name in own}, own)
    parallel.parallelize_module(model, mesh, own)


def _divide_sequence(
    layers: Sequence[nn.Module], mesh: DeviceMesh, cut: Mapping[nn.Module, str], styles: dict[str, parallel.ParallelStyle]
) -> None:
    """Divide the sequence over the ranks in these layers, except from the first to the second matrix of each pair.

    The second matrix scatters its sums along the sequence. Norms compute on parts, and return the whole sequence for the next
    matrices. Raises ``ValueError`` for layers without norms, or with a matrix that is not cut.
    """
    for layer in layers:
        kind = type(layer).__name__
        norms = [child for child in layer.children() if type(child).__name__.endswith("Norm")]
        linear = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        if not norms:
            raise ValueError(
                f"sequence_parallel: {kind} has no norm layer: it needs a direct child whose class name ends in `Norm`; "
                "name another class in transformer_layer_cls, or remove sequence_parallel"
            )
        if whole := [name for name, module in layer.named_modules() if module in linear and module not in cut]:
            raise ValueError(
                f"sequence_parallel: the tensor-parallel plan does not contain {', '.join(whole)} of {kind}: add them to "
                f"`plan` as colwise or rowwise, with patterns such as '*.{whole[0]}', or remove sequence_parallel"
            )
        for module in linear:
            if isinstance(styles[cut[module]], parallel.RowwiseParallel):
                styles[cut[module]] = parallel.RowwiseParallel(output_layouts=Shard(1))
        for norm in norms:
            parallel.parallelize_module(norm, mesh, parallel.SequenceParallel())
            gathered = parallel.PrepareModuleOutput(
                output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
            )
            parallel.parallelize_module(norm, mesh, gathered)

    def check(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if len(inputs) != 1:
            raise ValueError(
                f"sequence_parallel: {type(layer).__name__} got {len(inputs)} positional arguments, but needs exactly one: "
                "pass the hidden states of shape (batch, time, …) by position, and all other arguments by name"
            )
        if (length := inputs[0].shape[1]) % mesh.size():
            what = (
                f"sequence_parallel: the sequence length {length} is not a multiple of the {mesh.size()} ranks of the axis tp"
            )
            raise ValueError(f"{what}: pad the sequences")

    layers[0].register_forward_pre_hook(check)
    part = parallel.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
    parallel.parallelize_module(layers[0], mesh, part)
    parallel.parallelize_module(
        layers[-1], mesh, parallel.PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    )


_WITHOUT = (
    "set the strategy's `plan`, and leave out this layer and the layers that are split together with it (such as q_proj, "
    "k_proj, v_proj and o_proj, or up_proj and down_proj)"
)


def _check(name: str, modules: Mapping[str, nn.Module], style: str, ranks: int) -> None:
    module = modules[name]
    if not isinstance(module, nn.Linear):
        kind = type(module).__name__
        remedy = f"remove {name} from the plan, or name nn.Linear layers inside it instead"
        raise TypeError(f"tensor parallelism: {name} has the type {kind}, but colwise and rowwise need nn.Linear: {remedy}")
    last = name.rpartition(".")[2]
    # An unknown matrix with three times as many outputs is likely query, key and value in one.
    tripled = module.out_features == 3 * module.in_features and last not in COLWISE
    if style == "colwise" and (last.lower() in FUSED or tripled):
        raise ValueError(
            f"tensor parallelism: {name} seems to combine several matrices, such as query, key and value, which colwise would "
            "mix. Split it into layers (q_proj, k_proj, v_proj), or remove it and the rowwise layer after it from the plan. If "
            "it is one matrix, give it a name that distflow knows as colwise, such as up_proj"
        )
    what, features = ("outputs", module.out_features) if style == "colwise" else ("inputs", module.in_features)
    if features % ranks:
        raise ValueError(
            f"tensor parallelism: {name} has {features} {what}, which {ranks} ranks cannot share equally: "
            f"choose a size of `tp` that divides {features}, or {_WITHOUT}"
        )
    parent = modules[name.rpartition(".")[0]]
    for attribute in _HEADS:
        heads = getattr(parent, attribute, None)
        if isinstance(heads, int) and heads % ranks:
            raise ValueError(
                f"tensor parallelism: {name} cannot be split over {ranks} ranks, because {attribute} is {heads}: choose a size "
                f"of `tp` that divides {heads}, or {_WITHOUT}"
            )
    size = getattr(parent, "head_dim", None)
    if isinstance(size, int) and features // ranks % size:
        raise ValueError(
            f"tensor parallelism: {name} has {features // size} heads (`head_dim` is {size}), which {ranks} ranks cannot "
            f"share equally: choose a size of `tp` that divides the number of heads, or {_WITHOUT}"
        )
