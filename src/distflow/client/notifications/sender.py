"""``python -m distflow.client.notifications.sender STATE_DIRECTORY``: the process that sends notifications.

It sends one message at a time to each destination, but serves several destinations at the same time. It retries failures that
may be temporary.

It may be killed at any instant. A notification stays in the store until the outcome of its delivery is recorded there, so the
next process sends it. If the process is killed between the delivery and the record, a notification arrives again, with the same
``id``.
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
from distflow.client.notifications.delivery import deliver
from distflow.client.notifications.message import Message, compose
from distflow.client.notifications.targets import url_of
from distflow.documents.notify import NotifyTarget
from distflow.documents.quantities import seconds_text
from distflow.errors import DistflowError, NotifyError
from distflow.state.directory import StateDirectory, try_lock
from distflow.state.event_details import EventDetails, NotificationFailed, NotificationSent
from distflow.state.notification import Notification
from distflow.state.record import EventRecord

__all__ = ["main", "send_notifications"]

_PAUSES_S = (2.0, 10.0, 30.0, 120.0)
"""Seconds between the tries of one notification."""
_LONGEST_TRY_S = 300.0
"""The time after which a try is given up, and with it the notification: it is not sent again.

The try's thread may continue for days if a server sends its answer byte by byte.
"""
_MOST_AT_ONCE = 8
"""The maximum number of tries at the same time, without those that were given up."""
_MOST_DELIVERIES = 5
"""The maximum number of processes that begin to deliver one notification. Each may have sent it without recording that."""
_POLL_S = 0.5


def main(argv: Sequence[str]) -> int:
    """Send the due notifications of a state directory, unless another process is sending them."""
    directory = StateDirectory(Path(argv[0]))
    try:
        # While this process has the lock, other processes store notifications without starting a sender. So check for new
        # notifications after each release.
        while _is_any_due(directory):
            handle = os.open(directory.notify_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if not try_lock(handle):
                    return 0
                with _open_client(directory) as client:
                    send_notifications(client)
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
        return client.store.has_notifications()


def send_notifications(client: Client, pauses_s: Sequence[float] = _PAUSES_S) -> None:
    """Send all notifications that are due, and those that become due meanwhile.

    Args:
        client: The client whose store has the notifications.
        pauses_s: The seconds between the tries of one notification.

    Raises:
        StateError: if the store cannot be read or written.

    """
    _Sender(client, pauses_s).run()


_Destination = tuple[str, str, tuple[str, ...]]
"""The URL, credential and command of an entry. Each destination gets one message at a time, even about different workflows."""


def _destination(target: NotifyTarget) -> _Destination:
    return target.url, target.credential, target.command


class _Delivery:
    """The delivery of one notification."""

    def __init__(self, notification: Notification, target: NotifyTarget, message: Message, url: str) -> None:
        self.notification = notification
        self.target = target
        self.message = message
        self.url = url
        self.tries = 0
        self.next_at = 0.0
        """The time of the next try, in monotonic seconds."""
        self.give_up_at: float | None = None
        """The time at which the running try is given up, in monotonic seconds; ``None`` between tries."""


class _Sender:
    """Sends the notifications of one store. Each try has a daemon thread."""

    def __init__(self, client: Client, pauses_s: Sequence[float]) -> None:
        self._client = client
        self._pauses_s = pauses_s
        self._targets: dict[str, Sequence[NotifyTarget]] = {}
        self._deliveries: dict[_Destination, _Delivery] = {}
        self._outcomes: queue.SimpleQueue[tuple[_Delivery, NotifyError | None]] = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            self._begin_deliveries()
            if not self._deliveries:
                return
            self._start_tries()
            self._take_outcomes()

    def _begin_deliveries(self) -> None:
        """Begin to deliver the oldest notification of each destination, so that `started` arrives before `completed`."""
        for notification in self._client.store.notifications():
            label = f"target {notification.target + 1}"
            try:
                target = self._target(notification)
                label = target.label
                destination = _destination(target)
                if destination in self._deliveries:
                    continue
                url = url_of(self._client, target)
                record = self._client.store.find(notification.workflow)
                message = compose(
                    self._client, record, notification.on, notification_id=notification.id, subject=notification.subject
                )
            except DistflowError as error:
                self._record(notification, label, error.message)
            except Exception as error:  # noqa: BLE001  a bug must not keep this notification, and all later ones, pending
                self._record(notification, label, f"a bug in distflow: {type(error).__name__}")
            else:
                # Count the delivery before it begins. Otherwise, with a full disk, the same notification could be sent again
                # and again.
                if self._client.store.count_delivery(notification) > _MOST_DELIVERIES:
                    self._record(notification, label, f"given up: its delivery was interrupted {_MOST_DELIVERIES} times")
                else:
                    self._deliveries[destination] = _Delivery(notification, target, message, url)

    def _target(self, notification: Notification) -> NotifyTarget:
        if notification.workflow not in self._targets:
            self._targets[notification.workflow] = self._client.store.notify_targets(notification.workflow)
        return self._targets[notification.workflow][notification.target]

    def _start_tries(self) -> None:
        running = sum(one.give_up_at is not None for one in self._deliveries.values())
        for delivery in self._deliveries.values():
            now = time.monotonic()
            if running < _MOST_AT_ONCE and delivery.give_up_at is None and delivery.next_at <= now:
                running += 1
                delivery.tries += 1
                delivery.give_up_at = now + _LONGEST_TRY_S
                threading.Thread(
                    target=self._try, args=(delivery,), name=f"notify {delivery.target.label}", daemon=True
                ).start()

    def _try(self, delivery: _Delivery) -> None:
        try:
            deliver(delivery.target, delivery.message, delivery.url)
        except NotifyError as error:
            self._outcomes.put((delivery, error))
        except Exception as error:  # noqa: BLE001  a bug must not leave the notification pending forever
            self._outcomes.put((delivery, NotifyError(f"a bug in distflow: {type(error).__name__}")))
        else:
            self._outcomes.put((delivery, None))

    def _take_outcomes(self) -> None:
        """Wait until an outcome arrives or a try is due, at most 0.5 s. Record the ended deliveries, and plan the retries."""
        now = time.monotonic()
        pauses_s = [one.next_at - now for one in self._deliveries.values() if one.give_up_at is None and one.next_at > now]
        ended: list[tuple[_Delivery, NotifyError | None]] = []
        with suppress(queue.Empty):
            ended.append(self._outcomes.get(timeout=min([_POLL_S, *pauses_s])))
        now = time.monotonic()
        text = f"gave up after {seconds_text(_LONGEST_TRY_S)}"
        ended += [(one, NotifyError(text)) for one in self._deliveries.values() if (one.give_up_at or now) < now]
        for delivery, error in ended:
            destination = _destination(delivery.target)
            if self._deliveries.get(destination) is not delivery:
                continue  # it was given up before
            if error is not None and error.may_retry and delivery.tries <= len(self._pauses_s):
                delivery.next_at = now + self._pauses_s[delivery.tries - 1]
                delivery.give_up_at = None
                continue
            del self._deliveries[destination]
            tries = f" ({delivery.tries} tries)" if delivery.tries > 1 else ""
            self._record(delivery.notification, delivery.target.label, error.message + tries if error is not None else "")

    def _record(self, notification: Notification, label: str, error: str) -> None:
        details: EventDetails = (
            NotificationFailed(on=notification.on.value, target=label, error=error)
            if error
            else NotificationSent(on=notification.on.value, target=label)
        )
        event = EventRecord(at=now(), details=details, workflow=notification.workflow)
        self._client.store.finish_notification(notification, event)
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
