"""Measure tokens per second of a small GPT in bf16 with ``distflow.train``, compared with a hand-written loop.

Prints the model FLOP utilization, which is the used part of the GPU's peak. Fails if the median of the ratios is below
``LIMIT``. Without a CUDA device, it prints a message and measures nothing.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch

from distflow import train
from distflow.samples.gpt import Gpt, loss_of

LIMIT, RUNS, WARM_STEPS, STEPS = 0.98, 5, 5, 30
LAYERS, HIDDEN, HEADS, CONTEXT, BATCH = 12, 768, 12, 1024, 16
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bf16 operations per second, from NVIDIA's data sheets (H100 and H200: SXM)."""

Step = Callable[[], None]


def main() -> int:
    """Run the measurement. Return 0 if the limit is met or there is no GPU, 1 otherwise."""
    if not torch.cuda.is_available():
        print("the GPT in bf16: skipped, because this machine has no CUDA device")
        return 0
    device = train.init().device
    tokens = torch.randint(0, 256, (BATCH, CONTEXT + 1), device=device)
    speeds: dict[str, list[float]] = {"by hand": [], "distflow.train": []}
    steps = {"by hand": by_hand(tokens), "distflow.train": by_train(tokens)}
    for turn in range(RUNS + 1):
        for name, step in steps.items():
            speed = BATCH * CONTEXT / _seconds(step)
            if turn:
                speeds[name].append(speed)
    name = torch.cuda.get_device_name()
    peak = next((peak for known, peak in PEAKS.items() if known in name), None)
    print(f"{name}, torch {torch.__version__}: a GPT of {parameters() / 1e6:.0f} million parameters in bf16, {RUNS} runs")
    ratio = 1.0
    for contestant, measured in speeds.items():
        median = statistics.median(measured)
        share = f"{median * operations() / peak:.1%} of the peak" if peak else "unknown peak"
        ratio = statistics.median(one / peer for one, peer in zip(measured, speeds["by hand"], strict=True))
        print(f"  {contestant:<16} {median:>10.0f} tokens/s  {share}  × by hand {ratio:.2f}")
    return int(ratio < LIMIT)


def by_hand(tokens: torch.Tensor) -> Step:
    """Return a training step of a plain torch loop."""
    torch.manual_seed(0)
    model = _model().to(tokens.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> None:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_train(tokens: torch.Tensor) -> Step:
    """Return the same step with ``distflow.train``. Call ``train.init()`` first."""
    torch.manual_seed(0)
    model = train.init().parallelize(_model(), "ddp").model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    timer = train.StepTimer(every=10**6)

    def step() -> None:
        with timer.work():
            with torch.autocast(tokens.device.type, torch.bfloat16):
                loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        timer.step(samples=len(tokens))
        train.beat()

    return step


def parameters() -> int:
    """Return the number of parameters of the model."""
    return sum(parameter.numel() for parameter in _model().parameters())


def operations() -> float:
    """Return the operations for a token: 6 for each parameter, plus 12 × layers × hidden × context in attention.

    The formula is from the PaLM paper. It also counts masked attention scores.
    """
    return 6.0 * parameters() + 12.0 * LAYERS * HIDDEN * CONTEXT


def _model() -> Gpt:
    return Gpt(layers=LAYERS, hidden=HIDDEN, heads=HEADS, context=CONTEXT)


def _seconds(step: Step) -> float:
    """Return the seconds of a step, measured by the GPU."""
    for _ in range(WARM_STEPS):
        step()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(STEPS):
        step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / STEPS


if __name__ == "__main__":
    sys.exit(main())
