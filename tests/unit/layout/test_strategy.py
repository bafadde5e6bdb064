"""Strategy blocks: distflow's own form, the conversion of blocks from other guides, and all rules."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distflow.documents.problems import Mark, Severity
from distflow.layout.strategy.forms import FOREIGN_KEYS
from distflow.layout.strategy.model import parse_strategy
from distflow.train.strategies.description import Strategy
from distflow.train.strategies.options import KINDS, OPTIONS

PAGE = Path(__file__).parents[3] / "docs" / "strategy-forms.md"
ROW = re.compile(r"^\| `(\{.*\})` \| ([0-9 +]+) \| (.*) \|$", re.MULTILINE)


def rows() -> list[tuple[str, tuple[int, ...], str]]:
    """Return the rows of the table of converted blocks in docs/strategy-forms.md."""
    return [(block, tuple(map(int, sizes.split("+"))), answer) for block, sizes, answer in ROW.findall(PAGE.read_text())]


def converted(block: dict[str, Any], sizes: tuple[int, ...]) -> str:
    """Return the converted block or the problem, as the table shows it."""
    strategy, problems = parse_strategy(block, sizes)
    if strategy is None:
        return f"problem: {problems[0].message}"
    text = yaml.safe_dump(strategy.as_block(), default_flow_style=True, sort_keys=False, width=10_000).strip()
    return f"`{text}`" + (f"; warning: {problems[0].message}" if problems else "")


def summary(block: dict[str, Any], sizes: tuple[int, ...]) -> str:
    """Return the parsed strategy of a block as one line."""
    strategy, problems = parse_strategy(block, sizes)
    if strategy is None:
        return f"problem: {problems[0].message}"
    options = "".join(f" {name}={value}" for name, value in sorted(strategy.options.items()))
    warning = f"; warning: {problems[0].message}" if problems else ""
    return f"{strategy.kind} {list(strategy.shape)} {' '.join(strategy.names)}{options}{warning}"


@pytest.mark.parametrize(("block", "sizes", "answer"), rows())
def test_blocks_of_other_guides_are_converted_as_the_page_shows(block: str, sizes: tuple[int, ...], answer: str) -> None:
    assert converted(yaml.safe_load(block), sizes) == answer
    strategy, _ = parse_strategy(yaml.safe_load(block), sizes)
    if strategy is not None:
        parsed_again, _ = parse_strategy(strategy.as_block(), sizes)
        assert parsed_again == strategy
        assert not set(strategy.as_block()) & set(FOREIGN_KEYS)


def test_the_table_of_the_page_is_found() -> None:
    assert len(rows()) > 20


@pytest.mark.parametrize(
    ("block", "sizes", "answer"),
    [
        ("{}", (1,), "none [1] dp"),
        ("{}", (2, 2), "ddp [4] dp"),
        ("{kind: hybrid, tp_size: 2}", (4, 4), "hybrid [4, 2] fsdp tp"),
        ("{kind: tp}", (4,), "tp [4] tp"),
        ("{kind: pipeline}", (2, 2), "pipeline [4] pp"),
        ("{kind: pipeline, stages: 2}", (2, 2), "pipeline [2, 2] pp dp"),
        ("{stages: 2}", (2,), "pipeline [2] pp"),
        ("{kind: fsdp, sharding_strategy: hybrid_shard}", (2, 2), "fsdp [2, 2] dp fsdp sharding_strategy=HYBRID_SHARD"),
        ("{mesh_shape: [[2, 4], [replicate, shard]]}", (4, 4), "fsdp [2, 4] dp fsdp sharding_strategy=HYBRID_SHARD"),
        ("{mesh_shape: [[1, 2, 1, 4], [dp_replicate, dp_shard, cp, tp]]}", (4, 4), "hybrid [2, 4] fsdp tp"),
        ("{mesh_shape: [[2, 4], [pp, dp_replicate]]}", (4, 4), "pipeline [2, 4] pp dp"),
        ("{mesh_shape: [[4, 2], [dp, pp]]}", (4, 4), "pipeline [4, 2] dp pp"),
        ("{mesh_shape: [[2, 2, 2], [dp_replicate, dp_shard, tp]]}", (4, 4), "hybrid [2, 2, 2] dp fsdp tp"),
        ("{mesh_shape: [[4, 2], [dp, tp]]}", (4, 4), "hybrid [4, 1, 2] dp fsdp tp"),
        ("{kind: hybrid, tp_size: 2, shard_size: 2}", (4, 4), "hybrid [2, 2, 2] dp fsdp tp"),
        ("{mesh_shape: [[2, 2, 2, 2], [pp, dp_replicate, dp_shard, tp]]}", (8, 8), "pipeline [2, 2, 2, 2] pp dp fsdp tp"),
        ("{mesh_shape: [[2, 2, 2], [dp_shard, cp, tp]]}", (4, 4), "hybrid [2, 2, 2] fsdp cp tp"),
        ("{kind: hybrid, mesh_shape: [[2, 4], [fsdp, cp]]}", (4, 4), "hybrid [2, 4, 1] fsdp cp tp"),
        ("{kind: hybrid, tp_size: 1, cp_size: 4}", (4, 4), "hybrid [2, 4, 1] fsdp cp tp"),
        ("{kind: pipeline, stages: 2, tp_size: 2}", (4, 4), "pipeline [2, 2, 2] pp dp tp"),
        ("{kind: pipeline, tp_size: 2}", (4, 4), "pipeline [4, 2] pp tp"),
        (
            "{kind: pipeline, shard_size: 4, stages: 2, mixed_precision: bf16}",
            (4, 4),
            "pipeline [2, 4] pp fsdp mixed_precision=bf16",
        ),
        ("{kind: FSDP, mixed_precision: false}", (2,), "fsdp [2] fsdp mixed_precision=none"),
        ("{mesh_shape: [[4, 1], [tp, fsdp]]}", (4,), "tp [4] tp"),
        ("{kind: hybrid, mesh_shape: [[1, 4], [fsdp, tp]]}", (4,), "hybrid [1, 4] fsdp tp"),
        ("{kind: none}", (2,), "none [2] dp"),
    ],
)
def test_missing_values_follow_from_the_ranks(block: str, sizes: tuple[int, ...], answer: str) -> None:
    assert summary(yaml.safe_load(block), sizes) == answer


@pytest.mark.parametrize(
    ("block", "sizes", "message", "hint"),
    [
        ("{knd: ddp}", (2,), "`knd` is not a key of a strategy", "did you mean `kind`?"),
        ("{kind: fdsp}", (2,), "`fdsp` is not a kind of strategy", "did you mean `fsdp`?"),
        ("{mesh_shape: [2, 2]}", (4,), "[2, 2] is not a mesh", "mesh_shape: [[2, 2]"),
        (
            "{mesh_shape: [[2, 2], [fsdp]]}",
            (4,),
            "the mesh needs sizes and equally many names, but has [2, 2] and ['fsdp']",
            "[[2, 2]",
        ),
        ("{mesh_shape: [[0, 2], [fsdp, tp]]}", (4,), "`0` is not a valid size of a mesh axis", "at least 1"),
        ("{mesh_shape: [[-1, 2], [fsdp, tp]]}", (4,), "`-1` is not a valid size of a mesh axis", "at least 1"),
        ("{mesh_shape: [[2, ²], [fsdp, tp]]}", (4,), "`²` is not a valid size of a mesh axis", "at least 1"),
        ("{mesh_shape: [[2, 2], [fsdp, tpp]]}", (4,), "`tpp` is not a known mesh axis", "did you mean `tp`?"),
        ("{mesh_shape: [[2, 2], [tp, cp]]}", (4,), "in the wrong order (tp, cp)", "[[1, 2, 2], [fsdp, cp, tp]]"),
        ("{kind: fsdp, mesh_shape: [[2, 2], [fsdp, cp]]}", (4,), "a mesh of fsdp, cp means hybrid, but", "kind: hybrid"),
        ("{kind: pipeline, cp_size: 2}", (4,), "pipeline has no option `cp_size`", "use it with hybrid"),
        ("{kind: fsdp, sequence_parallel: true}", (2,), "fsdp has no option `sequence_parallel`", "kind: hybrid"),
        ("{mesh_shape: [[2, 2], [dp, data]]}", (4,), "the mesh has an axis twice: dp, data", "once"),
        (
            "{kind: fsdp, mesh_shape: [[2, 2], [dp, tp]]}",
            (4,),
            "a mesh of dp, tp means hybrid, but the kind is fsdp",
            "kind: hybrid",
        ),
        ("{mesh_shape: [[2, 2, 2], [pp, fsdp, dp]]}", (8,), "in the wrong order (pp, fsdp, dp)", "[[2, 2, 2], [pp, dp, fsdp]]"),
        ("{mesh_shape: [[2, 2], [tp, pp]]}", (4,), "in the wrong order (tp, pp)", "[[2, 2], [pp, tp]]"),
        ("{kind: pipeline, stages: 2, mixed_precision: bf16}", (4,), "`mixed_precision` needs the axis fsdp", "add fsdp"),
        ("{kind: pipeline, stages: 2, sequence_parallel: true}", (4,), "`sequence_parallel` needs the axis tp", "add tp"),
        ("{mesh_shape: [[2, 2], [tp, fsdp]]}", (4,), "in the wrong order (tp, fsdp)", "[[2, 2], [fsdp, tp]]"),
        ("{mesh_shape: [[2, 4], [fsdp, tp]]}", (2, 2, 2, 2), "tp is 4, but a task has 2 ranks", "set tp to 1 or 2"),
        (
            "{mesh_shape: [[2, 4], [tp, fsdp]]}",
            (4,),
            "the mesh has 2 × 4 = 8 places",
            "[[1, 4], [tp, fsdp]], or give the group 8",
        ),
        ("{mesh_shape: [[4, 4], [fsdp, tp]]}", (4, 4), "the mesh has 4 × 4 = 16 places", "[[2, 4], [fsdp, tp]]"),
        ("{kind: tp}", (2, 2), "tp is 4, but a task has 2 ranks", "use the other ranks for fsdp"),
        ("{kind: tp, tp_size: 2}", (4,), "`tp_size` is 2, but the number of ranks is 4", "kind: hybrid"),
        ("{kind: hybrid}", (4,), "the size of `tp` is not defined", "tp_size"),
        ("{kind: hybrid, tp_size: 3}", (4,), "`tp_size` is 3, which does not divide 4 ranks", "1, 2, 4"),
        ("{kind: pipeline, stages: 3}", (4,), "`stages` is 3, which does not divide 4 ranks", "1, 2, 4"),
        (
            "{kind: ddp, mesh_shape: [[4, 1], [fsdp, tp]]}",
            (4,),
            "a mesh of fsdp means fsdp, but the kind is ddp",
            "kind: fsdp",
        ),
        ("{kind: ddp, cluster: {name: fsdp}}", (4,), "`name` means fsdp, but `strategy.kind` means ddp", "keep one"),
        ("{kind: fsdp, mesh_shape: [[2], [fsdp]], shape: [2], axis_names: [tp]}", (2,), "the mesh is also in", "keep one"),
        ("{kind: ddp, cpu_offload: true}", (2,), "ddp has no option `cpu_offload`", "kind: fsdp"),
        ("{kind: ddp, mixed_precision: bf16}", (2,), "ddp has no option `mixed_precision`", "torch.autocast"),
        ("{kind: fsdp, compression: fp16}", (2,), "fsdp has no option `compression`", "reduce_dtype"),
        ("{kind: ddp, tp_size: 2}", (2,), "ddp has no option `tp_size`", "use it with tp, hybrid, pipeline"),
        ("{kind: ddp, bucket_cap_mb: 0}", (2,), "`bucket_cap_mb` has an invalid value: 0", "above 0"),
        ("{kind: ddp, compression: zip}", (2,), "`compression` has an invalid value: 'zip'", "`powersgd`"),
        ("{kind: ddp, static_graph: 1}", (2,), "`static_graph` has an invalid value: 1", "true or false"),
        ("{kind: ddp, powersgd_rank: 2}", (2,), "`powersgd_rank` has no effect without PowerSGD", "compression: powersgd"),
        ("{kind: ddp, compression: fp16, sync_gradients_every: 2}", (2,), "exclude each other", "keep one"),
        ("{kind: fsdp, sharding_strategy: NO_SHARD, cpu_offload: true}", (2,), "`cpu_offload` needs shards", "FULL_SHARD"),
        ("{kind: hybrid, tp_size: 2, sharding_strategy: NO_SHARD}", (4,), "hybrid does not support NO_SHARD", "FULL_SHARD"),
        ("{kind: pipeline, sharding_strategy: HYBRID_SHARD}", (4,), "pipeline does not support HYBRID_SHARD", "FULL_SHARD"),
        ("{kind: fsdp, shard_size: 2}", (4,), "`shard_size` has no effect without HYBRID_SHARD", "HYBRID_SHARD"),
        ("{kind: fsdp, min_num_params: 100}", (2,), "`min_num_params` has no effect without wrapping by size", "size"),
        (
            "{kind: fsdp, auto_wrap_policy: size, transformer_layer_cls: Block}",
            (2,),
            "`transformer_layer_cls` has no effect with",
            "transformer",
        ),
        (
            "{kind: fsdp, mesh_shape: [[2, 2], [dp, fsdp]], sharding_strategy: FULL_SHARD}",
            (4,),
            "needs HYBRID_SHARD",
            "HYBRID_SHARD",
        ),
        (
            "{kind: pipeline, micro_batches: 2}",
            (4,),
            "the axis pp busy only with at least 4 micro-batches",
            "gpipe",
        ),
        ("{kind: pipeline, gradient_accumulation_steps: 2}", (2,), "pipeline has no option", "`micro_batches`"),
        (
            "{kind: ddp, global_batch_size: 30, gradient_accumulation_steps: 4}",
            (4,),
            "cannot be divided over 4 data ranks",
            "16",
        ),
        (
            "{kind: ddp, global_batch_size: 64, micro_batch_size: 4}",
            (4,),
            "`micro_batch_size` 4 × 4 data ranks",
            "write 16",
        ),
        (
            "{kind: pipeline, global_batch_size: 4, micro_batch_size: 4}",
            (4,),
            "4, but `micro_batch_size` 4 × 1 data rank × 4 micro-batches",
            "write 16",
        ),
        ("{kind: tp, plan: {q: diagonal}}", (2,), "`plan` has an invalid value: {'q': 'diagonal'}", "`colwise` or `rowwise`"),
        ("{cluster: 3}", (2,), "`cluster` is 3", "keys and values"),
        ("{cluster: {nmae: ray}}", (2,), "`nmae` is not a key of `cluster`", "did you mean `name`?"),
        ("{cluster: {name: slurm}}", (2,), "`slurm` is not a known `name` of `cluster`", "ray"),
        ("{cluster: {name: [ray]}}", (2,), "is not a known `name` of `cluster`", "ray"),
        ("{cluster: {num_gpus: 4}}", (2,), "`num_gpus` is 4, but the group has 2 ranks", "4 ranks"),
        ("{cluster: {placement_group: {strategy: SPREAD}}}", (2, 1), "SPREAD, but a task of the group has 2 ranks", "size: 1"),
        ("{cluster: {placement_group: {strategy: PAK}}}", (2,), "`PAK` is not a placement", "did you mean `PACK`?"),
        ("{cluster: {num_gpus: x}}", (2,), "`num_gpus` is 'x'", "whole number"),
        ("{cluster: {fsdp_config: {bucket_cap_mb: 2}}}", (2,), "`bucket_cap_mb` is not a key of `fsdp_config`", "keys"),
        ("{training: {batchsize: 3}}", (2,), "`batchsize` is not a key of `training`", "did you mean `batch_size`?"),
        ("{mesh: {shape: [2], axis_nams: [dp]}}", (2,), "`axis_nams` is not a key of a mesh", "did you mean `axis_names`?"),
        (
            "{kind: fsdp, mesh_shape: [[2], [fsdp]], shard_size: 2}",
            (2,),
            "`shard_size` cannot be combined with a mesh",
            "remove one",
        ),
    ],
)
def test_each_problem_of_a_strategy_has_a_remedy(block: str, sizes: tuple[int, ...], message: str, hint: str) -> None:
    strategy, problems = parse_strategy(yaml.safe_load(block), sizes)
    assert strategy is None
    assert any(message in problem.message and hint in problem.hint for problem in problems), problems


def test_all_problems_are_reported_at_once_with_their_paths_and_lines() -> None:
    block = {"kind": "ddpp", "bucket_cap_mb": -1, "mesh": {"shape": [2, 2], "axis_names": ["fsdp"]}}
    path = ("workflow", "groups", 0, "strategy")
    _, problems = parse_strategy(block, (4,), path=path, locate=lambda path: Mark("a.yaml", len(path)))
    assert [problem.path.removeprefix("workflow.groups[0].strategy.") for problem in problems] == [
        "mesh",
        "bucket_cap_mb",
        "kind",
    ]
    assert {str(problem.where) for problem in problems} == {"a.yaml:5"}


def test_a_strategy_may_have_a_warning() -> None:
    strategy, problems = parse_strategy({"model": {"name": "llama"}}, (2,))
    assert strategy is not None
    assert [problem.severity for problem in problems] == [Severity.WARNING]


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bucket_cap_mb": st.integers(1, 100),
    "compression": st.sampled_from(["none", "fp16", "bf16", "powersgd"]),
    "mixed_precision": st.sampled_from(["none", "bf16", "fp16"]),
    "sharding_strategy": st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP"]),
    "activation_checkpointing": st.booleans(),
    "cpu_offload": st.booleans(),
    "micro_batch_size": st.integers(1, 64),
    "gradient_accumulation_steps": st.integers(1, 8),
}


@st.composite
def strategies(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return a valid block and the sizes of the tasks."""
    kind = draw(st.sampled_from(KINDS))
    size, tasks = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 4))
    if kind == "tp":
        tasks = 1
    names = [name for name in VALUES if kind in OPTIONS[name].kinds]
    shards = draw(st.sampled_from([number for number in (1, 2, 4, 8) if size % number == 0]))
    if kind == "pipeline" and shards == 1:
        names = [name for name in names if "fsdp" not in OPTIONS[name].kinds or "ddp" in OPTIONS[name].kinds]
    block = {name: draw(VALUES[name]) for name in draw(st.lists(st.sampled_from(names), unique=True))}
    if kind == "hybrid":
        block["tp_size"] = draw(st.sampled_from([number for number in (1, 2, 4, 8) if size % number == 0]))
    if kind == "pipeline":
        block |= {"stages": size // shards, "shard_size": shards}
    return {"kind": kind, **block}, (size,) * tasks


@given(strategies())
def test_the_block_of_a_strategy_is_parsed_to_the_same_strategy(given_block: tuple[dict[str, Any], tuple[int, ...]]) -> None:
    block, sizes = given_block
    strategy, problems = parse_strategy(block, sizes)
    assert isinstance(strategy, Strategy), problems
    assert strategy.world_size == sum(sizes)
    for form in (strategy.as_block(), json.loads(json.dumps(strategy.normalized()))):
        parsed_again, found = parse_strategy(form, sizes)
        assert parsed_again == strategy, found


@given(
    st.dictionaries(
        st.sampled_from(
            [*OPTIONS, "kind", "mesh", "mesh_shape", "cluster", "training", "model", "options", "shape", "stages", "x"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(KINDS) | st.floats(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
            max_leaves=6,
        ),
    ),
    st.lists(st.integers(1, 8), min_size=1, max_size=3),
)
def test_any_block_is_a_strategy_or_has_an_error(block: dict[str, Any], sizes: list[int]) -> None:
    strategy, problems = parse_strategy(block, sizes)
    assert (strategy is None) == any(problem.severity is Severity.ERROR for problem in problems)
    if strategy is not None:
        assert strategy.world_size == sum(sizes)
