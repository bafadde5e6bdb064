"""Transfers between a node's tasks and their stores. A separate connection carries only control messages.

The node's end is ``storage.node_service``; docs/agent-protocol.md has the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from distflow.backends.machines.connection.bootstrap import open_service
from distflow.backends.machines.connection.bundles import STORAGE
from distflow.backends.machines.connection.stream import ServiceStream
from distflow.errors import AgentError, StorageError
from distflow.runtime.wire import encode
from distflow.shell import mask
from distflow.storage.base import Progress
from distflow.storage.credentials import Identity
from distflow.storage.task_data import Delivered, Delivery, InputRequest, RelayRequired
from distflow.transports.base import Transport

__all__ = ["bring_there", "deliver_there"]

_PAUSES_S = (1.0, 5.0)
"""Seconds between tries of a store that does not answer the node. There are few, because the submitter can relay the data."""


def deliver_there(
    transport: Transport, root: str, python: str, attempt: str, delivery: Delivery, identity: Identity, *,
    environment: Mapping[str, str], timeout_s: float, progress: Progress,
) -> Delivered:  # fmt: skip
    """Let a node upload a task's output. ``progress`` is called every second, and may abort the upload by raising.

    ``environment`` is the environment of the node's tasks. ``timeout_s`` limits the wait for the node's first answer. Raises
    ``RelayRequired`` if the node cannot upload it, ``StorageError`` if relaying would not help, and ``NodeUnreachable`` and
    ``BootstrapFailed`` for connections.
    """
    request = {"attempt": attempt, "delivery": asdict(delivery)}
    reply = _ask(transport, root, python, request, identity, environment, timeout_s, progress)
    return Delivered(words=str(reply["words"]), files=int(reply["files"]), size=int(reply["size"]))


def bring_there(
    transport: Transport, root: str, python: str, attempt: str, wanted: InputRequest, place: str, identity: Identity, *,
    environment: Mapping[str, str], timeout_s: float, progress: Progress,
) -> None:  # fmt: skip
    """Let a node fetch an input into ``place`` of an attempt's directory. Otherwise like ``deliver_there``.

    May be repeated: data that is there already is not fetched again.
    """
    request = {"attempt": attempt, "input": asdict(wanted), "place": place}
    _ask(transport, root, python, request, identity, environment, timeout_s, progress)


def _ask(
    transport: Transport, root: str, python: str, request: Mapping[str, Any], identity: Identity,
    environment: Mapping[str, str], timeout_s: float, progress: Progress,
) -> Mapping[str, Any]:  # fmt: skip
    opened = open_service(transport, root, python, "node_service", timeout_s=timeout_s, bundle=STORAGE)
    stream = ServiceStream(transport.name, opened, "the connection over which a node moves data ended")
    try:
        known = {"identity": identity.to_wire(), "environment": dict(environment), "pauses_s": _PAUSES_S}
        stream.write(encode({**request, **known}))
        while "done" in (reply := stream.line()):
            progress(int(reply["done"]), int(reply["total"]))
        if "relay" in reply:
            raise RelayRequired(f"{transport.name}: {mask(str(reply['relay']), identity.secrets)}")
        return reply
    except AgentError as error:
        raise StorageError(mask(error.detail, identity.secrets)) from None
    finally:
        stream.close()
