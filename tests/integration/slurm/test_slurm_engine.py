"""Slurm as a cluster engine, on a real cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from distflow.backends.allocated.engine import (
    Allocation,
    AllocationRequest,
    AllocationState,
    Granted,
    NodeRequest,
    Over,
    Queued,
    Relay,
    RequestRefused,
)
from distflow.backends.allocated.slurm.slurm_engine import SlurmEngine
from distflow.errors import NodeUnreachable
from distflow.lifecycle.states import Reason
from distflow.pools.load import Machine, parse_configuration
from distflow.structs import replace
from distflow.testing.slurm import Slurm, missing_slurm
from distflow.testing.sshd import Sshd, missing_sshd
from distflow.testing.waiting import wait_until
from distflow.transports.base import Completed, Transport
from distflow.transports.local import LocalTransport
from distflow.transports.multiplexed import MultiplexedTransport
from distflow.transports.ssh.config import SshDestination
from distflow.transports.ssh.transport import SshTransport

Open = Callable[..., SlurmEngine]
TASKS = ("w0", "w1")


class CountingTransport(LocalTransport):
    """Records the Slurm commands that it runs."""

    def __init__(self) -> None:
        super().__init__("login")
        self.commands: list[str] = []

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Completed:
        self.commands += [word for word in argv if word in ("squeue", "sbatch", "scontrol")]
        return super().run(argv, input=input, timeout_s=timeout_s)


class UnreliableTransport(LocalTransport):
    """Loses the output of one command, or returns ``answer`` in its place."""

    def __init__(self) -> None:
        super().__init__("login")
        self.lost_command = ""
        self.answer: Completed | None = None

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Completed:
        if self.lost_command in argv and self.answer is not None:
            return self.answer
        done = super().run(argv, input=input, timeout_s=timeout_s)
        if self.lost_command in argv:
            raise NodeUnreachable(self.name, "connection lost")
        return done


def idle_script(python: str, idle_release_s: float, components: int) -> str:
    """Return a script whose program on each node does nothing."""
    groups = f"--het-group=0-{components - 1} " if components > 1 else ""
    return f"#!/bin/sh\nexec srun {groups}{python} -c 'import time; time.sleep({idle_release_s})'\n"


def no_relay(login: Transport, job: str, host: str, python: str, prefix: Callable[[], Sequence[str]]) -> Relay:
    raise NodeUnreachable(host, f"no relay to job {job} by {login.name} and {python} with {prefix}")


@pytest.fixture
def open_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    engines = []

    def opened(
        cluster: Slurm, slurm: str = "slurm: {}", python: str = "python3", login: Transport | None = None
    ) -> SlurmEngine:
        monkeypatch.setenv("SLURM_CONF", str(cluster.config))
        text = f"pools: {{c: {{backend: slurm, root: {tmp_path}/root, python: {python}, {slurm}}}}}"
        machine = Machine(cpus=1, memory=1, gpus=0, python="p")
        pool = parse_configuration(text, "distflow.yaml", root="/r", machine=machine).pools["c"]
        engines.append(SlurmEngine(pool, login or LocalTransport("login"), script=idle_script, relay=no_relay))
        return engines[-1]

    yield opened
    for engine in engines:
        engine.close()


def own_cluster(folder: Path, **options: str) -> Slurm:
    if why := missing_slurm():
        pytest.skip(why)
    return Slurm(folder / "cluster", options={"SchedulerParameters": "bf_interval=1", "KillWait": "1", **options})


def make_request(attempt: int = 0, *nodes: NodeRequest) -> AllocationRequest:
    return AllocationRequest(
        allocation=Allocation(workflow="cafe", group="train", attempt=attempt),
        label="lm-3/train",
        nodes=nodes or tuple(NodeRequest(task=task, gpus=2, cpus=1) for task in TASKS),
    )


def state_of(engine: SlurmEngine, job: str, tasks: Sequence[str] = TASKS) -> AllocationState:
    return engine.states({job: tasks})[job]


def wait_for_state(engine: SlurmEngine, job: str, kind: type[AllocationState]) -> AllocationState:
    found: list[AllocationState] = []

    def arrived() -> bool:
        found[:] = [state_of(engine, job)]
        return isinstance(found[0], kind)

    wait_until(arrived, 40.0, f"job {job}: {kind}")
    return found[0]


def test_an_allocation_is_requested_granted_and_released(slurm: Slurm, open_engine: Open) -> None:
    foreign = slurm.run("sbatch", "--parsable", "--output=/dev/null", "--comment=mine", "--wrap=sleep 300").strip()
    engine = open_engine(slurm)
    job = engine.request(make_request())
    assert wait_for_state(engine, job, Granted) == Granted(hosts={"w0": "n1", "w1": "n2"})
    assert engine.request(make_request()) == job
    second_engine = open_engine(slurm)
    assert second_engine.request(make_request()) == job
    assert second_engine.allocations() == {job: make_request().allocation}
    other = second_engine.request(make_request(1))
    assert other != job
    second_engine.release([job, foreign, "99999"])
    ended = wait_for_state(engine, job, Over)
    assert isinstance(ended, Over)
    assert (ended.reason, ended.message[: len(f"Slurm job {job} was canceled")]) == (
        Reason.CANCELED,
        f"Slurm job {job} was canceled",
    )
    assert foreign in slurm.jobs()
    assert second_engine.request(make_request()) != job  # a new job, because the first has ended
    assert state_of(engine, "99999") == Over(reason=None, message="Slurm no longer knows job 99999")


def test_a_second_job_of_an_allocation_is_canceled(slurm: Slurm, open_engine: Open) -> None:
    engine = open_engine(slurm)
    job = engine.request(make_request())
    marker = make_request().allocation.marker
    late = slurm.run("sbatch", "--parsable", "--output=/dev/null", f"--comment={marker}", "--wrap=sleep 300").strip()
    assert set(slurm.jobs()) == {job, late}
    wait_until(lambda: (state_of(engine, job), slurm.jobs() == [job])[1], what="the second job was canceled")


def test_the_states_of_many_allocations_need_one_query(slurm: Slurm, open_engine: Open) -> None:
    login = CountingTransport()
    engine = open_engine(slurm, login=login)
    jobs = [engine.request(make_request(attempt)) for attempt in range(3)]
    assert len(set(jobs)) == 3
    assert login.commands == ["squeue", *["sbatch"] * 3]
    login.commands.clear()
    assert set(engine.states(dict.fromkeys(jobs, TASKS))) == set(jobs)
    assert login.commands == ["squeue"]
    engine.release(jobs)
    wait_for_state(engine, jobs[-1], Over)


def test_refusals_and_the_reason_for_waiting_are_reported(slurm: Slurm, open_engine: Open) -> None:
    with pytest.raises(RequestRefused, match="Slurm refused the job: invalid partition specified: nope") as caught:
        open_engine(slurm, "slurm: {partition: nope}").request(make_request())
    assert "slurm.partition" in caught.value.hint
    engine = open_engine(slurm)
    with pytest.raises(RequestRefused, match="Requested node configuration is not available"):
        engine.request(make_request(0, NodeRequest(task="t", gpus=99)))
    tasks = ("a", "b", "c")
    job = engine.request(make_request(0, *(NodeRequest(task=task) for task in tasks)))
    found = wait_until(
        lambda: state if isinstance(state := state_of(engine, job, tasks), Queued) and "None" not in state.why else None,
        what="Slurm reports why the job waits",
    )
    # Slurm reports PartitionConfig first, then PartitionNodeLimit.
    assert found.why.startswith("will not start: it requests more ")
    engine.release([job])
    assert slurm.jobs() == []


def test_the_error_of_a_program_that_cannot_start_is_reported(slurm: Slurm, open_engine: Open, tmp_path: Path) -> None:
    engine = open_engine(slurm, python="/no/such/python")
    job = engine.request(make_request())
    ended = wait_for_state(engine, job, Over)
    assert isinstance(ended, Over)
    assert ended.reason is None
    assert "failed with exit code" in ended.message
    assert "/no/such/python" in ended.message
    assert list((tmp_path / "root").iterdir()) == []


def test_tasks_of_different_shapes_are_a_heterogeneous_job(slurm: Slurm, open_engine: Open) -> None:
    request = make_request(0, NodeRequest(task="w0", cpus=2), NodeRequest(task="w1", gpus=2))
    engine = open_engine(slurm)
    job = engine.request(request)
    assert wait_for_state(engine, job, Granted) == Granted(hosts={"w0": "n1", "w1": "n2"})
    assert slurm.jobs() == [f"{job}+0", f"{job}+1"]
    assert open_engine(slurm).request(request) == job
    assert engine.notice(job) == ""
    engine.release([job])
    assert isinstance(wait_for_state(engine, job, Over), Over)
    assert slurm.jobs() == []


def test_a_cluster_without_heterogeneous_jobs_gives_all_nodes_the_largest_shape(tmp_path: Path, open_engine: Open) -> None:
    with own_cluster(tmp_path, SchedulerType="sched/builtin") as cluster:
        engine = open_engine(cluster)
        job = engine.request(make_request(0, NodeRequest(task="w0", cpus=2), NodeRequest(task="w1", gpus=2)))
        assert wait_for_state(engine, job, Granted) == Granted(hosts={"w0": "n1", "w1": "n2"})
        assert "every node gets the largest" in engine.notice(job)
        assert "NumCPUs=4" in (shown := cluster.run("scontrol", "show", "job", job))
        assert "TresPerNode=gres:gpu:2" in shown


@pytest.mark.parametrize(
    ("enforced", "limits"), [("NO", {30: 60, 30 * 24 * 60: 30 * 24 * 60 + 60}), ("ALL", {30: 60, 60: 60})], ids=["NO", "ALL"]
)
def test_the_margin_of_a_time_limit_fits_into_the_partition(
    tmp_path: Path, open_engine: Open, enforced: str, limits: dict[int, int]
) -> None:
    with own_cluster(tmp_path, EnforcePartLimits=enforced) as cluster:
        cluster.add_partition("short", MaxTime="60")
        for exec_min, minutes in limits.items():
            partition = "main" if minutes > 60 else "short"
            engine = open_engine(cluster, f"slurm: {{partition: '{partition}'}}")
            request = replace(make_request(exec_min), time_limit_s=exec_min * 60.0 + 3600.0, margin_s=3600.0)
            job = engine.request(request)
            shown = cluster.run("squeue", "--noheader", f"--jobs={job}", "--Format=TimeLimit:.40")
            assert shown.split() == [_limit(minutes)]
            wait_for_state(engine, job, Granted)


def test_a_time_limit_without_its_margin_is_tried_if_slurm_refuses_it(slurm: Slurm, open_engine: Open) -> None:
    login = UnreliableTransport()
    engine = open_engine(slurm, login=login)
    login.answer = Completed(exit_code=1, stdout=b"", stderr=b"sbatch: error: Requested time limit is invalid\n")
    login.lost_command = "--time=90"
    job = engine.request(replace(make_request(), time_limit_s=90 * 60.0, margin_s=3600.0))
    assert "TimeLimit=00:30:00" in slurm.run("scontrol", "show", "job", job)
    login.lost_command = "--time=30"
    with pytest.raises(RequestRefused, match="Requested time limit is invalid"):
        engine.request(replace(make_request(1), time_limit_s=30 * 60.0, margin_s=0.0))


def _limit(minutes: int) -> str:
    """Return a time limit as Slurm writes it."""
    days, rest = divmod(minutes, 1440)
    return f"{days}-{rest // 60:02}:{rest % 60:02}:00" if days else f"{rest // 60}:{rest % 60:02}:00"


def test_preemption_and_a_lost_node_end_an_allocation(slurm: Slurm, open_engine: Open) -> None:
    slurm.add_partition("urgent", PriorityTier="10", PreemptMode="OFF")
    engine = open_engine(slurm, "slurm: {exclusive: true}")
    job = engine.request(make_request())
    wait_for_state(engine, job, Granted)
    urgent = open_engine(slurm, "slurm: {exclusive: true, partition: urgent}")
    second = urgent.request(make_request(1))
    assert wait_for_state(engine, job, Over) == Over(
        reason=Reason.PREEMPTED, message=f"Slurm job {job} was preempted by another job"
    )
    wait_for_state(urgent, second, Granted)
    # The job's own step began earlier, so it has started on n2, too: a failed start would end the job without a lost node.
    slurm.run("srun", f"--jobid={second}", "--overlap", "-N1", "-n1", "-w", "n2", "--gres=none", "true")
    slurm.kill_node("n2")
    try:
        # Slurm would find out after SlurmdTimeout.
        slurm.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
        assert wait_for_state(urgent, second, Over) == Over(
            reason=Reason.NODE_LOST, message=f"Slurm job {second} lost a node (n2)", hosts=("n2",)
        )
    finally:
        slurm.start_node("n2")
        slurm.wait_for_nodes("n2")


def test_failed_queries_are_reported_and_a_lost_answer_causes_no_second_job(slurm: Slurm, open_engine: Open) -> None:
    login = UnreliableTransport()
    engine = open_engine(slurm, login=login)
    login.lost_command = "sbatch"
    with pytest.raises(NodeUnreachable, match="connection lost"):
        engine.request(make_request())
    (job,) = slurm.jobs()
    assert engine.request(make_request()) == job
    login.lost_command = "squeue"
    with pytest.raises(NodeUnreachable, match="connection lost"):
        engine.states({job: TASKS})
    login.answer = Completed(exit_code=1, stdout=b"", stderr=b"slurm_load_jobs error: Unable to contact slurm controller\n")
    with pytest.raises(NodeUnreachable, match=r"login: `squeue` failed: slurm_load_jobs error: Unable to contact"):
        engine.states({job: TASKS})
    login.answer = Completed(exit_code=0, stdout=b"something else\n", stderr=b"")
    with pytest.raises(NodeUnreachable, match="the answer does not have the requested format") as malformed:
        engine.states({job: TASKS})
    assert "not a wrapper" in malformed.value.hint
    login.answer = Completed(exit_code=127, stdout=b"", stderr=b"sh: exec: squeue: not found\n")
    with pytest.raises(RequestRefused, match="`squeue` was not found") as caught:
        open_engine(slurm, login=login).request(make_request(1))
    assert "`login`" in caught.value.hint
    login.lost_command = "sh"  # the whole script is one argument
    with pytest.raises(NodeUnreachable, match="`scancel` was not found"):
        engine.release([job])
    assert slurm.jobs() == [job]


@pytest.mark.ssh
def test_an_engine_and_its_relays_share_one_session_on_the_login_node(slurm: Slurm, open_engine: Open, tmp_path: Path) -> None:
    if why := missing_sshd():
        pytest.skip(why)
    environment = f"HOME={tmp_path} SLURM_CONF={slurm.config}"
    with Sshd(tmp_path / "sshd", alias="login", options={"MaxSessions": "1", "SetEnv": environment}) as server:
        inner = SshTransport("login", SshDestination(host="login", config_file=str(server.client_config)))
        login = MultiplexedTransport(inner, python=sys.executable)
        engine = open_engine(slurm, login=login)
        job = engine.request(make_request())
        wait_for_state(engine, job, Granted)
        step = ["srun", f"--jobid={job}", "--overlap", "-N1", "-n1", "--gres=none", "--unbuffered"]
        relays = [login.open([*step, "-w", host, "sh", "-c", "echo $SLURMD_NODENAME; cat"]) for host in ("n1", "n2") * 2]
        assert [relay.read() for relay in relays] == [b"n1\n", b"n2\n"] * 2
        for relay in relays:
            relay.write(b"x")
        assert [relay.read() for relay in relays] == [b"x"] * 4
        assert isinstance(state_of(engine, job), Granted)
        assert server.log.read_text().count("Starting session") == 1
        for relay in relays:
            relay.close()
        engine.release([job])
        wait_for_state(engine, job, Over)
        login.close()
