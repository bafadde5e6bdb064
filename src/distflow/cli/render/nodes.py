"""Format nodes of pools: their resources, the holders of resources, and the findings of ``distflow pool check``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from distflow.cli.render.tables import Paint, table
from distflow.documents.json_keys import name_keys
from distflow.documents.quantities import bytes_text, count_text
from distflow.documents.text import plain, ranges

if TYPE_CHECKING:
    from distflow.backends.machines.checks.checking import PoolMeasurements
    from distflow.backends.machines.checks.findings import Finding
    from distflow.backends.machines.checks.measured import NodeMeasurements, Pair
    from distflow.backends.machines.checks.network import AllReduce, Verdict
    from distflow.client.nodes import Holder, Holders
    from distflow.client.pools import NodeUsage
    from distflow.pools.model import Pool

__all__ = [
    "USAGE_NOTE",
    "Mode",
    "amount_cells",
    "check_json",
    "check_text",
    "findings_text",
    "holders_json",
    "holders_text",
    "total_of",
]


_HEADER = ("Node", "State", "Address", "Python", "Torch", "Free", "Clock", "GPUs")


def check_text(checked: PoolMeasurements, verdict: Verdict, paint: Paint) -> str:
    """Return the table of nodes, the findings, the result of the all-reduce and the verdict as text."""
    rows = [_row(measured, _state(measured, verdict), paint) for measured in checked.nodes]
    parts = [*([table(_HEADER, rows)] if rows else []), *(_finding_text(finding, paint) for finding in verdict.findings)]
    sentence = verdict.text if verdict.can_run else paint.bad(verdict.text)
    if checked.all_reduce is not None:
        parts.append(_all_reduce_text(checked.all_reduce))
    return "\n".join([*parts, f"{sentence}\n"])


def findings_text(verdict: Verdict, paint: Paint) -> list[str]:
    """Return the errors and warnings of a check, without its notes."""
    return [_finding_text(finding, paint) for finding in verdict.findings if finding.grade.value != "note"]


def check_json(pool: Pool, checked: PoolMeasurements, verdict: Verdict) -> dict[str, Any]:
    """Return the JSON document of ``pool check --format-type json`` (docs/pool-check.md)."""
    return {
        "pool": pool.name,
        "backend": pool.backend,
        "can_run": verdict.can_run,
        "verdict": verdict.text,
        "nodes": [_node_json(measured, _state(measured, verdict)) for measured in checked.nodes],
        "pairs": [_pair_json(pair) for pair in checked.pairs],
        "all_reduce": _all_reduce_json(checked.all_reduce) if checked.all_reduce is not None else None,
        "findings": [
            {
                "grade": finding.grade.value,
                "about": finding.about,
                "nodes": list(finding.nodes),
                "message": finding.message,
                "hint": finding.hint,
            }
            for finding in verdict.findings
        ],
    }


def _all_reduce_text(found: AllReduce) -> str:
    if found.skipped:
        return f"no all-reduce was run: {plain(found.skipped)}"
    if found.failed is not None:
        return f"all-reduce over {len(found.nodes)} nodes: failed"
    times = ", ".join(f"{bytes_text(size)} in {seconds * 1000:.2f} ms" for size, seconds in found.times)
    return f"all-reduce over {len(found.nodes)} nodes (gloo): {times}; bus bandwidth {found.best / 1e6:,.0f} MB/s"


def _all_reduce_json(found: AllReduce) -> dict[str, Any]:
    return {
        "nodes": list(found.nodes),
        "skipped": found.skipped or None,
        "failed": {**name_keys(node=found.failed[0]), "message": found.failed[1]} if found.failed else None,
        "sizes": [
            {"bytes": size, "seconds": seconds, "bus_bandwidth": found.bus_bandwidth(size, seconds)}
            for size, seconds in found.times
        ],
    }


def _state(measured: NodeMeasurements, verdict: Verdict) -> str:
    """Return the worst grade of the findings about a node, or ``ok`` if there are no errors and warnings."""
    grades = {finding.grade.value for finding in verdict.findings if measured.node.name in finding.nodes}
    return next((grade for grade in ("error", "warning") if grade in grades), "ok")


def _finding_text(finding: Finding, paint: Paint) -> str:
    text = "\n".join(plain(line) for line in finding.as_text().splitlines())
    head, colon, rest = text.partition(":")
    return paint.grade(head, finding.grade.value) + colon + rest


def _row(measured: NodeMeasurements, state: str, paint: Paint) -> tuple[str, ...]:
    shown = paint.grade(state, state)
    if measured.error is not None:
        return (measured.node.name, shown, "", "", "", "", "", "")
    torch, clock = measured.torch, measured.clock
    address = f"{measured.address} ({measured.interface})" if measured.interface else measured.address
    free = (measured.probe.get("root") or {}).get("free_bytes")
    return (
        measured.node.name,
        shown,
        plain(address),
        plain((torch and torch.python) or str(measured.facts.get("python_version", ""))),
        plain((torch and torch.version) or ""),
        f"{free / (1 << 30):.0f} GiB" if free is not None else "",
        # Adding 0 changes -0.0 to 0.0.
        f"{round(clock.offset_s, 2) + 0:+.2f} s" if clock is not None else "",
        plain(_gpus_text(measured)),
    )


def _gpus_text(measured: NodeMeasurements) -> str:
    if measured.gpus is None:
        return str(measured.facts.get("gpus") or 0)
    names = [gpu.name for gpu in measured.gpus]
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    memory = next((gpu.memory_mib for gpu in measured.gpus), None)
    size = f", {memory / 1024:.0f} GiB" if memory and len(counts) == 1 else ""
    return " + ".join(f"{count} × {name}" for name, count in counts.items()) + size or "0"


def _node_json(measured: NodeMeasurements, state: str) -> dict[str, Any]:
    node, torch, clock = measured.node, measured.torch, measured.clock
    shown: dict[str, Any] = {"name": node.name, "node_name": node.name, "host": node.host, "state": state}
    if measured.error is not None:
        return {**shown, "error": measured.error.message}
    facts, probe = measured.facts, measured.probe
    indices = {gpu.uuid: gpu.index for gpu in measured.gpus or ()}
    owners = probe.get("gpu_owners") or {}
    return {
        **shown,
        "error": None,
        "address": measured.address,
        "interface": measured.interface or None,
        "hostname": facts.get("hostname"),
        "user": facts.get("user"),
        "cpus": facts.get("cpus"),
        "memory": facts.get("memory"),
        "clock_offset_s": clock.offset_s if clock else None,
        "clock_uncertainty_s": clock.uncertainty_s if clock else None,
        "free_memory": (probe.get("memory") or {}).get("available_bytes"),
        "shm": probe.get("shm"),
        "limits": probe.get("limits"),
        "xids": probe.get("xids") or [],
        "paths": probe.get("paths") or {},
        "root": probe.get("root"),
        "lease_dir": probe.get("leases"),
        "python": {"version": torch.python, "executable": torch.executable} if torch and torch.python else None,
        "torch": {
            "version": torch.version,
            "cuda": torch.cuda,
            "is_available": torch.is_available,
            "devices": torch.devices,
            "nccl": torch.nccl,
        }
        if torch and torch.version
        else None,
        "gpus_configured": node.gpus,
        "gpus": [
            {
                "index": gpu.index,
                "name": gpu.name,
                "driver": gpu.driver,
                "memory_mib": gpu.memory_mib,
                "used_mib": gpu.used_mib,
                "ecc_errors": gpu.ecc_errors,
            }
            for gpu in measured.gpus or ()
        ],
        "gpu_processes": [
            {
                "gpu": indices.get(app.gpu_uuid),
                "pid": app.pid,
                "name": app.name,
                "used_mib": app.used_mib,
                "user": owners.get(str(app.pid), {}).get("user"),
                "attempt": owners.get(str(app.pid), {}).get("attempt"),
            }
            for app in measured.apps
        ],
    }


def _pair_json(pair: Pair) -> dict[str, Any]:
    return {
        "source": pair.source,
        "target": pair.target,
        "address": pair.address,
        "kind": pair.kind,
        "message": pair.message,
        "ms": pair.ms,
    }


USAGE_NOTE = "Usage includes only this user's unfinished workflows in the store. No node was contacted."


class Mode(str, Enum):
    """The amounts to show: used and total, or free."""

    USED = "used"
    FREE = "free"


def total_of(values: Sequence[int | None]) -> int | None:
    """Return the sum, or ``None`` if a value is unknown (``None``)."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def amount_cells(amounts: Sequence[tuple[int, int | None]], mode: Mode) -> tuple[str, ...]:
    """Return the cells for CPUs, memory (GiB) and GPUs. Used amounts are rounded up, and totals are rounded down."""
    found = []
    for (used, total), unit in zip(amounts, (1, 2**30, 1), strict=True):
        if mode is Mode.FREE:
            found.append("-" if total is None else str(max(0, total - used) // unit))
        else:
            found.append(f"{math.ceil(used / unit)}/{'-' if total is None else total // unit}")
    return tuple(found)


def holders_text(found: Sequence[tuple[NodeUsage, Holders]], ids: Mapping[str, str]) -> str:
    """Return a table of holders, then the errors of nodes. ``ids`` has the id of each workflow in the store, by uuid."""
    rows = [
        (usage.node.name, _held_words(one), plain(one.user), plain(_holder_name(one, ids)))
        for usage, report in found
        for one in report.holders
    ]
    rows += [(usage.node.name, f"GPU {gpu}", "", plain(words)) for usage, report in found for gpu, words in report.foreign]
    failed = [(usage.node.name, report.error) for usage, report in found if report.error]
    lines = [table(("Node", "Held", "User", "By"), rows)] if rows else []
    if not rows and (not failed or len(failed) < len(found)):
        lines.append(f"Nothing is in use on {'the nodes that responded' if failed else 'these nodes'}.\n")
    lines += [f"{node}: the query failed: {plain(error)}\n" for node, error in failed]
    return "".join(lines)


def holders_json(report: Holders, ids: Mapping[str, str]) -> dict[str, object]:
    """Return the keys that ``resource list --live`` adds to the entry of a node in its JSON document."""
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


def _held_words(one: Holder) -> str:
    found = [f"GPU{'s' * (len(one.gpus) > 1)} {ranges(one.gpus)}"] if one.gpus else []
    found += [count_text(one.cpus, "CPU")] if one.cpus else []
    found += [bytes_text(one.memory)] if one.memory else []
    found += [f"port{'s' * (len(one.ports) > 1)} {ranges(one.ports)}"] if one.ports else []
    return ", ".join(found)


def _holder_name(one: Holder, ids: Mapping[str, str]) -> str:
    """Return the id and task name of a holder if its workflow is in the store, or else the label of its lease."""
    uuid, *rest = one.attempt.split("/")
    return f"{ids[uuid]}/{rest[1]}" if uuid in ids and len(rest) == 3 else one.label or "unknown task"
