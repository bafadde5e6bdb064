"""Killed and suspended processes of distflow: no process of an attempt survives, and its end is recorded.

The tests kill real processes at random moments. A failure prints the seed, and DISTFLOW_TEST_SEED repeats it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from contract.conftest import EVERY_TRANSPORT, LOCAL_TRANSPORT, launch_of, processes_with
from distflow.errors import AgentError
from distflow.protocol.names import Operation
from distflow.runtime.guard.process_tree import TreeKiller
from distflow.runtime.processes import last_pid, list_processes, read_process
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from contract.conftest import NodeUnderTest
    from distflow.backends.machines.connection.link import AgentLink, Event
    from distflow.runtime.processes import Process

    Suspend: TypeAlias = Callable[[NodeUnderTest, str, str], list[int]]

pytestmark = [pytest.mark.slow, LOCAL_TRANSPORT]

SEED = int(os.environ.get("DISTFLOW_TEST_SEED", str(random.SystemRandom().randrange(10**6))))

# Starts daemons that are hard to find: double-forked, each in its own session, without an environment, ignoring SIGTERM. A
# `still` daemon waits. A `chain` forks and exits every millisecond, so that its id is outdated when it is read. A `late` chain
# begins after 4.5 s. A `family` is a chain in one process group. A chain pauses for `rest_s` as soon as the command has ended.
HOSTILE = """
import os, signal, sys, time
marker, rest_s, kinds = sys.argv[1], sys.argv[2], sys.argv[3:]
command = f"/proc/{os.getpid()}"
def daemon(kind):
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", BODY, marker, kind, rest_s, command], {})
BODY = '''
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
kind, rest_s, command = sys.argv[2], float(sys.argv[3]), sys.argv[4]
if kind == "late":
    time.sleep(4.5)
for _ in range(0 if kind == "still" else 3000):
    if os.fork():
        os._exit(0)
    if kind != "family":
        os.setsid()
    time.sleep(0.001)
    if rest_s and not os.path.exists(command):
        time.sleep(rest_s)
        rest_s = 0
while True:
    signal.pause()
'''
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for kind in kinds:
    daemon(kind)
print("up", flush=True)
while True:
    signal.pause()
