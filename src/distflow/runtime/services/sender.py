"""The sender: packs what a task wrote and sends it as one stream over a connection of its own; the receiver's mirror image.

Standard input: a line ``{"attempt"}``, then, after what was packed was told, a line ``{"at": n}``: so much of it is there
already. Standard output: lines ``{"packing": n, "of": m}`` while that lasts, ``{"hash", "size", "files", "left_out"}``, and
after ``at`` frames with the rest; or ``{"error": {"kind", "message"}}``. It ends after the last frame, and when the other side
sends nothing for long, not even an empty line (``peer``). See docs/agent-protocol.md.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import BinaryIO

from distflow.runtime import processes
from distflow.runtime.files.blobs import path_of
from distflow.runtime.files.frames import error_frame, frames
from distflow.runtime.files.packing import pack_output, pack_place
from distflow.runtime.services.peer import Gone, Peer
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import Json, OpError

__all__ = ["serve"]

_TOLD_EVERY_S = 1.0
_LONGEST = 4096


def serve(root: str, _umask: int) -> None:
    """Pack and send one attempt's output."""
    processes.rename_self("df-sender")
    try:
        _serve(root, Peer())
    except Gone:
        sys.exit(1)  # nobody listens any more; what was packed stays


def _serve(root: str, peer: Peer) -> None:
    try:
        request = _line(peer)
        attempt, place, told = str(request["attempt"]), request.get("place"), _Progress(peer).told
        packed = pack_output(root, attempt, told) if place is None else pack_place(root, attempt, str(place), told)
        if not packed["hash"]:
            return peer.say(packed)
        path = path_of(root, packed["hash"])
        with _open(path) as source:  # from now on: whoever sends the same of another task removes it
            peer.say(packed)
            _send(peer, source, int(_line(peer)["at"]))
        if place is not None and _line(peer).get("got"):
            # The next one is packed anew; only outputs are wanted here again.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    except OpError as error:
        peer.say({"error": error.as_json()})
    except OSError as error:
        peer.say({"error": OpError.from_os(error, "its output cannot be packed").as_json()})
    except (KeyError, TypeError, ValueError) as error:
        peer.say({"error": OpError("bad_request", "this names no output: {!r}".format(error)).as_json()})


def _open(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise OpError.from_os(error, "its packed output cannot be read") from error


def _send(peer: Peer, source: BinaryIO, at: int) -> None:
    try:
        if at:
            source.seek(at)
        for _, frame in frames(source):
            peer.write(frame)
    except OSError as error:
        peer.write(error_frame(OpError.from_os(error, "its packed output cannot be read")))


class _Progress:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._told_at = time.monotonic()

    def told(self, done: int, total: int) -> None:
        """Say how far the packing is, every second."""
        if time.monotonic() - self._told_at >= _TOLD_EVERY_S:
            self._told_at = time.monotonic()
            self._peer.look()
            self._peer.say({"packing": done, "of": total})


def _line(peer: Peer) -> Json:
    line = peer.line(_LONGEST)
    if not line:
        raise Gone
    message: Json = decode_object(line)
    return message
