"""What was found of a cause: from the lines that show it to one sentence, or ``None`` when they mean another cause. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from distflow.diagnosis.model import Case, Hit
from distflow.documents.quantities import bytes_text, seconds_text

__all__ = [
    "absent", "gpu_memory", "host_memory", "interface", "lost_peer", "master", "mesh", "mismatch", "missing", "nccl_versions",
    "port", "quoted", "timeout", "twice", "unused", "variable", "world_size",
]  # fmt: skip

_CALL = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\((?:SequenceNumber=(?P<number>\d+), )?"
    r"OpType=(?P<op>\w+)(?:, TensorShape=\[(?P<shape>[\d, ]*)\])?(?:, TensorDtypes=(?P<dtype>\w+))?"
)
_SHOWN = 8
"""Names in a list."""


def quoted(case: Case, hits: Sequence[Hit]) -> str:
    """Return who printed it."""
    return f"on {_who(hits)}"


def mismatch(case: Case, hits: Sequence[Hit]) -> str:
    """Return what each rank called."""
    for hit in hits:
        calls = list(_CALL.finditer(hit.line))
        if len(calls) > 1:
            return "; ".join(f"{case.rank_words(int(call['rank']))} called {_call(call)}" for call in calls)
    sizes = next((hit for hit in hits if hit.match.re.groups == 2), None)
    if sizes is not None:
        return f"{sizes.who} was sent {sizes.match[1]} bytes where it expected {sizes.match[2]}"
    return f"on {_who(hits)}"


def world_size(case: Case, hits: Sequence[Hit]) -> str | None:
    """Return both sizes; of torch's timeouts only those that wait for more ranks than the layout has, or for fewer."""
    for hit in hits:
        found = hit.match.groupdict()
        if found.get("one"):
            who = case.rank_words(int(found["rank"])) if found.get("rank") else hit.who
            return f"{who} was told of {found['one']} ranks, another one of {found['other']}"
        # torchrun's own store counts machines.
        counts = (case.world_size, sum(bool(witness.ranks) for witness in case.witnesses))
        if found.get("wanted") and case.world_size and int(found["wanted"]) not in counts:
            return f"{hit.who} waits for {found['wanted']} ranks, but the layout has {case.world_size}"
        if found.get("key") and case.world_size and int(found["key"]) >= case.world_size:
            return f"{hit.who} waits for rank {found['key']}, but the layout ends with rank {case.world_size - 1}"
    return None


def twice(case: Case, hits: Sequence[Hit]) -> str | None:
    """Return the rank and the task that should hold it; of torch's timeouts those of a rank that waits for itself."""
    for hit in hits:
        found = hit.match.groupdict()
        if found.get("rank"):
            rank = int(found["rank"])
            return f"rank {rank}, as seen by {_who(hits)}; by the layout it is of {_holder(case, rank)}"
        if len(hit.witness.ranks) == 1 and hit.witness.ranks.start == int(found["key"]):
            return f"{hit.who} waits for rank {found['key']} itself: it joined under another number"
    return None


def absent(case: Case, hits: Sequence[Hit]) -> str | None:
    """Return the ranks that were waited for, with the tasks that hold them; ranks that wait themselves are there."""
    waiting = {hit.rank for hit in hits if hit.rank is not None}
    named = [int(rank) for hit in hits for rank in re.findall(r"\d+", hit.match.groupdict().get("ranks") or "")]
    keyed = [int(key) for hit in hits if (key := hit.match.groupdict().get("key"))]
    ranks = sorted({*named, *(rank for rank in keyed if rank not in waiting)})
    counted = next((hit for hit in hits if hit.match.groupdict().get("wanted")), None)
    counts = f"{counted.match['there']} of {counted.match['wanted']} came" if counted else ""
    if not ranks:
        there = waiting if counted and len(waiting) == int(counted.match["there"]) else set()
        ranks = [rank for rank in range(case.world_size) if rank not in there] if there else []
    held = ", ".join(case.rank_words(rank) for rank in ranks[:_SHOWN]) + (" and others" if len(ranks) > _SHOWN else "")
    return "; ".join(filter(None, (f"{held} did not come" if held else "", f"{_who(hits)} waited", counts)))


def mesh(case: Case, hits: Sequence[Hit]) -> str:
    """Return the places of the mesh, and the ranks."""
    return f"the mesh has {hits[0].match['mesh']} places, the world {hits[0].match['world']} ranks"


