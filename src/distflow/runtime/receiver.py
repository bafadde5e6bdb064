"""The receiver: takes blobs as one stream over a connection of its own, so that neither logs nor heartbeats wait for them.

Standard input, for each blob: a line ``{"hash", "size"}``; after the answer ``{"at": n}``, which says how much of it is here
already, frames with the rest. Standard output: ``{"at": n}``, at the end ``{"done": true}``, or
``{"error": {"kind", "message"}}``, after which nothing more is read. See docs/agent-protocol.md.
"""

from __future__ import annotations

import sys

from distflow.runtime import processes
from distflow.runtime.blobs import is_whole, path_of
from distflow.runtime.frames import receive
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import Json, OpError, encode

__all__ = ["serve"]


def serve(root: str, _umask: int) -> None:
    """Receive until the other side has no more."""
    processes.rename_self("df-receiver")
    source = sys.stdin.buffer
    while True:
        line = source.readline(4096)
        if not line:
            return None
        try:
            blob = decode_object(line)
            path, size = path_of(root, blob["hash"]), int(blob["size"])
            if not receive(source, path, blob["hash"], size, _say, is_here=is_whole):
                sys.exit(1)  # it broke off: what is here stays
            _say({"done": True})
        except OpError as error:
            return _refuse(error)
        except OSError as error:
            return _refuse(OpError.from_os(error, "the blob cannot be written"))
        except (KeyError, TypeError, ValueError) as error:
            return _refuse(OpError("bad_request", "this is no blob: {!r}".format(error)))


def _say(message: Json) -> None:
    sys.stdout.buffer.write(encode(message))
    sys.stdout.buffer.flush()


def _refuse(error: OpError) -> None:
    _say({"error": error.as_json()})