"""
"""A chain has a limited number of processes, because a suspended runner reaps none of them."""
KINDS = ["still"] * 4 + ["chain"] * 2 + ["family"]
GRACE_REST_S = 1.8
"""Daemons have 2 s after the end of their command. Chains that pause for most of that time save a second of processor time."""


@pytest.fixture
def dice(request: pytest.FixtureRequest) -> random.Random:
    print(f"DISTFLOW_TEST_SEED={SEED}")
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture(autouse=True)
def _kill_remaining_daemons(marker: str) -> Iterator[None]:
    yield
    # A failed test must not leave daemons on the machine.
    killer = TreeKiller(
        lambda processes: [one for one in processes if has_marker(one, marker)], lambda one: has_marker(one, marker)
    )

    def is_clean() -> bool:
        found = killer.step()
        for pid in processes_with(marker):  # `TreeKiller` itself may be broken
            kill(pid)
        return not found and not processes_with(marker)

    wait_until(is_clean, 30, "the daemons of a failed test are gone")


def has_marker(process: Process, marker: str) -> bool:
    with contextlib.suppress(OSError):
        return marker.encode() in Path("/proc", str(process.pid), "cmdline").read_bytes()
    return False


def hostile_command(marker: str, kinds: list[str] | None = None, *, rest_s: float = 0.0, program: str = HOSTILE) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program, marker, str(rest_s), *(KINDS if kinds is None else kinds)]


def agent_of(link: AgentLink) -> int:
    pid = link.request("hello", watch=[])["facts"]["agent_pid"]
    assert isinstance(pid, int)
    return pid


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def processes_of_chains(marker: str) -> list[int]:
    """Processes of a chain among the newest ids. A listing of /proc shows only processes of it that have already ended."""
    until, found = time.monotonic() + 0.02, list[int]()
    while time.monotonic() < until and not found:
        newest = last_pid()
        for pid in range(newest, max(1, newest - 20), -1):
            with contextlib.suppress(OSError):
                if marker.encode() in Path("/proc", str(pid), "cmdline").read_bytes():
                    found.append(pid)
    return found


def assert_nothing_is_left(node: NodeUnderTest, attempt: str, marker: str, *, is_recorded: bool = False) -> None:
    """Check that no process of the attempt runs as soon as its end is recorded. Wait for that unless ``is_recorded``."""
    if not is_recorded:
        wait_until(lambda: node.record(attempt), 20, "the record")
    assert processes_with(marker) == []
    assert processes_of_chains(marker) == []
    state = node.state(attempt)
    for role in ("runner", "keeper"):
        wait_until(lambda w=role: is_dead(state[w]["pid"]), 20, f"the {role} is gone")  # type: ignore[misc]


def assert_lease_is_free(node: NodeUnderTest, link: AgentLink) -> None:
    link.request("release", attempt=node.lease(link, gpus=1, gpu_ids=[0]))


@pytest.mark.parametrize("victim", ["command", "keeper", "runner"])
@pytest.mark.parametrize("round_", range(3))
def test_killing_command_keeper_or_runner_ends_the_running_task(
    node: NodeUnderTest, marker: str, dice: random.Random, victim: str, round_: int
) -> None:
    link = node.connect()
    command = hostile_command(marker, rest_s=GRACE_REST_S if victim == "command" else 0.0)
    attempt = node.start(link, command, lease={"gpus": 1, "gpu_ids": [0]})
    if round_:
        wait_until(lambda: node.output(attempt))  # the first round hits it while it starts
    pause(dice.uniform(0, 0.15))
    pid = node.state(attempt)[victim]["pid"]
    kill(pid)
    end = node.await_end(attempt)
    assert_nothing_is_left(node, attempt, marker)
    assert end == node.record(attempt)
    expected = {"command": "exited", "keeper": "keeper_died", "runner": "runner_died"}[victim]
    assert (end["reason"], end["signal"]) == (expected, signal.SIGKILL)
    assert_lease_is_free(node, link)


@EVERY_TRANSPORT
@pytest.mark.parametrize("round_", range(2))
def test_the_agent_is_killed_and_another_ends_the_task(
    node: NodeUnderTest, marker: str, dice: random.Random, round_: int
) -> None:
    link = node.connect()
    agent = agent_of(link)
    attempt = node.attempt()
    steps: list[tuple[Operation, dict[str, Any]]] = [
        ("lease", {"gpus": 1, "gpu_ids": [0], "lease_dir": str(node.lease_dir), "port": "any", "start_timeout_s": 60}),
        ("prepare", {"launch": launch_of(hostile_command(marker))}),
        ("start", {}),
    ]
    for op, fields in steps:
        link.send(op, lambda _answer: None, attempt=attempt, **fields)
    pause(dice.uniform(0, 0.08))
    kill(agent)
    wait_until(lambda: node.closed, what="the connection closed")
    # The protocol allows each step to be repeated with another agent, whether the first agent has done it or not.
    link = node.connect()
    node.watch(link, attempt)

    def repeat_steps() -> bool:
        try:
            for op, fields in steps:
                link.request(op, attempt=attempt, **fields)
        except Exception as error:  # noqa: BLE001 - printed for a failure of the test
            print(error)
            return False
        return True

    wait_until(repeat_steps, 20, "the steps are repeated")
    wait_until(lambda: node.output(attempt))
    pause(dice.uniform(0, 0.1))
    link.request("stop", attempt=attempt, grace_s=0.2, why="")
    assert node.await_end(attempt)["reason"] == "stopped"
    assert_nothing_is_left(node, attempt, marker)
    assert_lease_is_free(node, link)


@pytest.mark.parametrize("victim", ["keeper", "runner"])
@pytest.mark.parametrize("phase", ["leased", "prepared"])
def test_killing_keeper_or_runner_before_the_start_ends_the_attempt(node: NodeUnderTest, victim: str, phase: str) -> None:
    link = node.connect()
    attempt = node.lease(link, gpus=1, gpu_ids=[0])
    if phase == "prepared":
        link.request("prepare", attempt=attempt, launch=launch_of(["true"]))
    kill(node.state(attempt)[victim]["pid"])
    end = node.await_end(attempt)
    assert (end["reason"], end["started_at"]) == (f"{victim}_died", None)
    assert_nothing_is_left(node, attempt, "no such marker")
    assert_lease_is_free(node, link)


def test_a_leased_pair_outlives_its_agent_only_until_its_timeout(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.lease(link, gpus=1, gpu_ids=[0], start_timeout_s=0.5)
    kill(agent_of(link))
    end = wait_until(lambda: node.record(attempt))
    assert end is not None
    assert end["reason"] == "start_timeout"
    assert_nothing_is_left(node, attempt, "no such marker")
    assert_lease_is_free(node, node.connect())


@pytest.mark.parametrize("round_", range(6))
def test_a_lease_can_be_repeated_after_its_agent_was_killed(node: NodeUnderTest, dice: random.Random, round_: int) -> None:
    link = node.connect()
    agent = agent_of(link)
    attempt = node.attempt()
    fields: dict[str, Any] = {"gpus": 1, "gpu_ids": [0], "lease_dir": str(node.lease_dir), "port": "any", "start_timeout_s": 60}
    link.send("lease", lambda _answer: None, attempt=attempt, **fields)
    pause(dice.uniform(0, 0.012))
    kill(agent)
    wait_until(lambda: node.closed, what="the connection closed")
    link = node.connect()
    node.watch(link, attempt)
    assert link.request("lease", attempt=attempt, **fields)["gpu_ids"] == [0]
    link.request("release", attempt=attempt)
    assert_lease_is_free(node, link)


@pytest.mark.parametrize("victim", ["keeper", "runner"])
def test_killing_keeper_or_runner_during_a_stop_leaves_no_processes(
    node: NodeUnderTest, marker: str, dice: random.Random, victim: str
) -> None:
    link = node.connect()
    attempt = node.start(link, hostile_command(marker))
    wait_until(lambda: node.output(attempt))
    pid = node.state(attempt)[victim]["pid"]
    link.request("stop", attempt=attempt, grace_s=0.05, why="")
    pause(dice.uniform(0, 0.12))
    kill(pid)
    end = node.await_end(attempt)
    assert end["reason"] in ("stopped", "keeper_died")
    assert_nothing_is_left(node, attempt, marker)


def kill_together(state: dict[str, Any]) -> None:
    """Kill runner and keeper so that neither can act on the other's death."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for role in ("keeper", "runner"):
            os.kill(state[role]["pid"], number)


