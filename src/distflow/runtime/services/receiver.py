"""The receiver: takes blobs as one stream over a connection of its own, so that neither logs nor heartbeats wait for them.

Standard input, for each blob: a line ``{"hash", "size"}``; after the answer ``{"at": n}``, which says how much of it is here
already, frames with the rest; empty lines and empty frames say that the other side is there (``peer``). Standard output:
``{"at": n}``, at the end ``{"done": true}``, or ``{"error": {"kind", "message"}}``, after which nothing more is read. See
docs/agent-protocol.md.
"""

from __future__ import annotations

import sys

from distflow.runtime import processes
from distflow.runtime.files.blobs import is_whole, path_of
from distflow.runtime.files.frames import receive
from distflow.runtime.services.peer import Gone, Peer
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import OpError

__all__ = ["serve"]

_LONGEST = 4096


def serve(root: str, _umask: int) -> None:
    """Receive until the other side has no more."""
    processes.rename_self("df-receiver")
    peer = Peer()
    try:
        while _serve_one(root, peer):
            continue
    except Gone:
        sys.exit(1)  # what is here stays


def _serve_one(root: str, peer: Peer) -> bool:
    """Receive one blob. False: there is no other one to receive."""
    line = peer.line(_LONGEST)
    if not line:
        return False
    try:
        blob = decode_object(line)
        path, size = path_of(root, blob["hash"]), int(blob["size"])
        if not receive(peer, path, blob["hash"], size, peer.say, is_here=is_whole):
            raise Gone
        peer.say({"done": True})
        return True
    except OpError as error:
        refusal = error
    except OSError as error:
        refusal = OpError.from_os(error, "the blob cannot be written")
    except (KeyError, TypeError, ValueError) as error:
        refusal = OpError("bad_request", "this is not a blob: {!r}".format(error))
    peer.say({"error": refusal.as_json()})
    return False
