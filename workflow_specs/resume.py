#!/usr/bin/env python3
# mypy: allow-untyped-calls
"""Train a small network. If a rank is killed at any moment, the next attempt ends with the weights of an undisturbed run.

``distflow.train.launch`` starts it (``launcher: spawn`` in a spec), with the strategy of the spec. The checkpoint holds the
weights, the optimizer, the random state and the position in the epoch. Standard output has JSON lines; at the end of
the training, the last one has a digest of the weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import threading

import torch
from torch import nn

from distflow import train

SAMPLES, FEATURES, EVERY = 96, 16, 3


class Block(nn.Module):
    """A layer that FSDP and tensor parallelism can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(FEATURES, 32)
        self.down_proj = nn.Linear(32, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input plus the output of the two layers."""
        return x + torch.as_tensor(self.down_proj(torch.relu(self.up_proj(x))))


class Network(nn.Module):
    """Two blocks and a linear layer with one output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number for each sample."""
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(x))


def main() -> None:
    """Train from the beginning or from the newest complete checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait after each step")
    args = parser.parse_args()

    world = train.init()
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES)
    plan = world.parallelize(Network())
    model = plan.model
    loader = plan.loader(torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=8, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpoints = train.Checkpoints()  # in the directory that `checkpoint:` of the spec saves and restores
    step = checkpoints.load_latest(model, optimizer, loader=loader) or 0
    train.report(step=step, begins=True, pid=os.getpid())

    while loader.epoch < args.epochs:
        for inputs, wanted in loader:
            loss = nn.functional.mse_loss(model(inputs.to(world.device)), wanted.to(world.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            train.beat()
            if world.rank == 0:
                train.report(step=step, loss=loss, epoch=loader.epoch)
            stop = train.stop_requested()
            if stop or step % EVERY == 0:
                checkpoints.save(step, model, optimizer, loader=loader)
            if stop:
                sys.exit(train.STOPPED)
            threading.Event().wait(args.pause)

    weights = plan.full_state_dict()
    if world.rank == 0:
        digest = hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()
        train.report(step=step, weights=digest)


if __name__ == "__main__":
    main()
