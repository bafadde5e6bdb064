"""Arbitrary messages from a node: each is accepted, refused or ends the connection, and accepted observations can be stored."""

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
from distflow.backends.machines.connection.node_connection import NodeConnection
from distflow.backends.machines.connection.stream import ServiceStream
from distflow.backends.machines.session import Session
from distflow.errors import AgentError, NodeError, NodeUnreachable
from distflow.pools.model import Node, Pool
from distflow.runtime.services.frames import FRAME
from distflow.runtime.services.session import EXIT, REFUSED
from distflow.supervisor.failures import end_from
from distflow.testing.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distflow.protocol.names import Operation

CORPUS = [json.loads(line) for line in Path("tests/corpora/agent_messages.jsonl").read_text().splitlines()]
"""Messages of a real agent, with the operations that they answer."""
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


class WireTransport:
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
def thread_exceptions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The uncaught exceptions of threads. The test fails if one remains: a test that causes one removes it."""
    exceptions: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: exceptions.append(arguments.exc_value))
    yield exceptions
    assert exceptions == []


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a message."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*at, key))


def with_value(message: Any, path: tuple[Any, ...], value: object) -> Any:
    """Return the message with another value at a path; ``KeyError`` removes the value."""
    if not path:
        return value
    copied = copy.deepcopy(message)
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    if value is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copied


@st.composite
def mutations(draw: st.DrawFn) -> tuple[str, Any]:
    """Return an operation and a message with one or two wrong values."""
    entry = draw(st.sampled_from(CORPUS))
    message = entry["message"]
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(list(paths(message))))
        message = with_value(message, path, copy.deepcopy(draw(st.sampled_from([*HOSTILE, KeyError]))) if path else {})
    return entry["op"], message


class ObservedConnection:
    """A connection to a node without a network, and its observations."""

    def __init__(self) -> None:
        self.observations: list[Observation] = []
        wire = Wire()
        node = Node(name="n1", host="n1", root="~/distflow", python="python3")
        transport: Any = WireTransport(wire)
        self.connection = NodeConnection(
            Pool(name="p", backend="ssh", nodes=(node,)), node, transport, self.observations.append, CheckingLogSink()
        )
        self.wire = wire
        for entry in CORPUS:
            name = entry["message"].get("attempt") or ""
            if name:
                workflow, group, task, number = name.split("/")
                key = AttemptKey(workflow=workflow, group=group, task=task, attempt=int(number), node="n1")
                self.connection.watch(key)


class CheckingLogSink:
    """A log sink that checks its arguments."""

    def resume_position(self, _key: object, kind: str) -> tuple[str, int]:
        return f"output.{kind}", 0

    def has_room(self) -> bool:
        return True

    def write(self, _key: object, file: str, offset: int, data: bytes) -> None:
        assert isinstance(file, str)
        assert offset >= 0
        assert isinstance(data, bytes)

    def record_heartbeat(self, _key: object, at: float) -> None:
        assert at == at  # noqa: PLR0124  not a NaN


def open_link(observed: ObservedConnection, closed: list[NodeUnreachable]) -> AgentLink:
    link = AgentLink(
        observed.wire, "n1", ping_s=60, on_event=observed.connection._pushed, on_close=closed.append
    )  # fmt: skip
    observed.connection._link = link
    return link


@settings(max_examples=300, deadline=None)
@given(mutations())
def test_a_wrong_message_is_accepted_refused_or_ends_the_connection(mutation: tuple[str, Any]) -> None:
    op, message = mutation
    observed, closed, answers = ObservedConnection(), list[NodeUnreachable](), list[object]()
    link = open_link(observed, closed)
    keys = list(observed.connection._watched.values())

    def answered(answer: Any) -> None:
        answers.append(answer)
        if op == "hello" and not isinstance(answer, NodeError):
            observed.connection._welcomed(link, answer, keys)

    link.send(cast("Operation", op or "ping"), answered)
    if isinstance(message, dict) and "event" not in message:
        message["id"] = 2  # the id of the first request after the ping
    observed.wire.send(json.dumps(message).encode() + b"\n")
    observed.wire.send(b"")
    link._reader.join(20)  # faster than polling, in a few hundred examples
    assert len(closed) == len(answers) == 1
    for observation in observed.observations:
        if isinstance(observation, Ended):
            end = end_from(dict(observation.end), observation.at, observation.clock)
            json.dumps([end.exit_code, end.message, end.error, end.kernel])
            assert 0 <= end.ended_at <= observation.at


@pytest.mark.parametrize("raw", RAW, ids=[str(raw[:40]) for raw in RAW])
def test_a_malformed_message_ends_the_connection(raw: bytes) -> None:
    observed, closed, answers = ObservedConnection(), list[NodeUnreachable](), list[object]()
    link = open_link(observed, closed)
    link.send("hello", answers.append, watch=[])
    observed.wire.send(raw)
    wait_until(lambda: closed, 20, "on_close")
    assert "malformed message" in closed[0].message
    assert not link.is_open
    assert isinstance(answers[0], NodeUnreachable)


def test_an_answer_that_its_callback_cannot_handle_fails_the_request(thread_exceptions: list[object]) -> None:
    observed = ObservedConnection()
    link = open_link(observed, [])
    observed.wire.send(b'{"id": 2, "ok": true, "port": null}\n')

    def then(answer: dict[str, Any]) -> None:
        raise KeyError(answer["port"])

    with pytest.raises(NodeUnreachable, match=r"a bug in distflow, .* `lease` could not be handled; the traceback is in"):
        link.request("lease", timeout_s=20, then=then)
    assert isinstance(thread_exceptions.pop(), KeyError)
    link.close()


def test_an_event_that_cannot_be_handled_ends_the_connection(thread_exceptions: list[object]) -> None:
    wire, closed = Wire(), list[NodeUnreachable]()

    def fails(_event: object) -> None:
        raise RuntimeError("a bug")

    AgentLink(wire, "n1", ping_s=60, on_event=fails, on_close=closed.append)
    wire.send(b'{"event": "eof", "stream": 1, "size": 0}\n')
    wait_until(lambda: closed, 20, "on_close")
    assert "a bug in distflow, please report it: the agent's event `eof` could not be handled" in closed[0].message
    assert isinstance(thread_exceptions.pop(), RuntimeError)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=200).map(lambda data: data + b"\n")
    | st.sampled_from(RAW)
    | st.dictionaries(
        st.sampled_from(["at", "hash", "size", "files", "left_out", "packing", "done", "total", "label", "relay", "error"]),
        st.sampled_from(HOSTILE),
    ).map(lambda message: json.dumps(message).encode() + b"\n")
)
def test_output_of_a_service_is_a_valid_line_or_an_error(raw: bytes) -> None:
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


def test_a_missing_field_is_an_error_of_the_node() -> None:
    wire: Any = Wire()
    line = ServiceStream("n1", Opened(channel=wire, noise="", received=b'{"size": 3}\n'), "ended").line()
    assert line["size"] == 3
    assert "at" not in line
    with pytest.raises(AgentError, match=r"^n1: it sent a malformed message without `at`$"):
        line["at"]


def test_a_service_that_sends_a_line_without_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distflow.backends.machines.connection.stream.MAX_LINE", 100)
    wire: Any = Wire()
    for _ in range(3):
        wire.send(b"Welcome! " * 5)
    wire.send(b"")
    stream = ServiceStream("n1", Opened(channel=wire, noise="", received=b""), "ended")
    with pytest.raises(AgentError, match=r"^n1: it sent a line of more than 100 bytes, which begins with 'Welcome! Welcome! "):
        stream.line()


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([EXIT, REFUSED]), st.binary(max_size=100) | st.sampled_from([*RAW, b"{}", b'{"code": 1e308}']))
def test_malformed_output_of_a_session_is_an_error(kind: int, content: bytes) -> None:
    wire: Any = Wire()
    wire.send(FRAME.pack(len(content), kind) + content)
    wire.send(b"")
    transport: Any = WireTransport(wire)
    session = Session(transport, Opened(channel=wire, noise="", received=b""))

    def talk() -> None:
        session.request({})
        list(session.events())

    with pytest.raises(NodeError):
        talk()
    session.close()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=100) | st.sampled_from(RAW) | st.sampled_from(HOSTILE).map(lambda value: json.dumps(value).encode()))
def test_a_malformed_report_of_the_stub_is_an_error(content: bytes) -> None:
    wire = Wire()
    transport: Any = WireTransport(wire)

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
def test_malformed_output_of_the_python_probe_is_parsed_to_valid_types(content: bytes) -> None:
    answer = {"exit_code": 0, "stdout": "@@distflow-python " + content.decode("utf-8", "replace"), "stderr": "", "seconds": 1.0}
    found = parse_python(answer)
    assert isinstance(found.python, str)
    assert isinstance(found.devices, int)
