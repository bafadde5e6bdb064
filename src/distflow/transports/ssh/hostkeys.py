"""Check host keys against known_hosts.

Supported are plain and hashed names, wildcards, ``[host]:port``, ``@revoked``, ``@cert-authority`` and ``RevokedHostKeys``.
Keys are added only with the policy ``accept-new``, and only for hosts without any known key.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    SSHCertificate,
    SSHCertificateType,
    load_ssh_public_identity,
)
from msgspec import Struct

from distflow.structs import replace
from distflow.transports.ssh.config import SshConfigError

__all__ = [
    "HostKeyCheck",
    "KnownKey",
    "add_known_host",
    "check_host_key",
    "fingerprint",
    "key_type_of",
    "known_algorithms",
    "matches_list",
    "parse_known_hosts",
    "read_known_hosts",
    "read_revoked",
]

_KRL = b"SSHKRL\n\0"
_CERT = "-cert-v01@openssh.com"
_ALGORITHMS = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}
_MARKERS: dict[str, Literal["revoked", "authority"]] = {"@revoked": "revoked", "@cert-authority": "authority"}


class KnownKey(Struct, frozen=True, kw_only=True):
    """A key in a line of known_hosts or in a file of ``RevokedHostKeys``."""

    names: tuple[str, ...]
    """Patterns, or hashed names."""
    key_type: str
    blob: bytes
    """The public key in SSH's wire format."""
    file: str
    line: int
    kind: Literal["key", "revoked", "authority"] = "key"

    @property
    def where(self) -> str:
        """``file:line``, or the file alone if it is binary."""
        return f"{self.file}:{self.line}" if self.line else self.file

    def is_for(self, name: str) -> bool:
        """Return whether the line applies to the host ``name``, as written in known_hosts."""
        name = name.lower()
        patterns = [pattern.lower() for pattern in self.names if not pattern.startswith("|")]
        return matches_list(name, patterns) or any(_is_hash_of(text, name) for text in self.names if text.startswith("|"))


class HostKeyCheck(Struct, frozen=True, kw_only=True):
    """The result of a check of a host key against known_hosts."""

    kind: Literal["known", "unknown", "changed", "revoked"]
    entries: tuple[KnownKey, ...] = ()
    """The lines with other keys of the host (``changed``), or with the revoked key, certificate or authority (``revoked``)."""
    note: str = ""
    """Why the host's certificate was not accepted."""


