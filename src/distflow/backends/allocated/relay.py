"""A transport that runs commands on an allocated node through relays, which another transport starts."""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import re
import secrets
import struct
import threading
from collections.abc import Callable, Sequence

from distflow.backends.allocated.engine import node_name
from distflow.backends.machines.connection.bootstrap import python_argv
from distflow.errors import NodeUnreachable
from distflow.runtime.services.relay import CONNECTED, ENDED
from distflow.transports.base import REASON_MARK, Channel, Completed, Deadline, Transport, tail_with_reason

__all__ = ["RelayChannel", "RelayStream", "RelayTransport"]

_LARGEST_FRAME = 1 << 30
_END = struct.pack(">I", 0)
_TAIL = 2000
_TEST_S = 10.0
_END_S = 20.0
_KILLED = 137
_START_PAUSES_S = (1.0, 2.0, 3.0, 4.0, 5.0)
"""Seconds before each further try to start a relay after a temporary failure of the engine."""


class RelayTransport:
    """Runs commands in an allocation, on one of its nodes (contract: ``transports.base.Transport``).

    Each command and each connection uses a relay, which another transport (the carrier) starts. On Slurm, a relay is a step of
    the job, started from the login node. On Kubernetes, it is a process in the pod. The resident program starts the commands.
    Those of ``run`` end with their relay, and those of ``open`` do not. ``hang_up`` and ``close`` affect only this node: the
    carrier may be shared, and belongs to the caller.
    """

    def __init__(
        self,
        carrier: Transport,
        allocation_id: str,
        host: str,
        python: str = "python3",
        *,
        resident: str = "",
        prefix: Callable[[], Sequence[str]] = tuple,
        is_transient: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Use ``carrier`` to start relays in the allocation ``allocation_id`` on ``host``.

        ``resident`` is the name of the host's resident program; empty if that is ``host``. ``prefix`` returns the arguments
        before the command of a relay that make ``carrier`` run it on the node. It is called for each command, and may block or
        raise ``NodeUnreachable``. ``is_transient`` gets the output of a relay that did not start, and returns whether it may
        start a moment later.
        """
        self.name = node_name(host, allocation_id)
        self._carrier = carrier
        self._allocation = allocation_id
        self._host = resident or host
        self._python = python
        self._prefix = prefix
        self._is_transient = is_transient
        self._lock = threading.Lock()
        self._channels: set[RelayChannel] = set()
        self._is_suspect = False
        self._closing = threading.Event()

    @property
    def reached_address(self) -> str | None:
        """``None``: the carrier does not connect to the node's address."""
        return None

    @property
    def named_addresses(self) -> tuple[str, ...]:
        """Empty: this machine may be unable to resolve the node's name."""
        return ()

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Completed:
        """Run a command to its end. The resident program kills it after ``timeout_s``, and when the relay ends."""
        mark, deadline = _new_mark(), Deadline(timeout_s)
        command = self._command(["run", mark, self._allocation, self._host, f"{timeout_s:g}", *argv])
        for pause_s in (*_START_PAUSES_S, None):
            try:
                done = self._carrier.run(command, input=_frames(input) + _END, timeout_s=deadline.left())
            except NodeUnreachable as error:
                if deadline.has_passed:
                    raise self._late(argv, timeout_s) from error
                raise self._of_carrier(error) from error
            if not _failed_transiently(done.stderr.decode("utf-8", "replace"), mark, self._is_transient):
                break
            if pause_s is None or pause_s > deadline.left() or self._closing.wait(pause_s):
                break
        code = _exit_code(done.stderr, mark)
        if code == _KILLED and deadline.has_passed:
            raise self._late(argv, timeout_s)
        if code is None:
            printed = done.stderr.decode("utf-8", "replace").strip()
            raise NodeUnreachable(self.name, f"`{argv[0]}` could not be run: {printed[-_TAIL:] or 'the relay ended early'}")
        return Completed(exit_code=code, stdout=done.stdout, stderr=_without_marks(done.stderr, mark))

    def open(self, argv: Sequence[str]) -> RelayChannel:
        """Start a command and keep a channel to it."""
        mark = _new_mark()
        return self._opened(["run", mark, self._allocation, self._host, "-", *argv], mark)

    def dial(self, port: int, *, timeout_s: float) -> RelayStream:
        """Connect to a TCP port of the node."""
        channel = self._opened(["dial", str(port), f"{timeout_s:g}"])
        timer = threading.Timer(timeout_s, channel.close)
        timer.daemon = True
        timer.start()
        received = channel.read()
        timer.cancel()
        if not received.startswith(CONNECTED):
            tail = channel.stderr_tail().strip()
            channel.close()
            raise NodeUnreachable(self.name, f"nothing answers on its port {port} ({tail[-_TAIL:] or 'no answer'})")
        return RelayStream(self.name, channel, received[len(CONNECTED) :])

    def end_allocation(self, exit_code: int) -> None:
        """Let the resident program end the allocation with this exit code. Raises ``NodeUnreachable``."""
        command = self._command(["end", self._allocation, self._host, str(exit_code)])
        done = self._carrier.run(command, timeout_s=_END_S)
        if done.stdout != ENDED:
            raise NodeUnreachable(self.name, f"the allocation was not ended: {done.stderr.decode('utf-8', 'replace')[-_TAIL:]}")

    def hang_up(self) -> None:
        """Close the channels to this node. The next command first tests the carrier's connection."""
        with self._lock:
            self._is_suspect = True
        self._close_channels()

    def close(self) -> None:
        """Close the channels to this node for good."""
        self._closing.set()
        self._close_channels()

    def _opened(self, arguments: Sequence[str], mark: str = "") -> RelayChannel:
        def start() -> Channel:
            command = self._command(arguments)
            try:
                return self._carrier.open(command)
            except NodeUnreachable as error:
                raise self._of_carrier(error) from error

        channel = RelayChannel(self.name, start, mark, self._is_transient, self._forget)
        with self._lock:
            self._channels.add(channel)
        return channel

    def _command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command by which the carrier runs the relay with these arguments."""
        if self._closing.is_set():
            raise NodeUnreachable(self.name, "the transport is closed")
        if self._is_suspect:
            self._test_carrier()
        return [*self._prefix(), *python_argv(self._python), "-I", "-S", "-c", _source(), *arguments]

    def _test_carrier(self) -> None:
        try:
            self._carrier.run(["true"], timeout_s=_TEST_S)
        except NodeUnreachable as error:
            self._carrier.hang_up()
            raise self._of_carrier(error) from error
        with self._lock:
            self._is_suspect = False

    def _late(self, argv: Sequence[str], timeout_s: float) -> NodeUnreachable:
        return NodeUnreachable(self.name, f"`{argv[0]}` did not finish within {timeout_s:g} s")

    def _of_carrier(self, error: NodeUnreachable) -> NodeUnreachable:
        """Return an error of the carrier as an error of this node."""
        detail = error.detail if error.node == self.name else f"its login node {error.message}"
        return type(error)(self.name, detail, hint=error.hint)

    def _forget(self, channel: RelayChannel) -> None:
        with self._lock:
            self._channels.discard(channel)

    def _close_channels(self) -> None:
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.close()


class RelayChannel:
    """A command's pipes (contract: ``transports.base.Channel``).

    After a temporary failure to start the relay, ``read`` tries again, unless data was written.
    """

    def __init__(
        self,
        node: str,
        start: Callable[[], Channel],
        mark: str,
        is_transient: Callable[[str], bool],
        forget: Callable[[RelayChannel], None],
    ) -> None:
        """Start the relay: ``start`` returns a channel to it, or raises ``NodeUnreachable``.

        The relay's own lines begin with ``mark``, which is empty for a connection to a port. ``is_transient`` is as in
        ``RelayTransport``. ``forget`` is called when the channel ends.
        """
        self._node = node
        self._start = start
        self._mark = mark
        self._is_transient = is_transient
        self._forget = forget
        self._pauses = list(_START_PAUSES_S)
        self._closing = threading.Event()
        self._writing = threading.Lock()
        """Also guards the replacement of ``_channel``."""
        self._is_used = False
        """Whether data was sent in either direction."""
        self._channel = start()

    def write(self, data: bytes) -> None:
        """Send ``data`` to the command's standard input."""
        self._send(_frames(data))

    def end(self) -> None:
        """Close the command's standard input."""
        self._send(_END)

    def _send(self, frames: bytes) -> None:
        try:
            with self._writing:
                self._is_used = True
                self._channel.write(frames)
        except NodeUnreachable as error:
            raise NodeUnreachable(self._node, error.detail) from error

    def read(self) -> bytes:
        """Wait for output and return up to 64 KiB of it."""
        data = self._channel.read()
        while not data and self._restart():
            data = self._channel.read()
        if data:
            self._is_used = True
        else:
            self._forget(self)
        return data

    def stderr_tail(self) -> str:
        """The end of the command's standard error, or of the engine's messages if the command has not started.

        If the relay ended before the command, the last line reports that.
        """
        printed = self._channel.stderr_tail().encode("utf-8", "surrogateescape")
        text = _without_marks(printed, self._mark).decode("utf-8", "replace")
        is_broken = bool(self._mark) and self._channel.exit_code is not None and _exit_code(printed, self._mark) is None
        return tail_with_reason(text, "the relay ended before the command" if is_broken and REASON_MARK not in text else "")

    @property
    def exit_code(self) -> int | None:
        """The command's exit code; ``None`` while it runs, and if the relay ended first."""
        return _exit_code(self._channel.stderr_tail().encode("utf-8", "surrogateescape"), self._mark)

    def close(self) -> None:
        """Close the pipes; the command continues."""
        self._closing.set()
        self._channel.close()
        self._forget(self)

    def _restart(self) -> bool:
        """Start the relay again after a temporary failure. Returns whether it was started."""
        if not self._pauses or not _failed_transiently(self._channel.stderr_tail(), self._mark, self._is_transient):
            return False
        if self._closing.wait(self._pauses.pop(0)):
            return False
        with self._writing:
            if self._is_used:
                return False
            self._channel.close()
            try:
                self._channel = self._start()
            except NodeUnreachable:
                return False
        if self._closing.is_set():
            self._channel.close()
        return True


class RelayStream:
    """A connection to a port of the node (contract: ``transports.base.Stream``).

    When the program at the port closes its sending direction, the whole connection ends.
    """

    def __init__(self, node: str, channel: RelayChannel, received: bytes) -> None:
        """Use ``channel``, from which ``received`` was read already."""
        self._node = node
        self._channel = channel
        self._received = received

    def read(self) -> bytes:
        """Wait for data and return up to 64 KiB of it."""
        data, self._received = self._received, b""
        return data or self._channel.read()

    def write(self, data: bytes) -> None:
        """Send ``data``."""
        self._channel.write(data)

    def end(self) -> None:
        """Close the sending direction."""
        with contextlib.suppress(NodeUnreachable):
            self._channel.end()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def _frames(data: bytes) -> bytes:
    """Return ``data`` as the relay's input (``runtime/services/relay.py``)."""
    pieces = (data[start : start + _LARGEST_FRAME] for start in range(0, len(data), _LARGEST_FRAME))
    return b"".join(struct.pack(">I", len(piece)) + piece for piece in pieces)


def _failed_transiently(printed: str, mark: str, is_transient: Callable[[str], bool]) -> bool:
    """Return whether a relay did not start, and another try may succeed."""
    return not (mark and mark in printed) and is_transient(printed)


@functools.cache
def _source() -> str:
    return importlib.resources.files("distflow.runtime.services").joinpath("relay.py").read_text()


def _new_mark() -> str:
    return f"distflow-{secrets.token_hex(8)}"


def _exit_code(stderr: bytes, mark: str) -> int | None:
    """Return the exit code that the relay printed; ``None`` if it printed none."""
    found = re.search(rb"%s exit ([0-9]{1,3})\n" % mark.encode(), stderr) if mark else None
    return int(found[1]) if found is not None else None


def _without_marks(stderr: bytes, mark: str) -> bytes:
    """Return the command's standard error, without lines of the relay and without earlier messages of the engine."""
    before, line, after = stderr.partition(f"{mark} start\n".encode())
    printed = after if line else before
    return re.sub(rb"%s exit [0-9]{1,3}\n" % mark.encode(), b"", printed) if mark else stderr
