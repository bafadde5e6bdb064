"""Gangs whose tasks request the same rack, on SSH hosts."""

from __future__ import annotations

from scenarios.conftest import Cli
from scenarios.lab import Lab

SPEC = """
workflow:
  name: near
  resources:
    default: {topology: [{key: rack, requirementType: HOW}]}
  groups:
  - name: train
    tasks:
    - {name: master, lead: true, ranks: {size: 1}, command: ["true"]}
    - {name: worker, replicas: COUNT, ranks: {size: 1}, command: ["true"]}
"""


def test_one_rack_is_enforced_if_required_and_not_if_preferred(lab: Lab, cli: Cli) -> None:
    first, *rest = lab.servers
    lab.configure(nodes={first: {"labels": {"rack": "r1"}}, **{name: {"labels": {"rack": "r2"}} for name in rest}})
    done = cli.run("workflow", "submit", cli.spec(SPEC.replace("COUNT", "1").replace("HOW", "required")), "--wait")
    assert done.code == 0, done.err
    assert {task["node_name"] for task in cli.tasks("near-1").values()} == set(rest)
    refused = cli.run("workflow", "submit", cli.spec(SPEC.replace("COUNT", "2").replace("HOW", "required")))
    assert refused.code == 2
    assert "group `train` can never run in pool `lab`" in refused.err
    assert f"{first}: rack r1, r2 requested" in refused.err
    done = cli.run("workflow", "submit", cli.spec(SPEC.replace("COUNT", "2").replace("HOW", "preferred")), "--wait")
    assert done.code == 0, done.err
    assert {task["node_name"] for task in cli.tasks("near-2").values()} == set(lab.servers)
