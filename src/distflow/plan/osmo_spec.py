"""Write a spec in the language of OSMO, without the keys that only distflow has (``x-distflow`` in the schema).

If it is enough to remove keys, to add ``ignoreNonleadStatus`` and to replace ``{{master_port}}``, the result is the spec's own
file, with its template, comments and order. Otherwise distflow writes the rendered spec again. Each replica then becomes a
task, and the commands and variables that distflow would add for a world become part of its tasks.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec import Struct, field

from distflow.documents.document import Document, Path
from distflow.documents.problems import Mark, Problem, ProblemsFound, Severity
from distflow.documents.text import few
from distflow.documents.urls import parse_url
from distflow.documents.yaml_parser import parse_yaml
from distflow.documents.yaml_writer import yaml_text
from distflow.layout.ranks import TaskRanks, WorldLayout
from distflow.layout.strategy.model import group_strategy
from distflow.plan.compile import strategy_environment
from distflow.plan.environment import DEBUG_VARIABLES, task_environment
from distflow.plan.frameworks import StartCommand, WorldTask, start_command
from distflow.plan.model import PLACEHOLDER
from distflow.plan.tokens import rank_numbers
from distflow.spec.model import GroupSpec, TaskSpec, WorkflowSpec
from distflow.spec.template import render
from distflow.spec.tokens import RANK_TOKENS

__all__ = ["OsmoSpec", "osmo_spec"]

_PORT = 29500
"""The default port of a world. Each task of OSMO has its own address, so several worlds can use this port."""
_LEFT_OUT: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "retry": ("`retry` is left out", "an administrator of OSMO sets the number of retries"),
        "max_log": ("`max_log` is left out", ""),
        "venv": ("`venv` is left out", "install its packages in the image"),
        "notify": ("`notify` is left out", "use OSMO's own notifications: `osmo profile set notifications`"),
        "hang_timeout": ("`hang_timeout` is left out", ""),
        "timeout": ("`timeout` of a group is left out", "OSMO has only a timeout of the workflow"),
        "shared": ("`shared` is left out", "use `checkpoint` with a URL"),
        "elastic": ("`elastic` is left out", ""),
        "stop_on_missing_ranks": ("`stop_on_missing_ranks` is left out", ""),
        "output_dir": ("`output_dir` is left out", "let the command write to {{output}}"),
        "exclude": ("`exclude` is left out", ""),
    }
)
"""Keys without a counterpart in OSMO, each with its warning and the hint."""
_LEFT_OUT_IN_GROUP = ("timeout", "retry", "shared", "elastic", "stop_on_missing_ranks")
_CONVERTED_IN_GROUP = ("launcher", "framework", "debug", "strategy")
_CONVERTED_IN_TASK = ("launcher", "ranks", "replicas")
_RANK_TOKEN = re.compile(r"\{\{[ \t]*(" + "|".join(RANK_TOKENS) + r")[ \t]*\}\}")
_SPACED = re.compile(r"\{\{[ \t]*(uuid|workflow_id|output|(?:input|host)[ \t]*:[ \t]*[A-Za-z0-9_-]+)[ \t]*\}\}")
_NOT_A_TOKEN = re.compile(r"\{\{(?!(?:uuid|workflow_id|output|(?:input|host):[A-Za-z0-9_-]+)\}\})|\{[%#]")
_SCHEMES = ("s3", "gs", "azure")
"""The schemes of URLs that distflow and OSMO have in common."""


class OsmoSpec(Struct, frozen=True, kw_only=True):
    """A spec in the language of OSMO, and warnings about parts that are left out, or that OSMO runs only after a change."""

    text: str
    warnings: tuple[Problem, ...]


def osmo_spec(spec: WorkflowSpec, worlds: Mapping[str, WorldLayout], template: str | None = None) -> OsmoSpec:
    """Return a spec in the language of OSMO.

    Args:
        spec: The spec.
        worlds: The world of each group that has ranks.
        template: The text of the spec's file before rendering, if no option such as ``--set`` changes its variables. Default:
            the rendered document.

    """
    document = parse_yaml(spec.rendered, spec.file)
    notes = _Notes(spec.file)
    wanted = _Conversion(spec, worlds, document, notes).workflow()
    warnings = notes.problems
    text = _edited(spec.rendered if template is None else template, spec.file, wanted)
    if text is None:
        text = _dumped(_Conversion(spec, worlds, document, notes, is_written_again=True).workflow())
    return OsmoSpec(text=_heading(warnings) + text, warnings=warnings)


def _heading(warnings: Sequence[Problem]) -> str:
    lines = ["# Warnings of `distflow workflow export`, which wrote this spec for OSMO:"] if warnings else []
    for one in warnings:
        text = one.message + (f" ({one.hint})" if one.hint else "")
        # A comment may be rendered as a template, too.
        text = text.replace("{{", "").replace("}}", "")
        lines += textwrap.wrap(text, 118, initial_indent="# * ", subsequent_indent="#   ", break_on_hyphens=False)
    return "\n".join([*lines, "#\n"]) if lines else ""


def _dumped(document: Mapping[str, Any]) -> str:
    """Return a document as YAML in which OSMO replaces only its own tokens."""
    return _NOT_A_TOKEN.sub(lambda match: f"{{{{ '{match[0]}' }}}}", yaml_text(document))


class _Notes(Struct):
    """The parts that are left out or different, with the tasks or groups that have them."""

    file: str
    found: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def add(self, message: str, hint: str = "", name: str = "") -> None:
        names = self.found.setdefault((message, hint), [])
        if name and name not in names:
            names.append(name)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(
            Problem(
                where=Mark(self.file),
                severity=Severity.WARNING,
                message=(f"{few(names)}: " if names else "") + message,
                hint=hint,
            )
            for (message, hint), names in self.found.items()
        )


# -- the same file with fewer keys ------------------------------------------------------------------------------------


def _edited(text: str, file: str, wanted: Mapping[str, Any]) -> str | None:
    """Return the file with a few edits (see the module's docstring); ``None`` if that does not result in ``wanted``."""
    try:
        rendered = render(text, file)
        document = parse_yaml(rendered.text, file, rendered.line_map)
    except ProblemsFound:
        return None
    lines = text.split("\n")
    for path in _missing(_without_defaults(document.value), wanted, ()):
        _remove_key(lines, document.key_mark_at(path))
    for path in _missing(wanted, _without_defaults(document.value), ()):
        if path[-1] == _IGNORE_NONLEAD:
            mark = document.key_mark_at((*path[:-1], "tasks"))
            lines[mark.line - 1] = f"{' ' * (mark.column - 1)}{_IGNORE_NONLEAD}: false\n{lines[mark.line - 1]}"
    changed = "\n".join(line for line in lines if line is not _GONE)
    changed = re.sub(r"\{\{[ \t]*master_port[ \t]*\}\}", str(_PORT), changed)
    try:
        return changed if _without_defaults(parse_yaml(render(changed, file).text, file).value) == wanted else None
    except ProblemsFound:
        return None


_GONE = "\0"
_IGNORE_NONLEAD = "ignoreNonleadStatus"


def _remove_key(lines: list[str], mark: Mark) -> None:
    """Remove the lines of a key and of its value, if the key begins its line."""
    first = lines[mark.line - 1]
    indent = mark.column - 1
    if first is _GONE or first[:indent].strip():
        return
    lines[mark.line - 1] = _GONE
    for number in range(mark.line, len(lines)):
        line = lines[number]
        depth = len(line) - len(line.lstrip())
        # The items of a list may have the indentation of its key.
        if line.strip() and (depth < indent or (depth == indent and not line.lstrip().startswith("- "))):
            return
        if line.strip():
            lines[number] = _GONE


def _missing(value: Any, wanted: Any, path: Path) -> Iterator[Path]:
    """Yield the paths of the keys that only ``value`` has."""
    if isinstance(value, dict) and isinstance(wanted, dict):
        for key, inner in value.items():
            if key in wanted:
                yield from _missing(inner, wanted[key], (*path, key))
            else:
                yield (*path, key)
    elif isinstance(value, list) and isinstance(wanted, list) and len(value) == len(wanted):
        for number, (one, other) in enumerate(zip(value, wanted, strict=True)):
            yield from _missing(one, other, (*path, number))


def _without_defaults(value: Any) -> Any:
    """Return the document without ``default-values``."""
    return {key: inner for key, inner in value.items() if key != "default-values"} if isinstance(value, dict) else value


# -- the conversion ---------------------------------------------------------------------------------------------------


class _Conversion:
    """The conversion of one spec."""

    def __init__(
        self,
        spec: WorkflowSpec,
        worlds: Mapping[str, WorldLayout],
        document: Document,
        notes: _Notes,
        *,
        is_written_again: bool = False,
    ) -> None:
        # When the document is written again, values of `environment` are strings. Otherwise, a value `on`, which YAML parses as
        # a Boolean, would be written as `true`.
        self._is_written_again = is_written_again
        self._spec, self._worlds, self._document, self._notes = spec, worlds, document, notes
        self._tasks = [(group, task) for group in spec.groups for task in group.tasks]

    def workflow(self) -> dict[str, Any]:
        """Return the whole document."""
        document: dict[str, Any] = _without_defaults(self._document.value)
        workflow = self._without(document["workflow"], ("retry", "max_log", "venv", "notify"))
        if isinstance(workflow.get("timeout"), dict):
            workflow["timeout"] = self._without(workflow["timeout"], ("hang_timeout",))
            if not workflow["timeout"]:
                del workflow["timeout"]
        if "groups" in workflow:
            workflow["groups"] = [self._group(raw, number) for number, raw in enumerate(workflow["groups"])]
        if "tasks" in workflow:
            workflow["tasks"] = self._replicas(workflow["tasks"], ("workflow", "tasks"))
        if len(self._tasks) > _MOST_TASKS:
            self._notes.add(f"OSMO's default limit is {_MOST_TASKS} tasks, but this workflow has {len(self._tasks)}")
        return {**document, "workflow": workflow}

    def _without(self, raw: Mapping[str, Any], keys: Sequence[str], name: str = "") -> dict[str, Any]:
        for key in (key for key in raw if key in keys):
            self._notes.add(*_LEFT_OUT[key], name=name)
        return {key: value for key, value in raw.items() if key not in keys}

    def _group(self, raw: Mapping[str, Any], number: int) -> dict[str, Any]:
        group = self._spec.groups[number]
        found = self._without(raw, _LEFT_OUT_IN_GROUP, group.name)
        found = {key: value for key, value in found.items() if key not in _CONVERTED_IN_GROUP}
        if group.name in self._worlds and group.ignore_nonlead_status is None and len(group.tasks) > 1:
            # `false` is distflow's default for a world. With OSMO's default, tasks would wait for the ranks of a failed task.
            tasks = found.pop("tasks")
            found |= {_IGNORE_NONLEAD: False, "tasks": tasks}
        found["tasks"] = self._replicas(raw["tasks"], ("workflow", "groups", number, "tasks"))
        return found

    def _replicas(self, raw_tasks: Sequence[Mapping[str, Any]], path: Path) -> list[dict[str, Any]]:
        """Return the tasks of a list, with each replica as a task."""
        return [
            self._task(raw, group, task, (*path, number))
            for number, raw in enumerate(raw_tasks)
            for group, task in self._tasks
            if task.written_name == str(raw["name"])
        ]

    def _task(self, raw: Mapping[str, Any], group: GroupSpec, task: TaskSpec, path: Path) -> dict[str, Any]:
        found = self._without(raw, ("output_dir",), task.name)
        found = {key: value for key, value in found.items() if key not in _CONVERTED_IN_TASK}
        if task.image is None:
            self._notes.add("OSMO requires an `image`", "add it to the task", task.name)
        world = self._worlds.get(group.name)
        ranks = world.of(task.name) if world is not None and any(one.task == task.name for one in world.tasks) else None
        fill = _filler(group, world, ranks)
        started = StartCommand(argv=tuple(fill(word.value) for word in (*task.command, *task.args)))
        if world is not None and ranks is not None:
            started = self._started(group, task, world, ranks, started.argv, fill)
        words = started.argv
        if list(words) == [fill(word.value) for word in (*task.command, *task.args)] and isinstance(raw["command"], list):
            found = {key: _mapped(value, fill) if key in ("command", "args") else value for key, value in found.items()}
        else:
            found["command"] = list(words)
            found.pop("args", None)
        found["name"] = task.name
        if task.lead and len(group.tasks) > 1 and not found.get("lead"):
            found = {"name": task.name, "lead": True, **{key: value for key, value in found.items() if key != "lead"}}
        environment = {name: self._written(path, name, fill(text.value)) for name, text in task.environment.items()}
        variables = self._variables(group, task, ranks, started.environment)
        environment = {**{key: _filled(value, fill) for key, value in variables.items()}, **environment}
        if environment or "environment" in found:
            found["environment"] = environment
        files = self._files(found.get("files") or (), task, fill)
        files += [
            {"path": _filled(f"@@ATTEMPT_DIR@@/{one.path}", fill), "contents": _filled(one.text or "", fill)}
            for one in started.files
        ]
        if files or "files" in found:
            found["files"] = files
        self._check_data(task)
        kept = ("command", "args", "environment", "files", "name")
        return {key: value if key in kept else _mapped(value, fill) for key, value in found.items()}

    def _written(self, path: Path, name: str, text: str) -> Any:
        """Return a variable's text, or its value in the document, which may be a number.

        The value is returned if the text is unchanged and the document is not written again.
        """
        place = (*path, "environment", name)
        is_kept = self._document.raw_at(place) == text and not self._is_written_again
        return self._document.value_at(place) if is_kept else text

    def _started(
        self,
        group: GroupSpec,
        task: TaskSpec,
        world: WorldLayout,
        ranks: TaskRanks,
        argv: tuple[str, ...],
        fill: Callable[[str], str],
    ) -> StartCommand:
        """Return the command of a task of a world, with the files and variables of its framework, launcher and strategy."""
        resource = self._spec.resources[task.resource]
        given = {name: text.value for name, text in task.environment.items()}
        framework = group.framework.value if group.framework is not None else None
        name = group.name
        started = start_command(
            framework,
            WorldTask(group=name, world=world, ranks=ranks, argv=argv, resource=resource, launcher=task.launcher, given=given),
        )
        if task.launcher.kind == "spawn" or group.strategy is not None or framework == "ray":
            self._notes.add(
                "the image needs distflow, which the command or the script uses", "install distflow in the image", task.name
            )
        strategy, _ = group_strategy(group, world)
        variables = {**strategy_environment(strategy), **started.environment}
        return StartCommand(
            argv=tuple(_filled(word, fill) for word in started.argv),
            environment=variables,
            files=started.files,
        )

    def _variables(self, group: GroupSpec, task: TaskSpec, ranks: TaskRanks | None, given: Mapping[str, str]) -> dict[str, str]:
        """Return ``given`` and other variables that distflow would set.

        These are the ``DISTFLOW_*`` variables that the task's texts use, those of ``debug``, and those of the task's ranks. The
        variables of ranks are left out if the spec passes ranks and addresses itself.
        """
        world = self._worlds.get(group.name) if ranks is not None else None
        resource = self._spec.resources[task.resource]
        everything = task_environment(
            group=group.name, task=task.name, ranks=ranks, world=world, resource=resource, given=given, debug=group.debug
        )
        needs_rank_variables = world is not None and (world.style == "ranks" or not _knows_addresses(group))
        found = {**given}
        for name, value in everything.items():
            is_used = name.startswith("DISTFLOW_") and any(re.search(rf"\b{name}\b", text) for text in _texts(task))
            if re.search("@@(IFNAME|GPU_IDS|NODE)@@", value):
                if is_used:
                    self._notes.add(f"OSMO does not set the variable `{name}`", name=task.name)
            elif is_used or ((needs_rank_variables or name in DEBUG_VARIABLES) and name not in _NOT_OF_A_WORLD):
                found[name] = value
        return found

    def _files(self, raw: Sequence[Mapping[str, Any]], task: TaskSpec, fill: Callable[[str], str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for entry, file in zip(raw, task.files, strict=True):
            if file.is_directory:
                self._notes.add(
                    f"the directory `{entry['localpath']}` is left out",
                    "OSMO sends only single files: put the directory into the image",
                    task.name,
                )
                continue
            found.append(_mapped(self._without(entry, ("exclude",), task.name), fill))
        return found

    def _check_data(self, task: TaskSpec) -> None:
        urls = [one.url for one in (*task.url_inputs, *task.url_outputs) if one.url] + [
            one.url for one in task.checkpoints if one.url
        ]
        for scheme in dict.fromkeys(parse_url(url).scheme for url in urls):
            if scheme not in _SCHEMES:
                remedy = (
                    "write azure://ACCOUNT/CONTAINER/PATH" if scheme == "az" else "move the data to s3://, gs:// or azure://"
                )
                self._notes.add(f"OSMO has no URLs that begin with `{scheme}://`", remedy, task.name)
        if any(one.dataset for one in (*task.url_inputs, *task.url_outputs)):
            self._notes.add("OSMO removed datasets in its client 6.4", "use `url`", task.name)


_MOST_TASKS = 20


def _mapped(value: Any, fill: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return fill(value)
    if isinstance(value, list):
        return [_mapped(one, fill) for one in value]
    return {key: _mapped(one, fill) for key, one in value.items()} if isinstance(value, dict) else value


def _filler(group: GroupSpec, world: WorldLayout | None, ranks: TaskRanks | None) -> Callable[[str], str]:
    """Return the function that replaces distflow's own tokens in a text of a task by numbers and OSMO's tokens."""
    master = world.master if world is not None else group.lead.name
    values = {"master_addr": f"{{{{host:{master}}}}}", "master_port": str((world.port if world is not None else None) or _PORT)}
    values |= rank_numbers(ranks, world)

    def fill(text: str) -> str:
        text = _RANK_TOKEN.sub(lambda match: values.get(match[1], match[0]), text)
        return _SPACED.sub(lambda match: "{{" + re.sub(r"[ \t]", "", match[1]) + "}}", text)

    return fill


def _filled(text: str, fill: Callable[[str], str]) -> str:
    """Return a text of the plan with OSMO's tokens and fixed values instead of placeholders."""

    def token(match: re.Match[str]) -> str:
        name, argument = match.group(1), match.group(2)
        if argument is not None:
            return f"{{{{host:{argument}}}}}"
        return _TOKENS[name]

    return fill(PLACEHOLDER.sub(token, text.replace("@@ATTEMPT_DIR@@/output", "{{output}}")))


_TOKENS = MappingProxyType(
    {
        "MASTER_ADDR": "{{master_addr}}", "MASTER_PORT": "{{master_port}}", "WORKFLOW_ID": "{{workflow_id}}",
        "ATTEMPT_DIR": "/tmp/distflow", "RETRY_ID": "0",  # noqa: S108  in a container of its own
    }
)  # fmt: skip


def _knows_addresses(group: GroupSpec) -> bool:
    """Return whether a text of a group contains the address of a task.

    If the spec also passes the ranks itself, its tasks need no variables of ranks.
    """
    return any("{{host:" in text.replace(" ", "") for task in group.tasks for text in _texts(task))


def _texts(task: TaskSpec) -> list[str]:
    texts = [text.value for text in (*task.command, *task.args, *task.environment.values())]
    return texts + [file.contents.value for file in task.files if file.contents is not None]


_NOT_OF_A_WORLD = frozenset(
    {
        "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "DISTFLOW_WORKFLOW_ID", "DISTFLOW_GROUP", "DISTFLOW_TASK", "DISTFLOW_RETRY_ID",
        "DISTFLOW_OUTPUT",
    }
)  # fmt: skip
"""Variables that are not part of a world. The conversion adds the ``DISTFLOW_*`` among them only to tasks whose texts use them,
and never adds the others."""
