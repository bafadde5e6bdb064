"""Write the part of a script for Slurm that runs on each node: files, environment, and the command of its task.

``plan.kubernetes_manifests`` runs the same part in each pod.
Equal tasks share one branch of its ``case``, in which the node rank, the first rank and the name of the task are variables.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from distflow.documents.urls import parse_url
from distflow.errors import InputError
from distflow.lifecycle.exits import Codes
from distflow.plan.model import PLACEHOLDER, GroupPlan, Launch, Plan, PlannedFile
from distflow.plan.tokens import input_place
from distflow.pools.model import Pool
from distflow.shell import quote_with_variables
from distflow.spec.model import DataSpec, EarlierInput
from distflow.structs import replace

__all__ = [
    "address_variable",
    "as_exported",
    "credential_variable",
    "ends_with_lead",
    "here_document",
    "input_variable",
    "kinds_of",
    "ordered",
    "quoted",
    "shared_files",
    "task_script",
]

_VARIABLES = {
    "ATTEMPT_DIR": "task_dir", "WORKFLOW_ID": "workflow_id", "MASTER_ADDR": "master_addr", "MASTER_PORT": "master_port",
    "NODE": "SLURMD_NODENAME", "RETRY_ID": "retry_id", "TASK_NAME": "task", "NODE_RANK": "node_rank",
    "RANK_OFFSET": "rank_offset",
}  # fmt: skip
"""The shell variables for placeholders of scripts, except ``@@ADDRESS:<task>@@``.

The last three replace values that differ between equal tasks."""
_OWN = frozenset({"run_dir", "retry_id", "status", "nodes", "address", *_VARIABLES.values()})
_REGEX_COPY = """\
# Copy the files whose relative path matches REGEX, anchored at its start: copy_matching REGEX FROM TO
copy_matching() {
    python3 - "$@" <<'END'
import os, re, shutil, sys
pattern, source, target = sys.argv[1:]
for folder, _, names in os.walk(source):
    for name in names:
        path = os.path.relpath(os.path.join(folder, name), source)
        if re.match(pattern, path):
            os.makedirs(os.path.dirname(os.path.join(target, path)), exist_ok=True)
            shutil.copy2(os.path.join(source, path), os.path.join(target, path))
END
}
"""


def ordered(group: GroupPlan) -> tuple[Launch, ...]:
    """Return the tasks of a group in the order of their ranks; tasks without ranks come last."""
    ranks = {item.task: item.node_rank for item in group.world.tasks} if group.world else {}
    return tuple(sorted(group.launches, key=lambda launch: ranks.get(launch.task, len(ranks))))


def ends_with_lead(group: GroupPlan) -> bool:
    """Return whether the other tasks are stopped when the lead has completed."""
    return len(group.launches) > 1 and (group.ends_with_lead or group.ignore_nonlead_status)


def credential_variable(name: str) -> str:
    """Return the name of the variable with the directory of a credential."""
    return f"CREDENTIAL_{re.sub('[^A-Za-z0-9]', '_', name)}"


def address_variable(task: str) -> str:
    """Return the name of the variable with the address of a task."""
    return f"address_{re.sub('[^A-Za-z0-9]', '_', task)}"


def input_variable(source: DataSpec | EarlierInput) -> str:
    """Return the name of the variable with the directory of an input that does not come from a task of the workflow."""
    if isinstance(source, DataSpec):
        name = f"dataset {source.dataset}" if source.dataset else str(parse_url(source.url))
    else:
        name = f"{source.workflow} {source.task}"
    return f"INPUT_{re.sub('[^A-Za-z0-9]+', '_', name).strip('_')}"


def as_exported(group: GroupPlan) -> GroupPlan:
    """Return the group as scripts run it: without smaller sizes of ``elastic``, and without Valohai's files and variables."""
    given = {launch.task: [name for name in launch.environment if name.startswith("VH_")] for launch in group.launches}

    def cleaned(launch: Launch) -> Launch:
        if launch.member is None:
            return launch
        kept = {name: value for name, value in launch.environment.items() if name not in given[launch.task]}
        return replace(launch, member=None, environment=kept)

    return replace(group, launches=tuple(map(cleaned, group.launches)), smaller=())


def shared_files(plan: Plan) -> dict[str, str]:
    """Return a file name for each blob of a plan, by its digest. A number is put before a name that is already in use."""
    names: dict[str, str] = {}
    for group in plan.groups:
        for file in (file for launch in group.launches for file in launch.files):
            if file.blob is None or file.blob in names:
                continue
            stem = PurePosixPath(file.shown).name or "project"
            name = f"{'project' if stem in ('.', '..') else stem}{'.tar.gz' if file.is_tar else ''}"
            taken = sum(one == name or one.endswith(f"-{name}") for one in names.values())
            names[file.blob] = f"{taken + 1}-{name}" if taken else name
    return names


