"""Checkpoints with real ranks, real files and a real SIGKILL; gloo on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from train.conftest import Start

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

MODELS = """
    import hashlib, json, os, shutil, signal, sys, warnings
    import numpy, torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from distflow import train

    def build(kind):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 2))
        if kind == "ddp":
            model = DistributedDataParallel(model)
        elif kind == "fsdp":
            fully_shard(model[0])
            fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def digest(model, optimizer):
        options = StateDictOptions(full_state_dict=True)
        total = hashlib.sha256()

        def add(name, value):
            if isinstance(value, dict):
                for key in sorted(value):
                    add(f"{name}.{key}", value[key])
            elif isinstance(value, torch.Tensor):
                total.update(name.encode() + value.numpy().tobytes())

        for part in get_state_dict(model, optimizer, options=options):
            add("", part)
        return total.hexdigest()
"""
TRAIN = (
    MODELS
    + """
    place = train.init(timeout=60)
    data = torch.utils.data.TensorDataset(torch.randn(30, 6, generator=torch.Generator().manual_seed(1)), torch.arange(30) % 2)
    dies_at, name = int(sys.argv[1]), sys.argv[2]
    kinds = ("ddp", "fsdp")
    built = {kind: build(kind) for kind in kinds}
    torch.manual_seed(100 + place.rank)
    loader = train.Loader(data, batch_size=4, seed=3)
    checkpoints = {kind: train.Checkpoints(f"{name}/{kind}", keep_last=2) for kind in kinds}
    step = 0
    for kind in reversed(kinds):
        model, optimizer = built[kind]
        step = checkpoints[kind].load_latest(model, optimizer, loader=loader) or 0
    train.report(step=step, what="begin", attempt=os.environ["TORCHELASTIC_RESTART_COUNT"])
    while loader.epoch < 3:
        for samples, labels in loader:
            for model, optimizer in built.values():
                nn.functional.cross_entropy(model(samples), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if step % 3 == 0:
                for kind, (model, optimizer) in built.items():
                    checkpoints[kind].save(step, model, optimizer, loader=loader)
            if step == dies_at and place.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
    train.report(step=step, what="end", **{kind: digest(*built[kind]) for kind in kinds})
"""
)
LOAD = (
    MODELS
    + """
    train.init(timeout=60)
    for kind in ("ddp", "fsdp"):
        for source in ("ddp", "fsdp"):
            model, optimizer = build(kind)
            step = train.Checkpoints(f"{sys.argv[1]}/{source}").load_latest(model, optimizer)
            train.report(step=step, kind=kind, source=source, digest=digest(model, optimizer))
"""
)


def test_training_with_a_killed_rank_ends_with_the_same_weights(start_with_torch: Start, tmp_path: Path) -> None:
    """The rank is killed in the middle of an epoch, between two checkpoints. Weights and optimizer are equal bit for bit."""
    killed = start_with_torch(TRAIN, "--size", "2", "--max-restarts", "1", arguments=("8", str(tmp_path / "killed")))
    assert killed.wait() == 0, killed.stderr
    whole = start_with_torch(TRAIN, "--size", "2", arguments=("0", str(tmp_path / "whole")))
    assert whole.wait() == 0, whole.stderr

    begins = {(record["attempt"], record["step"]) for record in killed.records if record["what"] == "begin"}
    assert begins == {("0", 0), ("1", 6)}
    ends = [record for run in (killed, whole) for record in run.records if record["what"] == "end"]
    assert [record["step"] for record in ends] == [12] * 4
    for kind in ("ddp", "fsdp"):
        assert len({record[kind] for record in ends}) == 1
        assert sorted(path.name for path in (tmp_path / "killed" / kind).iterdir()) == ["step-12", "step-9"]
    assert "rank 1 failed first" in killed.stderr
    assert "Warning" not in whole.stderr

    # Three ranks can load the checkpoints, also with the other strategy. FSDP divides 16 rows among them.
    run = start_with_torch(LOAD, "--size", "3", arguments=(str(tmp_path / "whole"),))
    assert run.wait() == 0, run.stderr
    loaded = {(record["source"], record["kind"], record["rank"]): record for record in run.records}
    assert len(loaded) == 4 * 3
    assert {record["step"] for record in loaded.values()} == {12}
    for source in ("ddp", "fsdp"):
        assert {record["digest"] for place, record in loaded.items() if place[0] == source} == {ends[0][source]}


ONE_RANK = (
    MODELS
    + """
    from pathlib import Path
    train.init()
    model, optimizer = build("none")
    folder = Path(sys.argv[1])
    checkpoints = train.Checkpoints(folder, keep_last=4)
    assert checkpoints.load_latest(model, optimizer) is None
    digests = {}

    def step(number):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        digests[number] = digest(model, optimizer)

    for number in range(1, 7):
        step(number)
        checkpoints.save(number, model, optimizer)
    report = {"kept": sorted(path.name for path in folder.iterdir())}

    # From newest to oldest: changed contents, truncated, without manifest, intact. Another one was never finished.
    tensors = folder / "step-6" / "__0_0.distcp"
    data = bytearray(tensors.read_bytes())
    data[len(data) // 2] ^= 1
    tensors.write_bytes(data)
    os.truncate(folder / "step-5" / "extra.pt", 3)
    (folder / "step-4" / "manifest.json").unlink()
    (folder / "step-7.tmp").mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report["step"] = checkpoints.load_latest(model, optimizer)
    report["warnings"] = [str(one.message) for one in caught if "is damaged" in str(one.message)]
    report["right"] = digest(model, optimizer) == digests[3]
    report["random"] = torch.rand(1).item() == torch.rand(1).item()

    # The checkpoint has the state at the time of the call, although the model changes while it is written.
    torch.manual_seed(5)
    step(6)
    checkpoints.async_save(6, model, optimizer)
    after = torch.rand(1)
    step(7)
    checkpoints.wait()
    report["async"] = [checkpoints.load_latest(model, optimizer), digest(model, optimizer) == digests[6] != digests[7]]
    report["random"] = torch.equal(torch.rand(1), after)
    report["left"] = sorted(path.name for path in folder.iterdir())

    # As after a kill while a checkpoint replaces another one of the same step.
    (folder / "step-6").rename(folder / "step-6.old")
    (folder / "step-6.tmp").mkdir()
    report["replaced"] = checkpoints.load_latest(model, optimizer)

    rate = 0.1 * numpy.sqrt(2)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=rate), 2)
    errors = report["errors"] = []
    for work in (
        lambda: checkpoints.load_latest(model, optimizer, loader=train.Loader([1], 1)),
        lambda: checkpoints.load_latest(nn.Linear(6, 17)),
        lambda: train.Checkpoints(folder / "step-6" / "extra.pt"),
        lambda: train.Checkpoints(),
        lambda: train.Checkpoints(folder, keep_last=0),
        lambda: checkpoints.save(-1, model),
        lambda: checkpoints.save(8, model, optimizer, loader=train.Loader([1], 1), scheduler=scheduler),
    ):
        try:
            work()
        except (train.CheckpointError, ValueError) as error:
            errors.append(str(error))
    print(json.dumps(report))
