"""One way to a host: through every jump host, each with its own configuration, host key check and login."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import paramiko

from distflow.errors import HostKeyMismatch, HostKeyUnknown, NodeUnreachable, TransportError
from distflow.shell import quote
from distflow.transports.deadline import Deadline
from distflow.transports.hostkeys import (
    KnownKey,
    Verdict,
    fingerprint,
    judge,
    key_type_of,
    known_algorithms,
    read_known_hosts,
    read_revoked,
    remember,
)
from distflow.transports.sshconfig import (
    Hop,
    SshConfigError,
    SshDestination,
    SshHost,
    pick_algorithms,
    resolve_destination,
    resolve_hop,
)
from distflow.transports.ssherrors import explain, foreign_errors
from distflow.transports.sshkeys import authenticate
from distflow.transports.sshsocket import ProxyProcess, addresses_of, connect_tcp
from distflow.transports.sshwire import HOST_KEY_ALGORITHMS, Tunnel, Wire

__all__ = ["SshLink"]

_PROHIBITED = 1
"""Of a channel's refusals (RFC 4254, 5.1): the others say that nothing answered."""
_MOST_HOPS = 16
_STUCK_S = 3.0
_LATER_S = 5.0
_AT_THE_DOOR = 8
_doors: dict[tuple[Hop, ...], threading.BoundedSemaphore] = {}
_doors_lock = threading.Lock()
_T = TypeVar("_T")


