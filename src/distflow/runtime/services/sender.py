"""The sender: packs a task's files and sends them on its own connection. It is the counterpart of the receiver.

Standard input: a line ``{"attempt"}`` for the task's output, or ``{"attempt", "place"}`` for another directory of the attempt,
such as a checkpoint. After the reply about the packed files, the submitter sends a line ``{"at": n}``: the number of bytes
that it already has. For a ``place``, a line ``{"got": true}`` ends the transfer, and the sender removes the packed files.

Standard output: lines ``{"packing": n, "of": m}`` (bytes) during packing, then ``{"hash", "size", "files", "left_out"}``. An
empty ``hash`` means that there is nothing to send. After ``at``, frames with the remaining bytes follow. An error before
the frames is a line ``{"error": {"kind", "message"}}``; later, it is an error frame. The sender also exits if the submitter
sends nothing for 30 s, not even an empty line (``frames.Peer``). See docs/agent-protocol.md.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

from distflow.protocol.light_typing import BinaryIO
from distflow.runtime import processes
from distflow.runtime.files.blobs import path_of
from distflow.runtime.files.packing import pack_output, pack_place
from distflow.runtime.services.frames import Gone, Peer, error_frame, frames
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import Json, OpError

__all__ = ["serve"]

_REPORT_INTERVAL_S = 1.0
_MAX_LINE = 4096


def serve(root: str, _umask: int) -> None:
    """Pack and send one attempt's output, or another of its directories."""
    processes.rename_self("df-sender")
    try:
        _serve(root, Peer())
    except Gone:
        sys.exit(1)  # the submitter is gone; the packed files are kept


def _serve(root: str, peer: Peer) -> None:
    try:
        request = _line(peer)
        attempt, place, on_progress = str(request["attempt"]), request.get("place"), _Progress(peer).on_progress
        packed = (
            pack_output(root, attempt, on_progress) if place is None else pack_place(root, attempt, str(place), on_progress)
        )
        if not packed["hash"]:
            return peer.send(packed)
        path = path_of(root, packed["hash"])
        with _open(path) as source:  # opened now: a sender of the same content for another task may remove the file
            peer.send(packed)
            _send(peer, source, int(_line(peer)["at"]))
        if place is not None and _line(peer).get("got"):
            # Unlike an output, which may be requested again, a checkpoint is sent once.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    except OpError as error:
        peer.send({"error": error.as_json()})
    except OSError as error:
        peer.send({"error": OpError.from_os(error, "cannot pack the task's files").as_json()})
    except (KeyError, TypeError, ValueError) as error:
        peer.send({"error": OpError("bad_request", "the request is malformed: {!r}".format(error)).as_json()})


def _open(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise OpError.from_os(error, "cannot read the task's packed files") from error


def _send(peer: Peer, source: BinaryIO, at: int) -> None:
    try:
        if at:
            source.seek(at)
        for _, frame in frames(source):
            peer.write(frame)
    except OSError as error:
        peer.write(error_frame(OpError.from_os(error, "cannot read the task's packed files")))


class _Progress:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._reported_at = time.monotonic()

    def on_progress(self, done: int, total: int) -> None:
        """Report the progress of packing, at most once a second."""
        if time.monotonic() - self._reported_at >= _REPORT_INTERVAL_S:
            self._reported_at = time.monotonic()
            self._peer.check()
            self._peer.send({"packing": done, "of": total})


def _line(peer: Peer) -> Json:
    line = peer.line(_MAX_LINE)
    if not line:
        raise Gone
    message: Json = decode_object(line)
    return message
