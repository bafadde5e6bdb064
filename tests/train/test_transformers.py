"""Models of Hugging Face with random weights: their gradients under each strategy are those of one process.

So are those of models that are made on the meta device and get their weights from safetensors files.
"""

from __future__ import annotations

import pytest

from preloaded import TRANSFORMERS
from train.conftest import Start

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

SCRIPT = """
import torch
import transformers
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from distflow import train

world = train.init()
small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
off = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)),
    "llama, tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, tie_word_embeddings=True)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**small, num_key_value_heads=2)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, **off)
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**small, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    ),
}
read, process = [0], HuggingFaceStorageReader._process_read_request


def count(reader, file, request, planner):
    read[0] += request.lengths.numel()
    process(reader, file, request, planner)


HuggingFaceStorageReader._process_read_request = count
torch.manual_seed(1)
ids = torch.randint(64, (4, 8))
for name, build in MODELS.items():
    torch.manual_seed(0)
    alone = build()
    alone(input_ids=ids, labels=ids).loss.backward()
    wanted = {key: one.grad for key, one in alone.named_parameters()}
    folder = f"saved-{name}"
    if world.rank == 0:
        alone.save_pretrained(folder, max_shard_size="20KB")
    torch.distributed.barrier()
    size = sum(one.numel() for one in alone.parameters())
    strategies = [(train.DDP(), None, folder), (train.FSDP(activation_checkpointing=True), None), (train.FSDP(), folder)]
    parts = [(train.TensorParallel(sequence_parallel=True), None), (train.TensorParallel(), folder)]
    for strategy, *origins in [*strategies, *(parts if name not in ("gpt2", "bert") else [])]:
        for weights in origins:
            read[0] = 0
            torch.manual_seed(0)
            with torch.device("cpu" if weights is None else "meta"):
                model = build()
            plan = world.parallelize(model, strategy, weights=weights)
            share, shares = plan.data_shard
            mine = ids.tensor_split(shares)[share]
            plan.forward_backward({"input_ids": mine, "labels": mine}, None, lambda outputs, _: outputs.loss)
            got = {key.removeprefix("module."): one.grad for key, one in plan.model.named_parameters()}
            whole = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in got.items()}
            worst = max((one - wanted[key]).abs().max().item() for key, one in whole.items())
            complete = set(whole) == set(wanted)
            train.report(step=0, model=name, kind=strategy.kind, worst=worst, complete=complete, read=read[0] / size)
        if origins == [None]:
            continue
        plan.save_weights(f"{folder}-{strategy.kind}", max_file_size=30_000)
        if world.rank == 0:
            loaded = type(alone).from_pretrained(f"{folder}-{strategy.kind}").state_dict()
            same = all(torch.equal(one, loaded[key]) for key, one in alone.state_dict().items())
            train.report(step=0, model=name, kind=strategy.kind, saved=same)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = build()
    drawn = {key: one for key, one in world.parallelize(model, train.FSDP()).model.state_dict().items()}
    train.report(step=0, model=name, std=drawn[next(iter(drawn))].full_tensor().std().item())
"""


def test_models_of_hugging_face_train_as_in_one_process(start_with_torch: Start) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    run = start_with_torch(SCRIPT, "--size", "2", PRELOAD=TRANSFORMERS)
    assert run.wait() == 0, run.stderr
    compared = [one for one in run.records if "worst" in one]
    assert len(compared) == 2 * (5 * 4 + 3 * 2)
    assert all(one["complete"] and one["worst"] < 1e-6 for one in compared), compared
    parts = {(one["kind"], one["rank"]): one["read"] for one in compared if one["read"]}
    assert parts.keys() == {(kind, rank) for kind in ("ddp", "fsdp", "tp") for rank in (0, 1)}
    assert all(part <= (1 if kind == "ddp" else 0.6) for (kind, _), part in parts.items()), parts
    saved = [one["saved"] for one in run.records if "saved" in one]
    assert saved == [True] * (5 * 2 + 3)
    drawn = [one["std"] for one in run.records if "std" in one]
    assert len(drawn) == 2 * 5
    assert all(0.018 < one < 0.022 for one in drawn), "the initializer_range of the configuration"
