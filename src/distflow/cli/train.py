"""``distflow train``: recommend a training strategy, and measure communication or training speed on this machine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from enum import Enum
from typing import Annotated

import typer

from distflow.cli.options import Format, FormatOption, command_app
from distflow.cli.render.tables import table
from distflow.documents.quantities import parse_bytes
from distflow.errors import InputError
from distflow.layout.strategy.memory import Advice, Choice, advise, guess_model, parse_count

__all__ = ["Measurement", "Optimizer", "Precision", "app"]

app = command_app(no_args_is_help=True)

_GIB = 2**30
_AUTOCAST = (
    '    with torch.autocast("cuda", torch.bfloat16):  # in your program, around the forward pass; or use --precision fp32'
)


class Precision(str, Enum):
    """The precision of the arithmetic (``memory.PRECISIONS``)."""

    BF16 = "bf16"
    FP32 = "fp32"


class Optimizer(str, Enum):
    """The optimizer, which determines the size of the optimizer states (``memory.OPTIMIZERS``)."""

    ADAMW = "adamw"
    SGD_MOMENTUM = "sgd-momentum"
    SGD = "sgd"


class Measurement(str, Enum):
    """A measurement of ``train bench``."""

    ALLREDUCE = "allreduce"
    SCALING = "scaling"


@app.callback()
def _train() -> None:
    """Choose a training strategy, and measure communication or training speed."""


@app.command(
    "advise",
    epilog="Examples: distflow train advise --params 7b --gpus 16 --gpu-memory 80Gi  ·  "
    "distflow train advise --params 350m --gpus 2 --gpu-memory 24Gi --precision fp32",
)
def advise_strategy(
    params: Annotated[
        str,
        typer.Option("--params", metavar="N", help="The number of parameters of the model, such as 7b, 350m or 1300000000."),
    ],
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="The total number of GPUs.")],
    gpu_memory: Annotated[str, typer.Option("--gpu-memory", metavar="SIZE", help="The memory of one GPU, such as 80Gi.")],
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="The number of GPUs of one machine.")] = 8,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="The number of layers. Default: estimated from the parameters.")
    ] = None,
    hidden: Annotated[
        int | None, typer.Option("--hidden", min=1, help="The hidden size. Default: estimated from the parameters.")
    ] = None,
    precision: Annotated[Precision, typer.Option("--precision", help="The precision of the arithmetic.")] = Precision.BF16,
    optimizer: Annotated[
        Optimizer, typer.Option("--optimizer", help="The optimizer, which determines the size of its states.")
    ] = Optimizer.ADAMW,
    micro_batch: Annotated[
        int, typer.Option("--micro-batch", min=1, help="The number of sequences in one forward pass of a rank.")
    ] = 1,
    sequence: Annotated[int, typer.Option("--sequence", min=1, help="The number of tokens in a sequence.")] = 2048,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Recommend a training strategy for a model size.

    The output shows the memory that each rank needs, and how it is computed.
    """
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
    what: Annotated[
        Measurement,
        typer.Argument(help="allreduce: bandwidth by message size. scaling: training speed with 1, 2, 4 … and N ranks."),
    ],
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="The number of ranks to start on this machine.")] = 2,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """Measure all-reduce bandwidth or training speed on this machine."""
    if importlib.util.find_spec("torch") is None:
        raise InputError(
            "`distflow train bench` needs torch, which is not installed on this machine",
            hint="run: pip install 'distflow-cli[train]'",
        )
    command = [sys.executable, "-m", "distflow.train.bench", what.value, "--ranks", str(ranks), "--format", format_type.value]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise typer.Exit(code)


def _text(advice: Advice) -> str:
    model, chosen = advice.model, advice.chosen
    usable = f"{advice.usable / _GIB:.1f} GiB usable per GPU"
    lines = [f"{model.parameters:,} parameters, {model.layers} layers, hidden size {model.hidden}; {usable}", ""]
    if chosen is None:
        lines += ["No strategy fits: use more GPUs, GPUs with more memory, or shorter sequences", ""]
    else:
        rows = [(line.what, f"{line.bytes / _GIB:.2f} GiB", line.formula) for line in chosen.lines]
        arithmetic = table(("Each rank", "Memory", "Computed as"), [*rows, ("total", f"{chosen.bytes / _GIB:.2f} GiB", "")])
        lines += [f"Recommended: {_name(chosen)}: {chosen.why}", "", f"    {_block(chosen)}"]
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
