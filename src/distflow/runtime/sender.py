"""The sender: packs what a task wrote and sends it as one stream over a connection of its own; the receiver's mirror image.

Standard input: a line ``{"attempt"}``, then, after what was packed was told, a line ``{"at": n}``: so much of it is there
already. Standard output: lines ``{"packing": n, "of": m}`` while that lasts, ``{"hash", "size", "files", "left_out"}``, and
after ``at`` frames with the rest; or ``{"error": {"kind", "message"}}``. It ends after the last frame.
See docs/agent-protocol.md.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import BinaryIO

from distflow.runtime import processes
from distflow.runtime.blobs import path_of
from distflow.runtime.frames import error_frame, frames
from distflow.runtime.packing import pack_output, pack_place
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import Json, OpError, encode

__all__ = ["serve"]

_TOLD_EVERY_S = 1.0


def serve(root: str, _umask: int) -> None:
    """Pack and send one attempt's output."""
    processes.rename_self("df-sender")
    try:
        _serve(root)
    except BrokenPipeError:
        sys.exit(1)  # nobody listens any more; what was packed stays


def _serve(root: str) -> None:
    try:
        request = _line()
        attempt, place, told = str(request["attempt"]), request.get("place"), _Progress().told
        packed = pack_output(root, attempt, told) if place is None else pack_place(root, attempt, str(place), told)
        if not packed["hash"]:
            return _say(packed)
        path = path_of(root, packed["hash"])
        with _open(path) as source:  # from now on: whoever sends the same of another task removes it
            _say(packed)
            _send(source, int(_line()["at"]))
        if place is not None and _line().get("got"):
            # The next one is packed anew; only outputs are wanted here again.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    except OpError as error:
        _say({"error": error.as_json()})
    except BrokenPipeError:
        raise
    except OSError as error:
        _say({"error": OpError.from_os(error, "its output cannot be packed").as_json()})
    except (KeyError, TypeError, ValueError) as error:
        _say({"error": OpError("bad_request", "this names no output: {!r}".format(error)).as_json()})


def _open(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise OpError.from_os(error, "its packed output cannot be read") from error


def _send(source: BinaryIO, at: int) -> None:
    try:
        if at:
            source.seek(at)
        for _, frame in frames(source):
            sys.stdout.buffer.write(frame)
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stdout.buffer.write(error_frame(OpError.from_os(error, "its packed output cannot be read")))
    sys.stdout.buffer.flush()


class _Progress:
    def __init__(self) -> None:
        self._told_at = time.monotonic()

    def told(self, done: int, total: int) -> None:
        """Say how far the packing is, every second."""
        if time.monotonic() - self._told_at >= _TOLD_EVERY_S:
            self._told_at = time.monotonic()
            _say({"packing": done, "of": total})


def _line() -> Json:
    line = sys.stdin.buffer.readline(4096)
    if not line:
        sys.exit(1)
    message: Json = decode_object(line)
    return message


def _say(message: Json) -> None:
    sys.stdout.buffer.write(encode(message))
    sys.stdout.buffer.flush()
