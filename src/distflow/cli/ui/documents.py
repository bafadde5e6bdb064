"""The JSON documents of the web page. Most are the documents of ``--format-type json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast

from distflow import __version__
from distflow.cli.pool import pools_document, resources_document
from distflow.cli.render.stacks import stacks_json, stacks_text
from distflow.cli.render.tables import Paint
from distflow.cli.render.workflow_json import list_json, workflow_key
from distflow.cli.search_options import label_selectors
from distflow.cli.workflow.outputs import outputs_json
from distflow.cli.workflow.query import query_document
from distflow.cli.workflow.records import events_document
from distflow.cli.workflow.why import diagnose_document, why_document
from distflow.client.client import Client, now, user_name
from distflow.client.measurements.samples import find_samples
from distflow.client.pools import list_nodes, list_pools, usage_by_node
from distflow.client.workflows import choose_tasks, list_workflows, read_events, read_spec, workflow_ids
from distflow.documents.json_keys import name_keys
from distflow.errors import DistflowError
from distflow.lifecycle.states import Reason, WorkflowState
from distflow.state.record import WorkflowRecord
from distflow.state.search import Search

__all__ = ["LIVE_PARTS", "STORED_PARTS", "Part", "about", "error_document", "pools", "resources", "workflows"]

_STATES = MappingProxyType(
    {
        "active": tuple(state for state in WorkflowState if not state.is_final),
        "completed": (WorkflowState.COMPLETED,),
        "failed": (WorkflowState.FAILED,),
        "canceled": (WorkflowState.CANCELED,),
    }
)

_MOST_SAMPLES = 500
"""The maximum number of samples of an attempt. More samples are averaged."""

Part = Callable[[Client, WorkflowRecord], dict[str, object]]
"""A function that returns a document about a workflow."""


def about(*, has_actions: bool) -> dict[str, object]:
    """Return distflow's version, the user, and whether the page can cancel and restart workflows."""
    return {"version": __version__, "user": user_name(), "actions": has_actions}


def workflows(client: Client, text: str, states: str, *, count: int, offset: int) -> dict[str, object]:
    """Return the document of ``list`` for the matching workflows, the newest first.

    Args:
        client: The client whose store has the workflows.
        text: Words: ``key=value`` for a label, ``#tag`` for a tag. The first other word is a part of the id, and further ones
            are ignored.
        states: ``active``, ``completed``, ``failed`` or ``canceled``. Any other text means all.
        count: The maximum number of workflows to return.
        offset: The number of newest matching workflows to skip.

    Raises:
        InputError: if a label is not valid.

    """
    words = [word for word in text.split() if not word.startswith("#")]
    search = Search(
        name=next((word for word in words if "=" not in word), None),
        labels=label_selectors([word for word in words if "=" in word]),
        tags=[word[1:] for word in text.split() if word.startswith("#")],
        statuses=_statuses(states),
    )
    return list_json(list_workflows(client, search, count=count, offset=offset), now=now())


def _statuses(states: str) -> list[tuple[WorkflowState, Reason | None]] | None:
    wanted = _STATES.get(states)
    return None if wanted is None else [(state, reason) for state in wanted for reason in (None, *Reason)]


def pools(client: Client) -> dict[str, object]:
    """Return the document of ``pool list``."""
    return pools_document(list_pools(client), usage_by_node(client))


def resources(client: Client, pool: str, *, is_live: bool) -> dict[str, object]:
    """Return the document of ``resource list`` for a pool. With ``is_live``, the nodes also report what uses each GPU."""
    rows = list_nodes(client, [pool])
    if not is_live:
        return resources_document(rows, (), {})
    from distflow.client.nodes import ask_resource_holders, gpu_uses

    holders, ids = ask_resource_holders([(row.pool, row.node) for row in rows]), workflow_ids(client)
    document = resources_document(rows, holders, ids)
    nodes = cast("list[dict[str, object]]", document["resources"])
    for node, one in zip(nodes, holders, strict=True):
        node["gpus"] = [
            {"index": gpu, "state": use.state, "by": use.by} for gpu, use in gpu_uses(one, ids, user_name()).items()
        ]
    return document


def _spec(client: Client, record: WorkflowRecord) -> dict[str, object]:
    return {"spec": read_spec(client, record), "template": read_spec(client, record, template=True)}


def _samples(client: Client, record: WorkflowRecord) -> dict[str, object]:
    """Return the resource samples of each task as series of (time, value), without series whose values are all 0 or unknown."""
    found = find_samples(client, record, choose_tasks(record, ()), most=_MOST_SAMPLES)
    series = [
        {
            **name_keys(task=one.task),
            "retry_id": one.attempt,
            "key": key,
            "points": [(at, value) for at, value in zip(one.times, values, strict=True) if value is not None],
        }
        for one in found
        for key, values in one.series.items()
        if any(values)  # a GPU that was never throttled, or a task that did not use the disk, needs no chart
    ]
    return {**workflow_key(record), "series": series}


def _stacks(client: Client, record: WorkflowRecord) -> dict[str, object]:
    from distflow.client.running_tasks import read_stacks

    stacks = read_stacks(client, record)
    return {**stacks_json(record.id, stacks), "text": stacks_text(record.id, stacks, Paint(enabled=False))}


def _outputs(client: Client, record: WorkflowRecord) -> dict[str, object]:
    from distflow.client.outputs import list_output_files

    return outputs_json(record, list_output_files(client, record))


STORED_PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "status": lambda client, record: query_document(client, record, verbose=True),
        "events": lambda client, record: events_document(record, read_events(client, record)),
        "why": why_document,
        "diagnose": diagnose_document,
        "samples": _samples,
        "spec": _spec,
    }
)
"""The documents about a workflow from the store, by the last part of their URLs."""

LIVE_PARTS: Mapping[str, Part] = MappingProxyType({"stacks": _stacks, "outputs": _outputs})
"""The documents about a workflow that need connections to its nodes."""


def error_document(error: DistflowError) -> dict[str, object]:
    """Return an error as ``--format-type json`` prints it, but without ``problems``."""
    return {"error": {"message": error.message, "hint": error.hint, "code": error.exit_code}}
