"""Compile a checked spec into a plan with placeholders, and add the outputs of earlier workflows to it."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from posixpath import normpath

from msgspec import Struct

from distflow.documents.requirements import Requirements
from distflow.layout.checks.elastic import remaining_tasks
from distflow.layout.placement import Demand
from distflow.layout.ranks import TaskRanks, WorldLayout
from distflow.layout.strategy.model import group_strategy
from distflow.plan.compatibility import LOOKUP_SCRIPTS_DIR, distributed_environment, lookup_scripts, member_ids
from distflow.plan.credentials import planned_credentials
from distflow.plan.environment import task_environment
from distflow.plan.frameworks import FRAMEWORKS, StartCommand, WorldTask, start_command
from distflow.plan.model import ATTEMPT_DIR, GroupPlan, Launch, Plan, PlannedCheckpoint, PlannedFile
from distflow.plan.tokens import Rewrite, input_place, paths_in_work, place_of, rewriter, uses_tmp
from distflow.spec.files import LIBRARY, Bundle, needs_library
from distflow.spec.model import CheckpointSpec, DataSpec, FileSpec, GroupSpec, TaskSpec, WorkflowSpec
from distflow.structs import replace
from distflow.train.strategies.description import Strategy

__all__ = ["FetchedOutput", "compile_plan", "demands", "strategy_environment", "with_previous_outputs"]


def compile_plan(
    spec: WorkflowSpec,
    worlds: Mapping[str, WorldLayout],
    *,
    pool: str,
    bundles: Mapping[str, Bundle],
    secret_names: Sequence[str] = (),
    datasets: str = "",
    venv: Requirements | None = None,
) -> Plan:
    """Return the plan of a spec.

    ``worlds`` comes from ``layout.checks``, and ``bundles`` from ``spec.files``: the stored files, by ``FileSpec.bundle`` or
    ``LIBRARY``. ``secret_names`` are the variables of ``--set-env``, and ``datasets`` is the URL of the directory of all
    datasets. ``venv`` are the packages of the tasks' Python environment.
    """
    groups = tuple(_group(spec, group, worlds.get(group.name), bundles, tuple(secret_names)) for group in spec.groups)
    groups = tuple(_with_venv(_with_datasets(group, datasets), venv) for group in groups)
    return Plan(name=spec.name, pool=pool, groups=groups)


class FetchedOutput(Struct, frozen=True, kw_only=True):
    """The output of a task of an earlier workflow, as an archive in the blob store."""

    digest: str
    size: int
    """Bytes."""


def with_previous_outputs(plan: Plan, fetched: Mapping[tuple[str, str], FetchedOutput]) -> Plan:
    """Return the plan with the outputs of earlier workflows as archives to unpack.

    ``fetched`` has the archives by workflow and task.
    """

    def complete(launch: Launch) -> Launch:
        files = tuple(
            PlannedFile(
                path=input_place(one.position), shown=f"output of {one.task} in {one.workflow}",
                blob=fetched[one.workflow, one.task].digest, size=fetched[one.workflow, one.task].size, mode=0o700,
                is_tar=True, only=one.regex,
            )
            for one in launch.earlier_inputs
        )  # fmt: skip
        return replace(launch, files=(*launch.files, *files))

    return replace(plan, groups=tuple(group.with_launches(complete) for group in plan.groups))


def demands(group: GroupPlan) -> tuple[Demand, ...]:
    """Return the demands of a group's tasks, in rank order. Tasks without ranks come last."""
    order = [item.task for item in group.world.tasks] if group.world else []
    ranked = sorted(group.launches, key=lambda launch: order.index(launch.task) if launch.task in order else len(order))
    return tuple(
        Demand(
            task=launch.task,
            gpus=launch.resource.gpu or 0,
            cpus=launch.resource.cpu or 0,
            memory=launch.resource.memory or 0,
            platform=launch.resource.platform,
            nodes_excluded=launch.resource.nodes_excluded,
            near=launch.resource.topology,
            spread=group.name if launch.ranks is not None else None,
        )
        for launch in ranked
    )


def _with_datasets(group: GroupPlan, url: str) -> GroupPlan:
    def filled(found: tuple[DataSpec, ...]) -> tuple[DataSpec, ...]:
        return tuple(replace(one, url=url) if one.dataset else one for one in found)

    return group.with_launches(lambda one: replace(one, url_inputs=filled(one.url_inputs), url_outputs=filled(one.url_outputs)))


