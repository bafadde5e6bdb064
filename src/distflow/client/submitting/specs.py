"""Specs, checked: their values, their rank layout, and what they need of this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distflow.client.client import Client
from distflow.client.submitting.previous_outputs import previous_output_problems
from distflow.client.submitting.workflow_secrets import credential_problems
from distflow.documents.problems import Problem, ProblemsFound, Severity, in_document_order
from distflow.layout.checks.group_checks import check_layout
from distflow.layout.drawing import draw_world
from distflow.layout.placement.node_placement import Free, Placement, Unplaced
from distflow.layout.placement.topology import place_near
from distflow.layout.ranks import World
from distflow.plan.compile import compile_plan, demands
from distflow.plan.containers import container_notices
from distflow.plan.model import Plan
from distflow.plan.sharing import sharing_notices
from distflow.pools.choose import choose_pool
from distflow.pools.hostfile import Host
from distflow.pools.model import Configuration, Pool
from distflow.shell import Secret
from distflow.spec.bundles import bundle_files
from distflow.spec.exits import unused_reschedules
from distflow.spec.model import WorkflowSpec
from distflow.spec.parse import load_spec, load_spec_text
from distflow.spec.schema import schema_text

__all__ = [
    "CheckedSpec",
    "Overrides",
    "check_spec",
    "check_stored_spec",
    "propose_placement",
    "schema_text",
    "validate",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What is given for a spec from outside of it."""

    sets: tuple[tuple[str, str], ...] = ()
    """Variables of the template; their values are read as YAML."""
    set_strings: tuple[tuple[str, str], ...] = ()
    """Variables of the template; their values are texts."""
    secrets: Mapping[str, Secret]
    """Variables of every task's environment; their values are kept secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSpec:
    """A spec without errors."""

    spec: WorkflowSpec
    worlds: Mapping[str, World]
    warnings: tuple[Problem, ...]
    template: str
    """The document as it was written."""
    folder: Path
    """What its ``localpath`` entries are relative to."""

    @property
    def pictures(self) -> dict[str, str]:
        """The drawn layout of each group that has one."""
        return {name: draw_world(world) for name, world in self.worlds.items()}


def check_spec(
    client: Client, file: str, overrides: Overrides, *, text: str | None = None, is_tolerant: bool = False
) -> CheckedSpec:
    """Read and check a spec, its rank layout and its credentials. Raises ``ProblemsFound`` with every finding.

    Args:
        client: Whose credentials and workflows the spec may name.
        file: A path, or ``-`` for ``text``.
        overrides: Values for its template.
        text: The document, where ``file`` is ``-``.
        is_tolerant: Whether a machine without any credentials is no error.

    """
    meaning = _Meaning(client, is_tolerant=is_tolerant)
    spec, warnings = load_spec(
        file,
        sets=overrides.sets,
        set_strings=overrides.set_strings,
        environment_names=tuple(overrides.secrets),
        stdin_text=text,
        check=meaning.check,
    )
    template = text if text is not None else Path(file).read_text(encoding="utf-8")
    folder = Path.cwd() if file == "-" else Path(file).absolute().parent
    return CheckedSpec(spec=spec, worlds=meaning.worlds, warnings=warnings, template=template, folder=folder)


def check_stored_spec(client: Client, name: str, text: str, template: str, folder: Path, overrides: Overrides) -> CheckedSpec:
    """Check the rendered spec ``text`` of the workflow ``name``, for what has changed around it. Raises ``ProblemsFound``."""
    names, meaning = tuple(overrides.secrets), _Meaning(client)
    spec, warnings = load_spec_text(text, name, folder, environment_names=names, is_rendered=True, check=meaning.check)
    return CheckedSpec(spec=spec, worlds=meaning.worlds, warnings=warnings, template=template, folder=folder)


def validate(
    client: Client,
    file: str,
    overrides: Overrides,
    configuration: Configuration,
    *,
    pool: str | None = None,
    hosts: Sequence[Host] | None = None,
    text: str | None = None,
) -> tuple[CheckedSpec, list[Problem]]:
    """Check a spec without storing anything, and return it with its warnings. Raises ``ProblemsFound``.

    Args:
        client: Whose credentials and workflows the spec may name; a machine without any is no error.
        file: A path, or ``-`` for ``text``.
        overrides: Values for its template.
        configuration: Its pools.
        pool: The pool to place it in; else the spec's, else the default one.
        hosts: Machines that are a pool of their own.
        text: The document, where ``file`` is ``-``.

    """
    checked = check_spec(client, file, overrides, text=text, is_tolerant=True)
    chosen = choose_pool(configuration, given=pool, wanted=checked.spec.pool, hosts=hosts)
    with tempfile.TemporaryDirectory() as blobs:
        bundles, problems = bundle_files(checked.spec, Path(blobs))
    if problems:
        raise ProblemsFound([*problems, *checked.warnings])
    plan = compile_plan(checked.spec, checked.worlds, pool=chosen.name, bundles=bundles)
    # Whether it fits here is no fault of the spec: it may be meant for other machines.
    placement, misfits = propose_placement(plan, chosen, checked.spec, Severity.WARNING)
    notices = container_notices(checked.spec, chosen.nodes) + sharing_notices(checked.spec, bundles, placement, chosen.nodes)
    return checked, [*in_document_order([*checked.warnings, *notices]), *misfits]


def propose_placement(
    plan: Plan, pool: Pool, spec: WorkflowSpec, severity: Severity = Severity.ERROR
) -> tuple[dict[str, str], tuple[Problem, ...]]:
    """Return where each task would go on an idle pool, and a problem for each group that cannot fit there."""
    free = tuple(Free.whole(node) for node in pool.nodes)
    placement: dict[str, str] = {}
    problems: list[Problem] = []
    for group in plan.groups:
        unplaced: tuple[Unplaced, ...] = ()
        for size in group.sizes:
            placed = place_near(demands(size), free, shared=pool.shares_nodes)
            if isinstance(placed, Placement):
                placement.update(placed.nodes)
                break
            unplaced = placed
        else:
            mark = next(one.mark for one in spec.groups if one.name == group.name)
            problems.append(
                Problem(
                    where=mark,
                    severity=severity,
                    message=f"group {group.name!r} can never run in pool {pool.name!r}",
                    hint="\n".join(f"{one.task}: {reason}" for one in unplaced for reason in one.reasons),
                )
            )
    return placement, tuple(problems)


class _Meaning:
    """What a spec means beyond its own floor: its rank layout, and what depends on it."""

    def __init__(self, client: Client, *, is_tolerant: bool = False) -> None:
        """Know nothing yet."""
        self._client = client
        self._is_tolerant = is_tolerant
        self.worlds: dict[str, World] = {}

    def check(self, spec: WorkflowSpec) -> Sequence[Problem]:
        """Keep the worlds of a spec, and return what is found about them."""
        found, problems = check_layout(spec)
        self.worlds.update(found)
        problems += (
            *unused_reschedules(spec, found),
            *credential_problems(self._client, spec, is_tolerant=self._is_tolerant),
        )
        return [*problems, *previous_output_problems(self._client, spec)]
