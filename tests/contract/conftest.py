"""Fixtures of the contract tests, which run against every implementation that is listed here."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distflow.backends.allocated.engine import Allocation, AllocationRequest, Engine, Granted, NodeRequest
from distflow.backends.allocated.engines import open_engine
from distflow.backends.allocated.ray.ray_engine import RayEngine
from distflow.backends.allocated.relay import RelayTransport
from distflow.backends.allocated.script import resident_script
from distflow.backends.allocated.slurm.commands import step_prefix
from distflow.backends.machines.connection.bootstrap import connect
from distflow.backends.machines.connection.link import AgentLink, Event
from distflow.backends.machines.connection.transfers import Blob, send_blobs
from distflow.errors import AgentError, NodeUnreachable
from distflow.pools.model import KubernetesSettings, Pool, RaySettings, ssh_node
from distflow.runtime.files.root_directory import PRIVATE, mark
from distflow.structs import replace
from distflow.testing.kubernetes import IMAGE, KubernetesCluster, pod_template
from distflow.testing.nodes import install_runtime
from distflow.testing.ray import RayCluster
from distflow.testing.slurm import Slurm
from distflow.testing.sshd import Sshd, missing_sshd
from distflow.testing.waiting import is_alive, wait_until
from distflow.transports.base import Transport
from distflow.transports.local import LocalTransport
from distflow.transports.ssh.config import SshDestination
from distflow.transports.ssh.transport import SshTransport

LOCAL_TRANSPORT = pytest.mark.transports("local")
"""Tests of the node itself. `test_transport.py` shows that transports behave alike, so these tests run over one of them."""
EVERY_TRANSPORT = pytest.mark.transports("local", "ssh")
"""Tests in which the connection, the environment of a login, or the path of the data matters. The default without a mark."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that uses `transport` over the transports of its marker."""
    if "transport_name" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("transports") or EVERY_TRANSPORT.mark
        names = [pytest.param(name, marks=pytest.mark.ssh) if name == "ssh" else name for name in mark.args]
        metafunc.parametrize("transport_name", names)


@pytest.fixture(scope="session")
def over_ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Transport]]:
    """A function that returns a transport to this machine through a real sshd."""
    if why := missing_sshd():
        pytest.skip(why)
    with Sshd(tmp_path_factory.mktemp("sshd"), alias="here") as server:
        yield lambda: SshTransport("here", SshDestination(host="here", config_file=str(server.client_config)))


@pytest.fixture(scope="module")
def slurm_job(slurm_cluster: Slurm) -> Iterator[str]:
    """The id of a job with two GPUs on each of two nodes, on which the resident program runs."""
    yield submit(slurm_cluster, resident_script(sys.executable, 600, 1), "--nodes=2", "--gres=gpu:2")
    slurm_cluster.cancel_jobs()


@pytest.fixture
def over_slurm(slurm_cluster: Slurm, slurm_job: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Transport]:
    """A function that returns a transport to this machine as the second node of a Slurm job."""
    monkeypatch.setenv("PATH", f"{slurm_cluster.commands}:{os.environ['PATH']}")
    return lambda: RelayTransport(
        LocalTransport("login"), slurm_job, "n2", sys.executable, prefix=partial(step_prefix, slurm_job, "n2")
    )


@pytest.fixture(scope="module")
def over_ray(ray_cluster: RayCluster) -> Iterator[Callable[[], Transport]]:
    """A function that returns a transport to this machine as the second node of a placement group."""
    settings = RaySettings(address=ray_cluster.address, python=ray_cluster.python)
    engine = RayEngine(Pool(name="p", backend="ray", nodes=(), template=ssh_node(), ray=settings), LocalTransport("login"))
    allocation = Allocation(workflow="1" * 32, group="g", attempt=0)
    nodes = (NodeRequest(task="a", gpus=1), NodeRequest(task="b", gpus=1))
    group = engine.request(AllocationRequest(allocation=allocation, label="w/g", nodes=nodes))

    def granted() -> Granted | None:
        state = engine.states({group: ("a", "b")})[group]
        return state if isinstance(state, Granted) else None

    host = wait_until(granted, 60, "the placement group is granted").hosts["b"]
    yield lambda: engine.transport(group, host)
    engine.release([group])
    engine.close()
    ray_cluster.await_empty()


