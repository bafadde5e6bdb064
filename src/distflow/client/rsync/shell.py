"""The program that rsync is given as its remote shell.

``python -m distflow.client.rsync.shell WORKFLOW TASK SECONDS HOST COMMAND...`` runs the command (``rsync --server …``) next
to the task, in its working directory, and carries bytes both ways.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence

from distflow.client.client import Client
from distflow.client.running_tasks import Exit, Session, find_running_task
from distflow.documents.printable import plain_lines
from distflow.errors import DistflowError

__all__ = ["main"]

_READ = 1 << 18


def main(arguments: Sequence[str]) -> int:
    """Carry one connection of rsync; return the exit code of its other half."""
    workflow, task, seconds, _host, *argv = arguments
    try:
        with Client(notify=_report) as client:
            found = find_running_task(client, workflow, task, int(seconds))
        session = found.open(argv, None, int(seconds), is_plain=True)
        try:
            return _carry(session)
        finally:
            session.close()
    except DistflowError as error:
        _report(f"error: {error}")
        return error.exit_code
    except BrokenPipeError:
        return 1  # rsync has ended, and says why


def _report(text: str) -> None:
    sys.stderr.write(f"{plain_lines(text)}\n")


def _carry(session: Session) -> int:
    threading.Thread(target=_feed, args=(session,), name="input", daemon=True).start()
    for event in session.events():
        if isinstance(event, Exit):
            if event.why:
                _report(event.why)
            return event.code
        is_error, data = event
        view = memoryview(data)
        while view:
            view = view[os.write(2 if is_error else 1, view) :]
    raise AssertionError("a session ends with an Exit")


def _feed(session: Session) -> None:
    while data := os.read(0, _READ):
        session.write(data)
    session.end_input()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # The thread that reads may be blocked in it; nothing is left to be done.
    sys.stdout.flush()
    os._exit(code)
