"""``exitActions``, ``retry`` and ``command`` of a spec, and the warnings about ``exitActions`` without effect."""

from __future__ import annotations

from pathlib import Path

from distflow.lifecycle.exits import ExitActions
from distflow.spec.model import Retry, WorkflowSpec
from distflow.spec.parse import load_spec_text
from distflow.spec.tasks import unused_reschedules

SPEC = """
workflow:
  name: job
  retry: {limit: 3, max_backoff: 1h}
  groups:
  - name: helpers
    tasks:
    - {name: master, lead: true, command: [x], exitActions: {RESCHEDULE: 1-255}}
    - {name: helper, replicas: 2, command: [x], exitActions: {Reschedule: 1, complete: "3,5-6"}}
  - name: never
    retry: {limit: 0, backoff: 2h}
    tasks:
    - {name: one, command: [x], exitActions: {RESCHEDULE: 137}}
  - name: counts
    ignoreNonleadStatus: false
    tasks:
    - {name: two, lead: true, command: [x]}
    - {name: three, command: [x], exitActions: {RESCHEDULE: 1-255}}
"""


COMMANDS = """
workflow:
  name: words
  tasks:
  - {name: listed, command: [python3, a b.py, --lr, "0.1"]}
  - name: plain
    command: python3 'a b.py' --lr 0.1
  - name: tokens
    command: python3 {{ script }} --to {{output}}/m --filter a\\;b "x && y"
  - name: folded
    command: >
      python3 train.py
      --lr 0.1
  - name: continued
    command: |
      python3 train.py \\
        --lr 0.1
default-values: {script: train.py}
"""


def load() -> WorkflowSpec:
    spec, problems = load_spec_text(SPEC, "spec.yaml", Path.cwd())
    assert problems == ()
    return spec


def test_retries_and_exit_actions_of_tasks_groups_and_workflow_are_parsed() -> None:
    helpers, never, counts = load().groups
    assert helpers.retry == Retry(limit=3, backoff_s=5.0, max_backoff_s=3600.0) == counts.retry
    assert never.retry == Retry(limit=0, backoff_s=7200.0, max_backoff_s=7200.0)
    assert helpers.tasks[2].exit_actions == ExitActions(complete=((3, 3), (5, 6)), reschedule=((1, 1),))


def test_a_reschedule_without_effect_is_one_warning_for_each_entry() -> None:
    helper, one = unused_reschedules(load(), ())
    assert helper.as_text() == (
        "spec.yaml:9: warning: RESCHEDULE of `helper` has no effect after the task has started:"
        " the group continues without `helper`, because only the lead decides the group's end\n"
        "    set `ignoreNonleadStatus: false` to retry the whole group"
    )
    assert one.as_text().startswith("spec.yaml:13: warning: RESCHEDULE of `one` has no effect: `retry` has the limit 0\n")


def test_reschedule_has_an_effect_for_every_task_of_a_world() -> None:
    assert len(unused_reschedules(load(), {"helpers"})) == 1


def test_a_command_in_one_string_is_split_as_a_shell_would_split_it() -> None:
    spec, problems = load_spec_text(COMMANDS, "spec.yaml", Path.cwd())
    assert problems == ()
    assert {group.tasks[0].name: [word.value for word in group.tasks[0].command] for group in spec.groups} == {
        "listed": ["python3", "a b.py", "--lr", "0.1"],
        "plain": ["python3", "a b.py", "--lr", "0.1"],
        "tokens": ["python3", "train.py", "--to", "{{output}}/m", "--filter", "a;b", "x && y"],
        "folded": ["python3", "train.py", "--lr", "0.1"],
        "continued": ["python3", "train.py", "--lr", "0.1"],
    }
