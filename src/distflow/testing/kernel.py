"""Test hosts in network namespaces, and memory cgroups for tests. Both need root.

Tests can cut and restore the link of a host, and drop packets on it.
Names of hosts and bridges contain the id of the test process. Concurrent test runs therefore do not collide, and the next
run recognizes and removes those of a killed run.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

from distflow.testing.sshd import Sshd
from distflow.testing.waiting import wait_until

__all__ = ["MemoryCgroup", "NetnsHost", "Network", "missing_cgroups", "missing_netns"]


_PREFIX = "dfn"
_NAMES = re.compile(rf"^{_PREFIX}[bvh]([0-9a-f]+)(?:-\d+)?$")
_NETWORKS = itertools.count(1)
"""The numbers of this process's networks."""
_LOCK = "/tmp/distflow-netns.lock"  # noqa: S108  shared by all test runs of the machine


def missing_netns() -> str:
    """Return the reason why network namespaces are not available here; empty if they are."""
    if os.getuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "ip not found: apt-get install iproute2"
    probe = f"{_PREFIX}h{os.getpid():x}-0"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False, timeout=30)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False, timeout=30)
    return "" if made.returncode == 0 else f"no network namespaces here: {made.stderr.decode().strip()}"


class Network:
    """A context manager for a bridge and its hosts. It also removes the leftovers of killed test runs."""

    def __init__(self) -> None:
        """Create nothing yet."""
        number = next(_NETWORKS)
        self._id = f"{os.getpid():x}-{number}"
        self.bridge = f"{_PREFIX}b{self._id}"
        self._subnet = ""
        self._numbers = itertools.count(1)
        self._hosts: list[NetnsHost] = []

    def __enter__(self) -> Network:
        """Create the bridge."""
        _take_down_leftovers()
        with open(_LOCK, "w") as lock:
            # Two test runs must not choose the same subnet.
            fcntl.flock(lock, fcntl.LOCK_EX)
            used = _ip("-j", "addr")
            self._subnet = next(f"10.76.{number}" for number in range(256) if f'"10.76.{number}.' not in used)
            _ip("link", "add", self.bridge, "type", "bridge")
            _ip("addr", "add", f"{self._subnet}.254/24", "dev", self.bridge)
            _ip("link", "set", self.bridge, "up")
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hosts and the bridge."""
        for host in self._hosts:
            host.close()
        _ip("link", "del", self.bridge, check=False)

    def host(self, directory: Path, *, hostname: str = "", behind: NetnsHost | None = None, **options: object) -> NetnsHost:
        """Add a host with a running sshd; ``options`` are options of ``Sshd``.

        With ``hostname``, the host has its own name, which resolves to 127.0.1.1 on the host, as in a Debian installation. A
        host that is ``behind`` another one shares a network only with that one and with other hosts behind it.
        """
        number = next(self._numbers)
        host = NetnsHost(self, f"{self._id}{number:02}", f"{self._subnet}.{number}", directory, options, hostname)
        self._hosts.append(host)
        if behind is None:
            host.open(self.bridge)
        else:
            host.address = f"{self._subnet.replace('10.76.', '10.77.')}.{number}"
            host.open(behind.inner_bridge(f"{self._subnet.replace('10.76.', '10.77.')}.254"), behind.namespace)
        return host


class NetnsHost:
    """A host with its own network stack. It shares the file system of the machine, and by default also the hostname."""

    def __init__(
        self, network: Network, name: str, address: str, directory: Path, options: dict[str, object], hostname: str = ""
    ) -> None:
        """Create nothing yet."""
        self.address = address
        self.hostname = hostname
        self.namespace = f"{_PREFIX}h{name}"
        self._link = f"{_PREFIX}v{name}"
        self._network = network
        self._directory = directory
        self._options = options
        self._sshd: Sshd | None = None
        self._has_inner = False

    @property
    def sshd(self) -> Sshd:
        """The sshd of the host, which is running."""
        if self._sshd is None:
            raise RuntimeError("the host has no running sshd: call `open` first")
        return self._sshd

    def open(self, bridge: str, bridge_namespace: str = "") -> None:
        """Create the namespace, connect it to ``bridge`` in ``bridge_namespace`` (empty: this machine), and start its sshd."""
        namespace, link, in_bridge = self.namespace, self._link, ("-n", bridge_namespace) if bridge_namespace else ()
        _ip("netns", "add", namespace)
        _ip(*in_bridge, "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip(*in_bridge, "link", "set", link, "master", bridge, "up")
        _ip("-n", namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        # With a permanent neighbor entry, packets to a host that is cut off are lost; otherwise "no route" follows after 3 s.
        mac = json.loads(_ip("-n", namespace, "-j", "link", "show", "eth0"))[0]["address"]
        _ip(*in_bridge, "neigh", "replace", self.address, "lladdr", mac, "dev", bridge, "nud", "permanent")
        options = {"port": 22, "alias": namespace, "is_reachable": not bridge_namespace, **self._options}
        self._sshd = Sshd(self._directory, self.address, prefix=self._sshd_prefix(), **options)  # type: ignore[arg-type]
        self._sshd.start()

    def inner_bridge(self, address: str) -> str:
        """Return the bridge of the network behind this host. The first call creates it; this host gets ``address`` there."""
        if not self._has_inner:
            self._has_inner = True
            _ip("-n", self.namespace, "link", "add", "inner", "type", "bridge")
            _ip("-n", self.namespace, "addr", "add", f"{address}/24", "dev", "inner")
            _ip("-n", self.namespace, "link", "set", "inner", "up")
        return "inner"

    def _sshd_prefix(self) -> Sequence[str]:
        if not self.hostname:
            return self.prefix
        self._directory.mkdir(parents=True, exist_ok=True)
        hosts = self._directory / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.hostname}\n")
        # Both namespaces end with the server and its commands.
        script = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
        return (*self.prefix, "unshare", "--uts", "--mount", "sh", "-c", script, "sh", self.hostname, str(hosts))

    @property
    def prefix(self) -> Sequence[str]:
        """The words before a command that make it run on this host."""
        return ("ip", "netns", "exec", self.namespace)

    def add_interface(self, name: str, address: str) -> None:
        """Add an unconnected interface, as container engines do."""
        _ip("-n", self.namespace, "link", "add", name, "type", "bridge")
        _ip("-n", self.namespace, "addr", "add", f"{address}/24", "dev", name)
        _ip("-n", self.namespace, "link", "set", name, "up")

    def cut(self) -> None:
        """Drop every packet in both directions. Senders on other hosts get no error."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")

    def heal(self) -> None:
        """Undo ``cut``, but not ``lose``."""
        _ip("-n", self.namespace, "link", "set", "eth0", "up")

    def lose(self, percent: float) -> None:
        """Drop this percentage of packets at random, in both directions. Raises ``OSError`` if iptables fails."""
        for chain in ("INPUT", "OUTPUT"):
            rule = ["-A", chain, "-m", "statistic", "--mode", "random", "--probability", f"{percent / 100:g}", "-j", "DROP"]
            done = subprocess.run(
                [*self.prefix, "iptables", "-w", *rule], capture_output=True, check=False, text=True, timeout=30
            )
            if done.returncode != 0:
                raise OSError(done.stderr.strip())

    def close(self) -> None:
        """Remove the host. May be called twice."""
        if self._sshd is not None:
            self._sshd.stop()
        _ip("link", "del", self._link, check=False)
        _ip("netns", "del", self.namespace, check=False)


