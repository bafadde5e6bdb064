"""The rendezvous of ranks, and their common decisions: real processes with gloo on 127.0.0.1."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from distflow.diagnosis.diagnose import diagnose
from distflow.diagnosis.model import GroupOutcome, TaskOutcome
from distflow.layout.strategy.model import parse_strategy
from distflow.lifecycle.states import Reason
from distflow.testing.waiting import wait_until
from distflow.train import world
from distflow.train.world import WorldError, _place, _register_and_wait, _rendezvous
from train.conftest import DEADLINE_S, Start

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

COMMON_DECISIONS = """
    import os, threading, torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from distflow import train
    from distflow.train.world import world

    place = train.init(timeout=30)
    assert train.init() is place is world()
    assert (place.rank, place.size, place.backend) == (int(os.environ["RANK"]), 2, "gloo")
    assert str(place.device) == "cpu"
    rank = place.rank

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    # Out of memory on rank 1 in step 1: no rank takes that step.
    guard, steps = train.MemoryGuard(), []
    for step in range(3):
        with guard:
            loss = model(torch.full((2, 4), float(rank + step))).sum()
            if (rank, step) == (1, 1):
                raise torch.OutOfMemoryError("injected")
        if guard.skipped:
            optimizer.zero_grad()
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(step)
    weights = [torch.empty(4) for _ in range(2)]
    dist.all_gather(weights, model.module.weight.detach().flatten())
    train.report(step=0, what="memory", steps=str(steps), same=torch.equal(*weights), count=guard.count, mine=guard.mine)

    # Out of memory before the forward pass: DDP begins it with collectives, for buffers in each step and for its buckets in the
    # second one.
    model_with_buffers = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for plain in (True, False):
        trained = DistributedDataParallel(nn.Linear(4, 1)) if plain else model_with_buffers
        early, steps = train.MemoryGuard(), []
        for step in range(6):
            with early:
                if (rank, step) in ((0, 0), (1, 2)):
                    raise torch.OutOfMemoryError("injected")
                loss = trained(torch.full((2, 4), float(rank + step))).sum()
                if (rank, step) == (1, 4):
                    raise torch.OutOfMemoryError("injected")
            if not early.skipped:
                loss.backward()
                steps.append(step)
        train.report(step=0, what=f"early {plain}", steps=str(steps), count=early.count, mine=early.mine)

    # Another error is raised at once, without a vote of the other ranks.
    try:
        with guard:
            raise KeyError("mine")
    except KeyError:
        train.report(step=0, what="other")

    # A gradient that is infinite on one rank only.
    gradients = train.GradientGuard(limit=1)
    parameter = nn.Parameter(torch.zeros(2))
    answers = []
    for bad in (False, True, False, True):
        parameter.grad = torch.tensor([1.0, float("inf") if bad and rank == 1 else 1.0])
        answers.append(gradients.finite([parameter]))
    try:
        gradients.finite([parameter])
        raised = ""
    except train.NonFiniteGradients as error:
        raised = str(error)
    train.report(step=0, what="gradients", answers=str(answers), count=gradients.count, raised=raised)

    # Rank 0 has three batches, and rank 1 has five.
    with train.join(model):
        for _ in range(3 + 2 * rank):
            model(torch.ones(1, 4)).sum().backward()
    train.report(step=0, what="join")

    # All ranks get the same number of batches, and no sample is lost.
    mine = [[1, 2, 3, 4], [5]] if rank == 0 else [[1], [2], [3], [4]]
    train.report(step=0, what="batches", value=str(train.equal_batches(mine)))

    # Rank 1 is slow in its own work.
    timer = train.StepTimer(every=2)
    for step in range(2):
        with timer.work():
            threading.Event().wait(0.5 if rank == 1 else 0)
        pace = timer.step(samples=8)
    assert pace.stragglers() == (1,), pace
    assert pace.imbalance > 1.5, pace
    assert len(pace.memory_bytes) == 2 and min(pace.memory_bytes) > 1e7

    train.report(step=1, what="last", loss=torch.tensor(0.5), worst=float("nan"))