def kill_pair_without_agent(node: NodeUnderTest, link: AgentLink, attempt: str) -> None:
    """Kill an attempt's pair after its agent has ended, which would otherwise adopt the remaining processes."""
    agent, state = agent_of(link), node.state(attempt)
    link.close()
    wait_until(lambda: is_dead(agent), what="the agent has ended")
    kill_together(state)
    wait_until(lambda: is_dead(state["keeper"]["pid"]) and is_dead(state["runner"]["pid"]))


def assert_next_agent_ends_attempt(node: NodeUnderTest, attempt: str, marker: str) -> None:
    """Check that the remaining processes run until the next agent watches the attempt, and that it ends them."""
    assert processes_with(marker)
    link = node.connect()
    node.watch(link, attempt)
    assert node.await_end(attempt)["reason"] == "both_died"
    assert_nothing_is_left(node, attempt, marker)
    assert_lease_is_free(node, link)


def test_the_agent_ends_a_task_whose_keeper_and_runner_are_killed(node: NodeUnderTest, marker: str) -> None:
    link = node.connect()
    attempt = node.start(link, hostile_command(marker), lease={"gpus": 1, "gpu_ids": [0]})
    bystander = node.start(link, ["sleep", "60"])
    wait_until(lambda: node.output(attempt))
    kill_together(node.state(attempt))
    assert node.await_end(attempt)["reason"] == "both_died"
    assert_nothing_is_left(node, attempt, marker)
    assert_lease_is_free(node, link)
    # The agent searches for the marks of this attempt, so the other one continues.
    assert node.record(bystander) is None
    assert not is_dead(node.state(bystander)["command"]["pid"])
    assert_no_zombies(agent_of(link))


