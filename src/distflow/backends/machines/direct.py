"""Having a node bring what a task wrote to its store: over a connection of its own, on which only words travel.

The node's end is ``storage.onnode``; the format is on the page of the agent protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from distflow.backends.machines.bootstrap import open_service
from distflow.backends.machines.bundles import STORAGE
from distflow.backends.machines.stream import ServiceStream
from distflow.errors import AgentError, StorageError
from distflow.runtime.wire import encode
from distflow.shell import mask
from distflow.storage.base import Progress
from distflow.storage.delivery import Delivered, Delivery, NotDirect
from distflow.storage.identity import Identity
from distflow.transports.base import Transport

__all__ = ["deliver_there"]

_PAUSES_S = (1.0, 5.0)
"""Between tries of a store that does not answer the node: it is soon said, because another way is left."""


def deliver_there(
    transport: Transport, root: str, python: str, attempt: str, delivery: Delivery, identity: Identity, *,
    environment: Mapping[str, str], timeout_s: float, progress: Progress,
) -> Delivered:  # fmt: skip
    """Have a node deliver what an attempt wrote; ``progress`` hears every second how far it is, and may end it by raising.

    ``environment`` is the node's own, as its tasks have it. ``timeout_s`` bounds how long the node may take to answer at first.
    Raises ``NotDirect`` when the node cannot, ``StorageError`` when it would not help to relay it, ``NodeUnreachable`` and
    ``BootstrapFailed`` as connections do.
    """
    opened = open_service(transport, root, python, "onnode", timeout_s=timeout_s, bundle=STORAGE)
    stream = ServiceStream(transport.name, opened, "the connection that delivered an output ended")
    try:
        request = {
            "attempt": attempt, "delivery": asdict(delivery), "identity": identity.revealed(),
            "environment": dict(environment), "pauses_s": _PAUSES_S,
        }  # fmt: skip
        opened.channel.write(encode(request))
        while "done" in (told := stream.line()):
            progress(int(told["done"]), int(told["total"]))
        if "relay" in told:
            raise NotDirect(f"{transport.name}: {mask(str(told['relay']), identity.secrets)}")
        return Delivered(words=str(told["words"]), files=int(told["files"]), size=int(told["size"]))
    except AgentError as error:
        raise StorageError(mask(error.detail, identity.secrets)) from None
    finally:
        opened.channel.close()
