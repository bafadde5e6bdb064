"""Show a plan as text, as JSON, and as one shell script for each task, which a user could run by hand.

Text and JSON show placeholders for values that are not known yet; a script has variables for them. The dry run adds the
placement that would be tried first.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from distflow.documents.json_keys import name_keys
from distflow.documents.quantities import count_text
from distflow.documents.urls import parse_url
from distflow.layout.ranks import rank_label
from distflow.lifecycle.states import waiting_text
from distflow.plan.compatibility import distributed_files
from distflow.plan.model import PLACEHOLDER, GroupPlan, Launch, Plan, PlannedCredential, PlannedFile
from distflow.plan.tokens import input_place
from distflow.shell import MASK, quote_with_variables
from distflow.spec.model import DataSpec

__all__ = ["plan_json", "plan_text", "script"]


def plan_text(plan: Plan, placement: Mapping[str, str], pictures: Mapping[str, str]) -> str:
    """Return the plan as text: the layout of each group, then each task with its node, command, environment and files.

    ``placement`` has the proposed node of each task, ``pictures`` the drawn layout of each group with ranks.
    """
    lines = [f"workflow {plan.name} in pool {plan.pool}"]
    for group in plan.groups:
        lines += ["", _headline(group)]
        if group.name in pictures:
            lines += ["", *("  " + line for line in pictures[group.name].splitlines())]
        for launch in group.launches:
            lines += ["", *_task_lines(launch, placement.get(launch.task))]
    return "\n".join(lines) + "\n"


def plan_json(plan: Plan, placement: Mapping[str, str]) -> dict[str, Any]:
    """Return the plan as a JSON object, with placeholders as ``@@NAME@@``, and with a mask instead of the values of secrets."""
    return {
        "name": plan.name,
        "pool": plan.pool,
        "venv": _venv_json(plan),
        "groups": [
            {
                "name": group.name,
                "group_name": group.name,
                "upstream_groups": list(group.upstream),
                "barrier": group.barrier,
                "ignore_nonlead_status": group.ignore_nonlead_status,
                "world_size": group.world.world_size if group.world else None,
                "master": group.master,
                "port": group.world.port if group.world else None,
                "exec_timeout": group.timeouts.exec_s,
                "queue_timeout": group.timeouts.queue_s,
                "hang_timeout": group.timeouts.hang_s,
                "tasks": [_task_json(launch, placement.get(launch.task)) for launch in group.launches],
            }
            for group in plan.groups
        ],
    }


def _venv_json(plan: Plan) -> dict[str, Any] | None:
    venv = next((group.venv for group in plan.groups), None)
    return None if venv is None else {"file": venv.file, "lines": list(venv.lines), "constraints": list(venv.constraints)}


def script(group: GroupPlan, launch: Launch) -> str:
    """Return a POSIX shell script that runs one task by hand, on its node, in a separate directory.

    The script begins with variables, which have defaults, for the values that distflow would determine. The user must set
    variables for inputs, secrets and credentials, and ``BLOBS``: the directory with the files that the script does not contain
    as text.
    """
    files = (*launch.files, *distributed_files(group, launch.task))
    used = _placeholders(launch, files)
    lines = [
        "#!/bin/sh",
        f"# Task {launch.task} of group {group.name}, as distflow would run it.",
        "set -eu",
        'ATTEMPT_DIR=${ATTEMPT_DIR:-$(mktemp -d)}; mkdir -p "$ATTEMPT_DIR/work" "$ATTEMPT_DIR/output"',
    ]
    if group.venv is not None:
        lines.insert(
            2, f"# distflow would first activate a Python environment with the packages of {shlex.quote(group.venv.file)}."
        )
    if launch.image is not None:
        lines.insert(2, "# This script ignores the task's `image`, and runs the command without a container.")
    # Programs expect the parent of a checkpoint's directory to exist: `/tmp` for `/tmp/models`.
    folders = (*launch.folders, *(str(PurePosixPath(one.place).parent) for one in launch.checkpoints))
    lines += [f'mkdir -p "$ATTEMPT_DIR"/{shlex.quote(folder)}' for folder in dict.fromkeys(folders)]
    lines += [f': "${{{name}:={default}}}"' for name, default in sorted(used.items()) if name != "ATTEMPT_DIR"]
    for one in launch.inputs:
        place = f'"$ATTEMPT_DIR"/{input_place(one.position)}'
        lines += [
            f"mkdir -p {place}",
            f'cp -R "${{INPUT_{one.position}:?set it to a directory with the output of {one.task}}}"/. {place}',
        ]
    for old in launch.earlier_inputs:
        place = f'"$ATTEMPT_DIR"/{input_place(old.position)}'
        description = f"set it to a directory with the output of {old.task} in {old.workflow}"
        lines += [f"mkdir -p {place}", f'cp -R "${{INPUT_{old.position}:?{description}}}"/. {place}']
    for data in launch.url_inputs:
        place = f'"$ATTEMPT_DIR"/{input_place(data.position)}'
        lines += [
            f"mkdir -p {place}",
            f'cp -R "${{INPUT_{data.position}:?set it to a directory with the data of its URL}}"/. {place}',
        ]
    lines += [f'export {name}="${{{name}:?set it to the value of --set-env}}"' for name in launch.secret_names]
    for credential in launch.credentials:
        lines += _place_credential(credential)
    for file in files:
        lines += _place(file)
    if launch.output_link is not None:
        link = f'"$ATTEMPT_DIR"/{shlex.quote(launch.output_link)}'
        lines += [
            f"mkdir -p {link}",
            f'cp -R {link}/. "$ATTEMPT_DIR/output"',
            f'rm -r {link}; ln -s "$ATTEMPT_DIR/output" {link}',
        ]
    lines += [f"export {name}={_word(value)}" for name, value in launch.environment.items()]
    lines += [f'export PATH={_word(path)}:"$PATH"' for path in launch.path]
    lines += [f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{_word(path)}' for path in launch.python_path]
    lines += ['cd "$ATTEMPT_DIR/work"', "exec " + " ".join(_word(word) for word in launch.argv)]
    return "\n".join(lines) + "\n"


def _headline(group: GroupPlan) -> str:
    words = [f"group {group.name}: {count_text(len(group.launches), 'task')}"]
    if group.world:
        port = f"port {group.world.port}" if group.world.port is not None else "a free port"
        words.append(f"one world of {count_text(group.world.world_size, 'rank')}, master {group.master}, {port}")
    if group.venv is not None:
        words.append(f"Python environment of {group.venv.file}")
    if group.smaller:
        least = count_text(len(group.smaller[-1].launches), "task")
        words.append(f"may start with only {least} after waiting {group.smaller_after_s:g} s (elastic)")
    if group.upstream:
        words.append(waiting_text(group.upstream))
    if group.timeouts.exec_s is not None:
        words.append(f"exec_timeout {group.timeouts.exec_s:g} s")
    if group.timeouts.queue_s is not None:
        words.append(f"queue_timeout {group.timeouts.queue_s:g} s")
    if group.timeouts.hang_s is not None:
        words.append(f"hang_timeout {group.timeouts.hang_s:g} s")
    return ", ".join(words)


def _task_lines(launch: Launch, node: str | None) -> list[str]:
    head = f"  task {launch.task}" + (" (lead)" if launch.lead else "")
    head += f" on {node}" if node else ""
    head += f", {rank_label(launch.ranks.text)}" if launch.ranks else ""
    lines = [head, "    command      " + " ".join(shlex.quote(_shown(word)) for word in launch.argv)]
    for position, (name, value) in enumerate(launch.environment.items()):
        lines.append(f"    {'environment' if position == 0 else '':12} {name}={_shown(value)}")
    lines += [f"    {'':12} PATH={_shown(path)}:…" for path in launch.path]
    lines += [f"    {'':12} PYTHONPATH=…:{_shown(path)}" for path in launch.python_path]
    lines += [f"    {'':12} {name}={MASK}" for name in (*launch.secret_names, *_variables(launch))]
    named = [one for one in launch.credentials if one.path]
    for position, credential in enumerate(named):
        lines.append(f"    {'credentials' if position == 0 else '':12} {credential.name} → <ATTEMPT_DIR>/{credential.path}")
    for position, file in enumerate(launch.files):
        kind = "directory, " if file.is_tar else ""
        lines.append(
            f"    {'files' if position == 0 else '':12} {file.shown} → <ATTEMPT_DIR>/{file.path} ({kind}{file.size} bytes)"
        )
    if launch.member is not None:
        words = f"distributed.json, distributed.yaml (member {launch.member}) → <ATTEMPT_DIR>/config"
        lines.append(f"    {'' if launch.files else 'files':12} {words}")
    sources = [(one.position, f"output of {one.task}", one.regex) for one in launch.inputs]
    sources += [(old.position, f"output of {old.task} in {old.workflow}", old.regex) for old in launch.earlier_inputs]
    sources += [(data.position, _url(data), data.regex) for data in launch.url_inputs]
    for number, (position, what, regex) in enumerate(sorted(sources)):
        place = f"<ATTEMPT_DIR>/{input_place(position)}"
        lines.append(f"    {'inputs' if number == 0 else '':12} {what}{_only(regex)} → {place}")
    for number, one in enumerate(launch.checkpoints):
        target = "all tasks after a restart" if one.is_shared else parse_url(one.url)
        words = f"<ATTEMPT_DIR>/{one.place}{_only(one.regex)}, every {one.every_s:g} s → {target}"
        lines.append(f"    {'checkpoint' if number == 0 else '':12} {words}")
    for number, data in enumerate(launch.url_outputs):
        lines.append(f"    {'outputs' if number == 0 else '':12} <ATTEMPT_DIR>/output{_only(data.regex)} → {_url(data)}")
    return lines


def _only(regex: str) -> str:
    return f" (only {regex})" if regex else ""


def _url(data: DataSpec) -> str:
    return f"dataset {data.dataset}" if data.dataset else str(parse_url(data.url))


def _task_json(launch: Launch, node: str | None) -> dict[str, Any]:
    resource = launch.resource
    return {
        "name": launch.task,
        "task_name": launch.task,
        "lead": launch.lead,
        **name_keys(node=node),
        "offset": launch.ranks.offset if launch.ranks else None,
        "size": launch.ranks.size if launch.ranks else None,
        "node_rank": launch.ranks.node_rank if launch.ranks else None,
        "member": launch.member,
        "command": list(launch.argv),
        "python_path": list(launch.python_path),
        "path": list(launch.path),
        "environment": dict(launch.environment) | dict.fromkeys((*launch.secret_names, *_variables(launch)), MASK),
        "credentials": [
            {"name": one.name, "variables": dict(one.variables), "directory": one.shown or None, "placed_at": one.path or None}
            for one in launch.credentials
        ],
        "files": [
            {"path": file.shown, "placed_at": file.path, "bytes": file.size, "sha256": file.blob, "text": file.text,
             "mode": f"{file.mode:o}", "directory": file.is_tar}
            for file in launch.files
        ],
        "inputs": [
            {"position": one.position, **name_keys(task=one.task), "regex": one.regex, "placed_at": input_place(one.position)}
            for one in launch.inputs
        ]
        + [
            {"position": old.position, "workflow": old.workflow, **name_keys(task=old.task), "regex": old.regex,
             "placed_at": input_place(old.position)}
            for old in launch.earlier_inputs
        ]
        + [
            {"position": data.position, "url": _url(data), "regex": data.regex, "placed_at": input_place(data.position)}
            for data in launch.url_inputs
        ],
        "checkpoints": [
            {"path": one.shown, "placed_at": one.place, "url": None if one.is_shared else str(parse_url(one.url)),
             "frequency": one.every_s, "regex": one.regex}
            for one in launch.checkpoints
        ],
        "outputs": [{"position": data.position, "url": _url(data), "regex": data.regex} for data in launch.url_outputs],
        "resource": {
            "cpu": resource.cpu, "gpu": resource.gpu, "memory": resource.memory, "storage": resource.storage,
            "platform": resource.platform,
        },
    }  # fmt: skip


def _shown(text: str) -> str:
    return PLACEHOLDER.sub(lambda match: f"<{_variable(match)}>", text)


def _variable(match: re.Match[str]) -> str:
    name, argument = match.group(1), match.group(2)
    return name if argument is None else f"{name}_{re.sub(r'[^A-Za-z0-9]', '_', argument)}"


def _word(text: str) -> str:
    return quote_with_variables(text, PLACEHOLDER, _variable)


_DEFAULTS = {
    "WORKFLOW_ID": "by-hand", "MASTER_PORT": "29500", "IFNAME": "lo", "GPU_IDS": "", "NODE": "localhost", "RETRY_ID": "0",
    "LEASED_AT": "1970-01-01T00:00:00",
}  # fmt: skip


def _placeholders(launch: Launch, files: Sequence[PlannedFile]) -> dict[str, str]:
    texts = [*launch.argv, *launch.environment.values(), *(file.text or "" for file in files)]
    matches = [match for text in texts for match in PLACEHOLDER.finditer(text)]
    return {_variable(match): _DEFAULTS.get(match.group(1), "127.0.0.1") for match in matches}


def _variables(launch: Launch) -> list[str]:
    return [name for one in launch.credentials for name in one.variables if name not in launch.secret_names]


def _place_credential(one: PlannedCredential) -> list[str]:
    if not one.path:
        words = f"of the credential {one.name}"
        return [f'export {name}="${{{name}:?set it to the key {key} {words}}}"' for name, key in one.variables.items()]
    place = f'"$ATTEMPT_DIR"/{shlex.quote(one.path)}'
    source = f"CREDENTIAL_{re.sub('[^A-Za-z0-9]', '_', one.name)}"
    return [
        f"mkdir -p {place}",
        f'cp -R "${{{source}:?set it to a directory with a file for each key of {one.name}}}"/. {place}',
    ]


def _place(file: PlannedFile) -> list[str]:
    place = f'"$ATTEMPT_DIR"/{shlex.quote(file.path)}'
    folder = f'mkdir -p "$ATTEMPT_DIR"/{shlex.quote(str(PurePosixPath(file.path).parent))}'
    if file.is_tar:
        return [
            f"mkdir -p {place}",
            f'tar -xzf "${{BLOBS:?set it to the directory of the files that distflow sends}}"/{file.blob} -C {place}',
        ]
    if file.text is None:
        return [
            folder,
            f'cp "${{BLOBS:?set it to the directory of the files that distflow sends}}"/{file.blob} {place}',
            f"chmod {file.mode:o} {place}",
        ]
    return [folder, f"printf %s {_word(file.text)} > {place}", f"chmod {file.mode:o} {place}"]