def _with_venv(group: GroupPlan, venv: Requirements | None) -> GroupPlan:
    if venv is None:
        return group
    return replace(group, venv=venv, smaller=tuple(_with_venv(one, venv) for one in group.smaller))


def _group(
    spec: WorkflowSpec,
    group: GroupSpec,
    world: WorldLayout | None,
    bundles: Mapping[str, Bundle],
    secret_names: tuple[str, ...],
) -> GroupPlan:
    ignore = group.ignore_nonlead_status
    ranks = {item.task: item for item in world.tasks} if world else {}
    numbers = member_ids(group.tasks, world)
    launches = (_launch(spec, group, task, ranks.get(task.name), world, bundles, secret_names) for task in group.tasks)
    return GroupPlan(
        name=group.name,
        launches=tuple(_as_member(launch, numbers) for launch in launches),
        world=world,
        barrier=group.barrier,
        # Collectives of a world cannot continue without one of its tasks.
        ignore_nonlead_status=ignore if ignore is not None else world is None,
        timeouts=group.timeouts,
        retry=group.retry,
        upstream=group.upstream,
        stop_on_missing_ranks=group.stop_on_missing_ranks,
        ends_with_lead=group.framework is not None and FRAMEWORKS[group.framework.value].ends_with_lead,
        smaller=_smaller_plans(spec, group, world, bundles, secret_names) if world is not None else (),
        smaller_after_s=group.elastic.wait_s if group.elastic is not None else 0.0,
    )


def _smaller_plans(
    spec: WorkflowSpec, group: GroupSpec, world: WorldLayout, bundles: Mapping[str, Bundle], secret_names: tuple[str, ...]
) -> tuple[GroupPlan, ...]:
    return tuple(
        _group(spec, replace(group, tasks=remaining_tasks(group, world, len(one.tasks))), one, bundles, secret_names)
        for one in world.smaller
    )


def _launch(
    spec: WorkflowSpec,
    group: GroupSpec,
    task: TaskSpec,
    ranks: TaskRanks | None,
    world: WorldLayout | None,
    bundles: Mapping[str, Bundle],
    secret_names: tuple[str, ...],
) -> Launch:
    placed = [(file.path.value, file.is_directory) for file in task.files]
    placed += [(one.path.value.rstrip("/"), True) for one in task.checkpoints]
    texts = list(_texts(task, bundles))
    in_work = paths_in_work(placed, texts)
    rewritten = [one for one in placed if one[0].startswith("/")] + [one for one in in_work.items() if one not in placed]
    rewritten += [(one.directory.value, True) for one in task.credentials if one.directory and one.directory.value[:1] == "/"]
    hosts = {one.name for one in group.tasks}
    rewrite = rewriter(ranks, world, rewritten, task.inputs, (*task.url_inputs, *task.earlier_inputs), hosts, in_work)
    resource = spec.resources[task.resource]
    given = {name: rewrite(text.value) for name, text in task.environment.items()}
    started = StartCommand(argv=tuple(rewrite(word.value) for word in (*task.command, *task.args)))
    if ranks is not None and world is not None:
        name = group.framework.value if group.framework is not None else None
        world_task = WorldTask(
            group=group.name, world=world, ranks=ranks, argv=started.argv, resource=resource, launcher=task.launcher,
            given=given,
        )  # fmt: skip
        started = start_command(name, world_task)
    strategy, _ = group_strategy(group, world)
    checkpoints = tuple(_checkpoint(one, rewrite, in_work) for one in task.checkpoints)
    environment = task_environment(
        group=group.name,
        task=task.name,
        ranks=ranks,
        world=world,
        resource=resource,
        given={**strategy_environment(strategy), **started.environment, **given},
        debug=group.debug,
        checkpoint=checkpoints[0].place if checkpoints else None,
    )
    library = [_library(bundles[LIBRARY])] if needs_library(group, task) else []
    # Do not move files that a checkpoint may contain to a later attempt (`reusable`): distflow also copies checkpoints after
    # the task has ended, and the files would then be missing. Files that a container could change must not reach tasks outside
    # of it.
    is_reusable = not checkpoints and task.image is None
    output_link = f"work/{task.output_dir}" if task.output_dir is not None else None
    outputs = ("output", *([normpath(output_link)] if output_link is not None else []))
    files = tuple(_file(file, rewrite, bundles, in_work, outputs, is_reusable=is_reusable) for file in task.files)
    tools = lookup_scripts([*started.argv, *environment.values(), *(file.text or "" for file in files)])
    secret = {*secret_names, *(name for one in task.credentials for name in one.variables)}
    return Launch(
        task=task.name,
        lead=task.lead,
        argv=started.argv,
        environment={name: value for name, value in environment.items() if name not in secret},
        secret_names=secret_names,
        credentials=planned_credentials(task.credentials),
        files=(*files, *started.files, *library, *tools),
        python_path=tuple(f"{ATTEMPT_DIR}/{file.path}" for file in library),
        path=(LOOKUP_SCRIPTS_DIR,) if tools else (),
        folders=("work/tmp",) if uses_tmp(texts) else (),
        inputs=task.inputs,
        url_inputs=task.url_inputs,
        earlier_inputs=task.earlier_inputs,
        ranks=ranks,
        resource=resource,
        rewritten=tuple((path, place_of(path, in_work)) for path, _ in rewritten),
        outputs=task.outputs,
        url_outputs=task.url_outputs,
        exit_actions=task.exit_actions,
        checkpoints=checkpoints,
        image=rewrite(task.image.value) if task.image is not None else None,
        mounts=tuple(rewrite(text.value) for text in task.mounts),
        privileged=task.privileged,
        max_log=spec.max_log,
        output_link=output_link,
    )


