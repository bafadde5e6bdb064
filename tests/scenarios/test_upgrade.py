"""A supervisor of another version of distflow is replaced, and tasks continue."""

from __future__ import annotations

import sqlite3

from distflow.testing.waiting import is_alive, wait_until
from scenarios.conftest import Cli

SLEEPS = """
workflow:
  name: sleeps
  tasks: [{name: one, command: [sleep, "600"]}]
"""


def starts(cli: Cli, workflow: str) -> list[object]:
    """Return values of each task that change if the task is started again."""
    return [(one["status"], one["retry_id"], one["start_time"]) for one in cli.tasks(workflow).values()]


def test_tasks_continue_while_supervisors_of_other_versions_take_over(cli: Cli) -> None:
    spec = cli.spec(SLEEPS)
    first = cli.submit(spec)
    cli.await_running(first)
    started = starts(cli, first)
    old = cli.supervisor()
    assert old is not None
    (cli.state / "supervisor.lock").write_text(f"{old}\n")  # as distflow 0.2.0 and older write it
    done = cli.run("workflow", "submit", spec)
    assert (done.code, "0.2.0 or older is replaced" in done.err) == (0, True), done.err
    assert not is_alive(old)
    second = done.out.strip()
    cli.await_running(second)
    assert starts(cli, first) == started

    current = cli.supervisor()
    assert current is not None
    with sqlite3.connect(cli.state / "distflow.sqlite3") as db:
        (known,) = db.execute("PRAGMA user_version").fetchone()
        db.execute("PRAGMA user_version = 99")
    wait_until(lambda: not is_alive(current), 30, "the supervisor hands over to the newer version")
    assert "handing over to a newer version" in (cli.state / "supervisor.log").read_text()
    with sqlite3.connect(cli.state / "distflow.sqlite3") as db:
        db.execute(f"PRAGMA user_version = {known}")
    db.close()
    assert starts(cli, first) == started
    cli.run("workflow", "cancel", first, second, "--force")
    for one in (first, second):
        cli.await_status(one, "FAILED_CANCELED")
