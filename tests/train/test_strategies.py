"""Training with every strategy on 2, 4 and 8 ranks equals that of one process on the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from train.worlds import run_world

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

TOLERANCE = 1e-6
"""The maximum difference of float32 parameters after two steps, due to the order of sums. Training moves them by 0.01."""
EXACT = 1e-14
"""The same for float64 parameters, where a mistake does not look like rounding."""
TRAINED = {
    2: (
        "ddp", "ddp static graph", "ddp checkpointed", "fsdp", "fsdp SHARD_GRAD_OP", "fsdp NO_SHARD", "fsdp by size",
        "fsdp by class, checkpointed", "fsdp offloaded", "fsdp bf16", "tp", "tp by plan",
        "tp of sequences", "pipeline gpipe", "pipeline 1f1b",
        "pipeline cut", "pipeline interleaved",
    ),
    4: (
        "ddp", "fsdp HYBRID_SHARD", "hybrid", "hybrid of sequences, checkpointed",
        "pipeline", "pipeline of replicas", "pipeline of replicas, interleaved",
        "replicas × tp", "stages × tp", "stages × shards", "stages × shards, interleaved",
    ),
    8: (
        "replicas × shards × tp", "stages × shards × tp", "stages × replicas × tp", "stages × replicas × shards",
    ),
}  # fmt: skip
"""The checks that train: ranks → names."""
EVALUATED = {
    2: ("ddp", "fsdp", "fsdp SHARD_GRAD_OP", "tp", "pipeline 1f1b", "pipeline interleaved", "pipeline gpipe"),
    4: ("hybrid", "pipeline", "pipeline of replicas", "stages × shards"),
}
"""Those that also evaluate between the steps."""
CLIPPED = {
    2: ("ddp", "fsdp", "tp", "tp of sequences", "pipeline 1f1b"),
    4: ("fsdp HYBRID_SHARD", "hybrid", "pipeline of replicas", "stages × tp", "stages × shards"),
    8: ("stages × replicas × tp",),
}
"""Those that also clip gradients."""
INITIALIZED = {
    2: ("ddp", "fsdp", "fsdp offloaded", "tp", "pipeline 1f1b"),
    4: ("fsdp HYBRID_SHARD", "hybrid", "pipeline of replicas"),
    8: ("stages × shards × tp",),
}
"""Those whose model begins on the meta device."""
WHOLE_SHARE = 1.0


class Worlds(dict[int, dict[str, Any]]):
    """The results of each world, which runs at its first use: ranks → check → result."""

    def __init__(self, temporary: pytest.TempPathFactory) -> None:
        super().__init__()
        self._temporary = temporary

    def __missing__(self, ranks: int) -> dict[str, Any]:
        found = self[ranks] = run_world(Path(__file__).with_name("strategy_checks.py"), ranks, self._temporary)
        return found


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """The worlds of this module."""
    return Worlds(tmp_path_factory)


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in TRAINED.items() for name in names])
def test_ranks_train_as_one_process_does(worlds: Worlds, world: int, name: str) -> None:
    found = worlds[world][name]
    assert found["complete"]
    assert found["moved"] > 0.01
    if "bf16" in name:
        assert TOLERANCE < found["difference"] < 0.02
    else:
        assert found["difference"] < EXACT


@pytest.mark.parametrize(
    ("world", "name", "share"),
    [
        (2, "ddp", 1), (2, "fsdp", 1 / 2), (2, "fsdp SHARD_GRAD_OP", 1 / 2), (2, "fsdp NO_SHARD", 1),
        (2, "fsdp by size", 1 / 2), (4, "ddp", 1), (4, "fsdp HYBRID_SHARD", 1 / 2),
    ],
)  # fmt: skip
def test_each_rank_holds_its_share_of_the_parameters(worlds: Worlds, world: int, name: str, share: float) -> None:
    assert worlds[world][name]["shares"] == [pytest.approx(share)] * world


def test_tensor_parallel_and_pipeline_ranks_hold_parts_of_the_model(worlds: Worlds) -> None:
    # All ranks of a tensor-parallel group hold the layers that are not split: embeddings, norms and the head.
    assert all(0.5 < share < 0.8 for share in worlds[2]["tp"]["shares"])
    assert all(0.25 < share < 0.4 for share in worlds[4]["hybrid"]["shares"])
    assert sum(worlds[4]["pipeline"]["shares"]) == pytest.approx(WHOLE_SHARE)
    assert max(worlds[4]["pipeline"]["shares"]) < 0.5
    assert sum(worlds[4]["pipeline of replicas"]["shares"]) == pytest.approx(2 * WHOLE_SHARE)


def test_sequence_parallel_norms_get_parts_of_sequences(worlds: Worlds) -> None:
    found = worlds[2]["sequence parts"]
    assert (found["parts"], found["whole"]) == ([6, 6], 12)
    too_odd, by_name = found["errors"]
    assert "the sequence length 7 is not a multiple of the 2 ranks of the axis tp: pad the sequences" in too_odd
    assert "Block got 0 positional arguments, but needs exactly one" in by_name


@pytest.mark.parametrize(("world", "name"), [(2, "sequences"), (4, "sequences × shards"), (4, "sequences × tp")])
def test_parts_of_sequences_train_as_whole_sequences_do(worlds: Worlds, world: int, name: str) -> None:
    found = worlds[world][name]
    assert found["difference"] < TOLERANCE
    assert found["losses"] < TOLERANCE
    assert "does not support it on the CPU" in found["refused"]  # without the kernel that the check adds
    call, length = found["errors"]
    assert "call plan.forward_backward or plan.evaluate" in call
    assert "a multiple of 4: found (" in length


def test_interleaved_stages_of_a_rank_are_not_adjacent(worlds: Worlds) -> None:
    assert worlds[2]["pipeline interleaved"]["children"] == [["block1", "embedding"], ["block0", "head"]]


def test_every_pipeline_stage_gets_the_loss(worlds: Worlds) -> None:
    for world, name in ((2, "pipeline gpipe"), (2, "pipeline 1f1b"), (2, "pipeline interleaved"), (4, "pipeline")):
        losses = worlds[world][name]["losses"]
        assert len(set(losses)) == 1
        assert losses[0] > 1


def test_every_stage_gets_the_loss_of_a_bfloat16_model_in_float32(worlds: Worlds) -> None:
    first, last = worlds[2]["pipeline in bfloat16"]["losses"]
    assert first == last
    assert [dtype for _, dtype in first] == ["torch.float32"] * 2


def test_frozen_replicas_begin_with_the_parameters_of_rank_0(worlds: Worlds) -> None:
    found = worlds[2]["frozen replicas"]
    assert found["before"] > found["after"] == 0


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in EVALUATED.items() for name in names])
def test_ranks_evaluate_as_one_process_does_between_steps(worlds: Worlds, world: int, name: str) -> None:
    # `test_ranks_train_as_one_process_does` proves that evaluations do not change the training.
    assert worlds[world][name]["evaluations"] < EXACT


def test_an_evaluation_leaves_modes_and_shards_as_they_were(worlds: Worlds) -> None:
    for kind, found in worlds[2]["evaluation mode"].items():
        assert found["difference"] < TOLERANCE, kind
        assert found["modes"] == [True, True], kind
    assert "every rank needs at least one" in worlds[2]["no samples"]["error"]


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in INITIALIZED.items() for name in names])
def test_a_model_on_the_meta_device_gets_the_initial_values_of_one_process(worlds: Worlds, world: int, name: str) -> None:
    # `test_ranks_train_as_one_process_does` proves that these models also train.
    found = worlds[world][name]
    assert found["first"] == 0
    # A rank holds its part of the model and one more matrix. Tensor-parallel ranks also hold the layers that are not split.
    assert 0 < found["held"] < (1.2 if name == "ddp" else 0.8)


def test_modules_with_buffers_and_children_are_initialized_equally_on_all_ranks(worlds: Worlds) -> None:
    assert worlds[2]["unusual modules"] == {"alike": True, "finite": True, "table": [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bare", "modules without these methods: 1"),
        ("tied", "`0.weight` (stage 1) and `1.weight` (stage 2) are tied"),
        ("partly", "only partly on the meta device: 1.weight is not"),
        ("forgotten", "the tensor table of 0 (_Scale) is not initialized: set it in reset_parameters() or init_weights()"),
        ("forgotten by the model", "tensor weight of part (Linear) is not initialized: set it in the model's _init_weights()"),
        ("traced", "a model on the meta device cannot be traced"),
    ],
)
def test_errors_of_initialization_name_their_cause(worlds: Worlds, name: str, message: str) -> None:
    assert message in worlds[2]["initialization errors"][name]


def test_the_strategy_of_parallelize_applies_to_data_and_passes_too(worlds: Worlds) -> None:
    found = worlds[4]["calls without a plan"]
    assert found["difference"] < EXACT
    assert found["passes"] == 2 * 2
    first, second, third, fourth = found["samples"]
    assert first == second
    assert third == fourth
    assert sorted(first + third) == list(range(8))


def test_changed_shares_are_reported(worlds: Worlds) -> None:
    found = worlds[4]["calls without a plan"]
    assert "created for share 0 of 4 of the data, but this rank now has share 0 of 2: create it after init()" in found["early"]
    assert found["explicit"] == 8
    assert found["with a frozen model"] == [0, 2]
    (warning,) = found["warnings"]
    assert "for hybrid and another for ddp" in warning
    assert found["of the last plan"] == [0, 4]


def test_a_pipeline_splits_a_traced_model(worlds: Worlds) -> None:
    found = worlds[2]["traced pipeline"]
    assert found["gradients"] == 2
    assert found["difference"] < TOLERANCE
    assert found["loss"] < TOLERANCE
    assert max(found["evaluated"], found["by_name"]) < TOLERANCE


def test_ranks_of_a_tensor_parallel_group_are_neighbors(worlds: Worlds) -> None:
    assert worlds[4]["mesh groups"] == {"tp": [[0, 1], [2, 3]], "fsdp": [[0, 2], [1, 3]]}


def test_compressed_gradients_are_half_the_bytes_and_equal_on_all_ranks(worlds: Worlds) -> None:
    found = worlds[2]["compression"]
    for how in ("fp16", "bf16"):
        assert found[how]["bytes"] * 2 == found["none"]["bytes"]
        assert 0 < found[how]["difference"] < 5e-4
    assert [one["ranks"] for one in found.values()] == [0, 0, 0, 0]


def test_powersgd_sends_less_once_it_begins(worlds: Worlds) -> None:
    sent = worlds[2]["powersgd"]["sent"]
    assert sent[0] == sent[1]
    assert sent[4] * 4 < sent[0]


def test_larger_buckets_make_fewer_reductions(worlds: Worlds) -> None:
    assert worlds[2]["buckets"] == {"1": 6, "5": 2, "25": 1}


def test_accumulated_gradients_are_reduced_once(worlds: Worlds) -> None:
    found = worlds[2]["accumulation"]
    for kind in ("ddp", "fsdp"):
        assert found[kind]["passes"] == [False, False, False, True]
        assert found[kind]["difference"] < TOLERANCE
    assert found["ddp"]["counts"][1:] == [1]
    # One for each of two blocks, and one for the rest.
    assert found["fsdp"]["counts"] == [3, 3]


def test_local_sgd_averages_at_every_second_step(worlds: Worlds) -> None:
    first, second, third, fourth = worlds[2]["local sgd"]["differences"]
    assert first > 1e-4
    assert third > 1e-4
    assert (second, fourth) == (0, 0)


def test_gradients_of_plain_modules_are_averaged_in_buckets(worlds: Worlds) -> None:
    found = worlds[2]["means"]
    assert found["values"] == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 0.5]
    assert all(found["same"])
    # Three buckets with two tensors of 1 MiB each, and one for the other dtype.
    assert found["number"] == 4


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in CLIPPED.items() for name in names])
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(worlds: Worlds, world: int, name: str) -> None:
    found = worlds[world][name]
    assert found["norm"] > 0.6  # so that 0.5 clips
    assert found["norms"] == [pytest.approx(found["norm"], rel=1e-5), pytest.approx(0.5, rel=1e-4)]


def test_the_full_state_dict_is_gathered_on_rank_0(worlds: Worlds) -> None:
    assert worlds[2]["whole state"]["difference"] < TOLERANCE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ranks", "the strategy is for 5 ranks, but there are 2"),
        ("loss", "parallelize(model, loss=…)"),
        ("trace", "Set split_points"),
        ("plan", "distflow found no matrices to cut. It looks for an attention or MLP"),
        ("unknown plan", "the plan names 'thrid'"),
        ("fused by name", "c_attn seems to combine several matrices"),
        ("fused by shape", "mixed seems to combine several matrices"),
        ("heads", "block0.attention.q_proj cannot be split over 2 ranks, because num_heads is 1: "),
        ("heads", "set the strategy's `plan`, and leave out this layer and the layers that are split together with it"),
        ("sequence", "attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj of Block: add them to `plan`"),
        ("sequence", "with patterns such as '*.attention.q_proj'"),
        ("sequence without norms", "Module has no norm layer: it needs a direct child whose class name ends in `Norm`"),
        ("layers", "name their class in transformer_layer_cls"),
        ("class", "transformer_layer_cls: the model has no layer of class Blok: choose from Attention, Block"),
        ("call", "loss = model.step(inputs, targets)"),
        ("interleaved", "Shifted is not an nn.Sequential, so it cannot be combined with schedule=interleaved_1f1b: use"),
        ("stages", "2 stages need at least 2 top-level layers, and the model has 1"),
        ("same point", "4 stages need 3 different split_points, not head, head, head"),
        ("first child", "no stage after the first can begin at `embedding`: choose split_points from block0, block1, head"),
        ("stages with split points", "2 stages need at least 2 top-level layers, and the model has 1"),
        ("unknown module", "stages cannot begin at the split_points third"),
        ("option", "no option 'mixd_precision': did you mean 'mixed_precision'?"),
        ("option of the spec", "no option 'bucket_cap'"),
        ("word", "mixed_precision is 'bf17': give one of `none`, `bf16`, `fp16`"),
        ("kind and option", "ddp has no option `cpu_offload`"),
        ("options", "`compression` and `sync_gradients_every` exclude each other"),
        ("option on top", "fsdp has no option `compression`"),
        ("data parallel", "pass the inner module, `model.module`"),
        ("kind", "unknown strategy 'zero'"),
        ("local", "local SGD needs replicas"),
        ("compression", "compression is 'zip': give one of `none`, `fp16`, `bf16`, `powersgd`"),
    ],
)
def test_errors_of_parallelize_name_their_cause(worlds: Worlds, name: str, message: str) -> None:
    assert message in worlds[2]["refusals"][name]