"""
)


def test_damaged_and_incomplete_checkpoints_are_skipped(start_with_torch: Start, tmp_path: Path) -> None:
    run = start_with_torch(ONE_RANK, plain=True, arguments=(str(tmp_path / "checkpoints"),))
    assert run.wait() == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["kept"] == ["step-3", "step-4", "step-5", "step-6"]
    assert (report["step"], report["right"]) == (3, True)
    changed, cut, missing = report["warnings"]
    assert "step-6 is damaged and not used: the checksum of __0_0.distcp differs from the one in manifest.json" in changed
    assert "extra.pt has 3 bytes, not" in cut
    assert "manifest.json" in missing
    assert report["async"] == [6, True]
    assert report["random"] is True
    assert report["left"] == ["step-3", "step-4", "step-5", "step-6"], "the unfinished checkpoint was removed"
    assert report["replaced"] == 6, "the replaced checkpoint can still be loaded"
    no_state, other_model, no_directory, none, keep, negative, unreadable = report["errors"]
    assert "does not contain the state of loader, nor of other objects" in no_state
    assert "cannot be loaded into this model and optimizer" in other_model
    assert "rank 0: " in no_directory
    assert "set DISTFLOW_CHECKPOINT" in none
    assert "keep_last=0" in keep
    assert "step=-1" in negative
    assert "would refuse it: the state of loader or scheduler contains " in unreadable


TWO_RANKS = (
    MODELS
    + """
    place = train.init(timeout=60)
    rank = place.rank
    model, optimizer = build("ddp")
    warnings.simplefilter("always")

    # The collectives of the training continue while a checkpoint is written.
    checkpoints = train.Checkpoints()
    checkpoints.async_save(1, model, optimizer)
    for _ in range(50):
        dist.all_reduce(torch.ones(10))
    checkpoints.async_save(2, model, optimizer)
    checkpoints.wait()
    train.report(step=checkpoints.load_latest(model, optimizer), what="async")

    # The weights of a worker are copied to another worker with another strategy.
    def loss_of(model, batch):
        return (model(batch) ** 2).mean()

    one, other = (train.Worker(*build(kind), loss_of) for kind in ("fsdp", "ddp"))
    losses = [one.train_step(torch.ones(4, 6)) for _ in range(5)]
    sent = one.get_model_state()
    before = other.get_model_state()
    # Every rank passes a state, but only rank 0's is used.
    other.set_model_state(sent if rank == 0 else {name: value + 1 for name, value in sent.items()})
    received = other.get_model_state()
    equal = [all(torch.equal(sent[name], state[name]) for name in sent) for state in (before, received)]
    train.report(step=5, what="worker", names=str(sorted(received)), equal=str(equal), falls=losses[-1] < losses[0])

    # The same to and from a pipeline, each of whose stages holds a part of the weights.
    stages = train.parallelize(build("none")[0], "pipeline", loss=lambda outputs, targets: (outputs - targets).square().mean())
    piped = train.Worker(stages, torch.optim.AdamW(stages.parameters(), lr=0.01), loss_of)
    before = piped.get_model_state()
    piped.set_model_state(sent if rank == 0 else {})
    arrived = piped.get_model_state()
    losses = [piped.train_step((torch.ones(4, 6), torch.ones(4, 2))) for _ in range(5)]
    trained = piped.get_model_state()
    other.set_model_state(trained)
    back = other.get_model_state()
    try:
        other.set_model_state({"0.weight": sent["0.weight"], "9.bias": sent["0.bias"]} if rank == 0 else {})
    except RuntimeError as error:
        train.report(step=5, what="refused", error=str(error))
    equal = [all(torch.equal(a[name], b[name]) for name in sent) for a, b in ((sent, before), (sent, arrived), (trained, back))]
    try:
        piped.set_model_state({"0.weight": sent["0.weight"], "9.bias": sent["0.bias"]} if rank == 0 else {})
    except RuntimeError as error:
        falls = losses[-1] < losses[0]
        train.report(step=5, what="piped", names=str(sorted(arrived)), equal=str(equal), falls=falls, error=str(error))

    # A failure on one rank is an error on all ranks. The error names the rank.
    class Bad:
        def state_dict(self):
            raise OSError("no room")
    try:
        checkpoints.save(3, model, optimizer, bad=Bad())
    except train.CheckpointError as error:
        train.report(step=3, what="bad", error=str(error))

    # If each rank has its own disk, each disk has the complete checkpoint, also of a sharded model.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apart = train.Checkpoints(f"{sys.argv[1]}/apart-{rank}", keep_last=1)
    warning = " ".join(str(one.message) for one in caught)
    sharded, sharded_optimizer = build("fsdp")
    nn.functional.cross_entropy(sharded(torch.ones(4, 6)), torch.zeros(4, dtype=torch.int64)).backward()
    sharded_optimizer.step()
    apart.save(1, sharded, sharded_optimizer)
    apart.save(2, sharded, sharded_optimizer)
    wanted = digest(sharded, sharded_optimizer)
    files = {path.name for path in apart.directory.glob("step-2/*")}
    for lost in (0, 1):
        # First a new machine without files, then a machine with a damaged file.
        if rank == lost:
            if lost == 0:
                shutil.rmtree(apart.directory)
                apart.directory.mkdir()
            else:
                (apart.directory / "step-2" / "__0_0.distcp").write_bytes(b"torn")
        dist.barrier()
        fresh, fresh_optimizer = build("fsdp")
        found = apart.load_latest(fresh, fresh_optimizer)
        same = digest(fresh, fresh_optimizer) == wanted
        complete = {path.name for path in apart.directory.glob("step-2/*")} == files
        train.report(step=found, what=f"apart without {lost}", warning=warning, same=same, complete=complete, count=len(files))
    if rank == 0:
        shutil.rmtree(apart.directory)  # while it is in use
    dist.barrier()
    try:
        apart.save(3, build("none")[0])
        train.report(step=3, what="recreated")
    except train.CheckpointError as error:
        train.report(step=3, what="failed", error=str(error))
    train.report(step=checkpoints.load_latest(model, optimizer), what="loaded last")
