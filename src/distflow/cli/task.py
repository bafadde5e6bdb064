"""``distflow task``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from distflow.cli.completion import complete_task_status
from distflow.cli.context import open_client, until_closed
from distflow.cli.options import Format, FormatOption, NodesOption, command_app
from distflow.cli.render.tables import Paint, table
from distflow.cli.render.workflow_json import workflow_key
from distflow.cli.render.workflow_text import elapsed_s
from distflow.cli.search_options import (
    AllUsersOption,
    OffsetOption,
    Order,
    OrderOption,
    PoolsOption,
    PrioritiesOption,
    UsersOption,
    choose_users,
    days,
    one_of,
    priorities,
)
from distflow.client.client import now
from distflow.client.workflows import ListedTask, list_tasks
from distflow.documents.json_keys import name_keys
from distflow.documents.quantities import local_minute, times
from distflow.errors import InputError
from distflow.lifecycle.states import OSMO_STATUSES, Reason, State, status_of
from distflow.state.record import TaskRecord
from distflow.state.search import Search

__all__ = ["app"]

app = command_app(no_args_is_help=True)

_COUNT = 20
_UNFINISHED = tuple(state.value for state in State if not state.is_final)


@app.callback()
def _task() -> None:
    """List the tasks of all workflows."""


@app.command("list", epilog="Examples: distflow task list  ·  distflow task list --node gpu1 -v  ·  distflow task list -W")
def list_command(
    count: Annotated[
        int | None,
        typer.Option(
            "--count", "-c", min=1, max=1000, help=f"The maximum number of tasks. Default: {_COUNT}, or all for sums."
        ),
    ] = None,
    offset: OffsetOption = 0,
    workflow_id: Annotated[
        str | None,
        typer.Option("--workflow-id", "-w", metavar="TEXT", help="Only tasks of workflows whose ids contain this text."),
    ] = None,
    status: Annotated[
        list[str] | None,
        typer.Option(
            "--status",
            "-s",
            help="Only with this status; may be repeated. Default: unfinished tasks.",
            autocompletion=complete_task_status,
        ),
    ] = None,
    user: UsersOption = None,
    all_users: AllUsersOption = False,
    pool: PoolsOption = None,
    node: NodesOption = None,
    priority: PrioritiesOption = None,
    started_after: Annotated[str | None, typer.Option(metavar="YYYY-MM-DD", help="Only started on this day or later.")] = None,
    started_before: Annotated[str | None, typer.Option(metavar="YYYY-MM-DD", help="Only started before this day.")] = None,
    order: OrderOption = Order.ASC,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also show the requested resources, and their sums.")
    ] = False,
    summary: Annotated[bool, typer.Option("--summary", "-S", help="Show only sums, by user, pool and priority.")] = False,
    by_workflow: Annotated[bool, typer.Option("--aggregate-by-workflow", "-W", help="Show only sums, by workflow.")] = False,
    format_type: FormatOption = Format.TEXT,
) -> None:
    """List the latest attempts of tasks, the newest last."""
    if verbose and summary:
        raise InputError("--verbose and --summary cannot be combined")
    if pool and node:
        raise InputError("--pool and --node cannot be combined")
    known = sorted({*OSMO_STATUSES, *(status_of(state, reason) for state in State for reason in (None, *Reason))})
    wanted = [one_of(word, known, "status of a task", "statuses") for word in status or ()] or list(_UNFINISHED)
    after, before = days(started_after, started_before, "started")
    search = Search(
        name=workflow_id,
        users=choose_users(user, all_users),
        pools=pool or (),
        priorities=priorities(priority),
        unfinished=set(wanted) <= set(_UNFINISHED),
    )

    def is_wanted(task: TaskRecord) -> bool:
        started = task.started_at
        return (
            task.status in wanted
            and (not node or task.node in node)
            and (after is None or (started is not None and started >= after))
            and (before is None or (started is not None and started < before))
        )

    has_sums = summary or by_workflow
    by_workflow = by_workflow and not summary  # as in OSMO, --summary takes precedence
    most = count if count is not None else None if has_sums else _COUNT
    with open_client() as client:
        rows = list_tasks(client, search, is_wanted=is_wanted, count=most, offset=offset)
    if order is Order.ASC:
        rows.reverse()
    with until_closed():
        if format_type is Format.JSON:
            name, found = ("summaries", _sums(rows, by_workflow)) if has_sums else ("tasks", [_json(row) for row in rows])
            print(json.dumps({name: found}, indent=2))
        elif not rows:
            print("No task matches.")
        elif has_sums:
            print(_sums_text(_sums(rows, by_workflow)), end="")
        else:
            print(_text(rows, verbose), end="")


def _text(rows: Sequence[ListedTask], verbose: bool) -> str:
    paint = Paint.of(sys.stdout)
    more = ("Storage [Gi]", "CPU [#]", "Memory [Gi]", "GPU [#]") if verbose else ()
    header = ("User", "Workflow ID", "Task", "Status", "Pool", "Priority", "Node", "Start Time", *more)
    cells = [
        (
            row.workflow.user,
            row.workflow.id,
            row.task.name,
            paint.status(row.task.status),
            row.workflow.pool,
            row.workflow.priority.value,
            row.task.node or "",
            local_minute(row.task.started_at),
            *(_numbers(row.amounts) if verbose else ()),
        )
        for row in rows
    ]
    if verbose:
        total = [sum(row.amounts[column] for row in rows) for column in range(4)]
        cells.append(("Sum", *["-"] * 7, *_numbers(total)))
    return table(header, cells)


def _numbers(amounts: Sequence[float]) -> tuple[str, ...]:
    return tuple(f"{amount:g}" for amount in amounts)


def _sums(rows: Sequence[ListedTask], by_workflow: bool) -> list[dict[str, object]]:
    sums: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        one = row.workflow
        key = (one.user, *([one.id] if by_workflow else []), one.pool, one.priority.value)
        total = sums.setdefault(key, [0, 0, 0, 0])
        total[:] = [before + amount for before, amount in zip(total, row.amounts, strict=True)]
    names = ("user", *(["workflow_id"] if by_workflow else []), "pool", "priority")
    amounts = ("storage", "cpu", "memory", "gpu")
    return [{**dict(zip(names, key, strict=True)), **dict(zip(amounts, total, strict=True))} for key, total in sums.items()]


def _sums_text(sums: Sequence[dict[str, object]]) -> str:
    words = {
        "user": "User", "workflow_id": "Workflow ID", "pool": "Pool", "priority": "Priority", "storage": "Storage [Gi]",
        "cpu": "CPU [#]", "memory": "Memory [Gi]", "gpu": "GPU [#]",
    }  # fmt: skip
    rows = [[f"{value:g}" if isinstance(value, int | float) else str(value) for value in one.values()] for one in sums]
    return table([words[name] for name in sums[0]], rows)


def _json(row: ListedTask) -> dict[str, object]:
    record, task = row.workflow, row.task
    storage, cpu, memory, gpu = row.amounts
    return {
        "user": record.user,
        **workflow_key(record),
        "task_name": task.name,
        "retry_id": task.attempt,
        "pool": record.pool,
        **name_keys(node=task.node),
        **times(start_time=task.started_at, end_time=task.ended_at),
        "duration": elapsed_s(task.started_at, task.ended_at, now()),
        "status": task.status,
        "storage": storage,
        "cpu": cpu,
        "memory": memory,
        "gpu": gpu,
        "priority": record.priority.value,
    }
