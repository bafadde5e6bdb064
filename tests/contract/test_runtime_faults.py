"""No process of an attempt survives, whatever is killed and whenever; and its end is recorded.

Real processes and real SIGKILLs at random moments. The seed is printed with a failure; DISTFLOW_TEST_SEED repeats it.
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

from contract.conftest import launch_of, processes_with
from distflow.errors import AgentError
from distflow.protocol.names import Operation
from distflow.runtime.guard.process_tree import TreeKiller
from distflow.runtime.processes import list_processes, read_process
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from contract.conftest import NodeUnderTest
    from distflow.backends.machines.connection.link import AgentLink, Event
    from distflow.runtime.processes import Process

    Suspend: TypeAlias = Callable[[NodeUnderTest, str, str], list[int]]

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("DISTFLOW_TEST_SEED", str(random.SystemRandom().randrange(10**6))))

# Daemons as bad as they come: double-forked, each in a session of its own, without an environment, deaf to TERM. `still` ones
# wait; `chain` ones fork and exit every millisecond, so that their ids are old when they are read; a `family` is a chain that
# stays in one process group.
HOSTILE = """
import os, signal, sys, time
marker, kinds = sys.argv[1], sys.argv[2:]
def daemon(kind):
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", BODY, marker, kind], {})
BODY = '''
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
kind = sys.argv[2]
for _ in range(0 if kind == "still" else 3000):
    if os.fork():
        os._exit(0)
    if kind == "chain":
        os.setsid()
    time.sleep(0.001)
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
"""Generations are bounded: a suspended runner reaps none of them, and the machine's process table is finite."""
KINDS = ["still"] * 4 + ["chain"] * 2 + ["family"]


@pytest.fixture
def dice(request: pytest.FixtureRequest) -> random.Random:
    print(f"DISTFLOW_TEST_SEED={SEED}")
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture(autouse=True)
def _no_daemon_is_left_to_the_next_test(marker: str) -> Iterator[None]:
    yield
    # A test that fails must not leave a bomb ticking on the machine.
    killer = TreeKiller(lambda everything: [one for one in everything if has(one, marker)], lambda one: has(one, marker))

    def is_clean() -> bool:
        caught = killer.step()
        for pid in processes_with(marker):  # the hunt may be what is broken
            kill(pid)
        return not caught and not processes_with(marker)

    wait_until(is_clean, 30, "the daemons of a failed test are gone")


def has(process: Process, marker: str) -> bool:
    with contextlib.suppress(OSError):
        return marker.encode() in Path("/proc", str(process.pid), "cmdline").read_bytes()
    return False


def hostile(marker: str, kinds: list[str] | None = None) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", HOSTILE, marker, *(KINDS if kinds is None else kinds)]


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


def assert_nothing_is_left(node: NodeUnderTest, attempt: str, marker: str, *, by_now: bool = False) -> None:
    """Nothing of the attempt runs; not only in the end, but as soon as its end is on record."""
    if not by_now:
        wait_until(lambda: node.record(attempt), 20, "the record")
    assert processes_with(marker) == []
    state = node.state(attempt)
    for who in ("runner", "keeper"):
        wait_until(lambda w=who: is_dead(state[w]["pid"]), 20, f"the {who} is gone")  # type: ignore[misc]


def assert_lease_is_free(node: NodeUnderTest, link: AgentLink) -> None:
    link.request("release", attempt=node.lease(link, gpus=1, gpu_ids=[0]))


@pytest.mark.parametrize("victim", ["command", "keeper", "runner"])
@pytest.mark.parametrize("round_", range(3))
def test_one_of_them_is_killed_while_the_task_runs(
    node: NodeUnderTest, marker: str, dice: random.Random, victim: str, round_: int
) -> None:
    link = node.connect()
    attempt = node.start(link, hostile(marker), lease={"gpus": 1, "gpu_ids": [0]})
    if round_:
        wait_until(lambda: node.output(attempt))  # the first round hits it while it starts
    pause(dice.uniform(0, 0.15))
    pid = node.state(attempt)[victim]["pid"]
    kill(pid)
    end = node.end(attempt)
    assert_nothing_is_left(node, attempt, marker)
    assert end == node.record(attempt)
    expected = {"command": "exited", "keeper": "keeper_died", "runner": "runner_died"}[victim]
    assert (end["reason"], end["signal"]) == (expected, signal.SIGKILL)
    assert_lease_is_free(node, link)


@pytest.mark.parametrize("round_", range(3))
def test_the_agent_is_killed_and_another_ends_the_task(
    node: NodeUnderTest, marker: str, dice: random.Random, round_: int
) -> None:
    link = node.connect()
    agent = agent_of(link)
    attempt = node.attempt()
    steps: list[tuple[Operation, dict[str, Any]]] = [
        ("lease", {"gpus": 1, "gpu_ids": [0], "lease_dir": str(node.lease_dir), "port": "any", "start_timeout_s": 60}),
        ("prepare", {"launch": launch_of(hostile(marker))}),
        ("start", {}),
    ]
    for op, fields in steps:
        link.send(op, lambda _answer: None, attempt=attempt, **fields)
    pause(dice.uniform(0, 0.08))
    kill(agent)
    wait_until(lambda: node.closed, what="the link noticed")
    # The protocol's promise: every step may be asked again of another agent, however far the first one came.
    link = node.connect()
    node.watch(link, attempt)

    def repeated() -> bool:
        try:
            for op, fields in steps:
                link.request(op, attempt=attempt, **fields)
        except Exception as error:  # noqa: BLE001 - shown when it does not go away
            print(error)
            return False
        return True

    wait_until(repeated, 20, "the steps are repeated")
    wait_until(lambda: node.output(attempt))
    pause(dice.uniform(0, 0.1))
    link.request("stop", attempt=attempt, grace_s=0.2, why="")
    assert node.end(attempt)["reason"] == "stopped"
    assert_nothing_is_left(node, attempt, marker)
    assert_lease_is_free(node, link)


@pytest.mark.parametrize("victim", ["keeper", "runner"])
@pytest.mark.parametrize("phase", ["leased", "prepared"])
def test_one_of_the_pair_is_killed_before_the_start(node: NodeUnderTest, victim: str, phase: str) -> None:
    link = node.connect()
    attempt = node.lease(link, gpus=1, gpu_ids=[0])
    if phase == "prepared":
        link.request("prepare", attempt=attempt, launch=launch_of(["true"]))
    kill(node.state(attempt)[victim]["pid"])
    end = node.end(attempt)
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
def test_the_agent_is_killed_in_the_middle_of_a_lease(node: NodeUnderTest, dice: random.Random, round_: int) -> None:
    link = node.connect()
    agent = agent_of(link)
    attempt = node.attempt()
    fields: dict[str, Any] = {"gpus": 1, "gpu_ids": [0], "lease_dir": str(node.lease_dir), "port": "any", "start_timeout_s": 60}
    link.send("lease", lambda _answer: None, attempt=attempt, **fields)
    pause(dice.uniform(0, 0.012))
    kill(agent)
    wait_until(lambda: node.closed, what="the link noticed")
    link = node.connect()
    node.watch(link, attempt)
    assert link.request("lease", attempt=attempt, **fields)["gpu_ids"] == [0]
    link.request("release", attempt=attempt)
    assert_lease_is_free(node, link)


@pytest.mark.parametrize("victim", ["keeper", "runner"])
def test_one_of_them_is_killed_while_the_task_is_stopped(
    node: NodeUnderTest, marker: str, dice: random.Random, victim: str
) -> None:
    link = node.connect()
    attempt = node.start(link, hostile(marker))
    wait_until(lambda: node.output(attempt))
    pid = node.state(attempt)[victim]["pid"]
    link.request("stop", attempt=attempt, grace_s=0.05, why="")
    pause(dice.uniform(0, 0.12))
    kill(pid)
    end = node.end(attempt)
    assert end["reason"] in ("stopped", "keeper_died")
    assert_nothing_is_left(node, attempt, marker)


def kill_together(state: dict[str, Any]) -> None:
    """Kill runner and keeper so that neither can act on the other's death."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for who in ("keeper", "runner"):
            os.kill(state[who]["pid"], number)


def orphan(node: NodeUnderTest, link: AgentLink, attempt: str) -> None:
    """Kill an attempt's pair when no agent is there, which would adopt what is left of it."""
    agent, state = agent_of(link), node.state(attempt)
    link.close()
    wait_until(lambda: is_dead(agent), what="no agent is there to adopt them")
    kill_together(state)
    wait_until(lambda: is_dead(state["keeper"]["pid"]) and is_dead(state["runner"]["pid"]))


def assert_the_next_agent_ends_it(node: NodeUnderTest, attempt: str, marker: str) -> None:
    """What an orphaned attempt left runs, until an agent comes and looks."""
    assert processes_with(marker)
    link = node.connect()
    node.watch(link, attempt)
    assert node.end(attempt)["reason"] == "both_died"
    assert_nothing_is_left(node, attempt, marker)
    assert_lease_is_free(node, link)


def test_both_are_killed_under_the_agent_that_forked_them(node: NodeUnderTest, marker: str) -> None:
    link = node.connect()
    attempt = node.start(link, hostile(marker), lease={"gpus": 1, "gpu_ids": [0]})
    bystander = node.start(link, ["sleep", "60"])
    wait_until(lambda: node.output(attempt))
    kill_together(node.state(attempt))
    assert node.end(attempt)["reason"] == "both_died"
    assert_nothing_is_left(node, attempt, marker)
    assert_lease_is_free(node, link)
    # The search uses the attempt's own marks, so its neighbor was not touched.
    assert node.record(bystander) is None
    assert not is_dead(node.state(bystander)["command"]["pid"])
    assert_no_zombies(agent_of(link))


def test_the_next_agent_finds_the_remains_of_a_killed_pair(node: NodeUnderTest, marker: str) -> None:
    link = node.connect()
    marked = "trap '' TERM; echo up; while :; do sleep 1; done"
    unmarked = "import os, signal; os.setpgid(0, 0); print('up', flush=True); signal.pause()"
    # One keeps its mark and leaves the session; one drops its mark, stays there, and shares no group with a marked one.
    script = 'setsid sh -c "$1" $0 & env -i "$3" -I -S -c "$2" $0 & sleep 60'
    argv = ["sh", "-c", script, marker, marked, unmarked, sys.executable]
    attempt = node.start(link, argv, lease={"gpus": 1, "gpu_ids": [0]})
    wait_until(lambda: node.output(attempt).count("up") == 2)
    orphan(node, link, attempt)
    assert_the_next_agent_ends_it(node, attempt, marker)


def test_both_are_killed_and_somebody_has_removed_the_log(node: NodeUnderTest, marker: str) -> None:
    link = node.connect()
    script = "trap '' TERM; echo up; while :; do sleep 1; done"
    argv = ["sh", "-c", 'setsid sh -c "$1" $0 & sleep 60', marker, script]
    attempt = node.start(link, argv, lease={"gpus": 1, "gpu_ids": [0]})
    wait_until(lambda: node.output(attempt))
    (node.directory(attempt) / "output.log").unlink()
    orphan(node, link, attempt)
    assert_the_next_agent_ends_it(node, attempt, marker)
    assert (node.record(attempt) or {})["output_bytes"] == 0


def cgroup_of(node: NodeUnderTest, attempt: str) -> Path:
    """The cgroup of an attempt that runs; the test is skipped where its user may make none."""
    path = node.state(attempt)["command"]["cgroup"]
    if path is None:
        pytest.skip("no cgroup (v2) can be made here")
    return Path(path)


def test_a_hidden_process_is_found_by_its_cgroup(node: NodeUnderTest, marker: str) -> None:
    link = node.connect()
    attempt = node.start(link, hostile(marker), lease={"gpus": 1, "gpu_ids": [0]})
    wait_until(lambda: node.output(attempt))
    group = cgroup_of(node, attempt)
    orphan(node, link, attempt)
    # The daemons have sessions of their own and no environment, and their parents are gone.
    assert_the_next_agent_ends_it(node, attempt, marker)
    assert not group.exists()


@pytest.mark.parametrize("victim", ["none", "keeper"])
def test_no_cgroup_outlives_its_attempt(node: NodeUnderTest, marker: str, victim: str) -> None:
    link = node.connect()
    attempt = node.start(link, hostile(marker, ["still"]))
    wait_until(lambda: node.output(attempt))
    group = cgroup_of(node, attempt)
    assert group.joinpath("cgroup.procs").read_text().split()
    if victim == "keeper":
        kill(node.state(attempt)["keeper"]["pid"])
    else:
        link.request("stop", attempt=attempt, grace_s=0.1, why="by the test")
    node.end(attempt)
    assert not group.exists()


def test_the_lease_is_free_as_soon_as_the_end_is_reported(node: NodeUnderTest) -> None:
    link = node.connect()
    os.mkfifo(node.root / "fifo")
    attempt = node.start(link, ["sh", "-c", 'read x < "$0"', str(node.root / "fifo")], lease={"gpus": 1, "gpu_ids": [0]})
    runner = node.state(attempt)["runner"]["pid"]
    os.kill(runner, signal.SIGSTOP)  # so that it lives on, as it does for some instants anyway
    try:
        (node.root / "fifo").write_text("x\n")
        assert node.end(attempt)["reason"] == "exited"
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
    assert node.end(attempt)["reason"] == "rebooted"


def test_a_command_that_ends_leaves_none_of_its_daemons(node: NodeUnderTest, marker: str) -> None:
    link = node.connect()
    code = HOSTILE.replace("while True:\n    signal.pause()\n", "")
    assert code != HOSTILE
    attempt = node.start(link, [sys.executable, "-I", "-S", "-c", code, marker, *KINDS])
    end = node.end(attempt)
    assert (end["reason"], end["exit_code"]) == ("exited", 0)
    assert_nothing_is_left(node, attempt, marker, by_now=True)


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


@pytest.mark.parametrize("victim", ["command", "both of the pair"])
def test_a_daemon_whose_first_thread_has_ended_does_not_survive(node: NodeUnderTest, marker: str, victim: str) -> None:
    """The kernel shows such a process as a zombie, and it is not one: its other threads run."""
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
        assert node.end(attempt, 20)["reason"] == ("exited" if victim == "command" else "both_died")
        assert all(is_gone(one.pid) for one in leaderless)
    finally:
        for one in leaderless:
            kill(one.pid)


def is_gone(pid: int) -> bool:
    """Whether nothing of a process runs; its new parent may not have reaped it yet."""
    process = read_process(pid)
    return process is None or not process.is_alive


def has_threads(pid: int, marker: str) -> bool:
    """Whether a thread of a process belongs to this test; of one whose first thread has ended only the others tell."""
    with contextlib.suppress(OSError):
        return any(
            marker.encode() in Path("/proc", str(pid), "task", thread, "cmdline").read_bytes()
            for thread in os.listdir(f"/proc/{pid}/task")
            if thread != str(pid)
        )
    return False


def test_a_bomb_of_many_daemons_is_defused(node: NodeUnderTest, marker: str) -> None:
    link = node.connect()
    attempt = node.start(link, hostile(marker, ["still"] * 20 + ["chain"] * 5))
    wait_until(lambda: node.output(attempt))
    started = time.monotonic()
    link.request("stop", attempt=attempt, grace_s=0, why="")
    node.end(attempt)
    assert_nothing_is_left(node, attempt, marker, by_now=True)
    assert time.monotonic() - started < 60


@pytest.fixture
def suspend() -> Iterator[Suspend]:
    """Suspends a pair, or the one of it that is named, and returns the process ids."""
    known: list[int] = []

    def suspend(node: NodeUnderTest, attempt: str, who: str) -> list[int]:
        pids = [node.state(attempt)[one]["pid"] for one in (("runner", "keeper") if who == "both" else (who,))]
        known.extend(pids)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return pids

    yield suspend
    for pid in known:  # a suspended subreaper gathers zombies until the machine has no process left
        kill(pid)


@pytest.mark.parametrize("who", ["keeper", "runner", "both"])
def test_a_pair_that_was_suspended_does_not_save_its_task(node: NodeUnderTest, marker: str, suspend: Suspend, who: str) -> None:
    link = node.connect()
    attempt = node.start(link, hostile(marker, ["still"]))
    wait_until(lambda: node.output(attempt))
    suspend(node, attempt, who)
    link.send("stop", lambda _answer: None, attempt=attempt, grace_s=0, why="CANCELED")
    end = node.end(attempt, 20)
    assert (end["reason"], end["why"], end["signal"]) == ("stopped", "CANCELED", signal.SIGKILL)
    assert_nothing_is_left(node, attempt, marker)


@pytest.mark.parametrize("is_other_agent", [False, True])
def test_a_pair_that_is_suspended_again_and_again_does_not_save_its_task(
    node: NodeUnderTest, marker: str, suspend: Suspend, is_other_agent: bool
) -> None:
    first = node.connect()
    attempt = node.start(first, hostile(marker, ["still", "chain"]))
    wait_until(lambda: node.output(attempt))
    pids, is_over = suspend(node, attempt, "both"), threading.Event()

    def again() -> None:
        while not is_over.wait(0.0005):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)

    holder = threading.Thread(target=again)
    holder.start()
    try:
        if is_other_agent:
            first.close()
        link = node.connect() if is_other_agent else first
        node.watch(link, attempt)
        link.send("stop", lambda _answer: None, attempt=attempt, grace_s=0, why="CANCELED")
        end = node.end(attempt, 60)
        assert (end["reason"], end["why"]) == ("stopped", "CANCELED")
    finally:
        is_over.set()
        holder.join()
    assert_nothing_is_left(node, attempt, marker)


def test_a_keeper_that_was_suspended_does_not_keep_its_lease(node: NodeUnderTest) -> None:
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
    end = node.end(attempt)
    assert (end["reason"], end["exit_code"]) == ("stopped", 0)
    assert node.output(attempt).endswith("saved\n")
    assert "SIGTERM" in end["why"]


def test_an_end_is_kept_though_the_room_for_its_record_was_removed(node: NodeUnderTest) -> None:
    link = node.connect()
    os.mkfifo(node.root / "fifo")
    attempt = node.start(link, ["sh", "-c", 'read x < "$0"; exit 3', str(node.root / "fifo")])
    (node.directory(attempt) / ".exit.json").unlink()  # as by a job that sweeps old files of a scratch directory
    (node.root / "fifo").write_text("x\n")
    end = node.end(attempt)
    assert (end["reason"], end["exit_code"]) == ("exited", 3)
    assert end == node.record(attempt)


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("victims", [["keeper"], ["keeper", "runner"]])
def test_how_a_command_ended_is_kept_when_its_guards_die_after_it(
    node: NodeUnderTest, tmp_path: Path, victims: list[str], is_stopped: bool
) -> None:
    link = node.connect()
    # What outlives the command is asked to end when that was taken note of, and waited for for two seconds.
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
    end = node.end(attempt)
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
    end = node.end(attempt)
    assert (end["reason"], end["exit_code"]) == ("stopped", 0)


@pytest.mark.parametrize("asked", ["stop", "stop by another agent", "watch"])
def test_nothing_survives_of_a_task_whose_directory_was_removed(node: NodeUnderTest, marker: str, asked: str) -> None:
    link = node.connect()
    attempt = node.start(link, ["sh", "-c", "echo up; while :; do sleep 0.2; done", marker])
    bystander = node.start(link, ["sleep", "60"])
    wait_until(lambda: node.output(attempt))
    shutil.rmtree(node.directory(attempt).parent)
    if asked == "stop":
        link.request("stop", attempt=attempt, grace_s=5, why="")
    else:
        link.close()
        link = node.connect()
        if asked == "watch":
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
    control.rename(control.with_name("away"))  # as if no descriptor were left, or the file system did not answer
    events: list[Event] = []
    other = node.connect(events=events)
    node.watch(other, attempt, events)
    control.with_name("away").rename(control)
    link.request("start", attempt=attempt)
    wait_until(lambda: [one for one in events if one["event"] == "status" and one["status"]["phase"] == "running"])
    (node.root / "fifo").write_text("x\n")
    assert node.end(attempt, events=events)["exit_code"] == 0


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
    link.request("ping")  # it has been checked
    control.with_name("away").rename(control)
    wait_until(lambda: answers, 20)
    assert isinstance(answers[0], dict), answers[0]
    assert node.end(attempt)["exit_code"] == 3


def test_output_that_was_in_the_pipe_survives_the_keeper(node: NodeUnderTest) -> None:
    link = node.connect()
    os.mkfifo(node.root / "fifo")
    attempt = node.start(link, ["sh", "-c", 'echo up; read x < "$0"; echo last line; kill -9 $$', str(node.root / "fifo")])
    wait_until(lambda: node.output(attempt))
    state = node.state(attempt)
    os.kill(state["keeper"]["pid"], signal.SIGSTOP)  # so that it cannot read what comes now
    (node.root / "fifo").write_text("x\n")
    wait_until(lambda: is_dead(state["command"]["pid"]))
    kill(state["keeper"]["pid"])
    end = node.end(attempt)
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


def test_descriptors_of_the_agent_do_not_pile_up(node: NodeUnderTest) -> None:
    link = node.connect()
    agent = agent_of(link)

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{agent}/fd"))

    node.run(link, ["true"], lease={"gpus": 1, "gpu_ids": [0], "port": "any"})
    before = descriptors()
    for stream in range(3):
        attempt = node.start(link, ["echo", "hi"], lease={"gpus": 1, "gpu_ids": [0], "port": "any"})
        link.request("tail", stream=stream, attempt=attempt, file="output.log", offset=0)
        node.end(attempt)
    wait_until(lambda: descriptors() <= before, 15, "the agent closed what it opened")


def test_news_reach_an_agent_although_an_older_one_lingers(node: NodeUnderTest) -> None:
    old: list[Event] = []
    new: list[Event] = []
    first = node.connect(events=old, ping_s=60)
    attempt = node.start(first, ["sh", "-c", "sleep 0.3; echo hi; exit 2"])
    os.kill(agent_of(first), signal.SIGSTOP)  # its link is cut, and it does not know
    try:
        second = node.connect(events=new)
        node.watch(second, attempt, new)
        assert node.end(attempt, events=new)["exit_code"] == 2
    finally:
        os.kill(agent_pid_of(node), signal.SIGCONT)


def agent_pid_of(node: NodeUnderTest) -> int:
    """The stopped agent of this node."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[0]
            if state == "T" and str(node.top).encode() in Path("/proc", name, "cmdline").read_bytes():
                return int(name)
    raise LookupError("no stopped agent")