"""
)


def test_ranks_save_checkpoints_and_copy_weights_together_and_fail_together(start_with_torch: Start, tmp_path: Path) -> None:
    run = start_with_torch(TWO_RANKS, "--size", "2", arguments=(str(tmp_path),), DISTFLOW_CHECKPOINT=str(tmp_path / "shared"))
    assert run.wait() == 0, run.stderr
    records = {(record["what"], record["rank"]): record for record in run.records}
    for rank in (0, 1):
        assert records["async", rank]["step"] == 2
        worker = records["worker", rank]
        assert worker["names"] == "['0.bias', '0.weight', '2.bias', '2.weight']"
        assert (worker["equal"], worker["falls"]) == ("[False, True]", True)
        assert records["refused", rank]["error"].endswith("this model: missing: 0.bias, 2.bias, 2.weight; unknown: 9.bias")
        piped = records["piped", rank]
        assert piped["names"] == worker["names"]
        assert (piped["equal"], piped["falls"]) == ("[False, True, True]", True)
        assert piped["error"].endswith("this model: missing: 0.bias, 2.bias, 2.weight; unknown: 9.bias")
        assert records["bad", rank]["error"] == "rank 0: OSError: no room"
        for lost in (0, 1):
            apart = records[f"apart without {lost}", rank]
            assert (apart["step"], apart["same"], apart["complete"], apart["count"]) == (2, True, True, 7)
        assert ("recreated", rank) in records
        assert records["loaded last", rank]["step"] == 2
    assert "is not the same directory for rank 1 as for rank 0" in records["apart without 0", 0]["warning"]
    assert sorted(path.name for path in (tmp_path / "shared").glob("step-[12]")) == ["step-1", "step-2"]


FINISH_WHILE_WRITING = """
    import os, threading, torch.distributed as dist
    from torch import nn
    from distflow import train
    from distflow.testing.waiting import wait_until
    from distflow.train.checkpoints import manifest

    train.init()
    checkpoints = train.Checkpoints("checkpoints")
    left, waited = threading.Event(), threading.Event()
    describe, destroy, wait = manifest.describe, dist.destroy_process_group, checkpoints.wait

    def slow_describe(*given):
        wait_until(lambda: left.is_set() or waited.is_set(), 60, "finish() leaves the world, or waits for the checkpoint")
        return describe(*given)

    def leave():
        destroy()
        left.set()

    def note_wait():
        waited.set()
        wait()

    manifest.describe, dist.destroy_process_group = slow_describe, leave
    checkpoints.async_save(1, nn.Linear(2, 2))
    checkpoints.wait = note_wait
    train.finish()
    print(os.listdir("checkpoints"))
