"""The SSH destinations of a pool's nodes, without connecting to them."""

from __future__ import annotations

from collections.abc import Mapping

from distflow.pools.model import Node, Pool
from distflow.transports.ssh.config import SshDestination
from distflow.transports.ssh.sockets import unknown_names

__all__ = ["destination_of", "unknown_hosts"]


def destination_of(pool: Pool, node: Node) -> SshDestination:
    """Return the SSH destination of a node."""
    return SshDestination(
        host=node.host,
        port=node.port,
        user=node.user,
        identity_file=node.identity_file,
        host_key_policy=pool.host_key_policy,
        connect_timeout_s=pool.connect_timeout_s,
        config_file=pool.ssh_config,
    )


def unknown_hosts(pool: Pool) -> Mapping[str, str]:
    """Return the host names that cannot be resolved, by node."""
    found = unknown_names([destination_of(pool, node) for node in pool.nodes])
    return {node.name: name for node, name in zip(pool.nodes, found, strict=True) if name is not None}
