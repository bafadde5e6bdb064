"""A command that runs at the other end of an SSH connection: its pipes, and its end."""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
from collections.abc import Callable, Sequence

import paramiko

from distflow.errors import NodeUnreachable
from distflow.transports.base import Completed
from distflow.transports.deadline import Deadline
from distflow.transports.sshcommand import remote_command
from distflow.transports.ssherrors import FOREIGN, foreign_errors
from distflow.transports.sshlink import SshLink

__all__ = ["SshChannel", "SshStream", "run_to_end"]

_READ = 65536
_BULK = 1 << 20
_PACKET = 32000
"""Sending more at once makes paramiko copy what is left again for each packet."""
_TAIL = 16384
_DRAINED_S = 2.0
_FAREWELL_S = 1.0
_LATE_S = 2.0
"""For stopping a command that took too long: finding its process, killing it, hearing that it is gone."""
_STOPPED_S = 3 * _LATE_S


class SshChannel:
    """A command's pipes (contract: ``transports.base.Channel``)."""

    def __init__(self, link: SshLink, channel: paramiko.Channel) -> None:
        """Take over ``channel``, in which a command has been started."""
        self._link = link
        self._channel = channel
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self._state = threading.Lock()
        self._stderr = bytearray()
        self._is_closed = False
        self._drain = threading.Thread(target=self._drain_stderr, name=f"stderr of {link.node}", daemon=True)
        self._drain.start()

    def write(self, data: bytes) -> None:
        """Send ``data`` to the command's standard input."""
        with self._writing, foreign_errors(self._link.node, self._link.place, "writing to a command"):
            if self._is_closed:
                raise NodeUnreachable(self._link.node, "the channel is closed")
            with self._link.on_behalf_of(self._channel):
                _send(self._link, self._channel, data)

    def read(self) -> bytes:
        """Wait for output; return what is there, up to 64 KiB."""
        with self._reading:
            if self._is_closed:
                return b""
            data = b""
            # The window is opened again in passing, which fails when the connection has just broken.
            with contextlib.suppress(*FOREIGN), self._link.on_behalf_of(self._channel):
                data = self._channel.recv(_READ)
            if not data:
                self._drain.join(_DRAINED_S)
                # Its end is told after the end of its output.
                self._channel.status_event.wait(_FAREWELL_S)
            return data

    def stderr_tail(self) -> str:
        """The end of what the command wrote to standard error, and why the connection broke when it did."""
        with self._state:
            said = bytes(self._stderr[-_TAIL:]).decode("utf-8", "replace")
        why = "" if self._is_closed else self._link.why_it_ended()
        return f"{said}{'' if not said or said.endswith(chr(10)) else chr(10)}[ssh] {why}\n" if why else said

    @property
    def exit_code(self) -> int | None:
        """How the command ended; ``None`` while it runs, or when the connection broke first."""
        return self._channel.exit_status if self._channel.exit_status >= 0 else None

    def close(self) -> None:
        """Let go of the command."""
        with self._state:
            if self._is_closed:
                return
            self._is_closed = True
        _let_go(self._link, self._channel, self._channel.close)

    def _drain_stderr(self) -> None:
        with contextlib.suppress(*FOREIGN), self._link.on_behalf_of(self._channel):
            while data := self._channel.recv_stderr(_READ):
                with self._state:
                    self._stderr += data
                    del self._stderr[:-_TAIL]


class SshStream:
    """A TCP connection that sshd made (contract: ``transports.base.Stream``)."""

    def __init__(self, link: SshLink, channel: paramiko.Channel) -> None:
        """Take over ``channel``."""
        self._link = link
        self._channel = channel

    def read(self) -> bytes:
        """Wait for data; return what is there, up to 64 KiB."""
        with contextlib.suppress(*FOREIGN), self._link.on_behalf_of(self._channel):
            return self._channel.recv(_READ)
        return b""

    def write(self, data: bytes) -> None:
        """Send ``data``."""
        with foreign_errors(self._link.node, self._link.place, "writing to a port"), self._link.on_behalf_of(self._channel):
            _send(self._link, self._channel, data)

    def end(self) -> None:
        """Write no more."""
        with contextlib.suppress(*FOREIGN), self._link.on_behalf_of(self._channel):
            self._channel.shutdown_write()

    def close(self) -> None:
        """Hang up."""
        _let_go(self._link, self._channel, self._channel.close)


