"""Translate a script for Slurm's ``sbatch`` to the draft of a spec."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from distflow.client.spec_drafts.drafts import Draft, draft_command, draft_torchrun
from distflow.errors import InputError
from distflow.layout.claims.shell_commands import SHELLS, Command, Word, read_commands
from distflow.structs import replace

__all__ = ["draft_sbatch"]

_SHORT = MappingProxyType(
    {
        "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus", "t": "time", "J": "job-name", "p": "partition",
        "o": "output", "e": "error", "a": "array", "A": "account", "q": "qos", "w": "nodelist", "x": "exclude",
        "C": "constraint",        "d": "dependency", "D": "chdir", "i": "input", "L": "licenses",
    }
)  # fmt: skip
_SWITCHES = frozenset(
    {
        "exclusive", "requeue", "no-requeue", "overcommit", "oversubscribe", "label", "unbuffered", "kill-on-bad-exit", "pty",
        "overlap", "verbose", "quiet", "no-kill", "l", "u", "K", "v", "Q", "s", "O", "k", "H", "hold", "parsable",
        "wait-all-nodes",
    }
)  # fmt: skip
"""Options of sbatch and srun without a value."""
_TRANSLATED = frozenset(
    {
        "nodes", "ntasks", "ntasks-per-node", "gres", "gpus", "gpus-per-node", "gpus-per-task", "cpus-per-task", "mem", "time",
        "job-name",
    }
)  # fmt: skip
_ADVICE = MappingProxyType(
    {
        "partition": "choose a pool instead, with `--pool`",
        "output": "`distflow workflow logs` shows the output",
        "error": "`distflow workflow logs` shows the output",
        "array": "submit the spec once for each value, with `--set`",
        "nodelist": "name the machines in a hostfile or a pool",
        "exclude": "write `nodesExcluded: […]` into the resource",
        "dependency": "write the jobs as groups of one workflow, connected by `inputs`",
        "requeue": "write `exitActions` and `retry`",
        "chdir": "the command runs in a copy of the project",
        "exclusive": "a task gets the GPUs that it requests, and no other task gets them",
        "container-image": "write `image:` into the task",
        "export": "write variables into `environment`",
    }
)
_IS_SET = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "NNODES", "CUDA_VISIBLE_DEVICES"}
)
"""Variables that distflow sets itself."""
_SETUP = frozenset({"module", "ml", "source", ".", "conda", "mamba", "micromamba", "ulimit", "spack", "eval"})
_SILENT = frozenset(
    {
        "set",
        "echo",
        "printf",
        "hostname",
        "date",
        "nvidia-smi",
        "pwd",
        "scontrol",
        "tee",
        "wait",
        "env",
        "sleep",
        "head",
        "grep",
    }
)
_WRAPPERS = frozenset({"env", "exec", "nohup", "command", "time"})
"""Programs that start the command after them. They are left out if they have no options of their own."""
_KEYWORDS = frozenset({"done", "fi", "esac", "}", "[", "[[", "test", "true", ":"})
_FRAMEWORKS = MappingProxyType(
    {"accelerate": "accelerate", "deepspeed": "deepspeed", "horovodrun": "horovod", "mpirun": "mpi", "mpiexec": "mpi"}
)
_TORCHRUN = re.compile(r"\btorchrun\b|\btorch\.distributed\.(run|launch)\b")
_LAUNCHERS = re.compile(r"srun|torchrun|accelerate|deepspeed|mpirun|mpiexec|horovodrun|python[0-9.]*|.*\.(py|sh)")


@dataclass(slots=True)
class _Script:
    """The findings about a script, while it is read."""

    text: str
    options: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    launch: list[str] | None = None
    is_under_srun: bool = False
    shell_line: str = ""
    """The line of the ``bash -c`` whose commands are read; empty outside."""
    notes: list[str] = field(default_factory=list)


def draft_sbatch(text: str, *, folder: Path) -> Draft:
    """Return the draft of the job that a script for ``sbatch`` starts.

    Args:
        text: The script.
        folder: The directory of the project, to which paths of the script are relative.

    Raises:
        InputError: if the script starts no training, or if an ``#SBATCH`` line cannot be read.

    """
    script = _Script(text)
    for number, name, value in _directives(text):
        script.options[name] = value
        if name not in _TRANSLATED:
            shown = f"--{name}={value}" if value else f"--{name}"
            script.notes.append(f"line {number}: `#SBATCH {shown}`: {_ADVICE.get(name, 'distflow has no such option')}")
    _read_body(script)
    if script.launch is None:
        hint = (
            "distflow looks for a line with srun, torchrun, accelerate, mpirun or python; use `distflow init --command` instead"
        )
        raise InputError("the script does not start a training", hint=hint)
    draft = draft_command(script.launch, folder=folder, must_exist=False)
    unknown = sorted({name for word in draft.command for name in re.findall(r"\$\{?([A-Za-z_]\w*)", word)})
    if unknown:
        script.notes.append(f"variables in the command are not replaced, because no shell runs it: {', '.join(unknown)}")
    framework = _FRAMEWORKS.get(script.launch[0].rpartition("/")[2])
    if framework is not None:
        text = f"write `framework: {framework}` into the group, and only the script with its arguments into `command`"
        script.notes.append(f"{text}: distflow then starts it with the right ranks")
    setup = "; ".join(script.setup)
    if setup:
        script.notes.append(f"commands that prepare a node are options: --setup {shlex.quote(setup)}")
    return _with_numbers(replace(draft, setup=setup), script)


def _with_numbers(draft: Draft, script: _Script) -> Draft:
    """Return the draft with the resources that the options request."""
    options, notes = script.options, [*draft.notes, *script.notes]
    nodes = _number(options.get("nodes", "").partition("-")[0]) or draft.nodes or 1
    per_node = _per_node(options, nodes)
    gpus = _gpus(options, nodes)
    ranks = draft.ranks
    starts_ranks = draft_torchrun(script.launch or ()) is not None
    if draft.launcher == "torchrun" and script.is_under_srun and not starts_ranks:
        ranks = per_node
        notes.append("a script that reads SLURM_PROCID or SLURM_LOCALID must read RANK and LOCAL_RANK instead")
    elif script.is_under_srun and draft.launcher == "command" and per_node > 1:
        notes.append(f"srun started {per_node} processes on each node; here the command runs once on each node")
    if draft.launcher == "command" and any(_TORCHRUN.search(word) for word in draft.command):
        notes.append("the options of torchrun in the command are not translated: check `replicas` and `ranks`")
    resources = {}
    cpus = _number(options.get("cpus-per-task", ""))
    if cpus:
        resources["cpu"] = str(cpus * per_node)
    memory = options.get("mem", "")
    if re.fullmatch(r"[1-9][0-9]*[KMGT]?", memory):
        resources["memory"] = memory if memory[-1].isalpha() else f"{memory}M"
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", options.get("job-name", "")).strip("-_")
    return replace(
        draft, name=name if name[:1].isalpha() else draft.name, nodes=nodes, gpus=gpus,
        ranks=ranks or (None if gpus or draft.ranks_written else per_node),
        environment=script.environment, exec_timeout=_duration(options.get("time", ""), notes), resources=resources,
        notes=tuple(notes),
    )  # fmt: skip


def _gpus(options: Mapping[str, str], nodes: int) -> int | None:
    """Return the number of GPUs of each node, or ``None`` if no option says it."""
    for entry in options.get("gres", "").split(","):
        if entry.split(":")[0] == "gpu":
            return _number(entry.rpartition(":")[2]) or 1
    counts = {name: _number(options.get(name, "").rpartition(":")[2]) for name in ("gpus-per-node", "gpus-per-task", "gpus")}
    if counts["gpus-per-task"] is not None:
        return counts["gpus-per-task"] * _per_node(options, nodes)
    if counts["gpus"] is not None:
        return -(-counts["gpus"] // nodes)
    return counts["gpus-per-node"]


def _per_node(options: Mapping[str, str], nodes: int) -> int:
    given = _number(options.get("ntasks-per-node", ""))
    return given or -(-(_number(options.get("ntasks", "")) or nodes) // nodes)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _duration(text: str, notes: list[str]) -> str:
    """Return a time limit of Slurm (``1-12:00:00``, ``90``) as a duration of a spec; empty if there is none."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not found:
        if text:
            notes.append(f"the time limit `{text}` is not understood: write `timeout: {{exec_timeout: 2h}}`")
        return ""
    days, *rest = found.groups()
    first, second, third = (int(part) if part else 0 for part in rest)
    if days is not None or rest[2] is not None:
        seconds = int(days or 0) * 86400 + first * 3600 + second * 60 + third
    else:
        seconds = first * 60 + second  # minutes, or minutes and seconds
    unit, size = ("h", 3600) if seconds % 3600 == 0 else ("m", 60) if seconds % 60 == 0 else ("s", 1)
    return f"{seconds // size}{unit}" if seconds else ""


