"""Estimate the memory that a rank needs to train a model under several strategies, and choose one. The functions are pure.

The estimate is the usual one, and its lines can be checked by hand. Parameters, gradients and optimizer states are counted in
bytes per parameter. Activations of a layer take 34 s·b·h bytes for s·b tokens and h hidden units, or 2 s·b·h with
recomputation (plus 34 s·b·h once, for the layer that is being recomputed); twice that in fp32 (Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", with attention that does not store a matrix of scores). A tenth of each
GPU's memory is reserved for CUDA, NCCL and fragmentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from types import MappingProxyType

from msgspec import Struct

__all__ = ["OPTIMIZERS", "PRECISIONS", "Advice", "Choice", "EstimateLine", "Model", "advise", "guess_model", "parse_count"]

PRECISIONS: Mapping[str, tuple[int, int, int]] = MappingProxyType({"fp32": (4, 4, 0), "bf16": (4, 4, 2)})
"""Bytes per parameter: of the parameter itself, of its gradient, and of the copy in the precision of the arithmetic.

``bf16`` is mixed precision: parameters and gradients are kept in fp32, as FSDP2 and autocast do.
"""
OPTIMIZERS: Mapping[str, int] = MappingProxyType({"adamw": 8, "sgd-momentum": 4, "sgd": 0})
"""Bytes per parameter of the optimizer's states."""
_USABLE = 0.9
_ACTIVATIONS, _RECOMPUTED = 34, 2
_GIB = 2**30
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


class Model(Struct, frozen=True, kw_only=True):
    """The size of a transformer."""

    parameters: int
    layers: int
    hidden: int


class EstimateLine(Struct, frozen=True, kw_only=True):
    """One line of the estimate."""

    what: str
    formula: str
    """The formula with its numbers."""
    bytes: int
    """Bytes of GPU memory for each rank."""


class Choice(Struct, frozen=True, kw_only=True):
    """One strategy, and the GPU memory that a rank needs under it."""

    kind: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    options: Mapping[str, str | bool | int]
    precision: str
    """The precision of the arithmetic, one of ``PRECISIONS``; the lines are computed for it."""
    lines: tuple[EstimateLine, ...]
    fits: bool
    why: str
    """The reason for or against it."""

    @property
    def bytes(self) -> int:
        """The sum over the lines."""
        return sum(line.bytes for line in self.lines)

    @property
    def needs_autocast(self) -> bool:
        """Whether the program itself must select this precision, because the strategy's kind has no option for it."""
        return self.precision != "fp32" and "mixed_precision" not in self.options

    def as_json(self) -> dict[str, object]:
        """Return it as a JSON object."""
        lines = [{"what": line.what, "formula": line.formula, "bytes": line.bytes} for line in self.lines]
        mesh = {"shape": list(self.shape), "names": list(self.names)}
        strategy = {"kind": self.kind, "mesh": mesh, "options": dict(self.options)}
        precision = {"precision": self.precision, "autocast": self.needs_autocast}
        return {"strategy": strategy, **precision, "fits": self.fits, "bytes": self.bytes, "lines": lines, "why": self.why}


class Advice(Struct, frozen=True, kw_only=True):
    """The possible strategies, from which one is chosen."""

    model: Model
    usable: int
    """Usable bytes of each GPU."""
    choices: tuple[Choice, ...]
    """Strategies from the simplest to the most complex one."""

    @property
    def chosen(self) -> Choice | None:
        """The simplest strategy that fits; ``None`` if no strategy fits."""
        return next((choice for choice in self.choices if choice.fits), None)


def guess_model(parameters: int, layers: int | None = None, hidden: int | None = None) -> Model:
    """Return a model of this size. A missing value follows from parameters = 12·layers·hidden².

    If both values are missing, hidden is 128·layers.

    >>> guess_model(7_000_000_000)
    Model(parameters=7000000000, layers=33, hidden=4224)
    """
    if layers is None and hidden is None:
        layers = max(1, round((parameters / (12 * 128**2)) ** (1 / 3)))
        hidden = 128 * layers
    elif hidden is None and layers is not None:
        hidden = max(128, ceil((parameters / (12 * layers)) ** 0.5 / 128) * 128)
    elif layers is None and hidden is not None:
        layers = max(1, round(parameters / (12 * hidden**2)))
    return Model(parameters=parameters, layers=layers or 1, hidden=hidden or 128)


def advise(
    model: Model,
    *,
    gpus: int,
    gpus_per_node: int,
    gpu_memory: int,
    precision: str = "bf16",
    optimizer: str = "adamw",
    micro_batch: int = 1,
    sequence: int = 2048,
) -> Advice:
    """Return strategies for these GPUs, each with its arithmetic, from the simplest to the most complex.

    ``gpu_memory`` is in bytes, ``micro_batch`` is the number of sequences on each rank, ``sequence`` their length in tokens.
    """
    usable = int(gpu_memory * _USABLE)
    sizes = _Sizes(model, precision, optimizer, micro_batch * sequence)
    choices = tuple(_choices(sizes, usable, gpus, min(gpus_per_node, gpus)))
    return Advice(model=model, usable=usable, choices=choices)