def run_to_end(link: SshLink, argv: Sequence[str], given: bytes, deadline: Deadline) -> Completed:
    """Run a command, feeding and draining it; stop it and raise ``NodeUnreachable`` when ``deadline`` passes."""
    program, mark = argv[0], f"distflow-{secrets.token_hex(8)}"
    stderr = bytearray()
    pid = re.compile(rf"{mark} (\d+)\n".encode())
    # A command that starts too late is stopped as well, for which it must have started.
    channel = link.execute(remote_command(argv, mark), deadline, grace_s=_LATE_S)

    def collect() -> None:
        with contextlib.suppress(*FOREIGN), link.on_behalf_of(channel):
            while data := channel.recv_stderr(_BULK):
                stderr.extend(data)

    def feed() -> None:
        # A command may end without reading everything.
        with contextlib.suppress(NodeUnreachable, *FOREIGN), link.on_behalf_of(channel):
            _send(link, channel, given)
            channel.shutdown_write()

    def stop() -> None:
        patience = Deadline(_LATE_S)
        while (found := pid.search(stderr)) is None and not patience.has_passed and not channel.status_event.wait(0.02):
            continue
        if found is not None and not channel.status_event.is_set():
            with contextlib.suppress(NodeUnreachable):
                _kill(link, found[1].decode())
        channel.close()

    def expire() -> None:
        is_late.set()
        _let_go(link, channel, stop, patience_s=_STOPPED_S)

    is_late = threading.Event()
    timer = threading.Timer(deadline.left(), expire)
    helpers = [threading.Thread(target=one, name=f"{program} on {link.node}", daemon=True) for one in (collect, feed)]
    timer.daemon = True
    for thread in (timer, *helpers):
        thread.start()
    stdout = bytearray()
    try:
        with foreign_errors(link.node, link.place, f"running `{program}`"), link.on_behalf_of(channel):
            while data := channel.recv(_BULK):
                stdout += data
        channel.status_event.wait(max(deadline.left(), _LATE_S))
        helpers[0].join(_DRAINED_S)
    finally:
        timer.cancel()
        _let_go(link, channel, channel.close)
    if is_late.is_set():
        raise NodeUnreachable(link.node, f"`{program}` did not end within {deadline.seconds:g} s")
    if channel.exit_status < 0:
        why = link.why_it_ended() or "its sshd did not say how it ended"
        raise NodeUnreachable(link.node, f"the connection broke while `{program}` ran: {why}")
    return Completed(exit_code=channel.exit_status, stdout=bytes(stdout), stderr=pid.sub(b"", bytes(stderr), count=1))


def _kill(link: SshLink, pid: str) -> None:
    """Kill a process group on the node. sshd itself sends signals neither for root nor below a forced command."""
    script = "kill -s KILL -- -$1 2>/dev/null || kill -s KILL $1"
    channel = link.execute(remote_command(["sh", "-c", script, "sh", pid]), Deadline(_LATE_S))
    channel.status_event.wait(_LATE_S)
    channel.close()


def _send(link: SshLink, channel: paramiko.Channel, data: bytes) -> None:
    position = 0
    while position < len(data):
        sent = channel.send(data[position : position + _PACKET])
        if sent == 0:
            raise NodeUnreachable(link.node, "the channel is closed")
        position += sent


def _let_go(link: SshLink, channel: paramiko.Channel, goodbye: Callable[[], None], *, patience_s: float = _FAREWELL_S) -> None:
    """Say goodbye to a command; when that does not get through, the connection is dead and is closed as a whole."""
    if channel.closed:
        return

    def say() -> None:
        with contextlib.suppress(*FOREIGN):
            goodbye()

    thread = threading.Thread(target=say, name=f"goodbye to {link.node}", daemon=True)
    thread.start()
    thread.join(patience_s)
    if thread.is_alive():
        link.close()
