"""From a spec on disk to a plan that fits its pool: the way that submit, its dry run and validate share."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distflow.cli.earlier import earlier_problems
from distflow.cli.secrets import credential_problems
from distflow.documents.problems import Problem, ProblemsFound, Severity, in_document_order
from distflow.documents.urls import parse_url
from distflow.errors import InputError
from distflow.layout.checks.group_checks import check_layout
from distflow.layout.drawing import draw_world
from distflow.layout.placement.node_placement import Free, Placement, Unplaced
from distflow.layout.placement.topology import place_near
from distflow.layout.ranks import World
from distflow.plan.compile import compile_plan, demands
from distflow.plan.containers import container_notices
from distflow.plan.model import Plan
from distflow.plan.sharing import sharing_notices
from distflow.pools.model import Pool
from distflow.shell import Secret
from distflow.spec.bundles import bundle_files
from distflow.spec.exits import unused_reschedules
from distflow.spec.labels import MOST_LABELS, check_label
from distflow.spec.model import WorkflowSpec
from distflow.spec.parse import load_spec, load_spec_text
from distflow.state.codec import encode
from distflow.storage.options import NO_DRIVER, package_of

__all__ = [
    "Checked",
    "Overrides",
    "Ready",
    "check",
    "check_again",
    "join_labels",
    "parse_labels",
    "parse_overrides",
    "plan_for",
    "pool_key",
    "propose",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What the command line changes of a spec."""

    sets: tuple[tuple[str, str], ...] = ()
    set_strings: tuple[tuple[str, str], ...] = ()
    secrets: Mapping[str, Secret]
    """From ``--set-env``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A plan that fits its pool."""

    checked: Checked
    plan: Plan
    pool: Pool
    placement: Mapping[str, str]
    """Task → node, as it would be tried first on an idle pool."""


def parse_overrides(sets: Sequence[str], set_strings: Sequence[str], set_env: Sequence[str]) -> Overrides:
    """Return the values of the three flags. Raises ``InputError`` for one without ``=``, never naming a secret's value."""
    secrets: dict[str, Secret] = {}
    for position, item in enumerate(set_env, 1):
        name, equals, value = item.partition("=")
        if not equals and item in os.environ:
            value = os.environ[item]
        elif not equals or not name:
            hint = "NAME alone takes the value from this command's own environment, where there is no variable of that name"
            raise InputError(f"--set-env number {position} is not of the form NAME=VALUE", hint=hint)
        secrets[name] = Secret(value)
    return Overrides(
        sets=tuple(_pair("--set", item) for item in sets),
        set_strings=tuple(_pair("--set-string", item) for item in set_strings),
        secrets=secrets,
    )


def _pair(flag: str, item: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals or not name:
        raise InputError(f"{flag} {item!r} is not of the form NAME=VALUE")
    return name, value


def parse_labels(items: Sequence[str]) -> dict[str, str]:
    """Return what ``--label`` gives. Raises ``InputError``."""
    labels = dict(_pair("--label", item) for item in items)
    for key, value in labels.items():
        try:
            check_label(key, value)
        except ValueError as error:
            raise InputError(f"--label {key}={value}: {error}") from None
    return labels


def join_labels(labels: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of a spec with those of the command line, which win. Raises ``InputError`` when they are too many."""
    joined = {**labels, **given}
    if len(joined) > MOST_LABELS:
        raise InputError(f"a workflow has at most {MOST_LABELS} labels; these are {len(joined)}")
    return joined


def check(file: str, overrides: Overrides, *, is_tolerant: bool = False) -> Checked:
    """Read and check a spec, its rank layout and its credentials. Raises ``ProblemsFound`` with every finding.

    ``is_tolerant``: that this machine has no credentials at all is no error.
    """
    given, meaning = sys.stdin.read() if file == "-" else None, _Meaning(is_tolerant=is_tolerant)
    spec, warnings = load_spec(
        file,
        sets=overrides.sets,
        set_strings=overrides.set_strings,
        environment_names=tuple(overrides.secrets),
        stdin_text=given,
        check=meaning.check,
    )
    template = given if given is not None else Path(file).read_text(encoding="utf-8")
    folder = Path.cwd() if file == "-" else Path(file).absolute().parent
    return Checked(spec=spec, worlds=meaning.worlds, warnings=warnings, template=template, folder=folder)


def check_again(name: str, text: str, template: str, folder: Path, overrides: Overrides) -> Checked:
    """Check the rendered spec ``text`` of the workflow ``name``, for what has changed around it. Raises ``ProblemsFound``."""
    names, meaning = tuple(overrides.secrets), _Meaning()
    spec, warnings = load_spec_text(text, name, folder, environment_names=names, is_rendered=True, check=meaning.check)
    return Checked(spec=spec, worlds=meaning.worlds, warnings=warnings, template=template, folder=folder)


class _Meaning:
    """What a spec means beyond its own floor: its rank layout, and what depends on it."""

    def __init__(self, *, is_tolerant: bool = False) -> None:
        """Know nothing yet."""
        self._is_tolerant = is_tolerant
        self.worlds: dict[str, World] = {}

    def check(self, spec: WorkflowSpec) -> Sequence[Problem]:
        """Keep the worlds of a spec, and return what is found about them."""
        found, problems = check_layout(spec)
        self.worlds.update(found)
        problems += (*unused_reschedules(spec, found), *credential_problems(spec, is_tolerant=self._is_tolerant))
        return [*problems, *earlier_problems(spec)]


def plan_for(checked: Checked, pool: Pool, overrides: Overrides, blobs: Path, datasets: str) -> Ready:
    """Read the files that a checked spec sends, compile its plan and propose a placement; ``datasets``: where those lie.

    Raises ``ProblemsFound`` when a file cannot be read, or when the pool could not hold a group even if it were idle.
    """
    notices = container_notices(checked.spec, pool.nodes)
    checked = replace(checked, warnings=in_document_order([*checked.warnings, *notices]))
    bundles, problems = bundle_files(checked.spec, blobs)
    if problems:
        raise ProblemsFound([*problems, *checked.warnings])
    plan = compile_plan(
        checked.spec, checked.worlds, pool=pool.name, bundles=bundles, secret_names=tuple(overrides.secrets), datasets=datasets
    )
    _check_drivers(plan)
    placement, misfits = propose(plan, pool, checked.spec)
    if misfits:
        raise ProblemsFound([*misfits, *checked.warnings])
    shared = sharing_notices(checked.spec, bundles, placement, pool.nodes)
    checked = replace(checked, warnings=in_document_order([*checked.warnings, *shared]))
    return Ready(checked=checked, plan=plan, pool=pool, placement=placement)


def _check_drivers(plan: Plan) -> None:
    """Refuse data at URLs for which this machine, which carries it, has no driver."""
    for group in plan.groups:
        for launch in group.launches:
            urls = [data.url for data in (*launch.url_inputs, *launch.url_outputs)]
            for url in map(parse_url, (*urls, *(one.url for one in launch.checkpoints if not one.is_shared))):
                package = package_of(url)
                if package and importlib.util.find_spec(package) is None:
                    words = f"`{launch.task}`: {url} needs the driver {package}, which is not installed here"
                    raise InputError(words, hint=NO_DRIVER)


def propose(
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


def pool_key(pool: Pool) -> str:
    """Return the name that all workflows on exactly these nodes and settings share."""
    return f"{pool.name}-{hashlib.sha256(encode(pool)).hexdigest()[:8]}"
