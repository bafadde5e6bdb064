"""The agent's connection to the pair of one attempt (the other end of ``control.AgentConnections``)."""

from __future__ import annotations

import itertools
import selectors
import socket
from typing import Callable, Dict, Optional

from distflow.runtime.agent.loop import Loop
from distflow.runtime.guard import control
from distflow.runtime.wire import Json, LineReader, OpError, OutQueue, encode

__all__ = ["PairLink"]

_Answered = Callable[[Optional[Json], Optional[OpError]], None]


class PairLink:
    """Sends requests to the keeper and receives its notifications.

    ``on_gone`` is called once, when the connection ends. After it, every open request is answered with ``(None, None)``.
    """

    def __init__(self, loop: Loop, directory: str, on_news: Callable[[str], None], on_gone: Callable[[], None]) -> None:
        """Connect. Raises ``OSError`` if neither runner nor keeper is running."""
        self._socket: Optional[socket.socket] = control.connect(directory)
        self._fd = self._socket.fileno()
        self._loop = loop
        self._on_news = on_news
        self._on_gone = on_gone
        self._reader = LineReader()
        self._queue = OutQueue()
        self._numbers = itertools.count(1)
        self._waiting: Dict[int, _Answered] = {}
        loop.watch(self._fd, selectors.EVENT_READ, self._ready)

    def ask(self, request: Json, answered: _Answered) -> None:
        """Send a request. ``answered`` gets the result or the error, or neither if the pair disconnected before."""
        if self._socket is None:
            answered(None, None)
            return
        number = next(self._numbers)
        self._waiting[number] = answered
        self._queue.put(encode(dict(request, id=number)))
        self._write()

    def close(self) -> None:
        """Close the connection without calling ``on_gone``."""
        self._on_gone = lambda: None
        self._gone()

    def _ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write()
        if events & selectors.EVENT_READ and self._socket is not None:
            self._read(self._socket)

    def _write(self) -> None:
        try:
            self._queue.write_to(self._fd)
        except OSError:
            self._queue = OutQueue()  # the next read reports the end of the connection
        self._loop.watch(self._fd, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._queue else 0), self._ready)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
            messages = self._reader.feed(data)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            data, messages = b"", []
        news = []
        for message in messages:
            if "news" in message:
                if message["news"] not in news:
                    news.append(message["news"])
                continue
            answered = self._waiting.pop(message.get("id", 0), None)
            if answered is None:
                continue
            if message.get("ok"):
                answered(message, None)
            else:
                error = message.get("error") or {}
                answered(None, OpError(str(error.get("kind")), str(error.get("message"))))
        for item in news:
            self._on_news(item)
        if not data:
            self._gone()

    def _gone(self) -> None:
        if self._socket is None:
            return
        self._loop.watch(self._fd, 0, self._ready)
        self._socket.close()
        self._socket = None
        waiting, self._waiting = self._waiting, {}
        self._on_gone()
        for answered in waiting.values():
            answered(None, None)
