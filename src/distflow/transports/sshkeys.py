"""Our keys: which there are for a host, in the order in which ssh would try them, and proving one of them to it.

Keys come from files and from the agent, with the certificates that lie beside them. Nothing here asks a person: a key that is
protected by a passphrase is used through the agent or not at all, and passwords are never sent.
"""

from __future__ import annotations

import base64
import binascii
import copy
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, SSHCertificate, load_ssh_public_identity
from paramiko.agent import AgentKey, AgentSSH
from paramiko.pkey import PublicBlob, UnknownKeyType

from distflow.errors import AuthenticationRefused, NodeUnreachable
from distflow.shell import quote
from distflow.transports.deadline import Deadline
from distflow.transports.hostkeys import fingerprint
from distflow.transports.sshconfig import SshHost

__all__ = ["authenticate"]

_MAGIC = b"openssh-key-v1\0"
_UNREADABLE = (paramiko.SSHException, UnknownKeyType, UnsupportedAlgorithm, OSError, ValueError, LookupError, struct.error)


@dataclass(frozen=True, slots=True)
class _Identity:
    key: paramiko.PKey
    label: str
    """Kind, fingerprint and place, for messages."""


@dataclass
class _Keyring:
    """What there is to try, and what was found on the way."""

    agent: _Agent | None = None
    identities: list[_Identity] = field(default_factory=list)
    locked: list[str] = field(default_factory=list)
    """Files that need a passphrase."""
    notes: list[str] = field(default_factory=list)
    """What is wrong with the others."""


class _Agent(AgentSSH):
    """An ssh-agent at a socket that may be another than ``SSH_AUTH_SOCK``."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # An agent may ask its user to confirm: that takes as long as the connection may take.
            connection.settimeout(timeout_s)
            connection.connect(path)
            self._connect(connection)  # type: ignore[attr-defined]
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]


def authenticate(node: str, wire: paramiko.Transport, host: SshHost, place: str, deadline: Deadline) -> None:
    """Prove one of our keys to the host. Raises ``AuthenticationRefused``, and ``NodeUnreachable`` when it hangs up."""
    ring = _Keyring()
    try:
        _gather(ring, host, deadline)
        _try_all(node, wire, host, ring, place, deadline)
    finally:
        if ring.agent is not None:
            ring.agent.close()


def _try_all(node: str, wire: paramiko.Transport, host: SshHost, ring: _Keyring, place: str, deadline: Deadline) -> None:
    tried: list[str] = []
    allowed: Sequence[str] = ()
    for identity in ring.identities:
        wire.auth_timeout = max(0.1, deadline.left())
        try:
            allowed = wire.auth_publickey(host.user, identity.key)
            if not allowed:
                return
            tried.append(f"{identity.label}: accepted, but not enough")
            continue
        except paramiko.BadAuthenticationType as error:
            allowed = error.allowed_types
            break
        except paramiko.AuthenticationException:
            tried.append(identity.label)
        except (paramiko.SSHException, OSError, struct.error) as error:
            # The agent does not sign, or there is no common algorithm: the next key may do.
            tried.append(f"{identity.label}: {error}")
        if deadline.has_passed:
            raise NodeUnreachable(node, f"{place} did not end the login within {deadline.seconds:g} s")
        if not wire.is_active():
            break
    if wire.is_active():
        try:
            # Some servers know who we are without a key (Tailscale); the others say what they accept.
            wire.auth_none(host.user)
            return
        except paramiko.BadAuthenticationType as error:
            allowed = error.allowed_types
        except (paramiko.SSHException, OSError, EOFError):
            pass
    raise _refusal(node, ring, tried, allowed, place, hung_up=not wire.is_active())


def _refusal(
    node: str, ring: _Keyring, tried: Sequence[str], allowed: Sequence[str], place: str, *, hung_up: bool
) -> AuthenticationRefused:
    hints = []
    if tried:
        many = " and hung up: too many were tried" if hung_up else ""
        message = f"{place} refused {'our key' if len(tried) == 1 else f'all {len(tried)} keys'}{many}"
        hints.append("tried:\n" + "\n".join(f"  {label}" for label in tried))
        if many:
            hints.append("name the right key: `identity_file` of the node, or `IdentityFile` with `IdentitiesOnly yes`")
    elif ring.locked:
        message = f"{place} was shown no key: {ring.locked[0]} is protected by a passphrase"
    else:
        message = f"{place} was shown no key: none was found"
    if ring.locked:
        commands = " or ".join(f"`ssh-add {quote([file])}`" for file in ring.locked)
        lack = "" if ring.agent is not None else ' (no agent is running: first `eval "$(ssh-agent)"`)'
        hints.append(f"keys with a passphrase are used through the agent: type {commands}{lack}")
    if allowed and "publickey" not in allowed:
        hints.append(f"the host accepts only {', '.join(allowed)}, which distflow never uses")
    elif tried and not hung_up:
        hints.append("is the public key in the user's ~/.ssh/authorized_keys there, and is the user the right one?")
    hints += ring.notes
    return AuthenticationRefused(node, message, hint="\n".join(hints))


def _gather(ring: _Keyring, host: SshHost, deadline: Deadline) -> None:
    """Find what ssh would try: the agent's keys that are also configured, its others, then the files."""
    held = _ask_agent(host, ring, deadline)
    named: list[_Identity] = []
    from_files: list[_Identity] = []
    certificates = [found for file in host.certificate_files if (found := _read_certificate(file, ring)) is not None]
    for file in host.identity_files:
        blob = _public_blob(file)
        place = _short(file)
        beside = _read_certificate(f"{file}-cert.pub", ring) if os.path.exists(f"{file}-cert.pub") else None
        if blob is not None and blob in held:
            key: paramiko.PKey = held.pop(blob)
            into, place = named, f"{place} (agent)"
        else:
            loaded = _load(file, ring, is_named=host.has_own_identities)
            if loaded is None:
                continue
            key, into = loaded, from_files
        fitting = [one for one in (*([beside] if beside else []), *certificates) if _key_in(one) == key.asbytes()]
        for certificate in fitting:
            into.append(_Identity(_certified(key, certificate), f"{fingerprint(key.asbytes())} {place} with certificate"))
        into.append(_Identity(key, f"{fingerprint(key.asbytes())} {place}"))
    others = [] if host.identities_only else [
        _Identity(key, f"{fingerprint(key.asbytes())} {key.comment} (agent)") for key in held.values()
    ]  # fmt: skip
    ring.identities = named + others + from_files


