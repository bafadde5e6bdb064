"""paramiko's transport as distflow wants it: fast and safe algorithms, ends by signal told, reasons for an end kept."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import paramiko
from paramiko.common import MSG_CHANNEL_REQUEST

from distflow.transports.sshconfig import SshHost, pick_algorithms

__all__ = ["HOST_KEY_ALGORITHMS", "Tunnel", "Wire"]

# AES-GCM first: twice the throughput of paramiko's default. What OpenSSH has retired (CBC, MD5, 96-bit) is left out.
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
_MACS = (
    "hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com", "hmac-sha2-256", "hmac-sha2-512", "hmac-sha1",
)  # fmt: skip
HOST_KEY_ALGORITHMS = (
    "ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "rsa-sha2-512", "rsa-sha2-256",
)  # fmt: skip
_WINDOW = 4 << 20
_TABLE = "_channel_handler_table"


class Tunnel:
    """A channel of one connection as the socket of another: its ``close`` never raises.

    paramiko closes its socket before it wakes those who wait for the connection, so an error there would leave them waiting.
    """

    def __init__(self, wire: Wire, channel: paramiko.Channel) -> None:
        """Take over ``channel`` of ``wire``."""
        self._wire = wire
        self._channel = channel

    def send(self, data: bytes) -> int:
        """Send some of ``data``."""
        with self._wire.on_behalf_of(self._channel):
            return self._channel.send(data)

    def recv(self, size: int) -> bytes:
        """Wait for data."""
        with self._wire.on_behalf_of(self._channel):
            return self._channel.recv(size)

    def settimeout(self, seconds: float | None) -> None:
        """Bound how long the others wait."""
        self._channel.settimeout(seconds)

    def close(self) -> None:
        """Let go. May be called twice, and never raises."""
        with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
            self._channel.close()

    @property
    def _closed(self) -> bool:
        """As the sockets of Python have it; paramiko looks at it."""
        return self._channel.closed


class Wire(paramiko.Transport):
    """One SSH connection over a socket or a channel of another one.

    1. What is sent ``on_behalf_of`` a channel never follows that channel's end. paramiko builds a message under the channel's
       lock and sends it later, and sshd ends the whole connection when something comes for a channel that is gone.
    2. While keys are exchanged, its own thread never waits to send: it is the one that has to exchange them.
    """

    # How often paramiko looks up from an idle socket: at its 0.1 s, a hundred idle nodes keep a core busy.
    _active_check_timeout = 1.0

    def __init__(self, sock: Any, host: SshHost, host_key_algorithms: Sequence[str]) -> None:
        """Speak over ``sock``; ``host_key_algorithms`` are asked for in this order."""
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
        self._speaking = threading.local()
        self._deferred: list[paramiko.Message] = []
        self.farewell = ""
        """What the other side said when it hung up."""

    @property
    def preferred_keys(self) -> Sequence[str]:
        """Host key algorithms, best first (paramiko's would put certificates last)."""
        return self._host_key_algorithms

    @contextlib.contextmanager
    def on_behalf_of(self, channel: paramiko.Channel) -> Iterator[None]:
        """Drop what this thread sends within the block once ``channel`` is closed."""
        before = getattr(self._speaking, "channel", None)
        self._speaking.channel = channel
        try:
            yield
        finally:
            self._speaking.channel = before

    # The rest is called by paramiko.

    def _send_message(self, data: paramiko.Message) -> None:
        # Whoever sends for a channel, its CLOSE included, holds paramiko's `clear_to_send_lock` here.
        channel = getattr(self._speaking, "channel", None)
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
        self.farewell = message.get_text()


def _take_request(channel: paramiko.Channel, message: paramiko.Message) -> None:
    """Handle ``exit-signal``, which paramiko ignores, so that a killed command would have no end."""
    if message.get_text() == "exit-signal":
        message.get_boolean()
        name = "SIG" + message.get_text()
        channel.exit_status = 128 + getattr(signal.Signals, name, signal.SIGKILL)
        channel.status_event.set()
        return
    message.rewind()
    message.get_int()
    channel._handle_request(message)  # type: ignore[attr-defined]  # noqa: SLF001  paramiko offers no other seam


setattr(Wire, _TABLE, {**getattr(paramiko.Transport, _TABLE), MSG_CHANNEL_REQUEST: _take_request})
