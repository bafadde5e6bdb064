"""Run commands on a machine over SSH: their arguments, pipes and exit codes."""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
from collections.abc import Callable, Sequence

import paramiko

from distflow.errors import NodeUnreachable
from distflow.shell import quote
from distflow.transports.base import Completed, Deadline, command_closed, tail_with_reason
from distflow.transports.shared_connection import SharedConnection
from distflow.transports.ssh.config import SshDestination
from distflow.transports.ssh.connection import SshConnection
from distflow.transports.ssh.paramiko_adapter import SSH_ERRORS, convert_ssh_errors

__all__ = ["SshChannel", "SshDestination", "SshStream", "SshTransport", "remote_command", "run_to_end"]


class SshTransport:
    """Runs commands over one SSH connection (contract: ``transports.base.Transport``).

    1. The first call connects. After the connection breaks, the next call connects again.
    2. Threads that need the connection at the same time share one connection attempt and its outcome.
    3. ``HostKeyUnknown``, ``HostKeyMismatch`` and ``AuthenticationRefused`` need an action of a person; other errors may be
       temporary.
    4. After ``close``, every new call raises ``NodeUnreachable``. A call that waits for a connection attempt raises that or the
       error of the attempt.
    """

    def __init__(self, name: str, destination: SshDestination) -> None:
        """``name`` is the node's name in messages."""
        self.name = name
        self.destination = destination
        self._shared = SharedConnection(name, lambda: SshConnection(name, destination))

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Completed:
        """Run a command to its end; ``timeout_s`` includes the time to connect."""
        deadline = Deadline(timeout_s)
        return run_to_end(self._shared.get(deadline), argv, input, deadline)

    def open(self, argv: Sequence[str]) -> SshChannel:
        """Start a command and keep a channel to it."""
        connection = self._shared.get(None)
        return SshChannel(connection, connection.execute(remote_command(argv), Deadline(connection.connect_timeout_s)))

    def dial(self, port: int, *, timeout_s: float) -> SshStream:
        """Connect to a TCP port of the node, through the connection."""
        deadline = Deadline(timeout_s)
        connection = self._shared.get(deadline)
        return SshStream(connection, connection.dial(port, deadline))

    def hang_up(self) -> None:
        """Drop the connection; the next call connects again."""
        self._shared.drop()

    def close(self) -> None:
        """Close the connection for good. Remote processes continue."""
        self._shared.close()

    @property
    def reached_address(self) -> str | None:
        """The address that SSH reached; ``None`` without a connection, and behind jump hosts and proxies."""
        connection = self._shared.current
        return connection.address if connection is not None else None

    @property
    def named_addresses(self) -> tuple[str, ...]:
        """Behind jump hosts and proxies: the addresses of the host's name, if this machine can resolve it."""
        connection = self._shared.current
        return connection.named_addresses if connection is not None else ()


_READ = 65536
_BULK = 1 << 20
_PACKET = 32000
"""paramiko copies the whole remaining buffer for each packet, so larger pieces are slower."""
_TAIL = 16384
_DRAIN_TIMEOUT_S = 2.0
_CLOSE_S = 1.0
_LATE_S = 2.0
"""Time limit for each step of killing a late command: finding its process, starting ``kill``, waiting for ``kill``.

Also the extra time for the start of a command, and the shortest time limit for its exit status after the end of its output.
"""
_KILL_S = 3 * _LATE_S
# Matches all characters except those that are literal between double quotes in sh, and between single quotes in bash, zsh, fish
# and csh.
_SPECIAL = re.compile(rb"[^A-Za-z0-9 _%+=:,./@<>()\[\]{}*?#&;|~^-]")


