"""The receiver: receives blobs on its own connection, so that logs and heartbeats do not wait for them.

Standard input, for each blob: a line ``{"hash", "size"}``. The reply is ``{"at": n}``, the number of bytes that the node
already has. Then frames with the remaining bytes follow. Empty lines and empty frames show that the submitter is alive
(``frames.Peer``). Standard output, for each blob: ``{"at": n}``, and ``{"done": true}`` when the blob is complete. After an
``{"error": {"kind", "message"}}``, nothing more is read. See docs/agent-protocol.md.
"""

from __future__ import annotations

import sys

from distflow.runtime import processes
from distflow.runtime.files.blobs import is_complete, path_of
from distflow.runtime.services.frames import Gone, Peer, receive
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import OpError

__all__ = ["serve"]

_MAX_LINE = 4096


def serve(root: str, _umask: int) -> None:
    """Receive blobs until the submitter sends no more, or until an error."""
    processes.rename_self("df-receiver")
    peer = Peer()
    try:
        while _serve_one(root, peer):
            continue
    except Gone:
        sys.exit(1)  # received data is kept


def _serve_one(root: str, peer: Peer) -> bool:
    """Receive one blob. Returns False after the last blob or an error."""
    line = peer.line(_MAX_LINE)
    if not line:
        return False
    try:
        blob = decode_object(line)
        path, size = path_of(root, blob["hash"]), int(blob["size"])
        if not receive(peer, path, blob["hash"], size, peer.send, is_complete=is_complete):
            raise Gone
        peer.send({"done": True})
        return True
    except OpError as error:
        refusal = error
    except OSError as error:
        refusal = OpError.from_os(error, "cannot write the blob")
    except (KeyError, TypeError, ValueError) as error:
        refusal = OpError("bad_request", "the request does not describe a blob: {!r}".format(error))
    peer.send({"error": refusal.as_json()})
    return False
