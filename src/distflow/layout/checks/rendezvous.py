"""Where the processes of a world meet: every task must use the master's address, and all tasks one port."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from distflow.documents.problems import Problem, Severity
from distflow.layout.checks.members import Member, and_list, change, place
from distflow.layout.claims.task_claims import Claim, Known

__all__ = ["address_problems", "check_port"]

_HOST = re.compile(r"\{\{\s*host:\s*([^}\s]+)\s*\}\}")
_LOCAL = re.compile(r"localhost(\.localdomain)?|127(\.\d+){0,3}|0\.0\.0\.0|\[?::1?\]?|\$?\(?hostname.*", re.IGNORECASE)
_PORTS = range(1, 65536)


def address_problems(members: Sequence[Member], master: str) -> list[Problem]:
    """Return a problem for each task that uses another address for the master than that of the task ``master``."""
    names = {member.name for member in members}
    problems: list[Problem] = []
    for member in members:
        for claim in _addresses(member):
            remedy = _remedy(claim, f"{{{{host:{master}}}}}")
            named = _HOST.findall(claim.value)
            address = _host_part(claim)
            if named:
                if named[0] != master:
                    message = f"{member.name}: {claim.text} names {named[0]}, but {master} holds rank 0"
                    problems.append(Problem(where=claim.where, message=message, hint=remedy))
            elif member.name == master or claim.known is not Known.LITERAL:
                continue
            elif _LOCAL.fullmatch(address):
                message = f"{member.name}: {claim.text} is {member.name}'s own node, but {master} holds rank 0"
                hint = f"every task must name the master: {remedy}"
                problems.append(Problem(where=claim.where, message=message, hint=hint))
            elif address in names:
                message = f"{member.name}: {claim.text} is the name of a task, not an address"
                problems.append(Problem(where=claim.where, message=message, hint=remedy))
            else:
                message = f"{member.name}: {claim.text} is a fixed address; distflow may place {master} on another node"
                problems.append(
                    Problem(where=claim.where, message=message, hint=remedy, severity=Severity.WARNING),
                )
    return problems


def check_port(members: Sequence[Member]) -> tuple[int | None, list[Problem]]:
    """Return the port that all tasks name (``None`` if they name none), and a problem for each invalid or different one."""
    problems: list[Problem] = []
    valid: list[tuple[Member, Claim, int]] = []
    for member in members:
        for claim in _port_claims(member):
            text = _port_part(claim)
            if claim.known is not Known.LITERAL or text is None or _HOST.search(text) or "$" in text:
                continue
            number = int(text) if re.fullmatch(r"\d{1,9}", text) else 0
            if number in _PORTS:
                valid.append((member, claim, number))
            else:
                message = f"{member.name}: {claim.text}: a port is a number from 1 to 65535"
                problems.append(Problem(where=claim.where, message=message, hint="29500 is torch's usual one"))
    if not valid:
        return None, problems
    counts = Counter(number for _, _, number in valid)
    best, times = counts.most_common(1)[0]
    # The master's port is right, unless most tasks name another one.
    right = best if times > len(valid) / 2 else valid[0][2]
    agreeing = [(member, claim) for member, claim, number in valid if number == right]
    lines = and_list(place(claim.where) for _, claim in agreeing)
    for member, claim, number in valid:
        if number != right:
            who = and_list(dict.fromkeys(other.name for other, _ in agreeing))
            verb = "uses" if len({other.name for other, _ in agreeing}) == 1 else "use"
            message = f"{member.name}: port {number}, but {who} {verb} {right} ({lines}); all tasks meet at one port"
            problems.append(Problem(where=claim.where, message=message, hint=_port_remedy(claim, right)))
    return right, problems


def _addresses(member: Member) -> Iterator[Claim]:
    """Yield the effective address: that of the command's flags, else those of its environment or scripts."""
    flags = [member.flags[key] for key in ("rdzv_endpoint", "master_addr") if key in member.flags]
    if flags:
        yield flags[0]
    elif member.invocation is None or member.invocation.launcher != "torchrun":
        yield from _last(member, "master_addr")


def _port_claims(member: Member) -> Iterator[Claim]:
    endpoint = member.flags.get("rdzv_endpoint")
    if endpoint is not None:
        yield endpoint
    elif "master_port" in member.flags:
        yield member.flags["master_port"]
    elif member.invocation is None or member.invocation.launcher != "torchrun":
        yield from _last(member, "master_port")


def _last(member: Member, key: str) -> Iterator[Claim]:
    yield from (claim for claim in member.claims.settings if claim.key == key)


def _host_part(claim: Claim) -> str:
    text = claim.value.strip()
    if claim.key == "rdzv_endpoint":
        text = re.sub(r":\d+$", "", text)
    return text


def _port_part(claim: Claim) -> str | None:
    if claim.key != "rdzv_endpoint":
        return claim.value.strip()
    found = re.search(r":([^:\]}]+)$", claim.value)
    return found.group(1) if found else None


def _remedy(claim: Claim, address: str) -> str:
    if claim.key == "rdzv_endpoint":
        port = _port_part(claim)
        address += f":{port}" if port else ""
    return f"write {claim.written(address)}"


def _port_remedy(claim: Claim, port: int) -> str:
    if claim.key == "rdzv_endpoint":
        return f"write {claim.written(re.sub(r':[^:}]+$', '', claim.value) + f':{port}')}"
    return change(claim, port)
