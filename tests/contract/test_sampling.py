"""The sampler on a node: it records the resource usage of a running task without an agent, and ends with the task."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from contract.conftest import LOCAL_TRANSPORT
from distflow.runtime.processes import list_processes, name_of
from distflow.state.logs import LogSource
from distflow.state.samples import ResourceSamples, read_samples
from distflow.testing.waiting import is_alive, wait_until

if TYPE_CHECKING:
    from contract.conftest import NodeUnderTest

pytestmark = LOCAL_TRANSPORT

TASK = [sys.executable, "-c", "import time; x = bytearray(96 << 20)\nwhile True: time.sleep(0.01)"]


def samples_of(node: NodeUnderTest, attempt: str) -> ResourceSamples | None:
    return read_samples(LogSource("t", 0, node.directory(attempt)))


def find_sampler(node: NodeUnderTest, attempt: str) -> int:
    runner = node.state(attempt)["runner"]["pid"]

    def find() -> int | None:
        children = [one.pid for one in list_processes() if one.ppid == runner]
        return next((pid for pid in children if name_of(pid) == "df-sampler"), None)

    return wait_until(find, 20, "the sampler")


def test_a_task_is_sampled_without_an_agent(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.start(link, TASK)
    link.close()
    samples = wait_until(lambda: samples_of(node, attempt), 40, "a sample")
    assert samples.latest()["system/processes"] == 1
    assert samples.latest()["system/memory/usage"] >= 96 << 20
    sampler = find_sampler(node, attempt)
    node.connect().request("stop", attempt=attempt, grace_s=0, why="enough")
    assert node.await_end(attempt)["signal"] in (signal.SIGTERM, signal.SIGKILL)
    wait_until(lambda: name_of(sampler) != "df-sampler", 20, "the end of the sampler")


def test_the_end_of_the_sampler_does_not_end_the_task(node: NodeUnderTest) -> None:
    script = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    attempt = node.start(node.connect(), [sys.executable, "-c", script])
    sampler = find_sampler(node, attempt)
    os.kill(sampler, signal.SIGKILL)
    wait_until(lambda: name_of(sampler) != "df-sampler" or not is_alive(sampler), 20, "the end of the sampler")
    (node.directory(attempt) / "work" / "go").touch()
    assert node.await_end(attempt)["exit_code"] == 0


@pytest.mark.parametrize("victim", ["runner", "keeper"])
def test_the_sampler_ends_with_a_runner_or_keeper_that_was_killed(node: NodeUnderTest, victim: str) -> None:
    attempt = node.start(node.connect(), TASK)
    sampler = find_sampler(node, attempt)
    os.kill(node.state(attempt)[victim]["pid"], signal.SIGKILL)
    assert node.await_end(attempt)["reason"] == f"{victim}_died"
    wait_until(lambda: name_of(sampler) != "df-sampler", 20, "the end of the sampler")
