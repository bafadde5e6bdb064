"""The resource samples of real processes, and the file that holds them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distflow.runtime.guard import sampler
from distflow.runtime.probes.host_usage import HostUsage, limits
from distflow.state.logs import LogSource
from distflow.state.samples import parse_samples, read_samples
from distflow.testing.waiting import wait_until

MIB = 1 << 20
TREE = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # a child subreaper, as the keeper is
children = [subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(int(sys.argv[2]))]
for child in children:
    child.stdout.readline()
print("ready", flush=True)
for line in sys.stdin:
    for child in children:
        child.stdin.close()
    for child in children:
        child.wait()
    print("ended", flush=True)
"""
"""Starts children, and ends and reaps them on request."""
BUSY = "import sys, time; x = bytearray(64 << 20)\nwhile time.process_time() < 0.3: pass\nprint(flush=True); sys.stdin.read()"


@contextmanager
def tree(script: str, count: int) -> Iterator[subprocess.Popen[str]]:
    """Yield a process with this number of children, which run the script."""
    command = [sys.executable, "-c", TREE, script, str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_cpu_time_of_ended_processes_is_counted() -> None:
    with tree(BUSY, 2) as process:
        usage = HostUsage(process.pid, process.pid)
        assert usage.read() is None, "rates need two samples"
        assert read_line(process) == "ready"
        running = usage.read()
        assert running is not None
        assert running["processes"] == 2
        assert 2 * 64 * MIB <= running["memory"] < 1024 * MIB
        assert running["cpu"] > 0.01
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert read_line(process) == "ended"
        counters, levels = usage._measure()
        assert levels["processes"] == 0
        assert counters["cpu"] >= 2 * 0.29, "the time of reaped children is part of the time of their parent"


def test_only_descendants_are_counted() -> None:
    with tree("print(flush=True); input()", 1) as one, tree("print(flush=True); input()", 3) as other:
        usage = HostUsage(one.pid, one.pid)
        assert (read_line(one), read_line(other)) == ("ready", "ready")
        for _ in range(3):
            assert usage._measure()[1]["processes"] == 1
        assert other.pid in usage._others, "the parents of other processes are read once"


def test_a_container_is_measured_as_soon_as_its_cgroup_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distflow.runtime.probes.host_usage._CGROUPS", str(tmp_path))
    wait = "print(flush=True); input()"
    with tree(wait, 0) as client, tree(wait, 1) as container:
        assert read_line(container) == "ready"
        usage = HostUsage(client.pid, client.pid, "a" * 64)
        assert usage._measure()[1]["processes"] == 0
        cgroup = tmp_path / "docker" / ("a" * 64)
        cgroup.mkdir(parents=True)
        (cgroup / "cgroup.procs").write_text(f"{container.pid}\n")
        assert usage._measure()[1]["processes"] == 1


def test_limits_are_read_from_the_machine_and_its_container(tmp_path: Path) -> None:
    cpus = len(os.sched_getaffinity(0))
    assert limits(str(tmp_path))["cpu_limit"] == cpus
    assert limits(str(tmp_path))["memory_limit"] > 64 * MIB
    for cpu, memory, expected in (("50000 100000", "67108864", (0.5, 64 * MIB)), ("max 100000", "max", (cpus, None))):
        (tmp_path / "cpu.max").write_text(f"{cpu}\n")
        (tmp_path / "memory.max").write_text(f"{memory}\n")
        found = limits(str(tmp_path))
        assert found["cpu_limit"] == expected[0]
        assert expected[1] in (None, found["memory_limit"])


def test_written_samples_can_be_read(tmp_path: Path) -> None:
    with tree(BUSY, 1) as process:
        assert read_line(process) == "ready"
        fd = os.open(tmp_path, os.O_RDONLY)
        pid = os.fork()
        if pid == 0:
            try:
                sampler.record(fd, process.pid, process.pid, [], interval_s=0.01)
            finally:
                os._exit(1)
        try:
            source = LogSource("train", 3, tmp_path)
            wait_until(lambda: (one := read_samples(source)) is not None and len(one.times) > 1, 20, "two samples")
            found = read_samples(source)
            assert found is not None
            assert (found.task, found.attempt) == ("train", 3)
            assert found.times == sorted(found.times)
            assert {"system/cpu/usage", "system/memory/usage", "system/processes"} <= set(found.series)
            assert found.latest()["system/memory/usage"] >= 64 * MIB
            assert 0 < found.limits["system/cpu/limit"] <= len(os.sched_getaffinity(0))
            assert (tmp_path / "output.samples").stat().st_mode & 0o777 == 0o600
        finally:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            os.close(fd)


def test_the_header_is_repeated_and_grows_with_new_columns(tmp_path: Path) -> None:
    table = sampler._Table(os.open(tmp_path / "samples", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    for second in range(250):
        values = {"system/cpu/usage": second / 3, **({"system/gpu0/utilization": 50.0} if second > 10 else {})}
        size = table.add(1700000000 + second, values, {"system/cpu/limit": 8.0})
    lines = (tmp_path / "samples").read_bytes().split(b"\n")
    assert size == (tmp_path / "samples").stat().st_size
    assert len([line for line in lines if line.startswith(b"{")]) == 1 + 1 + 2
    times, series, found = parse_samples(lines)
    assert times == [1700000000 + second for second in range(250)]
    assert series["system/gpu0/utilization"] == [None] * 11 + [50.0] * 239
    assert (series["system/cpu/usage"][1], series["system/cpu/usage"][200]) == (0.3333, 66.67)
    assert found == {"system/cpu/limit": 8}
    assert len(parse_samples(lines[130:])[0]) == 50, "the last rows can be parsed without the first ones"


def test_on_a_full_disk_only_samples_are_lost() -> None:
    table = sampler._Table(os.open("/dev/full", os.O_WRONLY))
    for second in range(3):
        table.add(second, {"system/cpu/usage": 1.0}, {})
    assert table._rows == 0, "the next sample has a header"
