"""``exitActions`` of a task and ``retry`` of a group: what an end means, and how often a group is tried again."""

from __future__ import annotations

from collections.abc import Container
from itertools import combinations

from distflow.documents.document import View
from distflow.documents.problems import Problem, Severity
from distflow.documents.quantities import parse_duration
from distflow.lifecycle.exits import Action, Codes, ExitActions, overlap, parse_codes
from distflow.spec.model import Retry, WorkflowSpec

__all__ = ["parse_exit_actions", "parse_retry", "unused_reschedules"]


def parse_exit_actions(task: View) -> ExitActions:
    """Return a task's exit actions. OSMO takes the first of two that name the same code; here that is a finding."""
    entries = task.view("exitActions")
    found: dict[Action, tuple[str, Codes]] = {}
    for key in entries.keys:
        action = Action.__members__.get(key.upper())
        text = entries.string(key)
        if action is None or text is None:
            continue  # the schema has said so
        if action in found:
            entries.add(f"`{found[action][0]}` and `{key}` are the same action", "write their codes into one", key=key)
            continue
        try:
            codes = parse_codes(text)
        except ValueError as error:
            message, _, hint = str(error).partition("; ")
            entries.add(f"`{key}`: {message}", hint, key=key)
            continue
        found[action] = (key, codes)
    for (first, first_codes), (second, second_codes) in combinations(found.values(), 2):
        code = overlap(first_codes, second_codes)
        if code is not None:
            entries.add(f"exit code {code} stands in `{first}` and in `{second}`", "an exit code has one meaning", key=second)
    codes_of = {action: codes for action, (_, codes) in found.items()}
    return ExitActions(
        complete=codes_of.get(Action.COMPLETE, ()),
        fail=codes_of.get(Action.FAIL, ()),
        reschedule=codes_of.get(Action.RESCHEDULE, ()),
    )


def parse_retry(owner: View, above: Retry) -> Retry:
    """Return how a group is tried again; what a group says wins over what the workflow says."""
    retry = owner.view("retry")
    limit, avoid_after = retry.whole("limit"), retry.whole("avoid_after")
    given_s, longest_s = retry.parsed("backoff", parse_duration), retry.parsed("max_backoff", parse_duration)
    backoff_s = above.backoff_s if given_s is None else given_s
    if longest_s is not None and longest_s < backoff_s:
        retry.add(
            f"`max_backoff` ({longest_s:g} s) is shorter than `backoff` ({backoff_s:g} s)",
            "the wait begins with `backoff` and doubles up to `max_backoff`",
            key="max_backoff",
        )
    return Retry(
        limit=above.limit if limit is None else limit,
        backoff_s=backoff_s,
        max_backoff_s=max(above.max_backoff_s, backoff_s) if longest_s is None else longest_s,
        avoid_after=above.avoid_after if avoid_after is None else avoid_after,
    )


def unused_reschedules(spec: WorkflowSpec, worlds: Container[str]) -> tuple[Problem, ...]:
    """Return a warning for each RESCHEDULE that will have no effect; ``worlds`` names the groups that share one."""
    found = []
    for group in spec.groups:
        ignores = group.ignore_nonlead_status if group.ignore_nonlead_status is not None else group.name not in worlds
        for task in group.tasks:
            if not task.exit_actions.reschedule or (task.replica or 0) > 0:
                continue
            message = hint = ""
            if group.retry.limit == 0:
                message, hint = "`retry` sets the limit 0", "raise it, or remove it: then the limit is 10"
            elif ignores and not task.lead:
                message = f"the group goes on without `{task.written_name}`, as only its lead counts"
                hint = "set `ignoreNonleadStatus: false`: then the whole group is tried again"
            if message:
                words = f"RESCHEDULE of `{task.written_name}` has no effect: {message}"
                found.append(Problem(where=task.mark, severity=Severity.WARNING, message=words, hint=hint))
    return tuple(found)
