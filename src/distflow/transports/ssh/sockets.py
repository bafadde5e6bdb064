"""The sockets of SSH connections: a TCP connection, or the process of a ``ProxyCommand``."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from distflow.transports.base import Deadline
from distflow.transports.ssh.config import SshConfigError, SshDestination, SshHost, resolve_destination

__all__ = ["ProxyProcess", "addresses_of", "connect_tcp", "unknown_names"]

_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
_TAIL = 2000
_LOOK_UP_S = 2.0
_LOOK_UPS_AT_ONCE = 16
"""Maximum number of names that are looked up at the same time."""


def connect_tcp(host: SshHost, deadline: Deadline) -> socket.socket:
    """Connect to the first address of the host that accepts a connection. Raises ``OSError``."""
    error: OSError | None = None
    addresses = _resolve(host, deadline)
    for number, (family, kind, protocol, address) in enumerate(addresses):
        connection = socket.socket(family, kind, protocol)
        try:
            # Leave a share of the time to the remaining addresses.
            connection.settimeout(max(0.05, deadline.left() / (len(addresses) - number)))
            if host.bind_address is not None:
                connection.bind((host.bind_address, 0))
            connection.connect(address)
        except OSError as failure:
            connection.close()
            error = error or failure
            continue
        _tune(connection, host)
        return connection
    raise error or socket.gaierror(socket.EAI_NONAME, "no address")


def addresses_of(host: SshHost) -> tuple[str, ...]:
    """Return the addresses of a host behind a jump host or proxy; empty if this machine cannot resolve its name in 2 s."""
    try:
        found = _resolve(host, Deadline(_LOOK_UP_S))
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def unknown_names(destinations: Sequence[SshDestination]) -> list[str | None]:
    """Return for each destination its host name if no name service knows this name, else ``None``.

    A destination behind a jump host or a ``ProxyCommand`` is ``None``, because the jump host or proxy resolves its name. A
    destination is also ``None`` if its configuration is invalid, or if the lookup of its name failed for another reason. All
    lookups together have 2 s, and a destination whose lookup has not ended by then is ``None`` too.
    """
    deadline = Deadline(_LOOK_UP_S)
    found: list[str | None] = [None] * len(destinations)
    numbers = iter(range(len(destinations)))
    lock = threading.Lock()

    def look_up() -> None:
        while not deadline.has_passed:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            found[number] = _unknown_name(destinations[number], deadline)

    threads = [
        threading.Thread(target=look_up, name="host names", daemon=True)
        for _ in range(min(_LOOK_UPS_AT_ONCE, len(destinations)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline.left())
    return list(found)


def _unknown_name(destination: SshDestination, deadline: Deadline) -> str | None:
    """Return the host name if it certainly does not exist."""
    try:
        host = resolve_destination(destination)
        if not host.proxy_jump and host.proxy_command is None:
            _resolve(host, deadline)
    except socket.gaierror as error:
        return host.hostname if error.errno == socket.EAI_NONAME else None
    except (SshConfigError, OSError):
        return None
    return None


def _tune(connection: socket.socket, host: SshHost) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if host.keepalive_s > 0 and hasattr(socket, "TCP_USER_TIMEOUT"):
        # Without an acknowledgment for this time, the connection ends. The default of TCP is 15 minutes.
        timeout_ms = int(host.keepalive_s * max(1, host.keepalive_count) * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def _resolve(host: SshHost, deadline: Deadline) -> list[tuple[int, int, int, Any]]:
    family = _FAMILIES.get(host.address_family, socket.AF_UNSPEC)

    def look_up() -> list[tuple[int, int, int, Any]]:
        found = socket.getaddrinfo(host.hostname, host.port, family, socket.SOCK_STREAM)
        return [(one[0], one[1], one[2], one[4]) for one in found]

    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.hostname)
        return look_up()
    # getaddrinfo() has no timeout.
    answer: queue.SimpleQueue[list[tuple[int, int, int, Any]] | OSError] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            answer.put(look_up())
        except OSError as error:
            answer.put(error)
        except UnicodeError:
            answer.put(socket.gaierror(socket.EAI_NONAME, "invalid host name"))

    threading.Thread(target=resolve, name=f"address of {host.hostname}", daemon=True).start()
    try:
        found = answer.get(timeout=deadline.left())
    except queue.Empty:
        raise socket.gaierror(socket.EAI_AGAIN, f"no answer within {deadline.seconds:g} s") from None
    if isinstance(found, OSError):
        raise found
    return found


class ProxyProcess:
    """A ``ProxyCommand``, which the user's shell runs, as a socket.

    paramiko's own ``ProxyCommand`` runs no shell, spins when the command ends, and leaves a zombie process.
    """

    def __init__(self, command: str) -> None:
        """Start the command. Raises ``OSError``."""
        self.command = command
        self.socket, theirs = socket.socketpair()
        shell = os.environ.get("SHELL") or "/bin/sh"
        try:
            # A separate session, so that one signal ends all processes that the shell starts.
            self._process = subprocess.Popen(
                [shell, "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()
        self._stderr = b""
        self._drain = threading.Thread(target=self._drain_stderr, name="ProxyCommand", daemon=True)
        self._drain.start()

    @property
    def stderr_tail(self) -> str:
        """The end of its standard error, for messages."""
        self._drain.join(0.2)
        return self._stderr.decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Send SIGTERM to the command and its child processes, and SIGKILL if the command then does not end.

        May be called twice, and never raises.
        """
        with contextlib.suppress(OSError):
            self.socket.close()
        if self._process.returncode is not None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, number)
            try:
                self._process.wait(1.0)
                break
            except subprocess.TimeoutExpired:
                continue
        self._drain.join(0.5)

    def _drain_stderr(self) -> None:
        if self._process.stderr is None:
            return
        with self._process.stderr as pipe:
            while data := os.read(pipe.fileno(), 4096):
                self._stderr = (self._stderr + data)[-_TAIL:]