def parse_known_hosts(text: str, file: str) -> tuple[KnownKey, ...]:
    """Return the entries of a known_hosts file. Other lines are skipped, as in OpenSSH."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        kind: Literal["key", "revoked", "authority"] = "key"
        if fields[0].startswith("@"):
            if fields[0] not in _MARKERS:
                continue
            kind = _MARKERS[fields.pop(0)]
        if len(fields) < 3:
            continue
        try:
            blob = base64.b64decode(fields[2], validate=True)
        except binascii.Error:
            continue
        if key_type_of(blob) == fields[1]:
            names = tuple(fields[0].split(","))
            found.append(KnownKey(names=names, key_type=fields[1], blob=blob, file=file, line=number, kind=kind))
    return tuple(found)


def read_known_hosts(files: Sequence[str]) -> tuple[KnownKey, ...]:
    """Return the entries of all files. Missing and unreadable files are skipped."""
    found: list[KnownKey] = []
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found += parse_known_hosts(text, file)
    return tuple(found)


def read_revoked(files: Sequence[str], blob: bytes, certificate: bytes | None) -> tuple[KnownKey, ...]:
    """Return the keys in the files of ``RevokedHostKeys``.

    From a binary list (KRL), return only ``blob`` and ``certificate``, if the list contains them. Raises ``SshConfigError``
    if a file cannot be read, because ``ssh`` then trusts no host.
    """
    found: list[KnownKey] = []
    for file in files:
        try:
            content = Path(file).read_bytes()
        except OSError as error:
            raise SshConfigError(
                f"RevokedHostKeys {file} cannot be read: {error.strerror}; no host is trusted without it. Create it or make it "
                "readable, or remove this option from the OpenSSH configuration"
            ) from error
        if content.startswith(_KRL):
            revoked = [one for one in (blob, certificate) if one is not None and _is_in_krl(file, one)]
            entries = [KnownKey(names=("*",), key_type=key_type_of(one), blob=one, file=file, line=0) for one in revoked]
        else:
            # Each line is a key. Prefixed with a name, it is a line of known_hosts.
            lines = (f"* {line.strip()}" if line.strip() else "" for line in content.decode("utf-8", "replace").splitlines())
            entries = list(parse_known_hosts("\n".join(lines), file))
        found += [replace(one, kind="revoked") for one in entries]
    return tuple(found)


def _is_in_krl(file: str, blob: bytes) -> bool:
    line = f"{key_type_of(blob)} {base64.b64encode(blob).decode()}\n"
    try:
        done = subprocess.run(
            ["ssh-keygen", "-Q", "-f", file, "/dev/stdin"], input=line.encode(), capture_output=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"cannot be started: {error.strerror}" if isinstance(error, OSError) else "did not answer within 30 s"
        raise SshConfigError(
            f"RevokedHostKeys {file} is a binary list, which only ssh-keygen can read, but ssh-keygen {why}; no host is "
            "trusted without this list. Check that `ssh-keygen` runs, or remove this option from the OpenSSH configuration"
        ) from error
    if done.returncode not in (0, 1):
        reason = done.stderr.decode("utf-8", "replace").strip()
        reason = reason or f"ssh-keygen failed with exit code {done.returncode}"
        raise SshConfigError(
            f"RevokedHostKeys {file} cannot be read: {reason}; no host is trusted without it. Create the list again with "
            "`ssh-keygen -k`, or remove this option from the OpenSSH configuration"
        )
    return done.returncode == 1


def known_algorithms(known: Sequence[KnownKey], name: str, supported: Sequence[str]) -> tuple[str, ...]:
    """Return ``supported`` in the order of preference, so that a host with several keys presents a known key.

    Certificates come first if known_hosts has an authority for the host; otherwise they are not requested.
    """
    known = [one for one in known if one.kind != "revoked"]
    entries = [one for one in known if one.is_for(name)] or [one for one in known if one.is_for(_bare(name))]
    types = [one.key_type for one in entries if one.kind == "key"]
    wanted = [algorithm for key_type in types for algorithm in _ALGORITHMS.get(key_type, (key_type,))]
    ordered = sorted(supported, key=lambda one: wanted.index(one) if one in wanted else len(wanted))
    certificates = [one + _CERT for one in supported] if any(one.kind == "authority" for one in entries) else []
    return (*certificates, *ordered)


def check_host_key(known: Sequence[KnownKey], name: str, blob: bytes, certificate: bytes | None = None) -> HostKeyCheck:
    """Check the key ``blob``, or its ``certificate``, of the host ``name`` against the ``known`` keys."""
    check = _check_host_key(known, name, blob, certificate)
    if check.kind == "unknown" and name.startswith("["):
        # As in OpenSSH, a key that is listed without a port is valid for all ports, but a different key does not conflict.
        bare = _check_host_key(known, _bare(name), blob, certificate)
        if bare.kind in ("known", "revoked"):
            return bare
    return check


def _check_host_key(known: Sequence[KnownKey], name: str, blob: bytes, certificate: bytes | None) -> HostKeyCheck:
    entries = [one for one in known if one.is_for(name)]
    bad = [one for one in entries if one.kind == "revoked" and one.blob in (blob, certificate)]
    note = ""
    if certificate is not None:
        authority, note = _check_certificate(certificate, _bare(name), [one for one in entries if one.kind == "authority"])
        bad += [one for one in entries if one.kind == "revoked" and one.blob == authority]
        if not note and not bad:
            return HostKeyCheck(kind="known")
    if bad:
        return HostKeyCheck(kind="revoked", entries=tuple(bad), note=note)
    keys = tuple(one for one in entries if one.kind == "key")
    if any(one.blob == blob for one in keys):
        return HostKeyCheck(kind="known")
    if not keys:
        return HostKeyCheck(kind="unknown", note=note)
    return HostKeyCheck(
        kind="changed", entries=tuple(sorted(keys, key=lambda one: one.key_type != key_type_of(blob))), note=note
    )


def add_known_host(file: str, name: str, blob: bytes, *, hashed: bool = False) -> HostKeyCheck:
    """Append the key of an unknown host to ``file`` under a lock, and return the new result of the check.

    Raises ``OSError`` if the file cannot be written.
    """
    path = Path(file)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "a+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        content = stream.read()
        # Another connection or program may have added a key meanwhile.
        check = check_host_key(parse_known_hosts(content.decode("utf-8", "replace"), file), name, blob)
        if check.kind != "unknown":
            return check
        written = _hash(name.lower(), secrets.token_bytes(20)) if hashed else name.lower()
        line = f"{written} {key_type_of(blob)} {base64.b64encode(blob).decode()}\n"
        missing_newline = content and not content.endswith(b"\n")
        stream.write((b"\n" if missing_newline else b"") + line.encode())
    return HostKeyCheck(kind="known")


def fingerprint(blob: bytes) -> str:
    """Return the key's type and its fingerprint as ``ssh-keygen -l`` prints it."""
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    kind = key_type_of(blob).removeprefix("sk-").removeprefix("ssh-").partition("@")[0].partition("-")[0]
    return f"{kind.upper()} SHA256:{digest}"


