"""A task that runs, and the way there: for commands that start something beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distflow.backends.machines.inspection.session import Session, Size, open_session
from distflow.errors import AgentError, InputError
from distflow.lifecycle.states import State
from distflow.plan.credentials import given_secrets
from distflow.pools.model import Node, Pool
from distflow.protocol.attempts import attempt_name
from distflow.shell import Secret
from distflow.state.directory import StateDirectory
from distflow.state.record import TaskRecord, WorkflowRecord
from distflow.state.secrets import read_secrets
from distflow.state.store import Store

__all__ = ["Place", "find_place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A running task, and the way there."""

    task: str
    attempt: str
    pool: Pool
    node: Node
    secrets: Mapping[str, Secret]

    def open(
        self, argv: Sequence[str], terminal: tuple[Size, str] | None, timeout_s: float, *, is_plain: bool = False
    ) -> Session:
        """Start a command there; ``is_plain``: without container, ``setup`` and secrets.

        Raises ``InputError`` when the task does not run any more, and ``NodeError``.
        """
        try:
            return open_session(
                self.pool,
                self.node,
                self.attempt,
                argv,
                secrets={} if is_plain else self.secrets,
                terminal=terminal,
                timeout_s=timeout_s,
                is_plain=is_plain,
            )
        except AgentError as error:
            if error.kind == "not_running":
                raise InputError(f"{self.task} does not run any more: {error.message}") from None
            raise


def find_place(
    directory: StateDirectory, store: Store, record: WorkflowRecord, group: str, task: TaskRecord, connect_timeout: int
) -> Place:
    """Return where a task runs. Raises ``InputError`` for one that does not."""
    if task.state.is_final:
        raise InputError(f"{task.name} has ended: {task.status}", hint=f"its output: distflow workflow logs {record.id}")
    if task.state not in (State.RUNNING, State.STOPPING) or task.node is None:
        raise InputError(
            f"{task.name} does not run yet: {task.status}", hint=f"what it waits for: distflow workflow query {record.id}"
        )
    pool = replace(store.pool(record.uuid), connect_timeout_s=float(connect_timeout))
    launch = store.plan(record.uuid).group(group).launch(task.name)
    try:
        secrets = given_secrets(launch, read_secrets(directory.secrets, record.uuid))
    except LookupError as error:
        raise InputError(f"{error.args[0]} is not kept any more") from None
    return Place(
        task=task.name,
        attempt=attempt_name(record.uuid, group, task.name, task.attempt),
        pool=pool,
        node=next(node for node in pool.nodes if node.name == task.node),
        secrets=secrets.variables,
    )
