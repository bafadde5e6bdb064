"""Foreign errors become ours: all of them, each naming the node."""

from __future__ import annotations

import inspect
import socket
import struct

import paramiko
import paramiko.ssh_exception
import pytest
from cryptography.exceptions import InvalidSignature, InvalidTag
from paramiko.hostkeys import InvalidHostKey
from paramiko.pkey import UnknownKeyType

from distflow.errors import AuthenticationRefused, NodeUnreachable
from distflow.transports.ssh.errors import explain, foreign_errors

ARGUMENTS: dict[str, tuple[object, ...]] = {
    "BadAuthenticationType": ("no", ["publickey"]),
    "BadHostKeyException": ("host", paramiko.RSAKey.generate(1024), paramiko.RSAKey.generate(1024)),
    "ChannelException": (1, "Administratively prohibited"),
    "NoValidConnectionsError": ({("10.0.0.1", 22): ConnectionRefusedError(111, "Connection refused")},),
    "PartialAuthentication": (["password"],),
    "ProxyCommandFailure": ("nc", "gone"),
}


def test_every_exception_of_paramiko_is_told() -> None:
    classes = [one for _, one in inspect.getmembers(paramiko.ssh_exception, inspect.isclass) if issubclass(one, Exception)]
    assert len(classes) > 10
    for one in classes:
        error = one(*ARGUMENTS.get(one.__name__, ("what happened",)))
        with (
            pytest.raises(NodeUnreachable, match=r"^gpu1: me@gpu1:22: .+, while testing") as caught,
            foreign_errors("gpu1", "me@gpu1:22", "testing"),
        ):
            raise error
        assert caught.value.node == "gpu1"
        assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        InvalidHostKey("line", ValueError()), UnknownKeyType("x", b""), EOFError(), TimeoutError(), TimeoutError("timed out"),
        socket.gaierror(-2, "unknown"), ConnectionResetError(104, "reset"), BrokenPipeError(32, "pipe"),
        OSError(113, "no route"), OSError(), OSError("text"), InvalidSignature(), InvalidTag(), struct.error("short"),
        IndexError("index"), UnicodeDecodeError("utf-8", b"", 0, 1, "no"),
    ],
)  # fmt: skip
def test_what_a_broken_or_hostile_peer_causes_is_told(error: Exception) -> None:
    with pytest.raises(NodeUnreachable, match=r"^gpu1: me@gpu1:22: ."), foreign_errors("gpu1", "me@gpu1:22"):
        raise error


def test_our_own_errors_and_bugs_pass_through() -> None:
    for error in (AuthenticationRefused("gpu1", "no"), ZeroDivisionError(), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, foreign_errors("gpu1", "me@gpu1:22"):
            raise error
        assert caught.value is error


def test_words() -> None:
    assert "nothing listens there" in str(explain("n", "p", ConnectionRefusedError(111, "")))
    assert "this name has no address" in str(explain("n", "p", socket.gaierror(-2, "")))
    assert "it does not answer" in str(explain("n", "p", TimeoutError()))
    assert "it closed the connection" in str(explain("n", "p", None))
