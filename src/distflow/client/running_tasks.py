"""Running tasks: commands next to them, in their directories and environments, and the stacks of their processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from distflow.backends.machines.inspection.session import Exit, Session, Size, open_session
from distflow.backends.machines.inspection.stacks import Asked, TaskStacks, collect_stacks
from distflow.client.client import Client
from distflow.client.workflows import choose_tasks
from distflow.errors import AgentError, DistflowError, InputError
from distflow.lifecycle.states import State
from distflow.plan.credentials import given_secrets
from distflow.pools.model import Node, Pool
from distflow.protocol.attempts import attempt_name
from distflow.shell import Secret
from distflow.state.record import TaskRecord, WorkflowRecord
from distflow.state.secrets import read_secrets

__all__ = [
    "CommandsEnded",
    "Exit",
    "RunningTask",
    "Session",
    "Size",
    "TaskStacks",
    "find_running_task",
    "read_stacks",
    "run_on_tasks",
    "running_task",
]

_RUNNING = (State.RUNNING, State.STOPPING)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTask:
    """A running task, and how to get to it."""

    task: str
    attempt: str
    pool: Pool
    node: Node
    secrets: Mapping[str, Secret]

    def open(
        self, argv: Sequence[str], terminal: tuple[Size, str] | None, timeout_s: float, *, is_plain: bool = False
    ) -> Session:
        """Start a command on the task's node, in its directory, with its environment and GPUs.

        The command ends with the connection and with the task, as does everything that it started.

        Args:
            argv: The command.
            terminal: The size and the type (``TERM``) of a terminal for it; else it has pipes.
            timeout_s: How long the node may take to answer.
            is_plain: Whether it runs without container, ``setup`` and secrets.

        Raises:
            InputError: when the task does not run any more.
            NodeError: when the node cannot be reached or refuses.

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


def find_running_task(client: Client, workflow: str, task: str, connect_timeout: int) -> RunningTask:
    """Return a running task of a workflow, both by name. Raises ``NotFound``, and ``InputError`` for one that does not run."""
    from distflow.client.workflows import find_workflow

    record = find_workflow(client, workflow, report_age=False)
    ((group, one),) = choose_tasks(record, [task])
    return running_task(client, record, group, one, connect_timeout)


def running_task(client: Client, record: WorkflowRecord, group: str, task: TaskRecord, connect_timeout: int) -> RunningTask:
    """Return where a task runs; ``connect_timeout``: seconds. Raises ``InputError`` for one that does not run."""
    if task.state.is_final:
        raise InputError(f"{task.name} has ended: {task.status}", hint=f"its output: distflow workflow logs {record.id}")
    if task.state not in _RUNNING or task.node is None:
        raise InputError(
            f"{task.name} does not run yet: {task.status}", hint=f"what it waits for: distflow workflow query {record.id}"
        )
    store = client.store
    pool = replace(store.pool(record.uuid), connect_timeout_s=float(connect_timeout))
    launch = store.plan(record.uuid).group(group).launch(task.name)
    try:
        secrets = given_secrets(launch, read_secrets(client.directory.secrets, record.uuid))
    except LookupError as error:
        raise InputError(f"{error.args[0]} is not kept any more") from None
    return RunningTask(
        task=task.name,
        attempt=attempt_name(record.uuid, group, task.name, task.attempt),
        pool=pool,
        node=next(node for node in pool.nodes if node.name == task.node),
        secrets=secrets.variables,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandsEnded:
    """The ends of one command on several tasks."""

    codes: tuple[int, ...]
    """Its exit codes, where it ran."""
    errors: tuple[DistflowError, ...]
    """Why it did not run elsewhere."""


def run_on_tasks(
    tasks: Sequence[RunningTask],
    argv: Sequence[str],
    connect_timeout: int,
    *,
    on_output: Callable[[int, bool, bytes], None],
    on_exit: Callable[[int, Exit], None],
) -> CommandsEnded:
    """Run a command next to each of several tasks at the same time, without a terminal and without input.

    Args:
        tasks: Where.
        argv: The command.
        connect_timeout: Seconds that a node may take to answer.
        on_output: Called with the number of the task, whether it is standard error, and bytes; from several threads. When it
            raises ``OSError``, that task's command is ended.
        on_exit: Called with the number of the task and the end of its command.

    """
    codes: list[int] = []
    errors: list[DistflowError] = []
    sessions: list[Session] = []

    def follow(number: int, task: RunningTask) -> None:
        session = task.open(argv, None, connect_timeout)
        sessions.append(session)
        session.end_input()
        for event in session.events():
            if isinstance(event, Exit):
                codes.append(event.code)
                on_exit(number, event)
            else:
                on_output(number, *event)

    def run(number: int, task: RunningTask) -> None:
        try:
            follow(number, task)
        except DistflowError as error:
            errors.append(error)
        except OSError:
            codes.append(1)  # the output has no reader any more

    threads = [threading.Thread(target=run, args=numbered, daemon=True) for numbered in enumerate(tasks)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for session in sessions:
            session.close()
    return CommandsEnded(codes=tuple(codes), errors=tuple(errors))


def read_stacks(
    client: Client, record: WorkflowRecord, names: Sequence[str] = (), *, on_start: Callable[[int], None] = lambda _: None
) -> list[TaskStacks]:
    """Return where the processes of a running workflow are just now. Nothing is stopped or slowed down.

    Args:
        client: Where the workflow is known.
        record: The workflow.
        names: Only these of its tasks.
        on_start: Called with the number of nodes that are asked.

    Raises:
        InputError: when none of the tasks runs.
        NotFound: for a task that the workflow does not have.

    """
    chosen = [(group, one) for group, one in choose_tasks(record, names) if one.state in _RUNNING]
    if not chosen:
        raise InputError(
            f"no task of {record.id} runs: {record.status}", hint=f"how it stands: distflow workflow query {record.id}"
        )
    pool = client.store.pool(record.uuid)
    nodes = {node.name: node for node in pool.nodes}
    asked = [
        Asked(
            task=one.name,
            group=group,
            attempt=attempt_name(record.uuid, group, one.name, one.attempt),
            node=nodes[one.node or ""],
        )
        for group, one in chosen
    ]
    on_start(len({one.node.name for one in asked}))
    return list(collect_stacks(pool, asked))