def submit(cluster: Slurm, script: str, *options: str) -> str:
    """Submit a job with one task on each node, wait until it runs, and return its id."""
    job = cluster.run("sbatch", "--parsable", "--ntasks-per-node=1", "--output=/dev/null", *options, stdin=script).strip()
    wait_until(lambda: set(cluster.run("squeue", "--noheader", f"--jobs={job}", "--format=%T").split()) == {"RUNNING"})
    return job


@pytest.fixture
def transport(request: pytest.FixtureRequest, transport_name: str) -> Iterator[Transport]:
    """A transport to this machine."""
    made: Transport = LocalTransport() if transport_name == "local" else request.getfixturevalue(f"over_{transport_name}")()
    yield made
    made.close()


class NodeUnderTest:
    """A node with its own root, its connections, and the attempts that a test runs there."""

    def __init__(self, transport: Transport, top: Path) -> None:
        self.transport = transport
        self.top = top / "root"
        """The configured ``root``."""
        self.root = self.top / PRIVATE
        """The private directory in it."""
        self.root.mkdir(mode=0o700, parents=True)
        mark(str(self.root))
        self.lease_dir = top / "leases"
        self.workflow = str(uuid.uuid4())
        self.events: list[Event] = []
        self.closed: list[NodeUnreachable] = []
        self._links: list[AgentLink] = []
        self._count = 0

    def connect(self, *, python: str = sys.executable, events: list[Event] | None = None, **options: Any) -> AgentLink:
        """Connect to a new agent, which adds its events to ``events`` (default: the node's own list)."""
        target = self.events if events is None else events
        settings = {"timeout_s": 60.0, **options}
        link = connect(self.transport, str(self.top), python, on_event=target.append, on_close=self.closed.append, **settings)
        self._links.append(link)
        return link

    def watch(self, link: AgentLink, attempt: str, events: list[Event] | None = None) -> dict[str, Any]:
        """Watch an attempt and return its status. The agent then sends an event for each change of it."""
        status = link.request("hello", watch=[attempt])["attempts"][attempt]
        (self.events if events is None else events).append({"event": "status", "attempt": attempt, "status": status, "at": 0})
        assert isinstance(status, dict)
        return status

    def attempt(self) -> str:
        """The name of a new attempt."""
        self._count += 1
        return f"{self.workflow}/g/t{self._count}/0"

    def directory(self, attempt: str) -> Path:
        """The directory of an attempt."""
        return self.root / attempt

    def lease(self, link: AgentLink, attempt: str | None = None, **fields: Any) -> str:
        """Lease an attempt and return its name. By default, it has no GPUs and no port."""
        name = attempt or self.attempt()
        given = {"gpus": 0, "gpu_ids": [], "lease_dir": str(self.lease_dir), "port": None, "start_timeout_s": 60, **fields}
        link.request("lease", attempt=name, **given)
        return name

    def stage(self, data: bytes, *, python: str = sys.executable) -> str:
        """Upload a blob to the node and return its name."""
        name = hashlib.sha256(data).hexdigest()
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            blob = Blob(digest=name, path=Path(file.name), size=len(data), name="a file")
            send_blobs(self.transport, str(self.top), python, [blob], timeout_s=60)
        return name

    def start(self, link: AgentLink, argv: list[str], *, lease: dict[str, Any] | None = None, **launch: Any) -> str:
        """Lease, prepare and start an attempt, and return its name."""
        name = self.lease(link, **(lease or {}))
        link.request("prepare", attempt=name, launch=launch_of(argv, **launch))
        link.request("start", attempt=name)
        return name

    def record(self, attempt: str) -> dict[str, Any] | None:
        """The attempt's ``exit.json``."""
        try:
            found = json.loads((self.directory(attempt) / "exit.json").read_text())
        except OSError:
            return None
        assert isinstance(found, dict)
        return found

    def state(self, attempt: str) -> dict[str, Any]:
        """The attempt's ``runner.json``."""
        found = json.loads((self.directory(attempt) / "runner.json").read_text())
        assert isinstance(found, dict)
        return found

    def await_end(self, attempt: str, timeout_s: float = 20.0, events: list[Event] | None = None) -> dict[str, Any]:
        """Wait until an agent reports the attempt's end, and return it."""
        target = self.events if events is None else events

        def ended() -> dict[str, Any] | None:
            for event in list(target):
                if event["event"] == "status" and event["attempt"] == attempt and event["status"]["phase"] == "ended":
                    end = event["status"]["end"]
                    assert isinstance(end, dict)
                    return end
            return None

        return wait_until(ended, timeout_s, f"the end of {attempt}")

    def output(self, attempt: str) -> str:
        """The output of the attempt so far."""
        return (self.directory(attempt) / "output.log").read_text()

    def run(self, link: AgentLink, argv: list[str], **launch: Any) -> tuple[dict[str, Any], str]:
        """Run an attempt, and return its end and its output."""
        name = self.start(link, argv, **launch)
        return self.await_end(name), self.output(name)

    def close(self) -> None:
        """Close all connections and stop all attempts."""
        for link in self._links:
            link.close()
        # Unlike `Path.glob`, this ignores directories that an agent removes at the same time.
        states = [Path(name) for name in glob.glob(f"{self.root}/*/*/*/*/runner.json")]
        alive = [path.parent for path in states if not (path.parent / "exit.json").exists()]
        if alive:
            names = [str(path.relative_to(self.root)) for path in alive]
            link = connect(self.transport, str(self.top), sys.executable, on_event=self.events.append)
            link.request("hello", watch=names)
            for name in names:
                link.send("stop", lambda _answer: None, attempt=name, grace_s=0, why="the test is over")
            wait_until(lambda: all((path / "exit.json").exists() or not path.exists() for path in alive), 20, "all ended")
            link.close()


