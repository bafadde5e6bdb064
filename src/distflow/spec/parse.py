"""Load a spec: read and render the file, parse the YAML, check it against the schema, and build a ``WorkflowSpec``.

``load_spec`` takes a path, ``load_spec_text`` a text. If the text can be rendered and parsed, both report all of their
findings at once. Findings of a ``check`` are added if each group has exactly one lead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from posixpath import normpath
from types import MappingProxyType
from typing import Any

from distflow.documents.document import Document, View, path_text
from distflow.documents.document import Path as KeyPath
from distflow.documents.notify import parse_notify
from distflow.documents.problems import Mark, Problem, ProblemsFound, in_document_order, raise_errors
from distflow.documents.quantities import parse_bytes, parse_duration, parse_log_bytes
from distflow.documents.requirements import Requirements
from distflow.documents.schema import load_schema, schema_problems
from distflow.documents.schema import schema_text as _schema_text
from distflow.documents.source import decode, read_text
from distflow.documents.yaml_parser import parse_yaml
from distflow.spec.data import Graph, shared_directory, upstream_of
from distflow.spec.model import GroupSpec, InputSpec, ResourceSpec, Retry, TaskSpec, Timeouts, TopologyRequest, WorkflowSpec
from distflow.spec.names import Namespace, lead_position
from distflow.spec.references import replace_references
from distflow.spec.tasks import (
    check_tokens,
    parse_elastic,
    parse_framework,
    parse_retry,
    parse_strategy_block,
    parse_task,
    replica_names,
    with_launchers,
)
from distflow.spec.template import Rendered, render
from distflow.structs import replace

__all__ = [
    "load_spec",
    "load_spec_text",
    "schema_text",
]


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Pairs = Sequence[tuple[str, str]]
Check = Callable[[WorkflowSpec], Sequence[Problem]]


def _no_check(_: WorkflowSpec) -> Sequence[Problem]:
    """Return no findings."""
    return ()


def load_spec(
    path: str,
    *,
    sets: Pairs = (),
    set_strings: Pairs = (),
    environment_names: Sequence[str] = (),
    stdin_text: str | None = None,
    check: Check = _no_check,
) -> tuple[WorkflowSpec, tuple[Problem, ...]]:
    """Return the spec in the file at ``path``, and its warnings. Raises ``ProblemsFound`` with the findings.

    If ``stdin_text`` is given, it is the spec. ``path`` is then only its name, such as ``-``, and its files are relative to the
    current directory. ``sets`` and ``set_strings`` are the variables of ``--set`` and ``--set-string``. ``environment_names``
    are the names that ``--set-env`` sets, without their values. ``check`` adds the findings of a higher layer. It runs only
    if each group has exactly one lead.
    """
    if stdin_text is not None or path == "-":
        text = decode((stdin_text or "").encode("utf-8", "surrogateescape"), shown=path)
        base_dir = Path.cwd()
    else:
        text = read_text(path)
        base_dir = Path(os.path.abspath(path)).parent
    return load_spec_text(
        text, path, base_dir, sets=sets, set_strings=set_strings, environment_names=environment_names, check=check
    )


def load_spec_text(
    text: str,
    file: str,
    base_dir: Path,
    *,
    sets: Pairs = (),
    set_strings: Pairs = (),
    environment_names: Sequence[str] = (),
    is_rendered: bool = False,
    check: Check = _no_check,
) -> tuple[WorkflowSpec, tuple[Problem, ...]]:
    """Return the spec in ``text``, and its warnings, like ``load_spec``.

    ``file`` is its name in findings. Its ``localpath`` entries and its ``venv`` are relative to ``base_dir``. With
    ``is_rendered``, the text is not a template.
    """
    bad_names = tuple(_bad_variables(environment_names))
    try:
        rendered = Rendered(text=text) if is_rendered else render(text, file, sets=sets, set_strings=set_strings)
        document = parse_yaml(rendered.text, file, rendered.line_map)
    except ProblemsFound as error:
        raise ProblemsFound([*bad_names, *error.problems]) from None
    problems = [*bad_names, *rendered.problems, *document.warnings, *_spec_problems(document)]
    if "default-values" in View(document, ()).keys:
        message = "`default-values` is quoted or indented, so distflow would ignore it"
        hint = "write `default-values:` at the start of a line, without quotes"
        View(document, (), problems).add(message, hint, key="default-values")
    top = View(document, ("workflow",), problems)
    resources = _parse_resources(top)
    groups, found = replace_references(_parse_groups(top, resources, base_dir), environment_names)
    problems += found
    spec = WorkflowSpec(
        name=top.string("name") or "",
        pool=top.string("pool") or None,
        labels=MappingProxyType({key: top.view("labels").string(key) or "" for key in top.view("labels").keys}),
        groups=groups,
        resources=resources,
        max_log=top.parsed("max_log", parse_log_bytes),
        venv=_parse_venv(top, base_dir),
        notify=parse_notify(top, allows_commands=False),
        file=file,
        rendered=rendered.text,
        environment_names=tuple(dict.fromkeys(environment_names)),
        mark=top.key_mark("name"),
    )
    if all(sum(task.lead for task in group.tasks) == 1 for group in groups):
        problems += check(spec)
    raise_errors(in_document_order(problems))
    return spec, in_document_order(problems)


def _parse_venv(top: View, base_dir: Path) -> Requirements | None:
    """Return the requirements that the spec names, and add their findings to those of the spec."""
    named = top.string("venv")
    if named is None:
        return None
    from distflow.documents.requirements_file import read_requirements  # noqa: PLC0415  few specs need it

    try:
        return read_requirements(str(base_dir / os.path.expanduser(named)), named)
    except ProblemsFound as error:
        top.problems.extend(error.problems)
        return None


def _bad_variables(names: Sequence[str]) -> Iterator[Problem]:
    for name in names:
        if not _VARIABLE.fullmatch(name):
            message = f"`{name}` is not a valid name of an environment variable"
            yield Problem(
                where=Mark("--set-env"), message=message, hint="use letters, digits and `_`, not beginning with a digit"
            )


def _parse_groups(top: View, resources: Mapping[str, ResourceSpec], base_dir: Path) -> tuple[GroupSpec, ...]:
    """Return the groups. A task outside of a group gets its own group, named ``<task>-group``."""
    # Groups with their tasks; `alone` are tasks that are written without a group.
    written = [(group, list(group.views("tasks"))) for group in top.views("groups")]
    alone = [] if written else list(top.views("tasks"))
    _check_names(written, alone)
    members = [*(task for _, tasks in written for task in tasks), *alone]
    all_names = {name for task in members for name in (*replica_names(task), task.string("name") or "")}
    timeouts, retry = _parse_timeouts(top, Timeouts()), parse_retry(top, Retry())
    named = [*((group.string("name") or "", tasks) for group, tasks in written), *((None, [task]) for task in alone)]
    graph = Graph(
        [
            (name or next((task.string("name") for task in tasks), "") or "", [(task, replica_names(task)) for task in tasks])
            for name, tasks in named
        ]
    )
    group_of = {
        replica: f"{task.string('name') or ''}-group" if name is None else name
        for name, tasks in named
        for task in tasks
        for replica in replica_names(task)
    }
    found = []
    for position, (group, tasks) in enumerate(written):
        lead = lead_position(group, tasks)
        inputs = [graph.inputs(task, position) for task in tasks]
        specs = with_launchers(group, tasks, _parse_members(tasks, lead, resources, inputs, all_names, base_dir))
        specs = _with_shared(group, specs)
        found.append(
            GroupSpec(
                name=group.string("name") or "",
                tasks=specs,
                barrier=group.flag("barrier") is not False,
                ignore_nonlead_status=group.flag("ignoreNonleadStatus"),
                stop_on_missing_ranks=group.flag("stop_on_missing_ranks"),
                timeouts=_parse_timeouts(group, timeouts),
                retry=parse_retry(group, retry),
                upstream=upstream_of(specs, group_of),
                framework=parse_framework(group),
                strategy=parse_strategy_block(group),
                elastic=parse_elastic(group),
                debug=group.flag("debug") is True,
                mark=group.key_mark("name"),
            )
        )
    for position, task in enumerate(alone):
        if len(replica_names(task)) > 1:
            task.add(
                "`replicas` needs a group, because replicas start and stop together",
                "put the task into `groups: [{name: …, tasks: […]}]`",
                key="replicas",
            )
        specs = _parse_members([task], 0, resources, [graph.inputs(task, position)], all_names, base_dir)
        specs = with_launchers(None, [task], specs)
        found.append(
            GroupSpec(
                name=f"{task.string('name') or ''}-group",
                tasks=specs,
                timeouts=timeouts,
                retry=retry,
                upstream=upstream_of(specs, group_of),
                mark=task.key_mark("name"),
            )
        )
    return tuple(found)


def _with_shared(group: View, tasks: tuple[TaskSpec, ...]) -> tuple[TaskSpec, ...]:
    """Return the tasks of a group, with the directory that they share."""
    shared = shared_directory(group)
    if shared is None:
        return tasks
    for task in tasks:
        for one in task.checkpoints:
            if normpath(one.path.value) == normpath(shared.path.value):
                hint = "remove one of them: `checkpoint` gives each task its own files, `shared` gives all tasks the same"
                group.add(
                    f"`{one.path.value}` is in `shared`, and also a checkpoint of the task `{task.name}`", hint, key="shared"
                )
                return tasks
    return tuple(replace(task, checkpoints=(*task.checkpoints, shared)) for task in tasks)


def _check_names(written: Sequence[tuple[View, Sequence[View]]], alone: Sequence[View]) -> None:
    namespace = Namespace()
    for group, tasks in written:
        if group.string("name"):
            namespace.take(group.string("name") or "", group)
        for task in tasks:
            _take_task(namespace, task)
    for task in alone:
        _take_task(namespace, task)
        if task.string("name"):
            namespace.take(f"{task.string('name')}-group", task, made_from=f"the task `{task.string('name')}`")


def _take_task(namespace: Namespace, task: View) -> None:
    name = task.string("name")
    if not name:
        return
    made_from = f"`{name}` and its replicas" if task.has("replicas") else ""
    for replica in replica_names(task):
        namespace.take(replica, task, made_from=made_from if replica != name else "")


def _parse_members(
    tasks: Sequence[View],
    lead: int | None,
    resources: Mapping[str, ResourceSpec],
    inputs: Sequence[tuple[InputSpec, ...]],
    all_names: set[str],
    base_dir: Path,
) -> tuple[TaskSpec, ...]:
    found: list[TaskSpec] = []
    for position, task in enumerate(tasks):
        if task.flag("lead") and len(replica_names(task)) > 1:
            hint = "make the lead a separate task; if this is the only task, remove `lead`: its first replica then leads"
            task.add("a task with `replicas` cannot be the lead, because a group has exactly one lead", hint, key="lead")
        specs = parse_task(task, leads=position == lead, resources=resources, inputs=inputs[position], base_dir=base_dir)
        check_tokens(task, specs[0], tasks, all_names)
        found += specs
    return tuple(found)


def _parse_timeouts(owner: View, above: Timeouts) -> Timeouts:
    """Return the limits of a group or workflow, which override the limits ``above`` it. Zero means no limit."""
    timeout = owner.view("timeout")

    def seconds(key: str, above_s: float | None) -> float | None:
        own = timeout.parsed(key, parse_duration)
        return above_s if own is None else own or None

    return Timeouts(
        exec_s=seconds("exec_timeout", above.exec_s),
        queue_s=seconds("queue_timeout", above.queue_s),
        hang_s=seconds("hang_timeout", above.hang_s),
    )


def _parse_resources(top: View) -> Mapping[str, ResourceSpec]:
    if not top.has("resources"):
        return MappingProxyType({"default": ResourceSpec(mark=top.key_mark("resources"))})
    entries = top.view("resources")
    return MappingProxyType({name: _parse_resource(entries.view(name), entries.key_mark(name)) for name in entries.keys})


def _parse_resource(entry: View, mark: Mark) -> ResourceSpec:
    return ResourceSpec(
        cpu=entry.whole("cpu"),
        gpu=entry.whole("gpu"),
        memory=entry.parsed("memory", parse_bytes),
        storage=entry.parsed("storage", parse_bytes),
        platform=entry.string("platform") or None,
        nodes_excluded=tuple(text.value for text in entry.texts("nodesExcluded")),
        topology=_parse_topology(entry),
        mark=mark,
    )


def _parse_topology(resource: View) -> tuple[TopologyRequest, ...]:
    found: list[TopologyRequest] = []
    for entry in resource.views("topology"):
        near = TopologyRequest(
            key=entry.string("key") or "",
            group=entry.string("group") or "default",
            required=entry.string("requirementType") != "preferred",
        )
        if any(other.key == near.key for other in found):
            entry.add(
                f"`topology` has the key `{near.key}` twice",
                "keep one entry: a task can belong to only one group for each key",
                key="key",
            )
        found.append(near)
    return tuple(found)


# -- the schema -------------------------------------------------------------------------------------------------------

_PACKAGE = "distflow.spec"
_FILE = "workflow.schema.json"


def schema_text() -> str:
    """Return the text of the published schema, which ``distflow schema`` prints."""
    return _schema_text(_PACKAGE, _FILE)


def _spec_problems(document: Document) -> tuple[Problem, ...]:
    """Return a problem for each difference between a rendered spec and the schema."""
    return schema_problems(document, load_schema(_PACKAGE, _FILE), _explain)


def _explain(keyword: str, path: KeyPath, value: Any, rule: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a better message and hint for findings whose default message would not help."""
    if keyword == "oneOf":
        return _one_of(path, value, rule)
    if keyword == "type" and path and path[-1] == "args" and isinstance(value, str):
        hint = 'write a list with one item for each word, such as ["--lr", "0.1"]'
        return f"`{path_text(path)}` must be a list of strings, not one string", hint
    if keyword == "additionalProperties" and path[1:2] == ("notify",) and "command" in value:
        hint = "move the entry to `notify` of distflow.yaml, or of your profile (`distflow profile set notify`)"
        return "`notify` of a spec cannot have a `command`, because commands run on the submitting machine", hint
    if path[-1:] == ("exitActions",) and isinstance(value, str) and value.upper() == "RESTART":
        return "`RESTART` is not an exit action", "write `RESCHEDULE`: the group is retried as often as its `retry` allows"
    if path == ("version",):
        return "`version` must be 2", "write `version: 2`, or remove the line: 2 is the only version of the language"
    if keyword == "required" and not path and isinstance(value, Mapping) and {"tasks", "groups"} & set(value):
        return "the document has no `workflow`", "indent `name`, `tasks` and all other keys below `workflow:`"
    return None


def _one_of(path: KeyPath, value: Any, rule: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return message and hint for a mapping that needs one of two keys.

    The message is empty, which omits the finding, for values that OSMO accepts and for a value that is not a mapping. The
    latter is reported as a wrong type.
    """
    if not isinstance(value, Mapping):
        return "", ""
    one, other = (choice["required"][0] for choice in rule["oneOf"])
    name = path_text(path)
    if one == "contents":
        if one in value and other in value:
            return f"`{name}` has both `contents` and `localpath`", "keep one: the text itself, or the path of a file"
        return (
            f"`{name}` has neither `contents` nor `localpath`",
            "write the text itself (`contents: |`), or the path of a file (`localpath:`)",
        )
    if value.get(one) and value.get(other):
        return (
            "`workflow` has both `tasks` and `groups`",
            "keep `groups`, and move the tasks into a group",
        )
    if one in value and other in value:
        return (
            ("", "")
            if value.get(one) or value.get(other)
            else ("`workflow` has no tasks", "add `tasks`, or `groups` with tasks")
        )
    return (
        "`workflow` has neither `tasks` nor `groups`",
        "add `tasks`, or `groups` (tasks of a group start and stop together)",
    )
