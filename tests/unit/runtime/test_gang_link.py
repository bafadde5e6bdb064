"""The gang link with bytes from a peer without the token, and with invalid messages from a peer with the token."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
from typing import TYPE_CHECKING

from hypothesis import example, given, settings
from hypothesis import strategies as st

from distflow.runtime.guard.gang_link import GangLink
from distflow.runtime.hashing import keyed_hash
from distflow.runtime.probes.reachability import listen_on

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "t0ken"
NUMBER = b"0123456789abcdef0123456789abcdef"
MESSAGES = [
    b'{"task": "one"}',
    b'{"failed": {"task": "one", "why": "exit code 3"}}',
    b'{"bye": "one"}',
    b'{"welcome": "master"}',
]
"""Valid messages of keepers."""
_leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["one", "9" * 400])
_messages = st.dictionaries(
    st.sampled_from(["task", "failed", "bye", "welcome", "why"]),
    st.recursive(_leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["task", "why"]), inner)),
    max_size=3,
).map(lambda message: json.dumps(message).encode())


class Hub:
    """A hub, and one connection to it."""

    def __init__(self) -> None:
        self.failures: list[tuple[str, str]] = []
        self.selector = selectors.DefaultSelector()
        listener, _ = listen_on("127.0.0.1")
        gang = {"task": "master", "others": ["one"], "address": None, "port": None, "token": TOKEN}
        self.link = GangLink(gang, listener.fileno(), self.selector, lambda task, why: self.failures.append((task, why)))
        self.other = socket.create_connection(listener.getsockname())
        listener.close()
        self.other.settimeout(10)
        self.serve()
        self.number = self.other.recv(33).strip()

    def serve(self) -> None:
        """Let the hub handle all pending events."""
        while ready := self.selector.select(0.001):
            for key, _ in ready:
                key.data()

    def send(self, data: bytes) -> None:
        """Send bytes, and let the hub handle them."""
        with contextlib.suppress(OSError):
            self.other.sendall(data)
        self.serve()

    def send_with_hash(self, text: bytes) -> None:
        """Send a line as a keeper of the gang does."""
        code = keyed_hash(TOKEN.encode(), b"task " + self.number + NUMBER + text)
        self.send(code + b" " + text + b"\n")

    def close(self) -> None:
        self.other.close()
        self.serve()
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()


@contextlib.contextmanager
def hub() -> Iterator[Hub]:
    made = Hub()
    try:
        yield made
    finally:
        made.close()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.binary(max_size=100)
        | st.sampled_from(
            [NUMBER + b"\n", b"0" * 64 + b" ", b"\n", b"[" * 9000, *MESSAGES, b"0" * 64 + b" " + MESSAGES[1] + b"\n"]
        ),
        max_size=6,
    )
)
@example([NUMBER + b"\n", b"0" * 64 + b" " + b"[" * 4000 + b"\n"])
@example([b'{"number": "0"}\n', b'{"said": ' + b"[" * 970 + b"]" * 970 + b', "mac": ""}\n'])
def test_bytes_without_the_token_only_end_the_connection(pieces: list[bytes]) -> None:
    with hub() as one:
        for piece in pieces:
            one.send(piece)
        assert one.failures == []
        with socket.create_connection(one.link._listener.getsockname()) as next_one:  # type: ignore[union-attr]
            one.serve()
            next_one.settimeout(10)
            assert len(next_one.recv(33)) == 33  # the hub still sends its number


@settings(max_examples=150, deadline=None)
@given(
    st.lists(_messages | st.sampled_from(MESSAGES) | st.binary(max_size=50).filter(lambda data: b"\n" not in data), max_size=5)
)
@example([b'{"failed": ' + b"[" * 4000])
@example([b'{"task": 1e999}'])
@example([MESSAGES[0], b'{"failed": {"task": ["x"], "why": "' + b"y" * 5000 + b'"}}', MESSAGES[1]])
def test_any_message_is_a_valid_report_or_ends_the_connection(messages: list[bytes]) -> None:
    with hub() as one:
        one.send(NUMBER + b"\n")
        for message in messages:
            one.send_with_hash(message)
        assert len(one.failures) <= 1
        for task, why in one.failures:
            assert isinstance(task, str)
            assert len(why) <= 500


def test_messages_of_one_connection_are_invalid_on_another() -> None:
    with hub() as one, hub() as two:
        one.send(NUMBER + b"\n")
        one.send_with_hash(MESSAGES[0])
        one.send_with_hash(MESSAGES[1])
        assert one.failures == [("one", "exit code 3")]
        two.number = one.number
        two.send(NUMBER + b"\n")
        two.send_with_hash(MESSAGES[0])
        two.send_with_hash(MESSAGES[1])
        assert two.failures == []


def test_a_line_of_the_hub_is_invalid_when_it_is_sent_back_to_the_hub() -> None:
    with hub() as one:
        code = keyed_hash(TOKEN.encode(), b"hub " + one.number + NUMBER + MESSAGES[1])
        one.send(NUMBER + b"\n" + code + b" " + MESSAGES[1] + b"\n")
        assert one.failures == []


def test_each_connection_has_a_new_number() -> None:
    with hub() as one, hub() as two:
        assert one.number != two.number
        assert len(one.number) == 32
