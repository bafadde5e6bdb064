"""How the ends of groups determine the end of a workflow: OSMO's rules, but the specific cause is kept.

OSMO replaces most causes by plain FAILED. distflow keeps the reason of the first failure (docs/osmo-commands.md, Q16).
"""

from __future__ import annotations

from collections.abc import Sequence

from distflow.lifecycle.states import Reason, State, WorkflowState

__all__ = ["roll_up_workflow"]

_ORDER = (Reason.INTERNAL, Reason.EXEC_TIMEOUT, Reason.QUEUE_TIMEOUT)
"""The reasons that a workflow shows first if its groups failed for different reasons."""


def roll_up_workflow(groups: Sequence[tuple[State, Reason | None]]) -> tuple[WorkflowState, Reason | None]:
    """Return the state and reason of a workflow from those of its groups.

    The first that applies, in OSMO's order: still running or pending; canceled; a server error; a timeout; the one
    reason that is left without UPSTREAM (several: plain FAILED); completed.
    """
    states = [state for state, _ in groups]
    if not all(state.is_final for state in states):
        started = any(state in (State.RUNNING, State.STOPPING) or state.is_final for state in states)
        return (WorkflowState.RUNNING if started else WorkflowState.PENDING), None
    if State.CANCELED in states:
        return WorkflowState.CANCELED, Reason.CANCELED
    reasons = [reason for state, reason in groups if state is State.FAILED]
    if not reasons:
        return WorkflowState.COMPLETED, None
    for reason in _ORDER:
        if reason in reasons:
            return WorkflowState.FAILED, reason
    own = {reason for reason in reasons if reason is not Reason.UPSTREAM}
    return WorkflowState.FAILED, own.pop() if len(own) == 1 else None
