"""Read and write safetensors files in the layout of Hugging Face. Each rank reads its parts, and rank 0 writes the files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from distflow.train.communication.gradients import means_of
from distflow.train.communication.votes import all_ranks, from_all
from distflow.train.strategies.initial import tied_names
from distflow.train.strategies.stages import Pipeline, inner_module
from distflow.train.strategies.states import first_names

__all__ = ["load_weights", "save_weights", "weight_names", "whole_tensors"]

_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


def weight_names(directory: str | Path, model: nn.Module) -> frozenset[str]:
    """Return the names of all tensors in the safetensors files of a directory.

    For a tied parameter, the files need only one of its names, and all of its names are returned. Raises ``FileNotFoundError``
    for a directory without safetensors files, and ``ValueError`` if they lack a tensor of the model.
    """
    stored = set(_reader(directory).read_metadata().state_dict_metadata)
    if not stored:
        raise FileNotFoundError(f"{directory} has no *.safetensors files: give the directory of a saved model")
    for names in tied_names(model):
        if not stored.isdisjoint(names):
            stored.update(names)
    if missing := _states(model).keys() - stored:
        raise ValueError(f"the safetensors files in {directory} lack {first_names(missing, 3)}, which the model has")
    return frozenset(stored)


def load_weights(model: nn.Module, directory: str | Path) -> None:
    """Read this rank's parts of a model from safetensors files, and convert them to the model's dtypes. Collective.

    Raises ``ValueError`` if torch cannot load the files into the model, for example because shapes differ.
    """
    reader = _reader(directory)
    stored = reader.read_metadata().state_dict_metadata
    # A tied parameter is read under the name that the files contain.
    state: dict[str, Any] = {name: tensor for name, tensor in _states(model).items() if name in stored}
    try:
        load(state, storage_reader=reader)
    except CheckpointException as error:
        reasons = dict.fromkeys(str(one) for one, _ in error.failures.values())
        raise ValueError(f"the files in {directory} cannot be loaded into the model: {'; '.join(reasons)}") from error


def save_weights(model: nn.Module, directory: str | Path, *, max_file_size: int) -> None:
    """Implement ``ParallelPlan.save_weights``."""
    from safetensors.torch import save_file  # noqa: PLC0415  an optional package

    folder, is_writer = Path(directory), not dist.is_initialized() or dist.get_rank() == 0
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
    waiting: dict[str, torch.Tensor] = {}
    written: list[tuple[Path, list[str]]] = []
    total = 0

    def write() -> None:
        path = folder / f"part-{len(written)}.tmp"
        save_file(waiting, path, metadata={"format": "pt"})
        written.append((path, list(waiting)))
        waiting.clear()

    for name, tensor in whole_tensors(model):
        if is_writer:
            if waiting and sum(one.nbytes for one in waiting.values()) + tensor.nbytes > max_file_size:
                write()
            waiting[name] = tensor.detach().to("cpu", copy=True).contiguous()
            total += tensor.nbytes
    if is_writer:
        write()
        _publish(folder, written, total)
        config = getattr(inner_module(model), "config", None)
        if config is not None and hasattr(config, "save_pretrained"):
            config.save_pretrained(folder)
    all_ranks(True)


def _publish(folder: Path, written: list[tuple[Path, list[str]]], total: int) -> None:
    """Rename the complete files, write an index if there are several, and remove the files of an earlier save."""
    index: dict[str, str] = {}
    for number, (path, names) in enumerate(written, 1):
        name = "model.safetensors" if len(written) == 1 else f"model-{number:05d}-of-{len(written):05d}.safetensors"
        path.replace(folder / name)
        index |= dict.fromkeys(names, name)
    for path in list(folder.iterdir()):
        if path.name not in index.values() and _FILE.fullmatch(path.name):
            path.unlink()
    if len(written) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def whole_tensors(model: nn.Module, *, all_names: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the whole value of each parameter and persistent buffer, on every rank. Collective.

    A tied parameter is yielded once, with its first name; with ``all_names``, once with each name. Between two averages of
    ``local_sgd``, parameters are the means over the ranks.
    """
    repeated = () if all_names else {name for _, *others in tied_names(inner_module(model)) for name in others}
    state = {name: one for name, one in {**_states(model), **means_of(model)}.items() if name not in repeated}
    if isinstance(model, Pipeline):
        device = next(model.part.parameters()).device
        owners: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        for rank, part in enumerate(from_all([(name, one.shape, one.dtype) for name, one in state.items()])):
            owners = {name: (rank, shape, dtype) for name, shape, dtype in part} | owners
        for name, (owner, shape, dtype) in owners.items():
            held = _whole(state[name]) if name in state else None
            tensor = held if held is not None and dist.get_rank() == owner else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, owner)
            yield name, tensor
        return
    for name, tensor in state.items():
        yield name, _whole(tensor)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().contiguous() if isinstance(tensor, DTensor) else tensor


def _states(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's part of each parameter and persistent buffer, not copied, by their names in the whole model."""
    return {name: one for name, one in get_model_state_dict(inner_module(model)).items() if isinstance(one, torch.Tensor)}


def _reader(directory: str | Path) -> Any:
    try:
        import safetensors  # noqa: F401, PLC0415  torch's reader imports it only when it reads
        from torch.distributed.checkpoint import HuggingFaceStorageReader  # type: ignore[attr-defined]  # noqa: PLC0415
    except ImportError as error:
        needs = "install the package safetensors, and torch 2.8 or newer"
        raise RuntimeError(f"cannot read the weights in `{directory}` ({error}): {needs}") from error
    return HuggingFaceStorageReader(str(directory))
