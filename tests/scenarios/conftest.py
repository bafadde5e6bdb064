"""Fixtures for whole runs through the command line, with real processes. No process of a test may remain."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from distflow.runtime.files.root_directory import PRIVATE
from distflow.state.directory import StateDirectory
from distflow.state.record import WorkflowRecord
from distflow.state.store import Store
from distflow.supervisor.process import is_running
from distflow.testing.kernel import NetnsHost, Network, missing_netns
from distflow.testing.kubernetes import KubernetesCluster
from distflow.testing.nodes import install_runtime
from distflow.testing.ray import RayCluster
from distflow.testing.s3 import S3Server
from distflow.testing.slurm import Slurm
from distflow.testing.sshd import Sshd, make_key, missing_sshd
from distflow.testing.waiting import wait_until
from preloaded import Preloaded, write_program, write_site
from scenarios.cluster import Cluster
from scenarios.commands import Done, run_command, start_command
from scenarios.kubernetes_pool import KubernetesPool
from scenarios.lab import Lab
from scenarios.raypool import RayPool

__all__ = ["Cli", "Done"]

_POOL = pytest.StashKey[KubernetesPool]()
_COMMAND_EVERY_S = 5.0
"""Seconds between two commands while a test waits and no file changes."""


class Cli:
    """distflow in a state directory, a home and a working directory of its own."""

    def __init__(self, folder: Path, base: Path, *, has_runtime: bool = True, python: str = sys.executable) -> None:
        """Store ``folder`` and pytest's ``base`` directory. With ``has_runtime``, nodes already have the runtime."""
        self._base = base
        self.python = python
        """The Python of nodes."""
        self._has_runtime = has_runtime
        self.folder = folder
        self.state = folder / "state"
        self.top = folder / "node"
        """The ``root`` of the local node in the configuration."""
        self.root = self.top / PRIVATE
        """distflow's private directory in ``top``."""
        self.leases = folder / "leases"
        self.environment = os.environ | {"DISTFLOW_STATE": str(self.state), "HOME": str(folder)}
        self.add_node(self.top)
        self.configure()

    def add_node(self, root: Path) -> None:
        """Install the runtime below a node's root, unless the test has new nodes."""
        if self._has_runtime:
            install_runtime(root)

    def configure(self, *, gpus: int = 0, cpus: int = 64, **settings: Any) -> None:
        """Write a configuration with one pool, ``local``, which is this machine."""
        if self.python != sys.executable:
            settings.setdefault("python", self.python)
        lines = ["default_pool: local", "pools:", "  local:", "    backend: local"]
        lines += [f"    {name}: {value}" for name, value in settings.items()]
        lines += [
            "    nodes:",
            f"    - {{name: local, root: {self.top}, lease_dir: {self.leases}, gpus: {gpus}, cpus: {cpus},",
            "       check_capacity: false}",
        ]
        (self.folder / "distflow.yaml").write_text("\n".join(lines) + "\n")
        self.environment["DISTFLOW_CONFIG"] = str(self.folder / "distflow.yaml")

    def run(self, *arguments: str, timeout: float = 240.0, cwd: Path | None = None, stdin: str = "") -> Done:
        """Run one command until it ends. On a timeout, fail with its output and with the events and logs of all workflows."""
        try:
            return run_command(self._base, arguments, self.environment, cwd or self.folder, timeout, stdin)
        except subprocess.TimeoutExpired as error:
            output = b"\n".join(filter(None, (error.stdout, error.stderr))).decode()
            raise AssertionError(f"{error}\n{output}\n{self._reports()}") from None

    def _reports(self) -> str:
        """Return the events and the last lines of output of each workflow."""
        with Store(StateDirectory(self.state).store) as store:
            names = [record.id for record in store.list()]
        commands = [("workflow", kind, name, *more) for name in names for kind, *more in (("events",), ("logs", "-n", "50"))]
        results = [run_command(self._base, words, self.environment, self.folder, 60.0) for words in commands]
        return "\n".join(f"{' '.join(words)}:\n{done.out}{done.err}" for words, done in zip(commands, results, strict=True))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start one command in a new interpreter."""
        return subprocess.Popen(
            [sys.executable, "-m", "distflow", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=self.environment, cwd=self.folder,
        )  # fmt: skip

    def fork(self, *arguments: str, stdout: int, stderr: int) -> Preloaded:
        """Start one command in a forked process, which takes less time than a new interpreter."""
        return start_command(self._base, arguments, self.environment, self.folder, stdout, stderr)

    def spec(self, text: str, name: str = "spec.yaml") -> str:
        """Write a spec and return its path."""
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def submit(self, spec: str, *arguments: str) -> str:
        """Submit a spec and return the workflow's id."""
        done = self.run("workflow", "submit", spec, *arguments)
        assert done.code == 0, done.err
        return done.out.strip()

    def query(self, workflow: str, *arguments: str) -> dict[str, Any]:
        """Return the JSON output of ``workflow query``."""
        done = self.run("workflow", "query", workflow, *arguments, "-t", "json")
        assert done.code == 0, done.err
        answer: dict[str, Any] = json.loads(done.out)
        return answer

    def tasks(self, workflow: str) -> dict[str, dict[str, Any]]:
        """Return the tasks of a workflow by name, from ``workflow query``."""
        return {task["name"]: task for group in self.query(workflow)["groups"] for task in group["tasks"]}

    def await_status(self, workflow: str, *statuses: str, timeout: float = 120.0) -> dict[str, Any]:
        """Wait until a workflow has one of ``statuses``, and return its ``query``."""
        self.await_record(workflow, lambda record: record.status in statuses, timeout)
        return self.query(workflow)

    def await_running(self, workflow: str, timeout: float = 120.0) -> dict[str, dict[str, Any]]:
        """Wait until all tasks run, and return them."""

        def all_run(record: WorkflowRecord) -> bool:
            return all(task.status == "RUNNING" for group in record.groups for task in group.tasks)

        self.await_record(workflow, all_run, timeout)
        return self.tasks(workflow)

    def await_record(self, workflow: str, condition: Callable[[WorkflowRecord], bool], timeout: float) -> None:
        """Wait until the stored record of a workflow fulfills a condition.

        The record is read when a file has changed. Every 5 s, a command starts a supervisor if none runs.
        """
        commanded_at, have_changed = -math.inf, self._watch_files()

        def is_fulfilled() -> bool:
            nonlocal commanded_at
            is_due = time.monotonic() > commanded_at + _COMMAND_EVERY_S
            if is_due:
                self.query(workflow)
                commanded_at = time.monotonic()
            if not (have_changed() or is_due):
                return False
            with Store(StateDirectory(self.state).store) as store:
                return condition(store.find(workflow))

        try:
            wait_until(is_fulfilled, timeout)
        except TimeoutError as error:
            answer = self.query(workflow)
            messages = {group["name"]: group["message"] for group in answer["groups"]}
            raise TimeoutError(f"{error}: {workflow} is {answer['status']} {messages}") from None

    def await_log(self, workflow: str, text: str, count: int = 1, timeout: float = 120.0) -> str:
        """Wait until the logs contain a text ``count`` times, and return them."""
        return self.await_output(lambda logs: logs.count(text) >= count, "workflow", "logs", workflow, timeout=timeout)

    def await_event(self, workflow: str, text: str, timeout: float = 60.0) -> str:
        """Wait until an event of a workflow contains a text, and return the events."""
        return self.await_output(lambda events: text in events, "workflow", "events", workflow, timeout=timeout)

    def await_group_message(self, workflow: str, text: str, timeout: float = 60.0) -> None:
        """Wait until the message of the first group contains a text."""
        self.await_record(workflow, lambda record: text in record.groups[0].message, timeout)

    def await_output(self, is_expected: Callable[[str], bool], *arguments: str, timeout: float = 60.0) -> str:
        """Run a command until its output is as expected, and return the output.

        The command runs again when a file of the store or the logs has changed, and every 5 s.
        """
        output, ran_at, have_changed = "", -math.inf, self._watch_files()

        def is_shown() -> bool:
            nonlocal output, ran_at
            if not have_changed() and time.monotonic() < ran_at + _COMMAND_EVERY_S:
                return False
            done = self.run(*arguments)
            assert done.code == 0, done.err
            output, ran_at = done.out, time.monotonic()
            return is_expected(output)

        try:
            wait_until(is_shown, timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {' '.join(arguments)} prints\n{output}") from None
        return output

    def _watch_files(self) -> Callable[[], bool]:
        """Return a function that returns whether the store or the logs have changed since its last call.

        It takes 0.1 ms, and a command takes at least 30 ms.
        """
        seen: list[tuple[str, int, int]] | None = None

        def have_changed() -> bool:
            nonlocal seen
            store = StateDirectory(self.state).store
            paths = [str(store), f"{store}-wal"]
            for folder, _, names in os.walk(self.state / "logs"):
                paths += [os.path.join(folder, name) for name in names]
            before, seen = seen, []
            for path in paths:
                with suppress(FileNotFoundError):
                    status = os.stat(path)
                    seen.append((path, status.st_size, status.st_mtime_ns))
            return seen != before

        return have_changed

    def logs(self, workflow: str, *arguments: str) -> str:
        """Return the tasks' output."""
        done = self.run("workflow", "logs", workflow, *arguments)
        assert done.code == 0, done.err
        return done.out

    def supervisor(self) -> int | None:
        """The pid of the supervisor, if one is running."""
        directory = StateDirectory(self.state)
        # A supervisor that has just taken the lock may not have written its pid yet.
        content = directory.lock.read_text() if is_running(directory) else ""
        return int(content.split()[0]) if content else None

    def kill_supervisor(self) -> int:
        """Kill the supervisor, wait until its lock is free, and return its pid.

        A killed process keeps its lock until the kernel has ended all its threads. Until then, no command starts another one.
        """
        supervisor = self.supervisor()
        assert supervisor is not None
        os.kill(supervisor, signal.SIGKILL)
        wait_until(lambda: self.supervisor() != supervisor, 30, "the killed supervisor's lock is free")
        return supervisor

    def processes(self) -> list[tuple[int, str]]:
        """Return the pid and command line of each process of this distflow: its folder is in their argv or environment."""
        needle = os.fsencode(str(self.folder))
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                # The command line of a forked supervisor is padded with null bytes.
                held = command = (entry / "cmdline").read_bytes().rstrip(b"\0") + b"\0"
                with suppress(PermissionError):  # its environment cannot be read
                    held += (entry / "environ").read_bytes()
                if needle not in held or (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    continue
            except OSError:
                continue
            found.append((int(entry.name), command.replace(b"\0", b" ").decode(errors="replace")))
        return found


@pytest.fixture
def has_runtime() -> bool:
    """Whether nodes already have the runtime. Tests of the first connection set this to false."""
    return True


@pytest.fixture
def cli(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, has_runtime: bool, request: pytest.FixtureRequest
) -> Iterator[Cli]:
    """A distflow for one test. When the test ends, none of its processes may remain."""
    base, python = tmp_path_factory.getbasetemp(), sys.executable
    if "s3" in request.fixturenames:
        python = str(write_program(tmp_path, base, "storage"))
    made = Cli(tmp_path, base, has_runtime=has_runtime, python=python)
    yield made
    try:
        # A supervisor may still release an allocation of a cluster that was unreachable: Ray has a minute to start its program.
        wait_until(lambda: not made.processes(), 150)
    except TimeoutError:
        remaining = made.processes()
        for pid, _ in remaining:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not remaining, remaining


@pytest.fixture
def forking_rsync(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fork the remote shell of each rsync. A new interpreter would need 0.4 s to import distflow."""
    site = write_site(cli.folder, tmp_path_factory.getbasetemp(), "distflow.client.rsync.shell")
    cli.environment["PYTHONPATH"] = str(site)


@pytest.fixture
def s3(running_s3: S3Server, cli: Cli) -> Iterator[S3Server]:
    """An empty S3 server, with its variables in distflow's environment. The test may stop or suspend it."""
    cli.environment.update(running_s3.environment)
    yield running_s3
    running_s3.reset()


@pytest.fixture
def lab(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A pool ``lab`` of three hosts on loopback addresses: gpu1, gpu2 and gpu3."""
    if why := missing_sshd():
        pytest.skip(why)
    key = make_key(tmp_path_factory.mktemp("key") / "id")
    with ExitStack() as stack:
        servers = {
            f"gpu{i}": stack.enter_context(
                Sshd(tmp_path_factory.mktemp(f"gpu{i}"), f"127.0.1.{i}", alias=f"gpu{i}", user_key=key)
            )
            for i in (1, 2, 3)
        }
        made = Lab(cli, servers)
        try:
            yield made
        finally:
            for server in servers.values():
                server.thaw()
        # The agents end with their connections, and the supervisor ends when no workflow is left.
        made.await_no_processes()


@pytest.fixture
def cluster(cli: Cli, slurm: Slurm) -> Iterator[Cluster]:
    """A pool ``cluster`` on a real Slurm cluster, whose commands are on this machine."""
    made = Cluster(cli, slurm)
    yield made
    made.await_no_jobs()


@pytest.fixture
def far_cluster(cli: Cli, slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The pool ``cluster`` through a login node: an OpenSSH server with Slurm's commands in its ``PATH``."""
    if why := missing_sshd():
        pytest.skip(why)
    key = make_key(tmp_path_factory.mktemp("key") / "id")
    folder = tmp_path_factory.mktemp("login")
    path = f"HOME={folder / 'home'} PATH={slurm.commands}:{os.environ['PATH']}"
    with Sshd(folder, "127.0.1.9", alias="login", user_key=key, options={"SetEnv": path}) as server:
        made = Cluster(cli, slurm, server)
        yield made
        made.await_no_jobs()


@pytest.fixture
def kubernetes_pool(cli: Cli, kubernetes: KubernetesCluster, request: pytest.FixtureRequest) -> Iterator[KubernetesPool]:
    """A pool ``pods``: a namespace of a real Kubernetes cluster."""
    made = KubernetesPool(cli, kubernetes)
    request.node.stash[_POOL] = made
    yield made
    made.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the nodes, pods and events of Kubernetes to the report of a failed test."""
    report = yield
    if report.failed and _POOL in item.stash:
        report.sections.append(("Kubernetes", item.stash[_POOL].state()))
    return report


@pytest.fixture
def ray_pool(cli: Cli, ray: RayCluster) -> Iterator[RayPool]:
    """A pool ``ray`` on a real Ray cluster, which runs on this machine."""
    made = RayPool(cli, ray)
    yield made
    ray.await_empty()


@pytest.fixture
def far_ray_pool(cli: Cli, ray: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayPool]:
    """The pool ``ray`` through an OpenSSH server on a node of the cluster."""
    if why := missing_sshd():
        pytest.skip(why)
    key = make_key(tmp_path_factory.mktemp("key") / "id")
    folder = tmp_path_factory.mktemp("login")
    with Sshd(folder, "127.0.1.8", alias="head", user_key=key, options={"SetEnv": f"HOME={folder / 'home'}"}) as server:
        made = RayPool(cli, ray, server)
        yield made
        ray.await_empty()


@pytest.fixture(params=["ray_pool", pytest.param("far_ray_pool", marks=pytest.mark.ssh)])
def any_ray_pool(request: pytest.FixtureRequest) -> RayPool:
    """Run the test with ``ray_pool``, and again with ``far_ray_pool``."""
    made: RayPool = request.getfixturevalue(request.param)
    return made


@pytest.fixture
def network() -> Iterator[Network]:
    """A network of hosts whose links can be cut."""
    if why := missing_sshd() or missing_netns():
        pytest.skip(why)
    with Network() as made:
        yield made


@pytest.fixture
def hosts(network: Network, tmp_path_factory: pytest.TempPathFactory) -> dict[str, NetnsHost]:
    """Two hosts, gpu1 and gpu2, whose links can be cut. On each host, its own name resolves to 127.0.1.1."""
    key = make_key(tmp_path_factory.mktemp("key") / "id")
    return {
        name: network.host(tmp_path_factory.mktemp(name), hostname=name, alias=name, user_key=key) for name in ("gpu1", "gpu2")
    }


@pytest.fixture
def far_lab(cli: Cli, hosts: dict[str, NetnsHost]) -> Iterator[Lab]:
    """A pool ``lab`` of two hosts whose links can be cut. The links are restored when the test ends."""
    made = Lab(cli, {name: host.sshd for name, host in hosts.items()})
    try:
        yield made
    finally:
        for host in hosts.values():
            host.heal()
    made.await_no_processes()


@pytest.fixture(params=["local", pytest.param("lab", marks=pytest.mark.ssh)])
def any_cli(request: pytest.FixtureRequest, cli: Cli) -> Cli:
    """Run the test with a local pool, and again with ``lab``."""
    if request.param == "lab":
        lab: Lab = request.getfixturevalue("lab")
        return lab.cli
    return cli
