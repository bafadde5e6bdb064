"""Models of Hugging Face with random weights: their gradients under each strategy are those of one process."""

from __future__ import annotations

import pytest

from train.conftest import Start

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

SCRIPT = """
import torch
import transformers
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
torch.manual_seed(1)
ids = torch.randint(64, (4, 8))
for name, build in MODELS.items():
    torch.manual_seed(0)
    alone = build()
    alone(input_ids=ids, labels=ids).loss.backward()
    wanted = {key: one.grad for key, one in alone.named_parameters()}
    strategies = [train.DDP(), train.FSDP(), train.FSDP(activation_checkpointing=True)]
    for strategy in [*strategies, *([train.TensorParallel()] if name not in ("gpt2", "bert") else [])]:
        torch.manual_seed(0)
        plan = world.parallelize(build(), strategy)
        share, shares = plan.data_shard
        mine = ids.tensor_split(shares)[share]
        plan.forward_backward({"input_ids": mine, "labels": mine}, None, lambda outputs, _: outputs.loss)
        got = {key.removeprefix("module."): one.grad for key, one in plan.model.named_parameters()}
        whole = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in got.items()}
        worst = max((one - wanted[key]).abs().max().item() for key, one in whole.items())
        train.report(step=0, model=name, kind=strategy.kind, worst=worst, complete=set(whole) == set(wanted))
"""


def test_models_of_hugging_face_train_as_in_one_process(start: Start) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    run = start(SCRIPT, "--size", "2")
    assert run.wait() == 0, run.stderr
    assert len(run.records) == 2 * (5 * 3 + 3)
    assert all(one["complete"] and one["worst"] < 1e-6 for one in run.records), run.records
