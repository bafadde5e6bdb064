"""Check the ranks of every group of a spec, and return a ``WorldLayout`` for each group with ranks, or its problems.

Usually, one mistake causes one problem, at the line to change. The checks run in this order, and an error ends the checks that
depend on it: the values of each task, which tasks have ranks, their ranks, the lead, the address and the port.

These rules follow OSMO's tutorial and torch's launcher:

* Every rank of 0 … world_size-1 is claimed once. torchrun's node ranks are 0 … nnodes-1. Programs that get a rank and
  the world size are checked like torchrun's nodes.
* All tasks that set a world_size set the same value, and so do all tasks that set a port. A master address that is set is that
  of the lead's node.
* A task with GPUs has no more ranks than GPUs.
* The lead holds rank 0. A task without claims is a helper: it starts and stops with the group, and holds no ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from distflow.documents.problems import Problem, Severity, errors_of
from distflow.layout.checks.elastic import smaller_worlds
from distflow.layout.checks.launchers import launcher_problems, restart_problems, uneven_problems
from distflow.layout.checks.members import WorldMember, and_list, change, place, ranks_field
from distflow.layout.checks.spans import spans_world
from distflow.layout.checks.torchrun import is_shared, torchrun_world
from distflow.layout.claims.task_claims import RANK_KEYS, Claim, Invocation, Known, TaskClaims, read_claims
from distflow.layout.ranks import WorldLayout, rank_label
from distflow.layout.strategy.model import group_strategy, unread_strategy
from distflow.spec.model import GroupSpec, WorkflowSpec
from distflow.structs import replace

__all__ = [
    "check_layout",
]


_ABSENT_MODULES = MappingProxyType(
    {
        "jax.distributed.launch": "write `framework: jax` in the group and `command: [python3, train.py]` in its tasks; the "
        "script must call jax.distributed.initialize(num_processes=…, process_id=…)"
    }
)
"""Modules that guides run with ``python -m`` although they do not exist."""


def check_layout(spec: WorkflowSpec) -> tuple[Mapping[str, WorldLayout], tuple[Problem, ...]]:
    """Return the world of each group, by the group's name, and all problems.

    A group without ranks or with errors has no world.
    """
    worlds: dict[str, WorldLayout] = {}
    problems: list[Problem] = []
    has_regroup_hint = False
    for group in spec.groups:
        if len({task.name for task in group.tasks}) < len(group.tasks):
            continue  # the parser has reported the name that is used twice
        regroup_hint = _regroup_hint(spec, group)
        world, found = _check_with_strategy(spec, group, regroup_hint=regroup_hint)
        found += [] if errors_of(found) else [*unread_strategy(group), *restart_problems(group, world)]
        if group.elastic is not None and not errors_of(found):
            smaller, wrong = smaller_worlds(spec, group, world, partial(_check_with_strategy, spec, regroup_hint=regroup_hint))
            world = replace(world, smaller=smaller) if world is not None else None
            found += wrong
        if regroup_hint and any(problem.hint == regroup_hint for problem in found):
            if has_regroup_hint:
                continue  # it is the same mistake: the first problem names the tasks of all groups
            has_regroup_hint = True
        problems += found
        if world is not None and not errors_of(found):
            worlds[group.name] = world
    return MappingProxyType(worlds), tuple(problems)


def _check_with_strategy(
    spec: WorkflowSpec, group: GroupSpec, *, regroup_hint: str
) -> tuple[WorldLayout | None, list[Problem]]:
    world, found = _check_group(spec, group, regroup_hint=regroup_hint)
    return world, found if errors_of(found) else [*found, *group_strategy(group, world)[1]]


def _check_group(spec: WorkflowSpec, group: GroupSpec, *, regroup_hint: str) -> tuple[WorldLayout | None, list[Problem]]:
    claims = [read_claims(task, spec.resources.get(task.resource)) for task in group.tasks]
    started = launcher_problems(group, claims)
    problems = list(errors_of(started)) or [problem for item in claims for problem in _inside_one_task(item)]
    if problems:
        return None, problems
    members = _members(claims)
    problems = _mixed(members)
    if problems:
        return None, problems
    ordered = sorted(members, key=lambda member: not member.claims.task.lead)
    uses_node_ranks = any(member.invocation and member.invocation.launcher in ("torchrun", "rank") for member in members)
    if uses_node_ranks and len(group.tasks) > 1 and not is_shared(ordered):
        return None, [*_separate_worlds(ordered), *_tokens(claims, None)]
    if not ordered:
        return None, _tokens(claims, None)
    if uses_node_ranks:
        world, problems = torchrun_world(ordered, regroup_hint=regroup_hint)
    else:
        style = "ranks" if any(member.claims.field is not None for member in ordered) else "flags"
        world, problems = spans_world(ordered, style=style, regroup_hint=regroup_hint)
    problems += _gpus(spec, ordered, problems)
    lead = next((task.name for task in group.tasks if task.lead), ordered[0].name)
    wrong_lead = _lead(world, ordered, lead) if world is not None else []
    problems += wrong_lead
    if not wrong_lead and any(member.name == lead for member in ordered):
        problems += _address_problems(ordered, lead)
    port, port_problems = _check_port(ordered)
    problems += port_problems
    if world is not None and not errors_of(problems):
        problems += [*_tokens(claims, world), *uneven_problems(group, world)]
        world = replace(world, port=port)
    return world, [*started, *problems]


# -- members ----------------------------------------------------------------------------------------------------------


def _members(claims: Sequence[TaskClaims]) -> list[WorldMember]:
    """Return the tasks that share the world: those with claims, and those that run the same program with too few flags."""
    alone = len(claims) == 1
    counted = {item.name: next(iter(_commands(item, alone=alone)), None) for item in claims}
    stating = [item for item in claims if item.stated_rank is not None]
    if len(stating) > 1 or any(item.field is not None for item in stating):
        counted |= {item.name: item.stated_rank for item in stating}
    programs = {command.program for command in counted.values() if command and command.launcher == "flags"}
    incomplete = Counter(
        program
        for item in claims
        for program in {other.program for other in item.others if {"offset", "size"} <= other.claims.keys()}
    )
    programs |= {program for program, times in incomplete.items() if times > 1}
    members = []
    for item in claims:
        command = counted[item.name] or next((other for other in item.others if other.program in programs), None)
        if command is not None or item.field is not None:
            members.append(WorldMember(claims=item, invocation=command))
    return members


def _commands(item: TaskClaims, *, alone: bool = False) -> list[Invocation]:
    """Return the commands that start ranks of the group's world.

    ``torchrun --standalone`` starts a separate world, so it counts only if the task is ``alone`` in its group.
    """
    return [command for command in item.invocations if alone or not command.standalone]


def _inside_one_task(item: TaskClaims) -> list[Problem]:
    """Return the problems of one task: modules that do not exist, and commands or settings that contradict each other."""
    problems = [
        Problem(where=item.modules[module], message=f"{item.name}: JAX has no module `{module}`", hint=hint)
        for module, hint in _ABSENT_MODULES.items()
        if module in item.modules
    ]
    commands = _commands(item)
    first = commands[0] if commands else None
    for other in commands[1:]:
        if first is not None and (difference := _difference(first, other)):
            before, after = difference
            problems.append(
                Problem(
                    where=after.where,
                    message=f"{item.name}: two commands contradict each other: {before.text} at {place(before.where)}, but "
                    f"{after.text} at {place(after.where)}",
                    hint="write the same value in both, or write two tasks, because a task cannot change its ranks",
                )
            )
            break
    for key, name in (("master_addr", "MASTER_ADDR"), ("master_port", "MASTER_PORT")):
        settings = [claim for claim in item.settings if claim.key == key]
        differing = [claim for claim in settings if claim.value != settings[0].value]
        if differing:
            before, after = settings[0], differing[0]
            message = f"{item.name}: {name} is set twice: {before.text} at {place(before.where)}, but "
            message += f"{after.text} at {place(after.where)}"
            problems.append(Problem(where=after.where, message=message, hint="keep one of the two lines"))
    return problems


def _difference(first: Invocation, other: Invocation) -> tuple[Claim, Claim] | None:
    for key in (*RANK_KEYS, "nnodes", "node_rank", "nproc_per_node"):
        one, two = first.claims.get(key), other.claims.get(key)
        if one is not None and two is not None and one.value != two.value:
            return one, two
    return None


def _mixed(members: Sequence[WorldMember]) -> list[Problem]:
    """Return a problem if the tasks start their ranks in different ways, such as flags and torchrun."""
    launchers: dict[str, WorldMember] = {}
    places: dict[str, Invocation] = {}
    for member in members:
        stated = member.invocation if member.invocation and member.invocation.launcher == "rank" else None
        for command in [stated] if stated else _commands(member.claims):
            launchers.setdefault(command.launcher, member)
            places.setdefault(command.launcher, command)
    if len(launchers) < 2:
        return []
    first, second = sorted(launchers)[:2]
    words = {
        "flags": "states ranks by flags such as --world_size",
        "torchrun": "runs torchrun",
        "rank": "sets a rank and a world size",
    }
    both = [f"{launchers[one].name} {words[one]} at {place(places[one].where)}" for one in (first, second)]
    later = max(places[first], places[second], key=lambda command: command.where)
    message = f"the tasks start their ranks in different ways: {both[0]}, but {both[1]}"
    return [Problem(where=later.where, message=message, hint="start the ranks of all tasks of a group in the same way")]


def _separate_worlds(members: Sequence[WorldMember]) -> list[Problem]:
    """Return a warning if several tasks run torchrun without any flag that connects them."""
    if len(members) < 2:
        return []
    size = next((number for member in members if (number := member.number("nproc_per_node"))), "N")
    return [
        Problem(
            where=members[0].where,
            severity=Severity.WARNING,
            message=f"{and_list(member.name for member in members)} start separate worlds: no torchrun flag connects them",
            hint=f"for one world, add {ranks_field(size)} to each task; if each task trains alone, add --standalone",
        )
    ]


def _regroup_hint(spec: WorkflowSpec, group: GroupSpec) -> str:
    """Return the hint for tasks that are in several groups by mistake; empty for a group of several tasks or the only group."""
    if len(group.tasks) > 1 or len(spec.groups) < 2:
        return ""
    others = and_list(task.name for other in spec.groups if other is not group for task in other.tasks)
    return f"tasks share a world only within a group: put {group.tasks[0].name} and {others} under one `groups:` entry"


# -- rules over a whole world -----------------------------------------------------------------------------------------


def _gpus(spec: WorkflowSpec, members: Sequence[WorldMember], known_problems: Sequence[Problem]) -> list[Problem]:
    """Return problems of tasks with more ranks than GPUs, one for all tasks with the same resource and number of ranks.

    Numbers that a problem in ``known_problems`` already corrects are left out.
    """
    over: dict[tuple[str, int], list[tuple[WorldMember, Claim]]] = {}
    for member in members:
        claim = member.literal("size") or member.literal("nproc_per_node")
        gpus = member.claims.gpus
        if claim is None or claim.number is None or not gpus or claim.number <= gpus:
            continue
        if not any(problem.where == claim.where and claim.text in problem.hint for problem in known_problems):
            over.setdefault((member.claims.task.resource, claim.number), []).append((member, claim))
    problems: list[Problem] = []
    for (name, size), found in over.items():
        claim, gpus = found[0][1], found[0][0].claims.gpus or 0
        mark = spec.resources[name].mark
        where = f" at {place(mark)}" if mark.line else ""
        lines = list(dict.fromkeys(place(other.where) for _, other in found))
        in_lines = f" in {and_list(lines, 8)}" if len(lines) > 1 else ""
        each = " each" if len(found) > 1 else ""
        message = f"{and_list(member.name for member, _ in found)}: {claim.text} starts {size} ranks{each}, but the resource "
        message += f"`{name}` requests {gpus} GPU{'s' if gpus > 1 else ''}, and every rank needs one"
        hint = f"write gpu: {size}{where}\nor {change(claim, gpus)}{in_lines}"
        hint += ", and correct the offsets and world sizes" if claim.key == "size" else ""
        problems.append(Problem(where=claim.where, message=message, hint=hint))
    return problems


def _lead(world: WorldLayout, members: Sequence[WorldMember], lead: str) -> list[Problem]:
    """Return a problem if a task other than the lead holds rank 0."""
    if world.master == lead:
        return []
    master = next(member for member in members if member.name == world.master)
    claim = master.literal("offset") or master.literal("node_rank")
    message = f"{world.master} holds rank 0, but the lead must hold it, and the lead is {lead}"
    hint = f"move `lead: true` to {world.master}"
    held = next((item for item in world.tasks if item.task == lead), None)
    first = world.tasks[0]
    if held is None:
        message += ", which holds no ranks"
    elif held.size == first.size or held is world.tasks[1]:
        moved = replace(first, offset=held.offset + held.size - first.size)
        hint += f", or give {lead} {rank_label(replace(held, offset=0).text)} and {first.task} {rank_label(moved.text)}"
    else:
        hint += f", or give {lead} rank 0 and {first.task} later ranks"
    return [Problem(where=claim.where if claim else master.where, message=message, hint=hint)]


def _tokens(claims: Sequence[TaskClaims], world: WorldLayout | None) -> list[Problem]:
    """Return a problem for each task with a rank token that cannot be replaced."""
    problems = []
    inside = {item.task for item in world.tasks} if world is not None else set()
    own = {"rank_offset", "rank_size", "node_rank"}
    for item in claims:
        used = [name for name in item.tokens if world is None or (name in own and item.name not in inside)]
        if used and item.name not in inside:
            what = "no task of its group has ranks" if world is None else "the task holds no ranks"
            size = item.gpus or "N"
            problems.append(
                Problem(
                    where=item.tokens[used[0]],
                    message=f"{item.name}: {{{{{used[0]}}}}} cannot be replaced: {what}",
                    hint=f"add {ranks_field(size)} to the task",
                )
            )
    return problems


# -- rendezvous: the master's address and port ------------------------------------------------------------------------

_HOST = re.compile(r"\{\{\s*host:\s*([^}\s]+)\s*\}\}")
_LOCAL = re.compile(r"localhost(\.localdomain)?|127(\.\d+){0,3}|0\.0\.0\.0|\[?::1?\]?|\$?\(?hostname.*", re.IGNORECASE)
_PORTS = range(1, 65536)


def _address_problems(members: Sequence[WorldMember], master: str) -> list[Problem]:
    """Return a problem for each stated address of the master that is not, or may not be, that of the task ``master``."""
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
                hint = f"use the address of the master: {remedy}"
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


def _check_port(members: Sequence[WorldMember]) -> tuple[int | None, list[Problem]]:
    """Return the world's port (``None`` if no task states a valid port), and a problem for each invalid or different port."""
    problems: list[Problem] = []
    valid: list[tuple[WorldMember, Claim, int]] = []
    for member in members:
        for claim in _port_claims(member):
            text = _port_part(claim)
            if claim.known is not Known.LITERAL or text is None or _HOST.search(text) or "$" in text:
                continue
            number = int(text) if re.fullmatch(r"\d{1,9}", text) else 0
            if number in _PORTS:
                valid.append((member, claim, number))
            else:
                message = f"{member.name}: {claim.text}: the port must be a number from 1 to 65535"
                problems.append(
                    Problem(where=claim.where, message=message, hint="write a valid port, such as torch's default, 29500")
                )
    if not valid:
        return None, problems
    counts = Counter(number for _, _, number in valid)
    best, times = counts.most_common(1)[0]
    # The first port (the lead's, if it has one) is right, unless most of the lines state another one.
    right = best if times > len(valid) / 2 else valid[0][2]
    agreeing = [(member, claim) for member, claim, number in valid if number == right]
    lines = and_list(place(claim.where) for _, claim in agreeing)
    for member, claim, number in valid:
        if number != right:
            who = and_list(dict.fromkeys(other.name for other, _ in agreeing))
            verb = "uses" if len({other.name for other, _ in agreeing}) == 1 else "use"
            message = f"{member.name}: port {number}, but {who} {verb} {right} ({lines}), and all tasks must use the same port"
            problems.append(Problem(where=claim.where, message=message, hint=_port_remedy(claim, right)))
    return right, problems


def _addresses(member: WorldMember) -> Iterator[Claim]:
    """Yield the claims of the master's address that apply: the command's flag, else the settings in environment or scripts.

    torchrun ignores these settings.
    """
    flags = [member.flags[key] for key in ("rdzv_endpoint", "master_addr") if key in member.flags]
    if flags:
        yield flags[0]
    elif member.invocation is None or member.invocation.launcher != "torchrun":
        yield from _settings_of(member, "master_addr")


def _port_claims(member: WorldMember) -> Iterator[Claim]:
    endpoint = member.flags.get("rdzv_endpoint")
    if endpoint is not None:
        yield endpoint
    elif "master_port" in member.flags:
        yield member.flags["master_port"]
    elif member.invocation is None or member.invocation.launcher != "torchrun":
        yield from _settings_of(member, "master_port")


def _settings_of(member: WorldMember, key: str) -> Iterator[Claim]:
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
