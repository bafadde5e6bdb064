"""Log in with a key: collect the keys for a host, and try them in the order of ssh.

Keys come from files and from ssh-agent, with their certificates. distflow never asks for a password or passphrase: a key with a
passphrase works only through ssh-agent, and passwords are never sent.
"""

from __future__ import annotations

import base64
import binascii
import copy
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, SSHCertificate, load_ssh_public_identity
from msgspec import Struct, field
from paramiko.agent import AgentKey, AgentSSH
from paramiko.pkey import PublicBlob, UnknownKeyType

from distflow.errors import AuthenticationRefused, NodeUnreachable
from distflow.shell import quote
from distflow.transports.base import Deadline
from distflow.transports.ssh.config import SshHost
from distflow.transports.ssh.hostkeys import fingerprint

__all__ = ["authenticate"]

_MAGIC = b"openssh-key-v1\0"
_UNREADABLE = (paramiko.SSHException, UnknownKeyType, UnsupportedAlgorithm, OSError, ValueError, LookupError, struct.error)


class _Identity(Struct, frozen=True):
    key: paramiko.PKey
    label: str
    """Type, fingerprint, and the file or ssh-agent's comment, for messages."""


class _Keyring(Struct):
    """The keys to try, and notes about keys that cannot be used."""

    agent: _Agent | None = None
    identities: list[_Identity] = field(default_factory=list)
    locked: list[str] = field(default_factory=list)
    """Key files with a passphrase."""
    notes: list[str] = field(default_factory=list)
    """Why other keys cannot be used."""


