"""Notifications of a workflow's end. A separate process sends them, and it may be killed."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from distflow.testing.waiting import is_alive, wait_until
from outputs import assert_documented
from scenarios.conftest import Cli
from webhooks import SECRET, running_receiver

QUICK = """
workflow:
  name: quick
  labels: {team: vision}
  notify: [{credential: team, on: [completed]}]
  tasks: [{name: one, command: ["true"]}]
"""
SLEEPS = """
workflow:
  name: sleeps
  tasks: [{name: one, command: [sleep, "600"]}]
"""


def notification_events(cli: Cli, workflow: str) -> list[dict[str, Any]]:
    lines = cli.run("workflow", "events", workflow, "--format-type", "json").out
    return [event for event in json.loads(lines)["events"] if event["kind"] == "notification"]


def sender_pid(cli: Cli) -> int | None:
    return next((pid for pid, command in cli.processes() if "distflow.client.notifications" in command), None)


def test_a_notification_survives_the_death_of_its_sender_and_of_the_supervisor(cli: Cli) -> None:
    with running_receiver() as receiver:
        done = cli.run("credential", "set", "team", "--payload", f"url={receiver.url}")
        assert done.code == 0, done.err
        sleeps = cli.submit(cli.spec(SLEEPS))
        cli.await_running(sleeps)
        # The server does not answer. Neither the workflow nor the supervisor waits for it.
        receiver.is_silent.set()
        quick = cli.submit(cli.spec(QUICK))
        cli.await_status(quick, "COMPLETED")
        wait_until(lambda: receiver.received, 30)
        cli.kill_supervisor()
        pid = sender_pid(cli)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))
        receiver.is_silent.clear()
        # `workflow events` also starts the supervisor and the sender again.
        (event,) = wait_until(lambda: notification_events(cli, quick), 30)
        assert (event["code"], event["fields"]) == ("notification_sent", {"on": "completed", "target": "team"})
        first, again = receiver.received
        assert first == again, "a receiver can recognize the second request by its id"
        assert_documented(again, "notification")
        assert (again["name"], again["labels"], again["status"]) == (quick, {"team": "vision"}, "COMPLETED")
        cli.run("workflow", "cancel", sleeps, "--force")
        cli.await_status(sleeps, "FAILED_CANCELED")
        wait_until(lambda: not cli.processes(), 30)
        assert cli.run("workflow", "list").code == 0
        assert sender_pid(cli) is None
        assert len(receiver.received) == 2
    for path in cli.state.glob("*.log"):
        assert SECRET not in path.read_text()
    assert SECRET.encode() not in (cli.state / "distflow.sqlite3").read_bytes()
