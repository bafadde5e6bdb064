"""``WorldMember``, a task of a world with its effective claims, and the parts of messages about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from distflow.documents.problems import Mark, Problem, Severity
from distflow.layout.claims.task_claims import Claim, Invocation, Known, TaskClaims
from distflow.layout.drawing import Bar

__all__ = [
    "WorldMember",
    "and_list",
    "bar",
    "change",
    "place",
    "ranks_field",
    "token_for",
    "unknown_warning",
    "wrong_literals",
]


class WorldMember(Struct, frozen=True, kw_only=True):
    """A task of a world."""

    claims: TaskClaims
    invocation: Invocation | None
    """The command or the variables that claim ranks; ``None`` if only the ``ranks`` field does."""

    @property
    def name(self) -> str:
        """The task's name."""
        return self.claims.task.name

    @property
    def where(self) -> Mark:
        """The line of ``invocation``, else of the ``ranks`` field."""
        if self.invocation is not None:
            return self.invocation.where
        return self.claims.task.ranks.mark if self.claims.task.ranks else self.claims.task.mark

    @property
    def flags(self) -> Mapping[str, Claim]:
        """The claims of its command or its variables."""
        return self.invocation.claims if self.invocation is not None else {}

    def effective(self, key: str) -> Claim | None:
        """Return the effective claim for ``key``: that of the ``ranks`` field, else that of the command."""
        field = self.claims.field or {}
        return field.get(key) or self.flags.get(key)

    def literal(self, key: str) -> Claim | None:
        """Return the effective claim for ``key`` if its value is a number in the spec."""
        claim = self.effective(key)
        return claim if claim is not None and claim.number is not None else None

    def number(self, key: str) -> int | None:
        """Return the number claimed for ``key``; ``None`` if it is not a number in the spec."""
        claim = self.literal(key)
        return claim.number if claim else None


def and_list(names: Iterable[str], most: int = 4) -> str:
    """Return ``a, b and c``, or ``a, b, c and 3 more`` for more than ``most`` names."""
    items = list(dict.fromkeys(names))
    if len(items) > most:
        items = [*items[: most - 1], f"{len(items) - most + 1} more"]
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else ""


def place(mark: Mark) -> str:
    """Return ``file:line``, the file without its directory, for drawings and lists."""
    return str(Mark(mark.file.rpartition("/")[2], mark.line))


def change(claim: Claim, value: object) -> str:
    """Return the remedy: ``write --offset 16 instead of --offset 8``."""
    return f"write {claim.written(value)} instead of {claim.text}"


def bar(member: WorldMember, offset: int, size: int, *, marked: bool = False, note: str = "") -> Bar:
    """Return the member's line of the drawing."""
    claim = member.effective("offset") or member.effective("node_rank") or member.effective("size")
    where = claim.where if claim is not None else member.where
    return Bar(name=member.name, offset=offset, size=size, note=note, place=place(where), marked=marked)


def wrong_literals(members: Sequence[WorldMember], least: Mapping[str, int]) -> list[tuple[Claim, Problem]]:
    """Return the literal claims of keys in ``least`` that are below the minimum or not whole numbers, each with its problem."""
    wrong = []
    for member in members:
        both = [*(member.claims.field or {}).values(), *member.flags.values()]
        for claim in both:
            bound = least.get(claim.key)
            if bound is None or claim.known is not Known.LITERAL:
                continue
            if claim.number is None:
                wrong.append((claim, _no_number(member, claim)))
            elif claim.number < bound:
                message = f"{member.name}: {claim.text}: {claim.key} must be {bound} or more"
                usual = member.claims.gpus or bound if claim.key in {"size", "nproc_per_node"} else bound
                hint = f"write {bound} or more, such as {claim.written(usual)}"
                wrong.append((claim, Problem(where=claim.where, message=message, hint=hint)))
    return wrong


def _no_number(member: WorldMember, claim: Claim) -> Problem:
    hint = f"write a number, such as {claim.written(0 if claim.key in {'offset', 'node_rank'} else 8)}"
    if "$" in claim.value:
        hint += "; no shell replaces the variable, because the command does not run in one (use command: [bash, -c, ...])"
    message = f"{member.name}: {claim.text}: {claim.key} must be a whole number"
    return Problem(where=claim.where, message=message, hint=hint)


def unknown_warning(member: WorldMember, claim: Claim, assumed: int | None) -> Problem:
    """Return the warning for a value that is known only when the task runs."""
    taken = f"; distflow assumes {assumed}" if assumed is not None else ""
    is_undefined = claim.key in {"size", "nproc_per_node"} and member.claims.field is None
    also = f", and add {ranks_field(member.claims.gpus or 'N')} to the task" if is_undefined else ""
    return Problem(
        where=claim.where,
        severity=Severity.WARNING,
        message=f"{member.name}: {claim.text} cannot be checked before the task runs{taken}",
        hint=f"write the number, or let distflow compute it: {claim.written(token_for(claim.key))}{also}",
    )


def token_for(key: str) -> str:
    """Return the token for the value of a key."""
    names = {"offset": "rank_offset", "size": "rank_size", "nproc_per_node": "rank_size", "nnodes": "num_nodes"}
    return "{{" + names.get(key, key) + "}}"


def ranks_field(size: int | str) -> str:
    """Return the ``ranks`` field to add."""
    return f"ranks: {{size: {size}}}"
