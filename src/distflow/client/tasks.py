"""List tasks of several workflows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from distflow.client.client import Client
from distflow.errors import RecordUnreadable
from distflow.spec.model import ResourceSpec
from distflow.state.record import TaskRecord, WorkflowRecord
from distflow.state.search import Search

__all__ = ["ListedTask", "list_tasks"]

_PAGE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTask:
    """A task with its workflow and its requested resources."""

    workflow: WorkflowRecord
    task: TaskRecord
    asks: ResourceSpec

    @property
    def amounts(self) -> tuple[float, int, float, int]:
        """The requested storage (GiB), CPUs, memory (GiB) and GPUs."""
        asks = self.asks
        return (asks.storage or 0) / 2**30, asks.cpu or 0, (asks.memory or 0) / 2**30, asks.gpu or 0


def list_tasks(
    client: Client, search: Search, *, is_wanted: Callable[[TaskRecord], bool], count: int | None = None, offset: int = 0
) -> list[ListedTask]:
    """Return the latest attempts of tasks, newest first.

    A workflow whose record cannot be read is left out, with a warning through ``client.notify``.

    Args:
        client: The client whose store has the workflows.
        search: The conditions that a workflow must meet.
        is_wanted: A filter that returns whether to include a task.
        count: The maximum number of tasks to return. Default: all.
        offset: The number of newest matching tasks to skip.

    Raises:
        StateError: if the store cannot be read.

    """
    rows: list[ListedTask] = []
    for row in _newest_first(client, search):
        if count is not None and len(rows) >= offset + count:
            break
        if is_wanted(row.task):
            rows.append(row)
    client.wake()
    return rows[offset:]


def _newest_first(client: Client, search: Search) -> Iterator[ListedTask]:
    offset = 0
    while records := client.store.list(search, count=_PAGE, offset=offset):
        for found in records:
            try:
                record, plan = client.store.find(found.uuid), client.store.plan(found.uuid)
            except RecordUnreadable as error:
                client.notify(f"warning: {found.id} is left out: {error.message}")
                continue
            asks = {(group.name, launch.task): launch.resource for group in plan.groups for launch in group.launches}
            for group in reversed(record.groups):
                for task in reversed(group.tasks):
                    yield ListedTask(workflow=record, task=task, asks=asks.get((group.name, task.name), ResourceSpec()))
        offset += len(records)
