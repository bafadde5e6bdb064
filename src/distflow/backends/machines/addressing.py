"""Which of a node's addresses the others shall use, and the interface that owns it. Pure.

Peers connect to ``MASTER_ADDR``, and gloo, NCCL and TensorPipe announce the address of the interface that they are told. A
node's own name is no answer: where it resolves to 127.0.1.1, peers would be sent to themselves.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["choose_address"]


def choose_address(
    *, configured: str | None, reached: str | None, named: Sequence[str], host: str, facts: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the node's address on the training network, and the interface that owns it (empty when not found).

    The first of these: the ``configured`` one; the one that the transport ``reached``; one of those that the host's name has
    (``named``), if the node owns it; the one at which sshd accepted us (``facts.ssh_server``); the node's only IPv4 address.
    Loopback addresses come after all others, because no other node can use them; without any address it is ``host``.

    The address becomes part of commands and scripts of other nodes. So texts in ``facts`` that are not addresses are ignored.
    """
    stated = [item for item in facts.get("addresses") or [] if _is_address(str(item.get("address")))]
    owners = {str(item["address"]): str(item.get("interface", "")) for item in stated}
    accepted = str(facts.get("ssh_server") or "").partition("%")[0]
    accepted = accepted if _is_address(accepted) else ""
    # A port that is forwarded to the node is reached at an address of another machine, most often our own 127.0.0.1.
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
    # Addresses that are translated on the way (a cloud's public ones) are on no interface: sshd's own tells which one it is.
    return address, owners.get(accepted, "")


def _is_address(text: str) -> bool:
    """Return whether a text is an IP address. One with a scope is not: any text may follow its ``%``."""
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
