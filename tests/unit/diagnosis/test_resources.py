"""Inefficient use of resources: the findings of each rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from distflow.diagnosis.resources import RESOURCE_RULES, RankPace, ResourceUse, find_inefficiencies
from distflow.state.samples import ResourceSamples

GIB = 1 << 30
T0 = 1_700_000_000.0
Value = float | None | Callable[[float], float | None]


def use(task: str = "worker", /, **values: Value) -> ResourceUse:
    """Samples of a task for 40 minutes.

    ``gpu3_clock=1980`` is the series `system/gpu3/clock`. A function gets the seconds of the run.
    """
    return use_during(task, 2400, values)


def use_during(task: str, seconds: int, values: Mapping[str, Value]) -> ResourceUse:
    times = [float(second) for second in range(0, seconds, 5)]
    series = {
        f"system/{name.replace('_', '/', 1)}": [value(at) if callable(value) else value for at in times]
        for name, value in values.items()
    }
    limits = {"system/cpu/limit": 16.0, "system/memory/limit": 64.0 * GIB, "system/gpu0/memory_limit": 80.0 * GIB}
    samples = ResourceSamples(task=task, attempt=0, times=[T0 + at for at in times], series=series, limits=limits)
    return ResourceUse(node=f"{task}-node", samples=samples)


BUSY: dict[str, Value] = {"cpu_usage": 4.0, "gpu0_utilization": 97.0, "gpu0_clock": 1980.0, "gpu0_throttle_thermal": 0.0}


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ([use(**BUSY), use("master", **BUSY)], {}),
        ([use(cpu_usage=16.0, memory_usage=5.0 * GIB)], {}),
        (
            [use(gpu0_utilization=0.0, gpu1_utilization=2.0)],
            {"gpu-idle": "GPUs 0-1 of worker on worker-node stayed below 5% utilization for the last 30 min"},
        ),
        (
            [use(**BUSY, gpu1_utilization=91.0, gpu2_utilization=0.0)],
            {
                "gpu-idle": "GPU 2 of worker on worker-node stayed below 5% utilization for the last 30 min, "
                "GPUs 0-1 were 94% busy"
            },
        ),
        ([use(gpu0_utilization=lambda at: 0.0 if at < 100 else 95.0)], {}),
        ([use_during("worker", 150, {"gpu0_utilization": 0.0})], {}),
        (
            [use(cpu_usage=15.5, gpu0_utilization=40.0)],
            {
                "input-bound": "GPU 0 of worker on worker-node was 40% busy in the last 30 min, "
                "while 16 of 16 CPUs were in use"
            },
        ),
        (
            [use(cpu_usage=2.1, gpu0_utilization=30.0, gpu1_utilization=28.0)],
            {
                "input-bound": "GPUs 0-1 of worker on worker-node were 29% busy in the last 30 min, "
                "with one busy core for each GPU: the data may be loaded in the main process of each rank"
            },
        ),
        ([use(cpu_usage=6.0, gpu0_utilization=40.0)], {}),
        (
            [
                use("master", **BUSY),
                use(
                    "worker", **BUSY | {"gpu0_throttle_thermal": lambda at: float(at % 20 == 0)}, gpu0_temperature=91.0
                ),
            ],
            {"gpu-throttled": "GPU 0 of worker on worker-node at up to 91 °C, slowed down 25% of the time"},
        ),
        (
            [use(**BUSY | {"gpu0_throttle_thermal": 1.0}, gpu0_temperature=None)],
            {"gpu-throttled": "GPU 0 of worker on worker-node, slowed down 100% of the time"},
        ),
        (
            [use(**BUSY, gpu1_utilization=97.0, gpu1_throttle_thermal=1.0, gpu2_utilization=97.0, gpu2_throttle_thermal=0.5)],
            {"gpu-throttled": "GPUs 1-2 of worker on worker-node, slowed down up to 100% of the time"},
        ),
        (
            [use("master", **BUSY), use("third", **BUSY), use(**BUSY | {"gpu0_clock": 1200.0})],
            {"ranks-unequal": "clock of GPU 0 of worker on worker-node is 1200 MHz, the median is 1980 MHz"},
        ),
        (
            [use("master", **BUSY), use("third", **BUSY), use(**BUSY | {"gpu0_utilization": 55.0})],
            {"ranks-unequal": "utilization of GPU 0 of worker on worker-node is 55%, the median is 97%"},
        ),
        (
            [use(memory_usage=lambda at: 30.0 * GIB + at * GIB / 360)],
            {
                "memory-growth": "the memory of worker on worker-node grows by 10 GiB an hour, now 36 GiB of 64 GiB; "
                "it would be full in 2:45:55"
            },
        ),
        ([use(memory_usage=lambda at: 30.0 * GIB + min(at, 1000) * GIB / 360)], {}),
        ([use(memory_usage=lambda at: 30.0 * GIB + at % 300 * GIB / 360)], {}),
        (
            [use(**BUSY, gpu0_memory=lambda at: 40.0 * GIB + at * GIB / 100)],
            {
                "memory-growth": "the memory of GPU 0 of worker on worker-node grows by 36 GiB an hour, now 63 GiB of 80 GiB; "
                "it would be full in 28:34"
            },
        ),
        (
            [use(**BUSY, gpu0_xid=lambda at: 79.0 if at > 2000 else 0.0)],
            {"gpu-error": "GPU 0 of worker on worker-node reported Xid 79"},
        ),
        (
            [use(**BUSY, gpu0_ecc_errors=lambda at: 5.0 + (at > 9))],
            {"gpu-error": "GPU 0 of worker on worker-node had 1 new uncorrected memory error"},
        ),
        ([use(**BUSY, gpu0_ecc_errors=5.0, gpu0_xid=None)], {}),
    ],
)  # fmt: skip
def test_inefficient_use_is_found(uses: list[ResourceUse], expected: dict[str, str]) -> None:
    assert {one.key: one.found for one in find_inefficiencies(uses)} == expected


def test_findings_have_the_order_of_the_rules() -> None:
    bad = use(
        cpu_usage=15.5, gpu0_utilization=30.0, gpu0_clock=900.0, gpu0_throttle_thermal=1.0, gpu0_xid=48.0, gpu1_utilization=0.0,
        memory_usage=lambda at: GIB * (10 + at / 100),
    )  # fmt: skip
    found = find_inefficiencies([bad, use("a", **BUSY), use("b", **BUSY)])
    assert [one.key for one in found] == [rule.key for rule in RESOURCE_RULES]
    assert {one.task for one in found} == {"worker"}
    assert all(one.cause and one.remedy for one in found)


def test_many_tasks_with_the_same_finding_are_counted() -> None:
    (found,) = find_inefficiencies([use(f"t{number}", gpu0_utilization=0.0) for number in range(64)])
    assert found.found.endswith("; and 60 more")


@pytest.mark.parametrize("seconds", [5, 10, 200])
def test_short_runs_have_no_findings(seconds: int) -> None:
    assert (
        find_inefficiencies([use_during("worker", seconds, dict.fromkeys(("cpu_usage", "memory_usage", "gpu0_utilization")))])
        == ()
    )


def test_ranks_whose_steps_take_longer_are_named() -> None:
    paces = [RankPace(task=f"t{rank // 2}", node="n", rank=rank, step_s=0.2 if rank == 5 else 0.1) for rank in range(6)]
    (found,) = find_inefficiencies([], paces)
    assert (found.key, found.task) == ("ranks-unequal", "t2")
    assert found.found == "a step of rank 5 (t2 on n) takes 0.2 s, the median is 0.1 s"
    assert find_inefficiencies([], paces[:5]) == find_inefficiencies([], paces[5:]) == ()
