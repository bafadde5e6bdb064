"""paramiko with distflow's algorithms, fixes and error messages.

Each fix names the issue of paramiko, if there is one. Without the fix, a test in tests/integration/ssh, tests/contract or
tests/unit/transports fails. Another test checks that every error of paramiko, the operating system and cryptography is
converted.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import paramiko
from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from paramiko.common import MSG_CHANNEL_REQUEST
from paramiko.hostkeys import InvalidHostKey
from paramiko.pkey import UnknownKeyType

from distflow.errors import NodeError, NodeUnreachable
from distflow.transports.ssh.config import SshHost, pick_algorithms

__all__ = ["HOST_KEY_ALGORITHMS", "SSH_ERRORS", "ChannelSocket", "PatchedTransport", "convert_ssh_errors", "explain"]


# AES-GCM first: it has twice the throughput of paramiko's default. Algorithms that OpenSSH has retired are left out.
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
_MACS = (
    "hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com", "hmac-sha2-256", "hmac-sha2-512", "hmac-sha1",
)  # fmt: skip
HOST_KEY_ALGORITHMS = (
    "ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "rsa-sha2-512", "rsa-sha2-256",
)  # fmt: skip
_WINDOW = 4 << 20
_TABLE = "_channel_handler_table"


class ChannelSocket:
    """A channel of one connection as the socket of another connection. Its ``close`` never raises.

    paramiko closes its socket before it wakes threads that wait for the connection. If ``close`` raised, they would wait
    forever.
    """

    def __init__(self, transport: PatchedTransport, channel: paramiko.Channel) -> None:
        """Use ``channel`` of ``transport``."""
        self._transport = transport
        self._channel = channel

    def send(self, data: bytes) -> int:
        """Send some of ``data``."""
        with self._transport.on_behalf_of(self._channel):
            return self._channel.send(data)

    def recv(self, size: int) -> bytes:
        """Wait for data."""
        with self._transport.on_behalf_of(self._channel):
            return self._channel.recv(size)

    def settimeout(self, seconds: float | None) -> None:
        """Limit how long ``send`` and ``recv`` wait."""
        self._channel.settimeout(seconds)

    def close(self) -> None:
        """Close the channel. May be called twice, and never raises."""
        with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
            self._channel.close()

    @property
    def _closed(self) -> bool:
        """Whether it is closed; paramiko reads this attribute of Python's sockets."""
        return self._channel.closed


class PatchedTransport(paramiko.Transport):
    """One SSH connection over a socket, or over a channel of another connection.

    1. Within ``on_behalf_of(channel)``, nothing is sent after the channel has been closed. paramiko builds a message under the
       channel's lock and sends it later, and sshd closes the connection when data arrives for a closed channel (issue 1115).
    2. During a key exchange the transport's thread never waits to send, as only it can finish the exchange (issue 822).
    3. A command that a signal ended has an exit code; paramiko ignores ``exit-signal`` (issue 598).
    4. ``disconnect_reason`` keeps the server's reason for a disconnect; paramiko only logs it.
    """

    # How often paramiko polls an idle socket. At its default of 0.1 s, a hundred idle nodes keep a core busy.
    _active_check_timeout = 1.0

    def __init__(self, sock: Any, host: SshHost, host_key_algorithms: Sequence[str]) -> None:
        """Use ``sock``, and request ``host_key_algorithms`` in this order."""
        # Without a handler, Python prints paramiko's tracebacks to standard error.
        log = logging.getLogger("paramiko")
        if not log.handlers:
            log.addHandler(logging.NullHandler())
        super().__init__(sock, default_window_size=_WINDOW)
        options = self.get_security_options()
        options.ciphers = pick_algorithms(host.ciphers, _CIPHERS)
        options.digests = pick_algorithms(host.macs, _MACS)
        options.kex = pick_algorithms(host.kex_algorithms, tuple(options.kex))
        self._host_key_algorithms = tuple(host_key_algorithms)
        self._sender = threading.local()
        self._deferred: list[paramiko.Message] = []
        self.disconnect_reason = ""
        """The server's message when it disconnected."""

    @property
    def preferred_keys(self) -> Sequence[str]:
        """Host key algorithms, best first. paramiko would put certificates last."""
        return self._host_key_algorithms

    @contextlib.contextmanager
    def on_behalf_of(self, channel: paramiko.Channel) -> Iterator[None]:
        """Drop messages that this thread sends within the block after ``channel`` has been closed."""
        before = getattr(self._sender, "channel", None)
        self._sender.channel = channel
        try:
            yield
        finally:
            self._sender.channel = before

    # paramiko calls the methods below.

    def _send_message(self, data: paramiko.Message) -> None:
        # All messages of channels, CLOSE included, are sent under paramiko's `clear_to_send_lock`, so this check has no race.
        channel = getattr(self._sender, "channel", None)
        if channel is None or not channel.closed:
            super()._send_message(data)  # type: ignore[misc]

    def _send_user_message(self, data: paramiko.Message) -> None:
        if threading.current_thread() is self and not self.clear_to_send.is_set():
            self._deferred.append(data)
        else:
            super()._send_user_message(data)  # type: ignore[misc]

    def _parse_newkeys(self, message: paramiko.Message) -> None:
        super()._parse_newkeys(message)  # type: ignore[misc]
        deferred, self._deferred = self._deferred, []
        for one in deferred:
            self._send_user_message(one)

    def _parse_disconnect(self, message: paramiko.Message) -> None:
        message.get_int()
        self.disconnect_reason = message.get_text()