def here_document(text: str, *, is_expanded: bool = False) -> str:
    """Return a here-document: its redirection, the text, which must end with a line feed, and the end mark.

    With ``is_expanded``, the shell replaces variables in the text.
    """
    lines, end = text.splitlines(), "END"
    while end in lines or any(line.strip() == end for line in lines):
        end += "_"
    return f"<<{end if is_expanded else repr(end)}\n{text}{end}"


def task_script(
    group: GroupPlan,
    pool: Pool,
    files: Mapping[str, str],
    *,
    position: str = "SLURM_PROCID",
    restarts: str = "SLURM_RESTART_COUNT",
    node_name: str = _VARIABLES["NODE"],
) -> str:
    """Return the script that runs once on each node.

    ``position``, ``restarts`` and ``node_name`` are the variables with the position of the node, the number of earlier attempts
    and the name of the node.
    ``files`` has the name of each blob in ``$run_dir/files``, by digest. Raises ``InputError`` if a variable of
    the spec has the name of a variable of the script.
    """
    launches = ordered(group)
    _check_names(launches, node_name)
    kinds = kinds_of(launches)
    lines = ["#!/bin/bash", "umask 077", f"retry_id=${{{restarts}:-0}}", *_identity(launches, position)]
    lines += [
        "task_dir=$run_dir/$task",
        'mkdir -p "$task_dir/work" "$task_dir/output" || exit',
    ]
    if any(_uses_regex(launch) for launch in launches):
        lines += ["", *_REGEX_COPY.splitlines()]
    node = pool.template
    if node is not None:
        lines += [f"export {name}={shlex.quote(value)}" for name, value in node.environment.items()]
    common = _common(kinds)
    lines += [f"export {name}={quoted(value)}" for name, value in common.items()]
    if node is not None and "/" in node.python:
        lines += [f'export PATH={shlex.quote(str(PurePosixPath(node.python).parent))}:"$PATH"']
    lines += (node.setup or "").splitlines() if node is not None else []
    bodies = [_body(kind, set(common), files) for kind, _ in kinds]
    if len(kinds) == 1:
        lines += ["", *bodies[0]]
    else:
        lines += ["", "case $task in"]
        for (_, tasks), body in zip(kinds, bodies, strict=True):
            lines += [" | ".join(map(shlex.quote, tasks)) + ")", *body, "    ;;"]
        lines += ["esac"]
    script = "\n".join([*lines, *_end(group, launches)]) + "\n"
    return script.replace(f"${{{_VARIABLES['NODE']}}}", f"${{{node_name}}}")


def _uses_regex(launch: Launch) -> bool:
    others: Sequence[DataSpec | EarlierInput] = (*launch.url_inputs, *launch.earlier_inputs)
    return any(one.regex for one in launch.inputs) or any(one.regex for one in others)


def _check_names(launches: Sequence[Launch], node_name: str) -> None:
    own = {*_OWN, node_name, *(address_variable(launch.task) for launch in launches)}
    for launch in launches:
        of_credentials = (name for one in launch.credentials for name in one.variables)
        taken = sorted(own & {*launch.environment, *launch.secret_names, *of_credentials})
        if taken:
            message = f"task `{launch.task}` sets the variable `{taken[0]}`, which the script itself uses"
            raise InputError(message, hint="rename the variable")


def _identity(launches: Sequence[Launch], position: str) -> list[str]:
    """Return the lines that set the name of the task, its node rank and its first rank."""

    def values(launch: Launch) -> str:
        ranks = launch.ranks
        return f"task={launch.task}" + (f" node_rank={ranks.node_rank} rank_offset={ranks.offset}" if ranks else "")

    if len(launches) == 1:
        return [values(launches[0])]
    return [f"case ${position} in", *(f"{number}) {values(launch)} ;;" for number, launch in enumerate(launches)), "esac"]


# -- equal tasks ------------------------------------------------------------------------------------------------------


def kinds_of(launches: Sequence[Launch]) -> list[tuple[Launch, list[str]]]:
    """Merge equal tasks, and return each merged or remaining task with the names of the tasks that it stands for.

    Tasks are equal if they differ only in their names and ranks. Placeholders replace these in a merged task.
    """
    alike: dict[object, list[Launch]] = {}
    for launch in map(_prepared, launches):
        texts = _texts(launch)
        blobs = tuple((file.path, file.blob, file.mode) for file in launch.files)
        others = (launch.inputs, launch.credentials, launch.exit_actions, launch.output_link, launch.folders, launch.path)
        data = (launch.url_inputs, launch.earlier_inputs, launch.checkpoints, tuple(launch.environment), len(launch.argv))
        alike.setdefault(repr((blobs, others, data, len(texts))), []).append(launch)
    found: list[tuple[Launch, list[str]]] = []
    for some in alike.values():
        merged = _merged(some) if len(some) > 1 else some[0]
        if merged is None:
            found += [(one, [one.task]) for one in some]
        else:
            found.append((merged, [one.task for one in some]))
    return found


