#!/usr/bin/env python3
# mypy: allow-untyped-calls
"""Fine-tune a pretrained Hugging Face language model with sharded weights. Read and write safetensors files.

``distflow.train.launch`` starts it (``launcher: spawn`` in a spec), with the strategy of the spec. After a rank was killed, the
next attempt continues from the newest checkpoint and ends with the weights of an undisturbed run. The training data are random
tokens; replace them with your own data.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distflow import train

SAMPLES, TOKENS, EVERY = 48, 16, 3


def main() -> None:
    """Train from the base weights or from the newest complete checkpoint, and save the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="directory with config.json and the safetensors files of the model")
    parser.add_argument("--output", required=True, help="directory for the fine-tuned model")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait after each step")
    args = parser.parse_args()

    world = train.init()
    with torch.device("meta"):  # no memory yet: each rank reads its part of the weights from the files
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.base), dtype=torch.float32)
    plan = world.parallelize(model, weights=args.base)
    optimizer = torch.optim.AdamW(plan.model.parameters(), lr=1e-3)

    tokens = torch.randint(model.config.vocab_size, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    loader = plan.loader(samples, batch_size=4, seed=1)
    checkpoints = train.Checkpoints()  # in the directory that `checkpoint:` of the spec saves and restores
    step = checkpoints.load_latest(plan.model, optimizer, loader=loader) or 0
    train.report(step=step, begins=True, pid=os.getpid())

    while loader.epoch < args.epochs:
        for loaded in loader:
            batch = {name: one.to(world.device) for name, one in loaded.items()}
            loss = plan.forward_backward(batch, None, lambda outputs, _: outputs.loss)
            plan.clip_gradients(1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            train.beat()
            if world.rank == 0:
                train.report(step=step, loss=loss, epoch=loader.epoch)
            stop = train.stop_requested()
            if stop or step % EVERY == 0:
                checkpoints.save(step, plan.model, optimizer, loader=loader)
            if stop:
                sys.exit(train.STOPPED)
            threading.Event().wait(args.pause)
    plan.save_weights(args.output)


if __name__ == "__main__":
    main()
