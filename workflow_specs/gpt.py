"""Train a small GPT on bytes of text, with any strategy.

Start it with ``torchrun --nproc-per-node 2 -m distflow.samples.gpt``. ``--strategy`` overrides the strategy of the spec
(``DISTFLOW_STRATEGY``). The model is an ``nn.Sequential``, which pipeline parallelism can cut into stages. Its matrices have
names that tensor parallelism recognizes, and attention computes the number of heads from the shape of the tensor.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from distflow.train.metrics import report
from distflow.train.strategies.description import Strategy, make_strategy
from distflow.train.world import init

__all__ = ["Attention", "Block", "Embedding", "Gpt", "Mlp", "batch_of", "loss_of", "main", "read_text"]

VOCABULARY = 256
"""Tokens are bytes."""


class Embedding(nn.Module):
    """Converts bytes and their positions to vectors."""

    def __init__(self, hidden: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, hidden)
        self.position = nn.Embedding(context, hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return vectors, shape (batch, time, hidden), for bytes of shape (batch, time)."""
        embedded: torch.Tensor = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return embedded


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_size = heads, hidden // heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return vectors of the same shape. Each position attends to itself and to earlier positions."""
        batch, time, _ = x.shape
        query, key, value = (
            # -1: with tensor parallelism a rank has only some of the heads.
            project(x).view(batch, time, -1, self.head_size).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: torch.Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, time, -1))
        return output


class Mlp(nn.Module):
    """Two matrices and a nonlinearity, applied to each position separately."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return vectors of the same shape."""
        output: torch.Tensor = self.down_proj(functional.gelu(self.up_proj(x)))
        return output


class Block(nn.Module):
    """A transformer layer: attention and MLP, each with a residual connection."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention, self.mlp = Attention(hidden, heads), Mlp(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return vectors of the same shape."""
        x = x + self.attention(self.attention_norm(x))
        output: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class Gpt(nn.Sequential):
    """Embedding, blocks and head. Returns logits of shape (batch, time, 256) for bytes of shape (batch, time)."""

    def __init__(self, *, layers: int = 4, hidden: int = 64, heads: int = 4, context: int = 64) -> None:
        blocks = [(f"block{number}", Block(hidden, heads)) for number in range(layers)]
        head = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False))
        super().__init__(OrderedDict([("embedding", Embedding(hidden, context)), *blocks, ("head", head)]))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the next byte."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text(paths: Sequence[str]) -> torch.Tensor:
    """Return the concatenated bytes of files, and of the .md, .py and .txt files in folders. Default: this file's folder."""
    files: list[Path] = []
    for path in map(Path, paths or [str(Path(__file__).parent)]):
        files += sorted(one for one in path.rglob("*") if one.suffix in (".md", ".py", ".txt")) if path.is_dir() else [path]
    return torch.frombuffer(bytearray(b"".join(one.read_bytes() for one in files)), dtype=torch.uint8)


def batch_of(text: torch.Tensor, *, size: int, context: int, step: int, shard: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Return inputs and targets of one shard (index, count). The global batch is the same for any number of shards."""
    draw = torch.Generator().manual_seed(step)
    begins = torch.randint(len(text) - context - 1, (size,), generator=draw)
    mine = begins.tensor_split(shard[1])[shard[0]]
    rows = torch.stack([text[begin : begin + context + 1] for begin in mine.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print one JSON line for each step on rank 0."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("text", nargs="*", help="files or folders with text (default: the samples of distflow)")
    parser.add_argument("--strategy", help="ddp, fsdp, tp, hybrid, pipeline or none (default: the strategy of the spec)")
    parser.add_argument("--tp-size", type=int, help="ranks that share a tensor, with --strategy hybrid or pipeline")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step, over all ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step (not with pipeline)")
    for name, value in (("layers", 4), ("hidden", 64), ("heads", 4), ("context", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args(arguments)
    if options.tp_size is not None and not options.strategy:
        parser.error("--tp-size needs --strategy")
    world = init()
    strategy: Strategy | None = None
    if options.strategy:
        sizes = {} if options.tp_size is None else {"tp_size": options.tp_size}
        try:
            strategy = make_strategy(options.strategy, world.size, sizes)
        except ValueError as error:
            parser.error(str(error))
    torch.manual_seed(0)
    model = Gpt(layers=options.layers, hidden=options.hidden, heads=options.heads, context=options.context)
    plan = world.parallelize(model, strategy, loss=loss_of)
    optimizer = torch.optim.AdamW(plan.model.parameters(), lr=3e-3)
    text, sampling = read_text(options.text), {"size": options.batch_size, "context": options.context, "shard": plan.data_shard}
    for step in range(options.steps):
        inputs, targets = (one.to(world.device) for one in batch_of(text, step=step, **sampling))
        loss = plan.forward_backward(inputs, targets, loss_of, micro_batches=options.accumulate)
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0:
            report(step=step, loss=round(loss.item(), 5))


if __name__ == "__main__":
    main()