def _prepared(launch: Launch) -> Launch:
    """Return the launch with only the variables that the script must set.

    The cluster sets the variables for GPUs, and its administrator those for network interfaces. The task's name and ranks
    become placeholders for variables of the script.
    """
    environment = {name: value for name, value in launch.environment.items() if value != "@@IFNAME@@"}
    if launch.resource.gpu:
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    elif environment.get("CUDA_VISIBLE_DEVICES") == "@@GPU_IDS@@":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    own = {"DISTFLOW_TASK": (launch.task, "@@TASK_NAME@@")}
    if launch.ranks is not None:
        rank, offset = str(launch.ranks.node_rank), str(launch.ranks.offset)
        own |= dict.fromkeys(("NODE_RANK", "PET_NODE_RANK"), (rank, "@@NODE_RANK@@"))
        own |= dict.fromkeys(("RANK", "DISTFLOW_RANK_OFFSET"), (offset, "@@RANK_OFFSET@@"))
    for name, (value, placeholder) in own.items():
        if environment.get(name) == value:
            environment[name] = placeholder
    return replace(launch, environment=environment)


def _texts(launch: Launch) -> list[str]:
    return [*launch.argv, *launch.environment.values(), *(file.text for file in launch.files if file.text is not None)]


def _merged(launches: Sequence[Launch]) -> Launch | None:
    """Return one launch for all of these, or ``None`` if they differ in more than their name and ranks."""
    texts: list[str] = []
    for values in zip(*map(_texts, launches), strict=True):
        text = _one_text(launches, values)
        if text is None:
            return None
        texts.append(text)
    first, given = launches[0], iter(texts)
    argv = tuple(next(given) for _ in first.argv)
    environment = {name: next(given) for name in first.environment}
    files = tuple(file if file.text is None else replace(file, text=next(given)) for file in first.files)
    return replace(first, argv=argv, environment=environment, files=files)


def _one_text(launches: Sequence[Launch], values: Sequence[str]) -> str | None:
    if len(set(values)) == 1:
        return values[0]
    ranks = [launch.ranks for launch in launches]
    if all(one is not None and value == str(one.node_rank) for one, value in zip(ranks, values, strict=True)):
        return "@@NODE_RANK@@"
    if all(one is not None and value == str(one.offset) for one, value in zip(ranks, values, strict=True)):
        return "@@RANK_OFFSET@@"
    named = {
        re.sub(rf"(?<![\w-]){launch.task}(?![\w-])", "@@TASK_NAME@@", value)
        for launch, value in zip(launches, values, strict=True)
    }
    # `@@ADDRESS:<task>@@` becomes a variable whose name contains the task's name, and a script cannot compute that name.
    return named.pop() if len(named) == 1 and "@@ADDRESS:@@" not in "".join(named) else None


def _common(kinds: Sequence[tuple[Launch, list[str]]]) -> dict[str, str]:
    """Return the variables that have the same value in all tasks."""
    first, *others = (kind.environment for kind, _ in kinds)
    return {name: value for name, value in first.items() if all(one.get(name) == value for one in others)}


# -- one kind of task -------------------------------------------------------------------------------------------------


