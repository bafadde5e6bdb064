"""The submitter's end of the agent protocol: requests, answers and events on one channel (docs/agent-protocol.md).

Pings of a connection also measure the node's clock.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from distflow.backends.machines.connection.shapes import check_answer, check_event
from distflow.backends.steady import now
from distflow.documents.text import bug_text
from distflow.errors import AgentError, NodeError, NodeUnreachable
from distflow.lifecycle.clocks import Clock, best_clock
from distflow.protocol.names import Operation
from distflow.runtime.wire import LineReader, encode
from distflow.transports.base import Channel

__all__ = ["AgentLink", "ClockWatch", "Event", "Result", "now"]


Result: TypeAlias = dict[str, Any]
"""The fields of an answer."""
Event: TypeAlias = dict[str, Any]
"""A pushed event of the protocol (the ``data`` of a ``data`` event is base64)."""

_SILENT_PINGS = 3
_LONGEST_TEXT = 500
"""Maximum characters of a message about data from a node."""


class AgentLink:
    """A connection to a node's agent.

    1. ``request`` and ``send`` may be called from any thread. A slow or stalled node never blocks ``send``.
    2. Callbacks (of ``send``, ``on_event``, ``on_close``) run one at a time in the link's reader thread, in the order in which
       answers and events arrived. They must not block, and must not call ``request``. A ``send`` after the end of the
       connection calls back at once, in the caller's thread.
    3. When the connection ends, also by ``close``, every open request fails with ``NodeUnreachable``. After that, ``on_close``
       is called once with that error.
    4. A line that is not a message, or a malformed event, ends the connection, because its content is lost. So does an
       exception in ``on_event``. An answer with wrong fields only fails its request, as a refusal of the kind ``malformed``.
    5. A ping is sent at once and every ``ping_s``. A node that has sent nothing for more than three intervals is
       unreachable, which is checked once in each interval. ``clock`` is measured by the pings, and is known before any later
       request is answered.
    """

    def __init__(
        self,
        channel: Channel,
        node: str,
        *,
        noise: str = "",
        received: bytes = b"",
        ping_s: float = 5.0,
        on_event: Callable[[Event], None] | None = None,
        on_close: Callable[[NodeUnreachable], None] | None = None,
    ) -> None:
        """Use ``channel``, from which ``received`` has already been read."""
        self.node = node
        self.noise = noise
        """Output of login scripts before the agent's first message."""
        self._channel = channel
        self._on_event = on_event
        self._on_close = on_close
        self.ping_s = ping_s
        self._numbers = itertools.count(1)
        self._state = threading.Lock()
        self._waiting: dict[int, tuple[Operation, Callable[[Result | NodeError], None]]] = {}
        self._error: NodeUnreachable | None = None
        self._is_closing = False
        self._has_ended = threading.Event()
        self._received_at = time.monotonic()
        self._clock = ClockWatch()
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._send_ping()
        self._reader = threading.Thread(target=self._read, args=(received,), name=f"reader of {node}", daemon=True)
        for thread in (
            self._reader,
            threading.Thread(target=self._write, name=f"writer of {node}", daemon=True),
            threading.Thread(target=self._ping, name=f"pings of {node}", daemon=True),
        ):
            thread.start()

    def request(
        self, op: Operation, *, timeout_s: float = 30.0, then: Callable[[Result], None] | None = None, **fields: object
    ) -> Result:
        """Send a request and wait for the answer.

        Raises ``AgentError`` if it is refused, and ``NodeUnreachable`` without an answer in time. ``then`` is called with the
        answer like a callback, before any later message of the node is handled.
        """
        if threading.current_thread() is self._reader:
            raise RuntimeError("request() in a callback would wait for itself; use send()")
        answered: queue.SimpleQueue[Result | NodeError] = queue.SimpleQueue()

        def take(answer: Result | NodeError) -> None:
            taken: Result | NodeError = NodeUnreachable(self.node, bug_text(f"the answer to `{op}` could not be handled"))
            try:
                if then is not None and not isinstance(answer, NodeError):
                    then(answer)
                taken = answer
            finally:
                answered.put(taken)

        number = self._request(op, take, fields)
        try:
            answer = answered.get(timeout=timeout_s)
        except queue.Empty:
            with self._state:
                self._waiting.pop(number, None)
            raise NodeUnreachable(self.node, f"`{op}` was not answered within {timeout_s:g} s") from None
        if isinstance(answer, NodeError):
            raise answer
        return answer

    def send(self, op: Operation, callback: Callable[[Result | NodeError], None], **fields: object) -> None:
        """Send a request. ``callback`` gets the answer or the error, exactly once."""
        self._request(op, callback, fields)

    def credit(self, stream: int, size: int) -> None:
        """Report that ``size`` bytes of a stream have been processed, so that the node may send that many more."""
        self._put(encode({"op": "credit", "stream": stream, "bytes": size}))

    def close(self) -> None:
        """Close the connection. The agent exits, and tasks continue. May be called twice, from any thread, and never raises."""
        self._is_closing = True
        self._hang_up()
        if threading.current_thread() is not self._reader:
            self._reader.join(5.0)

    @property
    def is_open(self) -> bool:
        """Whether the connection is open, as far as is known."""
        return not self._has_ended.is_set() and not self._is_closing

    @property
    def silent_s(self) -> float:
        """Return the seconds since the node's last message.

        The result is limited to the time in which a silent node is detected: if more time has elapsed, this process was
        suspended.
        """
        return min(time.monotonic() - self._received_at, (_SILENT_PINGS + 1) * self.ping_s)

    @property
    def clock(self) -> Clock | None:
        """Return the offset of the node's clock from this machine's, as measured by pings; ``None`` before the first answer."""
        return self._clock.clock

    def _request(self, op: Operation, callback: Callable[[Result | NodeError], None], fields: dict[str, object]) -> int:
        number = next(self._numbers)
        with self._state:
            has_ended = self._has_ended.is_set()
            if not has_ended:
                self._waiting[number] = (op, callback)
        if has_ended:
            callback(self._ended_error())
        else:
            self._put(encode({"id": number, "op": op, **fields}))
        return number

    def _put(self, line: bytes) -> None:
        self._outgoing.put(line)

    def _hang_up(self) -> None:
        self._outgoing.put(None)
        self._channel.close()

    # -- the three threads

    def _write(self) -> None:
        while (line := self._outgoing.get()) is not None:
            try:
                self._channel.write(line)
            except NodeUnreachable as error:
                self._fail(error)
                return

    def _ping(self) -> None:
        # Pings are only queued, so that a writer blocked by a stalled node does not block this thread too.
        while not self._has_ended.wait(self.ping_s):
            silent_s = time.monotonic() - self._received_at
            if silent_s > _SILENT_PINGS * self.ping_s:
                self._fail(NodeUnreachable(self.node, f"no heartbeat for {silent_s:.0f} s"))
                return
            self._send_ping()

    def _send_ping(self) -> None:
        self._request("ping", self._clock.ping(), {})

    def _read(self, received: bytes) -> None:
        reader = LineReader()
        data = received
        try:
            while True:
                for message in reader.feed(data):
                    self._take(message)
                data = self._channel.read()
                if not data:
                    break
                self._received_at = time.monotonic()
        except Exception as error:  # noqa: BLE001 - the connection ends, whatever the node sent
            self._fail(NodeUnreachable(self.node, f"the agent sent a malformed message: {str(error)[:_LONGEST_TEXT]}"))
        finally:
            self._end()

    def _take(self, message: dict[str, Any]) -> None:
        if "event" in message:
            check_event(message)
            if self._on_event is not None and not self._call(self._on_event, message):
                kind = str(message["event"])[:_LONGEST_TEXT]
                self._fail(NodeUnreachable(self.node, bug_text(f"the agent's event `{kind}` could not be handled")))
                raise ValueError(kind)  # ends the reader; the error above remains the reason
            return
        with self._state:
            waiting = self._waiting.pop(message["id"], None)
        if waiting is None:
            return  # the request has timed out
        op, callback = waiting
        self._call(callback, self._answer(op, message))

    def _answer(self, op: Operation, message: dict[str, Any]) -> Result | AgentError:
        if message.get("ok") is not True:
            error = message.get("error")
            fields = error if isinstance(error, dict) else {}
            return AgentError(self.node, str(fields.get("kind")), str(fields.get("message")))
        answer = {key: value for key, value in message.items() if key not in ("id", "ok")}
        try:
            check_answer(op, answer)
        except ValueError as error:
            return AgentError(self.node, "malformed", str(error)[:_LONGEST_TEXT])
        return answer

    def _call(self, callback: Callable[[Any], None], argument: object) -> bool:
        """Call a callback. If it raises, print the traceback and return False."""
        try:
            callback(argument)
        except Exception:  # noqa: BLE001 - a bug in a callback of `send` must not end the reader thread
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            return False
        return True

    def _fail(self, error: NodeUnreachable) -> None:
        with self._state:
            self._error = self._error or error
        self._hang_up()

    def _ended_error(self) -> NodeUnreachable:
        return self._error or NodeUnreachable(self.node, "the connection to the agent is closed")

    def _end(self) -> None:
        self._hang_up()
        if self._error is None and not self._is_closing:
            stderr = self._channel.stderr_tail().strip()
            self._error = NodeUnreachable(self.node, "the connection to the agent ended", hint=stderr)
        error = self._ended_error()
        with self._state:
            self._has_ended.set()
            waiting, self._waiting = self._waiting, {}
        for _, callback in waiting.values():
            self._call(callback, error)
        if self._on_close is not None:
            self._call(self._on_close, error)


_SAMPLES = 8
"""Number of latest pings, of which the fastest counts.

They are enough that one of them usually has no delay, and few enough to follow a drift of the clock.
"""


class ClockWatch:
    """Measures a node's clock, ping by ping."""

    def __init__(self) -> None:
        """Start without samples."""
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=_SAMPLES)

    @property
    def clock(self) -> Clock | None:
        """Return the current estimate of the node's clock; ``None`` before the first answer."""
        return best_clock(tuple(self._samples))

    def ping(self) -> Callable[[object], None]:
        """Record that a ping is sent now. Returns the callback for its answer."""
        sent_at = now()

        def answered(answer: object) -> None:
            if isinstance(answer, Mapping) and isinstance(node_time := _answer_time(answer), float):
                self._samples.append((sent_at, node_time, now()))

        return answered


def _answer_time(answer: Mapping[str, Any]) -> float | None:
    node_time = answer.get("now")
    return float(node_time) if isinstance(node_time, int | float) else None