class _Agent(AgentSSH):
    """An ssh-agent at any socket. paramiko's own class always takes ``SSH_AUTH_SOCK``."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # An agent may require a confirmation by its user, so allow the rest of the connect timeout.
            connection.settimeout(timeout_s)
            connection.connect(path)
            self._connect(connection)  # type: ignore[attr-defined]
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]


def authenticate(node: str, transport: paramiko.Transport, host: SshHost, endpoint: str, deadline: Deadline) -> None:
    """Log in with one of the keys, or without a key if the host needs none.

    Raises ``AuthenticationRefused``, ``NodeUnreachable`` after the deadline, and ``OSError`` if the connection breaks. A host
    that closes the connection without a network error, as OpenSSH does after ``MaxAuthTries``, has refused the login.
    """
    keyring = _Keyring()
    try:
        _collect_keys(keyring, host, deadline)
        _try_all(node, transport, host, keyring, endpoint, deadline)
    finally:
        if keyring.agent is not None:
            keyring.agent.close()


def _try_all(
    node: str, transport: paramiko.Transport, host: SshHost, keyring: _Keyring, endpoint: str, deadline: Deadline
) -> None:
    tried: list[str] = []
    allowed: Sequence[str] = ()
    was_accepted = has_broken = False
    for identity in keyring.identities:
        transport.auth_timeout = max(0.1, deadline.left())
        try:
            allowed = transport.auth_publickey(host.user, identity.key)
            if not allowed:
                return
            was_accepted = True
            tried.append(f"{identity.label}: accepted, but the host requires further authentication")
            continue
        except paramiko.BadAuthenticationType as error:
            allowed = error.allowed_types
            break
        except paramiko.AuthenticationException:
            tried.append(identity.label)
        except (paramiko.SSHException, OSError, struct.error) as error:
            _raise_if_broken(transport, error)
            # The agent refused to sign, or there is no common algorithm. In paramiko, this may end the connection.
            keyring.notes.append(f"{identity.label} cannot be used: {error}")
            has_broken = not transport.is_active()
        if deadline.has_passed:
            raise NodeUnreachable(node, f"{endpoint} did not finish the login within {deadline.seconds:g} s")
        if not transport.is_active():
            break
    if transport.is_active():
        try:
            # Some servers need no key (Tailscale); others list the methods that they accept.
            transport.auth_none(host.user)
            return
        except paramiko.BadAuthenticationType as error:
            allowed = error.allowed_types
        except (paramiko.SSHException, OSError, EOFError) as error:
            _raise_if_broken(transport, error)
    hung_up = not transport.is_active() and not has_broken
    if has_broken and identity is not keyring.identities[-1]:
        remedy = (
            "unlock this key in the agent, or name the right key (`identity_file` of the node, or `IdentityFile`), and set "
            "`IdentitiesOnly yes` in ~/.ssh/config"
        )
        message = f"the connection to {endpoint} ended when a key could not be used; the other keys were not tried"
        raise AuthenticationRefused(node, message, hint="\n".join([*keyring.notes, remedy]))
    raise _refusal(node, keyring, tried, allowed, endpoint, hung_up=hung_up, was_accepted=was_accepted)


def _raise_if_broken(transport: paramiko.Transport, error: Exception) -> None:
    """Raise ``error`` if it is a network error that ended the connection.

    If the host closed the connection properly, paramiko raises an error of another type.
    """
    if isinstance(error, OSError) and not transport.is_active():
        raise error


def _refusal(
    node: str,
    keyring: _Keyring,
    tried: Sequence[str],
    allowed: Sequence[str],
    endpoint: str,
    *,
    hung_up: bool,
    was_accepted: bool,
) -> AuthenticationRefused:
    hints = ["tried:\n" + "\n".join(f"  {label}" for label in tried)] if tried else []
    count = len(keyring.identities)
    which = "the key" if count == 1 else f"all {count} keys" if len(tried) == count else f"{len(tried)} of {count} keys"
    takes_keys = not allowed or "publickey" in allowed
    if was_accepted:
        message = f"{endpoint} accepted a key, but requires further authentication"
    elif tried and hung_up:
        were = "was" if len(tried) == 1 else "were"
        why = "; perhaps it allows fewer tries" if count > 1 else ""
        message = f"{endpoint} closed the connection after {which} {were} tried{why}"
        hints.append(
            "name the right key (`identity_file` of the node, or `IdentityFile`), and set `IdentitiesOnly yes` in ~/.ssh/config"
        )
    elif tried:
        message = f"{endpoint} refused {which}"
    elif not takes_keys:
        message = f"{endpoint} does not accept keys"
    elif keyring.locked:
        message = f"there is no usable key for {endpoint}: {keyring.locked[0]} is protected by a passphrase"
    else:
        was_found = any(not note.endswith(": file not found") for note in keyring.notes)
        message = f"there is no usable key for {endpoint}" + ("" if was_found else ": no key was found")
    if keyring.locked and takes_keys:
        commands = " or ".join(f"`ssh-add {quote([file])}`" for file in keyring.locked)
        lack = "" if keyring.agent is not None else ' (no agent responds: first run `eval "$(ssh-agent)"`)'
        hints.append(f"keys with a passphrase work through the agent: run {commands}{lack}")
    if not takes_keys:
        start = "after that, the host" if was_accepted else "the host"
        hints.append(f"{start} accepts only {', '.join(allowed)}, which distflow never uses")
    elif tried and not hung_up and not was_accepted:
        hints.append("check the user name, and that the public key is in the user's ~/.ssh/authorized_keys on the host")
    hints += keyring.notes
    return AuthenticationRefused(node, message, hint="\n".join(hints))


def _collect_keys(keyring: _Keyring, host: SshHost, deadline: Deadline) -> None:
    """Collect the keys in the order of ssh: configured keys in the agent, other keys in the agent, then key files."""
    in_agent = _agent_keys(host, keyring, deadline)
    named: list[_Identity] = []
    from_files: list[_Identity] = []
    certificates = [found for file in host.certificate_files if (found := _read_certificate(file, keyring)) is not None]
    for file in host.identity_files:
        blob = _public_blob(file)
        label = _shortened(file)
        adjacent = _read_certificate(f"{file}-cert.pub", keyring) if os.path.exists(f"{file}-cert.pub") else None
        if blob is not None and blob in in_agent:
            key: paramiko.PKey = in_agent.pop(blob)
            into, label = named, f"{label} (agent)"
        else:
            loaded = _load(file, keyring, is_named=host.has_own_identities)
            if loaded is None:
                continue
            key, into = loaded, from_files
        matching = [one for one in (*([adjacent] if adjacent else []), *certificates) if _key_in(one) == key.asbytes()]
        for certificate in matching:
            into.append(_Identity(_certified(key, certificate), f"{fingerprint(key.asbytes())} {label} with certificate"))
        into.append(_Identity(key, f"{fingerprint(key.asbytes())} {label}"))
    if host.identities_only and in_agent:
        keyring.notes.append(
            f"`IdentitiesOnly yes` excludes {len(in_agent)} other key{'s' if len(in_agent) > 1 else ''} of the agent"
        )
    others = [] if host.identities_only else [
        _Identity(key, f"{fingerprint(key.asbytes())} {key.comment} (agent)") for key in in_agent.values()
    ]  # fmt: skip
    keyring.identities = named + others + from_files


def _agent_keys(host: SshHost, keyring: _Keyring, deadline: Deadline) -> dict[bytes, AgentKey]:
    if host.identity_agent is None:
        return {}
    try:
        keyring.agent = _Agent(host.identity_agent, max(0.1, deadline.left()))
    except (OSError, paramiko.SSHException, struct.error) as error:
        keyring.notes.append(f"the agent at {host.identity_agent} does not respond: {error}")
        return {}
    return {key.asbytes(): key for key in keyring.agent.get_keys()}


def _load(file: str, keyring: _Keyring, *, is_named: bool) -> paramiko.PKey | None:
    """Return the private key in ``file``, or note why it cannot be used and return ``None``.

    A missing default file is not noted.
    """
    label = _shortened(file)
    if not os.path.exists(file):
        if is_named:
            keyring.notes.append(f"{label}: file not found")
        return None
    try:
        key = paramiko.PKey.from_path(file)
    except (paramiko.PasswordRequiredException, TypeError):
        keyring.locked.append(file)
        return None
    except _UNREADABLE as error:
        if "password" in str(error).lower():
            keyring.locked.append(file)
        else:
            keyring.notes.append(f"{label} is not a usable private key: {str(error) or type(error).__name__}")
        return None
    key.public_blob = None
    return key


def _public_blob(file: str) -> bytes | None:
    """Return the public key of a key file, or ``None``. No passphrase is needed, and the ``.pub`` file alone is enough."""
    for path in (f"{file}.pub", file):
        try:
            data = Path(path).read_bytes()
        except OSError:
            continue
        fields = data.split()
        try:
            if data.startswith(b"-----BEGIN OPENSSH PRIVATE KEY-----"):
                message = paramiko.Message(base64.b64decode(b"".join(data.splitlines()[1:-1])))
                if message.get_bytes(len(_MAGIC)) == _MAGIC:
                    for _ in ("cipher", "kdf", "options of the kdf"):
                        message.get_binary()
                    message.get_int()
                    return message.get_binary()
            elif len(fields) > 1 and not data.startswith(b"-----"):
                return base64.b64decode(fields[1], validate=True)
        except (binascii.Error, struct.error, ValueError):
            continue
    return None


def _read_certificate(file: str, keyring: _Keyring) -> PublicBlob | None:
    try:
        return PublicBlob.from_file(file)
    except (OSError, ValueError, struct.error, paramiko.SSHException) as error:
        keyring.notes.append(f"{_shortened(file)} is not a usable certificate: {error}")
        return None


def _certified(key: paramiko.PKey, certificate: PublicBlob) -> paramiko.PKey:
    """Return a copy of the key that presents the certificate."""
    # copy.copy() fails for an agent's key, because its __getattr__ recurses.
    shown = AgentKey(key.agent, key.blob, key.comment) if isinstance(key, AgentKey) else copy.copy(key)
    shown.public_blob = certificate
    return shown


def _key_in(certificate: PublicBlob) -> bytes:
    """Return the public key that the certificate certifies; empty if it cannot be read."""
    try:
        text = f"{certificate.key_type} {base64.b64encode(certificate.key_blob).decode()}"
        found = load_ssh_public_identity(text.encode())
        if isinstance(found, SSHCertificate):
            found = found.public_key()
        return base64.b64decode(found.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    except (ValueError, UnsupportedAlgorithm):
        return b""


def _shortened(file: str) -> str:
    home = os.path.expanduser("~")
    return f"~{file[len(home) :]}" if file.startswith(home + "/") else file
