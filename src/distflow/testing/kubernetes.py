"""A real Kubernetes cluster for tests: a script starts it on this machine, or a kubeconfig names an existing one.

``DISTFLOW_TEST_KUBERNETES`` names a directory with the script ``cluster.sh``. ``cluster.sh up DIR N`` starts a cluster with N
nodes, writes ``DIR/kubeconfig``, ``DIR/bin`` with the programs and ``DIR/pids`` with the ids of its daemons, and
``cluster.sh down DIR`` removes it. ``DISTFLOW_TEST_KUBECONFIG`` names the kubeconfig of another cluster.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from distflow.backends.allocated.kubernetes.api import ApiError, KubernetesApi
from distflow.errors import NodeUnreachable
from distflow.pools.model import KubernetesSettings
from distflow.testing.daemons import free_port
from distflow.testing.waiting import is_alive, wait_until

__all__ = [
    "IMAGE", "ApiProxy", "KubernetesCluster", "KubernetesSource", "find_kubernetes", "pod_template", "remove_killed_cluster",
]  # fmt: skip

IMAGE = "docker.io/local/skel:1"
"""An image without programs, which each node of a cluster on this machine has. Its pods mount the host's ``/usr``."""
_NAMESPACES = "/api/v1/namespaces"
_PROGRAMS = ("etcd", "containerd", "runc", "busybox", "openssl", "curl", "xz", "ip")
_PLUGIN = Path("/usr/lib/cni/bridge")
_PACKAGES = "etcd-server containerd runc containernetworking-plugins busybox-static openssl curl xz-utils iproute2"
_LOCK = Path("/tmp/distflow-test-kubernetes.lock")  # noqa: S108  two clusters on one machine would use the same addresses
_DAEMONS = ("etcd", "apiserver", "controllers", "scheduler", "containerd1", "kubelet1", "containerd2", "kubelet2")
"""The daemons of a cluster on this machine, in the order of ``DIR/pids``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSource:
    """The source of a cluster for tests: a script, a kubeconfig, or none."""

    script: Path | None = None
    """``cluster.sh``, which starts a cluster on this machine."""
    kubeconfig: Path | None = None
    """The kubeconfig of an existing cluster."""
    missing: str = ""
    """The reason why tests have no cluster; empty if they have one."""


def find_kubernetes(environ: Mapping[str, str], repository: Path) -> KubernetesSource:
    """Find a source by environment variables, or in the directory ``shared`` next to the ``repository``."""
    named = environ.get("DISTFLOW_TEST_KUBECONFIG")
    if named:
        return KubernetesSource(kubeconfig=Path(named))
    folder = environ.get("DISTFLOW_TEST_KUBERNETES")
    script = (Path(folder) if folder else repository.parent / "shared" / "kubernetes") / "cluster.sh"
    if not script.is_file():
        remedy = "set DISTFLOW_TEST_KUBERNETES or DISTFLOW_TEST_KUBECONFIG"
        return KubernetesSource(missing=f"no Kubernetes cluster: {script} does not exist; {remedy}")
    lacking = [name for name in _PROGRAMS if shutil.which(name) is None] + ([] if _PLUGIN.exists() else [str(_PLUGIN)])
    if lacking:
        return KubernetesSource(missing=f"{', '.join(lacking)} not found: apt-get install {_PACKAGES}")
    if os.geteuid() != 0:
        return KubernetesSource(missing="root is required to start a Kubernetes cluster")
    return KubernetesSource(script=script)


class KubernetesCluster:
    """A cluster that several test processes use at the same time.

    With a script, the first process that enters it starts it, and the last process that leaves it removes it. A test either
    shares the cluster (``shared``) or uses it alone, to stop some of its daemons (``alone``).
    """

    def __init__(self, folder: Path, source: KubernetesSource) -> None:
        """Use ``folder``, which must be the same for all processes that use the cluster."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder / "cluster"
        self.kubeconfig = source.kubeconfig or self.folder / "kubeconfig"
        self.is_own = source.script is not None
        """Whether this machine runs it. Then its daemons can be stopped, and its nodes see the files of this machine."""
        self._script = source.script
        self._users = folder / "users"
        self._users_lock = folder / "counting.lock"
        self._usage_lock = folder / "using.lock"
        self._started: list[subprocess.Popen[bytes]] = []
        self._api: KubernetesApi | None = None

    def __enter__(self) -> KubernetesCluster:
        """Start it if it does not run yet."""
        if self._script is not None:
            with _locked(self._users_lock):
                users = [pid for pid in self._user_pids() if is_alive(pid)]
                if not users:
                    self._up(self._script)
                self._users.write_text("\n".join(map(str, [*users, os.getpid()])))
        return self

    def __exit__(self, *_: object) -> None:
        """Remove it if no other process uses it."""
        if self._api is not None:
            self._api.close()
            self._api = None
        if self._script is not None:
            with _locked(self._users_lock):
                users = [pid for pid in self._user_pids() if is_alive(pid) and pid != os.getpid()]
                self._users.write_text("\n".join(map(str, users)))
                if not users:
                    _down(self._script, self.folder)
                    shutil.rmtree(self.folder, ignore_errors=True)
                    for daemon in self._started:
                        daemon.wait(20)
                for daemon in self._started:
                    daemon.returncode = daemon.returncode or 0  # avoids a ResourceWarning; the last process ends the daemons

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Use it, possibly at the same time as other tests."""
        with _locked(self._usage_lock, fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Use it alone. At the end, stopped daemons are started again."""
        with _locked(self._usage_lock):
            try:
                yield
            finally:
                for name in _DAEMONS:
                    if not self.is_up(name):
                        self.start(name)
                self.wait_for_nodes()

    def kubectl(self, *words: str, stdin: str = "", check: bool = True) -> str:
        """Run ``kubectl`` and return its output. Raises ``RuntimeError`` with its error output."""
        program = self.folder / "bin" / "kubectl" if self.is_own else "kubectl"
        command = [str(program), "--kubeconfig", str(self.kubeconfig), *words]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)
        if check and done.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(words)}: {done.stderr}")
        return done.stdout

    def call(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Call the API server, which takes a tenth of the time of ``kubectl``. ``path`` is absolute."""
        if self._api is None:
            self._api = KubernetesApi(KubernetesSettings(kubeconfig=str(self.kubeconfig)))
        return self._api.call(method, path, query=query, body=body)

    def objects(self, kind: str, namespace: str, *, labels: str = "", api: str = "api/v1") -> list[dict[str, Any]]:
        """Return the objects of a kind, such as ``pods``."""
        path = f"/{api}/namespaces/{namespace}/{kind}"
        found: list[dict[str, Any]] = self.call("GET", path, query={"labelSelector": labels} if labels else None)["items"]
        return found

    def create_namespace(self) -> str:
        """Create a namespace with a random name, and return the name."""
        name = f"distflow-test-{secrets.token_hex(4)}"
        self.call("POST", _NAMESPACES, body={"metadata": {"name": name}})
        return name

    def delete_namespace(self, name: str) -> None:
        """Delete a namespace with everything in it, and wait until its pods are gone."""
        for path in (f"{_NAMESPACES}/{name}/pods", f"{_NAMESPACES}/{name}"):
            with contextlib.suppress(ApiError):
                self.call("DELETE", path, body={"gracePeriodSeconds": 0})
        wait_until(lambda: not self.objects("pods", name), 60, f"no pods in {name}")

    def add_resource(self, name: str, amount: int) -> None:
        """Make each node offer an extended resource, such as GPUs, without real devices."""

        def offers(node_name: str) -> bool:
            node = self.call("GET", f"/api/v1/nodes/{node_name}")
            if node["status"]["capacity"].get(name) == str(amount):
                return True
            for kind in ("capacity", "allocatable"):
                node["status"][kind][name] = str(amount)
            with contextlib.suppress(ApiError):  # the kubelet may have changed the node in the meantime
                self.call("PUT", f"/api/v1/nodes/{node_name}/status", body=node)
            return False

        for node_name in self._ready_nodes():
            wait_until(partial(offers, node_name), 60, f"{node_name} offers {name}")

    def wait_for_nodes(self, timeout_s: float = 90.0) -> None:
        """Wait until all nodes are ready."""

        def are_ready() -> bool:
            with contextlib.suppress(NodeUnreachable, ApiError):
                nodes = self._ready_nodes()
                return bool(nodes) and all(nodes.values())
            return False

        wait_until(are_ready, timeout_s, "all nodes are ready")

    def _ready_nodes(self) -> dict[str, bool]:
        """Return whether each node is ready and accepts pods."""

        def is_ready(node: Mapping[str, Any]) -> bool:
            conditions = {one["type"]: one["status"] for one in node["status"].get("conditions", ())}
            return conditions.get("Ready") == "True" and not node["spec"].get("unschedulable")

        return {node["metadata"]["name"]: is_ready(node) for node in self.call("GET", "/api/v1/nodes")["items"]}

    def is_up(self, name: str) -> bool:
        """Return whether a daemon runs."""
        return is_alive(self._pid(name))

    def stop(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """End a daemon: ``apiserver``, ``controllers``, ``scheduler``, ``kubelet1`` and so on."""
        pid = self._pid(name)
        arguments, where = Path(f"/proc/{pid}/cmdline").read_bytes(), os.readlink(f"/proc/{pid}/cwd")
        (self.folder / f"{name}.start").write_text(json.dumps([where, arguments.decode().split("\0")[:-1]]))
        os.kill(pid, number)
        wait_until(lambda: not is_alive(pid), 20, f"{name} has ended")

    def start(self, name: str) -> None:
        """Restart a daemon that ``stop`` has ended."""
        where, arguments = json.loads((self.folder / f"{name}.start").read_text())
        with (self.folder / "log" / f"{name}.log").open("ab") as log:
            program = shutil.which(arguments[0], path=f"{self.folder / 'bin'}:{os.environ['PATH']}")
            started = subprocess.Popen(
                arguments,
                executable=program,
                cwd=where,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(started)
        pids = self.folder / "pids"
        lines = pids.read_text().split()
        lines[_DAEMONS.index(name)] = str(started.pid)
        pids.write_text("\n".join(lines) + "\n")

    def _pid(self, name: str) -> int:
        return int((self.folder / "pids").read_text().split()[_DAEMONS.index(name)])

    def _user_pids(self) -> list[int]:
        return [int(word) for word in self._users.read_text().split()] if self._users.exists() else []

    def _up(self, script: Path) -> None:
        # The processes that the script starts inherit this lock, which is therefore held until they have ended.
        lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(lock).st_uid != os.geteuid():
                raise RuntimeError(
                    f"no cluster was started: the lock file {_LOCK} belongs to another user, so the directory that it names is "
                    "not trusted. If no tests of that user run, remove the file as root"
                )
            _await_other_cluster(script, lock)
            remove_killed_cluster(script, lock)
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps({"pid": os.getpid(), "folder": str(self.folder)}).encode(), 0)
            self.folder.mkdir()
            (self.folder / "port").write_text(str(free_port("", 20)))
            code = _run(script, "up", self.folder, "2", pass_fds=[lock])
        finally:
            os.close(lock)
        if code != 0:
            _down(script, self.folder)
            log = (self.folder / "script.log").read_text()
            raise RuntimeError(f"the Kubernetes cluster did not start: {log[-2000:]}; logs: {self.folder}/log")


class ApiProxy:
    """A proxy for the API server, which counts calls and can cut connections. It has its own kubeconfig.

    Clients connect to it without TLS, so it can read their requests.
    """

    _REQUEST = re.compile(rb"([A-Z]+) (?:/apis?/[^? ]*?/namespaces/[^/ ]+)?(/[^? ]*)\S* HTTP/1\.1\r\n")

    def __init__(self, cluster: KubernetesCluster, folder: Path) -> None:
        """Write ``proxy.kubeconfig`` to ``folder``."""
        self.calls: Counter[str] = Counter()
        """The number of calls of each kind, such as ``GET pods``."""
        self.kubeconfig = folder / "proxy.kubeconfig"
        config = json.loads(cluster.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
        target = config["clusters"][0]["cluster"]
        authority = target.get("certificate-authority-data")
        self._tls = ssl.create_default_context(cadata=base64.b64decode(authority).decode() if authority else None)
        if target.get("insecure-skip-tls-verify"):
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._upstream = urlsplit(target["server"])
        self._loop = asyncio.new_event_loop()
        self._open: set[asyncio.StreamWriter] = set()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        port = self._server.sockets[0].getsockname()[1]
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{port}"}
        self.kubeconfig.write_text(json.dumps(config))
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> ApiProxy:
        """Start accepting connections."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Cut all connections and stop accepting new ones."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def cut(self) -> None:
        """Abort all connections."""
        self._loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        for one in self._open:
            one.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = {writer}
        self._open.add(writer)
        try:
            upstream = await asyncio.open_connection(self._upstream.hostname, self._upstream.port or 443, ssl=self._tls)
            writers.add(upstream[1])
            pairs = self._copy(reader, upstream[1], is_request=True), self._copy(upstream[0], writer)
            await asyncio.wait([asyncio.ensure_future(one) for one in pairs], return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # the client sees a closed connection, as it does when the API server is down
        finally:
            self._open.discard(writer)
            for one in writers:
                one.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_request: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(64 * 1024):
                if is_request and (found := self._REQUEST.match(data)):
                    method, path = found[1].decode(), found[2].decode().strip("/").split("/")
                    self.calls[f"{method} {'/'.join([path[0], *path[2:]])}"] += 1  # in a namespace: without the object's name
                writer.write(data)
                await writer.drain()


def pod_template(*folders: str) -> dict[str, Any]:
    """Return a pod template for ``IMAGE``. Its pods mount the programs and these folders of this machine."""
    shared = dict.fromkeys(("/usr", sys.base_prefix, os.path.dirname(os.path.dirname(sys.executable)), *folders))
    names = {f"shared-{number}": path for number, path in enumerate(shared)}
    mounts = [{"name": name, "mountPath": path} for name, path in names.items()]
    volumes = [{"name": name, "hostPath": {"path": path}} for name, path in names.items()]
    # The cluster has no DNS server. With the default settings, each lookup of a name would take several seconds.
    no_dns = {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}
    return {"spec": {"containers": [{"imagePullPolicy": "Never", "volumeMounts": mounts}], "volumes": volumes, **no_dns}}


def _await_other_cluster(script: Path, lock: int) -> None:
    """Lock the open file ``lock``. While another test cluster runs on this machine, it holds the lock, so wait for its end.

    Remove the other cluster if the process that started it has ended.
    """

    def is_free() -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with contextlib.suppress(ValueError, KeyError):
                other = json.loads(os.pread(lock, 4096, 0))
                if not is_alive(int(other["pid"])):
                    _down(script, Path(other["folder"]))
            return False
        return True

    wait_until(is_free, 900, "no other test cluster runs on this machine")


def remove_killed_cluster(script: Path, lock: int) -> None:
    """Remove the remains of the cluster named in the open file ``lock``, if there are any.

    The caller holds the lock, so all daemons of the cluster have ended. Its network bridges have the addresses of the next
    cluster, whose nodes could therefore not reach each other.
    """
    try:
        folder = Path(json.loads(os.pread(lock, 4096, 0))["folder"])
        if os.lstat(folder).st_uid != os.geteuid():
            return  # another user has created a folder of this name
        (folder / "pids").write_text("")  # the daemons have ended, and other processes may have their ids now
    except (OSError, ValueError, KeyError, TypeError):
        return  # it was removed
    _down(script, folder)
    shutil.rmtree(folder, ignore_errors=True)


def _down(script: Path, folder: Path) -> None:
    """Remove a cluster, with the network namespaces of its pods and the processes of containers that no kubelet has stopped."""
    namespaces = _network_namespaces(folder)
    _run(script, "down", folder)
    for pid in _processes_in_containers(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for name in namespaces:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False)


def _run(script: Path, action: str, folder: Path, *words: str, pass_fds: Sequence[int] = ()) -> int:
    """Run the script, whose output is appended to ``script.log``, and return its exit code."""
    command = ["bash", str(script), action, str(folder), *words]
    # The script uses the port also in the names of network bridges, which `down` must find again.
    environment = {**os.environ, "PORT": (folder / "port").read_text()}
    with (folder / "script.log").open("ab") as log:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=150,
            pass_fds=pass_fds,
            check=False,
        )
    return done.returncode


def _processes_in_containers(folder: Path) -> list[int]:
    """Return the ids of the processes in the cluster's containers."""
    found = []
    for mounts in Path("/proc").glob("[0-9]*/mountinfo"):
        with contextlib.suppress(OSError):
            lines = mounts.read_text().splitlines()
            if any(line.split()[4] == "/" and f"upperdir={folder.resolve()}/" in line for line in lines):
                found.append(int(mounts.parent.name))
    return found


def _network_namespaces(folder: Path) -> set[str]:
    """Return the names of the network namespaces of the cluster's pods."""
    found = set()
    for spec in folder.glob("node*/state/io.containerd.runtime.v2.task/k8s.io/*/config.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            for one in json.loads(spec.read_text())["linux"]["namespaces"]:
                path = Path(one.get("path", ""))
                if one["type"] == "network" and path.name.startswith("cni-"):
                    found.add(path.name)
    return found


@contextlib.contextmanager
def _locked(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, kind)
        yield
