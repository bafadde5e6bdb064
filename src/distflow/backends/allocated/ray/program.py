"""Requests to the program on a node of the Ray cluster (``cluster_program.py``), over a transport to that node."""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import json
import threading
from typing import Any

from distflow.backends.allocated.engine import RequestRefused
from distflow.backends.machines.connection.bootstrap import python_argv
from distflow.documents.text import plain
from distflow.errors import NodeUnreachable
from distflow.runtime.untrusted import decode_object
from distflow.transports.base import Channel, Deadline, Transport, is_cut_off

__all__ = ["ClusterProgram", "RayMissing", "unreadable_answer"]

_LOADER = "import sys; i = sys.stdin.buffer; exec(compile(i.read(int(i.readline())), 'distflow', 'exec'))"
"""Reads a program from standard input and runs it. Ray stores the command line of each client, so the line must be short."""
_START_S = 60.0
_ANSWER_S = 40.0
_LONGEST_ANSWER = 64 << 20
_SHOWN = 1000


class RayMissing(NodeUnreachable):
    """The configured Python on the login node does not have Ray."""


class ClusterProgram:
    """The program on the cluster. A request starts it if it is not running. Thread-safe."""

    def __init__(self, login: Transport, *, python: str, address: str) -> None:
        """``python`` is the cluster's interpreter on the node of ``login``. ``address`` is the argument of ``ray.init``."""
        self._login = login
        self._python = python
        self._address = address
        self._requesting = threading.Lock()
        self._channel: Channel | None = None
        self._received = b""
        self.versions: dict[str, Any] = {}
        """The versions of ``ray`` and ``python``, after the program has started."""

    def ask(self, name: str, *, timeout_s: float = _ANSWER_S, **arguments: object) -> Any:
        """Return the answer to a request. ``name`` is a method of ``Cluster``, which gets ``arguments``.

        Raises ``NodeUnreachable``, and ``RequestRefused`` if Ray will never grant the request.
        """
        with self._requesting:
            if self._channel is not None and self._channel.exit_code is not None:
                self._end()  # it has ended since the last request
            channel = self._channel or self._start()
            try:
                channel.write(json.dumps({"do": name, "with": arguments}).encode() + b"\n")
                answer = self._answer(channel, Deadline(timeout_s))
            except BaseException:
                self._end()
                raise
        if answer.get("kind") == "refused":
            raise RequestRefused(f"Ray refused the request: {_text(answer)}", hint="change the resources in the spec")
        if "answer" not in answer:
            raise NodeUnreachable(
                self._login.name,
                f"a request to Ray failed (`{name}`): {_text(answer)}",
                hint="run `ray status` on that machine",
            )
        return answer["answer"]

    def close(self) -> None:
        """End the program."""
        channel = self._channel
        if channel is not None:
            channel.close()  # also ends a waiting request

    def _start(self) -> Channel:
        channel = self._login.open([*python_argv(self._python), "-c", _LOADER, self._address])
        self._channel, self._received = channel, b""
        try:
            with contextlib.suppress(NodeUnreachable):  # if it has ended, its messages contain the reason
                channel.write(b"%d\n" % len(_source()) + _source())
            answer = self._answer(channel, Deadline(_START_S), f"Ray at `{self._address}`")
        except BaseException:
            self._end()
            raise
        if "answer" in answer:
            self.versions = answer["answer"] if isinstance(answer["answer"], dict) else {}
            return channel
        self._end()
        if answer.get("kind") == "no ray":
            raise RayMissing(
                self._login.name, f"its Python has no Ray: {_text(answer)}",
                hint="set `ray.python` of the pool to the interpreter of the Ray cluster, and `login` to one of its nodes",
            )  # fmt: skip
        raise NodeUnreachable(
            self._login.name, f"cannot connect to Ray at `{self._address}`: {_text(answer)}",
            hint="`ray status` on that machine shows whether it runs; the pool's `login` and `ray.address` choose the cluster",
        )  # fmt: skip

    def _answer(self, channel: Channel, deadline: Deadline, who: str = "Ray") -> dict[str, Any]:
        timer = threading.Timer(deadline.left(), channel.close)
        timer.daemon = True
        timer.start()
        try:
            while b"\n" not in self._received:
                data = channel.read()
                if not data and deadline.has_passed:
                    raise NodeUnreachable(
                        self._login.name, f"{who} did not answer within {deadline.seconds:g} s",
                        hint="`ray status` on that machine shows whether its cluster runs",
                    )  # fmt: skip
                if len(self._received) > _LONGEST_ANSWER:
                    raise NodeUnreachable(self._login.name, f"{who} sent an answer of more than {_LONGEST_ANSWER >> 20} MiB")
                if not data:
                    tail = plain(channel.stderr_tail().strip())[-_SHOWN:]
                    if is_cut_off(channel):
                        raise NodeUnreachable(self._login.name, f"the connection broke before {who} answered: {tail}")
                    raise NodeUnreachable(
                        self._login.name, f"`{self._python}` exited without an answer: {tail or 'no message'}",
                        hint="check that `ray.python` is the interpreter of the Ray cluster, and that its machine has free "
                        "memory",
                    )  # fmt: skip
                self._received += data
        finally:
            timer.cancel()
        line, _, self._received = self._received.partition(b"\n")
        try:
            answer: dict[str, Any] = decode_object(line, max_bytes=_LONGEST_ANSWER)
        except ValueError as error:
            raise unreadable_answer(self._login.name, error) from error
        return answer

    def _end(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(NodeUnreachable):
                self._channel.close()
        self._channel = None


def unreadable_answer(login: str, error: Exception) -> NodeUnreachable:
    """Return the error for an answer of Ray that lacks a part or has a wrong type."""
    return NodeUnreachable(
        login, f"distflow cannot read Ray's answer: {type(error).__name__}: {plain(str(error))[:200]}",
        hint="a newer distflow may support this version of Ray; `ray --version` on that machine shows the version",
    )  # fmt: skip


def _text(answer: dict[str, Any]) -> str:
    return plain(" ".join(str(answer.get("error", "no reason")).split()))[:_SHOWN]


@functools.cache
def _source() -> bytes:
    return importlib.resources.files("distflow.backends.allocated.ray").joinpath("cluster_program.py").read_bytes()
