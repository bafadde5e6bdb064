"""Check worlds whose tasks state offset, size and world_size in flags or in ``ranks``, and find the wrong number."""

from __future__ import annotations

from collections.abc import Sequence

from distflow.documents.problems import Problem
from distflow.layout.checks.arithmetic import (
    Edit,
    RankSegment,
    Row,
    filled,
    fits,
    gaps_of,
    overlaps_of,
    segments,
    single_edits,
    tiles,
)
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
from distflow.layout.claims.task_claims import RANK_KEYS, Claim, Known
from distflow.layout.drawing import draw, rank_text
from distflow.layout.ranks import TaskRanks, WorldLayout
from distflow.structs import replace

__all__ = ["contradictions", "spans_world", "undefined_size"]


def spans_world(
    members: Sequence[WorldMember], *, style: str, regroup_hint: str = ""
) -> tuple[WorldLayout | None, list[Problem]]:
    """Return the world of ``members`` (the lead first) if their ranks form one, and all problems with their ranks.

    ``regroup_hint`` is a hint for a group of one task that claims only a part of a world.
    """
    problems = _out_of_bounds(members) or _same_for_replicas(members) or _missing(members)
    if problems:
        return None, problems
    sizes = _sizes(members)
    rows = [_row(member, size) for member, size in zip(members, sizes, strict=True) if size is not None]
    if len(rows) < len(members):
        return None, _unknown(members, sizes, None)
    if not fits(rows):
        return None, _Mistake(members, rows, regroup_hint).problems()
    total = sum(row.size for row in rows)
    placed = sorted(zip(filled(rows), members, strict=True), key=lambda item: item[0])
    tasks = tuple(
        TaskRanks(task=member.name, offset=start, size=stop - start, node_rank=index)
        for index, ((start, stop), member) in enumerate(placed)
    )
    world = WorldLayout(world_size=total, tasks=tasks, style=style)
    return world, [*contradictions(members, world), *_unknown(members, sizes, world)]


def contradictions(members: Sequence[WorldMember], world: WorldLayout) -> list[Problem]:
    """Return a problem for each number that differs from the world, in tasks with both a ``ranks`` field and other claims."""
    problems = []
    for member in members:
        if member.claims.field is None or member.invocation is None:
            continue
        ranks = world.of(member.name)
        right = {"offset": ranks.offset, "size": ranks.size, "world_size": world.world_size}
        right |= {"nproc_per_node": ranks.size, "nnodes": len(world.tasks), "node_rank": ranks.node_rank}
        for claim in [*member.flags.values(), *member.claims.field.values()]:
            if claim.number is not None and claim.key in right and claim.number != right[claim.key]:
                message = f"{member.name}: {claim.text} contradicts the task's ranks, which are {ranks.text}"
                message += f" of {world.world_size} (node rank {ranks.node_rank})"
                hint = change(claim, right[claim.key])
                if claim in member.flags.values():
                    hint += ", or let distflow compute it: " + claim.written(token_for(claim.key))
                problems.append(Problem(where=claim.where, message=message, hint=hint))
    return problems


def _out_of_bounds(members: Sequence[WorldMember]) -> list[Problem]:
    """Return the problems of impossible values. The hint contains the right value if it follows from the other values."""
    wrong = wrong_literals(members, {"offset": 0, "size": 1, "world_size": 1})
    problems = [problem for _, problem in wrong]
    sizes = [member.number("size") for member in members]
    rows = [_row(member, size) for member, size in zip(members, sizes, strict=True) if size is not None]
    if len(wrong) != 1 or len(rows) < len(members):
        return problems
    for edit in single_edits(rows):
        claim = members[edit.index].literal(edit.key)
        if claim == wrong[0][0]:
            return [replace(problems[0], hint=change(claim, edit.value))]
    return problems


def _row(member: WorldMember, size: int) -> Row:
    return Row(
        offset=member.number("offset"),
        size=size,
        world_size=member.number("world_size"),
        max_size=member.claims.gpus or None,
        editable=frozenset(key for key in RANK_KEYS if member.literal(key)),
    )


