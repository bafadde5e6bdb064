"""Drafts of specs: read a job from a command line, and write it as a spec with comments.

``distflow run`` submits such a spec, and ``distflow init`` writes it to a file, so both describe a job in the same way.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from distflow.documents.text import did_you_mean
from distflow.errors import InputError
from distflow.layout.checks.launchers import PythonCommand, python_command
from distflow.pools.model import Node
from distflow.structs import replace

__all__ = [
    "Draft",
    "HomeIncluded",
    "complete_draft",
    "draft_command",
    "draft_torchrun",
    "excluded_files",
    "name_of",
    "project_directory",
    "spec_text",
]


class Draft(Struct, frozen=True, kw_only=True):
    """One job on equal nodes. ``nodes``, ``ranks`` and ``gpus`` are ``None`` if the command line does not contain them."""

    name: str
    command: tuple[str, ...]
    launcher: str = "command"
    """``torchrun`` starts the ranks, which run a Python script or module. ``command`` runs any command once on each node."""
    nodes: int | None = None
    ranks: int | None = None
    """Processes on each node."""
    ranks_written: str = ""
    """The value of torchrun's ``--nproc_per_node`` if it is not a number, such as ``gpu``."""
    gpus: int | None = None
    """GPUs on each node. 0 hides all GPUs. With ``None``, no GPUs are reserved, and the job sees all of them."""
    max_restarts: int = 0
    project: str | None = "."
    """The directory to send; ``None``: no files. Relative to the working directory, or in a written file, to the file."""
    exclude: tuple[str, ...] = ()
    """Patterns, as in a ``.gitignore``, for files of the project that are not sent."""
    output_dir: str | None = "outputs"
    environment: Mapping[str, str] = field(default_factory=dict)
    exec_timeout: str = ""
    resources: Mapping[str, str] = field(default_factory=dict)
    """Further resources of each node, such as ``memory``."""
    setup: str = ""
    """Shell commands that prepare a node. They are an option of `submit` and not a part of the spec."""
    notes: tuple[str, ...] = ()
    """Parts that are not translated, behave differently or are missing."""


class HomeIncluded(InputError):
    """The home directory would be sent. The hint does not name ``--project``, because not all commands have it."""


def draft_command(words: Sequence[str], *, folder: Path, project: Path | None = None, must_exist: bool = True) -> Draft:
    """Return the draft of a command line. Numbers that it does not contain are ``None``; ``complete_draft`` finds them.

    Args:
        words: A script (``train.py --lr 0.1``), ``torchrun`` with its options, or any other program.
        folder: The working directory, to which paths are relative.
        project: The directory to send. Default: ``folder``, or for a script elsewhere, its git repository or directory.
        must_exist: Whether a script that does not exist is an error. Otherwise it becomes a note.

    Raises:
        InputError: if the command is empty, is a spec or runs torchrun without a script, if the script does not exist or is
            not in the project, or if ``project`` is not a directory.
        HomeIncluded: if the default of ``project`` contains the home directory.

    """
    if not words:
        raise InputError("there is no command to run", hint="name a script (`train.py`), or any command after `--`")
    if words[0].endswith((".yaml", ".yml")):
        raise InputError(f"`{words[0]}` is a spec, not a command", hint=f"distflow submit {shlex.quote(words[0])}")
    draft = draft_torchrun(words) or _draft_python(words) or Draft(name=name_of(words[0]), command=tuple(words))
    python = python_command(draft.command)
    if not isinstance(python, PythonCommand) or python.is_module:
        return _with_project(draft, project_directory(folder, None, project), folder)
    if not must_exist and not os.path.isfile(folder / python.target):
        note = f"the script `{python.target}` does not exist in the project"
        return replace(_with_project(draft, project_directory(folder, None, project), folder), notes=(*draft.notes, note))
    return _with_script(draft, python.target, folder, project)


