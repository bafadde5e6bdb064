"""The connection to a node of a Ray cluster, with a fake socket."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from distflow.runtime.services import endpoint_client

_PROGRAM = """
import errno, os, runpy, socket, sys
class Peer:
    settimeout = setsockopt = sendall = lambda self, *_: None
    def recv(self, size):
        if size == 1:
            return b"\\n"
        code = getattr(errno, sys.argv[2])
        raise OSError(code, os.strerror(code))
socket.create_connection = lambda *_, **__: Peer()
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("code", ["ECONNRESET", "ETIMEDOUT", "EHOSTUNREACH"])
def test_a_broken_connection_ends_with_exit_code_255_and_no_traceback(code: str) -> None:
    command = [sys.executable, "-c", _PROGRAM, endpoint_client.__file__, code]
    request = json.dumps({"address": "10.0.0.1", "port": 1, "token": "00", "argv": []})
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None
        assert program.stderr is not None
        program.stdin.write(request + "\n")
        program.stdin.flush()
        assert (program.stderr.read(), program.wait(timeout=60)) == ("", 255)


_BROKEN_WHILE_SENDING = """
import runpy, socket, sys, threading
has_failed = threading.Event()
class Peer:
    settimeout = setsockopt = lambda self, *_: None
    sent = 0
    def sendall(self, data):
        self.sent += 1
        if self.sent > 1:
            has_failed.set()
            raise BrokenPipeError
    def recv(self, size):
        if size == 1:
            return b"\\n"
        has_failed.wait(60)
        return b""
socket.create_connection = lambda *_, **__: Peer()
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_a_connection_that_breaks_while_input_is_sent_ends_with_exit_code_255() -> None:
    request = json.dumps({"address": "10.0.0.1", "port": 1, "token": "00", "argv": []})
    command = [sys.executable, "-c", _BROKEN_WHILE_SENDING, endpoint_client.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None
        program.stdin.write(f"{request}\ninput")
        program.stdin.flush()
        assert program.wait(timeout=60) == 255