def _same_for_replicas(members: Sequence[WorldMember]) -> list[Problem]:
    """Return a problem for each line of the spec that states one offset for several replicas."""
    lines: dict[tuple[object, str], list[WorldMember]] = {}
    for member in members:
        claim = member.literal("offset")
        if claim is not None and member.claims.task.replica is not None:
            lines.setdefault((claim.where, claim.text), []).append(member)
    problems = []
    for same in lines.values():
        claim = same[0].literal("offset")
        if claim is not None and len(same) > 1:
            names = and_list(member.name for member in same)
            in_field = "offset" in (same[0].claims.field or {})
            hint = "remove `offset`: distflow then computes it"
            if not in_field:
                size = same[0].number("size") or "N"
                hint = f"write {claim.written('{{rank_offset}}')}, and add {ranks_field(size)} to the task"
            message = f"{claim.text} gives the same ranks to all replicas: {names}"
            problems.append(Problem(where=claim.where, message=message, hint=hint))
    return problems


def _missing(members: Sequence[WorldMember]) -> list[Problem]:
    """Return a problem for each command that lacks a flag or has an undefined size, unless its task has a ``ranks`` field."""
    problems = []
    stated = {number for member in members if (number := member.number("world_size"))}
    sizes = [member.number("size") or member.claims.gpus for member in members]
    total = sum(size for size in sizes if size) if all(sizes) else "W"
    has_example = any(all(key in member.flags for key in RANK_KEYS) for member in members)
    cursor: int | None = 0
    for member in members:
        size = member.number("size") or member.claims.gpus
        offset = member.number("offset")
        if member.claims.field is None and member.invocation is not None and member.invocation.launcher == "flags":
            absent = [key for key in RANK_KEYS if key not in member.flags]
            values = {
                "offset": "M" if cursor is None else cursor,
                "size": size or "N",
                "world_size": max(stated) if stated else total,
            }
            if absent:
                flags = " ".join(f"--{key} {values[key]}" for key in absent)
                message = f"{member.name}: {member.invocation.program} needs flags for {and_list(absent)}"
                message += ", as in the other tasks of this group" if has_example else ""
                problems.append(Problem(where=member.where, message=message, hint=f"add {flags}"))
            elif (claim := member.flags["size"]).known is Known.COMPUTED:
                problems.append(undefined_size(member, claim, f"add {ranks_field(member.claims.gpus or 'N')} to the task"))
        begin = cursor if offset is None else offset
        cursor = None if begin is None or size is None else begin + size
    return problems


def undefined_size(member: WorldMember, claim: Claim, hint: str) -> Problem:
    """Return the problem that a token stands for a number of ranks that the task does not define."""
    message = f"{member.name}: distflow cannot compute {claim.text}, because the task's number of ranks is not defined"
    return Problem(where=claim.where, message=message, hint=hint)


def _sizes(members: Sequence[WorldMember]) -> list[int | None]:
    """Return each task's size, ``None`` if unknown.

    A ``ranks`` field without a size means one rank for each GPU, or one rank without GPUs. If exactly one size is still missing
    and all stated world sizes agree, it is the world size minus the other sizes, or unknown if that is not positive. Otherwise
    each missing size is the number of GPUs.
    """
    sizes: list[int | None] = []
    for member in members:
        size = member.number("size")
        if size is None and member.claims.field is not None:
            size = member.claims.gpus or 1
        sizes.append(size)
    stated = {number for member in members if (number := member.number("world_size"))}
    if sizes.count(None) == 1 and len(stated) == 1:
        left = stated.pop() - sum(size for size in sizes if size is not None)
        return [left if size is None and left > 0 else size for size in sizes]
    return [member.claims.gpus or None if size is None else size for member, size in zip(members, sizes, strict=True)]


def _unknown(members: Sequence[WorldMember], sizes: Sequence[int | None], world: WorldLayout | None) -> list[Problem]:
    problems = []
    for member, size in zip(members, sizes, strict=True):
        for claim in member.flags.values():
            if claim.key in RANK_KEYS and claim.known is Known.RUNTIME:
                assumed = size if claim.key == "size" else None
                if world is not None:
                    ranks = world.of(member.name)
                    right = {"offset": ranks.offset, "size": ranks.size, "world_size": world.world_size}
                    assumed = right[claim.key]
                problems.append(unknown_warning(member, claim, assumed))
    return problems


