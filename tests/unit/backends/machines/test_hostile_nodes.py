"""A node may send anything: the link ends in good order, and what passes can be recorded."""

from __future__ import annotations

import copy
import json
import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.backends.base import AttemptKey, Ended, Observation
from distflow.backends.machines.checks.measured import parse_python
from distflow.backends.machines.connection.bootstrap import Opened, open_service
from distflow.backends.machines.connection.link import AgentLink
from distflow.backends.machines.connection.node_connection import Connection
from distflow.backends.machines.connection.stream import ServiceStream
from distflow.backends.machines.session import Session
from distflow.errors import NodeError, NodeUnreachable
from distflow.pools.model import Node, Pool
from distflow.runtime.services.frames import FRAME
from distflow.runtime.services.session import EXIT, REFUSED
from distflow.supervisor.failures import end_from
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distflow.protocol.names import Operation

CORPUS = [json.loads(line) for line in Path("tests/corpora/agent_messages.jsonl").read_text().splitlines()]
"""What a real agent said, with the operation that it answered."""
HOSTILE: list[Any] = [
    None, True, -1, 2**63 - 1, -(2**63), 1e308, -0.5, "", "x" * 5000, "\ud800", "../../etc/passwd", "9" * 400, [], {}, [[]],
    {"": {}}, [None], 1e12,
]  # fmt: skip
RAW = [
    b"[" * 100_000 + b"\n",
    b'{"id": 1, "ok": true, "now": ' + b"9" * 400 + b"}\n",
    b'{"id": ' + b'{"a":' * 5000 + b"\n",
    b'{"id": []}\n',
    b'{"id": {}, "ok": true}\n',
    b'{"event": "status"}\n',
    b'{"event": "status", "attempt": [], "status": {}}\n',
    b'{"event": "data", "stream": 1, "file": "output.log", "offset": 0, "data": "!"}\n',
    b'{"event": "beat", "attempt": "a", "age_s": 1e999}\n',
    b"\xff\xfe\n",
    b"[]\n",
    b'{"ok": true}\n',
]


class Wire:
    """A channel whose other side is the test."""

    exit_code = None

    def __init__(self) -> None:
        self._pieces: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.written = bytearray()

    def send(self, data: bytes) -> None:
        self._pieces.put(data)

    def write(self, data: bytes) -> None:
        self.written += data

    def read(self) -> bytes:
        return self._pieces.get()

    def stderr_tail(self) -> str:
        return ""

    def close(self) -> None:
        self._pieces.put(b"")


class Way:
    """A transport over one wire."""

    name = "n1"
    reached_address = None
    named_addresses = ()

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def open(self, _argv: object) -> Wire:
        return self._wire

    def close(self) -> None:
        self._wire.close()


@pytest.fixture(autouse=True)
def bugs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """What callbacks raised: nothing that a node sends may come to that."""
    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: shown.append(arguments.exc_value))
    yield shown
    assert shown == []


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a message."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*at, key))


def changed(message: Any, place: tuple[Any, ...], value: object) -> Any:
    """The message with something else in one place; ``KeyError`` for a value: nothing."""
    if not place:
        return value
    copied = copy.deepcopy(message)
    inner = copied
    for key in place[:-1]:
        inner = inner[key]
    if value is KeyError:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return copied


@st.composite
def mutations(draw: st.DrawFn) -> tuple[str, Any]:
    """An operation and a message in which one or two things are not as they should be."""
    entry = draw(st.sampled_from(CORPUS))
    message = entry["message"]
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.sampled_from(list(places(message))))
        message = changed(message, place, copy.deepcopy(draw(st.sampled_from([*HOSTILE, KeyError]))) if place else {})
    return entry["op"], message


class Observed:
    """A connection to a node, without the network: what comes in, and what is seen of it."""

    def __init__(self) -> None:
        self.seen: list[Observation] = []
        wire = Wire()
        node = Node(name="n1", host="n1", root="~/distflow", python="python3")
        transport: Any = Way(wire)
        self.connection = Connection(Pool(name="p", backend="ssh", nodes=(node,)), node, transport, self.seen.append, Mirror())
        self.wire = wire
        for entry in CORPUS:
            name = entry["message"].get("attempt") or ""
            if name:
                workflow, group, task, number = name.split("/")
                key = AttemptKey(workflow=workflow, group=group, task=task, attempt=int(number), node="n1")
                self.connection.watch(key)


class Mirror:
    """Takes output."""

    def reached(self, _key: object, kind: str) -> tuple[str, int]:
        return f"output.{kind}", 0

    def has_room(self) -> bool:
        return True

    def write(self, _key: object, file: str, offset: int, data: bytes) -> None:
        assert isinstance(file, str)
        assert offset >= 0
        assert isinstance(data, bytes)

    def beat(self, _key: object, at: float) -> None:
        assert at == at  # noqa: PLR0124  not a NaN


def linked(observed: Observed, closed: list[NodeUnreachable]) -> AgentLink:
    link = AgentLink(
        observed.wire, "n1", ping_s=60, on_event=observed.connection._pushed, on_close=closed.append
    )  # fmt: skip
    observed.connection._link = link
    return link