def test_the_next_agent_ends_the_processes_of_a_killed_pair_whose_log_was_removed(node: NodeUnderTest, marker: str) -> None:
    link = node.connect()
    marked = "trap '' TERM; echo up; while :; do sleep 1; done"
    unmarked = "import os, signal; os.setpgid(0, 0); print('up', flush=True); signal.pause()"
    # One process has the mark and another session. The other one has the session, no mark and its own process group.
    script = 'setsid sh -c "$1" $0 & env -i "$3" -I -S -c "$2" $0 & sleep 60'
    argv = ["sh", "-c", script, marker, marked, unmarked, sys.executable]
    attempt = node.start(link, argv, lease={"gpus": 1, "gpu_ids": [0]})
    wait_until(lambda: node.output(attempt).count("up") == 2)
    (node.directory(attempt) / "output.log").unlink()
    kill_pair_without_agent(node, link, attempt)
    assert_next_agent_ends_attempt(node, attempt, marker)
    assert (node.record(attempt) or {})["output_bytes"] == 0


def cgroup_of(node: NodeUnderTest, attempt: str) -> Path:
    """Return the cgroup of a running attempt. Skip the test if its user cannot create cgroups."""
    path = node.state(attempt)["command"]["cgroup"]
    if path is None:
        pytest.skip("no cgroup (v2) can be created here")
    return Path(path)


@EVERY_TRANSPORT
def test_a_hidden_process_is_found_by_its_cgroup(node: NodeUnderTest, marker: str) -> None:
    link = node.connect()
    attempt = node.start(link, hostile_command(marker), lease={"gpus": 1, "gpu_ids": [0]})
    wait_until(lambda: node.output(attempt))
    group = cgroup_of(node, attempt)
    kill_pair_without_agent(node, link, attempt)
    # The daemons have sessions of their own and no environment, and their parents are gone.
    assert_next_agent_ends_attempt(node, attempt, marker)
    assert not group.exists()


@pytest.mark.parametrize("victim", ["none", "keeper"])
def test_no_cgroup_outlives_its_attempt(node: NodeUnderTest, marker: str, victim: str) -> None:
    link = node.connect()
    attempt = node.start(link, hostile_command(marker, ["still"]))
    wait_until(lambda: node.output(attempt))
    group = cgroup_of(node, attempt)
    assert group.joinpath("cgroup.procs").read_text().split()
    if victim == "keeper":
        kill(node.state(attempt)["keeper"]["pid"])
    else:
        link.request("stop", attempt=attempt, grace_s=0.1, why="by the test")
    node.await_end(attempt)
    assert not group.exists()


def test_the_lease_is_free_as_soon_as_the_end_is_reported(node: NodeUnderTest) -> None:
    link = node.connect()
    os.mkfifo(node.root / "fifo")
    attempt = node.start(link, ["sh", "-c", 'read x < "$0"', str(node.root / "fifo")], lease={"gpus": 1, "gpu_ids": [0]})
    runner = node.state(attempt)["runner"]["pid"]
    os.kill(runner, signal.SIGSTOP)  # so that it outlives the report of the end for longer than usual
    try:
        (node.root / "fifo").write_text("x\n")
        assert node.await_end(attempt)["reason"] == "exited"
        assert_lease_is_free(node, link)
    finally:
        os.kill(runner, signal.SIGCONT)


