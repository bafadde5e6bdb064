"""A node's address and interface on the training network, and the first entries of its tasks' PATH."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from distflow.pools.model import Node
from distflow.transports.base import Transport

__all__ = ["choose_address", "interpreter", "path_prepend", "training_address"]


def training_address(node: Node, transport: Transport, facts: Mapping[str, Any]) -> tuple[str, str]:
    """Return the node's address on the training network, and the interface that owns it (empty when not found).

    ``facts`` are the agent's facts of ``hello``.
    """
    return choose_address(
        configured=node.address, reached=transport.reached_address, named=transport.named_addresses, host=node.host, facts=facts
    )


def path_prepend(node: Node, facts: Mapping[str, Any]) -> list[str]:
    """Return the first entries of the tasks' PATH: the directory of the configured Python, where a venv has its tools."""
    python = node.python if node.python.startswith("/") else str(facts.get("python", "/usr/bin/python3"))
    return [str(PurePosixPath(python).parent)]


def interpreter(node: Node, facts: Mapping[str, Any]) -> str:
    """Return the configured Python, with ``~`` expanded by the node."""
    return str(facts.get("python")) if node.python.startswith("~") else node.python


def choose_address(
    *, configured: str | None, reached: str | None, named: Sequence[str], host: str, facts: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the node's address on the training network, and the interface that owns it (empty when not found).

    The first of these addresses that exists:

    1. ``configured``
    2. ``reached``: the address to which the transport connected, unless that is a forwarded port on this machine
    3. an address of the host's name (``named``) that the node owns
    4. ``facts.ssh_server``: the address at which the node's sshd accepted the connection, or without SSH the address that the
       allocation reported
    5. the node's only IPv4 address that is not a loopback address
    6. ``host``

    Among 3 to 5, loopback addresses come last, because no other node can use them. The address becomes part of commands and
    scripts of other nodes. Therefore, invalid addresses in ``facts`` are ignored.
    """
    stated = [item for item in facts.get("addresses") or [] if _is_address(str(item.get("address")))]
    owners = {str(item["address"]): str(item.get("interface", "")) for item in stated}
    accepted = str(facts.get("ssh_server") or "").partition("%")[0]
    accepted = accepted if _is_address(accepted) else ""
    # A forwarded port has a loopback address of this machine, and the node's sshd accepted the connection at another address.
    is_tunnel = reached is not None and _is_loopback(reached) and accepted not in ("", reached)
    own = [str(item["address"]) for item in stated if item.get("family") == "inet"]
    outward = [address for address in own if not _is_loopback(address)]
    found = [
        *(address for address in named if address in owners),
        accepted,
        *(outward if len(outward) == 1 else ()),
    ]
    found = sorted(filter(None, found), key=_is_loopback)
    address = configured or (None if is_tunnel else reached) or next(iter(found), host)
    if address in owners:
        return address, owners[address]
    if _is_loopback(address):
        return address, "lo"
    # No interface has a NAT address (such as a cloud's public address). sshd's own address identifies the interface.
    return address, owners.get(accepted, "")


def _is_address(text: str) -> bool:
    """Return whether a text is an IP address without a scope, because any text may follow the ``%`` of a scope."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
