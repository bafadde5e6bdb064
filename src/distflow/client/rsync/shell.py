"""The remote shell for rsync: ``python -m distflow.client.rsync.shell WORKFLOW TASK SECONDS HOST COMMAND...``.

It runs the command (``rsync --server …``) alongside the task, in the task's working directory, and forwards standard input and
output. ``SECONDS`` is the time that the node has to answer. rsync adds ``HOST``, which is ignored.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence

from distflow.client.client import Client
from distflow.client.running_tasks import Exit, Session, find_running_task
from distflow.documents.text import plain_lines
from distflow.errors import DistflowError

__all__ = ["main"]

_READ = 1 << 18


def main(arguments: Sequence[str]) -> int:
    """Forward one connection of rsync, and return the exit code of the remote rsync."""
    workflow, task, seconds, _host, *argv = arguments
    try:
        with Client(notify=_report) as client:
            found = find_running_task(client, workflow, task, int(seconds))
        session = found.open(argv, None, int(seconds), is_plain=True)
        try:
            return _forward(session)
        finally:
            session.close()
    except DistflowError as error:
        _report(f"error: {error}")
        return error.exit_code
    except BrokenPipeError:
        return 1  # the local rsync has exited, and has printed the reason


def _report(text: str) -> None:
    sys.stderr.write(f"{plain_lines(text)}\n")


def _forward(session: Session) -> int:
    threading.Thread(target=_forward_input, args=(session,), name="input", daemon=True).start()
    for event in session.events():
        if isinstance(event, Exit):
            if event.why:
                _report(event.why)
            return event.code
        is_error, data = event
        view = memoryview(data)
        while view:
            view = view[os.write(2 if is_error else 1, view) :]
    raise AssertionError("the remote session ended without an exit code")


def _forward_input(session: Session) -> None:
    while data := os.read(0, _READ):
        session.write(data)
    session.end_input()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Exit without joining the input thread, which may be blocked in a read.
    sys.stdout.flush()
    os._exit(code)