def _draft_python(words: Sequence[str]) -> Draft | None:
    """Return the draft of a Python script or module, or ``None`` for any other command."""
    python = python_command(words)
    if not isinstance(python, PythonCommand):
        return None
    name = python.target.rpartition(".")[2] if python.is_module else python.target
    command = ("python3", *words) if words[0].endswith(".py") else tuple(words)
    return Draft(name=name_of(name), command=command, launcher="torchrun")


def _with_script(draft: Draft, target: str, folder: Path, project: Path | None) -> Draft:
    script = Path(os.path.abspath(folder / target))
    if not os.path.isfile(script):  # ``Path.is_file`` raises an error for a path that cannot be inspected
        scripts = [path.name for path in folder.glob("*.py")]
        hint = did_you_mean(target, scripts, what="Python scripts") if scripts else f"relative paths are relative to `{folder}`"
        problem = "is a directory" if os.path.isdir(script) else "does not exist"
        raise InputError(f"the script `{target}` {problem}", hint=hint)
    root = project_directory(folder, script, project)
    if not script.is_relative_to(root):
        raise InputError(
            f"the script `{target}` is not in the project `{root}`", hint="give --project a directory that contains it"
        )
    moved = target if root == folder and not os.path.isabs(target) else script.relative_to(root).as_posix()
    command = tuple(moved if word == target else word for word in draft.command)
    return _with_project(replace(draft, command=command), root, folder)


def project_directory(folder: Path, script: Path | None, given: Path | None) -> Path:
    """Return the directory to send: ``given``, or else ``folder``. For a script elsewhere: its git repository or directory.

    Raises:
        InputError: if ``given`` is not a directory.
        HomeIncluded: if the default is or contains the home directory.

    """
    if given is not None:
        root = Path(os.path.abspath(folder / given))
        if not os.path.isdir(root):
            raise InputError(f"the project `{given}` is not a directory")
        return root
    root = folder
    if script is not None and not script.is_relative_to(folder):
        root = next((one for one in script.parents if os.path.exists(one / ".git")), script.parent)
    home = Path.home()
    if root == home or root in home.parents:
        sent = "of your home directory" if root == home else f"in `{root}`, including your home directory,"
        raise HomeIncluded(f"all files {sent} would be sent to the nodes", hint="change to the directory of your project")
    return root


def _with_project(draft: Draft, root: Path, folder: Path) -> Draft:
    """Return a draft that sends ``root`` without its virtual environments and the results of earlier runs."""
    return replace(draft, project=os.path.relpath(root, folder), exclude=excluded_files(root, draft.output_dir))


def excluded_files(root: Path, output_dir: str | None) -> tuple[str, ...]:
    """Return the patterns for files of a project that are not sent."""
    environments = sorted(f"/{path.parent.name}" for path in root.glob("*/pyvenv.cfg") if path.parent.name != ".venv")
    output = [f"/{output_dir}"] if output_dir is not None else []
    return (*output, ".venv", *environments, "__pycache__")


def name_of(program: str) -> str:
    """Return a valid name of a workflow for the path of a program, script or spec."""
    stem = re.sub(r"\.(py|sh|ya?ml)$", "", os.path.basename(program.rstrip("/")))
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")[:50].rstrip("-_")
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")