class SshChannel:
    """A command's pipes (contract: ``transports.base.Channel``)."""

    def __init__(self, connection: SshConnection, channel: paramiko.Channel) -> None:
        """Use ``channel``, in which a command has been started."""
        self._connection = connection
        self._channel = channel
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self._state = threading.Lock()
        self._stderr = bytearray()
        self._is_closed = False
        self._drain = threading.Thread(target=self._drain_stderr, name=f"stderr of {connection.node}", daemon=True)
        self._drain.start()

    def write(self, data: bytes) -> None:
        """Send ``data`` to the command's standard input."""
        with self._writing, convert_ssh_errors(self._connection.node, self._connection.endpoint, "writing to a command"):
            if self._is_closed:
                raise command_closed(self._connection.node)
            with self._connection.on_behalf_of(self._channel):
                _send(self._connection, self._channel, data)

    def read(self) -> bytes:
        """Wait for output and return up to 64 KiB of it."""
        with self._reading:
            if self._is_closed:
                return b""
            data = b""
            # recv() may also send a window update, which fails if the connection has just broken.
            with contextlib.suppress(*SSH_ERRORS), self._connection.on_behalf_of(self._channel):
                data = self._channel.recv(_READ)
            if not data:
                self._drain.join(_DRAIN_TIMEOUT_S)
                # The exit code arrives after the end of the output.
                self._channel.status_event.wait(_CLOSE_S)
            return data

    def stderr_tail(self) -> str:
        """The end of the command's standard error, and why the connection broke if it did."""
        with self._state:
            tail = bytes(self._stderr[-_TAIL:]).decode("utf-8", "replace")
        return tail_with_reason(tail, "" if self._is_closed else self._connection.end_reason())

    @property
    def exit_code(self) -> int | None:
        """The command's exit code; ``None`` while it runs, or if the connection broke first."""
        return self._channel.exit_status if self._channel.exit_status >= 0 else None

    def close(self) -> None:
        """Close the pipes; the command continues."""
        with self._state:
            if self._is_closed:
                return
            self._is_closed = True
        _close_channel(self._connection, self._channel, self._channel.close)

    def _drain_stderr(self) -> None:
        with contextlib.suppress(*SSH_ERRORS), self._connection.on_behalf_of(self._channel):
            while data := self._channel.recv_stderr(_READ):
                with self._state:
                    self._stderr += data
                    del self._stderr[:-_TAIL]


class SshStream:
    """A TCP connection that sshd opened on the node (contract: ``transports.base.Stream``)."""

    def __init__(self, connection: SshConnection, channel: paramiko.Channel) -> None:
        """Use ``channel``."""
        self._connection = connection
        self._channel = channel

    def read(self) -> bytes:
        """Wait for data and return up to 64 KiB of it."""
        with contextlib.suppress(*SSH_ERRORS), self._connection.on_behalf_of(self._channel):
            return self._channel.recv(_READ)
        return b""

    def write(self, data: bytes) -> None:
        """Send ``data``."""
        with (
            convert_ssh_errors(self._connection.node, self._connection.endpoint, "writing to a port"),
            self._connection.on_behalf_of(self._channel),
        ):
            _send(self._connection, self._channel, data)

    def end(self) -> None:
        """Close the sending direction."""
        with contextlib.suppress(*SSH_ERRORS), self._connection.on_behalf_of(self._channel):
            self._channel.shutdown_write()

    def close(self) -> None:
        """Close the connection."""
        _close_channel(self._connection, self._channel, self._channel.close)


