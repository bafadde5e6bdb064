"""Check worlds whose tasks run ``torchrun``: number of nodes, node ranks and processes per node.

Programs that get their rank and the world size (``--rank 1 --world-size 2``) are checked in the same way.

torchrun's static rendezvous numbers the ranks by node rank, and nodes may hold different numbers of processes. A task's offset
is therefore the sum of the sizes of the nodes before it. distflow sets missing flags by variables (``PET_NNODES``,
``PET_NODE_RANK`` …). A missing ``--nproc_per_node`` means torchrun's default of 1, unless the task has a ``ranks`` field.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html and ``torch/distributed/run.py`` of torch 2.13.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice

from distflow.documents.problems import Problem, Severity
from distflow.layout.checks.members import (
    WorldMember,
    and_list,
    bar,
    change,
    place,
    ranks_field,
    token_for,
    unknown_warning,
    wrong_literals,
)
from distflow.layout.checks.spans import contradictions, spans_world, undefined_size
from distflow.layout.claims.task_claims import Claim, Known
from distflow.layout.drawing import draw
from distflow.layout.ranks import TaskRanks, WorldLayout

__all__ = ["is_shared", "torchrun_world"]

_MAX_NAMED = 3
"""A message lists at most this many node ranks, and then the number of the remaining ones."""


def is_shared(members: Sequence[WorldMember]) -> bool:
    """Return whether the tasks form one world: at least one has a ``ranks`` field, or a torchrun flag about other nodes."""
    if any(member.claims.field is not None for member in members):
        return True
    for member in members:
        nnodes = member.flags.get("nnodes")
        if nnodes is not None and _upper(nnodes) != 1:
            return True
        if any(key in member.flags for key in ("node_rank", "master_addr", "rdzv_endpoint")):
            return True
    return False


def torchrun_world(members: Sequence[WorldMember], *, regroup_hint: str = "") -> tuple[WorldLayout | None, list[Problem]]:
    """Return the world of ``members`` (the lead first) if their ranks form one, and all problems with their ranks.

    ``regroup_hint`` is a hint for a group of one task that claims only a part of a world.
    """
    wrong = wrong_literals([_without_words(member) for member in members], {"nnodes": 1, "node_rank": 0, "nproc_per_node": 1})
    problems = [problem for _, problem in wrong] or _same_for_replicas(members)
    if problems:
        return None, problems
    if all(member.claims.field is not None for member in members):
        fields = [WorldMember(claims=member.claims, invocation=None) for member in members]
        world, problems = spans_world(fields, style="ranks")
        return world, [*problems, *(contradictions(members, world) if world else [])]
    sizes, problems = _sizes(members)
    known = [size for size in sizes if size is not None]
    dynamic = _dynamic_rendezvous(members)
    node_ranks = _filled(members, {} if dynamic else _claimed(members))
    layout = _Nodes(members, [size or 1 for size in sizes], node_ranks)
    if not dynamic and not (regroup_hint and len(members) == 1):
        problems += layout.node_rank_problems()
    problems += layout.nnodes_problems(regroup_hint, drawn=any(problem.drawing for problem in problems))
    if any(problem.severity is Severity.ERROR for problem in problems) or len(known) < len(members):
        return None, problems
    world = layout.world()
    return world, [*problems, *contradictions(members, world), *dynamic, *_unknown(members, world)]


def _upper(claim: Claim) -> int | None:
    """Return the largest number of nodes of ``--nnodes``, which may be ``min:max``."""
    ranged = re.fullmatch(r"\d+:(\d+)", claim.value) if claim.known is Known.LITERAL else None
    return int(ranged.group(1)) if ranged else claim.number


def _without_words(member: WorldMember) -> WorldMember:
    """Return the member without its valid claims that are not numbers: ``1:4`` nodes, ``gpu`` processes."""
    if member.invocation is None:
        return member
    words = {"nproc_per_node": r"gpu|auto|cpu|xpu", "nnodes": r"\d+:\d+"}
    claims = {key: claim for key, claim in member.flags.items() if not (key in words and re.fullmatch(words[key], claim.value))}
    invocation = member.invocation
    kept = type(invocation)(launcher=invocation.launcher, program=invocation.program, where=invocation.where, claims=claims)
    return WorldMember(claims=member.claims, invocation=kept)


def _same_for_replicas(members: Sequence[WorldMember]) -> list[Problem]:
    lines: dict[tuple[object, str], list[WorldMember]] = {}
    for member in members:
        claim = member.literal("node_rank")
        if claim is not None and member.claims.task.replica is not None:
            lines.setdefault((claim.where, claim.text), []).append(member)
    problems = []
    for same in lines.values():
        claim, invocation = same[0].literal("node_rank"), same[0].invocation
        if claim is not None and len(same) > 1:
            hint, noun = f"write {claim.written(token_for('node_rank'))}", "rank"
            if invocation is not None and invocation.launcher == "torchrun":
                hint, noun = f"{hint}, or remove it: distflow sets PET_NODE_RANK", "node rank"
            message = f"{claim.text} gives the same {noun} to all replicas: {and_list(member.name for member in same)}"
            problems.append(Problem(where=claim.where, message=message, hint=hint))
    return problems


def _sizes(members: Sequence[WorldMember]) -> tuple[list[int | None], list[Problem]]:
    """Return the number of processes of each task, and a problem for each unknown number."""
    sizes: list[int | None] = []
    problems: list[Problem] = []
    for member in members:
        claim = member.flags.get("nproc_per_node")
        field = (member.claims.field or {}).get("size")
        size = field.number if field else None
        if size is None and member.claims.field is not None:
            size = member.claims.gpus or 1
        if size is None and claim is None:
            size = 1
        elif size is None and claim is not None:
            size = claim.number
            if size is None and claim.known is Known.COMPUTED:
                problems.append(undefined_size(member, claim, f"give the task {ranks_field(member.claims.gpus or 'N')}"))
            elif size is None:
                size = member.claims.gpus or None if claim.value in {"gpu", "auto"} else None
                if size is None:
                    problems.append(unknown_warning(member, claim, None))
        sizes.append(size)
    return sizes, problems


def _claimed(members: Sequence[WorldMember]) -> dict[int, int]:
    """Return the stated node ranks, by the member's index."""
    return {index: number for index, m in enumerate(members) if (number := m.number("node_rank")) is not None}