"""


def test_finish_waits_for_a_checkpoint_that_is_being_written(start_with_torch: Start) -> None:
    run = start_with_torch(FINISH_WHILE_WRITING, plain=True)
    assert run.wait() == 0, run.stderr
    assert run.stdout == "['step-1']\n"


def test_a_process_fails_if_its_last_checkpoint_fails(start: Start) -> None:
    run = start(
        """
        import errno
        from torch import nn
        from distflow import train
        from distflow.train.checkpoints import manifest

        def fail(*given):
            raise OSError(errno.ENOSPC, "No space left on device")

        manifest.publish = fail
        train.init()
        train.Checkpoints("checkpoints").async_save(1, nn.Linear(2, 2))
        """,
        plain=True,
    )
    assert run.wait() == 1, run.stderr
    assert run.error["message"]["message"] == "CheckpointError: rank 0: OSError: [Errno 28] No space left on device"
    assert "No space left on device" in run.stderr


TIED = """
import json

from torch import nn

from distflow import train

world = train.init()
layers = [nn.Linear(4, 4, bias=False) for _ in range(4)]
layers[1].weight = layers[0].weight
plan = world.parallelize(nn.Sequential(*layers), train.PipelineParallel(), loss=nn.functional.mse_loss)
plan.save_weights("saved", max_file_size=1)
state = " ".join(sorted(plan.model_state()))
if world.rank == 0:
    with open("saved/model.safetensors.index.json") as index:
        train.report(step=0, files=" ".join(sorted(json.load(index)["weight_map"])), state=state)
"""


def test_a_pipeline_saves_a_tied_parameter_once(start_with_torch: Start) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    run = start_with_torch(TIED, "--size", "2")
    assert run.wait() == 0, run.stderr
    (found,) = run.records
    assert found["state"] == "0.weight 1.weight 2.weight 3.weight"
    assert found["files"] == "0.weight 2.weight 3.weight"
