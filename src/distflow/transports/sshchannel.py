"""A command that runs at the other end of an SSH connection: its pipes, and its end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import paramiko

from distflow.errors import NodeUnreachable
from distflow.transports.base import Completed
from distflow.transports.deadline import Deadline
from distflow.transports.ssherrors import FOREIGN, foreign_errors
from distflow.transports.sshlink import SshLink
from distflow.transports.sshwire import send_signal

__all__ = ["SshChannel", "run_to_end"]

_READ = 65536
_BULK = 1 << 20
_PACKET = 32000
"""Sending more at once makes paramiko copy what is left again for each packet."""
_TAIL = 16384
_DRAINED_S = 2.0
_FAREWELL_S = 1.0


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
            _send(self._link, self._channel, data)

    def read(self) -> bytes:
        """Wait for output; return what is there, up to 64 KiB."""
        with self._reading:
            if self._is_closed:
                return b""
            data = b""
            # The window is opened again in passing, which fails when the connection has just broken.
            with contextlib.suppress(*FOREIGN):
                data = self._channel.recv(_READ)
            if not data:
                self._drain.join(_DRAINED_S)
            return data

    def stderr_tail(self) -> str:
        """The end of what the command wrote to standard error, and why the connection broke when it did."""
        with self._state:
            said = bytes(self._stderr[-_TAIL:]).decode("utf-8", "replace")
        why = "" if self._is_closed else self._link.why_it_ended()
        return f"{said}{'' if not said or said.endswith(chr(10)) else chr(10)}[ssh] {why}\n" if why else said

    def close(self) -> None:
        """Let go of the command."""
        with self._state:
            if self._is_closed:
                return
            self._is_closed = True
        _let_go(self._link, self._channel, self._channel.close)

    def _drain_stderr(self) -> None:
        with contextlib.suppress(*FOREIGN):
            while data := self._channel.recv_stderr(_READ):
                with self._state:
                    self._stderr += data
                    del self._stderr[:-_TAIL]


def run_to_end(link: SshLink, channel: paramiko.Channel, program: str, given: bytes, deadline: Deadline) -> Completed:
    """Feed and drain a command until it ends; stop it and raise ``NodeUnreachable`` when ``deadline`` passes."""
    stderr = bytearray()

    def collect() -> None:
        with contextlib.suppress(*FOREIGN):
            while data := channel.recv_stderr(_BULK):
                stderr.extend(data)

    def feed() -> None:
        # A command may end without reading everything.
        with contextlib.suppress(NodeUnreachable, *FOREIGN):
            _send(link, channel, given)
            channel.shutdown_write()

    def expire() -> None:
        def stop() -> None:
            with contextlib.suppress(*FOREIGN):
                send_signal(channel, "KILL")
            channel.close()

        _let_go(link, channel, stop)

    timer = threading.Timer(deadline.left(), expire)
    helpers = [threading.Thread(target=one, name=f"{program} on {link.node}", daemon=True) for one in (collect, feed)]
    timer.daemon = True
    for thread in (timer, *helpers):
        thread.start()
    stdout = bytearray()
    try:
        with foreign_errors(link.node, link.place, f"running `{program}`"):
            while data := channel.recv(_BULK):
                stdout += data
        channel.status_event.wait(deadline.left())
        helpers[0].join(_DRAINED_S)
        is_late = deadline.has_passed
    finally:
        timer.cancel()
        _let_go(link, channel, channel.close)
    if channel.exit_status >= 0:
        return Completed(exit_code=channel.exit_status, stdout=bytes(stdout), stderr=bytes(stderr))
    if is_late:
        raise NodeUnreachable(link.node, f"`{program}` did not end within {deadline.seconds:g} s")
    why = link.why_it_ended() or "its sshd did not say how it ended"
    raise NodeUnreachable(link.node, f"the connection broke while `{program}` ran: {why}")


def _send(link: SshLink, channel: paramiko.Channel, data: bytes) -> None:
    position = 0
    while position < len(data):
        sent = channel.send(data[position : position + _PACKET])
        if sent == 0:
            raise NodeUnreachable(link.node, "the channel is closed")
        position += sent


def _let_go(link: SshLink, channel: paramiko.Channel, goodbye: Callable[[], None]) -> None:
    """Say goodbye to a command; when that does not get through, the connection is dead and is closed as a whole."""
    if channel.closed:
        return

    def say() -> None:
        with contextlib.suppress(*FOREIGN):
            goodbye()

    thread = threading.Thread(target=say, name=f"goodbye to {link.node}", daemon=True)
    thread.start()
    thread.join(_FAREWELL_S)
    if thread.is_alive():
        link.close()
