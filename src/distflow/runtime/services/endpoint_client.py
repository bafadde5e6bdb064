"""Connect standard input and output to a command on a node of a cluster, over TCP and authenticated with a token.

This program runs on a machine that reaches the node, such as the head of a Ray cluster. The first line of its standard input is
a JSON object with ``address``, ``port``, ``token`` and ``argv``, the arguments of the Python interpreter that the node runs.
The node (``backends/allocated/ray/cluster_program.py``) sends a nonce. This program replies with one line: an HMAC, a space and
a JSON object with ``argv``. The HMAC covers the nonce and the object, and its key is the token. All further bytes are the
command's input and output.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import sys
import threading
from typing import Callable

__all__ = ["main"]

_READ = 65536
_CONNECT_S = 15.0
_LONGEST_NONCE = 128
_NO_CONNECTION = 255
"""The exit code of a connection that failed or broke, or ended before the command sent anything. ``ssh`` has the same."""


def main() -> int:
    """Copy data until the node ends the connection. Returns 0, or 255 if nothing was received; exits if standard input ends."""
    request = json.loads(_line(lambda: os.read(0, 1), 1 << 20).decode("utf-8"))
    where = (request["address"], request["port"])
    try:
        peer = socket.create_connection(where, timeout=_CONNECT_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = _line(lambda: peer.recv(1), _LONGEST_NONCE)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        sys.stderr.write("cannot connect to {}:{}: {}\n".format(where[0], where[1], reason))
        return _NO_CONNECTION
    body = json.dumps({"argv": request["argv"]}).encode("utf-8")
    mac = hmac.new(bytes.fromhex(request["token"]), nonce + body, hashlib.sha256).hexdigest().encode("ascii")
    peer.settimeout(None)
    peer.sendall(mac + b" " + body + b"\n")
    threading.Thread(target=_send, args=(peer,), daemon=True).start()
    has_answered = False
    while True:
        data = peer.recv(_READ)
        if not data:
            return 0 if has_answered else _NO_CONNECTION
        has_answered = True
        while data:
            data = data[os.write(1, data) :]


def _line(read: Callable[[], bytes], longest: int) -> bytes:
    data = b""
    while len(data) < longest:
        byte = read()
        if not byte:
            raise EOFError("the connection ended early")
        if byte == b"\n":
            return data
        data += byte
    raise EOFError("the answer has no line break in its first {} bytes; another program may use this port".format(longest))


def _send(peer: socket.socket) -> None:
    try:
        while True:
            data = os.read(0, _READ)
            if not data:
                break
            peer.sendall(data)
    except OSError:
        return  # the main thread sees how the connection ended
    os._exit(0)  # the node sees the end of the connection


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError:  # such as ECONNRESET or ETIMEDOUT
        sys.exit(_NO_CONNECTION)
