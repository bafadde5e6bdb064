"""The CPUs, threads and failures of a rank. Files like those in /sys and /proc describe a machine with two GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from distflow.train.launcher.rank import RecordedFailure, cpus_near_gpu, parse_cpus, threads_per_rank


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    for address, node, uuid in (("0000:17:00.0", "0", "GPU-aaaa-1"), ("0000:ca:00.0", "1", "GPU-bbbb-2")):
        driver = tmp_path / "proc/driver/nvidia/gpus" / address
        driver.mkdir(parents=True)
        (driver / "information").write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\n")
        device = tmp_path / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    for node, cpus in (("node0", "0-3,8"), ("node1", "4-7")):
        folder = tmp_path / "sys/devices/system/node" / node
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "local_rank", "cpus"),
    [
        (None, 0, {0, 1, 2, 3, 8}),
        (None, 1, {4, 5, 6, 7}),
        (None, 2, None),
        ("1,0", 0, {4, 5, 6, 7}),
        ("1", 1, None),
        ("5", 0, None),
        ("GPU-bbbb", 0, {4, 5, 6, 7}),
        ("", 0, None),
    ],
)
def test_a_rank_uses_the_cpus_near_its_visible_gpu(
    machine: Path, visible: str | None, local_rank: int, cpus: set[int] | None
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert cpus_near_gpu(local_rank, environment, machine) == cpus


def test_without_numa_information_a_rank_is_not_bound(machine: Path, tmp_path: Path) -> None:
    (machine / "sys/bus/pci/devices/0000:17:00.0/numa_node").write_text("-1\n")
    assert cpus_near_gpu(0, {}, machine) is None
    assert cpus_near_gpu(0, {}, tmp_path / "elsewhere") is None


def test_cpu_lists_have_the_format_of_the_kernel() -> None:
    assert parse_cpus("0-2,7\n") == {0, 1, 2, 7}
    assert parse_cpus("") == set()
    with pytest.raises(ValueError, match="x"):
        parse_cpus("x")


def test_ranks_share_the_available_cpus() -> None:
    cpus = len(os.sched_getaffinity(0))
    assert threads_per_rank(1) == cpus
    assert threads_per_rank(cpus * 2) == 1


def test_a_failure_is_recorded_although_multiprocessing_catches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`distflow.train` must then not leave the process group at exit, because that may wait for the other ranks."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    error = ValueError("bad batch")
    with pytest.raises(ValueError, match="bad batch"), RecordedFailure():
        raise error
    assert sys.last_value is error