def test_an_attempt_of_an_earlier_boot_is_recorded_as_such(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.start(link, ["sleep", "60"])
    link.close()
    state = node.state(attempt)
    kill_together(state)
    wait_until(lambda: is_dead(state["keeper"]["pid"]) and is_dead(state["runner"]["pid"]))
    path = node.directory(attempt) / "runner.json"
    path.write_text(path.read_text().replace(state["boot_id"], "00000000-0000-0000-0000-000000000000"))
    node.watch(node.connect(), attempt)
    assert node.await_end(attempt)["reason"] == "rebooted"


def test_a_command_that_ends_leaves_none_of_its_daemons(node: NodeUnderTest, marker: str) -> None:
    link = node.connect()
    code = HOSTILE.replace("while True:\n    signal.pause()\n", "")
    assert code != HOSTILE
    attempt = node.start(link, hostile_command(marker, rest_s=GRACE_REST_S, program=code))
    end = node.await_end(attempt)
    assert (end["reason"], end["exit_code"]) == ("exited", 0)
    assert_nothing_is_left(node, attempt, marker, is_recorded=True)


LEADERLESS = """
import ctypes, os, signal, sys, threading, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=time.sleep, args=(600,)).start()
        print("up", flush=True)
        ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit of this thread, not of the process
    os._exit(0)
os.wait()
signal.pause()
"""


@pytest.mark.parametrize("victim", ["command", "runner and keeper"])
def test_a_daemon_whose_first_thread_has_ended_does_not_survive(node: NodeUnderTest, marker: str, victim: str) -> None:
    """The kernel shows such a process as a zombie, although its other threads run."""
    link = node.connect()
    attempt = node.start(link, [sys.executable, "-I", "-S", "-c", LEADERLESS, marker])
    wait_until(lambda: "up" in node.output(attempt))
    state = node.state(attempt)
    command = state["command"]["pid"]
    leaderless = wait_until(
        lambda: [one for one in list_processes() if has_threads(one.pid, marker) and one.pid != command and one.state == "Z"]
    )
    try:
        if victim == "command":
            kill(command)
        else:
            link.close()
            kill_together(state)
            link = node.connect()
            node.watch(link, attempt)
        assert node.await_end(attempt, 20)["reason"] == ("exited" if victim == "command" else "both_died")
        assert all(is_gone(one.pid) for one in leaderless)
    finally:
        for one in leaderless:
            kill(one.pid)


def is_gone(pid: int) -> bool:
    """Whether no thread of a process runs. Its new parent may not have reaped it yet."""
    process = read_process(pid)
    return process is None or not process.is_alive


def has_threads(pid: int, marker: str) -> bool:
    """Whether a process belongs to this test, according to its other threads than the first one."""
    with contextlib.suppress(OSError):
        return any(
            marker.encode() in Path("/proc", str(pid), "task", thread, "cmdline").read_bytes()
            for thread in os.listdir(f"/proc/{pid}/task")
            if thread != str(pid)
        )
    return False


def test_a_task_with_many_hidden_daemons_can_be_stopped(node: NodeUnderTest, marker: str) -> None:
    link = node.connect()
    attempt = node.start(link, hostile_command(marker, ["still"] * 20 + ["chain"] * 5))
    wait_until(lambda: node.output(attempt))
    started = time.monotonic()
    link.request("stop", attempt=attempt, grace_s=0, why="")
    node.await_end(attempt)
    assert_nothing_is_left(node, attempt, marker, is_recorded=True)
    assert time.monotonic() - started < 60


@pytest.fixture
def suspend() -> Iterator[Suspend]:
    """Return a function that suspends runner, keeper or both, and returns their process ids."""
    known: list[int] = []

    def suspend(node: NodeUnderTest, attempt: str, victim: str) -> list[int]:
        pids = [node.state(attempt)[role]["pid"] for role in (("runner", "keeper") if victim == "both" else (victim,))]
        known.extend(pids)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return pids

    yield suspend
    for pid in known:  # a suspended runner would collect zombies until the process table is full
        kill(pid)


@pytest.mark.parametrize("victim", ["keeper", "runner", "both"])
def test_a_task_is_stopped_although_its_pair_is_suspended(
    node: NodeUnderTest, marker: str, suspend: Suspend, victim: str
) -> None:
    link = node.connect()
    attempt = node.start(link, hostile_command(marker, ["still"]))
    wait_until(lambda: node.output(attempt))
    suspend(node, attempt, victim)
    link.send("stop", lambda _answer: None, attempt=attempt, grace_s=0, why="CANCELED")
    end = node.await_end(attempt, 20)
    assert (end["reason"], end["why"], end["signal"]) == ("stopped", "CANCELED", signal.SIGKILL)
    assert_nothing_is_left(node, attempt, marker)


@pytest.mark.parametrize("is_other_agent", [False, True])
def test_a_task_is_stopped_although_its_pair_is_suspended_repeatedly(
    node: NodeUnderTest, marker: str, suspend: Suspend, is_other_agent: bool
) -> None:
    first = node.connect()
    attempt = node.start(first, hostile_command(marker, ["still", "late"]))
    wait_until(lambda: node.output(attempt))
    pids, is_over = suspend(node, attempt, "both"), threading.Event()

    def suspend_repeatedly() -> None:
        while not is_over.wait(0.0005):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)

    suspender = threading.Thread(target=suspend_repeatedly)
    suspender.start()
    try:
        if is_other_agent:
            first.close()
        link = node.connect() if is_other_agent else first
        node.watch(link, attempt)
        link.send("stop", lambda _answer: None, attempt=attempt, grace_s=0, why="CANCELED")
        end = node.await_end(attempt, 60)
        assert (end["reason"], end["why"]) == ("stopped", "CANCELED")
    finally:
        is_over.set()
        suspender.join()
    assert_nothing_is_left(node, attempt, marker)


