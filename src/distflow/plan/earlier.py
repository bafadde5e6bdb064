"""A plan with what its tasks take from earlier workflows: archives that were fetched before the submission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from distflow.plan.model import Launch, Plan, PlannedFile
from distflow.plan.tokens import input_place

__all__ = ["Brought", "planned_blobs", "with_earlier"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """An archive in the blob store."""

    digest: str
    size: int


def with_earlier(plan: Plan, brought: Mapping[tuple[str, str], Brought]) -> Plan:
    """Return the plan with its inputs from earlier workflows, by workflow and task, as archives to unpack."""

    def complete(launch: Launch) -> Launch:
        files = tuple(
            PlannedFile(
                path=input_place(one.position), shown=f"what {one.task} of {one.workflow} wrote",
                blob=brought[one.workflow, one.task].digest, size=brought[one.workflow, one.task].size, mode=0o700,
                is_tar=True, only=one.regex,
            )
            for one in launch.earlier_inputs
        )  # fmt: skip
        return replace(launch, files=(*launch.files, *files))

    return replace(plan, groups=tuple(group.with_launches(complete) for group in plan.groups))


def planned_blobs(plan: Plan) -> frozenset[str]:
    """Return every blob that a plan sends."""
    return frozenset(file.blob for group in plan.groups for launch in group.launches for file in launch.files if file.blob)
