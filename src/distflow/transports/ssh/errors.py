"""Errors of paramiko, the operating system and cryptography as errors of distflow. A test checks that none is missing."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator

import paramiko
from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from paramiko.hostkeys import InvalidHostKey
from paramiko.pkey import UnknownKeyType

from distflow.errors import NodeError, NodeUnreachable

__all__ = ["FOREIGN", "explain", "foreign_errors"]

FOREIGN: tuple[type[Exception], ...] = (
    paramiko.SSHException, UnknownKeyType, InvalidHostKey,
    OSError, EOFError,
    # paramiko's thread passes these on after a malformed packet.
    InvalidSignature, InvalidTag, UnsupportedAlgorithm, struct.error, ValueError, LookupError,
)  # fmt: skip

_CODES: dict[int | None, tuple[str, str]] = {
    errno.ECONNREFUSED: ("nothing listens there (connection refused)", "is sshd running there, and on this port?"),
    errno.EHOSTUNREACH: ("no route to host", "is the machine on, and in a network that this machine can reach?"),
    errno.ENETUNREACH: ("its network is unreachable", "is this machine online, or is a VPN down?"),
    errno.ETIMEDOUT: ("it does not answer", "is the machine on, or does a firewall drop packets?"),
    errno.ECONNRESET: ("it reset the connection", ""),
    errno.EPIPE: ("it reset the connection", ""),
}


@contextlib.contextmanager
def foreign_errors(node: str, place: str, doing: str = "") -> Iterator[None]:
    """Raise foreign errors as ``NodeUnreachable`` of ``node``. ``place`` and ``doing`` say where and in which step."""
    try:
        yield
    except NodeError:
        raise
    except FOREIGN as error:
        raise explain(node, place, error, doing) from error


def explain(node: str, place: str, error: BaseException | None, doing: str = "") -> NodeUnreachable:
    """Return ``error`` as a message for people."""
    what, hint = _describe(error)
    return NodeUnreachable(node, f"{place}: {what}" + (f", while {doing}" if doing else ""), hint=hint)


def _describe(error: BaseException | None) -> tuple[str, str]:
    if isinstance(error, socket.gaierror):
        return "this name has no address", "is it spelled right, or a `Host` of ~/.ssh/config without `HostName`?"
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
