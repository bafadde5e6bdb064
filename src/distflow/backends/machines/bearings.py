"""What a node's facts mean for its tasks: the address and interface that they use, and what leads their PATH."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from distflow.pools.model import Node

__all__ = ["path_prepend", "training_address"]


def training_address(node: Node, reached: str | None, facts: Mapping[str, Any]) -> tuple[str, str]:
    """Return the node's address on the training network, and the interface that owns it (empty when not found).

    ``reached`` is the address that its transport found, ``facts`` what its agent said at ``hello``.
    """
    address = node.address or reached or node.host
    for item in facts.get("addresses") or []:
        if item.get("address") == address:
            return address, str(item.get("interface", ""))
    return address, "lo" if address.startswith("127.") else ""


def path_prepend(node: Node, facts: Mapping[str, Any]) -> list[str]:
    """Return what leads the tasks' PATH: the directory of the configured python, where a venv has its tools."""
    python = node.python if node.python.startswith("/") else str(facts.get("python", "/usr/bin/python3"))
    return [str(PurePosixPath(python).parent)]