def _filled(members: Sequence[WorldMember], claimed: Mapping[int, int]) -> list[int]:
    """Return every member's node rank. Members without a stated node rank take the lowest free ones, the lead first."""
    free = (rank for rank in range(2 * len(members) + 1) if rank not in set(claimed.values()))
    return [claimed[index] if index in claimed else next(free) for index in range(len(members))]


def _dynamic_rendezvous(members: Sequence[WorldMember]) -> list[Problem]:
    """Return a warning if torchrun's dynamic rendezvous numbers the nodes; nothing for the static rendezvous."""
    for member in members:
        backend = member.flags.get("rdzv_backend")
        if backend is not None and backend.value != "static" and len(members) > 1:
            return [
                Problem(
                    where=backend.where,
                    severity=Severity.WARNING,
                    message=f"{member.name}: {backend.text} numbers the nodes at run time, so any task may get rank 0",
                    hint="for fixed ranks, remove the --rdzv flags, and write --node_rank and --master_addr",
                )
            ]
    return []


def _unknown(members: Sequence[WorldMember], world: WorldLayout) -> list[Problem]:
    problems = []
    for member in members:
        right = {"nnodes": len(world.tasks), "node_rank": world.of(member.name).node_rank}
        right["nproc_per_node"] = world.of(member.name).size
        problems += [
            unknown_warning(member, claim, right[claim.key])
            for claim in member.flags.values()
            if claim.known is Known.RUNTIME and claim.key in right
        ]
    return problems