def _body(launch: Launch, common: set[str], files: Mapping[str, str]) -> list[str]:
    """Return the lines that prepare a task and run its command in the foreground."""
    lines = [f'mkdir -p "$task_dir"/{shlex.quote(folder)}' for folder in launch.folders]
    # Programs expect the parent of a checkpoint's directory to exist: `/tmp` for `/tmp/models`.
    folders = sorted({str(PurePosixPath(one.place).parent) for one in launch.checkpoints})
    lines += [f'mkdir -p "$task_dir"/{shlex.quote(folder)}' for folder in folders]
    for one in launch.inputs:
        lines += _input(f'"$run_dir"/{one.task}/output', one.position, one.regex)
    others: Sequence[DataSpec | EarlierInput] = (*launch.url_inputs, *launch.earlier_inputs)
    for other in others:
        lines += _input(f'"${input_variable(other)}"', other.position, other.regex)
    for credential in (one for one in launch.credentials if one.path):
        place = f'"$task_dir"/{shlex.quote(credential.path)}'
        lines += [f'mkdir -p {place} && cp -R "${credential_variable(credential.name)}"/. {place} || exit']
    for file in launch.files:
        lines += _file(file, files)
    if launch.output_link is not None:
        link = f'"$task_dir"/{shlex.quote(launch.output_link)}'
        lines += [f"if [ ! -L {link} ]; then", f'    mkdir -p {link} && cp -R {link}/. "$task_dir/output" && rm -r {link}']
        lines += [f'    ln -s "$task_dir/output" {link}', "fi"]
    lines += [f"export {name}={quoted(value)}" for name, value in launch.environment.items() if name not in common]
    lines += [f'export PATH={quoted(path)}:"$PATH"' for path in launch.path]
    lines += [f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{quoted(path)}' for path in launch.python_path]
    return [*lines, 'cd "$task_dir/work" || exit', " ".join(quoted(word) for word in launch.argv) + " < /dev/null"]


def _input(source: str, position: int, regex: str) -> list[str]:
    place = f'"$task_dir"/{input_place(position)}'
    missing = f"[ -d {source} ] || {{ echo {source} does not exist. Do all nodes share this directory? >&2; exit 1; }}"
    if regex:
        return [missing, f"mkdir -p {place} && copy_matching {shlex.quote(regex)} {source} {place} || exit"]
    return [missing, f'mkdir -p "$task_dir"/input && ln -sfn {source} {place} || exit']


def _file(file: PlannedFile, files: Mapping[str, str]) -> list[str]:
    place = f'"$task_dir"/{shlex.quote(file.path)}'
    folder = f'"$task_dir"/{shlex.quote(str(PurePosixPath(file.path).parent))}'
    source = f'"$run_dir"/files/{shlex.quote(files.get(file.blob or "", ""))}'
    if file.is_tar:
        return [f"mkdir -p {place} && tar -xzf {source} -C {place} || exit"]
    if file.text is None:
        lines = [f"mkdir -p {folder} && cp {source} {place} || exit"]
    elif not file.text.endswith("\n") or "\r" in file.text:
        lines = [f"mkdir -p {folder}", f"printf %s {quoted(file.text)} > {place}"]
    elif PLACEHOLDER.search(file.text):
        lines = [f"mkdir -p {folder}", f"cat > {place} {here_document(_expandable(file.text), is_expanded=True)}"]
    else:
        lines = [f"mkdir -p {folder}", f"cat > {place} {here_document(file.text)}"]
    return [*lines, f"chmod 700 {place}"] if file.mode & 0o100 else lines


def _expandable(text: str) -> str:
    """Return a text for a here-document in which only placeholders are expanded."""
    quoted = re.sub(r"([\\$`])", r"\\\1", text)
    return PLACEHOLDER.sub(lambda match: f"${{{_variable(match)}}}", quoted)


def _variable(match: re.Match[str]) -> str:
    name, argument = match.group(1), match.group(2)
    return _VARIABLES[name] if argument is None else address_variable(argument)


def quoted(text: str) -> str:
    """Return a text of the plan as one word of the shell, with variables instead of placeholders."""
    return quote_with_variables(text, PLACEHOLDER, _variable)


# -- the end of a task ------------------------------------------------------------------------------------------------


def _end(group: GroupPlan, launches: Sequence[Launch]) -> list[str]:
    """Return the lines after the command, which apply ``exitActions`` to its exit code.

    If the group ends with its lead, the lead writes its status to ``<lead>.ended`` and exits with 1, so that srun stops the
    other tasks. The job script then exits with the written status.
    """
    lines: list[str] = []
    for launch in launches:
        actions = launch.exit_actions
        complete, fail = _test(actions.complete), _test((*actions.fail, *actions.reschedule), zero_only=True)
        changes = [f"{test} ? {code} :" for test, code in ((complete, 0), (fail, 1)) if test]
        lines += [f"[ $task != {launch.task} ] || status=$(( {' '.join(changes)} status ))"] if changes else []
    ignored = [launch.task for launch in launches if len(launches) > 1 and not group.counts(launch.task)]
    if ignored:
        lines += ["case $task in", f"{' | '.join(ignored)}) status=0 ;;  # only the lead decides", "esac"]
    if ends_with_lead(group):
        lines += [f'[ $task != {group.lead.task} ] || {{ echo $status > "$run_dir/$task.ended"; exit 1; }}']
    return ["status=$?", *lines, "exit $status"] if lines else []


def _test(codes: Codes, *, zero_only: bool = False) -> str:
    """Return a shell condition that is true if ``status`` is one of ``codes``; empty if ``codes`` has no possible status.

    With ``zero_only``, the condition can be true only for the status 0, because every other status already counts as a failure.
    """
    tests = []
    most = 0 if zero_only else 255
    for first, last in ((first, min(last, most)) for first, last in codes if first <= most):
        tests.append(f"status == {first}" if first == last else f"(status >= {first} && status <= {last})")
    return f"({' || '.join(tests)})" if len(tests) > 1 else "".join(tests)
