"""Functions that return the details of a cause as text, from the log lines that show it.

They return ``None`` if the lines have another cause. All functions are pure: they only read their arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from distflow.diagnosis.model import GroupOutcome, Hit
from distflow.documents.quantities import bytes_text, count_text, seconds_text

__all__ = [
    "absent_ranks", "duplicate_rank", "gpu_memory", "host_memory", "interface", "lost_peer", "master", "mesh", "mismatch",
    "missing_names", "nccl_versions", "port", "printed_by", "timeout", "unused", "variable", "world_size",
]  # fmt: skip

_CALL = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\((?:SequenceNumber=(?P<number>\d+), )?"
    r"OpType=(?P<op>\w+)(?:, TensorShape=\[(?P<shape>[\d, ]*)\])?(?:, TensorDtypes=(?P<dtype>\w+))?"
)
_SHOWN = 8
"""The maximum number of names in a list."""


def printed_by(group: GroupOutcome, hits: Sequence[Hit]) -> str:
    """Return the ranks or tasks that printed the lines."""
    return f"on {_who(hits)}"


def mismatch(group: GroupOutcome, hits: Sequence[Hit]) -> str:
    """Return the collectives that ranks called, or the two sizes of a message that did not match.

    If the lines have neither, return the ranks or tasks that printed them.
    """
    for hit in hits:
        calls = list(_CALL.finditer(hit.line))
        if len(calls) > 1:
            return "; ".join(f"{group.rank_label(int(call['rank']))} called {_call(call)}" for call in calls)
    sizes = next((hit for hit in hits if hit.match.re.groups == 2), None)
    if sizes is not None:
        return f"{sizes.who} received {sizes.match[1]} bytes but expected {sizes.match[2]}"
    return f"on {_who(hits)}"


def world_size(group: GroupOutcome, hits: Sequence[Hit]) -> str | None:
    """Return both sizes, or the rank that the layout does not have.

    A timeout of torch counts only if it waits for such a rank, or for a number of processes that is neither the
    number of ranks nor the number of tasks with ranks.
    """
    for hit in hits:
        found = hit.match.groupdict()
        if found.get("one"):
            who = group.rank_label(int(found["rank"])) if found.get("rank") else hit.who
            return f"{who} expects {_ranks(found['one'])}, another rank expects {found['other']}"
        # torchrun's own store counts its agents, one for each task, instead of ranks.
        counts = (group.world_size, sum(bool(outcome.ranks) for outcome in group.outcomes))
        if found.get("wanted") and group.world_size and int(found["wanted"]) not in counts:
            has = f"{count_text(counts[0], 'rank')} in {count_text(counts[1], 'task')}"
            return f"{hit.who} waits for {found['wanted']} processes, but the layout has {has}"
        if found.get("key") and group.world_size and int(found["key"]) >= group.world_size:
            return f"{hit.who} waits for rank {found['key']}, but the layout ends with rank {group.world_size - 1}"
    return None


def duplicate_rank(group: GroupOutcome, hits: Sequence[Hit]) -> str | None:
    """Return the rank and the task that should hold it. A timeout of torch counts only if a rank waits for itself."""
    for hit in hits:
        found = hit.match.groupdict()
        if found.get("rank"):
            rank = int(found["rank"])
            return f"rank {rank}, seen by {_who(hits)}; in the layout it belongs to {_holder(group, rank)}"
        if len(hit.outcome.ranks) == 1 and hit.outcome.ranks.start == int(found["key"]):
            return f"{hit.who} waits for rank {found['key']} itself: it joined under another number"
    return None


def absent_ranks(group: GroupOutcome, hits: Sequence[Hit]) -> str:
    """Return the missing ranks with their tasks, if they are known, the ranks that waited, and how many arrived.

    A rank that is named only by a key in gloo's store is not missing if it printed a timeout itself.
    """
    waiting = {hit.rank for hit in hits if hit.rank is not None}
    named = [int(rank) for hit in hits for rank in re.findall(r"\d+", hit.match.groupdict().get("ranks") or "")]
    keyed = [int(key) for hit in hits if (key := hit.match.groupdict().get("key"))]
    ranks = sorted({*named, *(rank for rank in keyed if rank not in waiting)})
    counted = next((hit for hit in hits if hit.match.groupdict().get("wanted")), None)
    counts = f"{counted.match['there']} of {counted.match['wanted']} arrived" if counted else ""
    if not ranks:
        arrived = waiting if counted and len(waiting) == int(counted.match["there"]) else set()
        ranks = [rank for rank in range(group.world_size) if rank not in arrived] if arrived else []
    # The lines may leave out ranks, so the number of the others is not known.
    held = ", ".join(group.rank_label(rank) for rank in ranks[:_SHOWN]) + (" and others" if len(ranks) > _SHOWN else "")
    return "; ".join(filter(None, (f"{held} did not arrive" if held else "", f"{_who(hits)} waited", counts)))


def mesh(group: GroupOutcome, hits: Sequence[Hit]) -> str:
    """Return the number of places in the mesh and the number of ranks."""
    places = count_text(int(hits[0].match["mesh"]), "place")
    return f"the mesh has {places}, but the world has {_ranks(hits[0].match['world'])}"


def unused(group: GroupOutcome, hits: Sequence[Hit]) -> str:
    """Return the ranks or tasks, and the numbers or names of the parameters, if torch printed them."""
    named = re.compile(r"[Pp]arameter(?:s| indices) which did not receive grad for rank \d+: (.+?)\s*$")
    for line in hits[0].outcome.lines:
        match = named.search(line)
        if match:
            kind = "parameters number" if re.fullmatch(r"[\d ]+", match[1]) else "parameters"
            return f"on {_who(hits)}: {kind} {match[1]}"
    return f"on {_who(hits)}"


def gpu_memory(group: GroupOutcome, hits: Sequence[Hit]) -> str:
    """Return the requested and the available memory, if the lines have them, else the ranks or tasks that printed the lines."""
    hit = next((one for one in hits if one.match.groupdict().get("wanted")), hits[0])
    found = hit.match.groupdict()
    if not found.get("wanted"):
        return f"on {_who(hits)}"
    has = f"; GPU {found['gpu']} has {found['total']}, of which {found['free']} were free" if found.get("gpu") else ""
    return f"{hit.who} tried to allocate {found['wanted']}{has}"


def host_memory(group: GroupOutcome, hits: Sequence[Hit]) -> str:
    """Return the requested memory, if a line has it, else the ranks or tasks that printed the lines."""
    hit = next((one for one in hits if one.match.re.groups), hits[0])
    return f"{hit.who} tried to allocate {bytes_text(int(hit.match[1]))}" if hit.match.re.groups else f"on {_who(hits)}"


def nccl_versions(group: GroupOutcome, hits: Sequence[Hit]) -> str:
    """Return the two ranks that the message names, with their versions."""
    one, first, other, second = hits[0].match.groups()
    return f"{group.rank_label(int(one))} has {first}, {group.rank_label(int(other))} has {second}"


def interface(group: GroupOutcome, hits: Sequence[Hit]) -> str | None:
    """Return the missing interface, a note that none was found, or the loopback address that a rank announced to another node.

    On a single node, such an address is correct, so the result is ``None``.
    """
    for hit in hits:
        found = hit.match.groupdict()
        if found.get("name"):
            return f"{hit.who} has no address on the interface {found['name']}"
        if not found.get("address"):
            return f"{hit.who} found no interface to use"
    if len({outcome.node for outcome in group.outcomes if outcome.ranks}) < 2:
        return None
    return f"{hits[0].who} got {hits[0].match['address']} as the address of a rank on another node"


def port(group: GroupOutcome, hits: Sequence[Hit]) -> str:
    """Return the rank or task that could not listen, and the port, if the lines name it."""
    number = next((hit.match.groupdict().get("port") for hit in hits if hit.match.groupdict().get("port")), "")
    return f"{hits[0].who} could not listen" + (f" on port {number}" if number else "")


def variable(group: GroupOutcome, hits: Sequence[Hit]) -> str:
    """Return the variable that is not set, and the ranks or tasks that need it."""
    return f"{hits[0].match[1]} is not set in {_who(hits)}"


def missing_names(group: GroupOutcome, hits: Sequence[Hit]) -> str:
    """Return the names of the missing modules, files or commands, and the ranks or tasks that need them."""
    names = list(dict.fromkeys(hit.match[1] for hit in hits))
    return f"{_listed(names)}: not found by {_who(hits)}"


def master(group: GroupOutcome, hits: Sequence[Hit]) -> str:
    """Return the address that the ranks tried, and the task that should have answered."""
    first = hits[0]
    return (
        f"{_who(hits)} did not reach {first.match['host']}, port {first.match['port']}; rank 0 belongs to {_holder(group, 0)}"
    )


def timeout(group: GroupOutcome, hits: Sequence[Hit]) -> str:
    """Return the ranks that reported a timeout, how long they waited, and the tasks that reported none."""
    found = next((hit.match.groupdict() for hit in hits if hit.match.groupdict().get("ms")), {})
    what = found.get("op") or ""
    # gloo reports only "send" or "recv", one side of a transfer, and not the name of the collective.
    what = "" if what in ("", "recv", "send") else f" in {what.lower()}"
    long = f" for {seconds_text(int(found['ms']) / 1000)}" if found.get("ms") else ""
    waiting = {hit.outcome.task for hit in hits}
    others = [outcome.place for outcome in group.outcomes if outcome.ranks and outcome.task not in waiting]
    rest = f"; no timeout was reported by {_listed(others)}" if others else ""
    return f"{_who(hits)} waited{what}{long}{rest}"


def lost_peer(group: GroupOutcome, hits: Sequence[Hit]) -> str:
    """Return the ranks that lost a peer. The output does not show which rank failed first."""
    return f"{_who(hits)} lost a peer; the output does not show which rank failed first"


def _call(call: re.Match[str]) -> str:
    number = f" as collective {call['number']}" if call["number"] else ""
    shape = f" of shape [{call['shape']}]" if call["shape"] is not None else ""
    dtype = f" {call['dtype']}" if call["dtype"] else ""
    return f"{call['op'].lower()}{shape}{dtype}{number}"


def _holder(group: GroupOutcome, rank: int) -> str:
    outcome = group.holder(rank)
    return outcome.place if outcome else "no task"


def _ranks(number: str) -> str:
    return count_text(int(number), "rank")


def _who(hits: Iterable[Hit]) -> str:
    return _listed(list(dict.fromkeys(hit.who for hit in hits)))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {count_text(len(names) - _SHOWN, 'other')}" if len(names) > _SHOWN else "")
