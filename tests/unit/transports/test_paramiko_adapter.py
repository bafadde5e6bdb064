"""Fixes and error messages of the paramiko adapter and of the login that need no server."""

from __future__ import annotations

import contextlib
import inspect
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import paramiko
import paramiko.ssh_exception
import pytest
from cryptography.exceptions import InvalidSignature, InvalidTag
from paramiko.hostkeys import InvalidHostKey
from paramiko.pkey import UnknownKeyType

from distflow.errors import AuthenticationRefused, NodeUnreachable
from distflow.transports.base import Deadline
from distflow.transports.ssh.authentication import _Identity, _Keyring, _try_all
from distflow.transports.ssh.config import Hop, SshDestination, resolve_hop
from distflow.transports.ssh.paramiko_adapter import (
    HOST_KEY_ALGORITHMS,
    ChannelSocket,
    PatchedTransport,
    convert_ssh_errors,
    explain,
)


class BrokenChannel:
    """A channel of a broken connection. Closing it raises, like a channel of paramiko that cannot send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.send = connection.send
        self.recv = connection.recv
        self.settimeout = connection.settimeout
        self.closed = False

    def close(self) -> None:
        self.closed = True
        self._connection.close()
        raise EOFError


class OuterTransport:
    @contextlib.contextmanager
    def on_behalf_of(self, _channel: object) -> Iterator[None]:
        yield


def test_a_channel_that_fails_to_close_wakes_waiting_threads() -> None:
    ours, theirs = socket.socketpair()
    outer: Any = OuterTransport()
    channel: Any = BrokenChannel(ours)
    host = resolve_hop(Hop(host="n1"), SshDestination(host="n1", config_file="none"))
    transport = PatchedTransport(ChannelSocket(outer, channel), host, HOST_KEY_ALGORITHMS)
    ended = threading.Event()
    transport.start_client(event=ended)
    theirs.close()
    assert ended.wait(60)
    assert not transport.is_active()
    assert channel.closed


ARGUMENTS: dict[str, tuple[object, ...]] = {
    "BadAuthenticationType": ("no", ["publickey"]),
    "BadHostKeyException": ("host", paramiko.RSAKey.generate(1024), paramiko.RSAKey.generate(1024)),
    "ChannelException": (1, "Administratively prohibited"),
    "NoValidConnectionsError": ({("10.0.0.1", 22): ConnectionRefusedError(111, "Connection refused")},),
    "PartialAuthentication": (["password"],),
    "ProxyCommandFailure": ("nc", "gone"),
}


def test_every_exception_of_paramiko_is_converted() -> None:
    classes = [one for _, one in inspect.getmembers(paramiko.ssh_exception, inspect.isclass) if issubclass(one, Exception)]
    assert len(classes) > 10
    for one in classes:
        error = one(*ARGUMENTS.get(one.__name__, ("what happened",)))
        with (
            pytest.raises(NodeUnreachable, match=r"^gpu1: me@gpu1:22: .+, while distflow was testing") as caught,
            convert_ssh_errors("gpu1", "me@gpu1:22", "testing"),
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
def test_errors_from_a_broken_or_hostile_peer_are_converted(error: Exception) -> None:
    with pytest.raises(NodeUnreachable, match=r"^gpu1: me@gpu1:22: ."), convert_ssh_errors("gpu1", "me@gpu1:22"):
        raise error


def test_errors_of_distflow_and_bugs_pass_through() -> None:
    for error in (AuthenticationRefused("gpu1", "no"), ZeroDivisionError(), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, convert_ssh_errors("gpu1", "me@gpu1:22"):
            raise error
        assert caught.value is error


def test_network_errors_are_explained() -> None:
    assert "nothing listens there" in str(explain("n", "p", ConnectionRefusedError(111, "")))
    assert "this name has no address" in str(explain("n", "p", socket.gaierror(socket.EAI_NONAME, "")))
    assert "cannot be looked up (try later)" in str(explain("n", "p", socket.gaierror(socket.EAI_AGAIN, "try later")))
    assert "it does not answer" in str(explain("n", "p", TimeoutError()))
    assert "it closed the connection" in str(explain("n", "p", None))


class LoginServer:
    """A connection that gives the next answer to each attempt to log in, and ends after the last one."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers

    def is_active(self) -> bool:
        return bool(self._answers)

    def auth_publickey(self, user: str, key: object) -> list[str]:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    def auth_none(self, user: str) -> None:
        self.auth_publickey(user, None)