def _ask_agent(host: SshHost, ring: _Keyring, deadline: Deadline) -> dict[bytes, AgentKey]:
    if host.identity_agent is None:
        return {}
    try:
        ring.agent = _Agent(host.identity_agent, max(0.1, deadline.left()))
    except (OSError, paramiko.SSHException, struct.error) as error:
        ring.notes.append(f"the agent at {host.identity_agent} does not answer: {error}")
        return {}
    return {key.asbytes(): key for key in ring.agent.get_keys()}


def _load(file: str, ring: _Keyring, *, is_named: bool) -> paramiko.PKey | None:
    """Return the private key in ``file``, or note why there is none."""
    place = _short(file)
    if not os.path.exists(file):
        if is_named:
            ring.notes.append(f"{place}: there is no such file")
        return None
    try:
        key = paramiko.PKey.from_path(file)
    except (paramiko.PasswordRequiredException, TypeError):
        ring.locked.append(file)
        return None
    except _UNREADABLE as error:
        if "password" in str(error).lower():
            ring.locked.append(file)
        else:
            ring.notes.append(f"{place} is no private key that can be used: {str(error) or type(error).__name__}")
        return None
    key.public_blob = None
    return key


def _public_blob(file: str) -> bytes | None:
    """Return the public key that belongs to a file, without its passphrase; also when only the public file is there."""
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


def _read_certificate(file: str, ring: _Keyring) -> PublicBlob | None:
    try:
        return PublicBlob.from_file(file)
    except (OSError, ValueError, struct.error, paramiko.SSHException) as error:
        ring.notes.append(f"{_short(file)} is no certificate: {error}")
        return None


def _certified(key: paramiko.PKey, certificate: PublicBlob) -> paramiko.PKey:
    """Return the key as one that shows its certificate."""
    # An agent's key cannot be copied: it looks every attribute up in itself.
    shown = AgentKey(key.agent, key.blob, key.comment) if isinstance(key, AgentKey) else copy.copy(key)
    shown.public_blob = certificate
    return shown


def _key_in(certificate: PublicBlob) -> bytes:
    """Return the public key that a certificate is for."""
    try:
        text = f"{certificate.key_type} {base64.b64encode(certificate.key_blob).decode()}"
        found = load_ssh_public_identity(text.encode())
        if isinstance(found, SSHCertificate):
            found = found.public_key()
        return base64.b64decode(found.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    except (ValueError, UnsupportedAlgorithm):
        return b""


def _short(file: str) -> str:
    home = os.path.expanduser("~")
    return f"~{file[len(home) :]}" if file.startswith(home + "/") else file