def test_a_lease_is_released_although_its_keeper_is_suspended(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.lease(link, gpus=1, gpu_ids=[0])
    os.kill(node.state(attempt)["keeper"]["pid"], signal.SIGSTOP)
    answers: list[Any] = []
    link.send("release", answers.append, attempt=attempt)
    wait_until(lambda: answers, 20)
    assert isinstance(answers[0], dict), answers[0]
    assert not node.directory(attempt).exists()
    assert_lease_is_free(node, link)


def test_sigterm_to_the_pair_is_a_stop_that_is_recorded(node: NodeUnderTest) -> None:
    link = node.connect()
    script = "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.2; done"
    attempt = node.start(link, ["sh", "-c", script], stop_grace_s=10)
    wait_until(lambda: node.output(attempt))
    os.kill(node.state(attempt)["runner"]["pid"], signal.SIGTERM)
    end = node.await_end(attempt)
    assert (end["reason"], end["exit_code"]) == ("stopped", 0)
    assert node.output(attempt).endswith("saved\n")
    assert "SIGTERM" in end["why"]


def test_an_end_is_recorded_although_the_space_for_its_record_was_removed(node: NodeUnderTest) -> None:
    link = node.connect()
    os.mkfifo(node.root / "fifo")
    attempt = node.start(link, ["sh", "-c", 'read x < "$0"; exit 3', str(node.root / "fifo")])
    (node.directory(attempt) / ".exit.json").unlink()  # as by a job that sweeps old files of a scratch directory
    (node.root / "fifo").write_text("x\n")
    end = node.await_end(attempt)
    assert (end["reason"], end["exit_code"]) == ("exited", 3)
    assert end == node.record(attempt)


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("victims", [["keeper"], ["keeper", "runner"]])
def test_the_end_of_a_command_is_kept_when_its_guards_are_killed_after_it(
    node: NodeUnderTest, tmp_path: Path, victims: list[str], is_stopped: bool
) -> None:
    link = node.connect()
    # After the end of the command is stored, the daemon that it leaves gets SIGTERM and two seconds to end.
    daemon = "trap 'echo > \"$0\"' TERM; echo up; while :; do sleep 0.2; done"
    argv = ["sh", "-c", 'trap "exit 0" TERM; setsid sh -c "$1" "$0" & read x < "$2"; exit 0', str(tmp_path / "asked"), daemon]
    os.mkfifo(tmp_path / "fifo")
    attempt = node.start(link, [*argv, str(tmp_path / "fifo")])
    wait_until(lambda: node.output(attempt))
    if is_stopped:
        link.request("stop", attempt=attempt, grace_s=60, why="CANCELED")
    else:
        (tmp_path / "fifo").write_text("x\n")
    wait_until((tmp_path / "asked").exists)
    state = node.state(attempt)
    for victim in victims:
        os.kill(state[victim]["pid"], signal.SIGSTOP)
    for victim in victims:
        kill(state[victim]["pid"])
    end = node.await_end(attempt)
    died = "both_died" if len(victims) == 2 else "keeper_died"
    assert (end["reason"], end["why"], end["exit_code"]) == (("stopped", "CANCELED", 0) if is_stopped else (died, None, 0))
    assert end["ended_at"] == state["exit"]["ended_at"]


def test_a_task_whose_socket_was_removed_is_stopped_anyway(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.start(link, ["sh", "-c", "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.2; done"])
    wait_until(lambda: node.output(attempt))
    link.close()
    (node.directory(attempt) / "control").unlink()
    link = node.connect()
    node.watch(link, attempt)
    link.request("stop", attempt=attempt, grace_s=10, why="")
    end = node.await_end(attempt)
    assert (end["reason"], end["exit_code"]) == ("stopped", 0)


@pytest.mark.parametrize("operation", ["stop", "stop by another agent", "watch"])
def test_no_process_survives_of_a_task_whose_directory_was_removed(node: NodeUnderTest, marker: str, operation: str) -> None:
    link = node.connect()
    attempt = node.start(link, ["sh", "-c", "echo up; while :; do sleep 0.2; done", marker])
    bystander = node.start(link, ["sleep", "60"])
    wait_until(lambda: node.output(attempt))
    shutil.rmtree(node.directory(attempt).parent)
    if operation == "stop":
        link.request("stop", attempt=attempt, grace_s=5, why="")
    else:
        link.close()
        link = node.connect()
        if operation == "watch":
            assert link.request("hello", watch=[attempt])["attempts"][attempt]["phase"] == "absent"
        else:
            with pytest.raises(AgentError, match="is not on this node"):
                link.request("stop", attempt=attempt, grace_s=5, why="")
    wait_until(lambda: not processes_with(marker), 20, "nothing is left")
    assert not is_dead(node.state(bystander)["command"]["pid"])


def test_an_agent_that_could_not_reach_a_pair_tries_again(node: NodeUnderTest) -> None:
    link = node.connect()
    os.mkfifo(node.root / "fifo")
    attempt = node.lease(link)
    link.request("prepare", attempt=attempt, launch=launch_of(["sh", "-c", 'read x < "$0"', str(node.root / "fifo")]))
    control = node.directory(attempt) / "control"
    control.rename(control.with_name("away"))  # as if the agent had no free descriptor, or the file system did not answer
    events: list[Event] = []
    other = node.connect(events=events)
    node.watch(other, attempt, events)
    control.with_name("away").rename(control)
    link.request("start", attempt=attempt)
    wait_until(lambda: [one for one in events if one["event"] == "status" and one["status"]["phase"] == "running"])
    (node.root / "fifo").write_text("x\n")
    assert node.await_end(attempt, events=events)["exit_code"] == 0


def test_a_start_waits_for_a_pair_that_cannot_be_reached_for_a_moment(node: NodeUnderTest) -> None:
    link = node.connect()
    attempt = node.lease(link)
    link.request("prepare", attempt=attempt, launch=launch_of(["sh", "-c", "exit 3"]))
    link.close()
    control = node.directory(attempt) / "control"
    control.rename(control.with_name("away"))
    link = node.connect()
    node.watch(link, attempt)
    answers: list[Any] = []
    link.send("start", answers.append, attempt=attempt)
    link.request("ping")  # the agent has processed the start by now
    control.with_name("away").rename(control)
    wait_until(lambda: answers, 20)
    assert isinstance(answers[0], dict), answers[0]
    assert node.await_end(attempt)["exit_code"] == 3


def test_output_that_was_in_the_pipe_survives_the_keeper(node: NodeUnderTest) -> None:
    link = node.connect()
    os.mkfifo(node.root / "fifo")
    attempt = node.start(link, ["sh", "-c", 'echo up; read x < "$0"; echo last line; kill -9 $$', str(node.root / "fifo")])
    wait_until(lambda: node.output(attempt))
    state = node.state(attempt)
    os.kill(state["keeper"]["pid"], signal.SIGSTOP)  # so that it cannot read the following output
    (node.root / "fifo").write_text("x\n")
    wait_until(lambda: is_dead(state["command"]["pid"]))
    kill(state["keeper"]["pid"])
    end = node.await_end(attempt)
    assert (end["reason"], end["signal"], end["output_bytes"]) == ("keeper_died", signal.SIGKILL, 13)
    assert node.output(attempt) == "up\nlast line\n"


def assert_no_zombies(agent: int) -> None:
    def zombies() -> list[int]:
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == agent and fields[0] == "Z":
                    found.append(int(name))
        return found

    wait_until(lambda: not zombies(), 15, "the agent reaped its children")


def test_the_agent_leaves_no_zombies(node: NodeUnderTest) -> None:
    link = node.connect()
    for _ in range(3):
        node.run(link, ["sh", "-c", "(setsid sleep 0.1 &)"])
    link.request("survey")
    assert_no_zombies(agent_of(link))


def test_the_agent_leaks_no_descriptors(node: NodeUnderTest) -> None:
    link = node.connect()
    agent = agent_of(link)

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{agent}/fd"))

    node.run(link, ["true"], lease={"gpus": 1, "gpu_ids": [0], "port": "any"})
    before = descriptors()
    for stream in range(3):
        attempt = node.start(link, ["echo", "hi"], lease={"gpus": 1, "gpu_ids": [0], "port": "any"})
        link.request("tail", stream=stream, attempt=attempt, file="output.log", offset=0)
        node.await_end(attempt)
    wait_until(lambda: descriptors() <= before, 15, "the agent closed its descriptors")


def test_an_agent_gets_events_although_an_older_agent_is_suspended(node: NodeUnderTest) -> None:
    old: list[Event] = []
    new: list[Event] = []
    first = node.connect(events=old, ping_s=60)
    attempt = node.start(first, ["sh", "-c", "sleep 0.3; echo hi; exit 2"])
    os.kill(agent_of(first), signal.SIGSTOP)  # as an agent whose connection was cut, and that does not know it
    try:
        second = node.connect(events=new)
        node.watch(second, attempt, new)
        assert node.await_end(attempt, events=new)["exit_code"] == 2
    finally:
        os.kill(find_stopped_agent(node), signal.SIGCONT)


def find_stopped_agent(node: NodeUnderTest) -> int:
    """The stopped agent of this node."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[0]
            if state == "T" and str(node.top).encode() in Path("/proc", name, "cmdline").read_bytes():
                return int(name)
    raise LookupError("no stopped agent")