def _as_member(launch: Launch, numbers: Mapping[str, int]) -> Launch:
    """Return the launch with its number in Valohai's ``distributed.json``, and with Valohai's variables.

    It is unchanged without a number, or if the spec sets variables that begin with ``VH_``.
    """
    given = distributed_environment(launch.task, launch.environment) if launch.task in numbers else {}
    if not given:
        return launch
    return replace(launch, member=numbers[launch.task], environment={**launch.environment, **given})


def _texts(task: TaskSpec, bundles: Mapping[str, Bundle]) -> Iterator[tuple[str, str]]:
    """Yield the texts that may contain paths, each with the path of its file; ``""`` for a command, arguments and variables."""
    for text in (*task.command, *task.args, *task.environment.values()):
        yield "", text.value
    for file in task.files:
        path = file.path.value
        yield path, file.contents.value if file.contents else bundles[file.bundle].text or ""


def _file(
    file: FileSpec,
    rewrite: Rewrite,
    bundles: Mapping[str, Bundle],
    in_work: Container[str],
    outputs: Iterable[str],
    *,
    is_reusable: bool,
) -> PlannedFile:
    """Plan a file or directory. ``outputs`` are the paths of the output, whose files must not move to another attempt."""
    path, shown = place_of(file.path.value, in_work), file.path.value
    if file.contents is not None:
        text: str | None = file.contents.value
        bundle = None
    else:
        bundle = bundles[file.bundle]
        text = bundle.text
    # A local file is sent by its digest unless its text contains tokens or paths that are rewritten.
    if text is not None and (bundle is None or rewrite(text) != text):
        text = rewrite(text)
        mode = 0o700 if text.startswith("#!") or (bundle is not None and bundle.mode & 0o100) else 0o600
        return PlannedFile(path=path, shown=shown, text=text, size=len(text.encode()), mode=mode)
    if bundle is None:
        raise AssertionError("a file has neither contents nor a bundle")
    return PlannedFile(
        path=path, shown=shown, blob=bundle.digest, size=bundle.size, mode=bundle.mode, is_tar=bundle.is_tar,
        reusable=bundle.is_tar and is_reusable and not any(f"{normpath(path)}/".startswith(f"{one}/") for one in outputs),
    )  # fmt: skip


def strategy_environment(strategy: Strategy | None) -> dict[str, str]:
    """Return the variable that passes a strategy to the tasks of a group; empty without a strategy."""
    return {"DISTFLOW_STRATEGY": json.dumps(strategy.normalized())} if strategy is not None else {}


def _library(bundle: Bundle) -> PlannedFile:
    return PlannedFile(path="lib", shown=LIBRARY, blob=bundle.digest, size=bundle.size, mode=bundle.mode, is_tar=True)


def _checkpoint(one: CheckpointSpec, rewrite: Rewrite, in_work: Container[str]) -> PlannedCheckpoint:
    path = rewrite(one.path.value)
    inside = path.startswith(f"{ATTEMPT_DIR}/")
    place = path.removeprefix(f"{ATTEMPT_DIR}/") if inside else place_of(path, in_work)
    return PlannedCheckpoint(place=normpath(place), shown=one.path.value, url=one.url, every_s=one.every_s, regex=one.regex)