class _Nodes:
    """The nodes of a torchrun world, as its tasks claim them."""

    def __init__(self, members: Sequence[WorldMember], sizes: Sequence[int], node_ranks: Sequence[int]) -> None:
        self.members, self.sizes, self.node_ranks = members, sizes, node_ranks
        uppers = [_upper(claim) if (claim := member.flags.get("nnodes")) else None for member in members]
        self.nnodes = uppers
        stated = set(uppers) - {None}
        self.agreed = stated.pop() if len(stated) == 1 else None
        self.count = len(members)
        self.uses_torchrun = any(one.invocation is not None and one.invocation.launcher == "torchrun" for one in members)
        self.rank_noun = "node ranks" if self.uses_torchrun else "ranks"
        """The term for the numbers in messages."""

    def world(self) -> WorldLayout:
        """Return the layout. Each node rank must be held by exactly one task."""
        order = sorted(range(self.count), key=lambda index: self.node_ranks[index])
        tasks, offset = [], 0
        for position, index in enumerate(order):
            size = self.sizes[index]
            tasks.append(TaskRanks(task=self.members[index].name, offset=offset, size=size, node_rank=position))
            offset += size
        has_field = any(member.claims.field is not None for member in self.members)
        style = "ranks" if has_field else "torchrun" if self.uses_torchrun else "flags"
        return WorldLayout(world_size=offset, tasks=tuple(tasks), style=style)

    @property
    def absent(self) -> list[int]:
        """The first node ranks that no task holds, if all stated numbers of nodes are equal and nothing else is wrong."""
        held = set(self.node_ranks)
        if self.agreed is None or self.agreed <= self.count or len(held) < self.count or max(held) >= self.agreed:
            return []
        # Not all of them: the number may be huge, for instance a port that was written by mistake.
        return list(islice((rank for rank in range(self.agreed) if rank not in held), _MAX_NAMED))

    def node_rank_problems(self) -> list[Problem]:
        """Return a problem for each node rank that another task holds already, or that is too high."""
        if self.absent or sorted(self.node_ranks) == list(range(self.count)):
            return []
        held: dict[int, int] = {}
        wrong: list[int] = []
        for index, rank in enumerate(self.node_ranks):
            if rank in held or rank >= self.count:
                wrong.append(index)
            else:
                held[rank] = index
        free = [rank for rank in range(self.count) if rank not in held]
        problems: list[Problem] = []
        for index, right in zip(wrong, free, strict=True):
            member, rank = self.members[index], self.node_ranks[index]
            claim = member.literal("node_rank")
            message = f"{member.name}: {claim.text if claim else f'node rank {rank}'} is "
            message += f"also used by {self.members[held[rank]].name}" if rank in held else "too high"
            if self.count == 1:
                message += f"; the only task needs {self.rank_noun[:-1]} 0"
            else:
                message += f"; {self.count} tasks need the {self.rank_noun} 0-{self.count - 1}, and no task has {right}"
            problems.append(
                Problem(
                    where=claim.where if claim else member.where,
                    message=message,
                    hint=change(claim, right) if claim else f"write --node_rank {right}",
                    drawing="" if problems else self._drawing(wrong),
                )
            )
        return problems

    def nnodes_problems(self, regroup_hint: str, *, drawn: bool) -> list[Problem]:
        """Return a problem for each line whose number of nodes differs from the number of tasks.

        If a task is missing, return only one problem.
        """
        claims = [(i, claim) for i, member in enumerate(self.members) if (claim := member.flags.get("nnodes"))]
        wrong = [(i, claim) for i, claim in claims if self.nnodes[i] not in (None, self.count)]
        if not wrong:
            return []
        lines = list(dict.fromkeys(place(claim.where) for _, claim in wrong))
        names = and_list(member.name for member in self.members)
        if regroup_hint and self.count == 1:
            claim = wrong[0][1]
            message = f"{names} has {claim.text}, but it is the only task of its group"
            return [Problem(where=claim.where, message=message, hint=regroup_hint, drawing=self._drawing([]))]
        if self.absent:
            index, claim = wrong[-1]
            rank = self.absent[0]
            more = (self.agreed or 0) - self.count - len(self.absent)
            missing = and_list([*map(str, self.absent), *([f"{more} more"] if more else [])])
            message = f"{self.members[index].name} has {claim.text}, but no task has {self.rank_noun[:-1]} {missing}"
            stated = next((stated for member in self.members if (stated := member.flags.get("node_rank"))), None)
            written = stated.written(rank) if stated is not None else f"--node_rank {rank}"
            hint = f"add a task with {written} {claim.written(self.agreed)}"
            if sorted(self.node_ranks) == list(range(self.count)):
                hint += f"\nor write {claim.written(self.count)} in each of these lines: {and_list(lines, 8)}"
            return [Problem(where=claim.where, message=message, hint=hint, drawing="" if drawn else self._drawing([]))]
        problems: list[Problem] = []
        for index, claim in wrong:
            if any(problem.where == claim.where for problem in problems):
                continue  # replicas share a line
            others = [line for line in lines if line != place(claim.where)]
            sharing = f"{self.count} tasks of this group share the world ({names})"
            sharing = sharing if self.count > 1 else "it is the only task of its world"
            problems.append(
                Problem(
                    where=claim.where,
                    message=f"{self.members[index].name} has {claim.text}, but {sharing}",
                    hint=change(claim, self.count) + (f" (also in {and_list(others, 8)})" if others else ""),
                    drawing="" if problems or drawn else self._drawing([at for at, _ in wrong]),
                )
            )
        return problems

    def _drawing(self, marked: Sequence[int]) -> str:
        sizes = dict(zip(reversed(self.node_ranks), reversed(self.sizes), strict=True))
        largest = max(self.sizes)  # also the size with which node ranks without a task are drawn
        nodes = max([*self.node_ranks, (self.agreed or self.count) - 1]) + 1
        held = sorted(sizes)
        corrections = [0, *accumulate(sizes[rank] - largest for rank in held)]

        def offset(rank: int) -> int:
            return rank * largest + corrections[bisect_left(held, rank)]

        bars = [
            bar(
                member,
                offset(rank),
                self.sizes[index],
                marked=index in marked,
                note=f"node {rank} of {self.nnodes[index] or self.count}",
            )
            for index, (member, rank) in enumerate(zip(self.members, self.node_ranks, strict=True))
        ]
        # The picture is wide enough for node ranks that are too high.
        return draw(bars, offset(nodes))