@settings(max_examples=300, deadline=None)
@given(mutations())
def test_whatever_a_node_says_is_taken_refused_or_ends_the_connection(mutation: tuple[str, Any]) -> None:
    op, message = mutation
    observed, closed, answers = Observed(), list[NodeUnreachable](), list[object]()
    link = linked(observed, closed)
    keys = list(observed.connection._watched.values())

    def answered(answer: Any) -> None:
        answers.append(answer)
        if op == "hello" and not isinstance(answer, NodeError):
            observed.connection._welcomed(link, answer, keys)

    link.send(cast("Operation", op or "ping"), answered)
    if isinstance(message, dict) and "event" not in message:
        message["id"] = 2  # of the first request behind the ping
    observed.wire.send(json.dumps(message).encode() + b"\n")
    observed.wire.send(b"")
    link._reader.join(20)  # quicker than looking again and again, a few hundred times
    assert len(closed) == len(answers) == 1
    for seen in observed.seen:
        if isinstance(seen, Ended):
            end = end_from(dict(seen.end), seen.at, seen.clock)
            json.dumps([end.exit_code, end.message, end.error, end.kernel])
            assert 0 <= end.ended_at <= seen.at


@pytest.mark.parametrize("raw", RAW, ids=[str(raw[:40]) for raw in RAW])
def test_a_message_that_cannot_be_read_ends_the_connection(raw: bytes) -> None:
    observed, closed, answers = Observed(), list[NodeUnreachable](), list[object]()
    link = linked(observed, closed)
    link.send("hello", answers.append, watch=[])
    observed.wire.send(raw)
    wait_until(lambda: closed, 20, "on_close")
    assert "malformed message" in closed[0].message
    assert not link.is_open
    assert isinstance(answers[0], NodeUnreachable)


def test_an_answer_that_the_caller_cannot_take_fails_the_request(bugs: list[object]) -> None:
    observed = Observed()
    link = linked(observed, [])
    observed.wire.send(b'{"id": 2, "ok": true, "port": null}\n')

    def then(answer: dict[str, Any]) -> None:
        raise KeyError(answer["port"])

    with pytest.raises(NodeUnreachable, match="could not be handled"):
        link.request("lease", timeout_s=20, then=then)
    assert isinstance(bugs.pop(), KeyError)
    link.close()


def test_an_event_that_cannot_be_taken_ends_the_connection(bugs: list[object]) -> None:
    wire, closed = Wire(), list[NodeUnreachable]()

    def fails(_event: object) -> None:
        raise RuntimeError("a bug")

    AgentLink(wire, "n1", ping_s=60, on_event=fails, on_close=closed.append)
    wire.send(b'{"event": "eof", "stream": 1, "size": 0}\n')
    wait_until(lambda: closed, 20, "on_close")
    assert isinstance(bugs.pop(), RuntimeError)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=200).map(lambda data: data + b"\n")
    | st.sampled_from(RAW)
    | st.dictionaries(
        st.sampled_from(["at", "hash", "size", "files", "left_out", "packing", "done", "total", "words", "relay", "error"]),
        st.sampled_from(HOSTILE),
    ).map(lambda message: json.dumps(message).encode() + b"\n")
)
def test_what_a_service_says_is_a_line_or_an_error(raw: bytes) -> None:
    wire: Any = Wire()
    wire.send(b"")
    stream = ServiceStream("n1", Opened(channel=wire, noise="", received=raw), "ended")
    try:
        line = stream.line()
    except NodeError:
        return
    assert isinstance(line.get("hash", ""), str)
    for name in ("at", "size", "files", "total"):
        assert isinstance(line.get(name, 0), int)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([EXIT, REFUSED]), st.binary(max_size=100) | st.sampled_from([*RAW, b"{}", b'{"code": 1e308}']))
def test_what_a_session_says_is_an_end_or_an_error(kind: int, content: bytes) -> None:
    wire: Any = Wire()
    wire.send(FRAME.pack(len(content), kind) + content)
    wire.send(b"")
    transport: Any = Way(wire)
    session = Session(transport, Opened(channel=wire, noise="", received=b""))

    def talk() -> None:
        session.request({})
        list(session.events())

    with pytest.raises(NodeError):
        talk()
    session.close()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=100) | st.sampled_from(RAW) | st.sampled_from(HOSTILE).map(lambda value: json.dumps(value).encode()))
def test_what_a_stub_reports_is_an_error(content: bytes) -> None:
    wire = Wire()
    transport: Any = Way(wire)

    def open_it(argv: list[str]) -> Wire:
        nonce = next(word for word in argv if word.startswith("distflow-"))
        wire.send(nonce.encode() + b" error " + content.replace(b"\n", b" ") + b"\n")
        wire.send(b"")
        return wire

    transport.open = open_it
    with pytest.raises(NodeError):
        open_service(transport, "~/distflow", "python3", "agent.server", timeout_s=20)


@given(
    st.sampled_from(RAW) | st.sampled_from(HOSTILE).map(lambda value: json.dumps({"version": value, "devices": value}).encode())
)
def test_what_a_python_prints_is_taken_or_named_as_damaged(content: bytes) -> None:
    said = {"exit_code": 0, "stdout": "@@distflow-python " + content.decode("utf-8", "replace"), "stderr": "", "seconds": 1.0}
    found = parse_python(said)
    assert isinstance(found.python, str)
    assert isinstance(found.devices, int)
