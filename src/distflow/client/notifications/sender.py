"""``python -m distflow.client.notifications.sender STATE_DIRECTORY``: the process that sends notifications.

It sends one at a time to each target, to several targets at once, and tries again if that may help.

It may be killed at any instant. A notification stays in the store until the outcome of its delivery is recorded there, so the
next process sends it. If it is killed between the two, a notification arrives twice, with the same ``id``.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from distflow.client.client import Client, now
from distflow.client.notifications.delivery import ATTEMPT_S, deliver
from distflow.client.notifications.message import Message, compose
from distflow.client.notifications.targets import url_of
from distflow.documents.notify import NotifyTarget
from distflow.errors import DistflowError, NotifyError
from distflow.state.directory import StateDirectory, lock_at_once
from distflow.state.event_details import EventDetails, NotificationFailed, NotificationSent
from distflow.state.notices import Notice
from distflow.state.record import Event

__all__ = ["main", "send_notices"]

_PAUSES_S = (2.0, 10.0, 30.0, 120.0)
"""Seconds between the tries of one notification."""
_MOST_AT_ONCE = 8
_POLL_S = 0.5


def main(argv: Sequence[str]) -> int:
    """Send what is due in a state directory, unless another process does."""
    directory = StateDirectory(Path(argv[0]))
    try:
        # A process that stores a notification while this one has the lock starts no other, so look again after each release.
        while _is_any_due(directory):
            handle = os.open(directory.notify_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if not lock_at_once(handle):
                    return 0
                with _open_client(directory) as client:
                    send_notices(client)
            finally:
                os.close(handle)
    except DistflowError as error:
        _log(f"notifications cannot be sent: {error}")
        return error.exit_code
    return 0


def _open_client(directory: StateDirectory) -> Client:
    return Client(environ={**os.environ, "DISTFLOW_STATE": str(directory.path)})


def _is_any_due(directory: StateDirectory) -> bool:
    with _open_client(directory) as client:
        return client.store.has_notices()


def send_notices(client: Client, pauses_s: Sequence[float] = _PAUSES_S) -> None:
    """Send all notifications that are due, and those that become due meanwhile.

    Args:
        client: The client whose store has the notifications.
        pauses_s: The seconds between the tries of one notification.

    Raises:
        StateError: if the store cannot be read or written.

    """
    outcomes: queue.SimpleQueue[tuple[_Delivery, str]] = queue.SimpleQueue()
    running: dict[tuple[str, int], _Delivery] = {}
    while True:
        # The oldest notification of each target comes first: `started` before `completed`.
        due: dict[tuple[str, int], Notice] = {}
        for notice in client.store.notices():
            due.setdefault((notice.workflow, notice.target), notice)
        for lane, notice in due.items():
            if lane not in running and len(running) < _MOST_AT_ONCE:
                running[lane] = _begin(client, notice, pauses_s, outcomes)
        if not running:
            return
        ended: list[tuple[_Delivery, str]] = []
        with suppress(queue.Empty):
            ended.append(outcomes.get(timeout=_POLL_S))
        late = time.monotonic()
        ended += [(one, "no answer in time") for one in running.values() if one.give_up_at < late]
        for delivery, error in ended:
            if running.get(delivery.lane) is delivery:  # otherwise it was given up before
                del running[delivery.lane]
                _record(client, delivery, error)


class _Delivery:
    """The delivery of one notification, in a thread that ends with the process."""

    def __init__(self, notice: Notice, target: NotifyTarget, pauses_s: Sequence[float]) -> None:
        self.notice = notice
        self.target = target
        self.lane = (notice.workflow, notice.target)
        self._pauses_s = pauses_s
        # A server that sends its answer byte by byte could hold a thread for days.
        self.give_up_at = time.monotonic() + sum(pauses_s) + ATTEMPT_S * (len(pauses_s) + 1) + 5

    def start(self, message: Message, url: str, outcomes: queue.SimpleQueue[tuple[_Delivery, str]]) -> None:
        def run() -> None:
            outcomes.put((self, self._try(message, url)))

        threading.Thread(target=run, name=f"notify {self.target.label}", daemon=True).start()

    def _try(self, message: Message, url: str) -> str:
        """Return why it failed in the end; empty if it did not."""
        for pause_s in (*self._pauses_s, None):
            try:
                deliver(self.target, message, url)
            except NotifyError as error:
                if pause_s is None or not error.may_retry:
                    tries = f" ({len(self._pauses_s) + 1} tries)" if error.may_retry and self._pauses_s else ""
                    return error.message + tries
                threading.Event().wait(pause_s)
            except Exception as error:  # noqa: BLE001  a bug must not leave the notification pending forever
                return f"unexpected error: {type(error).__name__}"
            else:
                return ""
        return ""


def _begin(
    client: Client, notice: Notice, pauses_s: Sequence[float], outcomes: queue.SimpleQueue[tuple[_Delivery, str]]
) -> _Delivery:
    targets = client.store.notify_targets(notice.workflow)
    delivery = _Delivery(notice, targets[notice.target], pauses_s)
    try:
        url = url_of(client, delivery.target)
        record = client.store.find(notice.workflow)
        message = compose(client, record, notice.on, notice_id=notice.id, subject=notice.subject)
    except DistflowError as error:
        outcomes.put((delivery, error.message))
    else:
        delivery.start(message, url, outcomes)
    return delivery


def _record(client: Client, delivery: _Delivery, error: str) -> None:
    notice, label = delivery.notice, delivery.target.label
    details: EventDetails = (
        NotificationFailed(on=notice.on.value, target=label, error=error)
        if error
        else NotificationSent(on=notice.on.value, target=label)
    )
    event = Event(at=now(), details=details, workflow=notice.workflow)
    client.store.finish_notice(notice, event)
    _log(event.text)


def _log(text: str) -> None:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    with suppress(OSError):
        sys.stderr.write(f"{stamp} {text}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    os.umask(0o077)
    logging.disable(logging.CRITICAL)  # libraries log URLs, which are secrets
    sys.exit(main(sys.argv[1:]))
