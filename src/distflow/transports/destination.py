"""Where an SSH transport goes: what a pool says of a node, without anything that is slow to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["HostKeyPolicy", "SshDestination"]

HostKeyPolicy = Literal["strict", "accept-new"]
"""``accept-new`` writes the key of a host that was never seen into known_hosts; neither accepts a changed key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SshDestination:
    """A host to reach over SSH; what is ``None`` is left to the OpenSSH configuration and its defaults.

    ``host_key_policy``, ``connect_timeout_s``, ``keepalive_s`` and ``known_hosts_files`` hold for jump hosts too; ``port``,
    ``user`` and ``identity_file`` only for the destination, as with ``ssh -p -l -i``.
    """

    host: str
    """An alias of the configuration, a name or an address."""
    port: int | None = None
    user: str | None = None
    identity_file: str | None = None
    """A private key that is tried before those of the configuration; ``~`` is this machine's user's home."""
    host_key_policy: HostKeyPolicy | None = None
    """``None``: what ``StrictHostKeyChecking`` says (``no`` counts as ``accept-new``), else ``strict``."""
    connect_timeout_s: float | None = None
    """From the first packet to the end of authentication, jump hosts included; ``None``: ``ConnectTimeout``, else 10."""
    keepalive_s: float | None = None
    """Seconds of silence after which a packet is sent; ``None``: ``ServerAliveInterval``, else 15."""
    config_file: str | None = None
    """Read instead of ``~/.ssh/config`` and ``/etc/ssh/ssh_config``, as with ``ssh -F``; ``none`` reads nothing."""
    known_hosts_files: tuple[str, ...] | None = None
    """Used instead of the user's and the global known_hosts; new keys go to the first."""