def unused(case: Case, hits: Sequence[Hit]) -> str:
    """Return the numbers or names of the parameters, where torch says them."""
    told = re.compile(r"[Pp]arameter(?:s| indices) which did not receive grad for rank \d+: (.+?)\s*$")
    for line in hits[0].witness.lines:
        match = told.search(line)
        if match:
            kind = "parameters number" if re.fullmatch(r"[\d ]+", match[1]) else "parameters"
            return f"on {_who(hits)}: {kind} {match[1]}"
    return f"on {_who(hits)}"


def gpu_memory(case: Case, hits: Sequence[Hit]) -> str:
    """Return how much was asked for, and how much there was."""
    hit = next((one for one in hits if one.match.groupdict().get("wanted")), hits[0])
    found = hit.match.groupdict()
    if not found.get("wanted"):
        return f"on {_who(hits)}"
    has = f"; GPU {found['gpu']} has {found['total']}, of which {found['free']} were free" if found.get("gpu") else ""
    return f"{hit.who} asked for {found['wanted']}{has}"


def host_memory(case: Case, hits: Sequence[Hit]) -> str:
    """Return how much was asked for."""
    hit = next((one for one in hits if one.match.re.groups), hits[0])
    return f"{hit.who} asked for {bytes_text(int(hit.match[1]))}" if hit.match.re.groups else f"on {_who(hits)}"


def nccl_versions(case: Case, hits: Sequence[Hit]) -> str:
    """Return which rank has which."""
    one, first, other, second = hits[0].match.groups()
    return f"{case.rank_words(int(one))} has {first}, {case.rank_words(int(other))} has {second}"


def interface(case: Case, hits: Sequence[Hit]) -> str | None:
    """Return the interface that is not there, or the address of this machine alone that was announced to another one.

    Among ranks of a single node 127.0.0.1 is right.
    """
    for hit in hits:
        found = hit.match.groupdict()
        if found.get("name"):
            return f"{hit.who} has no address on the interface {found['name']}"
        if not found.get("address"):
            return f"{hit.who} found no interface to use"
    if len({witness.node for witness in case.witnesses if witness.ranks}) < 2:
        return None
    return f"{hits[0].who} was given {hits[0].match['address']} as the address of a rank of another node"


def port(case: Case, hits: Sequence[Hit]) -> str:
    """Return the port, where it is said."""
    number = next((hit.match.groupdict().get("port") for hit in hits if hit.match.groupdict().get("port")), "")
    return f"{hits[0].who} could not listen" + (f" on port {number}" if number else "")


def variable(case: Case, hits: Sequence[Hit]) -> str:
    """Return the variable that is not set."""
    return f"{hits[0].match[1]} is not set in {_who(hits)}"


def missing(case: Case, hits: Sequence[Hit]) -> str:
    """Return what is not there, and where."""
    names = list(dict.fromkeys(hit.match[1] for hit in hits))
    return f"{', '.join(names[:_SHOWN])}: missed by {_who(hits)}"


def master(case: Case, hits: Sequence[Hit]) -> str:
    """Return the address that was tried, and who should have answered."""
    first = hits[0]
    return f"{_who(hits)} did not reach {first.match['host']}, port {first.match['port']}; rank 0 is of {_holder(case, 0)}"


def timeout(case: Case, hits: Sequence[Hit]) -> str:
    """Return who waited, and how long."""
    found = next((hit.match.groupdict() for hit in hits if hit.match.groupdict().get("ms")), {})
    what = found.get("op") or ""
    # gloo names only its half of a transfer.
    what = "" if what in ("", "recv", "send") else f" in {what.lower()}"
    long = f" for {seconds_text(int(found['ms']) / 1000)}" if found.get("ms") else ""
    waiting = {hit.witness.task for hit in hits}
    others = [witness.place for witness in case.witnesses if witness.ranks and witness.task not in waiting]
    rest = f"; {', '.join(others[:_SHOWN])} did not" if others else ""
    return f"{_who(hits)} waited{what}{long}{rest}"


def lost_peer(case: Case, hits: Sequence[Hit]) -> str:
    """Return who lost a peer; who died first is not known here."""
    return f"{_who(hits)} lost a peer; nothing says which rank was first"


def _call(call: re.Match[str]) -> str:
    number = f" as collective {call['number']}" if call["number"] else ""
    shape = f" of shape [{call['shape']}]" if call["shape"] is not None else ""
    dtype = f" {call['dtype']}" if call["dtype"] else ""
    return f"{call['op'].lower()}{shape}{dtype}{number}"


def _holder(case: Case, rank: int) -> str:
    witness = case.holder(rank)
    return witness.place if witness else "no task"


def _who(hits: Iterable[Hit]) -> str:
    names = list(dict.fromkeys(hit.who for hit in hits))
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else "")