def launch_of(argv: list[str], **fields: Any) -> dict[str, Any]:
    """Return a launch with defaults."""
    empty: dict[str, Any] = {"env": {}, "secret_env": {}, "path_prepend": [], "files": [], "shell_prelude": None}
    return {"argv": argv, "cwd": "work", "stop_grace_s": 5, **empty, **fields}


@pytest.fixture
def fresh_node(transport: Transport, tmp_path: Path) -> Iterator[NodeUnderTest]:
    """A node that is reached over ``transport``, before its first connection."""
    made = NodeUnderTest(transport, tmp_path)
    yield made
    made.close()


@pytest.fixture
def node(fresh_node: NodeUnderTest) -> NodeUnderTest:
    """A node that is reached over ``transport``, and has the runtime."""
    install_runtime(fresh_node.top)
    return fresh_node


def try_clean(link: AgentLink, workflow: str) -> bool:
    """Clean a workflow, and return whether that succeeded. Its runners outlive the reports of their ends for a moment."""
    try:
        link.request("clean", workflow=workflow, keep_output=False)
    except AgentError as error:
        if error.kind != "conflict":
            raise
        return False
    return True


def processes_with(marker: str) -> list[int]:
    """Ids of living processes with ``marker`` in their arguments."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if marker.encode() not in Path("/proc", name, "cmdline").read_bytes():
                    continue
            except OSError:
                continue
            if is_alive(int(name)):
                found.append(int(name))
    return found


@pytest.fixture
def marker() -> str:
    """A unique word, by which a test finds its own processes."""
    return f"marker-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def kubernetes_node(
    kubernetes_cluster: KubernetesCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, str, str]]:
    """An engine, and the allocation and host of a pod that has the network and the files of this machine."""
    if not kubernetes_cluster.is_own:
        pytest.skip("pods of a foreign cluster do not run on this machine")
    with kubernetes_cluster.shared():
        namespace = kubernetes_cluster.create_namespace()
        settings = KubernetesSettings(
            kubeconfig=str(kubernetes_cluster.kubeconfig), namespace=namespace, image=IMAGE, host_network=True,
            pod_template=json.dumps(pod_template(str(tmp_path_factory.getbasetemp()))),
        )  # fmt: skip
        pool = Pool(
            name="pods", backend="kubernetes", nodes=(), kubernetes=settings,
            template=replace(ssh_node(), python=sys.executable, root="/distflow"),
        )  # fmt: skip
        engine = open_engine(pool)
        request = AllocationRequest(
            allocation=Allocation(workflow=uuid.uuid4().hex, group="g", attempt=0),
            label="contract/g",
            nodes=(NodeRequest(task="t"),),
        )
        allocation = engine.request(request)
        granted = wait_until(lambda: _granted(engine, allocation), 90, "the pod runs")
        yield engine, allocation, granted.hosts["t"]
        engine.release([allocation])
        engine.close()
        kubernetes_cluster.delete_namespace(namespace)


def _granted(engine: Engine, allocation: str) -> Granted | None:
    state = engine.states({allocation: ("t",)})[allocation]
    return state if isinstance(state, Granted) else None


@pytest.fixture
def over_kubernetes(kubernetes_node: tuple[Engine, str, str]) -> Callable[[], Transport]:
    """A function that returns a transport to this machine through a pod."""
    engine, allocation, host = kubernetes_node
    return lambda: engine.transport(allocation, host)
