"""A real OpenSSH server for tests, with its own keys and configuration, at any address. It needs no privileges.

A server that the main thread started ends with the test process.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from distflow.testing.daemons import DAEMON_PATH, free_port, start_daemon
from distflow.testing.waiting import wait_until

__all__ = ["Sshd", "make_key", "missing_sshd"]


def missing_sshd() -> str:
    """Return the reason why no server can be started here; empty if one can."""
    lacking = [program for program in ("sshd", "ssh-keygen") if shutil.which(program, path=DAEMON_PATH) is None]
    return f"{' and '.join(lacking)} not found: apt-get install openssh-server" if lacking else ""


def make_key(path: Path, *, kind: str = "ed25519", passphrase: str = "", comment: str = "test") -> Path:
    """Generate a key pair at ``path`` and ``path.pub``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # An RSA key of the default size takes seconds to generate.
    size = ["-b", "2048"] if kind == "rsa" else []
    command = ["ssh-keygen", "-q", "-t", kind, *size, "-N", passphrase, "-C", comment, "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=60)
    return path


class Sshd:
    """A context manager for one server.

    The server accepts ``user_key``, which is created next to the host keys if it is not given. ``client_config`` and
    ``known_hosts`` are files for a client that connects to ``alias``. ``home`` is the value of HOME in sessions.
    """

    def __init__(
        self,
        directory: Path,
        address: str = "127.0.0.1",
        *,
        alias: str = "node",
        port: int | None = None,
        user_key: Path | None = None,
        key_kinds: Sequence[str] = ("ed25519",),
        options: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        is_reachable: bool = True,
    ) -> None:
        """Create keys and files without starting the server.

        ``options`` are lines of ``sshd_config``. ``prefix`` comes before the server's command (``ip netns exec …``).
        ``is_reachable`` is false if this process cannot connect to the server.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.address = address
        self.alias = alias
        self.port = port or free_port(address if not prefix else "127.0.0.1")
        self.user = pwd.getpwuid(os.getuid()).pw_name
        self.user_key = user_key or make_key(directory / "user_key")
        self.host_keys = {kind: make_key(directory / f"host_{kind}", kind=kind) for kind in key_kinds}
        self.client_config = directory / "ssh_config"
        self.known_hosts = directory / "known_hosts"
        self.log = directory / "sshd.log"
        self.home = directory / "home"
        self.home.mkdir(exist_ok=True)
        self._options = dict(options or {})
        self._prefix = list(prefix)
        self._is_reachable = is_reachable
        self._log_read = 0
        self._config = directory / "sshd_config"
        self._authorized = directory / "authorized_keys"
        self._process: subprocess.Popen[bytes] | None = None
        self._authorized.write_text(self.user_key.with_name(f"{self.user_key.name}.pub").read_text())
        self.known_hosts.write_text("".join(self.known_lines()))
        self.client_config.write_text(self.client_stanza())

    def __enter__(self) -> Sshd:
        """Start."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    @property
    def known_name(self) -> str:
        """The server's name in known_hosts."""
        return self.address if self.port == 22 else f"[{self.address}]:{self.port}"

    def known_lines(self, name: str | None = None) -> list[str]:
        """Return the lines of known_hosts with the server's keys, for ``known_name`` or another ``name`` of the server."""
        keys = [path.with_name(f"{path.name}.pub").read_text().split() for path in self.host_keys.values()]
        return [f"{name or self.known_name} {key[0]} {key[1]}\n" for key in keys]

    def client_stanza(self, **options: str) -> str:
        """Return a ``Host`` block with which a client can log in. ``options`` override settings; an empty value removes one."""
        settings = {
            "HostName": self.address,
            "Port": str(self.port),
            "User": self.user,
            "IdentityFile": str(self.user_key),
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "UserKnownHostsFile": str(self.known_hosts),
            "GlobalKnownHostsFile": "none",
            **options,
        }
        return f"Host {self.alias}\n" + "".join(f"  {key} {value}\n" for key, value in settings.items() if value)

    def authorize(self, public_key: Path) -> None:
        """Accept another key, given as the path of its public part."""
        with self._authorized.open("a") as file:
            file.write(public_key.read_text())

    def start(self) -> None:
        """Run the server, and wait until it answers."""
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self._config.write_text(self._server_config())
        sshd = shutil.which("sshd", path=DAEMON_PATH)
        if sshd is None:
            raise FileNotFoundError(missing_sshd())
        self._log_read = self.log.stat().st_size if self.log.exists() else 0
        self._process = start_daemon([*self._prefix, sshd, "-D", "-e", "-f", str(self._config)], self.log)
        wait_until(self._answers, 20.0, f"sshd at {self.known_name} answers; its log: {self.log}")

    def stop(self, *, sessions: bool = True) -> None:
        """End the server, and by default its connections. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        served = _descendants(process.pid) if sessions else []
        for pid in (process.pid, *served):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(60)

    def restart(self) -> None:
        """End it with all connections, and start it again at the same address with the same keys."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        """Suspend sshd, but not the commands of sessions: the kernel still accepts connections, but sshd does not respond."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume it."""
        self._signal(signal.SIGCONT)

    def connections(self) -> int:
        """Return the number of its connections, including logins in progress."""
        return len(_children(self._process.pid)) if self._process is not None else 0

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            # Signal only the processes of sshd, not the commands of sessions.
            for pid in (self._process.pid, *_descendants(self._process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _answers(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError(f"sshd ended: {self.log.read_text()[-2000:]}")
        if not self._is_reachable:
            return b"Server listening on" in self.log.read_bytes()[self._log_read :]
        try:
            with socket.create_connection((self.address, self.port), timeout=1) as probe:
                return probe.recv(4) == b"SSH-"
        except OSError:
            return False

    def _server_config(self) -> str:
        settings: dict[str, str] = {
            "Port": str(self.port),
            "ListenAddress": self.address,
            "AuthorizedKeysFile": str(self._authorized),
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PermitRootLogin": "yes",
            "PermitUserRC": "no",
            "PrintMotd": "no",
            "PrintLastLog": "no",
            "UseDNS": "no",
            "MaxStartups": "500",
            "MaxSessions": "500",
            "LogLevel": "VERBOSE",
            "Subsystem": "sftp internal-sftp",
            # A separate home, because the start-up files of the real user's shell may be slow or print text.
            "SetEnv": f"HOME={self.home}",
            **self._options,
        }
        keys = "".join(f"HostKey {path}\n" for path in self.host_keys.values())
        return keys + "".join(f"{key} {value}\n" for key, value in settings.items())


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def _descendants(pid: int) -> list[int]:
    """Return the ids of the sshd processes below ``pid``, without the commands of sessions."""
    found: list[int] = []
    for child in _children(pid):
        if _name(child) in ("sshd", "sshd-auth", "sshd-session"):  # the last two since OpenSSH 10.0 and 9.8
            found += [child, *_descendants(child)]
    return found