REFUSED = paramiko.AuthenticationException("Authentication failed.")
ONLY_KEYS = paramiko.BadAuthenticationType("", ["publickey"])
NO_KEYS = paramiko.BadAuthenticationType("", ["password"])
ENDPOINT = "u@gpu1"


def log_in(keys: int, answers: list[Any]) -> None:
    """Log in with a number of keys to a server that gives these answers."""
    server: Any = LoginServer(list(answers))
    host: Any = resolve_hop(Hop(host="gpu1", user="u"), SshDestination(host="gpu1", config_file="none"))
    key: Any = object()
    keyring = _Keyring(identities=[_Identity(key, f"key {number}") for number in range(keys)])
    with convert_ssh_errors("gpu1", ENDPOINT, "logging in"):
        _try_all("gpu1", server, host, keyring, ENDPOINT, Deadline(60.0))


@pytest.mark.parametrize(
    ("keys", "answers", "message", "hints"),
    [
        (1, [REFUSED, ONLY_KEYS, 0], "refused the key", ["key 0", "authorized_keys"]),
        (2, [REFUSED, REFUSED, ONLY_KEYS, 0], "refused all 2 keys", ["key 1", "authorized_keys"]),
        (3, [REFUSED, REFUSED], "closed the connection after 2 of 3 keys were tried; perhaps it", ["key 1", "IdentitiesOnly"]),
        (2, [NO_KEYS, NO_KEYS, 0], "does not accept keys", ["the host accepts only password, which distflow never uses"]),
        (1, [["password"], NO_KEYS, 0], "but requires further authentication", ["after that, the host accepts only password,"]),
        (1, [["publickey"], ONLY_KEYS, 0], "accepted a key, but requires further authentication", ["key 0: accepted"]),
        (3, [paramiko.SSHException("unsigned")], "the other keys were not tried", ["key 0 cannot be used", "IdentitiesOnly"]),
        (
            2,
            [paramiko.SSHException("unsigned")] * 2,
            "there is no usable key",
            ["key 0 cannot be used", "key 1 cannot be used"],
        ),
        (1, [paramiko.SSHException("the agent did not sign")], "no usable key", ["key 0 cannot be used: the agent did not"]),
        (2, [REFUSED, paramiko.SSHException("unsigned")], "refused 1 of 2 keys", ["  key 0", "key 1 cannot be used: unsigned"]),
        (2, [OSError("unsigned"), REFUSED, ONLY_KEYS, 0], "refused 1 of 2 keys", ["  key 1", "key 0 cannot be used: unsigned"]),
    ],
)
def test_the_message_for_a_refused_login_gives_the_reason(
    keys: int, answers: list[Any], message: str, hints: list[str]
) -> None:
    with pytest.raises(AuthenticationRefused) as caught:
        log_in(keys, answers)
    assert message in caught.value.message
    for hint in hints:
        assert hint in caught.value.hint
    assert ("authorized_keys" in caught.value.hint) == caught.value.message.startswith(f"gpu1: {ENDPOINT} refused")
    assert "no key was found" not in caught.value.message


@pytest.mark.parametrize("answers", [[ConnectionResetError(104, "reset")], [REFUSED, ConnectionResetError(104, "reset")]])
def test_a_network_failure_during_the_login_is_not_a_refusal(answers: list[Any]) -> None:
    with pytest.raises(NodeUnreachable, match=f"{ENDPOINT}: it reset the connection, while distflow was logging in") as caught:
        log_in(1, answers)
    assert not isinstance(caught.value, AuthenticationRefused)


def test_a_connection_closed_after_the_only_key_is_not_explained_by_too_many_keys() -> None:
    with pytest.raises(AuthenticationRefused, match=rf"{ENDPOINT} closed the connection after the key was tried\n"):
        log_in(1, [REFUSED])