class _Mistake:
    """A layout whose ranks do not add up, and the problems to report about it."""

    def __init__(self, members: Sequence[WorldMember], rows: Sequence[Row], regroup_hint: str) -> None:
        self.members, self.rows, self.regroup_hint = members, rows, regroup_hint
        self.intervals = filled(rows)
        self.total = sum(row.size for row in rows)
        stated = {row.world_size for row in rows} - {None}
        self.agreed = stated.pop() if len(stated) == 1 else None
        self.parts = segments(rows, self.agreed)
        self.gaps, self.overlaps = gaps_of(self.parts), overlaps_of(self.parts)

    def problems(self) -> list[Problem]:
        """Return one problem for the mistake; for wrong world sizes, one for each line to change."""
        edits = single_edits(self.rows)
        if self.regroup_hint and len(self.members) == 1 and self.gaps:
            ranks = rank_text(*self.intervals[0])
            whole = f" of a world of {self.agreed}" if self.agreed is not None else ""
            symptoms = f"holds ranks {ranks}{whole}, but it is the only task of its group"
            return [self._problem(0, "offset", symptoms, [self.regroup_hint], sign=" ")]
        if edits and edits[0].key == "world_size" and len(self.members) > 1:
            return self._world_sizes()
        absent = self._absent()
        if absent is not None:
            return [self._task_absent(absent, edits)]
        if tiles(self.rows) and not edits:
            return self._world_sizes()
        return [self._one_number(edits)] if edits else [self._several_numbers()]

    # -- kinds of mistakes --------------------------------------------------------------------------------------------

    def _world_sizes(self) -> list[Problem]:
        """Return the problems of a layout in which every rank is held once, but some lines state another world size."""
        claims = [(index, self.members[index].literal("world_size")) for index in range(len(self.members))]
        wrong = [(index, claim) for index, claim in claims if claim is not None and claim.number != self.total]
        lines = list(dict.fromkeys(place(claim.where) for _, claim in wrong))
        problems: list[Problem] = []
        for index, claim in wrong:
            if any(problem.where == claim.where for problem in problems):
                continue  # replicas share a line
            others = [line for line in lines if line != place(claim.where)]
            also = f" (also in {and_list(others, 8)})" if others else ""
            holders = and_list(member.name for member in self.members)
            message = (
                f"{self.members[index].name} has world_size {claim.number}, but the tasks of this group "
                f"({holders}) hold {self.total} ranks"
            )
            drawing = "" if problems else self._drawing([at for at, _ in wrong])
            hint = change(claim, self.total) + also
            problems.append(Problem(where=claim.where, message=message, hint=hint, drawing=drawing))
        return problems

    def _absent(self) -> RankSegment | None:
        """Return the ranks of a task that seems to be missing, if one gap is the only mistake."""
        if self.agreed is None or self.overlaps or len(self.gaps) != 1:
            return None
        beyond = any(stop > self.agreed or start < 0 for start, stop in self.intervals)
        return None if beyond else self.gaps[0]

    def _task_absent(self, gap: RankSegment, edits: list[Edit]) -> Problem:
        size = gap.stop - gap.start
        add = f"add a task with {self._flags(gap.start, size, self.agreed)}"
        if self.members[0].invocation is None:
            add = f"add a task with ranks: {{offset: {gap.start}, size: {size}}}"
        edits = [edit for edit in edits if edit.key != "world_size"]
        before = [index for index, (_, stop) in enumerate(self.intervals) if stop == gap.start]
        after = [index for index, (start, _) in enumerate(self.intervals) if start == gap.stop]
        at = before[0] if before else after[0] if after else 0
        key = "size" if before else "offset"
        whole = size in {row.size for row in self.rows}
        if edits and not whole:
            at, key = edits[0].index, edits[0].key
        remedies = [self._remedy(edit, here=(edit.index, edit.key) == (at, key)) for edit in edits]
        remedies = [add, *remedies] if whole else [*remedies, add]
        if not after:
            claims = [claim for member in self.members if (claim := member.literal("world_size"))]
            lines = and_list((place(claim.where) for claim in claims), 8)
            if claims:
                remedies.append(f"write {claims[0].written(self.total)} in each of these lines: {lines}")
        return self._problem(at, key, self._symptoms(), remedies)

    def _one_number(self, edits: list[Edit]) -> Problem:
        best, *others = edits
        remedies = [self._remedy(best, here=True), *(self._remedy(edit) for edit in others)]
        if tiles(self.rows):
            claims = [claim for member in self.members if (claim := member.literal("world_size"))]
            lines = and_list((place(claim.where) for claim in claims), 8)
            if claims and len(self.members) > 1:
                remedies.append(f"write {claims[0].written(self.total)} in each of these lines: {lines}")
        return self._problem(best.index, best.key, self._symptoms(), remedies)

    def _several_numbers(self) -> Problem:
        """Return the problem of a layout with several wrong numbers. Its hint gives the tasks consecutive ranks."""
        # A task without an offset follows the task before it. A change of that task's offset moves both, so they stay together.
        heads: list[int] = []
        for at, row in enumerate(self.rows):
            heads.append(heads[-1] if heads and row.offset is None else at)
        order = sorted(range(len(self.rows)), key=lambda index: (self.intervals[heads[index]][0], index))
        changes: list[tuple[int, str, str]] = []
        cursor = 0
        for index in order:
            member = self.members[index]
            right = {"offset": cursor, "size": self.rows[index].size, "world_size": self.total}
            wrong = [claim for key in RANK_KEYS if (claim := member.literal(key)) is not None and claim.number != right[key]]
            changes += [
                (index, claim.key, f"{place(claim.where)} {member.name}: {change(claim, right[claim.key])}") for claim in wrong
            ]
            cursor += self.rows[index].size
        first = min(changes, key=lambda item: item[1] == "world_size")
        marked = [index for index, _, _ in changes]
        lines = [text for _, _, text in changes[:12]]
        if len(changes) > 12:
            lines.append(f"and {len(changes) - 12} more")
        hint = "to give the tasks consecutive ranks:\n" + "\n".join(lines)
        return self._problem(first[0], first[1], self._symptoms(), [hint], marked)

    # -- texts --------------------------------------------------------------------------------------------------------

    def _problem(
        self,
        index: int,
        key: str,
        symptoms: str,
        remedies: list[str],
        marked: list[int] | None = None,
        *,
        sign: str = ": ",
    ) -> Problem:
        member = self.members[index]
        claim = member.literal(key) or member.literal("size") or member.literal("offset")
        return Problem(
            where=claim.where if claim else member.where,
            message=f"{member.name}{sign}{symptoms}",
            hint="\nor ".join(remedies[:4]),
            drawing=self._drawing([index] if marked is None else marked),
        )

    def _remedy(self, edit: Edit, *, here: bool = False) -> str:
        member = self.members[edit.index]
        claim = member.literal(edit.key)
        if claim is None:
            return ""
        return change(claim, edit.value) + ("" if here else f" at {place(claim.where)} ({member.name})")

    def _symptoms(self) -> str:
        """Return the symptoms of the mistake, such as ``ranks 8-15 are claimed by no task``."""
        found = []
        for part in self.overlaps[:2]:
            names = and_list(self.members[index].name for index in part.rows)
            found.append(f"{_ranks(part.start, part.stop)} claimed by {names}")
        found += [f"{_ranks(gap.start, gap.stop)} claimed by no task" for gap in self.gaps[:2]]
        sizes = list(dict.fromkeys(row.world_size for row in self.rows if row.world_size is not None))
        if self.agreed is not None:
            for member, (start, stop) in zip(self.members, self.intervals, strict=True):
                if stop > self.agreed:
                    ranks = _ranks(max(start, self.agreed), stop, f" of {member.name}")
                    found.append(f"{ranks} beyond world_size {self.agreed}")
        elif len(sizes) > 1:
            found.append(f"different values of world_size: {and_list(map(str, sizes))}")
        if self.agreed is not None and self.overlaps and self.total != self.agreed:
            found.append(f"the tasks hold {self.total} ranks in total, but world_size is {self.agreed}")
        return "; ".join(found[:4])

    def _flags(self, offset: int, size: int, world_size: int | None) -> str:
        forms: dict[str, str] = {}
        for member in self.members:
            for key, claim in member.flags.items():
                forms.setdefault(key, claim.form)
        right = {"offset": offset, "size": size, "world_size": world_size}
        return " ".join(forms.get(key, f"--{key} {{}}").format(value) for key, value in right.items())

    def _drawing(self, marked: Sequence[int]) -> str:
        bars = [
            bar(
                member,
                start,
                stop - start,
                marked=index in marked,
                note=f"of {row.world_size}" if row.world_size is not None else "",
            )
            for index, (member, row, (start, stop)) in enumerate(zip(self.members, self.rows, self.intervals, strict=True))
        ]
        return draw(bars, self.agreed)


def _ranks(start: int, stop: int, whose: str = "") -> str:
    return f"rank {start}{whose} is" if stop - start == 1 else f"ranks {rank_text(start, stop)}{whose} are"
