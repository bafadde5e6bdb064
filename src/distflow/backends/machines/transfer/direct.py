"""Having a node move data between its tasks and their stores: over a connection of its own, on which only words travel.

The node's end is ``storage.node_service``; the format is on the page of the agent protocol.
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
"""Between tries of a store that does not answer the node: it is soon said, because another way is left."""


def deliver_there(
    transport: Transport, root: str, python: str, attempt: str, delivery: Delivery, identity: Identity, *,
    environment: Mapping[str, str], timeout_s: float, progress: Progress,
) -> Delivered:  # fmt: skip
    """Have a node deliver what an attempt wrote; ``progress`` hears every second how far it is, and may end it by raising.

    ``environment`` is the node's own, as its tasks have it. ``timeout_s`` bounds how long the node may take to answer at first.
    Raises ``RelayRequired`` when the node cannot, ``StorageError`` when it would not help to relay it, ``NodeUnreachable`` and
    ``BootstrapFailed`` as connections do.
    """
    request = {"attempt": attempt, "delivery": asdict(delivery)}
    told = _ask(transport, root, python, request, identity, environment, timeout_s, progress)
    return Delivered(words=str(told["words"]), files=int(told["files"]), size=int(told["size"]))


def bring_there(
    transport: Transport, root: str, python: str, attempt: str, wanted: InputRequest, place: str, identity: Identity, *,
    environment: Mapping[str, str], timeout_s: float, progress: Progress,
) -> None:  # fmt: skip
    """Have a node fetch an input into ``place`` of an attempt's directory; otherwise as ``deliver_there``.

    May be repeated: what is there already is not fetched again.
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
        while "done" in (told := stream.line()):
            progress(int(told["done"]), int(told["total"]))
        if "relay" in told:
            raise RelayRequired(f"{transport.name}: {mask(str(told['relay']), identity.secrets)}")
        return told
    except AgentError as error:
        raise StorageError(mask(error.detail, identity.secrets)) from None
    finally:
        stream.close()