def run_to_end(connection: SshConnection, argv: Sequence[str], stdin: bytes, deadline: Deadline) -> Completed:
    """Run a command with ``stdin`` as its input; kill it and raise ``NodeUnreachable`` when ``deadline`` passes."""
    program, mark = argv[0], f"distflow-{secrets.token_hex(8)}"
    stderr = bytearray()
    pid = re.compile(rf"{mark} (\d+)\n".encode())
    # A command can be killed only after it has started, so the start gets some extra time.
    channel = connection.execute(remote_command(argv, mark), deadline, grace_s=_LATE_S)

    def collect() -> None:
        with contextlib.suppress(*SSH_ERRORS), connection.on_behalf_of(channel):
            while data := channel.recv_stderr(_BULK):
                stderr.extend(data)

    def feed() -> None:
        # A command may end without reading all of its input.
        with contextlib.suppress(NodeUnreachable, *SSH_ERRORS), connection.on_behalf_of(channel):
            _send(connection, channel, stdin)
            channel.shutdown_write()

    def kill() -> None:
        patience = Deadline(_LATE_S)
        while (found := pid.search(stderr)) is None and not patience.has_passed and not channel.status_event.wait(0.02):
            continue
        if found is not None and not channel.status_event.is_set():
            with contextlib.suppress(NodeUnreachable):
                _kill(connection, found[1].decode())
        channel.close()

    def expire() -> None:
        is_late.set()
        _close_channel(connection, channel, kill, patience_s=_KILL_S)

    is_late = threading.Event()
    timer = threading.Timer(deadline.left(), expire)
    helpers = [threading.Thread(target=one, name=f"{program} on {connection.node}", daemon=True) for one in (collect, feed)]
    timer.daemon = True
    for thread in (timer, *helpers):
        thread.start()
    stdout = bytearray()
    try:
        with convert_ssh_errors(connection.node, connection.endpoint, f"running `{program}`"), connection.on_behalf_of(channel):
            while data := channel.recv(_BULK):
                stdout += data
        channel.status_event.wait(max(deadline.left(), _LATE_S))
        helpers[0].join(_DRAIN_TIMEOUT_S)
    finally:
        timer.cancel()
        _close_channel(connection, channel, channel.close)
    if is_late.is_set():
        raise NodeUnreachable(connection.node, f"`{program}` did not finish within {deadline.seconds:g} s")
    if channel.exit_status < 0:
        why = connection.end_reason() or "its sshd sent no exit status"
        raise NodeUnreachable(connection.node, f"the connection broke while `{program}` ran: {why}")
    return Completed(exit_code=channel.exit_status, stdout=bytes(stdout), stderr=pid.sub(b"", bytes(stderr), count=1))


def remote_command(argv: Sequence[str], mark: str = "") -> str:
    """Return one line with which a POSIX shell, fish or csh runs exactly ``argv``.

    With a ``mark``, the mark and the command's process id are first written to standard error.

    sshd passes the line to the login shell. In fish and csh, quotes, backslashes, newlines and ``!`` have other meanings.
    Therefore, they are sent as octal numbers inside one pair of single quotes. A POSIX shell, which replaces the login shell,
    decodes them.
    """
    first = f'printf "{mark} %d\\n" $$ >&2; ' if mark else ""
    words = f"{first}exec {quote(argv)}".encode("utf-8", "surrogateescape")
    octal = _SPECIAL.sub(lambda found: b"\\0%03o" % found[0][0], words).decode("ascii")
    # `%` is special to printf only in its format.
    return f"""exec /bin/sh -c 'eval "$(printf %b "{octal}")"'"""


def _kill(connection: SshConnection, pid: str) -> None:
    """Kill a process on the node, with its group if it leads one.

    sshd does not forward signals to root's commands or forced commands.
    """
    script = "kill -s KILL -- -$1 2>/dev/null || kill -s KILL $1"
    channel = connection.execute(remote_command(["sh", "-c", script, "sh", pid]), Deadline(_LATE_S))
    channel.status_event.wait(_LATE_S)
    channel.close()


def _send(connection: SshConnection, channel: paramiko.Channel, data: bytes) -> None:
    position = 0
    while position < len(data):
        sent = channel.send(data[position : position + _PACKET])
        if sent == 0:
            raise NodeUnreachable(connection.node, "the channel was closed while data was sent")
        position += sent


def _close_channel(
    connection: SshConnection, channel: paramiko.Channel, close: Callable[[], None], *, patience_s: float = _CLOSE_S
) -> None:
    """Run ``close``. If it does not return in time, the connection is dead, so close the whole connection."""
    if channel.closed:
        return

    def close_quietly() -> None:
        with contextlib.suppress(*SSH_ERRORS):
            close()

    thread = threading.Thread(target=close_quietly, name=f"closing a channel of {connection.node}", daemon=True)
    thread.start()
    thread.join(patience_s)
    if thread.is_alive():
        connection.close()