class SshLink:
    """A connection that stands, or fails as a whole; never made again: another one is.

    1. ``connect`` returns within the time that is given, or raises ``NodeUnreachable`` and its subclasses.
    2. ``close`` may be called at any time, from any thread, also while ``connect`` runs, and does not wait for the network.
    """

    def __init__(self, node: str, destination: SshDestination) -> None:
        """Connect to nothing yet."""
        self.node = node
        self._destination = destination
        self._lock = threading.Lock()
        self._opened: list[Callable[[], object]] = []
        self._is_closed = False
        self._wire: Wire | None = None
        self._hops = 0
        self.place = ""
        """``user@host:port`` of the host at its end."""
        self.address: str | None = None
        """Of the host at its end, when no other host or program stands between."""
        self.named_addresses: tuple[str, ...] = ()
        """Of its name, as this machine resolves it, when others do stand between: it may be known only to them."""
        self.connect_timeout_s = 10.0

    def connect(self) -> None:
        """Go all the way."""
        try:
            host = resolve_destination(self._destination)
        except SshConfigError as error:
            raise TransportError(self.node, f"the SSH configuration is wrong: {error}") from error
        self.place, self.connect_timeout_s = host.place, host.connect_timeout_s
        try:
            with _door(host.proxy_jump):
                self._wire = self._reach(host, host.proxy_jump, host.place, Deadline(host.connect_timeout_s))
        except SshConfigError as error:
            raise TransportError(self.node, f"the SSH configuration is wrong: {error}") from error
        finally:
            if self._wire is None:
                self.close()
        if self.address is None:
            self.named_addresses = addresses_of(host)

    @property
    def is_active(self) -> bool:
        """Whether it stands, as far as is known."""
        return self._wire is not None and self._wire.is_active() and not self._is_closed

    def execute(self, command: str, deadline: Deadline, *, grace_s: float = 0.0) -> paramiko.Channel:
        """Start a command in a new channel; ``grace_s`` after ``deadline`` it is given up."""
        return self._begin(lambda channel: channel.exec_command(command), deadline, grace_s)

    def subsystem(self, name: str, timeout_s: float) -> paramiko.Channel:
        """Start a subsystem of sshd, such as ``sftp``, in a new channel."""
        return self._begin(lambda channel: channel.invoke_subsystem(name), Deadline(timeout_s), 0.0)

    def _begin(self, begin: Callable[[paramiko.Channel], object], deadline: Deadline, grace_s: float) -> paramiko.Channel:
        wire = self._wire
        if wire is None or self._is_closed:
            raise NodeUnreachable(self.node, f"{self.place}: the connection is closed")
        late = f"{self.place} did not start a command within {deadline.seconds:g} s"
        # Others may use the connection: it is closed only when not even our requests can be sent.
        with self._hurry(deadline, late, grace_s + _STUCK_S), foreign_errors(self.node, self.place, "starting a command"):
            channel = wire.open_session(timeout=max(0.1, deadline.left() + grace_s))
            hang_up = threading.Timer(deadline.left() + grace_s, lambda: _quietly(channel.close))
            hang_up.daemon = True
            hang_up.start()
            try:
                with wire.on_behalf_of(channel):
                    begin(channel)
            finally:
                hang_up.cancel()
            return channel

    def dial(self, port: int, deadline: Deadline) -> paramiko.Channel:
        """Let sshd connect to a port of its own machine."""
        wire = self._wire
        if wire is None or self._is_closed:
            raise NodeUnreachable(self.node, f"{self.place}: the connection is closed")
        late = f"{self.place} did not connect to its port {port} within {deadline.seconds:g} s"
        with self._hurry(deadline, late, _STUCK_S), foreign_errors(self.node, self.place, f"connecting to its port {port}"):
            try:
                return wire.open_channel(
                    "direct-tcpip", ("127.0.0.1", port), ("127.0.0.1", 0), timeout=max(0.1, deadline.left())
                )
            except paramiko.ChannelException as error:
                if error.code == _PROHIBITED:
                    hint = "AllowTcpForwarding or PermitOpen in its sshd_config says so"
                    raise NodeUnreachable(self.node, f"{self.place} is not allowed to forward", hint=hint) from error
                raise NodeUnreachable(self.node, f"nothing answers on its port {port} ({error.text})") from error

    @contextlib.contextmanager
    def on_behalf_of(self, channel: paramiko.Channel) -> Iterator[None]:
        """Send nothing for ``channel`` within the block once it is closed (see ``Wire``)."""
        if self._wire is None:
            raise NodeUnreachable(self.node, f"{self.place}: the connection is closed")
        with self._wire.on_behalf_of(channel):
            yield

    def why_it_ended(self) -> str:
        """Say why the connection broke; empty while it stands."""
        wire = self._wire
        if wire is None or wire.is_active():
            return ""
        return wire.farewell or explain(self.node, self.place, wire.saved_exception).message

    def close(self) -> None:
        """Give everything back."""
        with self._lock:
            self._is_closed = True
            opened, self._opened = self._opened, []
        # In the order in which they were opened: what lies further out then has nothing to wait for.
        for close in opened:
            _quietly(close)

    def _keep(self, thing: _T, close: Callable[[], object]) -> _T:
        with self._lock:
            if not self._is_closed:
                self._opened.append(close)
                return thing
        close()
        raise self._was_closed()

    def _was_closed(self) -> NodeUnreachable:
        return NodeUnreachable(self.node, f"{self.place}: the connection was closed while it was made")

    @contextlib.contextmanager
    def _hurry(self, deadline: Deadline, late: str, grace_s: float = 0.0) -> Iterator[None]:
        """Close the connection ``grace_s`` after ``deadline`` when the block lasts that long, and say ``late`` then."""
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

    # The way there.

    def _reach(self, host: SshHost, jumps: Sequence[Hop], place: str, deadline: Deadline) -> Wire:
        self._hops += 1
        if self._hops > _MOST_HOPS:
            raise SshConfigError(f"more than {_MOST_HOPS} jump hosts lead to each other, the last is {host.alias}")
        if jumps:
            sock, proxy = self._through(host, jumps, place, deadline), None
        elif host.proxy_command is not None:
            with foreign_errors(self.node, place, f"starting its ProxyCommand `{host.proxy_command}`"):
                proxy = ProxyProcess(host.proxy_command)
            sock = self._keep(proxy.socket, proxy.close)
        else:
            sock, proxy = self._dial(host, place, deadline), None
        wire = self._greet(sock, host, place, proxy, deadline)
        late = f"{place} did not end the login within {deadline.seconds:g} s"
        with self._hurry(deadline, late), foreign_errors(self.node, place, "logging in"):
            authenticate(self.node, wire, host, place, deadline)
            if host.keepalive_s > 0:
                wire.set_keepalive(max(1, int(host.keepalive_s)))
        return wire

    def _through(self, host: SshHost, jumps: Sequence[Hop], place: str, deadline: Deadline) -> Any:
        """Return a channel to ``host`` from the last of ``jumps``, which is reached through those before it."""
        last = resolve_hop(jumps[-1], self._destination)
        via = f"jump host {last.alias} ({last.place})"
        # Jumps that are named win over those that the last one's own configuration knows, as with ssh -J.
        wire = self._reach(last, jumps[:-1] or last.proxy_jump, via, deadline)
        late = f"{via} did not reach {place} within {deadline.seconds:g} s"
        try:
            with self._hurry(deadline, late):
                channel = wire.open_channel(
                    "direct-tcpip", (host.hostname, host.port), ("127.0.0.1", 0), timeout=max(0.1, deadline.left())
                )
        except (paramiko.SSHException, EOFError, OSError) as error:
            if deadline.has_passed:
                raise NodeUnreachable(self.node, late) from error
            if isinstance(error, paramiko.ChannelException):
                told = "is not allowed to forward" if error.code == 1 else "cannot connect"
                raise NodeUnreachable(self.node, f"{via} {told} to {place} ({error.text})") from error
            raise explain(self.node, via, error, f"connecting to {place}") from error
        tunnel = Tunnel(wire, channel)
        return self._keep(tunnel, tunnel.close)

    def _dial(self, host: SshHost, place: str, deadline: Deadline) -> socket.socket:
        try:
            with foreign_errors(self.node, place):
                sock = connect_tcp(host, deadline)
        except NodeUnreachable as error:
            if deadline.has_passed:
                raise NodeUnreachable(
                    self.node, f"{place} did not answer within {deadline.seconds:g} s", hint=error.hint
                ) from error
            raise
        if self._hops == 1:
            self.address = sock.getpeername()[0]
        return self._keep(sock, lambda: _hang_up(sock))

    def _greet(self, sock: Any, host: SshHost, place: str, proxy: ProxyProcess | None, deadline: Deadline) -> Wire:
        """Agree on keys with the host, and check that it is the one that we mean."""
        known = read_known_hosts(host.known_hosts_files)
        supported = pick_algorithms(host.host_key_algorithms, HOST_KEY_ALGORITHMS)
        try:
            wire = Wire(sock, host, known_algorithms(known, host.key_name, supported))
        except OSError as error:  # a socket that was closed meanwhile, by us
            raise self._was_closed() from error
        self._keep(wire, wire.close)
        # Later than ours: who was silent is not to look as if it had hung up.
        wire.banner_timeout = wire.handshake_timeout = deadline.left() + _LATER_S
        # paramiko does not tell when it is closed by us.
        is_done = threading.Event()
        self._keep(is_done, is_done.set)
        wire.start_client(event=is_done)
        in_time = is_done.wait(deadline.left())
        if not in_time or not wire.is_active():
            # Or its timer, which is no daemon, keeps the whole process alive.
            wire.packetizer.complete_handshake()
            if self._is_closed:
                raise self._was_closed()
            raise self._no_handshake(wire, host, place, proxy, deadline, in_time=in_time)
        key = wire.get_remote_server_key()
        certificate = key.public_blob.key_blob if key.public_blob is not None else None
        revoked = read_revoked(host.revoked_host_keys, key.asbytes(), certificate)
        verdict = judge((*known, *revoked), host.key_name, key.asbytes(), certificate)
        if verdict.kind == "unknown" and host.host_key_policy == "accept-new" and host.known_hosts_files:
            file = host.known_hosts_files[0]
            with foreign_errors(self.node, place, f"writing its key into {file}"):
                verdict = remember(file, host.key_name, key.asbytes(), hashed=host.hash_known_hosts)
        if verdict.kind != "known":
            self.close()
            is_direct = isinstance(sock, socket.socket) and proxy is None
            raise self._not_the_one(host, place, key.asbytes(), verdict, is_direct=is_direct)
        return wire

    def _no_handshake(
        self, wire: Wire, host: SshHost, place: str, proxy: ProxyProcess | None, deadline: Deadline, *, in_time: bool
    ) -> NodeUnreachable:
        if proxy is not None:
            place += f" through `{proxy.command}`"
        hint = f"the ProxyCommand said:\n{proxy.said}" if proxy is not None and proxy.said else ""
        if not in_time:
            where = "did not end the key exchange" if wire.remote_version else "did not say that it is an SSH server"
            return NodeUnreachable(self.node, f"{place} {where} within {deadline.seconds:g} s", hint=hint)
        error = wire.get_exception()
        if wire.remote_version:
            said = f" ({wire.farewell})" if wire.farewell else ""
            found = explain(self.node, f"{place}{said}", error, "agreeing on keys")
            return NodeUnreachable(self.node, found.message.removeprefix(f"{self.node}: "), hint=hint or found.hint)
        if "Indecipherable" in str(error):
            return NodeUnreachable(self.node, f"{place} is no SSH server", hint=hint or f"is {host.port} the right port?")
        return NodeUnreachable(
            self.node,
            f"{place} closed the connection before it said that it is an SSH server",
            hint=hint or "its sshd may be restarting, or be flooded (MaxStartups), or refuse this address",
        )

    def _not_the_one(self, host: SshHost, place: str, blob: bytes, verdict: Verdict, *, is_direct: bool) -> NodeUnreachable:
        shown = fingerprint(blob)
        note = f"\n{verdict.note}" if verdict.note else ""
        if verdict.kind == "revoked":
            listed = ", ".join(one.where for one in verdict.entries)
            return HostKeyMismatch(self.node, f"{place} showed a key that is revoked: {shown} ({listed}){note}")
        if verdict.kind == "changed":
            return HostKeyMismatch(
                self.node,
                f"{place} showed another key than the one that is known; somebody may be in between\n"
                f"  shown: {shown}\n" + "\n".join(f"  known: {fingerprint(one.blob)} ({one.where})" for one in verdict.entries),
                hint=f"if its key was changed on purpose, type:\n{_removals(verdict.entries, host)}{note}",
            )
        file = host.known_hosts_files[0] if host.known_hosts_files else "~/.ssh/known_hosts"
        kind = key_type_of(blob).removeprefix("ssh-").partition("-")[0]
        once = f"  {self._ssh_command(host)}"
        if host.host_key_alias is None and is_direct:
            port = ["-p", str(host.port)] if host.port != 22 else []
            scan = quote(["ssh-keyscan", "-t", kind, *port, host.hostname])
            once = f"  {scan} >> {quote([file])}\nor once, and answer its question:\n{once}"
        return HostKeyUnknown(
            self.node,
            f"the host key of {place} is not known: {shown}{note}",
            hint=f"compare it with what the machine itself says (ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub there), "
            f"then type:\n{once}\nor set `host_key_policy: accept-new` in a pool whose network you trust",
        )

    def _ssh_command(self, host: SshHost) -> str:
        given = self._destination
        words = ["ssh"]
        if given.config_file is not None:
            words += ["-F", given.config_file]
        if given.known_hosts_files:
            words += ["-o", f"UserKnownHostsFile={given.known_hosts_files[0]}"]
        if host.alias == given.host:
            words += ["-p", str(given.port)] if given.port is not None else []
            words += ["-l", given.user] if given.user is not None else []
        return quote([*words, host.alias, "true"])


def _door(jumps: Sequence[Hop]) -> contextlib.AbstractContextManager[object]:
    """Let only some logins at a time go through the same jump hosts; none are counted on a direct way.

    sshd drops connections at random when more than ten are not logged in yet (MaxStartups 10:30:100, sshd_config(5)). The time
    spent waiting here is not the connection's.
    """
    if not jumps:
        return contextlib.nullcontext()
    with _doors_lock:
        return _doors.setdefault(tuple(jumps), threading.BoundedSemaphore(_AT_THE_DOOR))


def _quietly(close: Callable[[], object]) -> None:
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        close()


def _removals(entries: Sequence[KnownKey], host: SshHost) -> str:
    files = dict.fromkeys(one.file for one in entries)
    return "\n".join(f"  {quote(['ssh-keygen', '-R', host.key_name, '-f', file])}" for file in files)


def _hang_up(sock: socket.socket) -> None:
    # A thread that waits in recv() is not woken by close() alone.
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