def _take_request(channel: paramiko.Channel, message: paramiko.Message) -> None:
    """Handle ``exit-signal`` as well. paramiko ignores it, so a killed command would have no exit code."""
    if message.get_text() == "exit-signal":
        message.get_boolean()
        name = "SIG" + message.get_text()
        channel.exit_status = 128 + getattr(signal.Signals, name, signal.SIGKILL)
        channel.status_event.set()
        return
    message.rewind()
    message.get_int()
    channel._handle_request(message)  # type: ignore[attr-defined]  # noqa: SLF001  paramiko has no public hook


setattr(PatchedTransport, _TABLE, {**getattr(paramiko.Transport, _TABLE), MSG_CHANNEL_REQUEST: _take_request})


SSH_ERRORS: tuple[type[Exception], ...] = (
    paramiko.SSHException, UnknownKeyType, InvalidHostKey,
    OSError, EOFError,
    # paramiko's thread passes these on after a malformed packet.
    InvalidSignature, InvalidTag, UnsupportedAlgorithm, struct.error, ValueError, LookupError,
)  # fmt: skip
"""The exceptions of paramiko, cryptography and the operating system that ``convert_ssh_errors`` converts."""

_NO_ADDRESS = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
_CODES: dict[int | None, tuple[str, str]] = {
    errno.ECONNREFUSED: ("nothing listens there (connection refused)", "check that sshd is running there, and on this port"),
    errno.EHOSTUNREACH: ("no route to host", "check that it is powered on, and in a network that this machine can reach"),
    errno.ENETUNREACH: ("its network is unreachable", "check the network of this machine, and its VPN"),
    errno.ETIMEDOUT: ("it does not answer", "check that it is powered on, and that no firewall drops packets"),
    errno.ECONNRESET: ("it reset the connection", ""),
    errno.EPIPE: ("it reset the connection", ""),
}


@contextlib.contextmanager
def convert_ssh_errors(node: str, endpoint: str, doing: str = "") -> Iterator[None]:
    """Raise the errors in ``SSH_ERRORS`` as ``NodeUnreachable``. The message names the ``endpoint`` and the step ``doing``."""
    try:
        yield
    except NodeError:
        raise
    except SSH_ERRORS as error:
        raise explain(node, endpoint, error, doing) from error


def explain(node: str, endpoint: str, error: BaseException | None, doing: str = "") -> NodeUnreachable:
    """Return a ``NodeUnreachable`` that describes ``error``."""
    what, hint = _describe(error)
    return NodeUnreachable(node, f"{endpoint}: {what}" + (f", while distflow was {doing}" if doing else ""), hint=hint)


def _describe(error: BaseException | None) -> tuple[str, str]:
    if isinstance(error, socket.gaierror):
        if error.errno in _NO_ADDRESS:
            return "this name has no address", "check the spelling; a `Host` in ~/.ssh/config may lack its `HostName`"
        hint = "check the network and the name servers of this machine, and the spelling of the name"
        return f"this name cannot be looked up ({error.strerror or error})", hint
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        return _describe(next(iter(error.errors.values()), None))
    if isinstance(error, TimeoutError) and error.errno is None:
        return _CODES[errno.ETIMEDOUT]
    if isinstance(error, OSError):
        text = os.strerror(error.errno) if isinstance(error.errno, int) else str(error)
        return _CODES.get(error.errno, (text or type(error).__name__, ""))
    if isinstance(error, EOFError) or error is None:
        return "it closed the connection", ""
    if isinstance(error, paramiko.ChannelException):
        return f"it refuses to open a channel ({error.text})", "MaxSessions of its sshd may be too low"
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        return f"no common algorithm: {error}", ""
    return " ".join(str(error).split()) or type(error).__name__, ""
