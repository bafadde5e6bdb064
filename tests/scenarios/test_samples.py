"""Samples of the resources that a task uses, from the node to `query`, `metrics` and `top`."""

from __future__ import annotations

import json

from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli

SPEC = """
workflow:
  name: hold
  tasks:
  - name: one
    command: [python3, -c, "import time; kept = bytearray(b'x' * (150 << 20)); time.sleep(600)"]
"""


def test_resource_samples_of_a_silent_task_arrive_while_it_runs(any_cli: Cli) -> None:
    ident = any_cli.submit(any_cli.spec(SPEC))

    def is_measured() -> bool:
        usage = any_cli.tasks(ident)["one"]["usage"]
        return usage is not None and usage["memory"] > 150 << 20

    wait_until(is_measured, 90, "a sample")
    found = json.loads(any_cli.run("workflow", "metrics", ident, "-t", "json").out)
    assert found["metrics"] == []
    (system,) = found["system"]
    assert (system["task_name"], system["retry_id"]) == ("one", 0)
    assert max(system["series"]["system/memory/usage"]) > 150 << 20
    shown = any_cli.run("top", "--once").out
    assert ident in shown
    assert any_cli.run("workflow", "cancel", ident, "--wait", "60").code == 0
    kept = any_cli.run("workflow", "metrics", ident, "--key", "system/memory/*").out
    assert kept.splitlines()[2].split()[:2] == ["one", "system/memory/usage"]
    assert any_cli.tasks(ident)["one"]["usage"] is None
