"""The estimated memory of a rank, and the strategies that are proposed for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.layout.strategy.memory import OPTIMIZERS, PRECISIONS, Model, advise, guess_model, parse_count
from distflow.layout.strategy.model import parse_strategy

GIB = 2**30
SEVEN = Model(parameters=7_000_000_000, layers=32, hidden=4096)
SEVENTY = Model(parameters=70_000_000_000, layers=80, hidden=8192)


def chosen_strategy(model: Model, gpus: int, memory_gib: int, **more: int | str) -> str:
    settings = {"gpus_per_node": 8, **more}
    advice = advise(model, gpus=gpus, gpu_memory=memory_gib * GIB, **settings)  # type: ignore[arg-type]
    chosen = advice.chosen
    return "nothing" if chosen is None else " ".join([chosen.kind, *map(str, chosen.shape), *sorted(chosen.options)])


@pytest.mark.parametrize(
    ("model", "gpus", "memory", "wanted"),
    [
        (Model(parameters=124_000_000, layers=12, hidden=768), 1, 24, "none 1"),
        (Model(parameters=124_000_000, layers=12, hidden=768), 4, 24, "ddp 4"),
        (Model(parameters=1_300_000_000, layers=24, hidden=2048), 8, 24, "fsdp 8 mixed_precision"),
        (Model(parameters=1_150_000_000, layers=24, hidden=2048), 2, 24, "ddp 2 activation_checkpointing"),
        (SEVEN, 16, 80, "fsdp 16 mixed_precision"),
        (SEVEN, 8, 24, "fsdp 8 activation_checkpointing mixed_precision"),
        (SEVENTY, 16, 80, "hybrid 8 2 activation_checkpointing mixed_precision"),
        (SEVENTY, 8, 80, "fsdp 8 activation_checkpointing cpu_offload mixed_precision"),
        (Model(parameters=1_000_000_000_000, layers=128, hidden=25600), 8, 24, "nothing"),
    ],
)  # fmt: skip
def test_the_simplest_strategy_that_fits_is_chosen(model: Model, gpus: int, memory: int, wanted: str) -> None:
    assert chosen_strategy(model, gpus, memory) == wanted


def test_the_arithmetic_is_shown_line_by_line() -> None:
    advice = advise(SEVEN, gpus=16, gpus_per_node=8, gpu_memory=80 * GIB)
    chosen = advice.chosen
    assert chosen is not None
    assert [(line.what, line.formula, line.bytes) for line in chosen.lines] == [
        ("parameters", "7B × 4 B / 16", 1_750_000_000),
        ("gradients", "7B × 4 B / 16", 1_750_000_000),
        ("adamw states", "7B × 8 B / 16", 3_500_000_000),
        ("gathered layers", "3 × 218.8M × 2 B", 1_312_500_000),
        ("activations", "32 layers × 34 B × 2048 tokens × 4096", 9_126_805_504),
    ]
    assert chosen.bytes == 17_439_305_504
    assert advice.usable == int(72 * GIB)


def test_a_strategy_that_does_not_fit_names_the_needed_and_the_usable_memory() -> None:
    first = advise(SEVEN, gpus=8, gpus_per_node=8, gpu_memory=80 * GIB).choices[0]
    assert (first.kind, first.fits, first.why) == ("ddp", False, "needs 125.8 GiB on each GPU, but 72.0 GiB are usable")


@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("precision", sorted(PRECISIONS))
def test_each_choice_sets_its_precision_by_an_option_or_needs_autocast(gpus: int, precision: str) -> None:
    """For bf16, a strategy has either the option ``mixed_precision`` or needs autocast. For fp32, it has neither."""
    for choice in advise(SEVEN, gpus=gpus, gpus_per_node=8, gpu_memory=80 * GIB, precision=precision).choices:
        assert choice.precision == precision
        by_option = precision == "bf16" and choice.kind in ("fsdp", "hybrid")
        assert (choice.options.get("mixed_precision") == "bf16") is by_option
        assert choice.needs_autocast is (precision == "bf16" and not by_option)


def test_tensor_parallelism_stays_within_a_node() -> None:
    advice = advise(SEVEN, gpus=8, gpus_per_node=2, gpu_memory=80 * GIB)
    assert [choice.shape for choice in advice.choices if "tp" in choice.names] == [(4, 2)]


@given(
    st.integers(10**6, 10**12), st.sampled_from([1, 2, 3, 4, 8, 16, 24]), st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(sorted(PRECISIONS)), st.sampled_from(sorted(OPTIMIZERS)),
)  # fmt: skip
def test_every_choice_is_a_strategy_that_the_spec_accepts(
    parameters: int, gpus: int, per_node: int, precision: str, optimizer: str
) -> None:
    advice = advise(
        guess_model(parameters),
        gpus=gpus,
        gpus_per_node=per_node,
        gpu_memory=80 * GIB,
        precision=precision,
        optimizer=optimizer,
    )
    nodes, rest = divmod(gpus, per_node)
    sizes = [per_node] * nodes + [rest] * bool(rest)
    for choice in advice.choices:
        block = {"kind": choice.kind, "mesh": {"shape": list(choice.shape), "names": list(choice.names)}, **choice.options}
        if "tp" in choice.names and rest % choice.shape[-1]:
            continue  # the spec refuses it, because the last node has fewer GPUs
        strategy, problems = parse_strategy(block, sizes)
        assert strategy is not None, problems


@pytest.mark.parametrize(("text", "count"), [("7b", 7 * 10**9), ("350M", 35 * 10**7), ("1.3e9", 13 * 10**8), ("12k", 12000)])
def test_numbers_of_parameters_are_parsed(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "b", "7x", "-1b", "nan", "inf", "0"])
def test_invalid_numbers_of_parameters_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a number of parameters"):
        parse_count(text)


def test_missing_sizes_of_a_model_are_estimated() -> None:
    assert guess_model(7 * 10**9, layers=32).hidden == 4352
    assert guess_model(7 * 10**9, hidden=4096).layers == 35
    assert guess_model(1000) == Model(parameters=1000, layers=1, hidden=128)
