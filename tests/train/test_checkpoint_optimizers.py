"""Checkpoints of optimizers: a loaded optimizer continues like the saved one, also before its first step and with local SGD."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.conftest import Start

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

PRELOAD = "torch.distributed.optim"
"""The module that local SGD imports, which would otherwise take 0.3 s in each rank."""
STEPS = """
    import sys
    import torch, torch.distributed as dist
    from torch import nn
    from distflow import train

    place = train.init(timeout=60)

    class Half(nn.Module):
        \"\"\"A model with a layer that does not contribute to the result.\"\"\"

        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            return self.used(x)

    def steps(model, optimizer, first, last):
        for step in range(first, last):
            draw = torch.Generator().manual_seed(10 * step + place.rank)
            inputs, targets = torch.randn(4, 4, generator=draw), torch.randn(4, 2, generator=draw)
            train.backward(model, inputs, targets, nn.functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()

    def weights(model):
        return str([parameter.tolist() for parameter in model.parameters()])
"""
OPTIMIZERS = (
    STEPS
    + """
    MAKERS = {
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    }

    def build(name):
        torch.manual_seed(0)
        model = train.parallelize(Half(), "ddp", find_unused_parameters=True)
        return model, MAKERS[name](model.parameters())

    for name in MAKERS:
        model, optimizer = build(name)
        steps(model, optimizer, 0, 4)
        train.report(step=4, name=name, what="without", weights=weights(model))
        for saved_at in (0, 2):
            checkpoints = train.Checkpoints(f"{sys.argv[1]}/{name}-{saved_at}")
            model, optimizer = build(name)
            steps(model, optimizer, 0, saved_at)
            checkpoints.save(saved_at, model, optimizer)
            steps(model, optimizer, saved_at, 4)
            train.report(step=4, name=name, what="saved", weights=weights(model))
            for tried in (False, True):
                model, optimizer = build(name)
                if tried:  # such as a pass that tests whether the memory suffices
                    train.backward(model, torch.ones(2, 4), torch.ones(2, 2), nn.functional.mse_loss)
                step = checkpoints.load_latest(model, optimizer)
                optimizer.zero_grad()
                steps(model, optimizer, step, 4)
                train.report(step=4, name=name, what=f"loaded at {saved_at}, {tried}", weights=weights(model))
"""
)


def test_training_that_is_saved_or_resumed_ends_with_the_same_weights(start_with_torch: Start, tmp_path: Path) -> None:
    """The optimizer has no state before its first step, and none for a parameter that never gets a gradient."""
    run = start_with_torch(OPTIMIZERS, "--size", "2", arguments=(str(tmp_path),))
    assert run.wait() == 0, run.stderr
    for name in ("adamw", "sgd"):
        ends = {record["what"]: record["weights"] for record in run.records if record["name"] == name}
        assert len(ends) == 6
        assert {what for what, weights in ends.items() if weights != ends["without"]} == set()


LOCAL_SGD = (
    STEPS
    + """
    def build():
        torch.manual_seed(0)
        model = train.parallelize(nn.Linear(4, 2), "ddp", sync_gradients_every=4)
        return model, train.local_sgd(model, torch.optim.SGD(model.parameters(), lr=0.1), warmup_steps=1)

    def stepped(last):
        model, optimizer = build()
        steps(model, optimizer, 0, last)
        return model, optimizer

    whole, _ = stepped(12)
    train.report(step=12, what="whole", weights=weights(whole))
    checkpoints = train.Checkpoints(sys.argv[1])
    for saved_at in (5, 7):
        model, optimizer = stepped(saved_at)
        before = weights(model)
        checkpoints.save(saved_at, model, optimizer)
        assert weights(model) == before
        mean = [parameter.detach().clone() for parameter in model.parameters()]
        train.all_reduce_mean(mean)
        model, optimizer = build()
        step = checkpoints.load_latest(model, optimizer)
        same = all(map(torch.equal, mean, model.parameters()))
        train.report(step=step, what=f"mean {saved_at}", same=same, count=optimizer.averager.step)
        steps(model, optimizer, step, 12)
        train.report(step=step, what=f"resumed {saved_at}", weights=weights(model))
        assert optimizer.param_groups is optimizer.optim.param_groups
"""
)


def test_local_sgd_is_resumed_from_a_checkpoint(start_with_torch: Start, tmp_path: Path) -> None:
    """Right after an average, training continues bit for bit. Between two averages, it continues from the mean of the ranks."""
    run = start_with_torch(LOCAL_SGD, "--size", "2", arguments=(str(tmp_path / "checkpoints"),), PRELOAD=PRELOAD)
    assert run.wait() == 0, run.stderr
    for rank in (0, 1):
        records = {record["what"]: record for record in run.records if record["rank"] == rank}
        assert records["resumed 5"]["weights"] == records["whole"]["weights"]
        assert [(records[f"mean {at}"]["same"], records[f"mean {at}"]["count"]) for at in (5, 7)] == [
            (True, at) for at in (5, 7)
        ]


MEANS = (
    STEPS
    + """
    class Tied(nn.Module):
        \"\"\"A model with two names for one matrix.\"\"\"

        def __init__(self):
            super().__init__()
            self.first, self.last, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
            self.last.weight = self.first.weight

        def forward(self, x):
            return self.out(self.last(self.first(x)))

    def build(seed):
        torch.manual_seed(seed)
        model = train.parallelize(Tied(), "ddp", sync_gradients_every=4)
        return model, train.local_sgd(model, torch.optim.SGD(model.parameters(), lr=0.1))

    model, optimizer = build(0)
    steps(model, optimizer, 0, 6)
    before = weights(model)
    wanted = {name: value.detach().clone() for name, value in model.module.state_dict().items()}
    train.all_reduce_mean(wanted.values())

    def same(state):
        return state.keys() == wanted.keys() and all(torch.equal(value, wanted[name]) for name, value in state.items())

    whole = train.full_state_dict(model)
    worker = train.Worker(model, optimizer, None).get_model_state()
    found = {"whole": same(whole) if place.rank == 0 else not whole, "worker": same(worker)}
    for given in (True, False):
        checkpoints = train.Checkpoints(f"{sys.argv[1]}/{given}")
        checkpoints.save(6, model, *([optimizer] if given else []))
        other, its_optimizer = build(1)
        checkpoints.load_latest(other, *([its_optimizer] if given else []))
        found[f"with optimizer: {given}"] = same(other.module.state_dict())
    train.report(step=6, wrong=str([name for name, right in found.items() if not right]), kept=weights(model) == before)
"""
)


def test_saved_and_returned_weights_of_local_sgd_are_the_mean_of_the_ranks(start_with_torch: Start, tmp_path: Path) -> None:
    """This also applies to checkpoints without the optimizer, and to a parameter with two names."""
    run = start_with_torch(MEANS, "--size", "2", arguments=(str(tmp_path),), PRELOAD=PRELOAD)
    assert run.wait() == 0, run.stderr
    assert [(record["wrong"], record["kept"]) for record in run.records] == [("[]", True)] * 2


def test_an_optimizer_that_cannot_be_loaded_is_not_saved(start_with_torch: Start) -> None:
    run = start_with_torch(
        """
        import torch
        from torch import nn
        from distflow import train
        train.init()
        model = nn.Linear(2, 2)
        optimizer = torch.optim.LBFGS(model.parameters())
        checkpoints = train.Checkpoints("checkpoints")

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            return loss

        for step in range(2):
            try:
                checkpoints.save(step, model, optimizer)
                checkpoints.load_latest(model, optimizer)
                message = ""
            except (train.CheckpointError, ValueError, TypeError) as error:
                message = str(error)
            train.report(step=step, message=message)
            optimizer.step(closure)
        checkpoints.save(2, model)
        train.report(step=checkpoints.load_latest(model), message="saved without LBFGS")
        """,
        plain=True,
    )
    assert run.wait() == 0, run.stderr
    assert [("LBFGS" in record["message"], record["step"]) for record in run.records] == [(True, step) for step in range(3)]


DIFFERENT_STATES = (
    STEPS
    + """
    def build(kind):
        torch.manual_seed(0)
        model = train.parallelize(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), kind)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def statistics(model):
        return str([buffer.tolist() for buffer in model.buffers()])

    for kind in ("ddp", "fsdp"):
        model, optimizer = build(kind)
        steps(model, optimizer, 0, 3)
        checkpoints = train.Checkpoints(f"{sys.argv[1]}/{kind}")
        checkpoints.save(3, model, optimizer)
        other, its_optimizer = build(kind)
        checkpoints.load_latest(other, its_optimizer)
        train.report(step=3, what=kind, before=statistics(model), after=statistics(other))

    # Each rank gets another word, so that the states of the optimizer differ.
    def build_words():
        torch.manual_seed(0)
        model = train.parallelize(nn.Embedding(4, 2), "ddp")
        return model, train.local_sgd(model, torch.optim.Adam(model.parameters(), lr=0.01), every=4)

    def states(optimizer):
        return str([{name: value.tolist() for name, value in one.items()} for one in optimizer.state.values()])

    model, optimizer = build_words()
    for _ in range(4):
        model(torch.tensor([place.rank])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoints = train.Checkpoints(f"{sys.argv[1]}/words")
    checkpoints.save(4, model, optimizer)
    other, its_optimizer = build_words()
    checkpoints.load_latest(other, its_optimizer)
    train.report(step=4, what="words", before=states(optimizer.optim), after=states(its_optimizer.optim))
"""
)


def test_state_that_differs_between_ranks_is_saved_from_rank_0(start_with_torch: Start, tmp_path: Path) -> None:
    """Statistics of BatchNorm differ between ranks, and so do the states of an optimizer under local SGD."""
    run = start_with_torch(DIFFERENT_STATES, "--size", "2", arguments=(str(tmp_path),), PRELOAD=PRELOAD)
    assert run.wait() == 0, run.stderr
    records = {(record["what"], record["rank"]): record for record in run.records}
    for what in ("ddp", "fsdp", "words"):
        assert records[what, 0]["before"] != records[what, 1]["before"]
    assert [(what, rank) for what, rank in records if records[what, rank]["after"] != records[what, 0]["before"]] == []
