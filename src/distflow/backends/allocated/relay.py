"""Commands on an allocated node, as a transport: relays on the node, which the engine starts from its login node."""

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
from distflow.runtime.services.relay import CONNECTED
from distflow.transports.base import REASON_MARK, Channel, Completed, Deadline, Transport, tail_with_reason

__all__ = ["RelayChannel", "RelayStream", "RelayTransport"]

_PIECE = 1 << 20
_TAIL = 2000
_TEST_S = 10.0
_KILLED = 137


class RelayTransport:
    """Runs commands in a Slurm job, on one of its nodes (contract: ``transports.base.Transport``).

    Each command and each connection is a step of the job, which shares the node with the step of the resident program. The
    resident program starts the commands, so they do not end with the step. ``hang_up`` and ``close`` concern only this node:
    the transport to the login node is shared, and belongs to the caller.
    """

    def __init__(
        self,
        login: Transport,
        allocation_id: str,
        host: str,
        python: str = "python3",
        *,
        het_group: Callable[[], int | None] | None = None,
        owns_login: bool = False,
    ) -> None:
        """Use ``login`` to reach the job ``allocation_id`` on ``host``.

        ``het_group`` returns which component of a heterogeneous job has the host; ``None`` for other jobs. It is called for
        each command, and may block or raise ``NodeUnreachable``. With ``owns_login``, ``close`` closes ``login``.
        """
        self._owns_login = owns_login
        self.name = node_name(host, allocation_id)
        self._login = login
        self._job = allocation_id
        self._host = host
        self._python = python
        self._het_group = het_group
        self._lock = threading.Lock()
        self._channels: set[RelayChannel] = set()
        self._is_suspect = False
        self._is_closed = False

    @property
    def reached_address(self) -> str | None:
        """``None``: the node's address is not known on the login node."""
        return None

    @property
    def named_addresses(self) -> tuple[str, ...]:
        """Empty: this machine need not be able to resolve the node's name."""
        return ()

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Completed:
        """Run a command to its end. The resident program kills it after ``timeout_s``, and when the relay ends."""
        mark, deadline = _new_mark(), Deadline(timeout_s)
        command = self._command(["run", mark, self._job, self._host, f"{timeout_s:g}", *argv])
        try:
            done = self._login.run(command, input=input, timeout_s=timeout_s)
        except NodeUnreachable as error:
            if deadline.has_passed:
                raise self._late(argv, timeout_s) from error
            raise self._from_login(error) from error
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
        return self._opened(["run", mark, self._job, self._host, "-", *argv], mark)

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

    def hang_up(self) -> None:
        """Close the channels to this node. The next command first tests the connection to the login node."""
        with self._lock:
            self._is_suspect = True
        self._close_channels()

    def close(self) -> None:
        """Close the channels to this node for good."""
        with self._lock:
            self._is_closed = True
        self._close_channels()
        if self._owns_login:
            self._login.close()

    def _opened(self, words: Sequence[str], mark: str = "") -> RelayChannel:
        command = self._command(words)
        try:
            channel = RelayChannel(self.name, self._login.open(command), mark, self._forget)
        except NodeUnreachable as error:
            raise self._from_login(error) from error
        with self._lock:
            self._channels.add(channel)
        return channel

    def _command(self, words: Sequence[str]) -> list[str]:
        """Return the command for the login node that runs the relay with these arguments."""
        if self._is_closed:
            raise NodeUnreachable(self.name, "the transport is closed")
        if self._is_suspect:
            self._test_login()
        group = self._het_group() if self._het_group is not None else None
        return [
            "srun", f"--jobid={self._job}", *([] if group is None else [f"--het-group={group}"]),
            "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={self._host}", "--gres=none", "--mpi=none", "--chdir=/",
            # Without it, Slurm keeps back incomplete lines.
            "--unbuffered", "--quiet",
            *python_argv(self._python), "-I", "-S", "-c", _source(), *words,
        ]  # fmt: skip

    def _test_login(self) -> None:
        try:
            self._login.run(["true"], timeout_s=_TEST_S)
        except NodeUnreachable as error:
            self._login.hang_up()
            raise self._from_login(error) from error
        with self._lock:
            self._is_suspect = False

    def _late(self, argv: Sequence[str], timeout_s: float) -> NodeUnreachable:
        return NodeUnreachable(self.name, f"`{argv[0]}` did not finish within {timeout_s:g} s")

    def _from_login(self, error: NodeUnreachable) -> NodeUnreachable:
        """Return an error of the login node as one of this node."""
        return type(error)(self.name, f"its login node {error}", hint=error.hint)

    def _forget(self, channel: RelayChannel) -> None:
        with self._lock:
            self._channels.discard(channel)

    def _close_channels(self) -> None:
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.close()


class RelayChannel:
    """A command's pipes (contract: ``transports.base.Channel``)."""

    def __init__(self, node: str, channel: Channel, mark: str, forget: Callable[[RelayChannel], None]) -> None:
        """Use ``channel`` to the relay. ``mark`` begins the relay's own lines; ``forget`` is called at the end."""
        self._node = node
        self._channel = channel
        self._mark = mark
        self._forget = forget

    def write(self, data: bytes) -> None:
        """Send ``data`` to the command's standard input."""
        try:
            self._channel.write(data)
        except NodeUnreachable as error:
            raise NodeUnreachable(self._node, error.detail) from error

    def read(self) -> bytes:
        """Wait for output and return up to 64 KiB of it."""
        data = self._channel.read()
        if not data:
            self._forget(self)
        return data

    def stderr_tail(self) -> str:
        """The end of the command's standard error, and that of ``srun`` if it ended before the command."""
        printed = self._channel.stderr_tail().encode("utf-8", "surrogateescape")
        text = _without_marks(printed, self._mark).decode("utf-8", "replace")
        is_broken = self._channel.exit_code is not None and _exit_code(printed, self._mark) is None
        return tail_with_reason(text, "the relay ended before the command" if is_broken and REASON_MARK not in text else "")

    @property
    def exit_code(self) -> int | None:
        """The command's exit code; ``None`` while it runs, and if the relay ended first."""
        return _exit_code(self._channel.stderr_tail().encode("utf-8", "surrogateescape"), self._mark)

    def close(self) -> None:
        """Close the pipes; the command continues."""
        self._channel.close()
        self._forget(self)


class RelayStream:
    """A connection to a port of the node (contract: ``transports.base.Stream``).

    When the port closes its direction, the whole connection ends.
    """

    def __init__(self, node: str, channel: RelayChannel, received: bytes) -> None:
        """Use ``channel``, from which ``received`` was read already."""
        self._node = node
        self._channel = channel
        self._received = received
        self._writing = threading.Lock()

    def read(self) -> bytes:
        """Wait for data and return up to 64 KiB of it."""
        data, self._received = self._received, b""
        return data or self._channel.read()

    def write(self, data: bytes) -> None:
        """Send ``data``."""
        with self._writing:
            for start in range(0, len(data), _PIECE):
                piece = data[start : start + _PIECE]
                self._channel.write(struct.pack(">I", len(piece)) + piece)

    def end(self) -> None:
        """Close the direction to the port."""
        with self._writing, contextlib.suppress(NodeUnreachable):
            self._channel.write(struct.pack(">I", 0))

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


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
    """Return the command's standard error: without lines of the relay, and without messages of ``srun`` before its start."""
    before, line, after = stderr.partition(f"{mark} start\n".encode())
    printed = after if line else before
    return re.sub(rb"%s exit [0-9]{1,3}\n" % mark.encode(), b"", printed) if mark else stderr
