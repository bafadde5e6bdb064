"""Format the holders of resources as reported by nodes, for ``resource list --live``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distflow.cli.render.tables import table
from distflow.client.nodes import Holder, Holders, folded
from distflow.client.pools import NodeUsage
from distflow.documents.quantities import bytes_text
from distflow.documents.text import plain

__all__ = ["holders_json", "holders_text"]

Found = Sequence[tuple[NodeUsage, Holders]]


def holders_text(found: Found, ids: Mapping[str, str]) -> str:
    """Return a table of holders, then the errors of nodes. ``ids`` has the id of each workflow in the store, by uuid."""
    rows = [
        (usage.node.name, _what(one), plain(one.user), plain(_task(one, ids)))
        for usage, report in found
        for one in report.holders
    ]
    rows += [(usage.node.name, f"GPU {gpu}", "", plain(words)) for usage, report in found for gpu, words in report.foreign]
    lines = [table(("Node", "Held", "User", "By"), rows)] if rows else ["Nothing is in use on these nodes\n"]
    lines += [f"{usage.node.name}: not asked: {plain(report.error)}\n" for usage, report in found if report.error]
    return "".join(lines)


def holders_json(report: Holders, ids: Mapping[str, str]) -> dict[str, object]:
    """Return the report of one node for its entry in the JSON document."""
    return {
        "holders": [
            {
                "user": one.user, "workflow_id": ids.get(one.attempt.split("/")[0]), "attempt": one.attempt,
                "label": one.label or None, "pid": one.pid,
                "gpus": list(one.gpus), "ports": list(one.ports), "cpu": one.cpus, "memory": one.memory,
            }
            for one in report.holders
        ],
        "foreign": [{"gpu": gpu, "process": words} for gpu, words in report.foreign],
        "error": report.error or None,
    }  # fmt: skip


def _what(one: Holder) -> str:
    found = [f"GPU{'s' * (len(one.gpus) > 1)} {folded(one.gpus)}"] if one.gpus else []
    found += [f"{one.cpus} CPUs"] if one.cpus else []
    found += [bytes_text(one.memory)] if one.memory else []
    found += [f"port{'s' * (len(one.ports) > 1)} {folded(one.ports)}"] if one.ports else []
    return ", ".join(found)


def _task(one: Holder, ids: Mapping[str, str]) -> str:
    """Return the id and task name of a holder if its workflow is in the store, or else the label of its lease."""
    uuid, *rest = one.attempt.split("/")
    return f"{ids[uuid]}/{rest[1]}" if uuid in ids and len(rest) == 3 else one.label or "unknown task"
