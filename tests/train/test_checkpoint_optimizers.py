"""What an optimizer is when it is saved is what it is when it is loaded, also before its first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.conftest import Start

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

STEPS = """
    import sys
    import torch, torch.distributed as dist
    from torch import nn
    from distflow import train

    place = train.init(timeout=60)

    class Half(nn.Module):
        \"\"\"Has a layer that takes no part in the result.\"\"\"

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
                if tried:  # such as a pass that looks whether the memory suffices
                    train.backward(model, torch.ones(2, 4), torch.ones(2, 2), nn.functional.mse_loss)
                step = checkpoints.load_latest(model, optimizer)
                optimizer.zero_grad()
                steps(model, optimizer, step, 4)
                train.report(step=4, name=name, what=f"loaded at {saved_at}, {tried}", weights=weights(model))
"""
)


def test_saving_changes_nothing_and_loading_goes_on_from_there(start_with_torch: Start, tmp_path: Path) -> None:
    """Before the first step, and where a parameter never got a gradient: the optimizer has no state of those."""
    run = start_with_torch(OPTIMIZERS, "--size", "2", arguments=(str(tmp_path),))
    assert run.wait() == 0, run.stderr
    for name in ("adamw", "sgd"):
        ends = {record["what"]: record["weights"] for record in run.records if record["name"] == name}
        assert len(ends) == 6
        assert {what for what, weights in ends.items() if weights != ends["without"]} == set()


LOCAL = (
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


def test_ranks_that_average_at_times_go_on_where_they_were(start_with_torch: Start, tmp_path: Path) -> None:
    """After an average bit for bit, with the next one when it is due; between two from the mean: no rank's work is lost."""
    run = start_with_torch(LOCAL, "--size", "2", arguments=(str(tmp_path / "checkpoints"),))
    assert run.wait() == 0, run.stderr
    for rank in (0, 1):
        said = {record["what"]: record for record in run.records if record["rank"] == rank}
        assert said["resumed 5"]["weights"] == said["whole"]["weights"]
        assert [(said[f"mean {at}"]["same"], said[f"mean {at}"]["count"]) for at in (5, 7)] == [(True, at) for at in (5, 7)]


WITHOUT = (
    STEPS
    + """
    class Tied(nn.Module):
        \"\"\"Has two names for one matrix.\"\"\"

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


def test_what_is_taken_of_ranks_that_are_apart_is_their_mean(start_with_torch: Start, tmp_path: Path) -> None:
    """Also without the optimizer, and of parameters that have two names."""
    run = start_with_torch(WITHOUT, "--size", "2", arguments=(str(tmp_path),))
    assert run.wait() == 0, run.stderr
    assert [(record["wrong"], record["kept"]) for record in run.records] == [("[]", True)] * 2


def test_an_optimizer_that_could_not_be_loaded_again_is_not_saved(start_with_torch: Start) -> None:
    run = start_with_torch(
        """
        import torch
        from torch import nn
        from distflow import train
        train.init()
        model = nn.Linear(2, 2)
        optimizer = torch.optim.LBFGS(model.parameters())
        checkpoints = train.Checkpoints("checkpoints")

        def again():
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            return loss

        for step in range(2):
            try:
                checkpoints.save(step, model, optimizer)
                checkpoints.load_latest(model, optimizer)
                said = ""
            except (train.CheckpointError, ValueError, TypeError) as error:
                said = str(error)
            train.report(step=step, said=said)
            optimizer.step(again)
        checkpoints.save(2, model)
        train.report(step=checkpoints.load_latest(model), said="LBFGS without it")
        """,
        plain=True,
    )
    assert run.wait() == 0, run.stderr
    assert [("LBFGS" in record["said"], record["step"]) for record in run.records] == [(True, step) for step in range(3)]


APART = (
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

    # Each rank sees words that the other does not.
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


def test_what_differs_by_rank_is_saved_of_one(start_with_torch: Start, tmp_path: Path) -> None:
    """Statistics of BatchNorm, and the states of an optimizer whose ranks take steps of their own."""
    run = start_with_torch(APART, "--size", "2", arguments=(str(tmp_path),))
    assert run.wait() == 0, run.stderr
    said = {(record["what"], record["rank"]): record for record in run.records}
    for what in ("ddp", "fsdp", "words"):
        assert said[what, 0]["before"] != said[what, 1]["before"]
    assert [(what, rank) for what, rank in said if said[what, rank]["after"] != said[what, 0]["before"]] == []