def _ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=60)
    if check and done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _take_down_leftovers() -> None:
    """Remove the namespaces and links of test processes that have ended, with the processes in the namespaces."""
    spaces = [line.split()[0] for line in _ip("netns", "list", check=False).splitlines() if line.strip()]
    links = [str(link.get("ifname", "")) for link in json.loads(_ip("-j", "link", check=False) or "[]")]
    for name in (*spaces, *links):
        found = _NAMES.match(name)
        if found is None or Path(f"/proc/{int(found[1], 16)}").exists():
            continue
        with contextlib.suppress(OSError):
            if name in spaces:
                for pid in _ip("netns", "pids", name, check=False).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), 9)
                _ip("netns", "del", name)
            else:
                _ip("link", "del", name)


_ROOTS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)


class MemoryCgroup:
    """A memory cgroup for one test. A process enters it by writing its id into ``procs``."""

    def __init__(self, limit: int) -> None:
        """Create a cgroup with a limit of ``limit`` bytes."""
        root, setting = next((root, setting) for root, setting in _ROOTS if _can_be_used(root))
        self.path = root / f"distflow-test-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()
        (self.path / setting).write_text(str(limit))
        self.procs = self.path / "cgroup.procs"

    def close(self) -> None:
        """Wait until its processes have ended, and remove it."""
        wait_until(lambda: not self.procs.read_text().strip(), 30)
        self.path.rmdir()


def missing_cgroups() -> str:
    """Return the reason why memory limits cannot be created or the kernel's log cannot be read; empty if both are possible."""
    if os.getuid() != 0:
        return "cgroups need root"
    if not any(_can_be_used(root) for root, _ in _ROOTS):
        return "no memory cgroup is writable"
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return "the kernel's log cannot be read"
    return ""


def _can_be_used(root: Path) -> bool:
    if root.name == "memory":
        return os.access(root / "cgroup.procs", os.W_OK)
    controllers = root / "cgroup.subtree_control"
    return controllers.exists() and "memory" in controllers.read_text().split() and os.access(root, os.W_OK)
