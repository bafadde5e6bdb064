"""What a node's facts mean for its tasks: the address and interface that they use, and what leads their PATH."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from distflow.backends.machines.addressing import choose_address
from distflow.pools.model import Node
from distflow.transports.base import Transport

__all__ = ["path_prepend", "training_address"]


def training_address(node: Node, transport: Transport, facts: Mapping[str, Any]) -> tuple[str, str]:
    """Return the node's address on the training network, and the interface that owns it (empty when not found).

    ``facts`` is what its agent said at ``hello``.
    """
    return choose_address(
        configured=node.address, reached=transport.reached_address, named=transport.named_addresses, host=node.host, facts=facts
    )


def path_prepend(node: Node, facts: Mapping[str, Any]) -> list[str]:
    """Return what leads the tasks' PATH: the directory of the configured python, where a venv has its tools."""
    python = node.python if node.python.startswith("/") else str(facts.get("python", "/usr/bin/python3"))
    return [str(PurePosixPath(python).parent)]
