"""Start the process that sends notifications (``client.notifications.sender``). The supervisor never waits for it.

It is a separate process, because the supervisor must neither wait for external servers nor keep running until they answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

from distflow.errors import StateError
from distflow.state.directory import StateDirectory, is_locked
from distflow.state.store import Store

__all__ = ["SenderStarter", "start_sender"]


def start_sender(directory: StateDirectory) -> subprocess.Popen[bytes] | None:
    """Start the process that sends notifications and return it, or return ``None`` if it is already running.

    The process exits when all notifications are sent or given up. Raises ``OSError``.
    """
    if is_locked(directory.notify_lock):
        return None  # before it ends, it releases the lock and then looks for notifications again
    log = os.open(directory.supervisor_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "distflow.client.notifications.sender", str(directory.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(log)


class SenderStarter:
    """Starts the process for the supervisor, from a thread, so that the supervisor does not even wait for its start."""

    def __init__(self, directory: StateDirectory, log: Callable[[str], None]) -> None:
        """Start nothing yet."""
        self._directory = directory
        self._log = log
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self) -> None:
        """Let the thread start the process if there are notifications to send. This returns immediately."""
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while self._wanted.wait():
            self._wanted.clear()
            try:
                with Store(self._directory.store) as store:
                    process = start_sender(self._directory) if store.has_notifications() else None
            except (OSError, StateError) as error:
                self._log(f"cannot start the process that sends notifications: {error}")
                continue
            if process is not None:
                process.wait()