def complete_draft(
    draft: Draft,
    nodes: Sequence[Node],
    *,
    count: int | None = None,
    gpus: int | None = None,
    ranks: int | None = None,
    must_know: bool = False,
) -> Draft:
    """Return a draft with all its numbers.

    Args:
        draft: The draft.
        nodes: The nodes of the pool, whose GPUs are counted if the numbers are not given.
        count: The number of nodes. Default: that of the draft, or 1.
        gpus: GPUs on each node. Default: that of the draft, or else one for each of the ``ranks``, or else the largest number
            that ``count`` nodes have. ``None`` if a node has an unknown number, or ``count`` nodes have too few.
        ranks: Processes on each node. Default: that of the draft, or one for each GPU, or 1.
        must_know: Whether an unknown number of processes is an error, for example of ``--nproc_per_node gpu`` with an unknown
            number of GPUs. Otherwise it becomes a note.

    Raises:
        InputError: if the number of processes must be known and is not.

    """
    count = count or draft.nodes or 1
    ranks = ranks or draft.ranks
    gpus = draft.gpus if gpus is None else gpus
    if gpus is None:
        known = sorted((one.gpus for one in nodes if one.gpus is not None), reverse=True)
        available = known[count - 1] if len(known) == len(nodes) and len(known) >= count else 0
        gpus = (ranks if ranks is not None and ranks <= available else available if ranks is None else 0) or None
    is_known = ranks is not None or not draft.ranks_written or (draft.ranks_written in ("gpu", "auto") and bool(gpus))
    if not is_known:
        option = "--nproc-per-node" if gpus or draft.ranks_written not in ("gpu", "auto") else "--gpus"
        message = f"the number of processes of `--nproc_per_node {draft.ranks_written}` is not known"
        if must_know:
            what = "GPUs" if option == "--gpus" else "processes"
            raise InputError(message, hint=f"give the number of {what} on each node: `{option} N`")
        note = f"{message}, so check the size of `ranks`, or give `{option} N` to `distflow init`"
        draft = replace(draft, notes=(*draft.notes, note))
    ranks = ranks or gpus or 1
    is_one = draft.launcher == "torchrun" and count * ranks == 1 and not draft.max_restarts
    # One process needs no launcher, so the script may also run without torch.
    return replace(draft, nodes=count, ranks=ranks, gpus=gpus, launcher="command" if is_one else draft.launcher)


# -- torchrun ---------------------------------------------------------------------------------------------------------

_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_SHORT = {"m": "module", "r": "redirects", "t": "tee"}
_SWITCHES = ("module", "no_python", "standalone", "run_path", "use_env", "virtual_local_rank")
_SET_BY_DISTFLOW = ("node_rank", "master_addr", "master_port", "standalone", "local_addr", "use_env")
"""Options of torchrun that distflow sets itself or that have no effect here, in addition to those that begin with ``rdzv``."""


def draft_torchrun(words: Sequence[str]) -> Draft | None:
    """Return the draft of a command that runs torchrun, or ``None`` for any other command. Raises ``InputError``."""
    rest = _after_torchrun(words)
    if rest is None:
        return None
    options, script = _split_options(rest)
    if not script:
        raise InputError(f"`{shlex.join(words)}` has no script", hint="write the script after the options of torchrun")
    if "no_python" in options or "run_path" in options:
        return Draft(name=name_of(words[0]), command=tuple(words))
    is_module = "module" in options
    command = ("python3", "-m", *script) if is_module else ("python3", *script)
    notes = [
        f"`--{name} {value}` of torchrun has no counterpart, so it is left out".replace(" `", "`")
        for name, value in options.items()
        if name not in ("nnodes", "nproc_per_node", "max_restarts", "module", *_SET_BY_DISTFLOW) and not name.startswith("rdzv")
    ]
    numbers: dict[str, int] = {}
    for name in ("nnodes", "nproc_per_node", "max_restarts"):
        value = options.get(name, "")
        least, _, most = value.partition(":")
        number = most or least
        if number.isascii() and number.isdigit():
            numbers[name] = int(number)
        elif value and name != "nproc_per_node":
            notes.append(f"`--{name} {value}` of torchrun is not a number, so it is left out")
        if name == "nnodes" and most and most != least:
            notes.append(f"`--nnodes {value}`: `elastic: {{min: {least}}}` in the group of a spec allows fewer nodes")
    name = script[0].rpartition(".")[2] if is_module else script[0]
    ranks = numbers.get("nproc_per_node")
    return Draft(
        name=name_of(name), command=command, launcher="torchrun", nodes=numbers.get("nnodes"), ranks=ranks,
        ranks_written=options.get("nproc_per_node", "") if ranks is None else "",
        max_restarts=numbers.get("max_restarts", 0), notes=tuple(notes),
    )  # fmt: skip