def _directives(text: str) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("#SBATCH"):
            continue
        try:
            words = shlex.split(line[len("#SBATCH") :], comments=True)
        except ValueError:
            raise InputError(f"line {number}: a quote is not closed: {line}") from None
        yield from ((number, name, value) for name, value in _split_options(words)[0])


def _split_options(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the options at the beginning of ``words``, and the words after them."""
    found: list[tuple[str, str]] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, value = _SHORT.get(word[1:2], word[1:2]), word[2:].removeprefix("=")
            equals = value
        if not equals and name not in _SWITCHES and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        found.append((name, value))
    return found, rest[1:] if rest[:1] == ["--"] else rest


# -- the commands of the script ---------------------------------------------------------------------------------------


def _read_body(script: _Script) -> None:
    _read_commands(script, read_commands(script.text), _slurm_variables(script.options))


def _read_commands(script: _Script, commands: Sequence[Command], variables: dict[str, str | None]) -> None:
    exported = {name for line in re.findall(r"\bexport\s+(.*)", script.text) for name in re.findall(r"([A-Za-z_]\w*)=", line)}
    for command in commands:
        for written, word in command.assignments:
            name, value = word.value_of(written, variables)
            variables[name] = value
            if (name in exported or command.words) and name not in _IS_SET:
                _export(script, name, value, word)
        if command.words:
            _read_command(script, command, variables)


def _export(script: _Script, name: str, value: str | None, word: Word) -> None:
    if value is not None:
        script.environment[name] = value
    else:
        script.notes.append(f"{_line_of(script, word)}: `{name}={word.raw}`: only a shell can compute this value")


def _line_of(script: _Script, word: Word) -> str:
    return script.shell_line or f"line {script.text.count(chr(10), 0, word.offset) + 1}"


def _slurm_variables(options: Mapping[str, str]) -> dict[str, str | None]:
    nodes = options.get("nodes", "1").partition("-")[0]
    per_node, gpus = _per_node(options, _number(nodes) or 1), _gpus(options, _number(nodes) or 1)
    return {
        "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_GPUS_ON_NODE": str(gpus) if gpus else None, "SLURM_GPUS_PER_NODE": str(gpus) if gpus else None,
        "SLURM_CPUS_PER_TASK": options.get("cpus-per-task"), "SLURM_JOB_NAME": options.get("job-name"),
        "SLURM_JOB_ID": "{{workflow_id}}", "SLURM_JOBID": "{{workflow_id}}", "SLURM_NODEID": "{{node_rank}}",
        "SLURM_SUBMIT_DIR": ".",
    }  # fmt: skip


def _read_command(script: _Script, command: Command, variables: dict[str, str | None]) -> None:
    program, raw = command.program, " ".join(word.raw for word in command.words)
    if program in _SETUP:
        script.setup.append(raw)
    elif _LAUNCHERS.fullmatch(program) and script.launch is None:
        _read_launch(script, _expanded(command, variables), _line_of(script, command.words[0]), variables)
    elif program == "cd" and raw.strip("\"'").endswith("SLURM_SUBMIT_DIR"):
        pass
    elif program not in _SILENT | _KEYWORDS:
        script.notes.append(f"{_line_of(script, command.words[0])}: `{raw[:100]}`: only one command is translated")


def _expanded(command: Command, variables: Mapping[str, str | None]) -> list[str]:
    words = [one for word in command.words for one in word.divided(variables)]
    values = [(one.expanded(variables), one.raw) for one in words]
    return [raw.strip('"') if value is None else value for value, raw in values]


def _read_launch(script: _Script, words: list[str], line: str, variables: dict[str, str | None]) -> None:
    if words[0].rpartition("/")[2] == "srun":
        script.is_under_srun = True
        options, words = _split_options(words[1:])
        for name, value in options:
            if name in _TRANSLATED:
                script.options[name] = value
            elif name not in _SWITCHES:
                script.notes.append(f"`srun --{name}={value}`: {_ADVICE.get(name, 'distflow has no such option')}")
    if len(words) > 1 and words[0] in _WRAPPERS and not words[1].startswith("-"):
        words = words[1:]
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL):
        name, _, value = words.pop(0).partition("=")
        if "$" in value:
            script.notes.append(f"{line}: `{name}={value}`: only a shell can compute this value")
        elif name not in _IS_SET:
            script.environment[name] = value
    is_shell = bool(words) and words[0].rpartition("/")[2] in SHELLS
    at = next((number for number, word in enumerate(words[1:-1], 1) if re.fullmatch(r"-[a-z]*c", word)), 0) if is_shell else 0
    commands = read_commands(words[at + 1]) if at else ()
    if any(_LAUNCHERS.fullmatch(command.program) for command in commands):
        before, script.shell_line = script.shell_line, line
        _read_commands(script, commands, dict(variables))
        script.shell_line = before
    else:
        script.launch = words or None