"""


def test_no_rank_leaves_before_all_have_joined(start_with_torch: Start) -> None:
    """A rank that left at once would close the connections of ranks that are still joining."""
    run = start_with_torch(
        """
        import os, time, torch.distributed as dist
        from pathlib import Path
        from distflow import train

        new_group = dist.new_group

        def slow_group(*args, **options):
            group = new_group(*args, **options)
            time.sleep(1)
            Path("joined").touch()
            return group

        if os.environ["RANK"] == "1":
            dist.new_group = slow_group
        train.init()
        assert Path("joined").exists()
        """,
        "--size", "2",
    )  # fmt: skip
    assert run.wait() == 0, run.stderr


def test_ranks_make_common_decisions(start_with_torch: Start) -> None:
    run = start_with_torch(COMMON_DECISIONS, "--size", "2")
    assert run.wait() == 0, run.stderr
    by_rank = [{record.get("what"): record for record in run.records if record["rank"] == rank} for rank in (0, 1)]
    for rank, records in enumerate(by_rank):
        memory = records["memory"]
        assert (memory["steps"], memory["same"], memory["count"], memory["mine"]) == ("[0, 2]", True, 1, rank)
        for plain in (True, False):
            early = records[f"early {plain}"]
            assert (early["steps"], early["count"], early["mine"]) == ("[1, 3, 5]", 3, 1 + rank)
        assert "other" in records
        assert records["gradients"]["answers"] == "[True, False, True, False]"
        assert records["gradients"]["count"] == 3
        assert "gradients were not finite in 2 steps in a row" in records["gradients"]["raised"]
        assert "join" in records
        assert (records["last"]["loss"], records["last"]["worst"]) == (0.5, "nan")
    assert by_rank[0]["batches"]["value"] == "[[1], [2], [3, 4], [5]]"
    assert by_rank[1]["batches"]["value"] == "[[1], [2], [3], [4]]"
    paces = {record["rank"]: record for record in run.records if "step_s" in record}
    assert [pace["step"] for pace in paces.values()] == [2, 2]
    assert paces[0]["stragglers"] == "1"
    assert "stragglers" not in paces[1], "rank 0 reports the stragglers of all ranks"
    assert paces[0]["step_s"] < paces[1]["step_s"] == paces[0]["slowest_step_s"]
    assert min(pace["memory_bytes"] for pace in paces.values()) > 1e7
    shares = [paces[rank]["samples_per_s"] for rank in (0, 1)]
    assert sum(shares) == pytest.approx(paces[0]["total_samples_per_s"], abs=0.01)
    assert "Warning" not in run.stderr


def test_a_rank_without_memory_fails_if_the_others_do_not_vote(start_with_torch: Start) -> None:
    run = start_with_torch(
        """
        import torch
        from distflow import train
        place = train.init()
        with train.MemoryGuard(timeout=2):
            if place.rank == 1:
                raise torch.OutOfMemoryError("injected")
            torch.distributed.barrier()  # as in a backward pass
        """,
        "--size", "2",
    )  # fmt: skip
    assert run.wait() == 1
    assert run.error["rank"] == 1
    assert "this rank ran out of memory, and could not agree with the other ranks to skip the step (limit: 2 s): " in run.stderr


def test_sigterm_to_one_rank_stops_all_ranks_after_the_same_step(start_with_torch: Start) -> None:
    run = start_with_torch(
        """
        import os, sys
        from distflow import train
        train.init()
        train.listen_for_stop()
        step = 0
        while True:
            step += 1
            if train.stop_requested():
                train.report(step=step, what="checkpoint")
                sys.exit(train.STOPPED)
            if step == 1:
                train.report(step=step, pid=os.getpid())
        """,
        "--size", "2",
    )  # fmt: skip
    pids = {record["rank"]: record["pid"] for record in run.wait_for_records(2)}
    os.kill(pids[1], signal.SIGUSR1)
    wait_until(lambda: "most recent call first" in run.stderr, DEADLINE_S, "the stacks of rank 1")
    os.kill(pids[1], signal.SIGTERM)
    assert run.wait() == 143, run.stderr
    ends = [record for record in run.records if record.get("what") == "checkpoint"]
    assert sorted(record["rank"] for record in ends) == [0, 1]
    assert len({record["step"] for record in ends}) == 1
    assert not run.error_file.exists()


def test_stacks_are_written_to_a_file_of_the_attempt(start_with_torch: Start, tmp_path: Path) -> None:
    script = """
        import os, signal
        from distflow import train
        train.init()
        def here():
            os.kill(os.getpid(), signal.SIGUSR1)
        here()
        train.report(step=0, pid=os.getpid())
        """
    run = start_with_torch(script, "--size", "1", DISTFLOW_ATTEMPT_DIR=str(tmp_path))
    assert run.wait() == 0, run.stderr
    written = (tmp_path / f"stacks-{run.records[0]['pid']}").read_text()
    assert "in here" in written
    assert "most recent call first" not in run.stderr


def test_stacks_can_be_requested_as_soon_as_their_file_exists(start_with_torch: Start, tmp_path: Path) -> None:
    run = start_with_torch(
        """
        import os, signal
        from distflow import train
        open_one = os.open
        def open_and_send_sigusr1(path, *given):
            descriptor = open_one(path, *given)
            if "stacks-" in str(path):
                os.kill(os.getpid(), signal.SIGUSR1)
            return descriptor
        os.open = open_and_send_sigusr1
        train.init()
        """,
        plain=True, DISTFLOW_ATTEMPT_DIR=str(tmp_path),
    )  # fmt: skip
    assert run.wait() == 0, run.stderr


def test_debug_mode_names_both_sides_of_a_mismatch(start_with_torch: Start) -> None:
    run = start_with_torch(
        """
        import torch, torch.distributed as dist
        from torch._C._distributed_c10d import _dump_fr_trace_json
        from distflow import train
        place = train.init(timeout=30)
        dist.all_reduce(torch.ones(2))
        train.report(step=0, recorded="all_reduce" in _dump_fr_trace_json().decode())
        dist.all_reduce(torch.ones(2 + place.rank))
        """,
        "--size", "2", DISTFLOW_DEBUG="1",
    )  # fmt: skip
    assert run.wait() == 1
    message = run.error["message"]["message"]
    assert "Detected mismatch between collectives on ranks" in message
    assert "Rank 0 " in message
    assert "Rank 1 " in message
    assert [record["recorded"] for record in run.records] == [True, True]


@pytest.mark.parametrize(
    ("strategy_s", "given", "call"),
    [
        (5, "", "dist.all_reduce(torch.ones(1))"), (300, "timeout=5", "dist.all_reduce(torch.ones(1))"),
        (5, "", "train.stop_requested()"),
    ],
)  # fmt: skip
def test_a_stuck_collective_ends_after_the_configured_timeout(
    start_with_torch: Start, strategy_s: int, given: str, call: str
) -> None:
    strategy, _ = parse_strategy({"kind": "ddp", "timeout_s": strategy_s}, (2,))
    assert strategy is not None
    run = start_with_torch(
        f"""
        import threading, time, torch, torch.distributed as dist
        from distflow import train
        place = train.init({given})
        if place.rank == 1:
            threading.Event().wait(100)
        begin = time.monotonic()
        try:
            {call}
        except RuntimeError as error:
            train.report(step=0, waited_s=time.monotonic() - begin, message=str(error))
            raise SystemExit(7)
        """,
        "--size", "2", DISTFLOW_STRATEGY=json.dumps(strategy.normalized()),
    )  # fmt: skip
    assert run.wait() == 7, run.stderr
    (record,) = run.records
    assert 4 < record["waited_s"] < 60
    assert "imed out" in record["message"]


def test_a_single_process_is_a_world_of_one_rank(start_with_torch: Start) -> None:
    run = start_with_torch(
        """
        import torch, torch.distributed as dist
        from distflow import train
        from distflow.train.world import WorldError, world
        try:
            world()
        except WorldError as error:
            print(error)
        place = train.init()
        one = torch.ones(1)
        dist.all_reduce(one)
        assert not train.stop_requested()
        train.report(step=0, size=place.size, value=one)
        train.finish()
        assert not dist.is_initialized()
        """,
        plain=True,
    )  # fmt: skip
    assert run.wait() == 0, run.stderr
    assert run.stdout.startswith("this process is not in a world: call distflow.train.init() first\n")
    assert run.records == [{"step": 0, "size": 1, "value": 1.0, "rank": 0}]
    assert run.stderr == ""


def test_the_threads_of_process_groups_end_before_python_does(start: Start) -> None:
    """A thread that releases a tensor later would abort the process after all its work is done."""
    run = start(
        """
        import atexit
        from pathlib import Path

        def count():
            return sum(path.read_text() == "pt_gloo_runloop\\n" for path in Path("/proc/self/task").glob("*/comm"))

        atexit.register(lambda: print(count()))  # runs last
        from distflow import train
        from distflow.testing.waiting import wait_until
        train.init()
        checkpoints = train.Checkpoints("checkpoints")
        wait_until(lambda: count() == 6, 30, "two threads for each of three groups; they name themselves when they run")

        def train_a_model():
            import torch
            model = train.parallelize(torch.nn.Linear(4, 1), "ddp")
            model(torch.ones(1, 4)).sum().backward()

        train_a_model()
        """,
        plain=True,
    )
    assert run.wait() == 0, run.stderr
    assert int(run.stdout) == 0


def test_torchrun_starts_the_same_script(start_with_torch: Start) -> None:
    """The agent of torchrun hosts the store. After a restart, ranks must not see those of the previous attempt."""
    run = start_with_torch(
        """
        import os, sys
        if "RANK" not in os.environ:
            from torch.distributed.run import main
            main(["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "script.py"])
            sys.exit()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            sys.exit(3)
        from distflow import train
        place = train.init(start_timeout=60)
        train.report(step=0, size=place.size, stop=train.stop_requested())
        """,
        plain=True, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )  # fmt: skip
    assert run.wait() == 0, run.stderr
    assert sorted(record["rank"] for record in run.records) == [0, 1]
    assert [(record["size"], record["stop"]) for record in run.records] == [(2, False)] * 2


@pytest.mark.parametrize("environment", [{}, {"RANK": ""}])
def test_a_process_without_a_rank_does_not_wait_for_others(environment: dict[str, str]) -> None:
    place = _place(environment, "gloo")
    assert place.size == 1
    assert isinstance(_rendezvous(environment, place, timedelta(seconds=1)), HashStore)


def test_a_rank_that_joins_just_before_the_deadline_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    place = _place({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "gloo")
    store = HashStore()
    other = PrefixStore(f"distflow/0/{world._left}", store)
    now = time.monotonic

    def join_and_read_clock() -> float:
        if other.add("rank/1", 1) == 1:
            other.add("arrived", 1)
        return now()

    monkeypatch.setattr(time, "monotonic", join_and_read_clock)
    _register_and_wait(store, {}, place, timedelta(seconds=1), deadline=now() - 1)
    assert other.get("size") == b"2"


def test_ranks_that_have_left_a_world_can_join_another_one(start_with_torch: Start) -> None:
    """The store of the first world still exists, as under torchrun, whose agent keeps its store."""
    run = start_with_torch(
        """
        import torch, torch.distributed as dist
        from torch.distributed import distributed_c10d
        from distflow import train
        kept = []
        for number in range(2):
            place = train.init(timeout=60, start_timeout=60)
            kept.append(distributed_c10d._get_default_store())
            total = torch.ones(1)
            dist.all_reduce(total)
            train.report(step=number, total=total)
            train.finish()
        """,
        "--size", "2",
    )  # fmt: skip
    assert run.wait() == 0, run.stderr
    assert sorted((record["step"], record["total"]) for record in run.records) == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_calls_that_need_an_answer_of_all_ranks_are_refused_inside_join(start_with_torch: Start) -> None:
    """Rank 0 has three batches and rank 1 has five. Rank 1 would wait for an answer of rank 0 until its timeout."""
    run = start_with_torch(
        """
        import torch
        from torch import nn
        from distflow import train
        place = train.init(timeout=15)

        def build(**options):
            model = train.parallelize(nn.Linear(4, 1), "ddp", **options)
            return model, train.local_sgd(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def steps(model, optimizer, check):
            with train.join(model):
                for _ in range(3 + 2 * place.rank):
                    model(torch.ones(1, 4)).sum().backward()
                    check(model)
                    optimizer.step()
                    optimizer.zero_grad()

        checkpoints = train.Checkpoints("checkpoints")
        checks = {
            "nothing": (lambda model: None, {}),
            "save": (lambda model: checkpoints.save(1, model), {}),
            "gradients": (train.GradientGuard().finite, {}),
            "stop": (lambda model: train.stop_requested(), {}),
            "local": (lambda model: None, {"sync_gradients_every": 2}),
        }
        for name, (check, options) in checks.items():
            try:
                steps(*build(**options), check)
                error = ""
            except (RuntimeError, TypeError) as caught:
                error = str(caught)
            train.report(step=0, what=name, error=error)
        train.report(step=0, what="after", error=str(train.GradientGuard().finite(nn.Linear(1, 1))))
        """,
        "--size", "2",
    )  # fmt: skip
    assert run.wait() == 0, run.stderr
    for rank in (0, 1):
        errors = {record["what"]: record["error"] for record in run.records if record["rank"] == rank}
        assert (errors["nothing"], errors["after"]) == ("", "True")
        assert all("inside join()" in errors[name] for name in ("gradients", "stop", "save"))
        assert "with local_sgd()" in errors["local"]


# -- rendezvous: threads of this process act as ranks ----------------------------------------------------------------------


def join_ranks(ranks: list[tuple[int, int]], timeout_s: float, address: str = "127.0.0.1") -> list[str]:
    """Let ranks (number, world size) join. Return the error of each of them, empty if it has joined."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])

    def one(rank: int, size: int) -> str:
        environment = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": port}
        try:
            stores.append(_rendezvous(environment, _place(environment, "gloo"), timedelta(seconds=timeout_s)))
        except WorldError as error:
            return str(error)
        return ""

    stores: list[object] = []
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(lambda place: one(*place), ranks))


def test_all_ranks_join() -> None:
    assert join_ranks([(0, 3), (1, 3), (2, 3)], 30) == ["", "", ""]


def test_missing_ranks_are_named() -> None:
    """Only the error of rank 0 is certain: the store ends with rank 0, so another rank may not be able to read it."""
    assert (
        join_ranks([(0, 4), (2, 4)], 1)[0]
        == "ranks 1, 3 did not join within 1 s: check their output, or increase `start_timeout` of `train.init()`"
    )


def test_a_rank_that_joins_twice_is_named() -> None:
    errors = join_ranks([(0, 3), (1, 3), (1, 3)], 2)
    assert sum(text.startswith("rank 1 joined twice") for text in errors) == 1


def test_different_world_sizes_are_reported() -> None:
    errors = join_ranks([(0, 3), (1, 2)], 1)
    assert any("WORLD_SIZE must be the same" in text for text in errors)


def test_an_unreachable_master_is_named() -> None:
    (error,) = join_ranks([(1, 2)], 1)
    assert error.startswith("rank 1 does not reach the master at 127.0.0.1:")


def test_an_address_of_another_machine_is_not_reported_as_a_taken_port() -> None:
    (error,) = join_ranks([(0, 2)], 1, "no-such-host.invalid")
    assert error.startswith("rank 0 cannot connect to its own store at no-such-host.invalid:")


def test_a_rank_without_a_gpu_is_diagnosed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    environment = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(WorldError, match="start at most 2 ranks on this machine") as caught:
        _place(environment, "auto")
    line = f"distflow.train.world.WorldError: {caught.value}"
    task = TaskOutcome(task="master", node="gpu1", ranks=range(4), lines=(line,), reason=Reason.EXIT_CODE, exit_code=1)
    assert [one.key for one in diagnose(GroupOutcome(outcomes=(task,), first=None))] == ["too-few-gpus"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "RANK is set, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"DISTFLOW_WORLD_SIZE": "8"}, "RANK is not set: start the script with"),
        ({"RANK": "two"}, "RANK is set, but not"),
        ({"DISTFLOW_WORLD_SIZE": "many"}, "DISTFLOW_WORLD_SIZE=many: not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=2 is not a rank of WORLD_SIZE=2"),
    ],
)
def test_an_invalid_environment_is_explained(environment: dict[str, str], message: str) -> None:
    with pytest.raises(WorldError, match=message):
        _place(environment, "auto")
