"""Findings about connections between nodes, and the summary of a check. Pure.

There are n·(n-1) connections between n nodes. A machine that is cut off fails in 2·(n-1) of them and is reported once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from distflow.backends.machines.checks.allreduce import AllReduce, judge_all_reduce
from distflow.backends.machines.checks.finding import Finding, Grade, few
from distflow.backends.machines.checks.findings import folded, judge_node, judge_nodes
from distflow.backends.machines.checks.measured import Measured, Pair

__all__ = ["Verdict", "judge_pairs", "verdict"]

_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "refused": "connection refused",
        "timeout": "no answer",
        "no_route": "no route to host",
        "no_name": "the address is a name that means nothing there",
        "stranger": "another machine or program answers",
    }
)
_PORTS = "training uses ports that the system chooses: all TCP ports above 1023 must be open between the nodes"
_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "refused": "does a firewall there reject it, or is this another machine's address?\n"
        f"{_PORTS}; or set the node's `address`",
        "timeout": f"a firewall drops it, or the networks are not connected\n{_PORTS}; or set the node's `address`",
        "no_route": "are both in one network, or does a firewall there reject it?\n"
        f"{_PORTS}; or set the node's `address` to one that the others reach",
        "no_name": "set the node's `address` to a number, such as 10.0.0.2",
        "stranger": "set the node's `address` to one that is its own",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a check."""

    can_run: bool
    """Whether a gang can run on all of these nodes."""
    text: str
    """Summary in one sentence."""
    findings: tuple[Finding, ...]
    """Errors first."""


def verdict(nodes: Sequence[Measured], pairs: Sequence[Pair], summed: AllReduce | None = None) -> Verdict:
    """Return all findings about nodes, pairs and their all-reduce, and the summary."""
    alone = [finding for measured in nodes for finding in judge_node(measured)]
    together = list(judge_all_reduce(summed)) if summed is not None else []
    alike = list(judge_nodes(nodes))
    findings = folded([*alone, *judge_pairs(nodes, pairs), *together, *alike])
    errors = [finding for finding in findings if finding.grade is Grade.ERROR]
    count = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
    if not errors:
        return Verdict(can_run=True, text=f"{count} can run a gang", findings=findings)
    bad = list(dict.fromkeys(name for finding in alone if finding.grade is Grade.ERROR for name in finding.nodes))
    why = [f"{few(bad)} cannot take part"] if bad else []
    cut = list(dict.fromkeys(name for pair in pairs if pair.kind != "ok" for name in (pair.source, pair.target)))
    if cut:
        why.append(f"{few(cut)} do not all reach each other")
    why += [f"{few(finding.nodes)} count once" for finding in alike if finding.grade is Grade.ERROR]
    if any(finding.grade is Grade.ERROR for finding in together):
        why.append("an all-reduce between them failed")
    all_of_them = "both nodes" if len(nodes) == 2 else f"all {count}"
    what = f"a gang cannot run on {all_of_them}" if len(nodes) > 1 else "nothing can run on this node"
    return Verdict(can_run=False, text=f"{what}: {', and '.join(why)}", findings=findings)


def judge_pairs(nodes: Sequence[Measured], pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Yield one error for each kind of failed connection between nodes."""
    addresses = {one.node.name: one.address for one in nodes}
    asked = [one.node.name for one in nodes if one.error is None]
    failed = [pair for pair in pairs if pair.kind != "ok"]
    twins = [pair for pair in failed if addresses.get(pair.source) == pair.address]
    yield from _twins(twins)
    failed = [pair for pair in failed if pair not in twins]
    for source, kind in dict.fromkeys((pair.source, pair.kind) for pair in failed):
        mine = [pair for pair in failed if (pair.source, pair.kind) == (source, kind)]
        if len(mine) > 1 and len(mine) == len(asked) - 1:
            failed = [pair for pair in failed if pair not in mine]
            yield _finding((source,), "it reaches none of the other nodes", mine[0])
    for target, kind in dict.fromkeys((pair.target, pair.kind) for pair in failed):
        same = [pair for pair in failed if (pair.target, pair.kind) == (target, kind)]
        sources = [pair.source for pair in same]
        if len(same) > 1 and len(same) == len(asked) - 1:
            yield _finding((target,), f"no other node reaches it at {same[0].address}", same[0])
        else:
            yield _finding((target,), f"{few(sources)} cannot reach it at {same[0].address}", same[0])


def _twins(pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Yield an error for nodes that have the same address but are different machines."""
    groups: dict[str, list[str]] = {}
    for pair in pairs:
        groups.setdefault(pair.address, []).extend((pair.source, pair.target))
    for address, names in groups.items():
        hint = "set `address` of each to its own one on the training network"
        if address.startswith("127.") or address == "::1":
            hint = f"{address} is every machine's own: {hint}"
        nodes = tuple(dict.fromkeys(names))
        message = f"they have the same training address {address}"
        yield Finding(grade=Grade.ERROR, about="reach", nodes=nodes, message=message, hint=hint)


def _finding(nodes: tuple[str, ...], message: str, pair: Pair) -> Finding:
    words = _WORDS.get(pair.kind) or pair.message or pair.kind
    if pair.kind == "timeout" and pair.message:
        words = pair.message
    hint = _HINTS.get(pair.kind, _PORTS)
    return Finding(grade=Grade.ERROR, about="reach", nodes=nodes, message=f"{message}: {words}", hint=hint)
