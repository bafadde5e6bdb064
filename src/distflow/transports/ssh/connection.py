"""A connection to a host through its jump hosts. Each of these hosts has its own configuration, host key check and login."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import paramiko

from distflow.errors import HostKeyMismatch, HostKeyUnknown, NodeUnreachable, TransportError
from distflow.shell import quote
from distflow.transports.base import Deadline
from distflow.transports.ssh.authentication import authenticate
from distflow.transports.ssh.config import (
    Hop,
    SshConfigError,
    SshDestination,
    SshHost,
    pick_algorithms,
    resolve_destination,
    resolve_hop,
)
from distflow.transports.ssh.hostkeys import (
    HostKeyCheck,
    KnownKey,
    add_known_host,
    check_host_key,
    fingerprint,
    key_type_of,
    known_algorithms,
    read_known_hosts,
    read_revoked,
)
from distflow.transports.ssh.paramiko_adapter import (
    HOST_KEY_ALGORITHMS,
    ChannelSocket,
    PatchedTransport,
    convert_ssh_errors,
    explain,
)
from distflow.transports.ssh.sockets import ProxyProcess, addresses_of, connect_tcp

__all__ = ["SshConnection"]

_PROHIBITED = 1
"""The reason code of a refused channel for "not allowed" (RFC 4254, 5.1)."""
_FORWARDING_HINT = (
    "allow it there: AllowTcpForwarding and PermitOpen in sshd_config, and the options of your key in ~/.ssh/authorized_keys"
)
_MOST_HOPS = 16
_STUCK_S = 3.0
_LATER_S = 5.0
_MOST_LOGINS = 8
_login_slots: dict[tuple[Hop, ...], threading.BoundedSemaphore] = {}
_login_slots_lock = threading.Lock()
_T = TypeVar("_T")


class SshConnection:
    """One connection, which is never reopened: after a failure, create another one.

    1. ``connect`` raises a ``TransportError`` if it cannot log in within the host's connect timeout. Waiting for other logins
       through the same jump hosts does not count.
    2. ``close`` may be called at any time, from any thread, also during ``connect``, and does not wait for the network.
    """

    def __init__(self, node: str, destination: SshDestination) -> None:
        """Prepare a connection; ``connect`` opens it."""
        self.node = node
        self._destination = destination
        self._lock = threading.Lock()
        self._opened: list[Callable[[], object]] = []
        self._is_closed = False
        self._transport: PatchedTransport | None = None
        self._hops = 0
        self.endpoint = ""
        """``user@host:port`` of the destination."""
        self.address: str | None = None
        """Network address of the destination; ``None`` behind a jump host or a ``ProxyCommand``."""
        self.named_addresses: tuple[str, ...] = ()
        """Behind a jump host or a ``ProxyCommand``: addresses of the host name, if this machine can resolve it."""
        self.connect_timeout_s = 10.0

    def connect(self) -> None:
        """Connect and log in."""
        try:
            host = resolve_destination(self._destination)
        except SshConfigError as error:
            raise TransportError(self.node, f"cannot use the SSH configuration: {error}") from error
        self.endpoint, self.connect_timeout_s = host.endpoint, host.connect_timeout_s
        try:
            with _login_slot(host.proxy_jump):
                self._transport = self._connect_to(host, host.proxy_jump, host.endpoint, Deadline(host.connect_timeout_s))
        except SshConfigError as error:
            raise TransportError(self.node, f"cannot use the SSH configuration: {error}") from error
        finally:
            if self._transport is None:
                self.close()
        if self.address is None:
            self.named_addresses = addresses_of(host)

    @property
    def is_active(self) -> bool:
        """Whether the connection is open, as far as this side knows."""
        return self._transport is not None and self._transport.is_active() and not self._is_closed

    def execute(self, command: str, deadline: Deadline, *, grace_s: float = 0.0) -> paramiko.Channel:
        """Start a command in a new channel. Give up ``grace_s`` after ``deadline``."""
        return self._begin("a command", lambda channel: channel.exec_command(command), deadline, grace_s)

    def subsystem(self, name: str, timeout_s: float) -> paramiko.Channel:
        """Start a subsystem of sshd, such as ``sftp``, in a new channel."""
        what = f"its subsystem `{name}`"
        return self._begin(what, lambda channel: channel.invoke_subsystem(name), Deadline(timeout_s), 0.0)

    def _begin(
        self, what: str, begin: Callable[[paramiko.Channel], object], deadline: Deadline, grace_s: float
    ) -> paramiko.Channel:
        transport = self._transport
        if transport is None or self._is_closed:
            raise NodeUnreachable(self.node, f"{self.endpoint}: the connection is closed")
        late = f"{self.endpoint} did not start {what} within {deadline.seconds:g} s"
        # Other threads may use the connection, so close it only if even the request cannot be sent.
        with (
            self._close_at(deadline, late, grace_s + _STUCK_S),
            convert_ssh_errors(self.node, self.endpoint, f"starting {what}"),
        ):
            channel = transport.open_session(timeout=max(0.1, deadline.left() + grace_s))
            hang_up = threading.Timer(deadline.left() + grace_s, lambda: _quietly(channel.close))
            hang_up.daemon = True
            hang_up.start()
            try:
                with transport.on_behalf_of(channel):
                    begin(channel)
            finally:
                hang_up.cancel()
            return channel

    def dial(self, port: int, deadline: Deadline) -> paramiko.Channel:
        """Let sshd connect to a port on 127.0.0.1 of its machine."""
        transport = self._transport
        if transport is None or self._is_closed:
            raise NodeUnreachable(self.node, f"{self.endpoint}: the connection is closed")
        late = f"{self.endpoint} did not connect to its port {port} within {deadline.seconds:g} s"
        with (
            self._close_at(deadline, late, _STUCK_S),
            convert_ssh_errors(self.node, self.endpoint, f"connecting to its port {port}"),
        ):
            try:
                return transport.open_channel(
                    "direct-tcpip", ("127.0.0.1", port), ("127.0.0.1", 0), timeout=max(0.1, deadline.left())
                )
            except paramiko.ChannelException as error:
                if error.code == _PROHIBITED:
                    what = f"{self.endpoint} does not allow port forwarding"
                    raise NodeUnreachable(self.node, what, hint=_FORWARDING_HINT) from error
                raise NodeUnreachable(self.node, f"nothing answers on its port {port} ({error.text})") from error

    @contextlib.contextmanager
    def on_behalf_of(self, channel: paramiko.Channel) -> Iterator[None]:
        """Within the block, send nothing for ``channel`` after it has been closed (see ``PatchedTransport``)."""
        if self._transport is None:
            raise NodeUnreachable(self.node, f"{self.endpoint}: the connection is closed")
        with self._transport.on_behalf_of(channel):
            yield

    def end_reason(self) -> str:
        """Return why the connection broke; empty while it is open."""
        transport = self._transport
        if transport is None or transport.is_active():
            return ""
        return transport.disconnect_reason or explain(self.node, self.endpoint, transport.saved_exception).detail

    def close(self) -> None:
        """Close the connection, with its sockets and processes."""
        with self._lock:
            self._is_closed = True
            opened, self._opened = self._opened, []
        # In the order of opening: once the lowest socket is closed, closing the other layers does not block.
        for close in opened:
            _quietly(close)

    def _track(self, resource: _T, close: Callable[[], object]) -> _T:
        with self._lock:
            if not self._is_closed:
                self._opened.append(close)
                return resource
        close()
        raise self._was_closed()

    def _was_closed(self) -> NodeUnreachable:
        return NodeUnreachable(self.node, f"{self.endpoint}: the connection was closed during the connection attempt")

    @contextlib.contextmanager
    def _close_at(self, deadline: Deadline, late: str, grace_s: float = 0.0) -> Iterator[None]:
        """Close the connection if the block still runs ``grace_s`` after ``deadline``.

        A ``NodeUnreachable`` after the deadline gets the message ``late``.
        """
        timer = threading.Timer(deadline.left() + grace_s, self.close)
        timer.daemon = True
        timer.start()
        try:
            yield
        except NodeUnreachable as error:
            if deadline.has_passed:
                raise NodeUnreachable(self.node, late) from error
            raise
        finally:
            timer.cancel()

    # Connecting.

    def _connect_to(self, host: SshHost, jumps: Sequence[Hop], endpoint: str, deadline: Deadline) -> PatchedTransport:
        if self._hops > _MOST_HOPS:  # the destination comes first and is not a jump host
            raise SshConfigError(
                f"more than {_MOST_HOPS} jump hosts lead to `{self._destination.host}`, perhaps in a loop: check `ProxyJump` "
                f"of this host and of `{host.alias}`"
            )
        self._hops += 1
        if jumps:
            sock, proxy = self._open_via(host, jumps, endpoint, deadline), None
        elif host.proxy_command is not None:
            with convert_ssh_errors(self.node, endpoint, f"starting its ProxyCommand `{host.proxy_command}`"):
                proxy = ProxyProcess(host.proxy_command)
            sock = self._track(proxy.socket, proxy.close)
        else:
            sock, proxy = self._connect_tcp(host, endpoint, deadline), None
        transport = self._handshake(sock, host, endpoint, proxy, deadline)
        late = f"{endpoint} did not finish the login within {deadline.seconds:g} s"
        with self._close_at(deadline, late), convert_ssh_errors(self.node, endpoint, "logging in"):
            authenticate(self.node, transport, host, endpoint, deadline)
            if host.keepalive_s > 0:
                transport.set_keepalive(max(1, int(host.keepalive_s)))
        return transport

    def _open_via(self, host: SshHost, jumps: Sequence[Hop], endpoint: str, deadline: Deadline) -> Any:
        """Return a channel to ``host`` from the last of ``jumps``, which is reached through the earlier ones."""
        last = resolve_hop(jumps[-1], self._destination)
        via = f"jump host {last.alias} ({last.endpoint})"
        # Jump hosts before the last one override its own ProxyJump, as with ssh -J.
        transport = self._connect_to(last, jumps[:-1] or last.proxy_jump, via, deadline)
        late = f"{via} did not reach {endpoint} within {deadline.seconds:g} s"
        try:
            with self._close_at(deadline, late):
                channel = transport.open_channel(
                    "direct-tcpip", (host.hostname, host.port), ("127.0.0.1", 0), timeout=max(0.1, deadline.left())
                )
        except (paramiko.SSHException, EOFError, OSError) as error:
            if deadline.has_passed:
                raise NodeUnreachable(self.node, late) from error
            if isinstance(error, paramiko.ChannelException):
                verb, hint = "cannot connect", ""
                if error.code == _PROHIBITED:
                    verb, hint = "does not allow forwarding", _FORWARDING_HINT
                raise NodeUnreachable(self.node, f"{via} {verb} to {endpoint} ({error.text})", hint=hint) from error
            raise explain(self.node, via, error, f"connecting to {endpoint}") from error
        tunnel = ChannelSocket(transport, channel)
        return self._track(tunnel, tunnel.close)

    def _connect_tcp(self, host: SshHost, endpoint: str, deadline: Deadline) -> socket.socket:
        try:
            with convert_ssh_errors(self.node, endpoint):
                sock = connect_tcp(host, deadline)
        except NodeUnreachable as error:
            if deadline.has_passed and not isinstance(error.__cause__, socket.gaierror):
                raise NodeUnreachable(
                    self.node, f"{endpoint} did not answer within {deadline.seconds:g} s", hint=error.hint
                ) from error
            raise
        if self._hops == 1:
            self.address = sock.getpeername()[0]
        return self._track(sock, lambda: _shut_down(sock))

    def _handshake(
        self, sock: Any, host: SshHost, endpoint: str, proxy: ProxyProcess | None, deadline: Deadline
    ) -> PatchedTransport:
        """Exchange keys with the host and check its host key."""
        known = read_known_hosts(host.known_hosts_files)
        supported = pick_algorithms(host.host_key_algorithms, HOST_KEY_ALGORITHMS)
        try:
            transport = PatchedTransport(sock, host, known_algorithms(known, host.key_name, supported))
        except OSError as error:  # another thread closed the socket meanwhile
            raise self._was_closed() from error
        self._track(transport, transport.close)
        # Later than ``deadline``, so that a silent host is not reported as a closed connection.
        transport.banner_timeout = transport.handshake_timeout = deadline.left() + _LATER_S
        # paramiko does not set the event when this side closes the connection.
        is_done = threading.Event()
        self._track(is_done, is_done.set)
        transport.start_client(event=is_done)
        in_time = is_done.wait(deadline.left())
        if not in_time or not transport.is_active():
            # Stop paramiko's timer, which is not a daemon thread and would keep the process alive.
            transport.packetizer.complete_handshake()
            if self._is_closed:
                raise self._was_closed()
            raise self._handshake_error(transport, host, endpoint, proxy, deadline, in_time=in_time)
        key = transport.get_remote_server_key()
        certificate = key.public_blob.key_blob if key.public_blob is not None else None
        revoked = read_revoked(host.revoked_host_keys, key.asbytes(), certificate)
        check = check_host_key((*known, *revoked), host.key_name, key.asbytes(), certificate)
        if check.kind == "unknown" and host.host_key_policy == "accept-new" and host.known_hosts_files:
            file = host.known_hosts_files[0]
            with convert_ssh_errors(self.node, endpoint, f"storing its host key in {file} on this machine"):
                check = add_known_host(file, host.key_name, key.asbytes(), hashed=host.hash_known_hosts)
        if check.kind != "known":
            self.close()
            is_direct = isinstance(sock, socket.socket) and proxy is None
            raise self._host_key_error(host, endpoint, key.asbytes(), check, is_direct=is_direct)
        return transport

    def _handshake_error(
        self,
        transport: PatchedTransport,
        host: SshHost,
        endpoint: str,
        proxy: ProxyProcess | None,
        deadline: Deadline,
        *,
        in_time: bool,
    ) -> NodeUnreachable:
        if proxy is not None:
            endpoint += f" through `{proxy.command}`"
        hint = f"output of the ProxyCommand:\n{proxy.stderr_tail}" if proxy is not None and proxy.stderr_tail else ""
        if not in_time:
            what = "did not finish the key exchange" if transport.remote_version else "sent no SSH banner"
            return NodeUnreachable(self.node, f"{endpoint} {what} within {deadline.seconds:g} s", hint=hint)
        error = transport.get_exception()
        if transport.remote_version:
            reason = f" ({transport.disconnect_reason})" if transport.disconnect_reason else ""
            found = explain(self.node, f"{endpoint}{reason}", error, "exchanging keys")
            return NodeUnreachable(self.node, found.detail, hint=hint or found.hint)
        if "Indecipherable" in str(error):
            return NodeUnreachable(self.node, f"{endpoint} is not an SSH server", hint=hint or f"check the port {host.port}")
        return NodeUnreachable(
            self.node,
            f"{endpoint} closed the connection before it sent an SSH banner",
            hint=hint or "its sshd may be restarting, have too many logins in progress (MaxStartups), or refuse this address",
        )

    def _host_key_error(
        self, host: SshHost, endpoint: str, blob: bytes, check: HostKeyCheck, *, is_direct: bool
    ) -> NodeUnreachable:
        shown = fingerprint(blob)
        note = f"\n{check.note}" if check.note else ""
        if check.kind == "revoked":
            listed = ", ".join(one.where for one in check.entries)
            return HostKeyMismatch(
                self.node, f"{endpoint} showed a revoked host key: {shown} ({listed}){note}",
                hint="do not trust this host before its administrator has replaced the key",
            )  # fmt: skip
        if check.kind == "changed":
            return HostKeyMismatch(
                self.node,
                f"{endpoint} showed a host key that differs from the known one; the connection may be intercepted\n"
                f"  shown: {shown}\n" + "\n".join(f"  known: {fingerprint(one.blob)} ({one.where})" for one in check.entries),
                hint=f"if you know that its key has changed, run:\n{_removals(check.entries, host)}{note}",
            )
        message = f"the host key of {endpoint} is not known: {shown}{note}"
        if not host.known_hosts_files:
            hint = "the OpenSSH configuration names no file of known host keys: set `UserKnownHostsFile` in ~/.ssh/config"
            return HostKeyUnknown(self.node, message, hint=hint)
        file = host.known_hosts_files[0]
        kind = key_type_of(blob).removeprefix("ssh-").partition("-")[0]
        once = f"  {self._ssh_command(host)}"
        if host.host_key_alias is None and is_direct:
            port = ["-p", str(host.port)] if host.port != 22 else []
            scan = quote(["ssh-keyscan", "-t", kind, *port, host.hostname])
            once = f"  {scan} >> {quote([file])}\nor log in once and confirm the key:\n{once}"
        return HostKeyUnknown(
            self.node,
            message,
            hint=f"compare it with the key on the machine itself (ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub there), "
            f"then run:\n{once}\nor, if you trust the network, set `host_key_policy: accept-new` in the pool, or "
            "`StrictHostKeyChecking accept-new` in ~/.ssh/config",
        )

    def _ssh_command(self, host: SshHost) -> str:
        destination = self._destination
        words = ["ssh"]
        if destination.config_file is not None:
            words += ["-F", destination.config_file]
        if destination.known_hosts_files:
            words += ["-o", f"UserKnownHostsFile={destination.known_hosts_files[0]}"]
        if host.alias == destination.host:
            words += ["-p", str(destination.port)] if destination.port is not None else []
            words += ["-l", destination.user] if destination.user is not None else []
        return quote([*words, host.alias, "true"])


def _login_slot(jumps: Sequence[Hop]) -> contextlib.AbstractContextManager[object]:
    """Limit the number of simultaneous logins through the same jump hosts. Other connections are not limited.

    sshd drops connections at random when more than ten logins are in progress (MaxStartups 10:30:100, sshd_config(5)). Time
    spent waiting here does not count towards the connect timeout.
    """
    if not jumps:
        return contextlib.nullcontext()
    with _login_slots_lock:
        return _login_slots.setdefault(tuple(jumps), threading.BoundedSemaphore(_MOST_LOGINS))


def _quietly(close: Callable[[], object]) -> None:
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        close()


def _removals(entries: Sequence[KnownKey], host: SshHost) -> str:
    files = dict.fromkeys(one.file for one in entries)
    return "\n".join(f"  {quote(['ssh-keygen', '-R', host.key_name, '-f', file])}" for file in files)


def _shut_down(sock: socket.socket) -> None:
    # close() alone does not wake a thread that waits in recv().
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