def key_type_of(blob: bytes) -> str:
    """Return the type of a public key, which is its first field."""
    length = int.from_bytes(blob[:4], "big")
    return blob[4 : 4 + length].decode("ascii", "replace") if 0 < length <= len(blob) - 4 else ""


def matches_list(text: str, patterns: Sequence[str]) -> bool:
    """Return whether ``text`` matches one of ``patterns`` (``*``, ``?``), and no pattern that begins with ``!``."""
    found = False
    for pattern in patterns:
        plain = pattern.removeprefix("!")
        if re.fullmatch(re.escape(plain).replace(r"\*", ".*").replace(r"\?", "."), text, re.DOTALL):
            if plain != pattern:
                return False
            found = True
    return found


def _bare(name: str) -> str:
    return name[1:].partition("]")[0] if name.startswith("[") else name


def _hash(name: str, salt: bytes) -> str:
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def _is_hash_of(text: str, name: str) -> bool:
    try:
        salt = base64.b64decode(text.split("|")[2], validate=True)
    except (IndexError, binascii.Error):
        return False
    return hmac.compare_digest(_hash(name, salt), text)


def _check_certificate(blob: bytes, host: str, authorities: Sequence[KnownKey]) -> tuple[bytes, str]:
    """Return the key that signed a host's certificate, and why the certificate is invalid (empty if it is valid).

    The key is empty if the certificate cannot be read or its signature is wrong.
    """
    try:
        found = load_ssh_public_identity(f"{key_type_of(blob)} {base64.b64encode(blob).decode()}".encode())
        if not isinstance(found, SSHCertificate):
            return b"", "it is not a certificate"
        line = found.signature_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        authority = base64.b64decode(line.split()[1])
        found.verify_cert_signature()
    except (ValueError, InvalidSignature, UnsupportedAlgorithm) as error:
        return b"", f"its certificate is not valid: {str(error) or 'wrong signature'}"
    principals = [principal.decode("utf-8", "replace").lower() for principal in found.valid_principals]
    now = datetime.now(timezone.utc).timestamp()
    if not any(one.blob == authority for one in authorities):
        why = f"its certificate is signed by {fingerprint(authority)}, which is not a @cert-authority for it"
    elif found.type is not SSHCertificateType.HOST:
        why = "its certificate is a user certificate"
    elif not matches_list(host.lower(), principals):
        why = f"its certificate is for {', '.join(principals) or 'no host'}, not for {host}"
    elif not found.valid_after <= now < found.valid_before:
        why = "its certificate is not valid at this time"
    elif found.critical_options:
        why = "its certificate has unknown critical options"
    else:
        why = ""
    return authority, why
