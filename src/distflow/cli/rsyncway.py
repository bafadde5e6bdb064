"""What rsync takes for its remote shell: ``python -m distflow.cli.rsyncway WORKFLOW TASK SECONDS HOST COMMAND...``.

It runs the command (``rsync --server …``) beside the task, in its working directory, and carries bytes both ways.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence

from distflow.backends.machines.inspection.session import Exit, Session
from distflow.cli.beside import find_place
from distflow.cli.reading import choose_tasks, open_workflow
from distflow.cli.tables import plain, plain_lines
from distflow.errors import DistflowError

__all__ = ["main"]

_READ = 1 << 18


def main(arguments: Sequence[str]) -> int:
    """Carry one connection of rsync; return the exit code of its other half."""
    workflow, task, seconds, _host, *argv = arguments
    try:
        with open_workflow(workflow, tell_age=False) as (directory, store, record):
            ((group, one),) = choose_tasks(record, [task])
            place = find_place(directory, store, record, group, one, int(seconds))
        session = place.open(argv, None, int(seconds), is_plain=True)
        try:
            return _carry(session)
        finally:
            session.close()
    except DistflowError as error:
        print(f"error: {plain_lines(str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 1  # rsync has ended, and says why


def _carry(session: Session) -> int:
    threading.Thread(target=_feed, args=(session,), name="input", daemon=True).start()
    for event in session.events():
        if isinstance(event, Exit):
            if event.why:
                print(plain(event.why), file=sys.stderr)
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
