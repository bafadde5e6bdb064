"""Checkpoints of models that are divided among ranks: other strategies and numbers of ranks can load them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from train.conftest import Start

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

SCRIPT = """
    import hashlib, json, sys
    import torch
    from torch import nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from distflow import train
    from distflow.train.strategies.description import make_strategy

    place = train.init(timeout=60)
    KINDS = {
        1: {"none": ("none", {})},
        2: {
            "ddp": ("ddp", {}), "fsdp": ("fsdp", {}), "tp": ("tp", {"plan": {"0": "colwise", "2": "rowwise"}}),
            "pipeline": ("pipeline", {}),
        },
        4: {
            "fsdp": ("fsdp", {}), "replicas": ("pipeline", {"stages": 2}),
            "pipeline": ("pipeline", {"split_points": ["2", "4", "5"]}),
            "hybrid": ("hybrid", {"tp_size": 2, "plan": {"0": "colwise", "2": "rowwise"}}),
            "stages of shards": ("pipeline", {"stages": 2, "shard_size": 2}),
        },
    }[place.size]
    SOURCES = {"tp": KINDS, "pipeline": KINDS, "pipeline sgd": KINDS}

    def loss_of(outputs, targets):
        return ((outputs - targets) ** 2).mean()

    def build(kind, seed, optimizer, lr):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 2))
        name, options = KINDS[kind]
        model = train.parallelize(model, make_strategy(name, place.size, options), loss=loss_of)
        groups = [
            {"params": [one for one in model.parameters() if one.dim() == 2], "weight_decay": 0.1},
            {"params": [one for one in model.parameters() if one.dim() == 1], "weight_decay": 0.0},
        ]
        return model, (torch.optim.SGD if optimizer == "sgd" else torch.optim.AdamW)(groups, lr=lr)

    def digests(model, optimizer):
        \"\"\"Name in the whole model → a hash of the parameter and its states, and the settings of its group.\"\"\"
        states = get_state_dict(getattr(model, "part", model), optimizer, options=StateDictOptions(full_state_dict=True))
        found = {}
        for name, value in states[0].items():
            total = hashlib.sha256(value.numpy().tobytes())
            for key, one in sorted(states[1]["state"].get(name, {}).items()):
                total.update(key.encode() + one.numpy().tobytes())
            group = next(group for group in states[1]["param_groups"] if name in group["params"])
            found[name] = f"{total.hexdigest()} lr {group['lr']} decay {group['weight_decay']}"
        return json.dumps(found)

    for source in SOURCES if place.size == 2 else ():
        kind, _, optimizer_name = source.partition(" ")
        model, optimizer = build(kind, 0, optimizer_name, lr=0.01)
        for step in range(2):
            train.backward(model, torch.full((4, 6), step + 1.0), torch.ones(4, 2), loss_of)
            optimizer.step()
            optimizer.zero_grad()
        train.Checkpoints(f"{sys.argv[1]}/{source}").save(2, model, optimizer)
        train.report(step=2, source=source, kind="saved", found=digests(model, optimizer))
    if place.size == 4:
        model, optimizer = build("stages of shards", 1, "", lr=0.5)
        train.Checkpoints(f"{sys.argv[1]}/pipeline").load_latest(model, optimizer)
        train.Checkpoints(f"{sys.argv[1]}/again").save(2, model, optimizer)
        SOURCES |= {"tp": ("fsdp", "hybrid", "pipeline"), "pipeline sgd": ("stages of shards",)}
        SOURCES |= {"again": ("fsdp", "stages of shards")}
    for source, kinds in SOURCES.items():
        for kind in kinds:
            model, optimizer = build(kind, 1, source.partition(" ")[2], lr=0.5)
            step = train.Checkpoints(f"{sys.argv[1]}/{source}").load_latest(model, optimizer)
            found = digests(model, optimizer)
            if source.startswith("pipeline"):  # the loaded model and optimizer can continue the training
                train.backward(model, torch.ones(4, 6), torch.ones(4, 2), loss_of)
                optimizer.step()
            train.report(step=step, source=source, kind=kind, found=found)
"""
SOURCES = ("tp", "pipeline", "pipeline sgd")
LOADED: dict[int, dict[str, tuple[str, ...]]] = {
    2: dict.fromkeys(SOURCES, ("saved", "ddp", "fsdp", "tp", "pipeline")),
    1: dict.fromkeys(SOURCES, ("none",)),
    4: {
        "tp": ("fsdp", "hybrid", "pipeline"),
        "pipeline": ("fsdp", "hybrid", "pipeline", "replicas", "stages of shards"),
        "pipeline sgd": ("stages of shards",),
        "again": ("fsdp", "stages of shards"),
    },
}
"""Number of ranks → saved checkpoint → strategies that load it."""
NAMES = {f"{layer}.{name}" for layer in (0, 2, 4, 5) for name in ("weight", "bias")}


def test_a_divided_model_can_be_loaded_with_every_strategy(start_with_torch: Start, tmp_path: Path) -> None:
    """2 ranks save, and 2, 1 and 4 ranks load the parameters, the optimizer's states and the settings of its groups."""
    saved: dict[str, dict[str, str]] = {}
    for size, loaded in LOADED.items():
        run = start_with_torch(SCRIPT, "--size", str(size), arguments=(str(tmp_path),))
        assert run.wait() == 0, run.stderr
        found: dict[tuple[str, str], dict[str, str]] = {}
        for record in run.records:
            assert record["step"] == 2
            found.setdefault((record["source"], record["kind"]), {}).update(json.loads(record["found"]))
        assert set(found) == {(source, kind) for source, kinds in loaded.items() for kind in kinds}
        saved |= {source: names for (source, kind), names in found.items() if kind == "saved"}
        assert all(set(names) == NAMES and "lr 0.01" in names["5.bias"] for names in saved.values())
        for (source, kind), names in found.items():
            assert names == saved["pipeline" if source == "again" else source], (source, kind, size)
