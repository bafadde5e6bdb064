"""``distflow train``: recommend a training strategy, and measure the communication between ranks on this machine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from enum import Enum
from typing import Annotated

import typer

from distflow.cli.options import Format, FormatOption
from distflow.cli.render.tables import table
from distflow.documents.quantities import parse_bytes
from distflow.errors import InputError
from distflow.layout.strategy.memory import Advice, Choice, advise, guess_model, parse_count

__all__ = ["Measurement", "Optimizer", "Precision", "app"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)

_GIB = 2**30
_AUTOCAST = (
    '    with torch.autocast("cuda", torch.bfloat16):  # in the program, around the forward pass; without it: --precision fp32'
)


class Precision(str, Enum):
    """The precision of the arithmetic (``sizing.PRECISIONS``)."""

    BF16 = "bf16"
    FP32 = "fp32"


class Optimizer(str, Enum):
    """The optimizer, which determines the size of the optimizer states (``sizing.OPTIMIZERS``)."""

    ADAMW = "adamw"
    SGD_MOMENTUM = "sgd-momentum"
    SGD = "sgd"


class Measurement(str, Enum):
    """A measurement of ``train bench``."""

    ALLREDUCE = "allreduce"
    SCALING = "scaling"


@app.callback()
def _train() -> None:
    """Choose a training strategy, and measure how ranks communicate."""


@app.command(
    "advise",
    epilog="Examples: distflow train advise --params 7b --gpus 16 --gpu-memory 80Gi  ·  "
    "distflow train advise --params 350m --gpus 2 --gpu-memory 24Gi --precision fp32",
)
def advise_strategy(
    params: Annotated[str, typer.Option("--params", metavar="N", help="Parameters of the model: 7b, 350m, 1300000000.")],
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs in all.")],
    gpu_memory: Annotated[str, typer.Option("--gpu-memory", metavar="SIZE", help="Memory of one GPU, such as 80Gi.")],
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="GPUs of one machine.")] = 8,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Layers; else guessed from the parameters.")] = None,
    hidden: Annotated[int | None, typer.Option("--hidden", min=1, help="Hidden size; else guessed.")] = None,
    precision: Annotated[Precision, typer.Option("--precision", help="Of the arithmetic.")] = Precision.BF16,
    optimizer: Annotated[Optimizer, typer.Option("--optimizer", help="Says how many states there are.")] = Optimizer.ADAMW,
    micro_batch: Annotated[int, typer.Option("--micro-batch", min=1, help="Sequences in one pass of a rank.")] = 1,
    sequence: Annotated[int, typer.Option("--sequence", min=1, help="Tokens of a sequence.")] = 2048,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Say which strategy a model of this size needs, with the arithmetic of the memory of each rank."""
    try:
        parameters, memory = parse_count(params), parse_bytes(gpu_memory)
    except ValueError as error:
        raise InputError(str(error)) from error
    model = guess_model(parameters, layers, hidden)
    advice = advise(
        model, gpus=gpus, gpus_per_node=gpus_per_node, gpu_memory=memory, precision=precision.value, optimizer=optimizer.value,
        micro_batch=micro_batch, sequence=sequence,
    )  # fmt: skip
    if format_type is Format.JSON:
        chosen = advice.chosen
        size = {"parameters": model.parameters, "layers": model.layers, "hidden": model.hidden}
        body = {
            "model": size,
            "usable_bytes": advice.usable,
            "chosen": chosen.as_json() if chosen else None,
            "choices": [choice.as_json() for choice in advice.choices],
        }
        print(json.dumps(body, indent=2))
    else:
        print(_text(advice), end="")


@app.command(
    epilog="Examples: distflow train bench allreduce --ranks 4  ·  distflow train bench scaling --ranks 2 --format-type json"
)
def bench(
    what: Annotated[Measurement, typer.Argument(help="allreduce: bandwidth by size; scaling: speed over 1 … n ranks.")],
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Ranks to start on this machine.")] = 2,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Measure on this machine how fast ranks add up gradients, or how much faster more ranks train."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("measuring needs torch, which is not installed here", hint="pip install 'distflow[train]'")
    command = [sys.executable, "-m", "distflow.train.bench", what.value, "--ranks", str(ranks), "--format", format_type.value]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise typer.Exit(code)


def _text(advice: Advice) -> str:
    model, chosen = advice.model, advice.chosen
    usable = f"{advice.usable / _GIB:.1f} GiB usable of each GPU"
    lines = [f"{model.parameters:,} parameters, {model.layers} layers, hidden size {model.hidden}; {usable}", ""]
    if chosen is None:
        lines += ["no strategy fits: use more GPUs, GPUs with more memory, or shorter sequences", ""]
    else:
        rows = [(line.what, f"{line.bytes / _GIB:.2f} GiB", line.formula) for line in chosen.lines]
        arithmetic = table(("Each rank", "Memory", "From"), [*rows, ("in all", f"{chosen.bytes / _GIB:.2f} GiB", "")])
        lines += [f"take {_name(chosen)}: {chosen.why}", "", f"    {_block(chosen)}"]
        if chosen.needs_autocast:
            lines.append(_AUTOCAST)
        lines += ["", arithmetic]
    choices = [
        (_name(choice), "x".join(map(str, choice.shape)), f"{choice.bytes / _GIB:.1f} GiB", "yes" if choice.fits else "no")
        for choice in advice.choices
    ]
    return "\n".join([*lines, table(("Strategy", "Mesh", "Each rank", "Fits"), choices)])


def _name(choice: Choice) -> str:
    words = {"activation_checkpointing": "checkpointing", "cpu_offload": "CPU offload"}
    return " + ".join([choice.kind, *(word for option, word in words.items() if option in choice.options)])


def _block(choice: Choice) -> str:
    """Return a choice as the ``strategy`` line of a spec."""
    values = {"kind": choice.kind}
    if choice.kind == "hybrid":
        values["tp_size"] = str(choice.shape[1])
    values |= {name: str(value).lower() for name, value in choice.options.items()}
    return f"strategy: {{{', '.join(f'{name}: {value}' for name, value in values.items())}}}"