class _Sizes(Struct, frozen=True):
    model: Model
    precision: str
    optimizer: str
    tokens: int
    """Tokens of a micro-batch on one rank."""

    def lines(
        self, *, shards: int = 1, parts: int = 1, recompute: bool = False, offload: bool = False
    ) -> tuple[EstimateLine, ...]:
        """Return the estimate for a rank's GPU if each matrix is divided into ``parts``, with one line for each use.

        Parameters, gradients and optimizer states are also divided into ``shards``. With ``offload``, they are in the memory of
        the node and not counted.
        """
        parameter, gradient, copy = PRECISIONS[self.precision]
        count, cut = self.model.parameters, shards * parts

        def each(what: str, width: int) -> EstimateLine:
            divided = f" / {cut}" if cut > 1 else ""
            return EstimateLine(what=what, formula=f"{_count(count)} × {width} B{divided}", bytes=ceil(count * width / cut))

        lines = []
        if not offload:
            states = OPTIMIZERS[self.optimizer]
            lines = [each("parameters", parameter), each("gradients", gradient), each(f"{self.optimizer} states", states)]
        layer = ceil(count / self.model.layers / parts)
        if shards > 1:
            # The current layer, the next one that is being gathered, and gradients that are being reduced.
            width = copy or parameter
            lines.append(
                EstimateLine(what="gathered layers", formula=f"3 × {_count(layer)} × {width} B", bytes=3 * layer * width)
            )
        elif copy:
            lines.append(each(f"{self.precision} copy", copy))
        width = 1 if self.precision == "bf16" else 2
        kept = (_RECOMPUTED if recompute else _ACTIVATIONS) * width
        unit = self.tokens * self.model.hidden
        formula = f"{self.model.layers} layers × {kept} B × {self.tokens} tokens × {self.model.hidden}"
        total = self.model.layers * kept * unit
        if recompute:
            formula += f" + one layer × {_ACTIVATIONS * width} B"
            total += _ACTIVATIONS * width * unit
        if parts > 1:
            formula = f"({formula}) / {parts}"
        lines.append(EstimateLine(what="activations", formula=formula, bytes=ceil(total / parts)))
        return tuple(lines)


def _choices(sizes: _Sizes, usable: int, gpus: int, per_node: int) -> Iterator[Choice]:
    def choice(
        kind: str,
        shape: tuple[int, ...],
        names: tuple[str, ...],
        why: str,
        *,
        shards: int = 1,
        parts: int = 1,
        recompute: bool = False,
        offload: bool = False,
    ) -> Choice:
        lines = sizes.lines(shards=shards, parts=parts, recompute=recompute, offload=offload)
        need = sum(line.bytes for line in lines)
        options: dict[str, str | bool | int] = {"activation_checkpointing": True} if recompute else {}
        if sizes.precision == "bf16" and kind in ("fsdp", "hybrid"):
            options["mixed_precision"] = "bf16"
        if offload:
            options["cpu_offload"] = True
        fits = need <= usable
        if not fits:
            why = f"needs {need / _GIB:.1f} GiB on each GPU, but {usable / _GIB:.1f} GiB are usable"
        return Choice(
            kind=kind, shape=shape, names=names, options=MappingProxyType(options), precision=sizes.precision, lines=lines,
            fits=fits, why=why,
        )  # fmt: skip

    if gpus == 1:
        yield choice("none", (1,), ("dp",), "the model fits on the one GPU")
    else:
        for recompute in (False, True):
            note = "; activations are recomputed" if recompute else ""
            yield choice(
                "ddp", (gpus,), ("dp",), f"the simplest strategy: every rank holds the whole model{note}", recompute=recompute
            )
        for recompute in (False, True):
            note = "; activations are recomputed" if recompute else ""
            why = f"each rank holds 1/{gpus} of the states{note}"
            yield choice("fsdp", (gpus,), ("fsdp",), why, shards=gpus, recompute=recompute)
    parts = 2
    while parts <= per_node and per_node % parts == 0:
        shards = gpus // parts
        if gpus % parts == 0:
            kind, shape, names = ("hybrid", (shards, parts), ("fsdp", "tp")) if shards > 1 else ("tp", (parts,), ("tp",))
            why = f"tensors are divided among {parts} ranks of a node; activations are recomputed"
            yield choice(kind, shape, names, why, shards=shards, parts=parts, recompute=True)
        parts *= 2
    if gpus > 1:
        states = sum(line.bytes for line in sizes.lines(shards=gpus)[:3])
        why = f"slow: states are in the memory of the nodes, {states / _GIB:.1f} GiB for each rank"
        yield choice("fsdp", (gpus,), ("fsdp",), why, shards=gpus, recompute=True, offload=True)


def parse_count(text: str) -> int:
    """Return a number of parameters such as ``7b``, ``350M`` or ``1.3e9``. Raises ``ValueError``.

    >>> parse_count("1.5b")
    1500000000
    """
    number, unit = (text[:-1], text[-1].lower()) if text and text[-1].lower() in _COUNTS else (text, "")
    try:
        count = round(float(number) * _COUNTS[unit])
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ValueError(f"`{text}` is not a number of parameters; write 7b, 350m or 1300000000")
    return count


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return str(number)