def _after_torchrun(words: Sequence[str]) -> list[str] | None:
    if words and os.path.basename(words[0]) == "torchrun":
        return list(words[1:])
    python = python_command(words)
    if isinstance(python, PythonCommand) and python.is_module and python.target in _TORCHRUN:
        return list(python.arguments)
    return None


def _split_options(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of torchrun, and the script with its arguments."""
    options: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.lstrip("-").partition("=")
        name = _SHORT.get(name, name).replace("-", "_")
        if not equals and name not in _SWITCHES and rest:
            value = rest.pop(0)
        options[name] = value
    return options, rest


# -- the spec as text -------------------------------------------------------------------------------------------------

_PLAIN = re.compile(r"-{0,2}[A-Za-z_./][A-Za-z0-9_./-]*")
_COLUMN = 32
"""The column at which comments begin."""
_LONG = 60
_RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})


def spec_text(draft: Draft, *, heading: Sequence[str] = ()) -> str:
    """Return a complete draft as a spec with comments. ``heading`` are lines for its first comment."""
    lines = [_comment("", line) for line in heading]
    if draft.notes:
        lines += ["#", "# Not translated, or different here:", *(_comment("* ", note) for note in draft.notes)]
    lines += ["workflow:", f"  name: {_scalar(draft.name)}"]
    if draft.exec_timeout:
        lines.append(_line(f"  timeout: {{exec_timeout: {draft.exec_timeout}}}", "the maximum time from start to end"))
    resources = dict(draft.resources) | ({} if draft.gpus is None else {"gpu": str(draft.gpus)})
    if resources:
        shown = ", ".join(f"{key}: {value}" for key, value in resources.items())
        lines += ["  resources:", _line(f"    default: {{{shown}}}", "of each node")]
    lines += ["  groups:", "  - name: training"]
    if draft.launcher != "command":
        kind = f"{{kind: {draft.launcher}, max_restarts: {draft.max_restarts}}}" if draft.max_restarts else draft.launcher
        lines.append(_line(f"    launcher: {kind}", "starts the processes of each node"))
    lines += [
        "    tasks:",
        "    - name: node",
        _line(f"      replicas: {draft.nodes}", "the number of nodes"),
        _line(f"      ranks: {{size: {draft.ranks}}}", "processes on each node, usually one for each GPU"),
        f"      command: [{', '.join(_scalar(word) for word in draft.command)}]",
    ]
    if draft.environment:
        lines += ["      environment:", *(f"        {name}: {_scalar(value)}" for name, value in draft.environment.items())]
    if draft.project is not None:
        exclude = f", exclude: [{', '.join(_scalar(one) for one in draft.exclude)}]" if draft.exclude else ""
        entry = f"      - {{path: ., localpath: {_scalar(draft.project)}{exclude}}}"
        lines += ["      files:", _line(entry, ".git and files that .gitignore lists are not sent either")]
    if draft.output_dir is not None:
        lines.append(_line(f"      output_dir: {_scalar(draft.output_dir)}", "files that are written there are the output"))
    return "\n".join(lines) + "\n"


def _comment(mark: str, text: str) -> str:
    """Return a text as one line of the comment at the top."""
    return f"# {mark}{_escaped(' '.join(text.split()))}"


def _line(text: str, comment: str) -> str:
    """Return a line with a comment at its end, or above it if the line is long."""
    if len(text) > _LONG:
        return f"{' ' * (len(text) - len(text.lstrip()))}# {comment}\n{text}"
    return f"{text:<{_COLUMN}} # {comment}"


def _scalar(text: str) -> str:
    """Return a text as a YAML scalar that is also valid in lists in brackets and in templates."""
    if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED:
        return text
    return _escaped(json.dumps(text, ensure_ascii=False))


def _escaped(text: str) -> str:
    """Return the text with ``{%`` and ``{#`` escaped for the template. Tokens such as ``{{output}}`` keep their meaning."""
    return text.replace("{%", "{{ '{%' }}").replace("{#", "{{ '{#' }}")
