"""One entry of ``tasks`` to its typed form, and replicas to tasks of their own."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from distflow.documents.document import Text, View
from distflow.documents.problems import Severity
from distflow.documents.text import did_you_mean
from distflow.spec.credentials import parse_credentials
from distflow.spec.data import checkpoints, url_inputs, url_outputs
from distflow.spec.exits import parse_exit_actions
from distflow.spec.files import parse_files
from distflow.spec.inputs import earlier_inputs
from distflow.spec.model import InputSpec, Ranks, TaskSpec
from distflow.spec.task_warnings import notice_task, notice_variables, output_words
from distflow.spec.tokens import TOKEN_NAMES, find_tokens

__all__ = ["check_tokens", "parse_task", "replica_names"]

_DEFAULT = "default"


def replica_names(task: View) -> tuple[str, ...]:
    """Return the names of the tasks that an entry stands for; more than its own name when it has ``replicas``."""
    name, count = task.string("name") or "", _replicas(task)
    return (name,) if count is None else tuple(f"{name}-{number}" for number in range(count))


def parse_task(
    task: View, *, leads: bool, resources: Container[str], inputs: tuple[InputSpec, ...], base_dir: Path
) -> tuple[TaskSpec, ...]:
    """Return the tasks that an entry stands for; with ``leads`` the first of them is the lead."""
    notice_task(task)
    notice_variables(task)
    names = replica_names(task)
    first = TaskSpec(
        name=names[0],
        written_name=task.string("name") or "",
        lead=leads,
        command=task.texts("command"),
        args=task.texts("args"),
        image=task.text("image"),
        mounts=_mounts(task),
        privileged=task.flag("privileged") is True,
        environment=_environment(task),
        files=parse_files(task, base_dir),
        inputs=inputs,
        url_inputs=url_inputs(task),
        earlier_inputs=earlier_inputs(task),
        checkpoints=checkpoints(task),
        credentials=parse_credentials(task),
        resource=_resource(task, resources),
        exit_actions=parse_exit_actions(task),
        ranks=_ranks(task),
        replica=None if _replicas(task) is None else 0,
        outputs=output_words(task),
        url_outputs=url_outputs(task),
        mark=task.key_mark("name"),
    )
    return (first, *(replace(first, name=name, lead=False, replica=number) for number, name in enumerate(names) if number))


def _replicas(task: View) -> int | None:
    count = task.whole("replicas")
    return count if count is not None and 1 <= count <= 4096 else None


def _mounts(task: View) -> tuple[Text, ...]:
    found = task.texts("volumeMounts")
    for text in found:
        parts = text.value.split(":")
        if len(parts) > 2 or not all(part.startswith("/") for part in parts):
            hint = "write a directory of the node, or two: `/data` or `/data:/mnt/data`"
            task.add(f"`{text.value}` is not a valid entry of `volumeMounts`", hint, where=text.mark_at(0))
    return found


def _environment(task: View) -> Mapping[str, Text]:
    names = task.view("environment").keys
    found = {name: task.document.text_at((*task.path, "environment", name)) for name in names}
    return MappingProxyType({name: text for name, text in found.items() if text is not None})


def _resource(task: View, resources: Container[str]) -> str:
    name = task.string("resource")
    if name is not None and name not in resources:
        known = resources if isinstance(resources, Mapping) else ()
        task.add(
            f"there is no resource `{name}`",
            did_you_mean(name, known, what="resources") if known else "define it in `workflow.resources`",
            key="resource",
        )
    if name is None and _DEFAULT not in resources:
        known = resources if isinstance(resources, Mapping) else ()
        hint = f"add `resource:` with one of {', '.join(f'`{entry}`' for entry in known)}, or define a resource named `default`"
        task.add(
            f"the task `{task.string('name')}` names no resource, and `workflow.resources` has no `default`", hint, key="name"
        )
    return name or _DEFAULT


def _ranks(task: View) -> Ranks | None:
    if "ranks" not in task.keys:
        return None
    ranks = task.view("ranks")
    if ranks.has("offset") and len(replica_names(task)) > 1:
        ranks.add(
            "`offset` cannot be given together with `replicas`", "remove it: the offsets of replicas are computed", key="offset"
        )
    return Ranks(
        offset=ranks.whole("offset"),
        size=ranks.whole("size"),
        world_size=ranks.whole("world_size"),
        mark=task.key_mark("ranks"),
        marks=MappingProxyType({key: ranks.key_mark(key) for key in ranks.keys}),
    )


def check_tokens(task: View, spec: TaskSpec, group: Sequence[View], elsewhere: Container[str]) -> None:
    """Find tokens that nothing will fill: misspelt ones, and hosts that are not in the task's group.

    ``elsewhere`` holds the names of the tasks of all groups.
    """
    hosts = {name: member.string("name") or "" for member in group for name in replica_names(member)}
    for text in _texts(spec):
        for token in find_tokens(text.value):
            message, hint = "", ""
            if token.name == "host":
                message, hint = _host_finding(token.argument, hosts, elsewhere)
            elif token.name == "input":
                message, hint = _input_finding(token.argument, spec)
            elif token.name not in TOKEN_NAMES or token.argument is not None:
                shown = token.name if token.argument is None else f"{token.name}:{token.argument}"
                message = f"{{{{{shown}}}}} is not a token of distflow, and would stay as it is"
                near = did_you_mean(token.name, TOKEN_NAMES, what="tokens")
                hint = f"{near}; text with braces of its own goes into a file sent with `localpath`"
            if message:
                severity = Severity.WARNING if _is_in_comment(text.value, token.offset) else Severity.ERROR
                task.add(message, hint, where=text.mark_at(token.offset), severity=severity)


def _is_in_comment(text: str, offset: int) -> bool:
    """Return whether a `#` that begins a word stands before the offset, on its line: a comment for shells and Python."""
    return re.search(r"(?:^|\s)#", text[text.rfind("\n", 0, offset) + 1 : offset]) is not None


def _host_finding(name: str | None, hosts: Mapping[str, str], elsewhere: Container[str]) -> tuple[str, str]:
    if name is None:
        return "{{host}} names no task", "write {{host:<task>}} with a task of the same group"
    if name in hosts:
        return "", ""
    said = f"{{{{host:{name}}}}} names no task of this group"
    if name in hosts.values():
        return f"{said}: `{name}` has replicas", f"name one of them, such as {{{{host:{name}-0}}}}"
    if name in elsewhere:
        return (
            f"{said}: `{name}` is in another group",
            "groups do not run at the same time for certain; put both tasks into one group",
        )
    return said, did_you_mean(name, hosts, what="tasks")


def _input_finding(argument: str | None, spec: TaskSpec) -> tuple[str, str]:
    known = [name for one in spec.inputs for name in (str(one.position), one.task)]
    known += [str(one.position) for one in spec.url_inputs]
    known += [name for one in spec.earlier_inputs for name in (str(one.position), one.task)]
    if argument in known:
        return "", ""
    said = f"{{{{input:{argument or 'N'}}}}}"
    if not known:
        return f"{said}: the task has no `inputs`", "add `inputs: [{task: …}]` or `inputs: [{url: …}]`"
    return f"{said} names no input of this task", did_you_mean(argument or "", known, what="inputs")


def _texts(spec: TaskSpec) -> Iterator[Text]:
    yield from (*spec.command, *spec.args, *spec.environment.values())
    for file in spec.files:
        yield file.path
        if file.contents is not None:
            yield file.contents
